"""Units of memory, in bytes, and numbers out of what files and the environment say."""

KIB = 2**10
MIB = 2**20
GIB = 2**30


def number(text: str | None, other: int = 0) -> int:
    """Return the whole number that a text is, `other` for anything else, such as `max`."""
    return int(text) if text and text.isdecimal() else other


def ring_bytes(workers: int, operand: int, passes: int = 2) -> int:
    """Return the bytes that one of `workers` sends for `operand` bytes by a ring algorithm.

    (W - 1)/W of the operand per pass around the ring: two passes for an Allreduce, one for a Reduce
    or a Bcast (the mean over the workers) and for an Allgather, whose operand is what all
    contribute. The ranks of a node are neighbours, so this is also what leaves a node.
    """
    return passes * (workers - 1) * operand // workers


def dealt_bytes(workers: int, inside: int, operand: int, passes: int) -> int:
    """Return the bytes that leave a node with `inside` of the `workers`, each dealing `operand`.

    By an Alltoall, which no ring makes less; then so many `passes` around the ring.
    """
    return (inside * (workers - inside) + passes * (workers - 1)) * operand // workers


def shifted_bytes(workers: int, inside: int, distance: int, operand: int) -> int:
    """Return the bytes that leave a node with `inside` of the `workers`, each sending `operand`.

    Worker r sends it to worker r + distance, counted around; a node's workers are neighbours, too.
    """
    return sum((r + distance) % workers >= inside for r in range(inside)) * operand


def wire_s(gbit: float, nbytes: float) -> float:
    """Return the seconds that bytes take on a link of so many 10^9 bits per second."""
    return nbytes / (gbit * 1e9 / 8)
