"""Add up small whole numbers of all workers, in as few bits as they and their sums need.

Either each worker's numbers go to all (Allgather), who add them up, or, with more workers, each
worker adds up one share of them (Alltoall) and hands what comes of it to all (Allgather), which is
what TernGrad's and Distributed Lion's servers do. With `up` bits for a number and `down` for a
result the first sends (W - 1) up, the second (W - 1)/W (up + down) per number.
"""

from typing import Any

import torch
from torch import Tensor

from prunex_mpi.comm.wire import Wire
from prunex_mpi.compress.quantise import ROW, pack_, unpack_


def goes_to_all(workers: int, up: int, down: int) -> bool:
    """Say whether it takes no more bits to send everyone's numbers to all."""
    return (workers - 1) * up <= down


def share_of_row(numel: int, workers: int) -> int:
    """Return how many numbers are in a worker's share, filled up to whole bytes."""
    return -(-numel // (ROW * workers)) * ROW


def bytes_handed_over(numel: int, workers: int, up: int, down: int) -> int:
    """Return what a worker hands over: its numbers, and its share of what comes of them."""
    share = share_of_row(numel, workers)
    sent = workers * share * up // 8
    return sent if goes_to_all(workers, up, down) else sent + share * down // 8


def allocate_counts(wire: Wire, like: Tensor, up: int, down: int) -> dict[str, Any]:
    """Return memory for the numbers of a vector [n], for what travels, and for sums."""
    workers = wire.comm.size
    share, to_all = share_of_row(like.numel(), workers), goes_to_all(workers, up, down)
    numbers = torch.zeros(workers, share, dtype=torch.uint8, device=like.device)
    rows = workers if to_all else 1
    # The largest sum: all workers' largest numbers.
    wide = workers * ((1 << up) - 1) > torch.iinfo(torch.uint8).max
    sums = torch.empty(rows, share, dtype=torch.int16 if wide else torch.uint8, device=like.device)
    packed = numbers.new_empty(workers, share * up // 8)
    return {
        "to_all": to_all,
        "numbers": numbers,
        "packed": packed,
        "received": packed.new_empty(workers, *packed.shape) if to_all else packed.clone(),
        "spare": torch.empty_like(sums, dtype=torch.uint8),
        "sums": sums,
        "result": None if to_all else numbers.new_empty(1, share * down // 8),
        "results": None if to_all else numbers.new_empty(workers, share * down // 8),
    }


def sum_numbers_(wire: Wire, space: dict[str, Any], up: int) -> Tensor:
    """Return the sums over all workers of `numbers` [comm.size, share]: of all, or of a share.

    `numbers` must be below 2^up. Collective on `wire.comm`.
    """
    packed, received, sums = space["packed"], space["received"], space["sums"]
    pack_(space["numbers"], up, packed)
    if space["to_all"]:
        wire.gather_(packed.view(-1), received.view(wire.comm.size, -1))
    else:
        wire.deal_(packed, received)
    sums.zero_()
    for part in received:
        unpack_(part.view(sums.shape[0], -1), up, space["spare"])
        sums.add_(space["spare"])
    return sums


def spread_(wire: Wire, space: dict[str, Any], share: Tensor, down: int) -> Tensor:
    """Return every worker's share of results as numbers [comm.size, share].

    `share` [1, share] is uint8 and below 2^down, or of 16 bits. Collective on `wire.comm`.
    """
    result, results = space["result"], space["results"]
    if down == 16:
        result.copy_(share.view(torch.uint8))
    else:
        pack_(share, down, result)
    wire.gather_(result.view(-1), results)
    if down == 16:
        return results.view(share.dtype)
    unpack_(results, down, space["numbers"])
    return space["numbers"]
