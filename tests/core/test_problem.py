"""What a rank trains: the same weights everywhere, whatever each rank has built."""

import numpy as np
import pytest
import torch
from nodes import WORLD, nodes_of
from small_runs import small_run
from torch import nn

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.comm.collectives import build_transport, mpi_buffer
from prunex_mpi.core import problem
from prunex_mpi.core.problem import build_problem, free_room, load_dataset
from prunex_mpi.data import sources
from prunex_mpi.settings.resolve import make

CPU = torch.device("cpu")


@pytest.mark.any_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("alike", [True, False])
def test_all_ranks_begin_with_the_weights_of_rank_0(
    alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make("recipe", dataset="synthetic", train_samples=16, test_samples=8, image_size=8)
    torch.manual_seed(0 if alike else WORLD.rank)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    if not alike:
        # One bit of one buffer is enough.
        model[1].running_mean[2] = float(WORLD.rank == 0)
    before = [t.clone() for t in model.state_dict().values()]
    sent = []
    real = problem.bcast_

    def bcast(*operands: object) -> None:
        sent.append(1)
        real(*operands)

    monkeypatch.setattr(problem, "bcast_", bcast)
    transport = build_transport(CPU, 1.0, "host")
    with nodes_of(2) as topology:
        build_problem(topology, settings, load_dataset(topology, settings), model, CPU, transport)
    assert bool(sent) == (not alike and WORLD.size > 1)
    for tensor in model.state_dict().values():
        flat = tensor.reshape(-1).clone()
        first = flat.clone()
        WORLD.Bcast(mpi_buffer(first), root=0)
        assert np.array_equal(first.numpy(), flat.numpy())
    if WORLD.rank == 0:
        after = model.state_dict().values()
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_ranks_share_what_is_free_on_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has 50 bytes of its own, 20 of them in use; other programs have left 1000 or more."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000 + 100 * WORLD.rank, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 20)
    monkeypatch.setattr(problem, "gpu_identity", lambda _: "the only one")
    with nodes_of(2) as topology:
        assert free_room(topology, torch.device("cuda:0")) == 1030 // WORLD.size
        assert free_room(topology, CPU) is None
        monkeypatch.setattr(problem, "gpu_identity", lambda _: f"that of rank {WORLD.rank}")
        assert free_room(topology, torch.device("cuda:0")) == 1030
        monkeypatch.setattr(problem, "free_room", lambda *_: 100)
        settings = make("recipe", dataset="synthetic", train_samples=64, image_size=8)
        with pytest.raises(UserError, match="its GPU has"):
            load_dataset(topology, settings)


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_images_of_one_class_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SYNTHETIC_CLASSES", 1)
    settings = make("recipe", dataset="synthetic", train_samples=16, test_samples=8, image_size=8)
    with nodes_of(2) as topology, pytest.raises(UserError, match="of one class") as caught:
        load_dataset(topology, settings)
    assert caught.value.exit_code == UNREADABLE


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_colours_that_are_given_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    real = problem.channel_moments

    def moments(*what: object) -> torch.Tensor:
        measured.append(1)
        return real(*what)

    monkeypatch.setattr(problem, "channel_moments", moments)
    given = {"image_mean": (0.1, 0.2, 0.3), "image_std": (0.4, 0.5, 0.6)}
    for changes in ({}, given):
        with nodes_of(2) as topology, small_run(topology, "dense", **changes) as work:
            assert measured == [1]
            mean, std = work.problem.mean.tolist(), work.problem.std.tolist()
    assert mean == pytest.approx(given["image_mean"]) and std == pytest.approx(given["image_std"])
