"""How often nodes exchange, chosen by what steps and exchanges take."""

import weakref
from typing import Any

import pytest
from nodes import nodes_of
from small_runs import small_run

from prunex_mpi.config.resolve import make
from prunex_mpi.core.schedule import quadratic_rounds, total_steps
from prunex_mpi.run import problem
from prunex_mpi.run.supervision import overlaps_steps
from prunex_mpi.run.tuning import (
    Costs,
    chosen_by,
    exposed,
    hiding_steps,
    interval,
    is_left_to_measure,
    trial_of,
)
from prunex_mpi.settings.values import AUTO

SLOW = Costs(step=0.01, exchange=0.2, rest=0.0)
FAST = Costs(step=0.01, exchange=0.05, rest=0.0)


def test_the_fewest_steps_that_keep_the_share():
    # 0.2 s may be a twentieth of the time: 3.8 s of steps.
    assert interval(SLOW, 0.05, 0, 10**6) == 380
    assert interval(SLOW, 0.5, 0, 10**6) == 20
    assert interval(FAST, 0.05, 0, 10**6) == 95
    assert interval(SLOW, 0.05, 0, 100) == 100


def test_steps_behind_which_an_exchange_runs_cost_nothing():
    assert hiding_steps(SLOW, 1000) == 20
    assert hiding_steps(SLOW, 40) == 10
    assert hiding_steps(SLOW, 3) == 0
    assert exposed(SLOW, 20) == pytest.approx(0.0)
    assert exposed(SLOW, 15) == pytest.approx(0.05)
    # A quarter of the steps hides all but 5 % of the time.
    steps = interval(SLOW, 0.05, AUTO, 10**6)
    cost = exposed(SLOW, hiding_steps(SLOW, steps))
    assert cost <= 0.05 * (cost + steps * SLOW.step)
    shorter = exposed(SLOW, hiding_steps(SLOW, steps - 1))
    assert shorter > 0.05 * (shorter + (steps - 1) * SLOW.step)
    # What is no exchange can't be hidden.
    assert interval(Costs(0.01, 0.2, 0.19), 0.5, AUTO, 10**6) == 32


@pytest.mark.parametrize("method", ["prunex", "one-shot", "local-sgd", "qsr"])
def test_a_run_keeps_its_length_and_its_shares(method):
    settings = make("thin", method=method)
    nominal = 40
    chosen = chosen_by(settings, nominal, SLOW)
    assert chosen.local_steps == interval(SLOW, 0.05, AUTO, 160)
    assert chosen.overlap_steps == hiding_steps(SLOW, chosen.local_steps)
    whole = 64 * nominal
    found = total_steps(chosen, chosen.local_steps)
    assert found == pytest.approx(whole, abs=chosen.local_steps)
    if method == "prunex":
        frozen_at = chosen.freeze_iteration * chosen.local_steps
        assert frozen_at == pytest.approx(10 / 16 * whole, abs=chosen.local_steps)
        dense_until = chosen.warmup_iterations * chosen.local_steps
        assert dense_until == pytest.approx(4 / 16 * whole, abs=chosen.local_steps)


def test_the_warm_up_of_the_outer_step_keeps_its_share():
    settings = make("recipe", method="diloco", diloco_outer_warmup="1/8", local_steps="auto")
    fastest = Costs(step=0.01, exchange=0.0001, rest=0.0)
    chosen = chosen_by(settings, 11, fastest)
    assert chosen.outer_iterations == 11 * settings.outer_iterations
    share = chosen.options.outer_warmup / chosen.outer_iterations
    assert share == pytest.approx(1 / 8, abs=1e-2)


def test_what_is_given_is_kept():
    settings = make("thin", local_steps=12, overlap_steps="auto")
    chosen = chosen_by(settings, 40, SLOW)
    assert (chosen.local_steps, chosen.outer_iterations) == (12, 64)
    assert chosen.overlap_steps == 3
    settings = make("thin", overlap_steps=5)
    assert chosen_by(settings, 40, SLOW).overlap_steps == 5


@pytest.mark.parametrize("nominal", range(4, 60, 5))
def test_stages_and_evaluations_fit_a_run_of_any_length(nominal):
    stages = {"warmup_iterations": 12, "keep_ramp_iterations": 52, "freeze_iteration": 0}
    chosen = chosen_by(make("thin", **stages, evaluate_every=2), nominal, SLOW)
    assert chosen.warmup_iterations + chosen.keep_ramp_iterations <= chosen.outer_iterations
    # An evaluation waits for the exchange: some are left that none comes after.
    assert chosen.overlap_steps and chosen.evaluate_every > 1


def test_a_run_is_never_cut_to_a_few_outer_iterations():
    slowest = Costs(step=1e-4, exchange=10.0, rest=1.0)
    for method in ("prunex", "prunex-flat", "one-shot", "diloco", "qsr", "sparseloco"):
        chosen = chosen_by(make("thin", method=method), 40, slowest)
        assert chosen.outer_iterations == 16, method


def test_the_trial_of_a_growing_interval_has_rounds_of_one_length():
    trial = trial_of(make("thin", method="qsr"))
    assert quadratic_rounds(trial, trial.local_steps) == 3


def test_what_has_no_overlap_is_measured_without():
    settings = make("thin", method="sparseloco")
    assert is_left_to_measure(settings)
    assert not overlaps_steps(settings)
    assert trial_of(settings).overlap_steps == 0
    assert not is_left_to_measure(make("thin", method="sparseloco", local_steps=4))


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_nothing_of_the_trial_is_left_when_the_run_begins(monkeypatch):
    """On a GPU both would hold all images of the rank."""
    streams: list[weakref.ref] = []
    left = []
    real = problem.BatchStream

    def build(*shard: Any, **ways: Any) -> Any:
        left.append(sum(ref() is not None for ref in streams))
        stream = real(*shard, **ways)
        streams.append(weakref.ref(stream))
        return stream

    monkeypatch.setattr(problem, "BatchStream", build)
    changes = {"local_steps": "auto", "preset": "thin"}
    with nodes_of(1) as topology, small_run(topology, "recipe", **changes) as context:
        assert context.settings.local_steps != AUTO
    assert left == [0, 0]
