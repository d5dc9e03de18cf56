"""Forecast what a run would hand to MPI, without training: `--dry-run`."""

import numpy as np

from prunex_mpi.base.tables import format_lines
from prunex_mpi.base.units import MIB, ring_bytes
from prunex_mpi.comm.topology import Topology
from prunex_mpi.config.cli import shown
from prunex_mpi.config.resolve import flat_values, make, toml_key
from prunex_mpi.core.mask_choice import try_groups
from prunex_mpi.core.message import message_bytes
from prunex_mpi.core.schedule import quadratic_rounds, schedule_progress
from prunex_mpi.core.state import find_stats_groups, kept_stats
from prunex_mpi.core.task import find_losses
from prunex_mpi.data.request import NOTHING_KNOWN, Known, Request
from prunex_mpi.methods.exchanges import exchange_of
from prunex_mpi.models import batchnorm
from prunex_mpi.models.layout import Layout, build_layout
from prunex_mpi.pruning.groups import Groups, out_of_reach
from prunex_mpi.pruning.masks import count_kept, kept_numel
from prunex_mpi.pruning.projection import select
from prunex_mpi.run.pretrained import check_initial
from prunex_mpi.run.problem import CPU, find_inputs, make_model
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.values import AUTO


def dry_run(settings: Settings, topology: Topology, known: Known = NOTHING_KNOWN) -> str:
    """Return the settings and the payload per outer iteration, or per step, without training.

    Exact but where trained masks decide, which the text says. `known` is what ranks have read of
    the data set already. No communication.
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
        if value != usual[name] and name != "dry_run"
    ]
    title = f"Settings beside those of preset {preset} for method {method.name}"
    return f"{title}:\n{format_lines(table)}" if table else f"{title}: none."


def forecast(settings: Settings, topology: Topology, known: Known) -> str:
    """Return the payload per outer iteration, or per step, and over the run."""
    inputs = find_inputs(Request.of(settings), known)
    model = make_model(settings, inputs)
    find_losses(settings, inputs.classes, CPU)
    if settings.init_from and topology.world.rank == 0:
        check_initial(settings, model, inputs)
    layout = build_layout(model)
    parameter = next(model.parameters())
    bn_modules = batchnorm.find(model)
    size, statistics = parameter.element_size(), batchnorm.numel(bn_modules)
    groups = try_groups(settings, model, layout, inputs)
    if settings.method.per_step or settings.method.own_exchange:
        return _of_own_exchange(settings, topology, layout, size, statistics)
    stats_groups = find_stats_groups(model, bn_modules, layout, groups)

    def planned(strict: float) -> tuple[int, int]:
        mask = nominal_mask(groups, strict)
        if settings.method.flat:
            mask[:] = True
        return count_kept(layout, groups, mask), kept_stats(mask, stats_groups).size

    def message(strict: float) -> int:
        # In fragments it has as many bytes: these end where blocks do.
        return message_bytes(settings.payload, *planned(strict), size)

    warmup, ramp = settings.warmup_iterations, settings.keep_ramp_iterations
    if settings.method.local_sgd:
        # None of them but one-shot prunes.
        warmup, ramp = getattr(settings.options, "prune_iteration", 1) - 1, 0
    run = [schedule_progress(k, warmup, ramp) for k in range(1, _rounds(settings)[0] + 1)]
    payloads = {strict: message(strict) for strict in {0.0, 1.0, *run}}
    total = sum(payloads[strict] for strict in run)
    dense = (layout.numel + statistics) * size
    model_row, topology_row = _what_runs(settings, topology, layout, statistics)
    sizes = dense, payloads[0.0], payloads[1.0]
    payload_rows = _payload_rows(settings, groups, sizes, total, len(run))
    rows = [model_row, topology_row, *payload_rows]
    if groups.total:
        kept = sum(kept_numel(nominal_mask(groups, 1.0), groups))
        rows.insert(1, ("groups", f"{' then '.join(settings.groups)}, {groups.total:,} groups"))
        rows.insert(3, ("prunable weights kept", f"{kept:,} of {groups.prunable_numel:,}"))
        rows += [("not pruned", text) for text in groups.excluded]
        if line := out_of_reach(groups, layout.numel):
            rows.append(("warning", line))
    if topology.racks:
        between = ring_bytes(topology.num_peers, payloads[1.0])
        what = " at the keep ratio" if groups.total else ""
        rows.append((f"sent by a rack per outer iteration{what}", _size_of(between)))
    return format_lines(rows)


def _payload_rows(
    settings: Settings, groups: Groups, sizes: tuple[int, int, int], total: int, outer: int
) -> list[tuple[str, str]]:
    """Return what a leader hands over in phase 4, from bytes.

    Of the `sizes` the first is the whole model as it is; the others, in the format of the payload,
    are one outer iteration's before and after the keep ratio falls. `total` is that of all `outer`
    iterations.
    """
    dense, first, final = sizes
    each, about = "payload per outer iteration", _about(settings, groups)
    rows = [(f"dense {each}", _size_of(dense))]
    if settings.payload != "fp32":
        rows.append((f"{each}, {settings.payload}", _share_of(first, dense)))
    if groups.total:
        rows.append((f"{each} at the keep ratio", f"{_share_of(final, dense)}{about}"))
    over = f"{_share_of(total, dense * outer)}, {_size_of(dense * outer)}{about}"
    return [*rows, (f"payload over {_rounds(settings)[1]}", over)]


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


def _of_own_exchange(
    settings: Settings, topology: Topology, layout: Layout, size: int, statistics: int
) -> str:
    """Return what an exchange of the method's own hands over: per step, or per outer iteration.

    How many steps there are depends on the data.
    """
    exchange, outer = exchange_of(settings.method), settings.outer_iterations
    rows, after = _what_runs(settings, topology, layout, statistics), []
    if settings.method.per_step:
        workers = topology.world_size if settings.aggregation == "flat" else topology.num_nodes
        payload, how = exchange.payload(settings, layout, size, workers)
        rows += [("dense payload per step", _size_of(layout.numel * size))]
        rows += [("payload per step", f"{_size_of(payload)} ({how})")]
        # A rank alone keeps its own.
        if topology.world_size > 1:
            after = [("statistics per outer iteration", _size_of(statistics * size))]
    else:
        payload, how = exchange.payload(settings, layout, size, statistics)
        dense = (layout.numel + statistics) * size
        whole, share = dense * outer, _share_of(payload * outer, dense * outer)
        rows += [("dense payload per outer iteration", _size_of(dense))]
        rows += [("payload per outer iteration", f"{_share_of(payload, dense)} ({how})")]
        rows += [(f"payload over {outer} outer iterations", f"{share}, {_size_of(whole)}")]
    messages = [
        ("message", f"{what}: {operation} over {comm}, {operand}")
        for what, comm, operation, operand in exchange.OPERATIONS
    ]
    return format_lines([*rows, *messages, *after])


def _about(settings: Settings, groups: Groups) -> str:
    """Return, in brackets, that trained masks may make the figures of a run others, or ""."""
    consensus = settings.method.consensus and not settings.method.flat
    ramp = settings.keep_ramp_iterations > 1
    decided = (
        len(groups.kinds) > 1
        or settings.keep_by != "groups"
        or (consensus and settings.mask_agreement == "or")
        # Two patterns of a kernel share one or two weights.
        or (consensus and ramp and "pattern" in settings.groups)
    )
    return " (about: trained masks decide)" if decided and groups.total else ""


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
    return f"{_size_of(nbytes)}, {100 * nbytes / whole:.1f} % of dense"


def _size_of(nbytes: int) -> str:
    return f"{nbytes:,} B ({nbytes / MIB:.2f} MiB)"


def nominal_mask(groups: Groups, strict: float) -> np.ndarray:
    """Keep the first alpha groups of every selection: any mask of the same sizes travels alike."""
    mask = np.zeros(groups.total, dtype=bool)
    for selections in groups.kinds:
        start, stop = selections[0].start, selections[-1].stop
        # Within a budget the sets are cut alike, which trained scores need not do.
        scores = np.concatenate(
            [np.tile(1 - np.arange(s.count) / s.count, s.selections) for s in selections]
        )
        mask[start:stop] = select(scores, selections, strict, groups)
    return mask
