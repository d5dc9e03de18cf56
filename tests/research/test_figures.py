"""The paper's figures: drawn from runs, with its values beside theirs, or refused in one line."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from recorded import BROADCAST, make_run
from refused import refused_by
from safetensors.numpy import save_file

from prunex_mpi import bench
from prunex_mpi.base.errors import UNREADABLE, USAGE
from prunex_mpi.research import figures
from prunex_mpi.research.figures import FIGURES, Drawn, by_name
from prunex_mpi.tools.report.curves import styled
from prunex_mpi.tools.report.read_runs import read_run

pytestmark = pytest.mark.any_mpi


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fabricate a complete run with a model of two convolutions."""
    path = make_run(tmp_path_factory.mktemp("runs") / "run $1", iterations=8)
    stripes = np.ones((4, 3, 2, 2), dtype=np.float32)
    stripes[1] = 0
    stripes[:, 2] = 0
    dense = np.ones((2, 2, 3, 3), dtype=np.float32)
    tensors = {"a.weight": stripes, "b.weight": dense, "fc.weight": np.zeros((2, 2), np.float32)}
    save_file(tensors, path / "state.safetensors")
    return path


def draw(*arguments: object) -> int:
    return bench.main(["figure", *map(str, arguments)])


def below(drawn: Drawn) -> dict[str, tuple[str, str]]:
    """Return our value and the paper's by what they are of."""
    return {what: (here, paper) for what, here, paper in drawn.rows}


@pytest.mark.parametrize("number", FIGURES)
def test_each_figure_is_one_command(number, run, tmp_path, capsys):
    file = tmp_path / f"figure {number}.png"
    assert draw(number, run, "--output", file) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert f"Figure {number}: {FIGURES[number]}" in printed
    assert "paper" in printed and str(file) in printed


def test_values_of_the_paper_stand_where_they_belong(tmp_path: Path) -> None:
    given = (
        {"method": "prunex", "keep_ratio": [0.5]},
        {"method": "prunex", "keep_ratio": [0.5], "groups": ["coupled"]},
        {"method": "pactrain", "keep_ratio": [0.5]},
        {"method": "dense"},
    )
    runs = [
        read_run(make_run(tmp_path / str(number), iterations=4, **settings))
        for number, settings in enumerate(given)
    ]
    with styled():
        split, ranks = figures.split(by_name(runs)), figures.of_ranks(runs[0])

    def with_values(drawn: Drawn) -> list[str]:
        return [what for what, (_, paper) in below(drawn).items() if paper != "-"]

    assert {what.partition(",")[0] for what in with_values(split)} == {"prunex (0)", "prunex (1)"}
    assert {what.endswith("primal") for what in with_values(ranks)} == {True}


def test_the_split_of_communication_is_that_of_the_leaders(run: Path) -> None:
    shares = figures.communication(read_run(run))
    lines = [json.loads(line) for line in (run / "ranks.jsonl").read_text().splitlines()]
    node = np.array(lines[0]["node"])
    leads = [list(node).index(place) for place in np.unique(node)]
    inter = sum(np.mean(np.array(x["exchange"]["inter"])[leads]) for x in lines)
    assert len(leads) < len(node)
    assert shares["inter"] == pytest.approx((1 - BROADCAST) * inter)
    assert shares["broadcast"] == pytest.approx(BROADCAST * inter)
    with styled():
        drawn = figures.split(by_name([read_run(run)]))
    assert below(drawn)["prunex, broadcast in the node"][1] == "13.8 %"


def test_patterns_are_those_of_the_weights(run):
    with styled():
        drawn = figures.patterns(read_run(run))
    # Only what has zeros is shown.
    ((name, (here, _)),) = below(drawn).items()
    assert name == "a.weight" and "whole rows of zeros 1 of 4, columns 4 of 12" in here
    stripes = drawn.figure.axes[0].images[0].get_array()
    assert stripes.shape == (4, 12)
    assert stripes[1].max() == 0 and stripes[:, 8:].max() == 0 and stripes[0, :8].min() == 1
    # White zeros at an edge are told from the page by a frame.
    assert all(spine.get_visible() for spine in drawn.figure.axes[0].spines.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("8 OLD", "any communication in ranks.jsonl"),
        ("10 OLD", "residuals of each rank"),
        ("11 BARE", "residuals in layers.jsonl"),
        ("13 OLD", "state.safetensors"),
        ("13 DAMAGED", "is damaged"),
        ("13 PIPE", "not a regular file"),
        ("10 RUN OLD", "of one run"),
        ("9 RUN", "no figure '9'"),
        ("8 RUN --output x.txt", ".svg, .png or .pdf"),
        ("8 NOWHERE", "there is no run"),
        ("8", "required: RUN"),
    ],
)
def test_what_cant_be_drawn_is_one_line(arguments, words, run, tmp_path, capsys):
    places = {"RUN": str(run), "NOWHERE": str(tmp_path / "nowhere")}
    for name in ("OLD", "BARE", "DAMAGED", "PIPE"):
        if name in arguments:
            path = make_run(tmp_path / name, iterations=2, ranks=False)
            (path / "layers.jsonl").unlink()
            places[name] = str(path)
            if name == "DAMAGED":
                (path / "state.safetensors").write_bytes(b"\xff" * 40)
            if name == "PIPE":
                (path / "state.safetensors").unlink(missing_ok=True)
                os.mkfifo(path / "state.safetensors")
    code, line = refused_by(
        bench, capsys, "figure", *[places.get(word, word) for word in arguments.split()]
    )
    assert words in line
    own = ("OLD", "BARE", "DAMAGED", "PIPE", "NOWHERE")
    assert code == (
        UNREADABLE if any(n in arguments for n in own) and words != "of one run" else USAGE
    )
