"""Train a small network on digits in a loop of one's own, and make it smaller meanwhile.

mpirun -n 2 python digits.py [FOLDER]

In the folder, if one is given, it keeps what it goes on from when it is started again, and in the
end the smaller network.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from mpi4py import MPI

import prunex_mpi

world = MPI.COMM_WORLD
images, labels = (torch.tensor(x) for x in load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 16

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
replica = prunex_mpi.replicate(
    *(world, model, optimizer),
    method="prunex",
    groups=["coupled"],
    keep_ratio=0.5,
    local_steps=8,
    outer_iterations=32,
    # On one machine, to try it; without, the ranks of a machine are one node.
    ranks_per_node=1,
    example=images[:2],
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 256)
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
kept = folder and folder / f"rank{world.rank}.pt"
if kept and kept.exists():
    saved = torch.load(kept)
    replica.load_state_dict(saved["replica"])
    scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["random"])
while not replica.done:
    mine = torch.randint(1500 // world.size, (32,)) * world.size + world.rank
    loss = F.cross_entropy(model(images[mine]), labels[mine])
    loss.backward()
    replica.step(loss)
    scheduler.step()
    if kept and replica.exchanged and len(replica.records) % 8 == 0:
        states = {"replica": replica.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save({**states, "random": torch.get_rng_state()}, kept)

small = replica.smaller()
right = (small(images[1500:]).argmax(1) == labels[1500:]).float().mean()
if world.rank == 0:
    if folder:
        # `torch.load(file, weights_only=False)` returns the module.
        torch.save(small, folder / "small.pt")
    count = sum(p.numel() for p in small.parameters())
    sent = sum(record["bytes"]["sent"] for record in replica.records)
    print(f"{count} of {sum(p.numel() for p in model.parameters())} parameters", end=", ")
    print(f"accuracy {right:.3f}, {sent / 2**20:.2f} MiB left a node")
