"""Tables and figures of READMEs are those of the results beside them."""

import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import readme_tables

from prunex_mpi.base.units import MIB
from prunex_mpi.tools.report.comparison import Comparison, Measured, Outcome


def ran(accuracy: float, mib: int, left: int) -> Measured:
    """Return what a run measured; what no README shows is 0."""
    shown = {"accuracy": accuracy, "sent_bytes": mib * MIB, "parameters_left": left, "curve": ()}
    return Measured(**{field.name: shown.get(field.name, 0) for field in fields(Measured)})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder with results of two rows, one of which diverged with one seed."""
    full = (
        Outcome("dense", 0, 0.4, ran(0.65, 2048, 1000)),
        Outcome("dense", 1, 0.4, ran(0.66, 2048, 1001)),
        Outcome("prunex", 0, 0.2, ran(0.64, 8, 250)),
        Outcome("prunex", 1, 0.2, None, "diverged"),
    )
    found = Comparison(
        title="title",
        machine={},
        rows=("dense", "prunex"),
        seeds=(0, 1),
        tunings=(),
        outcomes=full,
        notes=(),
    )
    (tmp_path / "results").mkdir()
    file = tmp_path / "results" / "a.json"
    file.write_text(json.dumps({"comparison": asdict(found)}))
    return tmp_path


def block(kind: str, body: str) -> str:
    return f"before\n<!-- results/a.json: {kind} -->\n{body}<!-- end -->\nafter\n"


def test_the_readmes_show_what_was_measured(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["readme_tables", "--check"])
    assert readme_tables.main() == 0


def test_tables_are_written(results):
    text, problems = readme_tables.renewed(block("results", "old\n"), results)
    assert not problems
    assert text == block(
        "results",
        "| row | place | accuracy % | sent MiB | parameters left | learning rate |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| dense | 1 | 65.5 ± 0.7 | 2,048.0 | 1,000 | 0.4 |\n"
        "| prunex | - | 64.0 | 8.0 | 250 | 0.2 |\n",
    )
    assert readme_tables.renewed(text, results) == (text, [])


def test_figures_that_no_table_has_are_found(results):
    right = block("figures", "dense reaches 65.5 % with 2,048.0 MiB, in 3 of 4 cases\n")
    assert readme_tables.renewed(right, results) == (right, [])
    wrong = block("figures", "dense reaches 65.6 %\n")
    assert readme_tables.renewed(wrong, results) == (
        wrong,
        ["65.6 is in no table of results/a.json"],
    )
    # Of whole numbers those that were measured, rounded or not; of others nothing is known.
    right = (
        "1,000 parameters, 250 parameters, 2,048 MiB, 64 % (66 % rounded) in 17 epochs of 4 bits\n"
    )
    right = block("figures", right)
    assert readme_tables.renewed(right, results) == (right, [])
    wrong = block("figures", "1,001 of all, 2,049 MiB, 251 parameters, 63 %\nand 77\ns\n")
    assert readme_tables.renewed(wrong, results)[1] == [
        f"{figure} is in no table of results/a.json"
        for figure in ("1,001", "2,049", "251", "63", "77")
    ]
    _, problems = readme_tables.renewed(block("equal-time", ""), results)
    assert problems == ["results/a.json has no table equal-time; there are results"]


@pytest.mark.parametrize(
    "opening",
    [
        "<!-- results/a.json: figures -->",
        "<!-- results/a.json: results -->",
        "<!-- result/a.json: results -->",
        "<!-- end -->",
        "<!-- results/a.json",
    ],
)
def test_a_block_that_is_not_closed_is_found_and_swallows_nothing(results, opening):
    whole, _ = readme_tables.renewed(block("results", "old\n"), results)
    between = f"{opening}\n99.9 % of all\n"
    text, problems = readme_tables.renewed(between + block("results", "old\n"), results)
    assert text == between + whole
    assert len(problems) == 1 and problems[0].startswith(f"{opening} begins or ends no block")
    # Nor at the end.
    text, problems = readme_tables.renewed(whole + between, results)
    assert text == whole + between and len(problems) == 1
