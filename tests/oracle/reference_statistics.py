"""BatchNorm statistics of fixed weights, of all ranks in one process, without MPI and the package.

Every rank counts the same: means and second moments are averaged over ranks, not variances.
"""

import torch
import torch.nn.functional as F
from torch import nn


def of_batch(layers, images):
    """Return (mean, unbiased variance) of what enters each BatchNorm, normalised by the batch."""
    found, x = [], images
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            x = F.conv2d(x, layer.weight, layer.bias, padding=layer.padding)
        elif isinstance(layer, nn.BatchNorm2d):
            columns = x.transpose(0, 1).flatten(1)
            count = columns.shape[1]
            mean = columns.sum(dim=1) / count
            squares = ((columns - mean[:, None]) ** 2).sum(dim=1)
            found.append((mean, squares / (count - 1)))
            scale = (squares / count + layer.eps) ** -0.5
            x = (x - mean.view(1, -1, 1, 1)) * scale.view(1, -1, 1, 1)
            x = x * layer.weight.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)
        elif isinstance(layer, nn.SiLU):
            x = x / (1 + torch.exp(-x))
        elif not isinstance(layer, nn.Dropout):
            # What comes after the last BatchNorm does not matter; dropout is off.
            break
    return found


def of_rank(layers, images, batch_size, most_batches, mean, std):
    """Return the plain averages over a rank's first whole batches of `images`, uint8."""
    count = min(most_batches, len(images) // batch_size)
    everything = []
    for b in range(count):
        batch = images[b * batch_size : (b + 1) * batch_size].double() / 255
        batch = (batch - mean.double().view(3, 1, 1)) / std.double().view(3, 1, 1)
        everything.append(of_batch(layers, batch))
    modules = range(len(everything[0]))
    return [tuple(sum(one[m][i] for one in everything) / count for i in (0, 1)) for m in modules]


@torch.no_grad()
def of_all_ranks(layers, shards, batch_size, most_batches, mean, std):
    """Return [(mean, variance)] of each BatchNorm of `layers`, one shard of images per rank."""
    ranks = [of_rank(layers, images, batch_size, most_batches, mean, std) for images in shards]
    result = []
    for m in range(len(ranks[0])):
        mean_of_all = sum(rank[m][0] for rank in ranks) / len(ranks)
        second = sum(rank[m][1] + rank[m][0] ** 2 for rank in ranks) / len(ranks)
        result.append((mean_of_all, second - mean_of_all**2))
    return result
