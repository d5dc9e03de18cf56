"""Time steps of `dense` on text beside those of a plain torch loop, as nanoGPT's, in turns.

The network, the text and the sizes are those of nanoGPT's recipe for a CPU, on one rank.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from prunex_mpi.base.tables import Table
from prunex_mpi.config.resolve import make
from prunex_mpi.data.text import TextSet
from prunex_mpi.models.inputs import inputs_from
from prunex_mpi.research.bench.beside_torch import Turn, dense_turn
from prunex_mpi.research.bench.workbench import Bench
from prunex_mpi.run.loading import load_dataset
from prunex_mpi.run.problem import make_model
from prunex_mpi.tools.timing import Action, wall_times

AIM = 0.95
RECIPE = {
    "method": "dense",
    "dataset": "text",
    "tokenizer": "chars",
    "context": 64,
    "batch_size": 12,
    "model": "gpt_nano",
    "lr": 1e-3,
    "lr_schedule": "constant",
    "warmup_ratio": 0.0,
    "beta2": 0.99,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
}


def compare_with_loop(bench: Bench) -> Table:
    """Return the table of steps per second. For one rank; collective on `world`."""
    settings = make(**RECIPE, outer_iterations=bench.repeat + 1, local_steps=bench.steps)
    bench = replace(bench, settings=settings)
    with ExitStack() as exits:
        ours, _ = dense_turn(bench, exits, exchange=True)
        turns = {"dense": ours, "loop": loop_turn(bench)}
        actions = {name: Action(turn) for name, turn in turns.items()}
        where = bench.device, bench.heartbeat, bench.topology.world
        taken = wall_times(actions, bench.repeat, *where, alternate=True)
    rates = [bench.steps / float(np.median(times)) for times in taken.values()]
    ratio = float(np.median(taken["loop"] / taken["dense"]))
    return Table(
        f"One step of dense on text beside a plain loop of torch: {settings.model}, batch "
        f"{settings.batch_size}, context {settings.context}",
        ("model", "dense steps/s", "loop steps/s", "dense / loop", "aim"),
        ((settings.model, *rates, ratio, AIM),),
        (
            f"medians of {bench.repeat} turns of {bench.steps} steps, in turns and in changing "
            "order; the ratio is the median of those within a turn",
            "both: windows drawn from the same text, AdamW with decay on matrices (fused), "
            "gradients clipped",
        ),
    )


def loop_turn(bench: Bench) -> Turn:
    """Return what takes the steps of a turn as a program without this package does."""
    settings, device = bench.settings, bench.device
    dataset = load_dataset(bench.topology, settings, bench.heartbeat, device)
    model = make_model(settings, inputs_from(dataset.sizes())).to(device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(settings.momentum, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    draw = drawing(dataset, settings.batch_size, device)

    def turn() -> None:
        model.train()
        for step in range(settings.local_steps):
            bench.heartbeat.beat(step)
            tokens, targets = draw()
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
            optimizer.step()
        loss.item()

    return turn


def drawing(
    dataset: TextSet, batch: int, device: torch.device
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return nanoGPT's get_batch: windows one by one from an array of tokens."""
    tokens = dataset.text.tokens.rows([0], dataset.stop)[0].astype(np.uint16)
    context = dataset.context

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(tokens) - context, (batch,))
        rows = [
            torch.stack(
                [torch.from_numpy(tokens[i + more :][:context].astype(np.int64)) for i in starts]
            )
            for more in (0, 1)
        ]
        return rows[0].to(device), rows[1].to(device)

    return draw
