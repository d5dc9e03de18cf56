"""Let Trainer of `transformers` own the loop: the replica stands in for its optimizer.

mpirun -n 2 python transformers_trainer.py
"""

import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from mpi4py import MPI

import prunex_mpi

world = MPI.COMM_WORLD
# Accelerate would take the launcher's ranks for processes of its own.
for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
    os.environ.pop(name, None)
text = torch.tensor(list(" ".join(f"{n} times two is {2 * n}." for n in range(2000)).encode()))
windows = text[: len(text) // 32 * 32].view(-1, 32)[world.rank :: world.size]
data = [{"input_ids": window, "labels": window} for window in windows]

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
replica = prunex_mpi.replicate(
    *(world, model, optimizer),
    **{"method": "local-sgd", "payload": "int4", "local_steps": 10, "outer_iterations": 6},
    ranks_per_node=1,
)
scheduler = torch.optim.lr_scheduler.LambdaLR(replica.optimizer, lambda step: 1 - step / 60)
arguments = TrainingArguments(
    **{"output_dir": tempfile.mkdtemp(), "max_steps": 60, "per_device_train_batch_size": 8},
    **{"save_strategy": "no", "logging_strategy": "no", "report_to": "none", "use_cpu": True},
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data, optimizers=(replica.optimizer, scheduler))
found = trainer.train()
if world.rank == 0:
    sent = sum(record["bytes"]["sent"] for record in replica.records) / 2**20
    print(f"{len(replica.records)} exchanges, loss {found.training_loss:.2f}, {sent:.2f} MiB sent")
