"""What a rank trains: the same weights everywhere, whatever each rank has built."""

import numpy as np
import pytest
import torch
from nodes import WORLD, nodes_of
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.collectives import build_transport, mpi_buffer
from prunex_mpi.config.resolve import make
from prunex_mpi.core import broadcast
from prunex_mpi.run.problem import build_problem, load_dataset

CPU = torch.device("cpu")


@pytest.mark.any_mpi
@pytest.mark.mpi
@pytest.mark.parametrize(("overlap", "fits"), [(2, True), (3, False)])
def test_no_exchange_runs_behind_more_steps_than_there_are(overlap, fits):
    """Which epochs alone do not say."""
    ways = {"local_epochs": "1/2", "overlap_steps": overlap, "evaluate_every": 4}
    size = {"dataset": "synthetic", "train_samples": 8 * WORLD.size, "image_size": 8}
    settings = make(method="local-sgd", batch_size=2, test_samples=8, **size, **ways)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
    transport = build_transport(CPU, 1.0, "host")
    with nodes_of(1) as topology:
        given = topology, settings, load_dataset(topology, settings), model, CPU, transport
        given = *given, Heartbeat()
        if fits:
            assert build_problem(*given).steps == 2
        else:
            with pytest.raises(UserError, match="overlap-steps 3 is more than the 2 local steps"):
                build_problem(*given)


@pytest.mark.any_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("alike", [True, False])
def test_all_ranks_begin_with_the_weights_of_rank_0(alike, monkeypatch):
    size = {"dataset": "synthetic", "train_samples": 16, "test_samples": 8, "image_size": 8}
    settings = make("recipe", **size, lr_scaling="linear")
    torch.manual_seed(0 if alike else WORLD.rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    if not alike:
        # One bit of one buffer is enough.
        model[1].running_mean[2] = float(WORLD.rank == 0)
    before = [t.clone() for t in model.state_dict().values()]
    sent = []
    real = broadcast.bcast_

    def bcast(*operands: object) -> None:
        sent.append(1)
        real(*operands)

    monkeypatch.setattr(broadcast, "bcast_", bcast)
    transport = build_transport(CPU, 1.0, "host")
    with nodes_of(2) as topology:
        dataset = load_dataset(topology, settings)
        built = build_problem(topology, settings, dataset, model, CPU, transport, Heartbeat())
    assert built.lr_scale == WORLD.size
    assert bool(sent) == (not alike and WORLD.size > 1)
    for tensor in model.state_dict().values():
        flat = tensor.reshape(-1).clone()
        first = flat.clone()
        WORLD.Bcast(mpi_buffer(first), root=0)
        assert np.array_equal(first.numpy(), flat.numpy())
    if WORLD.rank == 0:
        after = model.state_dict().values()
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
