"""Figure 9: strong scaling. What was measured, and beyond it what the cost model says, apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.units import KIB
from prunex_mpi.research.figures.beside import NONE, Beside, Drawn, differing, value_of
from prunex_mpi.research.figures.run_figures import lacking, ranks_of
from prunex_mpi.run.cost import Exchange, Link, exchange_s, kernels_of
from prunex_mpi.settings.fields import FIELDS, OF_THE_JOB, PAYLOADS, key_of
from prunex_mpi.settings.methods import PER_STEP
from prunex_mpi.tools.drawing import legend_above, look_of, marker_of, new_figure, plain
from prunex_mpi.tools.report.read_runs import Run, read_layers

PAPER = {"prunex": "6.75 on 8 times as many GPUs", "dense": "5.81", "topk": "3.71"}
# The model goes on for so many times the most ranks that were measured.
BEYOND = 16
# Of a value in a message.
BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int8sum": 8, "int4": 4, "int2": 2}
OTHERS = ("intra", "project", "dual", "setup")
# What runs of one curve may differ in: how long they are, where their stages lie, what goes with
# the number of ranks, and what changes no work.
OF_ONE_CURVE = (
    *OF_THE_JOB,
    *("preset", "method", "model", "dataset", "seed", "init_from", "init_digest"),
    *("teacher_digest", "outer_iterations", "local_epochs", "local_steps", "frozen_local_steps"),
    *("comm_share", "batch_size", "accumulate", "lr", "lr_schedule", "lr_warmup", "lr_final"),
    *("lr_restart", "lr_scaling", "image_mean", "image_std", "normalise_samples", "test_samples"),
    *("warmup_iterations", "keep_ramp_iterations", "freeze_iteration", "prune_iteration"),
    *("dgc_warmup_epochs", "reconfigure_every", "evaluate_every"),
    *("ranks_per_node", "leaders_per_node"),
)
TOLD_APART = tuple(key_of(name) for name in FIELDS if name not in OF_ONE_CURVE)


@dataclass(frozen=True)
class Measured:
    """A run: its ranks and nodes, the work of an outer iteration, its median seconds by phase."""

    run: Run
    ranks: int
    nodes: int
    work: float
    seconds: dict[str, float]

    @property
    def rate(self) -> float:
        """Work per second of training."""
        return self.work / sum(self.seconds.values())


def scaling(runs: Sequence[Run], link_gbit: float, latency_us: float, copy_gbs: float) -> Drawn:
    """Draw figure 9 from runs with different numbers of ranks; with a link also the model."""
    found = {
        name: sorted(map(measure, some), key=lambda p: p.ranks)
        for name, some in curves(runs).items()
    }
    series = {
        name: points for name, points in found.items() if len({point.ranks for point in points}) > 1
    }
    if not series:
        raise UserError(
            "figure 9 needs runs of one method and of one work with different numbers of ranks; "
            f"these are {'; '.join(found)}"
        )
    figure = new_figure(4.0)
    panel = figure.subplots()
    rows, farthest = [], 1.0
    for number, (name, points) in enumerate(series.items()):
        base = points[0]
        # The best of runs with as many ranks.
        best = {p.ranks: max(q.rate for q in points if q.ranks == p.ranks) for p in points}
        unit = best[base.ranks]
        x = np.array(sorted(best)) / base.ranks
        y = np.array([best[ranks] / unit for ranks in sorted(best)])
        look = look_of(number)
        panel.plot(
            x, y, marker=marker_of(number), label=plain(f"{name}, measured"), **look, markersize=6
        )
        farthest = max(farthest, x[-1])
        method = str(base.run.setting("method"))
        rows.append(
            Beside(
                name,
                f"{y[-1]:.2f} on {x[-1]:g} times as many ranks ({base.ranks} to {max(best)})",
                PAPER.get(method, NONE),
                "other machines and links, and fewer ranks" if method in PAPER else "",
            )
        )
        if link_gbit:
            many = np.array([2**i for i in range(int(np.log2(x[-1] * BEYOND)) + 1)])
            link = Link(link_gbit, latency_us)
            times = [modelled_s(base, link, copy_gbs, int(k)) for k in many]
            speed = sum(base.seconds.values()) / np.array(times)
            panel.plot(
                many,
                speed,
                color=look["color"],
                linestyle=(0, (1, 2)),
                marker=marker_of(number),
                markerfacecolor="white",
                markersize=4,
                linewidth=1,
                label=plain(f"{name}, modelled"),
            )
            rows.append(Beside(f"{name}, modelled", f"{speed[-1]:.2f} on {many[-1]} times as many"))
            farthest = max(farthest, float(many[-1]))
    ideal = np.array([1, farthest])
    panel.plot(ideal, ideal, color="#888888", linewidth=0.8, label="ideal")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xlabel("times as many ranks as the smallest run of the method")
    panel.set_ylabel("times as fast")
    legend_above(panel, 2)
    return Drawn(figure, rows, notes(link_gbit, latency_us))


def notes(link_gbit: float, latency_us: float) -> list[str]:
    """Say what was measured and what was modelled."""
    text = ["Filled, measured: work per second of training, medians of outer iterations."]
    if not link_gbit:
        return [*text, "Nothing is modelled: --link-gbit gives the rate between nodes."]
    return [
        *text,
        "Hollow, modelled: local steps shared out over the ranks, the other phases as in the "
        f"smallest run, the exchange by run/cost.py for {link_gbit:g} Gbit/s and {latency_us:g} us "
        "a message.",
    ]


def curves(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each curve, by what tells them from those of others."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(series_of(run), []).append(run)
    found: dict[str, list[Run]] = {}
    for name, some in alike.items():
        apart = differing(some, TOLD_APART)
        for run in some:
            own = [f"{key} {value_of(run, key)}" for key in apart]
            found.setdefault(", ".join([name, *own]), []).append(run)
    return found


def series_of(run: Run) -> str:
    """Return what runs of one curve have in common: their work is counted in the same unit."""
    what = [str(run.setting(key, "")) for key in ("method", "model", "dataset")]
    if run.setting("local-steps", 0):
        what.append("by steps")
    return " ".join(filter(None, what))


def measure(run: Run) -> Measured:
    """Return a run as a point of its curve; raise UserError where it lacks what that takes."""
    ranks = ranks_of(run)
    if not ranks:
        raise lacking("9", run, "a number of ranks (it is not complete)")
    if not run.has("seconds.local"):
        raise lacking("9", run, "seconds by phase")
    # The first outer iteration warms caches up.
    rest = slice(1, None) if len(run.iterations) > 1 else slice(None)
    seconds = {
        phase: float(np.median(np.nan_to_num(run.column(f"seconds.{phase}"))[rest]))
        for phase in ("local", "inter", *OTHERS)
    }
    nodes = len(run.sizes()) or 1
    return Measured(run, ranks, nodes, work_of(run, ranks), seconds)


def work_of(run: Run, ranks: int) -> float:
    """Return the work of an outer iteration: epochs, or images where steps are counted.

    Raises UserError where neither is known.
    """
    try:
        steps = int(run.setting("local-steps", 0))
        if steps > 0:
            return float(steps * ranks * int(run.setting("batch-size")))
        return float(Fraction(str(run.setting("local-epochs"))))
    except (TypeError, ValueError, ZeroDivisionError):
        raise lacking("9", run, "local-epochs or local-steps in its config.toml") from None


def modelled_s(base: Measured, link: Link, copy_gbs: float, times: int) -> float:
    """Return the seconds of the same work on so many times as many ranks and nodes."""
    run, nodes = base.run, base.nodes * times
    payload = str(run.setting("payload", "fp32"))
    payload = payload if payload in PAYLOADS else "fp32"
    message = float(np.nan_to_num(run.column("bytes.payload"))[-1])
    model = float(np.nan_to_num(run.column("bytes.dense"))[-1])
    if str(run.setting("method")) in PER_STEP:
        # As many images in fewer steps, each of which sends as much.
        message, model = message / times, model / times
    pieces = read_layers(run.path, [int(run.iterations[-1])])
    bucket = max(1.0, float(run.setting("piece-kib", 60) or 60) * KIB * nodes)
    buckets = max(1, round(message / bucket))
    exchange = Exchange(
        nodes,
        round(message),
        buckets if payload == "fp32" else 0,
        0 if payload == "fp32" else buckets,
        values_bytes=round(message * BITS["fp32"] / BITS[payload]),
        model_bytes=round(model),
        pieces=0 if pieces is None else len(pieces.names),
    )
    others = sum(base.seconds[phase] for phase in OTHERS)
    between = exchange_s(link, kernels_of(payload, copy_gbs), exchange) if nodes > 1 else 0.0
    return base.seconds["local"] / times + others + between
