"""Small networks and streams of batches that tests train."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """A 3x3, a grouped, a depthwise and a 1x1 convolution, BatchNorm and a classifier.

    SiLU has no kink: an input of ReLU that rounding pushes across zero would be a real difference.
    """

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.Conv2d(8, 12, 1, bias=False),
            nn.BatchNorm2d(12),
            nn.SiLU(),
        )
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        return self.fc(self.features(x).mean(dim=(2, 3)))


class CoupledNet(nn.Module):
    """A residual block, a depthwise convolution and a classifier; every channel has partners."""

    # Of each set the number of channels and, as PARAMETER/AXIS, where each has a slice.
    SETS = (
        (
            8,
            "conv1.weight/0 bn1.weight/0 bn1.bias/0 conv2.weight/1 conv3.weight/0 conv3.bias/0 "
            "bn3.weight/0 bn3.bias/0 conv4.weight/0 bn4.weight/0 bn4.bias/0 conv5.weight/1",
        ),
        (6, "conv2.weight/0 bn2.weight/0 bn2.bias/0 conv3.weight/1"),
        (10, "conv5.weight/0 bn5.weight/0 bn5.bias/0 fc.weight/1"),
    )

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv3, self.bn3 = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv4, self.bn4 = nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8)
        self.conv5, self.bn5 = nn.Conv2d(8, 10, 1, bias=False), nn.BatchNorm2d(10)
        self.fc = nn.Linear(10, 5)

    def forward(self, x):
        x = F.silu(self.bn1(self.conv1(x)))
        x = F.silu(x + self.bn3(self.conv3(F.silu(self.bn2(self.conv2(x))))))
        x = F.silu(self.bn4(self.conv4(x)))
        return self.fc(F.silu(self.bn5(self.conv5(x))).mean(dim=(2, 3)))


# The methods whose model must have embeddings.
OF_EMBEDDINGS = ("parallax", "embrace")


class Reader(nn.Module):
    """Embeddings of what a row of pixels reads as and of all its places, and a classifier."""

    def __init__(self, classes=5, side=6, rows=401):
        super().__init__()
        self.embedding = nn.Embedding(rows, 6)
        self.mix = nn.Linear(6, 6)
        self.positions = nn.Embedding(side, 6)
        self.fc = nn.Linear(6, classes)

    def tokens(self, x):
        """Return the rows that images [n, 3, side, side] look up, [n, side]."""
        return (100 * x[:, 0, :, 0]).floor().long() % len(self.embedding.weight)

    def forward(self, x):
        x = F.silu(self.mix(self.embedding(self.tokens(x)) + self.positions.weight))
        return self.fc(x.mean(dim=1))


class RandomStream:
    """Batches that depend only on the rank and the step."""

    waited = 0.0

    def __init__(self, rank, dtype):
        self.generator = torch.Generator().manual_seed(1000 + rank)
        self.dtype = dtype

    def next(self):
        labels = torch.randint(5, (8,), generator=self.generator)
        noise = torch.randn(8, 3, 6, 6, generator=self.generator, dtype=torch.float64)
        return (noise + 0.3 * labels.view(-1, 1, 1, 1)).to(self.dtype), labels


def new_net(dtype=torch.float64, method=""):
    """Return a network that `method` takes."""
    torch.manual_seed(7)
    return (Reader() if method in OF_EMBEDDINGS else Net()).to(dtype)
