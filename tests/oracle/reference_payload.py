"""Exchanges in fewer bits, simulated in one process: block by block, without the package."""

import torch

BLOCK = 128
# Bytes of a record as the format says: codes, and a scale of two bytes.
RECORD = {"fp16": 256, "bf16": 256, "int8": 130, "int4": 66, "int2": 34}
FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def decoded(block, payload):
    """Return what a block of 128 values becomes by being coded."""
    if payload in FLOATS:
        return block.to(FLOATS[payload]).to(block.dtype)
    if payload == "int2":
        scale = 0.45 / 20 * block.square().mean().sqrt()
        scale = scale.bfloat16().to(block.dtype)
        large = block.abs() >= 44 * scale
        return torch.where(block < 0, -1.0, 1.0) * torch.where(large, 68.0, 20.0) * scale
    levels = {"int8": 127, "int4": 7}[payload]
    scale = (block.abs().max() / levels).bfloat16().to(block.dtype)
    return torch.round(block / scale) * scale if scale > 0 else torch.zeros_like(block)


def in_blocks(vector):
    """Cut a vector into blocks of 128, filled up with zeros."""
    padded = torch.zeros(-(-vector.numel() // BLOCK) * BLOCK, dtype=vector.dtype)
    padded[: vector.numel()] = vector
    return list(padded.view(-1, BLOCK).clone())


def owners(blocks, payload, leaders, bucket_bytes):
    """Return who adds up each block: equal shares of each bucket, the last ones may lack some."""
    bucket = max(1, bucket_bytes // (RECORD[payload] * leaders)) * leaders
    result = []
    for first in range(0, blocks, bucket):
        count = min(bucket, blocks - first)
        share = -(-count // leaders)
        result += [number // share for number in range(count)]
    return result


def coded_sum(contributions, payload, bucket_bytes):
    """Return (sum as all decode it, what is left over of each contribution), vectors [n]."""
    leaders, numel = len(contributions), contributions[0].numel()
    cut = [in_blocks(c) for c in contributions]
    totals = []
    for number, owner in enumerate(owners(len(cut[0]), payload, leaders, bucket_bytes)):
        mine = [c[number] for c in cut]
        total = mine[owner].clone()
        for leader, block in enumerate(mine):
            if leader != owner:
                sent = decoded(block, payload)
                total += sent
                block -= sent
        totals.append(decoded(total, payload))
        mine[owner].copy_(total - totals[-1])
    return torch.cat(totals)[:numel], [torch.cat(c)[:numel] for c in cut]


class CodedMeans:
    """What nodes remember from one exchange in fewer bits to the next."""

    def __init__(self, start, node_sizes, payload, bucket_bytes, racks):
        self.shares = [size / sum(node_sizes) for size in node_sizes]
        self.payload, self.bucket_bytes, self.racks = payload, bucket_bytes, racks
        self.rests = [{n: torch.zeros_like(x) for n, x in start.items()} for _ in node_sizes]
        self.known = None

    def mean_(self, values, z, mask):
        """Return the mean of the nodes' `values` on `mask` as all decode it, zero elsewhere."""
        kept = {n: mask.get(n, torch.ones_like(x, dtype=torch.bool)) for n, x in z.items()}
        vectors = []
        for share, value, rest in zip(self.shares, values, self.rests, strict=True):
            parts = [(share * (value[n] - z[n]) + rest[n])[kept[n]] for n in z]
            vectors.append(torch.cat(parts))
        total, left = self.sum_(vectors, self.payload)
        for rest, vector in zip(self.rests, left, strict=True):
            rest.update(expand(vector, kept))
        change = expand(total, kept)
        return {n: (z[n] + change[n]) * kept[n] for n in z}

    def sum_(self, vectors, payload):
        """Return (sum, what is left over of each node): racks add up exactly, then code.

        The first node of a rack has what is left over of all of it.
        """
        offers = [sum(vectors[node] for node in rack) for rack in self.racks]
        total, left = coded_sum(offers, payload, self.bucket_bytes)
        rests = [torch.zeros_like(vector) for vector in vectors]
        for rack, rest in zip(self.racks, left, strict=True):
            rests[rack[0]] = rest
        return total, rests

    def refer_to(self, ranks):
        """Take the plain mean of all ranks' lists of (mean, variance) as the first known ones."""
        if self.known is None:
            lists = list(ranks)
            self.known = [sum(each) / len(lists) for each in zip(*lists, strict=True)]

    def statistics_(self, nodes, gone):
        """Return the mean of the nodes' lists of (mean, second moment), of removed channels (0, 1).

        They travel about the last known means, as differences to the last known variances, in
        bfloat16, and nothing is left over. Those of a removed channel are the last that it had.
        """
        vectors = []
        for share, statistics in zip(self.shares, nodes, strict=True):
            gaps = []
            for (mean, second), (shared, variance), g in zip(
                statistics, self.known, gone, strict=True
            ):
                about = second - 2 * shared * mean + shared**2
                gaps.append(share * torch.stack((mean - shared, about - variance))[:, ~g])
            vectors.append(torch.cat([gap.flatten() for gap in gaps]))
        total, _ = self.sum_(vectors, "bf16")
        new = []
        for known, g in zip(self.known, gone, strict=True):
            count = 2 * int((~g).sum())
            part, total = total[:count].view(2, -1), total[count:]
            mean = known[0, ~g] + part[0]
            variance = known[1, ~g] + part[1] - part[0] ** 2
            known[:, ~g] = torch.stack((mean, variance))
            value = torch.tensor([[0.0], [1.0]], dtype=known.dtype).repeat(1, len(g))
            value[:, ~g] = torch.stack((mean, variance + mean**2))
            new.append(value)
        return new


def expand(vector, kept):
    """Put the entries of `vector` where `kept` says, zeros elsewhere, tensor by tensor."""
    result, start = {}, 0
    for name, where in kept.items():
        count = int(where.sum())
        result[name] = expanded(vector[start : start + count], where)
        start += count
    return result


def expanded(vector, kept):
    """Put the entries of `vector` where `kept` says, zeros elsewhere."""
    full = torch.zeros(kept.shape, dtype=vector.dtype)
    full[kept] = vector
    return full
