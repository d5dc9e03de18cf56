"""What the exchange between nodes would cost with each payload: the table of `--dry-run`."""

from dataclasses import dataclass, replace

import torch

from prunex_mpi.base.tables import Cell, Table
from prunex_mpi.comm.collectives import between_nodes, build_transport
from prunex_mpi.core.message import STATISTICS, message_bytes
from prunex_mpi.core.sums import MOST_SUMMED, SUMMED, coded_bytes
from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning.compaction import Plan
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
from prunex_mpi.run.tuning import LATEST
from prunex_mpi.settings.fields import PAYLOADS, Settings
from prunex_mpi.settings.methods import BY_GROUPS
from prunex_mpi.settings.values import AUTO


@dataclass(frozen=True)
class Travelling:
    """What goes into a message: `parameters` of `model` and `statistics`, of `size` bytes each.

    The packing plan has so many `pieces`.
    """

    parameters: int
    statistics: int
    model: int
    size: int
    pieces: int


def travelling_under(plan: Plan, statistics: int, layout: Layout, size: int) -> Travelling:
    """Return what travels by a plan, beside so many BatchNorm statistics."""
    return Travelling(plan.numel, statistics, layout.numel, size, len(plan.pieces))


def bytes_of(payload: str, what: Travelling) -> int:
    """Return the bytes of a message between two or more nodes."""
    return message_bytes(payload, what.parameters, what.statistics, what.size)


def exchange_of(payload: str, what: Travelling, nodes: int, bucket_bytes: int) -> Exchange:
    """Return what phase 4 exchanges between `nodes` leaders."""
    whole = bytes_of(payload, what)
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


def cost_table(settings: Settings, what: Travelling) -> Table:
    """Return what each payload costs at the keep ratio, with each number of nodes."""
    link = Link(settings.link_gbit, settings.latency_us)
    step_s, steps = settings.step_ms / 1e3, settings.local_steps
    # `auto` takes the fewest steps that hide the exchange, at most these.
    behind = steps // LATEST if settings.overlap_steps == AUTO else settings.overlap_steps
    transport = build_transport(
        torch.device("cpu"), settings.bucket_mib, "host", settings.piece_kib
    )
    leaders = sorted({1, 4, settings.leaders_per_node})
    rows: list[tuple[Cell, ...]] = []
    for payload in PAYLOADS:
        for nodes in settings.nodes:
            if payload == SUMMED and nodes > MOST_SUMMED:
                rows.append((payload, nodes, *[None] * (3 + len(leaders) + bool(step_s))))
                continue
            pieces = between_nodes(transport, nodes).bucket_bytes
            exchange = exchange_of(payload, what, nodes, pieces)
            kernels = kernels_of(payload, settings.copy_gbs)
            shared = {count: replace(exchange, leaders=count) for count in leaders}
            row = (payload, nodes, sent_bytes(exchange), bound_s(link, exchange))
            row += (packing_s(kernels, exchange),)
            row += tuple(exchange_s(link, kernels, whole) for whole in shared.values())
            if step_s:
                whole = shared[settings.leaders_per_node]
                waited_for = exchange_s(link, kernels, whole, behind * step_s)
                row = (*row, 100 * share(waited_for, steps * step_s))
            rows.append(row)
    columns = ("payload", "nodes", "bytes sent", "bound s", "pack s", "exchange s")
    columns += tuple(f"{count} leaders s" for count in leaders[1:])
    notes = [
        "bytes sent: by a node per outer iteration, 2 (M - 1)/M of its message between M nodes",
        "bound: these bytes over the link; pack: what is done before they are sent and after",
        "exchange: bound, pack, latencies and codes; then with so many leaders in each node",
    ]
    if None in (row[2] for row in rows):
        notes.append(f"-: {SUMMED} is for up to {MOST_SUMMED} nodes")
    if step_s:
        columns = (*columns, "share %")
        many = settings.leaders_per_node
        by = f" and {many} leaders" if many > 1 else ""
        hidden = f", {behind} of which hide what goes between nodes" if behind else ""
        notes.append(
            f"share: of an outer iteration with {steps} local steps of {settings.step_ms:g} ms{by}"
            f"{hidden}"
        )
    pruned = " at the keep ratio" if settings.method in BY_GROUPS else ""
    return Table(
        f"Exchange{pruned}: {settings.link_gbit:g} Gbit/s, {settings.latency_us:g} us a message, "
        f"copies of {settings.copy_gbs:g} GB/s, pieces of {settings.piece_kib} KiB for each node",
        columns,
        tuple(rows),
        tuple(notes),
    )
