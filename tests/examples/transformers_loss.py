"""Train and prune a language model of `transformers`, by the loss that it computes itself.

mpirun -n 2 python transformers_loss.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mpi4py import MPI

import prunex_mpi

world = MPI.COMM_WORLD
text = torch.tensor(list(" ".join(f"{n} times two is {2 * n}." for n in range(2000)).encode()))
config = LlamaConfig(
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "use_cache": False},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
)
torch.manual_seed(0)
model = LlamaForCausalLM(config)


def draw_batch() -> dict[str, torch.Tensor]:
    """Return windows of this rank's half of the text."""
    starts = torch.randint(len(text) // world.size - 33, (8,)) * world.size + world.rank
    windows = torch.stack([text[start : start + 32] for start in starts])
    return {"input_ids": windows, "labels": windows}


optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
replica = prunex_mpi.replicate(
    *(world, model, optimizer),
    **{"method": "prunex", "groups": ["coupled"], "keep_ratio": 0.5, "payload": "int4"},
    **{"local_steps": 10, "outer_iterations": 12, "ranks_per_node": 1},
    example={"input_ids": text[None, :32]},
)
while not replica.done:
    loss = model(**draw_batch()).loss
    loss.backward()
    replica.step(loss)

small = replica.smaller()
if world.rank == 0:
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, small))
    losses = [record["train_loss"] for record in replica.records]
    print(f"{after} of {before} parameters, loss {losses[0]:.2f} -> {losses[-1]:.2f}")
