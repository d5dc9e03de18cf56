"""Images held out of the training set: the best network by them is delivered and tested once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import metrics_of, run_folder, run_job_here
from nodes import WORLD, nodes_of
from safetensors.torch import load_file
from small_runs import COMMON, PRUNING, small_run

from prunex_mpi.config.cli import parse
from prunex_mpi.config.resolve import make
from prunex_mpi.core import evaluation
from prunex_mpi.core.evaluation import BEST, Evaluation, delivered, density, is_better, stage_of
from prunex_mpi.core.state import RunContext
from prunex_mpi.run.supervision import outer_iterations

pytestmark = [pytest.mark.any_mpi, pytest.mark.two_ranks]
NEVER = {"freeze_iteration": 0, "freeze_drift": -1.0}
UNFROZEN = {
    "never frozen": NEVER,
    "budget": {**NEVER, "groups": ("coupled",), "keep_by": "multiply-adds", "lr": 0.3},
}
VAL = {"val_split": 0.25, "train_samples": 80, "test_samples": 16}


def settings_of(folder: Path, name: str, **changes: object) -> Any:
    run = {"run_dir": str(folder / name), "progress": "off", "checkpoint_every": "2"}
    return make(**{**COMMON, **VAL, **run, **changes})


@pytest.mark.mpi
@pytest.mark.parametrize(
    "scenario",
    [
        *("recipe", "dense", "prunetrain", "behind", "never frozen", "budget"),
        pytest.param("pactrain", marks=pytest.mark.long),
    ],
)
def test_the_best_of_what_has_been_evaluated_is_kept(scenario):
    # All that the lasso leaves of a channel is taken out at once.
    changes = {"prunetrain_threshold": 10.0} if scenario == "prunetrain" else {}
    changes |= UNFROZEN.get(scenario, {})
    changes |= {"outer_iterations": 4, "model": "resnet8-w4", **VAL}
    seen: list[tuple[Evaluation, torch.Tensor]] = []
    name = "recipe" if scenario in UNFROZEN else scenario
    with nodes_of(2) as topology, small_run(topology, name, **changes) as context:
        settings = context.settings
        for record in outer_iterations(topology, context):
            assert record["test_accuracy"] is None
            if record["val_accuracy"] is not None:
                stage = stage_of(settings, record["iteration"], context.state.frozen)
                names = ("density", "val_accuracy", "val_loss")
                found = Evaluation(record["iteration"], stage, *(record[n] for n in names))
                seen.append((found, context.state.z.clone()))
        # Masks of resnet8-w4 by multiply-adds differ in size, which says nothing.
        by_size = scenario not in ("recipe", "behind", *UNFROZEN)
        best = seen[0]
        for one in seen[1:]:
            best = one if is_better(one[0], best[0], by_size) else best
        assert context.state.position.best == list(best[0])
        assert torch.equal(context.state.memory[BEST], best[1])
        assert best[0].stage == max(found.stage for found, _ in seen)
        if by_size:
            assert best[0].density == min(found.density for found, _ in seen)
        last = [t.clone() for t in (context.state.z, *context.problem.model.buffers())]
        mask = context.state.mask.bits
        with delivered(context):
            assert density(context.state) == pytest.approx(best[0].density)
            assert torch.equal(context.state.z, best[1])
            found = evaluation.evaluate_on(topology, context, context.problem.test)
            # With the statistics that it was evaluated with.
            expected = {"loss": best[0].loss, "accuracy": best[0].accuracy}
            assert found == pytest.approx(expected, rel=1e-6)
        assert context.state.mask.bits is mask
        now = [context.state.z, *context.problem.model.buffers()]
        assert all(torch.equal(a, b) for a, b in zip(last, now, strict=True))


def test_smaller_beats_larger_and_of_equal_ones_the_better_counts():
    dense, pruned = Evaluation(1, 0.0, 1.0, 0.9, 0.1), Evaluation(2, 0.0, 0.5, 0.6, 1.0)
    assert is_better(pruned, dense, True) and not is_better(dense, pruned, True)
    assert is_better(Evaluation(3, 0.0, 0.5001, 0.7, 2.0), pruned, True)
    for by_size in (False, True):
        assert is_better(Evaluation(3, 0.0, 0.5, 0.6, 0.9), pruned, by_size)
        assert not is_better(Evaluation(3, 0.0, 0.5, 0.6, 1.0), pruned, by_size)


def test_later_stages_beat_earlier_ones_and_in_one_the_size_of_a_budget_says_nothing():
    just_pruned, healed = Evaluation(5, 1.0, 0.49, 0.5, 1.0), Evaluation(6, 1.0, 0.51, 0.7, 0.8)
    assert is_better(healed, just_pruned, False) and not is_better(just_pruned, healed, False)
    frozen = Evaluation(7, 2.0, 0.52, 0.4, 1.2)
    for by_size in (False, True):
        assert is_better(frozen, healed, by_size) and not is_better(healed, frozen, by_size)
    settings = make(warmup_iterations=2, keep_ramp_iterations=4, freeze_iteration=8)
    stages = [stage_of(settings, k, k >= 8) for k in range(1, 10)]
    assert stages[:2] == [0, 0] and stages[5:] == [1, 1, 2, 2] and stages == sorted(stages)
    assert stage_of(make(method="dense"), 9, False) == 0


@pytest.mark.mpi
def test_a_run_delivers_its_best_and_tests_it_once(monkeypatch):
    tested = []
    real = evaluation.evaluate_on

    def evaluate_on(topology: Any, context: RunContext, shard: Any) -> dict[str, float]:
        if shard is context.problem.kept_back:
            tested.append(context.state.position.iteration)
        # The fourth outer iteration is the best.
        found = real(topology, context, shard)
        accuracy = {3: 0.5, 4: 0.9}.get(context.state.position.iteration, 0.25)
        return {**found, "accuracy": accuracy}

    monkeypatch.setattr(evaluation, "evaluate_on", evaluate_on)
    monkeypatch.setattr("prunex_mpi.run.job.evaluate_on", evaluate_on)
    with run_folder() as folder:
        changes = {**PRUNING, "freeze_iteration": 2, "outer_iterations": 6}
        assert run_job_here(settings_of(folder, "whole", **changes)) == 0
        assert tested == [7]
        records = [
            json.loads(line) for line in (folder / "whole/metrics.jsonl").read_text().splitlines()
        ]
        assert all(r["test_loss"] is None and r["test_accuracy"] is None for r in records)
        summary = json.loads((folder / "whole/summary.json").read_text())
        assert summary["validation"]["iteration"] == 4
        assert summary["validation"]["loss"] == records[3]["val_loss"]
        assert summary["density"] == records[3]["density"] < 1
        assert summary["test_accuracy"] == 0.25 and summary["test_loss"] > 0
        best = load_file(folder / "whole/state.safetensors")
        WORLD.Barrier()

        # Ended after its fourth outer iteration, by the checkpoint behind it.
        if WORLD.rank == 0:
            for path in sorted((folder / "whole/checkpoints").iterdir())[1:]:
                path.rename(path.with_name(f"{path.name}.partial"))
            (folder / "whole/summary.json").unlink()
        before = metrics_of(folder / "whole/metrics.jsonl")
        WORLD.Barrier()
        assert run_job_here(parse(["--resume", "--run-dir", str(folder / "whole")])) == 0
        assert metrics_of(folder / "whole/metrics.jsonl") == before
        again = load_file(folder / "whole/state.safetensors")
        assert all(torch.equal(best[key], again[key]) for key in best)
