"""Forecast what a run would hand to MPI, without training: `--dry-run`."""

from dataclasses import dataclass

import numpy as np
import torch

from prunex_mpi.base.tables import Cell, Table, format_lines, format_table
from prunex_mpi.base.units import MIB, ring_bytes
from prunex_mpi.comm.collectives import between_nodes, build_transport
from prunex_mpi.comm.topology import Topology
from prunex_mpi.config.cli import shown
from prunex_mpi.config.resolve import ESTIMATED, flat_values, make, toml_key
from prunex_mpi.core.grouping import make_groups
from prunex_mpi.core.loading import CPU, find_inputs
from prunex_mpi.core.losses import find_losses
from prunex_mpi.core.message import STATISTICS, message_bytes
from prunex_mpi.core.problem import make_model
from prunex_mpi.core.schedule import quadratic_rounds, strictness
from prunex_mpi.core.state import find_stats_groups, kept_stats
from prunex_mpi.core.sums import BLOCK, MOST_SUMMED, SUMMED, coded_bytes
from prunex_mpi.data.datasets import NOTHING_KNOWN
from prunex_mpi.data.image_files import Known
from prunex_mpi.methods.exchanges import code_of
from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import Layout, build_layout
from prunex_mpi.pruning.compaction import Plan, build_plan, cut_plan
from prunex_mpi.pruning.groups import Groups, out_of_reach
from prunex_mpi.pruning.masks import kept_numel
from prunex_mpi.pruning.projection import select
from prunex_mpi.run.cost import (
    Exchange,
    Link,
    bound_s,
    exchange_s,
    kernels_of,
    packing_s,
    sent_bytes,
    share,
)
from prunex_mpi.run.pretrained import check_initial
from prunex_mpi.run.tuning import LATEST
from prunex_mpi.settings.fields import PAYLOADS, Estimate, Settings, known_freeze
from prunex_mpi.settings.values import AUTO

# GB/s of copies where --copy-gbs does not say it: one core of a CPU, a GPU's memory.
COPY_GBS = {"cpu": 7.0, "cuda": 1000.0}


def dry_run(settings: Settings, topology: Topology, known: Known = NOTHING_KNOWN) -> str:
    """Return the settings and the payload per outer iteration, or per step, without training.

    Exact for one kind of group under `vote`; for compositions and before the freeze under `or` the
    masks decide, and the text says so. `known` is what ranks have read of the data set already. No
    communication.
    """
    return f"{forecast(settings, topology, known)}\n\n{differing_settings(settings)}"


def differing_settings(settings: Settings) -> str:
    """Return the resolved settings that differ from those of the preset, one per line."""
    preset, method = settings.preset, settings.method
    usual = flat_values(make(preset, method=method.name))
    values = flat_values(settings)
    table = [
        (toml_key(name), shown(name, value))
        for name, value in values.items()
        if value != usual[name] and name not in (*ESTIMATED, "dry_run")
    ]
    title = f"Settings beside those of preset {preset} for method {method.name}"
    return f"{title}:\n{format_lines(table)}" if table else f"{title}: none."


def forecast(settings: Settings, topology: Topology, known: Known) -> str:
    """Return the payload per outer iteration, or per step, and over the run."""
    inputs = find_inputs(settings, known)
    model = make_model(settings, inputs)
    find_losses(settings, inputs.classes, CPU)
    if settings.init_from and topology.world.rank == 0:
        check_initial(settings, model, inputs)
    layout = build_layout(model)
    parameter = next(model.parameters())
    bn_modules = batchnorm.find(model)
    size, statistics = parameter.element_size(), batchnorm.numel(bn_modules)
    groups = make_groups(settings, model, layout, inputs)
    if settings.method.per_step:
        return _dry_run_per_step(settings, topology, layout, size, statistics)
    if settings.method.own_format:
        return _dry_run_sparse(settings, topology, layout, size, statistics)
    stats_groups = find_stats_groups(model, bn_modules, layout, groups)

    def planned(strict: float) -> tuple[Plan, int]:
        mask = nominal_mask(groups, strict, settings.round_to)
        if settings.method.flat:
            mask[:] = True
        plan = build_plan(layout, groups, mask, parameter.device)
        return plan, kept_stats(mask, stats_groups).size

    def travelling(strict: float) -> Travelling:
        return travelling_under(*planned(strict), layout, size)

    warmup, ramp = settings.warmup_iterations, settings.keep_ramp_iterations
    if settings.method.local_sgd:
        # None of them but one-shot prunes.
        warmup, ramp = getattr(settings.options, "prune_iteration", 1) - 1, 0
    count = _rounds(settings)[0]
    run = [strictness(k, warmup, ramp) for k in exchanges_in(settings, count)]
    travels = {s: travelling(s) for s in {0.0, 1.0, *run}}
    payloads = {s: t.bytes(settings.payload) for s, t in travels.items()}
    total = sum(payloads[s] for s in run)
    dense = (layout.numel + statistics) * size
    model_row, topology_row = _what_runs(settings, topology, layout, statistics)
    sizes = dense, payloads[0.0], payloads[1.0]
    payload_rows = _payload_rows(settings, groups, sizes, total, len(run))
    rows = [model_row, topology_row, *payload_rows]
    if groups.total:
        kept = sum(kept_numel(nominal_mask(groups, 1.0, settings.round_to), groups))
        rows.insert(1, ("groups", f"{' then '.join(settings.groups)}, {groups.total:,} groups"))
        rows.insert(3, ("prunable weights kept", f"{kept:,} of {groups.prunable_numel:,}"))
        rows += [("not pruned", text) for text in groups.excluded]
        if line := out_of_reach(groups, layout.numel):
            rows.append(("warning", line))
    if topology.racks:
        between = ring_bytes(topology.num_peers, payloads[1.0])
        what = " at the keep ratio" if groups.total else ""
        rows.append((f"sent by a rack per outer iteration{what}", _size_of(between)))
    if settings.fragments > 1:
        rows.append(("parts", _parts(settings, *planned(1.0), size)))
    text = format_lines(rows)
    if settings.estimate and settings.estimate.link_gbit:
        table = cost_table(settings, settings.estimate, travels[1.0])
        text = f"{text}\n\n{format_table(table)}"
    return text


def exchanges_in(settings: Settings, outer: int) -> list[int]:
    """Return the outer iterations of a run that exchange between nodes, `outer` being all."""
    every = getattr(settings.options, "t_sync", 1)
    needed = (outer, known_freeze(settings))
    return [k for k in range(1, outer + 1) if k % every == 0 or k in needed]


def _payload_rows(
    settings: Settings, groups: Groups, sizes: tuple[int, int, int], total: int, exchanges: int
) -> list[tuple[str, str]]:
    """Return what a leader hands over in phase 4, from bytes.

    Of the `sizes` the first is the whole model as it is; the others, in the format of the payload,
    are one outer iteration's before and after the keep ratio falls. `total` is that of all
    `exchanges` of the run.
    """
    (dense, first, final), outer = sizes, exchanges
    _, many = _rounds(settings)
    if exchanges < settings.outer_iterations and getattr(settings.options, "t_sync", 1) > 1:
        many = f"{exchanges} exchanges in {many}"
    quality = _quality(settings, groups)
    each, over_the_run = "payload per outer iteration", f"payload over {many}"
    whole = _size_of(dense)
    whole_run = _size_of(dense * outer)
    if settings.payload == "fp32":
        if not groups.total:
            return [(f"{each}, dense", whole), (over_the_run, _size_of(total))]
        return [
            (f"dense {each}", whole),
            (f"{each} at the keep ratio", f"{_share_of(final, dense)} of dense{quality}"),
            (over_the_run, f"{_size_of(total)}, dense {whole_run}{quality}"),
        ]
    rows = [
        (f"dense {each}, fp32", whole),
        ("payload", f"{settings.payload} between two or more nodes, scales included"),
        (f"{each}, dense", f"{_share_of(first, dense)} of fp32"),
        (f"{each} at the keep ratio", f"{_share_of(final, dense)} of dense fp32{quality}"),
        (over_the_run, f"{_share_of(total, dense * outer)} of dense fp32, {whole_run}{quality}"),
    ]
    return rows if groups.total else [*rows[:3], rows[4]]


def _parts(settings: Settings, plan: Plan, statistics: int, size: int) -> str:
    """Return how the message leaves in parts: the peak of the link."""
    count = settings.fragments
    sizes = [int(part.numel) for _, _, part in cut_plan(plan, count, BLOCK)]
    carried = [0] * (count - 1) + [statistics]
    largest = max(
        message_bytes(settings.payload, numel, extra, size)
        for numel, extra in zip(sizes, carried, strict=True)
    )
    steps = settings.local_steps
    distance = f"every {steps / count:g} local steps" if steps else f"{count} times per interval"
    once = ", once the masks are frozen" if settings.method.consensus else ""
    return f"{count}, one {distance}{once}: {_size_of(largest)} at most; all at once at the end"


def _rounds(settings: Settings) -> tuple[int, str]:
    """Return how many outer iterations there are, and as a text with what is left open.

    Where the interval follows from the learning rate, the steps must be known.
    """
    outer = settings.outer_iterations
    if settings.local_steps == AUTO:
        return outer, f"{outer} outer iterations as asked; auto chooses another number"
    if settings.method.quadratic_interval:
        if settings.local_steps <= 0:
            return outer, f"at most {outer} outer iterations"
        outer = quadratic_rounds(settings, settings.local_steps)
    return outer, f"{outer} outer iterations"


def _dry_run_sparse(
    settings: Settings, topology: Topology, layout: Layout, size: int, statistics: int
) -> str:
    """Return what a leader hands over where a few values of many travel."""
    module = code_of(settings.method)
    each, how = module.payload(settings, layout, size, statistics)
    dense, outer = (layout.numel + statistics) * size, settings.outer_iterations
    whole_run = _size_of(dense * outer)
    rows = [
        *_what_runs(settings, topology, layout, statistics),
        ("dense payload per outer iteration", _size_of(dense)),
        ("payload per outer iteration", f"{_share_of(each, dense)} of dense ({how})"),
        (
            f"payload over {outer} outer iterations",
            f"{_share_of(each * outer, dense * outer)} of dense, {whole_run}",
        ),
        *_messages(module.OPERATIONS),
    ]
    return format_lines(rows)


def _messages(operations: tuple[tuple[str, str, str, str], ...]) -> list[tuple[str, str]]:
    return [
        ("message", f"{what}: {operation} over {comm}, {operand}")
        for what, comm, operation, operand in operations
    ]


def _quality(settings: Settings, groups: Groups) -> str:
    """Return, in brackets, in what the figures may differ from those of a run."""
    caveats = []
    if len(groups.kinds) > 1:
        caveats.append("less, where the groups of a composition overlap")
    if settings.keep_by != "groups":
        caveats.append("about, since trained scores decide how the budget is spent")
    shrinking = settings.method.consensus and not settings.method.flat
    if shrinking and "pattern" in settings.groups and settings.keep_ramp_iterations > 1:
        caveats.append("about while the keep ratio falls, since two patterns share 1 or 2 weights")
    if shrinking and settings.mask_agreement == "or":
        caveats.append("more before the freeze, since a union of masks may hold more groups")
    return f" ({'; '.join(caveats)})" if caveats and groups.total else ""


def _dry_run_per_step(
    settings: Settings, topology: Topology, layout: Layout, size: int, statistics: int
) -> str:
    """Return what one step hands over; how many steps there are depends on the data."""
    module = code_of(settings.method)
    workers = topology.world_size if settings.aggregation == "flat" else topology.num_nodes
    payload, how = module.payload(settings, layout, size, workers)
    rows = [
        *_what_runs(settings, topology, layout, statistics),
        ("dense payload per step", _size_of(layout.numel * size)),
        ("payload per step", f"{_size_of(payload)} ({how})"),
        *_messages(module.OPERATIONS),
        ("statistics per outer iteration", _size_of(statistics * size)),
    ]
    return format_lines(rows)


def _what_runs(
    settings: Settings, topology: Topology, layout: Layout, statistics: int
) -> list[tuple[str, str]]:
    nodes = f"{topology.num_nodes} nodes of {list(topology.node_sizes)} ranks"
    if topology.racks:
        nodes += f", racks of {list(topology.racks.sizes)} nodes"
    return [
        ("model", f"{settings.model}, {layout.numel:,} parameters, {statistics:,} statistics"),
        ("topology", nodes),
    ]


def _share_of(nbytes: int, whole: int) -> str:
    return f"{_size_of(nbytes)}, {100 * nbytes / whole:.1f} %"


def _size_of(nbytes: int) -> str:
    return f"{nbytes:,} B ({nbytes / MIB:.2f} MiB)"


def nominal_mask(groups: Groups, strict: float, round_to: int) -> np.ndarray:
    """Keep the first alpha groups of every selection: any mask of the same sizes travels alike."""
    mask = np.zeros(groups.total, dtype=bool)
    for selections in groups.kinds:
        start, stop = selections[0].start, selections[-1].stop
        # Within a budget the sets are cut alike, which trained scores need not do.
        scores = np.concatenate(
            [np.tile(1 - np.arange(s.count) / s.count, s.selections) for s in selections]
        )
        mask[start:stop] = select(scores, selections, strict, round_to, groups)
    return mask


@dataclass(frozen=True)
class Travelling:
    """What goes into a message: `parameters` of `model` and `statistics`, of `size` bytes each.

    `pieces` is the number of pieces of the packing plan.
    """

    parameters: int
    statistics: int
    model: int
    size: int
    pieces: int

    def bytes(self, payload: str) -> int:
        """Return the bytes of a message between two or more nodes."""
        return message_bytes(payload, self.parameters, self.statistics, self.size)


def travelling_under(plan: Plan, statistics: int, layout: Layout, size: int) -> Travelling:
    """Return what a packing plan sends, with the number of BatchNorm statistics."""
    return Travelling(plan.numel, statistics, layout.numel, size, len(plan.pieces))


def exchange_of(payload: str, what: Travelling, nodes: int, bucket_bytes: int) -> Exchange:
    """Return what phase 4 exchanges between `nodes` leaders."""
    whole = what.bytes(payload)
    last = 0 if payload == "fp32" else coded_bytes(STATISTICS, what.statistics, what.size)
    # Statistics are a vector of their own, unless everything travels as it is.
    buckets, gatherings = -(-(whole - last) // bucket_bytes), -(-last // bucket_bytes)
    reductions = 0
    if payload == "fp32":
        reductions = buckets
    elif payload == SUMMED:
        # Of maxima, then of integers.
        reductions = 2 * buckets
    else:
        gatherings += buckets
    return Exchange(
        nodes,
        whole,
        reductions,
        gatherings,
        values_bytes=4 * (what.parameters + what.statistics),
        model_bytes=4 * what.model,
        pieces=what.pieces,
    )


def cost_table(settings: Settings, asked: Estimate, what: Travelling) -> Table:
    """Return what each payload costs at the keep ratio, with each number of nodes."""
    link = Link(asked.link_gbit, asked.latency_us)
    kind = settings.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    copy_gbs = asked.copy_gbs or COPY_GBS[kind]
    step_s, steps = asked.step_ms / 1e3, settings.local_steps
    # `auto` takes the fewest steps that hide the exchange, at most these.
    behind = steps // LATEST if settings.overlap_steps == AUTO else settings.overlap_steps
    transport = build_transport(CPU, settings.bucket_mib, "host", settings.piece_kib)
    rows: list[tuple[Cell, ...]] = []
    for payload in PAYLOADS:
        for nodes in asked.nodes:
            if payload == SUMMED and nodes > MOST_SUMMED:
                rows.append((payload, nodes, *[None] * (4 + bool(step_s))))
                continue
            pieces = between_nodes(transport, nodes).bucket_bytes
            exchange = exchange_of(payload, what, nodes, pieces)
            kernels = kernels_of(payload, copy_gbs)
            row = (payload, nodes, round(sent_bytes(exchange)), bound_s(link, exchange))
            row += (packing_s(kernels, exchange), exchange_s(link, kernels, exchange))
            if step_s:
                waited_for = exchange_s(link, kernels, exchange, behind * step_s)
                row = (*row, 100 * share(waited_for, steps * step_s))
            rows.append(row)
    columns = ("payload", "nodes", "bytes sent", "bound s", "pack s", "exchange s")
    notes = [
        *(["nodes: with --rack-of racks"] if settings.rack_of else []),
        "bytes sent: by a node per outer iteration, 2 (M - 1)/M of its message between M nodes",
        "bound: these bytes over the link; pack: what is done before they are sent and after",
        "exchange: bound, pack, latencies and codes",
    ]
    if None in (row[2] for row in rows):
        notes.append(f"-: {SUMMED} is for up to {MOST_SUMMED} nodes")
    if step_s:
        columns = (*columns, "share %")
        hidden = f", {behind} of which hide what goes between nodes" if behind else ""
        notes.append(
            f"share: of an outer iteration with {steps} local steps of {asked.step_ms:g} ms{hidden}"
        )
    pruned = " at the keep ratio" if settings.method.prunes_groups else ""
    return Table(
        f"Exchange{pruned}: {asked.link_gbit:g} Gbit/s, {asked.latency_us:g} us a message, "
        f"copies of {copy_gbs:g} GB/s ({kind}), pieces of {settings.piece_kib} KiB for each node",
        columns,
        tuple(rows),
        tuple(notes),
    )
