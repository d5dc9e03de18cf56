"""Averaged gradients: right whatever took part in the loss, started while backward runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from driving import wire_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpi4py import MPI

from prunex_mpi.comm import counted as comms
from prunex_mpi.comm import gradients, traffic
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.models.layout import Layout, build_layout, flatten_

WORLD = MPI.COMM_WORLD
LIBRARIES = ("Open MPI v5.0.11", "MPICH 5.0.2")
BUCKETS = (1, 100, 400, 4 * 2**20)  # bytes: one parameter, a few, a few more, all


class Branches(nn.Module):
    """Two branches of which a rank uses one, a module used twice and one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.unused = nn.Linear(5, 5)
        self.shared = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, branch: str = "left") -> Tensor:
        hidden = torch.tanh(self.stem(x))
        if branch == "both":
            hidden = self.right(torch.tanh(self.left(hidden)))
        elif branch != "none":
            hidden = getattr(self, branch)(hidden)
        return self.head(self.shared(torch.tanh(self.shared(hidden))))


class Recorder:
    """A communicator of equal ranks that notes what parts of a gradient it is handed."""

    rank = 0

    def __init__(self, size: int = 2, in_place: bool = True) -> None:
        self.size = size
        self.in_place = in_place
        self.parts: list[np.ndarray] = []

    @property
    def sizes(self) -> list[int]:
        return [part.size for part in self.parts]

    def Iallreduce(self, mine: list, total: list, op: MPI.Op) -> MPI.Request:
        assert op == MPI.SUM
        assert (mine is MPI.IN_PLACE) == self.in_place
        operand = total[0] if mine is MPI.IN_PLACE else mine[0]
        assert operand is total[0] or not np.shares_memory(operand, total[0])
        self.parts.append(operand.copy())
        total[0][...] = self.size * operand
        return MPI.Request()


def prepare() -> tuple[Branches, Layout, Tensor]:
    torch.manual_seed(0)
    model = Branches().double()
    layout = build_layout(model)
    _, grad = flatten_(model, layout)
    return model, layout, grad


def backward(model: Branches, rank: int, step: int, branch: str) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    model(x, branch).square().sum().backward()


def gradient_of(rank: int, step: int, branch: str) -> Tensor:
    """Return the gradient of a rank by itself."""
    model, _, grad = prepare()
    backward(model, rank, step, branch)
    return grad


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
def test_buckets_hold_every_element_and_every_parameter_once(bucket_bytes, monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket_bytes)
    model, layout, grad = prepare()
    averager = GradientAverager(wire_of(Recorder(), Transport(2**20)), model, layout, grad)
    # From the end of the vector to its start, without gap or overlap.
    stops = [stop for _, stop in averager.bounds]
    starts = [start for start, _ in averager.bounds]
    assert stops == [layout.numel, *starts[:-1]]
    assert starts[-1] == 0
    inside = [
        [s for s in layout.segments if start <= s.offset and s.offset + s.numel <= stop]
        for start, stop in averager.bounds
    ]
    assert averager.members == [len(segments) for segments in inside]
    assert sum(averager.members) == len(layout.segments)
    assert all(averager.members)
    for (start, stop), segments in zip(averager.bounds, inside, strict=True):
        assert (stop - start) * 8 <= bucket_bytes or len(segments) == 1


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("branch", ["left", "right", "both", "none"])
@pytest.mark.parametrize("bucket_bytes", BUCKETS)
def test_reductions_start_in_one_order_whatever_backward_does(
    library, branch, bucket_bytes, monkeypatch
):
    monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket_bytes)
    model, layout, grad = prepare()
    monkeypatch.setattr(gradients, "library_name", lambda: library)
    recorder = Recorder(4, in_place=library == LIBRARIES[1])
    averager = GradientAverager(wire_of(recorder, Transport(2**20)), model, layout, grad)
    expected = [stop - start for start, stop in averager.bounds]
    for step in range(3):
        grad.zero_()
        recorder.parts.clear()
        averager.begin()
        backward(model, 0, step, branch)
        early = len(recorder.sizes)
        averager.finish_()
        assert recorder.sizes == expected
        # What left early was the whole gradient, which is also the mean of equal ones.
        assert np.array_equal(np.concatenate(recorder.parts[::-1]), grad.numpy())
        assert torch.equal(grad, gradient_of(0, step, branch))
        if bucket_bytes == 1:
            # The head's two and the shared module's two are there before the unused module blocks.
            assert early == 4


def test_all_reductions_start_during_backward_when_all_parameters_take_part():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    layout = build_layout(model)
    _, grad = flatten_(model, layout)
    recorder = Recorder()
    averager = GradientAverager(wire_of(recorder, Transport(2**20)), model, layout, grad)
    averager.begin()
    loss = model(torch.rand(3, 4)).sum()
    assert recorder.sizes == []
    loss.backward()
    assert sum(recorder.sizes) == layout.numel
    averager.close()
    loss = model(torch.rand(3, 4)).sum()
    averager.begin()
    loss.backward()
    assert sum(recorder.sizes) == layout.numel


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_second_vector_only_where_it_saves_bytes(library, monkeypatch):
    monkeypatch.setattr(gradients, "library_name", lambda: library)
    model, layout, grad = prepare()
    staging = torch.empty(2, 208, dtype=torch.uint8).unbind()
    alone = wire_of(MPI.COMM_SELF, Transport(208))
    for link in (alone, wire_of(Recorder(4), Transport(208, staging))):
        averager = GradientAverager(link, model, layout, grad)
        assert not averager.overlap
        assert averager.sums is grad
    for size in (2, 3, 4, 8):
        averager = GradientAverager(wire_of(Recorder(size), Transport(208)), model, layout, grad)
        assert averager.overlap
        assert (averager.sums is not grad) == (size > 3 and library.startswith("Open MPI"))


@pytest.mark.mpi
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("bucket_bytes", BUCKETS[::2])
def test_gradients_are_the_mean_over_ranks_that_took_different_branches(
    bucket_bytes, staged, monkeypatch
):
    monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket_bytes)
    model, layout, grad = prepare()
    staging = torch.empty(2, 208, dtype=torch.uint8).unbind() if staged else None
    averager = GradientAverager(wire_of(WORLD, Transport(208, staging)), model, layout, grad)
    assert averager.overlap == (WORLD.size > 1 and not staged)
    branches = ("left", "right", "none", "both")
    for step in range(4):
        ranks = range(WORLD.size)
        everyone = sum(gradient_of(rank, step, branches[(rank + step) % 4]) for rank in ranks)
        grad.zero_()
        averager.begin()
        backward(model, WORLD.rank, step, branches[(WORLD.rank + step) % 4])
        averager.finish_()
        np.testing.assert_allclose(grad.numpy(), everyone / WORLD.size, rtol=1e-12, atol=1e-14)
    averager.close()

    # Without the averager, a gradient is the rank's own again.
    grad.zero_()
    backward(model, WORLD.rank, 9, "left")
    assert torch.equal(grad, gradient_of(WORLD.rank, 9, "left"))


class Queue:
    """What torch.cuda is to the averager: marks in a queue that nothing runs before it is asked."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.marks = self.streams = 0

    def Event(self) -> "Mark":
        self.marks += 1
        return Mark(self, self.marks - 1)

    def Stream(self, _device: torch.device) -> "Queue":
        self.streams += 1
        return self

    @contextmanager
    def stream(self, _stream: "Queue") -> Iterator[None]:
        self.told.append(("aside", 0))
        yield
        self.told.append(("back", 0))

    def current_stream(self, _device: torch.device) -> "Queue":
        return self

    def wait_stream(self, _stream: "Queue") -> None:
        self.told.append(("joined", 0))


class Mark:
    def __init__(self, queue: Queue, number: int) -> None:
        self.queue, self.number = queue, number

    def record(self, _stream: Queue) -> None:
        self.queue.told.append(("marked", self.number))

    def wait(self) -> None:
        self.queue.told.append(("reached", self.number))


@pytest.mark.mpi
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("branch", ["left", "both"])
def test_what_a_device_queues_is_reduced_bucket_by_bucket_when_its_mark_is_reached(
    branch, staged, monkeypatch
):
    queue = Queue()
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 100)
    monkeypatch.setattr(gradients, "is_queued", lambda _: True)
    monkeypatch.setattr(gradients, "cuda", queue)
    real = comms.collectives.reduce_operand_

    def noted(comm: MPI.Comm, part: Tensor, *rest: object) -> None:
        queue.told.append(("reduced", part.numel()))
        real(comm, part, *rest)

    monkeypatch.setattr(comms.collectives, "reduce_operand_", noted)
    model, layout, grad = prepare()
    staging = torch.empty(2, 208, dtype=torch.uint8).unbind() if staged else None
    mine = wire_of(WORLD, Transport(208, staging), "intra")
    averager = GradientAverager(mine, model, layout, grad)
    for step in range(2):
        everyone = sum(gradient_of(rank, step, branch) for rank in range(WORLD.size))
        queue.told.clear()
        grad.zero_()
        averager.begin()
        backward(model, WORLD.rank, step, branch)
        before = list(queue.told)
        averager.finish_()
        np.testing.assert_allclose(grad.numpy(), everyone / WORLD.size, rtol=1e-12, atol=1e-14)
        if WORLD.size == 1:
            assert not queue.marks
            continue
        # During backward nothing is sent, and what is complete is marked, once.
        marked = [number for what, number in before if what == "marked"]
        assert len(before) == len(marked) == len(set(marked)) > 0
        # The unused module's bucket is marked when all of backward has been queued.
        late = queue.told[len(before) : queue.told.index(("aside", 0))]
        assert sorted(marked + [number for _, number in late]) == list(range(len(averager.bounds)))
        assert late
        inside = queue.told[queue.told.index(("aside", 0)) + 1 : -2]
        sizes = [stop - start for start, stop in averager.bounds]
        wanted = []
        for number, size in enumerate(sizes):
            # What is staged goes to the host, once it is there, while the part before is reduced.
            if not (staged and number):
                wanted.append(("reached", number))
            pieces = [min(26, size - start) for start in range(0, size, 26)] if staged else [size]
            wanted += [("reduced", piece) for piece in pieces]
            if staged and number + 1 < len(sizes):
                wanted.insert(-1, ("reached", number + 1))
        assert inside == wanted
        assert queue.told[-2:] == [("back", 0), ("joined", 0)]
    assert mine.traffic.intra == (2 * grad.nbytes if WORLD.size > 1 else 0)
    # A network that has become smaller needs no other stream, of which torch has 32.
    averager.listen_to(model, layout, grad)
    assert queue.streams == (WORLD.size > 1)
    averager.close()


def test_a_rank_alone_does_not_wait_for_its_device(monkeypatch):
    waited: list[torch.device] = []
    monkeypatch.setattr(traffic, "now", lambda device: waited.append(device) or 0.0)
    model, layout, grad = prepare()
    alone = wire_of(MPI.COMM_SELF, Transport(208))
    averager = GradientAverager(alone, model, layout, grad)
    averager.begin()
    backward(model, 0, 0, "left")
    mine = grad.clone()
    averager.finish_()
    assert torch.equal(grad, mine) and grad.any()
    assert waited == []
    assert alone.traffic.payload == grad.nbytes
    averager.close()


def test_gradients_that_come_in_several_passes_are_noticed():
    """Reentrant checkpointing hands on a shared module's gradient once for each use.

    To raise that is for all ranks together: others may have nothing to notice.
    """
    block = nn.Linear(6, 6)
    model = nn.Sequential(nn.Linear(4, 6), block, nn.Linear(6, 2))
    layout = build_layout(model)
    _, grad = flatten_(model, layout)
    averager = GradientAverager(wire_of(Recorder(), Transport(2**20)), model, layout, grad)
    for reentrant in (False, True):
        grad.zero_()
        averager.begin()
        hidden = model[0](torch.ones(3, 4))
        for _ in range(3):
            hidden = checkpoint(block, hidden, use_reentrant=reentrant)
        model[2](hidden).sum().backward()
        averager.finish_()
        assert averager.late == reentrant
