"""Report: pages that hold all they show, of runs in whatever state, and one line for what is none.

Directories are fabricated: no job is started.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from launch import run_python
from recorded import Delay, make_run, rank_lines, write_lines
from refused import refused_by

from prunex_mpi import report as program
from prunex_mpi.base.errors import UNREADABLE, USAGE
from prunex_mpi.base.record_keys import RANK_PHASES
from prunex_mpi.base.tables import format_cell
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.tools.report import curves, read_runs
from prunex_mpi.tools.report import page as pages
from prunex_mpi.tools.report.page import Page
from prunex_mpi.tools.report.read_runs import (
    RankRecord,
    Run,
    find_stragglers,
    rank_record,
    read_run,
)

pytestmark = pytest.mark.any_mpi

KIB, MB = 2**10, 10**6
ALONE = """
import sys
for name in ("torch", "torchvision", "mpi4py"):
    sys.modules[name] = None
from prunex_mpi.report import main
sys.exit(main(sys.argv[1:]))
"""
refused = partial(refused_by, program)
ODD = "a $x_1$ <b>&\u2028[日本] ü"


class Reader(HTMLParser):
    """Collect what a page is made of: its text, its tags and references."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.references.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: Path | str) -> Reader:
    """Return what a page holds."""
    reader = Reader()
    reader.feed(page if isinstance(page, str) else page.read_text(encoding="utf-8"))
    return reader


def text_of(page: Path | str) -> str:
    return " ".join(" ".join(read(page).text).split())


# --------------------------------------------------------------------------------------------------
# The page of one run
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fabricate a run under a name that is hard on markup, paths and pictures."""
    path = tmp_path_factory.mktemp("runs") / ODD
    return make_run(path, delay=Delay(2, "dual", 40), groups=["coupled"], ranks_per_node=2)


@pytest.fixture(scope="module")
def made(run: Path) -> tuple[Path, Page]:
    """Write the page and the pictures of that run; its figures have been drawn."""
    found: list[Page] = []

    own = pages.page_of_runs

    def page_of(runs: list[Run]) -> Page:
        found.append(own(runs))
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "page_of_runs", page_of)
        assert program.main([str(run), "--png", str(run.parent / "pic tures")]) == 0
    return run / "report.html", found[0]


@pytest.fixture
def written(made: tuple[Path, Page]) -> Path:
    return made[0]


@pytest.fixture
def page(made: tuple[Path, Page]) -> Page:
    return made[1]


def test_the_page_needs_nothing_else(written):
    found = read(written)
    assert not {"script", "link", "iframe", "object", "video"} & set(found.tags)
    assert found.references and all(
        r.startswith("data:image/png;base64,") for r in found.references
    )
    text = written.read_text(encoding="utf-8")
    assert "@import" not in text and "url(" not in text
    # Names are shown letter by letter.
    assert f"Run {' '.join(ODD.split())}" in text_of(written) and "<b>&" not in text
    assert 100 * KIB < written.stat().st_size < MB


def test_pictures_are_files_as_well(written, page):
    names = {picture.name for section in page.sections for picture in section.pictures}
    files = {path.stem: path for path in (written.parents[1] / "pic tures").iterdir()}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files.values())
    assert names == set(files)
    assert names == {
        *("learning-iterations", "learning-seconds", "learning-bytes"),
        *("bytes", "seconds", "synchronisation", "density", "drift", "density-layers", "residuals"),
    }


def test_tables_tell_the_end_who_was_slow_settings_and_versions(written):
    text = text_of(written)
    for words in (
        "completed after 20 outer iterations",
        "91.02 %",
        "1,000 before, 520 after pruning",
        "66.6 % of that",
        "2 node01 5 corrections",
        "Unlike preset recipe for method prunex",
        "outer-iterations 20 64",
        "groups coupled channel",
        "mpi (version) Open MPI v5.0.11",
        "ranks of each node 2, 2",
    ):
        assert words in text, words
    # What follows from the number of outer iterations is no change of the user's.
    assert "warmup-iterations" not in text


def test_a_line_that_the_legend_names_lies_inside_the_axes(page):
    figures = {p.name: p.figure for section in page.sections for p in section.pictures}
    (panel,) = figures["bytes"].axes
    (dense,) = (line for line in panel.lines if line.get_label().startswith("if dense"))
    assert panel.get_ylim()[0] <= min(dense.get_ydata()) <= max(dense.get_ydata())
    assert max(dense.get_ydata()) <= panel.get_ylim()[1]


def test_legends_cover_nothing_and_labels_do_not_touch(page):
    for section in page.sections:
        for picture in section.pictures:
            panels = [axes for axes in picture.figure.axes if axes.get_visible()]
            legends = [axes.get_legend() for axes in panels] + picture.figure.legends
            for legend in filter(None, legends):
                box = legend.get_window_extent()
                for axes in panels:
                    assert not box.overlaps(axes.bbox.shrunk(0.99, 0.99)), picture.name
            for axes in panels:
                boxes = [
                    label.get_window_extent()
                    for label in axes.get_yticklabels()
                    if label.get_text() and axes.bbox.y0 <= label.get_window_extent().y1
                ]
                boxes.sort(key=lambda b: b.y0)
                for below, above in pairwise(boxes):
                    assert below.y1 <= above.y0 + 1, picture.name


def test_everything_lies_inside_its_picture(page):
    for section in page.sections:
        for picture in section.pictures:
            whole = picture.figure.bbox
            tight = picture.figure.get_tightbbox().transformed(picture.figure.dpi_scale_trans)
            assert tight.x0 >= whole.x0 - 1 and tight.x1 <= whole.x1 + 1, picture.name
            assert tight.y0 >= whole.y0 - 1 and tight.y1 <= whole.y1 + 1, picture.name


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_a_missing_package_is_named_with_the_extra(missing, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    code, line = refused(capsys, tmp_path)
    assert code == USAGE
    assert f"needs {missing}" in line and 'pip install "prunex_mpi[report]"' in line


# --------------------------------------------------------------------------------------------------
# Runs that did not end well, older ones, and what is no run
# --------------------------------------------------------------------------------------------------


def words_of(path: Path) -> str:
    """Return what the page of a run warns of."""
    return " ".join(pages.notices({"": read_run(path)}))


def test_a_run_that_was_broken_off_says_so(tmp_path):
    path = make_run(tmp_path / "run", status="")
    file = path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    old = time.time() - 2 * read_runs.ALIVE_S
    os.utime(file, (old, old))
    found = read_run(path)
    assert (found.status, len(found.iterations)) == ("broken off", 19)
    text = words_of(path)
    assert "was broken off after 19 of 20 outer iterations" in text and "last line" in text
    assert format_cell(pages.result_table({"": found}).rows[0][3]) == "19"
    preempted = words_of(make_run(tmp_path / "preempted", status="preempted"))
    assert "was preempted (--resume goes on with it) after 20 of 20" in preempted
    assert preempted.endswith(": SIGTERM.")


def test_a_run_that_is_going_says_so(tmp_path):
    path = make_run(tmp_path / "run", status="")
    (path / "heartbeats").mkdir()
    (path / "heartbeats/0").write_text("")
    old = time.time() - 2 * read_runs.ALIVE_S
    os.utime(path / "metrics.jsonl", (old, old))
    assert read_run(path).status == "running"
    assert "still going, or was broken off in the last minute" in words_of(path)
    os.utime(path / "heartbeats/0", (old, old))
    assert read_run(path).status == "broken off"
    # A run that has just begun has nothing but heartbeats, the row of a comparison has none.
    os.utime(path / "heartbeats/0")
    (path / "metrics.jsonl").unlink()
    assert read_runs.how_it_ended(path, {}) == ("running", "")
    assert read_run(make_run(tmp_path / "row", status="")).status == "running"


def test_a_run_that_lost_nodes_says_what_that_cost(tmp_path):
    path = make_run(tmp_path / "run")
    assert words_of(path) == ""
    changes = [
        {"iteration": 3, "seconds": 0.2, "lost_seconds": 0.1, "lost_nodes": [1], "lost_ranks": [2]},
        {"iteration": 5, "seconds": 0.3, "lost_seconds": 0.0, "joined": 1},
        {"iteration": 9, "seconds": 8.0, "lost_seconds": 1.4, "left": ["b"], "joined": []},
    ]
    (path / "nodes.jsonl").write_text("".join(json.dumps(change) + "\n" for change in changes))
    assert words_of(path).startswith("Nodes were lost (times: 2) and joined (1): 10 s of starting")


def test_a_run_with_images_held_out_shows_what_it_reached_on_those(tmp_path):
    path = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["val_loss"], line["val_accuracy"] = line["test_loss"], 0.75
        line["test_loss"] = line["test_accuracy"] = None
    write_lines(path / "metrics.jsonl", lines)
    upper, lower = curves.learning({"": read_run(path)}, "iteration").axes
    assert lower.get_ylabel() == "held-out accuracy %"
    assert set(lower.lines[0].get_ydata()) == {75.0}
    assert len(upper.lines) > 1
    # Beside others: along the way what it was judged on, in the end the test images.
    both = {"run": read_run(path), "other": read_run(make_run(tmp_path / "other"))}
    _, lower = curves.learning(both, "iteration").axes
    assert lower.get_ylabel() == "test or held-out accuracy %"
    assert all(len(line.get_ydata()) for line in lower.lines)
    rows = pages.result_table(both).rows
    assert [row[4:6] for row in rows] == 2 * [both["other"].final]
    # A run that `bench compare` keeps has been tested on no image.
    kept = {"test_accuracy": None, "validation": {"accuracy": 0.5, "loss": 1.0}}
    untested = replace(both["run"], summary=both["run"].summary | kept)
    assert untested.final == (50.0, "held-out")


def test_a_run_of_text_has_losses_and_no_accuracy(tmp_path):
    path = make_run(tmp_path / "run", iterations=4, dataset="text")
    run = replace(read_run(path), summary={})
    upper, lower = curves.learning({"": run}, "iteration").axes
    assert (upper.get_ylabel(), lower.get_ylabel()) == ("training loss", "test loss nats")
    table = pages.result_table({"text": run, "too": replace(run, summary={"test_loss": 2.0204})})
    assert "loss nats" in table.columns and not any("accuracy" in name for name in table.columns)
    # Losses of text differ in the third decimal.
    assert format_cell(table.rows[1][4]) == "2.020"


def test_a_run_that_a_comparison_keeps_has_its_closing_table(tmp_path):
    found = read_run(make_run(tmp_path / "run"))
    best = {"iteration": 7, "accuracy": 0.5, "loss": 1.0}
    kept = found.summary | {"test_accuracy": None, "validation": best}
    table = pages.result_table({"": replace(found, summary=kept)})
    assert ("held-out accuracy", "50.00 %, of outer iteration 7") in table.rows
    assert ("test accuracy of the pruned model", "not evaluated") in table.rows


def test_a_run_that_diverged_says_so(tmp_path):
    path = make_run(tmp_path / "run", status="")
    with contextlib.closing(RunDirectory(path, "", resume=True)) as files:
        files.note_divergence("the loss is nan")
        assert "diverged after 20 of 20 outer iterations: the loss is nan" in words_of(path)
        # Who goes on from a checkpoint starts with a clean slate.
        files.rewind(files.sizes())
    assert not (path / "diverged.json").exists()


def test_a_run_without_ranks_and_layers_is_shown_and_without_torch(tmp_path):
    path = make_run(tmp_path / "run", iterations=4, ranks=False)
    (path / "layers.jsonl").unlink()
    done = run_python(["-c", ALONE, str(path)], tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    text = text_of(path / "report.html")
    assert "completed after 4 outer iterations" in text and "waited for" not in text


def test_settings_of_another_version_are_all_shown(tmp_path):
    path = make_run(tmp_path / "run", iterations=2)
    config = (path / "config.toml").read_text().replace('"recipe"', '"banquet"')
    (path / "config.toml").write_text("new-flag = 3\n" + config)
    table = pages.settings_table({"": read_run(path)})
    assert ("new-flag", "3", "-") in table.rows and len(table.rows) > 50


def cut_in_the_middle(name: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        lines = (path / name).read_bytes().splitlines(keepends=True)
        # Near the end: of layers.jsonl the last iteration alone is read.
        lines[-2] = lines[-2][:20] + b"\n"
        (path / name).write_bytes(b"".join(lines))

    return spoil


def too_few_ranks(path: Path) -> None:
    text = (path / "ranks.jsonl").read_text()
    (path / "ranks.jsonl").write_text(text.replace('"node": [0, 0, 1, 1]', '"node": [0]'))


def twice(path: Path) -> None:
    file = path / "metrics.jsonl"
    file.write_bytes(2 * file.read_bytes())


def huge_number(path: Path) -> None:
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text.replace('"frozen": false', f'"frozen": 1{400 * "0"}'))


def changes_of_words(path: Path) -> None:
    (path / "nodes.jsonl").write_text('{"iteration": 1, "seconds": "x"}\n')


SPOILT = {
    "no config": (lambda path: (path / "config.toml").unlink(), "not the folder of a run"),
    "no TOML": (lambda path: (path / "config.toml").write_text("="), "not a TOML file"),
    "no text": (lambda path: (path / "config.toml").write_bytes(b"\xff\xfe"), "not a TOML file"),
    "no metrics": (lambda path: (path / "metrics.jsonl").unlink(), "no finished outer iteration"),
    "empty metrics": (lambda path: (path / "metrics.jsonl").write_text(""), "no finished outer"),
    "a summary of a foreigner": (lambda path: (path / "summary.json").write_text("[]"), "summary"),
    "a metrics line": (cut_in_the_middle("metrics.jsonl"), "line 3 is damaged"),
    "a layers line": (cut_in_the_middle("layers.jsonl"), "line 19 is damaged"),
    "a ranks line": (cut_in_the_middle("ranks.jsonl"), "line 3 is damaged"),
    "ranks": (too_few_ranks, "ranks.jsonl', line 1 is damaged"),
    "changes": (changes_of_words, "nodes.jsonl', line 1 is damaged"),
    "iterations twice": (twice, "line 5 is damaged"),
    "a number": (huge_number, "line 1 is damaged"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_damaged_run_is_one_line(what, tmp_path, capsys):
    spoil, word = SPOILT[what]
    path = make_run(tmp_path / "a run\nü", iterations=4)
    spoil(path)
    code, line = refused(capsys, path)
    assert code == UNREADABLE and word in line
    assert not (path / "report.html").exists()


def test_what_is_no_run_is_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    (tmp_path / "other.json").write_text('{"comparison": {}}')
    for name, word in (
        ("nowhere", "there is no run"),
        ("empty", "not the folder of a run"),
        ("bytes", "not what --json of a comparison writes"),
        ("other.json", "not what --json of a comparison writes"),
    ):
        code, line = refused(capsys, tmp_path / name)
        assert code == UNREADABLE and word in line


def test_what_does_not_fit_on_a_page_is_one_line(tmp_path, run, capsys):
    (tmp_path / "c.json").write_text("{}")
    assert "fit on one page" in refused(capsys, run, tmp_path / "c.json")[1]
    assert "given twice" in refused(capsys, run, run / ".." / run.name)[1]
    assert "at most 28" in refused(capsys, *[run] * 29)[1]
    code, line = refused(capsys, run, "--outptu", "x")
    assert code == USAGE and "--output" in line


def test_a_page_that_cant_be_written_is_one_line(tmp_path, capsys, monkeypatch):
    path = make_run(tmp_path / "run", iterations=2)
    monkeypatch.setattr(pages, "page_of_runs", lambda _: Page("", "", (), ()))
    code, line = refused(capsys, path, "--output", tmp_path / "no/where.html")
    assert code == USAGE and "--output" in line
    assert "--png" in refused(capsys, path, "--png", path / "config.toml")[1]


# --------------------------------------------------------------------------------------------------
# Several runs, comparisons
# --------------------------------------------------------------------------------------------------


def test_several_runs_stand_side_by_side_and_those_with_nothing_to_show_are_left_out(
    tmp_path, monkeypatch, capsys
):
    make_run(tmp_path / "x/run", iterations=6, delay=Delay(3, "local", 50))
    broken_off = make_run(tmp_path / "y/run", iterations=4, status="", ranks=False, method="dense")
    old = time.time() - 2 * read_runs.ALIVE_S
    os.utime(broken_off / "metrics.jsonl", (old, old))
    begun = make_run(tmp_path / "begun/run", iterations=4)
    (begun / "metrics.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    assert program.main(["x/run", "begun/run", "y/run"]) == 0
    out = capsys.readouterr().out
    assert "left out: 'begun/run' has no finished outer iteration (" in out
    text = text_of(tmp_path / "report.html")
    assert "1: x/run completed prunex" in text and "2: y/run broken off dense" in text
    assert "1: x/run 3 node01 1 local steps" in text and "begun" not in text
    assert "The runs differ in outer-iterations." in text
    assert "2: y/run: The run was broken off after 4 of 4" in text
    Path("x/run/metrics.jsonl").unlink()
    code, line = refused(capsys, "x/run", "begun/run")
    assert code == UNREADABLE and "none of these runs has a finished outer iteration" in line


def on_one_node(path: Path) -> Path:
    """Fabricate a run of which nothing left a node."""
    make_run(path, iterations=4, nodes=(2,))
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["bytes"]["sent"] = 0
    write_lines(path / "metrics.jsonl", lines)
    summary = json.loads((path / "summary.json").read_text())
    summary["bytes"]["sent"] = 0
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_what_left_the_machine_is_asked_of_all_jobs_of_a_run(tmp_path):
    # Its last job had one node, the jobs before had two.
    resumed, alone = make_run(tmp_path / "resumed", nodes=(2,)), on_one_node(tmp_path / "alone")
    for path, stayed in ((resumed, False), (alone, True)):
        table = dict(pages.result_table({"": read_run(path)}).rows)
        assert ("one node: none of it leaves" in table["payload of a leader"]) == stayed


def test_beside_a_run_of_one_node_bytes_are_those_that_leaders_handed_over(tmp_path):
    two = read_run(make_run(tmp_path / "two", iterations=4))
    one = read_run(on_one_node(tmp_path / "one"))
    assert curves.sent_bytes([two]) == "bytes.sent"
    assert curves.sent_bytes([one, two]) == "bytes.payload"
    _, lower = curves.learning({"one": one, "two": two}, "bytes.payload").axes
    assert lower.get_xlabel() == "MiB that a leader handed over"
    assert lower.lines[0].get_xdata().all()


# --------------------------------------------------------------------------------------------------
# Ranks that the others waited for
# --------------------------------------------------------------------------------------------------

LAYOUTS = [(2, 2), (1, 1), (4, 4), (2, 1), (2, 2, 2), (3, 3)]
TRIALS, RIGHT = 50, 48


@pytest.mark.parametrize("seed", [0, 1])
def test_the_culprit_of_a_drawn_delay_is_the_first_or_second_suspect(seed):
    rng = np.random.default_rng(seed)
    missed = []
    for _ in range(TRIALS):
        nodes = LAYOUTS[rng.integers(len(LAYOUTS))]
        delay = Delay(
            int(rng.integers(sum(nodes))),
            str(rng.choice(RANK_PHASES)),
            float(rng.uniform(5, 50)),
            float(rng.choice([1.0, 0.3])),
        )
        found = find_stragglers(map(rank_record, rank_lines(rng, nodes, 25, delay)))
        if (delay.phase, delay.rank) not in [(s.phase, s.rank) for s in found[:2]]:
            missed.append((nodes, delay))
    assert len(missed) <= TRIALS - RIGHT, missed


def record(node: list[int], hosts: tuple[str, ...] = (), **work: list[float]) -> RankRecord:
    """Return an outer iteration of ranks on these nodes."""
    seconds = {phase: np.array(values, dtype=float) for phase, values in work.items()}
    return RankRecord(1, np.array(node), seconds, {}, {}, np.zeros(len(node)), hosts)


def test_leaders_are_held_against_leaders():
    # All leaders pack, which is no fault of theirs; that rank 2 packs for longer is.
    (found,) = find_stragglers([record([0, 0, 1, 1], inter=[5.0, 1.0, 7.0, 1.0])])
    assert (found.rank, found.seconds) == (2, 2.0)
    assert find_stragglers([record([0, 0, 0], project=[5.0, 1.0, 1.0])]) == []


def test_after_a_loss_numbers_that_others_have_taken_blame_nobody_else():
    before = record([0, 1, 2], ("a", "b", "c"), local=[1, 4, 1])
    # Without b: c is the second node now.
    after = record([0, 1], ("a", "c"), local=[3, 1])
    found = find_stragglers([before, replace(before, hosts=()), after, replace(after, hosts=())])
    assert [(s.rank, s.host, s.seconds) for s in found] == [(1, "b", 6 / 4), (0, "a", 4 / 4)]
