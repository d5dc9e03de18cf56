"""PacTrain over MPI: masked dense SGD whichever way it travels, and what makes it travel so."""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from driving import (
    assert_alike_on_all_ranks,
    assert_like_oracle,
    by_name,
    comms_of,
    make_context,
    run_driver,
    simulated,
    wire_of,
)
from nets import Net, RandomStream, new_net
from nodes import WORLD, nodes_of
from reference_rivals import simulate_per_step
from torch import nn

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.core.state import PRUNED
from prunex_mpi.data.batches import Shard
from prunex_mpi.data.text import Windows
from prunex_mpi.data.text_files import Tokens as TextTokens
from prunex_mpi.methods import pactrain
from prunex_mpi.methods.pactrain import (
    GRASP_TEMPERATURE,
    STABLE,
    SUPPORT,
    PacTrain,
    adopt_pruned_,
    agree_on_stable,
    draw_balanced,
    outside_,
    score_of,
    windows_apart,
)
from prunex_mpi.models.layout import matrices
from prunex_mpi.run import job
from prunex_mpi.run.summary import closing_table

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

STEPS = 4
# Buckets of 1 KiB cut the 801 parameters of the test network into 7 of float64, 4 of float32.
COMMON = {"method": "pactrain", "outer_iterations": 3, "lr": 0.05, "lr_schedule": "constant"}
COMMON |= {"warmup_ratio": 0.0, "pactrain_stable_window": 2}
COMMON |= {"pactrain_score": "magnitude", "keep_ratio": (0.3,)}
SHAPES = (("flat", 2), ("hierarchical", 2), ("hierarchical", 3))


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Of several buckets each is settled by itself: 128 values of float64 in one."""
    monkeypatch.setattr(pactrain, "BUCKET_MIB", 2**-10)


LATER = {"pactrain_prune_iteration": 1}
CASES = [*((*shape, {}) for shape in SHAPES[::2]), (*SHAPES[1], LATER)]


@pytest.mark.parametrize(("aggregation", "ranks_per_node", "changes"), CASES)
def test_program_equals_masked_sgd(aggregation, ranks_per_node, changes):
    settings = make(aggregation=aggregation, **COMMON, **changes)
    model = new_net()
    wanted = {**vars(settings), "steps": STEPS}
    history = simulated(simulate_per_step, model, wanted, ranks_per_node)
    payloads = []
    with nodes_of(ranks_per_node) as topology:
        stream = RandomStream(WORLD.rank, torch.float64)
        runs = run_driver(topology, settings, model, stream, STEPS)
        for (record, state), expected in zip(runs, history, strict=True):
            assert_like_oracle(record, state, expected)
            pruned = by_name(state.memory[PRUNED], state)
            masks = expected.memory.get("masks", {})
            for name, gone in pruned.items():
                assert torch.equal(~gone, masks.get(name, torch.ones_like(gone))), name
            momentum = state.optimizer.first_moment
            assert not momentum[state.memory[PRUNED]].any()
            kept = sum(int(mask.sum()) for mask in masks.values())
            weights = sum(mask.numel() for mask in masks.values())
            assert record["density"] == (kept / weights if masks else 1.0)
            assert record["frozen"] == bool(masks)
            payloads.append(record["bytes"]["payload"])
        assert state.memory[STABLE].all()
        if aggregation == "flat" or topology.is_leader:
            # Part of the weights travel in the end, and all of them before they are pruned.
            assert payloads[2] < 0.7 * record["bytes"]["dense"]
            if settings.options.prune_iteration:
                # But for what a batch of a worker that is alone leaves without a gradient.
                least = 0.98 if WORLD.size == 1 else 1.0
                assert least <= payloads[0] / record["bytes"]["dense"] <= 1.0


def test_records_and_totals_count_single_weights():
    settings = make(**{**COMMON, "outer_iterations": 1, "pactrain_prune_iteration": 1})
    with nodes_of(2) as topology:
        stream = RandomStream(WORLD.rank, torch.float32)
        ((record, state),) = run_driver(topology, settings, new_net(torch.float32), stream, STEPS)
        totals = job.summarise(settings, topology, state, [record], "completed")
    counts = {s.name: s.numel for s in matrices(state.layout)}
    kept = {name: -(-3 * count // 10) for name, count in counts.items()}
    before, after = sum(counts.values()), sum(kept.values())
    assert (totals["prunable"], totals["prunable_kept"]) == (before, after)
    assert totals["parameters_kept"] == state.layout.numel - before + after
    assert totals["density"] == record["density"] == after / before
    assert record["mask_drift"] == (before - after) / after
    text = closing_table({**totals, "seconds_total": 1.0}, "run")
    assert f"{after:,} of {before:,} (density {after / before:.3f})" in text
    if WORLD.rank == 0:
        for row in record["layers"]:
            count = counts.get(row["layer"], 1)
            assert row["density"] == kept.get(row["layer"], 1) / count


# --------------------------------------------------------------------------------------------------
# The mask
# --------------------------------------------------------------------------------------------------


def grasp_as_published(net, images, labels, keep, temperature=200.0):
    """Return {parameter: mask} as the code of GraSP's authors (alecwangcq/GraSP) chooses it.

    From `images` in class order: -w (H g) over the weights of convolutions and linear layers, g
    being the sum of both halves' gradients and H that of their Hessians; the highest scores go. H g
    is taken by central differences of the gradient here.
    """
    weights = [p for p in net.parameters() if p.dim() > 1]
    half = len(labels) // 2

    def slope():
        total = [torch.zeros_like(w) for w in weights]
        for part in (slice(0, half), slice(half, None)):
            loss = F.cross_entropy(net(images[part]) / temperature, labels[part])
            found = torch.autograd.grad(loss, weights)
            total = [t + f for t, f in zip(total, found, strict=True)]
        return total

    step, start = 1e-2, [w.detach().clone() for w in weights]
    direction, ends = slope(), []
    for sign in (1, -1):
        for w, s, d in zip(weights, start, direction, strict=True):
            w.data = s + sign * step * d
        ends.append(slope())
    for w, s in zip(weights, start, strict=True):
        w.data = s
    pairs = zip(start, *ends, strict=True)
    scores = torch.cat([(-s * (a - b) / (2 * step)).reshape(-1) for s, a, b in pairs])
    scores /= scores.sum().abs() + 1e-10
    bound = scores.sort().values[math.ceil(keep * len(scores) - 1e-9) - 1]
    masks = (scores <= bound).split([w.numel() for w in weights])
    return {id(w): m.view(w.shape) for w, m in zip(weights, masks, strict=True)}


def test_grasp_is_that_of_its_authors_on_any_number_of_ranks(monkeypatch):
    """Samples of each class come from wherever they lie, and make the authors' two batches."""
    torch.manual_seed(5)
    classes, each, keep = 3, 4, 0.2
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, classes)
    ).double()
    images = torch.randint(256, (32, 3, 4, 4), dtype=torch.uint8)
    labels = torch.arange(32) * 7 % 11 % classes
    first = [i for c in range(classes) for i in (labels == c).nonzero().view(-1)[:each].tolist()]
    assert len(first) == classes * each < len(labels)

    def normalised(values):
        return values.double() / 255 - 0.5

    alone = copy.deepcopy(model)
    wanted = grasp_as_published(alone, normalised(images[first]), labels[first], keep)
    monkeypatch.setattr(pactrain, "SAMPLES", each)
    settings = make(
        **{**COMMON, "pactrain_score": "auto", "keep_ratio": (keep,), "outer_iterations": 1}
    )
    assert (score_of(settings), GRASP_TEMPERATURE) == ("grasp", 200.0)
    mine = slice(32 // WORLD.size * WORLD.rank, 32 // WORLD.size * (WORLD.rank + 1))
    with nodes_of(2) as topology:
        context = make_context(settings, model, RandomStream(WORLD.rank, torch.float64), steps=1)
        problem = replace(
            context.problem,
            train_shard=Shard(images[mine], labels[mine]),
            batches=lambda shard, batch_size: [(normalised(shard.images), shard.labels)],
        )
        comms = comms_of(topology)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        PacTrain(comms, replace(context, problem=problem)).prune_(0)
        state = context.state
        # Two batches, twice, tell the watchdog that it goes on.
        assert WORLD.allreduce(context.heartbeat.beats) >= 4
    pruned = by_name(state.memory[PRUNED], state)
    for name, p in alone.named_parameters():
        expected = wanted.get(id(p), torch.ones_like(p, dtype=torch.bool))
        assert torch.equal(~pruned[name], expected), name
    assert_alike_on_all_ranks(state.memory[PRUNED])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    # Apart from what steps take: the mask, two dense vectors, images, counts per rank and class.
    traffic, clock = comms.everyone.traffic, state.position.clock
    bits = -(-state.layout.numel // 8)
    sample = classes * each * 3 * 4 * 4
    counts = 8 + 8 * WORLD.size * classes
    assert traffic.setup == bits + 2 * 8 * state.layout.numel + sample + counts
    assert (traffic.payload, traffic.mask, traffic.intra, traffic.sent) == (0, 0, 0, 0)
    assert state.position.clock.setup > 0 == clock.exchange == clock.method


def test_large_halves_are_cut_into_batches_of_the_same_size(monkeypatch):
    """12 images of 2 x 2 pixels: halves of 6, of which 5 would fit into a batch."""
    monkeypatch.setattr(pactrain, "SAMPLES", 4)
    monkeypatch.setattr(pactrain, "BATCH_PIXELS", 5 * 2 * 2)
    settings = make(**{**COMMON, "pactrain_score": "grasp"})
    context = make_context(settings, new_net(), RandomStream(WORLD.rank, torch.float64))
    shard = Shard(torch.zeros(24, 3, 2, 2, dtype=torch.uint8), torch.arange(24) % 3)
    problem = replace(
        context.problem,
        train_shard=shard,
        batches=lambda piece, batch_size: [(piece.images, piece.labels)],
    )
    with nodes_of(2) as topology:
        everyone = comms_of(topology).everyone
        found = pactrain.batches_to_score(everyone, replace(context, problem=problem))
    sizes = WORLD.allgather([len(labels) for _, labels in found])
    assert list(itertools.chain(*sizes)) == [3] * 4


def test_a_draw_takes_the_first_images_of_each_class_over_all_shards():
    """A draw of two images of three classes, out of two shards, by hand."""
    shards = [torch.tensor([2, 0, 0, 1, 0]), torch.tensor([1, 0, 2, 1, 2, 0, 2, 1, 1])]
    # Numbers of the images over both shards: of class 0 1, 2, 4, 6, 10; of 1 3, 5, 8, 12, 13; of 2
    # 0, 7, 9, 11.
    wanted = [1, 2, 3, 5, 0, 7]
    found = [-1] * len(wanted)
    before = torch.zeros(3, dtype=torch.int64)
    for start, labels in zip((0, 5), shards, strict=True):
        own, places = pactrain.places_in_draw(labels, before, 2)
        for image, place in zip(own.tolist(), places.tolist(), strict=True):
            assert found[place] == -1
            found[place] = start + image
        before += labels.bincount(minlength=3)
    assert found == wanted


def test_windows_of_text_are_at_even_distances_in_batches(monkeypatch):
    monkeypatch.setattr(pactrain, "WINDOWS", 6)
    monkeypatch.setattr(pactrain, "BATCH_TOKENS", 2 * 8)
    text = Windows(TextTokens(np.zeros(105, dtype=np.uint8)), range(0), 8)

    def starts(stop):
        return [list(piece.starts) for piece in windows_apart(text, stop)]

    # Every second one of 13, in halves of 3.
    assert starts(105) == [[0, 16], [32], [48, 64], [80]]
    # The last target of 5 windows is token 40.
    assert starts(41) == [[0, 8], [16, 24], [32]]
    assert starts(40) == [[0, 8], [16, 24]]
    # No piece is far shorter than others.
    monkeypatch.setattr(pactrain, "WINDOWS", 8)
    monkeypatch.setattr(pactrain, "BATCH_TOKENS", 3 * 8)
    assert starts(65) == [[0, 8], [16, 24], [32, 40], [48, 56]]
    # A window alone may be longer.
    monkeypatch.setattr(pactrain, "BATCH_TOKENS", 7)
    assert starts(40) == [[0], [8], [16], [24]]


def test_too_few_images_of_a_class_are_refused_by_all_ranks():
    shard = Shard(torch.zeros(4, 3, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 2, 2]))
    with nodes_of(2) as topology:
        everyone = comms_of(topology).everyone
        with pytest.raises(UserError, match="one has 0: give"):
            draw_balanced(everyone, shard, 1)
        full = Shard(shard.images, torch.tensor([0, 1, 2, 1]))
        with pytest.raises(UserError, match=f"one has {WORLD.size}: give"):
            draw_balanced(everyone, full, WORLD.size + 1)


def test_a_model_without_matrices_is_refused_by_all_ranks():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))

        def forward(self, x):
            return x.mean(dim=(1, 2, 3)).view(-1, 1) * self.weight

    for by in ({"pactrain_score": "grasp"}, {}):
        settings = make(**{**COMMON, **by})
        with nodes_of(2) as topology:
            stream = RandomStream(WORLD.rank, torch.float32)
            with pytest.raises(UserError, match="no weight of two or more dimensions"):
                list(run_driver(topology, settings, Scale(), stream, 1))


# --------------------------------------------------------------------------------------------------
# The tracker
# --------------------------------------------------------------------------------------------------


class Exchanger:
    """One job's exchange without training: gradients go in, and their sum comes out."""

    def __init__(self, topology, **changes):
        self.settings = make(**{**COMMON, "pactrain_stable_window": 3, **changes})
        stream = RandomStream(WORLD.rank, torch.float64)
        self.context = make_context(self.settings, Net().double(), stream, side=8)
        self.state = self.context.state
        self.topology = topology
        self.comms = comms_of(topology, flat=self.settings.aggregation == "flat")
        self.workers, self.traffic = self.comms.workers, self.comms.workers.traffic
        self.own = PacTrain(self.comms, self.context)
        self.generator = torch.Generator().manual_seed(WORLD.rank)

    def step(self, extra=()):
        """Exchange random gradients on all but the zero weights, and on `extra` places.

        Returns (what came out, the masked sum).
        """
        state, grad = self.state, self.state.grad
        torch.randn(state.layout.numel, generator=self.generator, out=grad)
        grad.mul_(state.theta != 0)
        for place in extra:
            grad[place] = 0.5 + WORLD.rank
        grad.mul_(self.workers.weight)
        wanted = grad.clone()
        WORLD.Allreduce(MPI.IN_PLACE, wanted.numpy())
        wanted.masked_fill_(state.memory[PRUNED], 0.0)
        self.exchange()
        self.topology.node.Bcast(grad.numpy(), root=0)
        self.own.follow_()
        return grad.clone(), wanted

    def exchange(self):
        self.traffic.payload = 0
        if self.workers.is_member:
            self.own.exchange_(self.state.grad)

    @property
    def stable(self):
        return self.state.memory[STABLE].tolist()


def every_third(state):
    pruned = torch.zeros_like(state.memory[PRUNED])
    pruned[::3] = True
    return pruned


def test_outside_is_told_per_bucket_of_any_value_but_zero():
    support = torch.tensor([True, False, False, False, True])
    fresh = torch.empty(5, dtype=torch.bool)
    grad = torch.tensor([1.0, 0.0, -0.0, 0.0, torch.nan])
    assert outside_(grad, support, fresh, 4).tolist() == [False, False]
    grad[2] = -1e-30
    assert outside_(grad, support, fresh, 4).tolist() == [True, False]
    assert fresh.tolist() == [False, False, True, False, False]


@pytest.mark.parametrize(("aggregation", "ranks_per_node"), SHAPES[::2])
def test_buckets_become_stable_and_unstable_and_stable_again(aggregation, ranks_per_node):
    with nodes_of(ranks_per_node) as topology:
        job = Exchanger(topology, aggregation=aggregation)
        state = job.state
        # Kept weights that are zero, in buckets 0 and 2: 130 is in bucket 1, which stays as it is.
        state.theta.fill_(1.0)
        state.theta[[1, 260]] = 0.0
        adopt_pruned_(state, every_third(state))
        assert state.layout.numel == 801
        dense = 8 * 801

        def step(*extra):
            found, wanted = job.step(extra)
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-15)
            assert_alike_on_all_ranks(found)
            return job.traffic.payload

        first = [step() for _ in range(3)]
        assert job.stable == [True] * 7
        supports = int(state.memory[SUPPORT].sum())
        compact = 8 * (supports + 7)
        if job.workers.is_member:
            assert first == [dense] * 3
            assert step() == compact
        else:
            step()
        # One worker alone finds something outside: it arrives in the same step.
        alone = [1] if WORLD.rank == 0 else []
        payload = step(*alone)
        assert job.stable == [True] * 7
        if job.workers.is_member:
            assert payload == compact + 8 * 128
        payload = step()
        assert job.stable == [False] + [True] * 6
        if job.workers.is_member:
            assert payload == compact
        # Bucket 0 in full, until its support stands still for a whole window again.
        step(*alone)
        assert bool(state.memory[SUPPORT][1])
        step()
        step()
        assert job.stable == [False] + [True] * 6
        for _ in range(3):
            step(*alone)
        assert job.stable == [True] * 7
        payload = step(*alone)
        if job.workers.is_member:
            assert payload == compact + 8


def test_a_step_that_overflows_in_fp16_says_nothing_of_supports():
    with nodes_of(1) as topology:
        job = Exchanger(topology, aggregation="flat", amp="fp16")
        job.state.theta.fill_(1.0)
        adopt_pruned_(job.state, every_third(job.state))
        for _ in range(3):
            job.step()
        before = {name: entry.tensor.clone() for name, entry in job.state.memory.items()}
        assert job.stable == [True] * 7
        # Zero times infinity is NaN, where weights are pruned as well.
        job.state.grad.fill_(torch.inf)
        job.exchange()
        job.own.follow_()
        assert not torch.isfinite(job.state.grad).any()
        for name, entry in job.state.memory.items():
            assert torch.equal(entry.tensor, before[name]), name


def test_one_rank_alone_keeps_a_bucket_unstable():
    last = WORLD.rank == WORLD.size - 1
    digests = torch.tensor([7, -7, 2**62, -(2**63)])
    unchanged = torch.tensor([5, 5, 5, 4])
    wanted = torch.tensor([True, True, True, False])
    assert torch.equal(agree_on_stable(wire_of(WORLD), unchanged, digests, 5), wanted)
    if WORLD.size > 1:
        if last:
            digests[1] += 1
            unchanged[2] = 0
        wanted[1:3] = False
        assert torch.equal(agree_on_stable(wire_of(WORLD), unchanged, digests, 5), wanted)


# --------------------------------------------------------------------------------------------------
# Ternary
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("aggregation", "ranks_per_node"), SHAPES[::2])
def test_ternary_sums_are_conserved_and_right_on_average(aggregation, ranks_per_node):
    torch.manual_seed(1000 + WORLD.rank)
    repetitions = 300
    with nodes_of(ranks_per_node) as topology:
        job = Exchanger(topology, aggregation=aggregation, pactrain_ternary=True)
        state, workers = job.state, job.workers
        state.theta.fill_(1.0)
        state.theta[1] = 0.0
        adopt_pruned_(state, every_third(state))
        for _ in range(3):
            found, wanted = job.step()
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-15)
            assert_alike_on_all_ranks(found)
        assert job.stable == [True] * 7
        generator = job.generator.get_state()
        _, wanted = job.step()
        job.generator.set_state(generator)
        mine = torch.randn(801, generator=job.generator, dtype=torch.float64)
        mine.mul_(state.theta != 0).mul_(workers.weight)
        total = torch.zeros_like(mine)
        for _ in range(repetitions):
            state.grad.copy_(mine)
            job.exchange()
            total += state.grad
        found = state.grad.clone()
        mean = total / repetitions
        counts = (state.memory[SUPPORT] & (wanted != 0)).sum()
        if workers.is_member:
            assert not mean[state.memory[PRUNED]].any()
            integers = job.own.integers
            assert integers.dtype == torch.int8
            assert integers.abs().max() <= workers.comm.size
            scales = job.own.scales[0]
            # Whole multiples of the scale: integers were added up, and nothing else.
            places = job.own.positions.split(job.own.counts)
            parts = integers.split(job.own.counts)
            for scale, place, part in zip(scales, places, parts, strict=True):
                assert torch.equal(found[place], part.double() * scale)
            bytes_wanted = 8 * 2 * 7 + integers.numel()
            assert job.traffic.payload == bytes_wanted
            # The standard error of each worker's s b is at most s / (2 sqrt(n)).
            bound = 5 * float(scales.max()) * workers.comm.size**0.5 / (2 * repetitions**0.5)
            assert float((mean - wanted).abs().max()) < bound
            assert counts > 300
            # Tighter, over all elements at once: no drift to either side.
            assert abs(float((mean - wanted).sum())) < bound * int(counts) ** 0.5
        # What is found outside is sent in full, and exactly.
        found, wanted = job.step([1] if WORLD.rank == 0 else [])
        torch.testing.assert_close(found[:128], wanted[:128], rtol=1e-13, atol=1e-15)
