"""What the READMEs show works: their commands, the flags and files that they name, their links."""

import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import readme_tables
import settings_table
from launch import run_job, train

from prunex_mpi import doctor, export, report
from prunex_mpi.base.errors import UserError
from prunex_mpi.base.record_keys import KINDS, PHASES, RESIDUALS
from prunex_mpi.config import cli
from prunex_mpi.config.resolve import BY_NAME as METHODS
from prunex_mpi.config.resolve import concerns
from prunex_mpi.research import bench, figures
from prunex_mpi.research import plan as compare
from prunex_mpi.run import relaunch as elastic
from prunex_mpi.tools import evaluate_options as evaluate
from prunex_mpi.tools.report.comparison import read_comparison
from prunex_mpi.train import main

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "prunex_mpi"
FOLDERS = (".", "batch", "tests", "prunex_mpi")
FOLDERS += tuple(
    f"prunex_mpi/{name}" for name in ("data", "methods", "research", "run", "settings")
)
FOLDERS += ("prunex_mpi/methods/results",)
READMES = [ROOT / folder / "README.md" for folder in FOLDERS]
# Of the first page; and of all pages together, generated tables apart.
LONGEST, MOST_WORDS, MOST_IN_ALL = 165, 1700, 14400
GENERATED = re.compile(r"<!-- \S+\.json: (?!figures)\S+ -->.*?<!-- end -->", re.DOTALL)

STARTS = ("python -m prunex_mpi", "python tests/", "mpirun ", "srun ", "sbatch ", "bash batch/")
PARSERS = {"train": cli, "bench": bench, "doctor": doctor, "export": export, "report": report}
PARSERS |= {"evaluate": evaluate, "elastic": elastic}
# What scripts of batch/ hand their flags to.
SCRIPTS = {
    "batch/quickstart.sh": ["train"],
    "batch/train.sbatch": ["train"],
    "batch/elastic.sbatch": ["train"],
    "batch/probe.sbatch": ["bench", "collectives"],
}
# Flags of Slurm and pytest, and what a run or an installation makes.
FOREIGN = {"--mpi", "--gpu-bind", "--signal", "--nodes", "--ntasks-per-node", "--gpus-per-node"}
FOREIGN |= {
    "--with-mpi",
    "--with-ft",
    "--oversubscribe",
    "--allow-run-as-root",
    "--mca",
    "--host",
    "--no-kill",
}
MADE = {".venv", "runs", "checkpoints", "heartbeats"}

LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`]+)`")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
FILE = re.compile(r"\.?[a-z_][\w.-]*(/[\w.-]*)+")


def blocks_and_prose(text: str) -> tuple[list[str], str]:
    """Return the lines of code blocks, continued ones joined, and the text beside them."""
    code, prose, fenced = [], [], False
    for line in text.splitlines():
        fence = line.startswith("```")
        fenced ^= fence
        if fence:
            continue
        (code if fenced or line.startswith("    ") else prose).append(line)
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(code))
    return [line.strip() for line in joined.splitlines()], "\n".join(prose)


def spans(prose: str) -> list[str]:
    """Return what stands between backticks, on one line each."""
    return [" ".join(span.split()) for span in SPAN.findall(prose)]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command that a README shows, in a block or between backticks."""
    code, prose = blocks_and_prose(text)
    for line in [*code, *spans(prose)]:
        line = re.sub(r"^((\$|[A-Z_]+=\S+) )+", "", line)
        if line.startswith(STARTS) or "python -m prunex_mpi" in line:
            words = shlex.split(line, comments=True)
            yield [word.strip("[]") for word in words if word != "..."]


def program_of(words: list[str]) -> list[str]:
    """Return the program that a command starts and its arguments; nothing where there is none."""
    for i, word in enumerate(words):
        if word in SCRIPTS:
            return [*SCRIPTS[word], *words[i + 1 :]]
        if words[i - 1] == "-m" and word.startswith("prunex_mpi."):
            return [word.removeprefix("prunex_mpi."), *words[i + 1 :]]
    return []


def refused(words: list[str]) -> str:
    """Say why the program that a command starts would not take its arguments; empty if it would."""
    program, *arguments = program_of(words) or [""]
    # Plans and files of settings are named as seen from the project.
    arguments = [str(ROOT / w) if w.endswith(".toml") else w for w in arguments]
    if not program:
        return ""
    if program not in PARSERS:
        return f"there is no program {program}"
    parser = PARSERS[program]
    if program == "bench" and arguments[:1] == ["compare"]:
        parser, arguments = compare, arguments[1:]
    if program == "bench" and arguments[:1] == ["figure"]:
        parser, arguments = figures, arguments[1:]
    if not arguments:
        # A program's name alone.
        return ""
    if program == "elastic" and (why := refused(arguments[arguments.index("--") + 1 :])):
        return why
    try:
        parser.parse(arguments)
    except UserError as error:
        return str(error)
    except SystemExit as left:
        return "" if not left.code else "left"
    return ""


def known_flags() -> set[str]:
    """Return the flags of all programs, of the tests and of the scripts of the harness."""
    built = [cli, bench, compare, doctor, elastic, evaluate, export, figures, report]
    flags = {flag for m in built for a in m.build_parser()._actions for flag in a.option_strings}
    for name in ("conftest.py", "harness/cluster.py", "harness/golden.py", "campaigns/drill.py"):
        flags |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', (ROOT / "tests" / name).read_text()))
    return flags | FOREIGN


def slug(heading: str) -> str:
    """Return the anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    return {slug(line.lstrip("# ")) for line in path.read_text().splitlines() if line[:1] == "#"}


def is_there(name: str, folder: Path) -> bool:
    """Return whether a file is there, seen from the README's folder, the project or the package."""
    made = name.split("/")[0] in MADE
    return made or any((place / name).exists() for place in (folder, ROOT, PACKAGE))


def problems(text: str, folder: Path = ROOT) -> list[str]:
    """Return what is wrong with a README that lies in `folder`."""
    _, prose = blocks_and_prose(text)
    shown = list(commands(text))
    found = [f"{shlex.join(words)}: {why}" for words in shown if (why := refused(words))]
    flags = {
        flag for span in [*spans(prose), *map(shlex.join, shown)] for flag in FLAG.findall(span)
    }
    found += [f"no program knows {flag}" for flag in sorted(flags - known_flags())]
    files = [word for words in shown for word in words if word.startswith(("batch/", "tests/"))]
    files += [span for span in spans(prose) if FILE.fullmatch(span)]
    found += [f"no file {name}" for name in files if not is_there(name, folder)]
    for target in LINK.findall(prose):
        name, _, anchor = target.partition("#")
        if target.startswith("https:"):
            continue
        if not (folder / name).exists():
            found.append(f"no file {target}")
        elif anchor and anchor not in anchors(folder / name if name else folder / "README.md"):
            found.append(f"no heading {target}")
    return found


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def all_commands() -> list[list[str]]:
    return [words for path in READMES for words in commands(path.read_text())]


def test_every_readme_is_looked_at():
    assert set(PACKAGE.rglob("README.md")) <= set(READMES)


def test_the_first_one_is_one_page():
    text = READMES[0].read_text()
    assert len(text.splitlines()) <= LONGEST
    assert len(text.split()) <= MOST_WORDS


def test_all_pages_are_short():
    pages = [path for path in READMES if path.parent.name != "settings"]
    text = "".join(path.read_text() for path in [*pages, ROOT / "CHANGELOG.md"])
    assert len(GENERATED.sub("", text).split()) <= MOST_IN_ALL


def test_the_table_of_settings_is_what_the_code_says(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["settings_table", "--check"])
    assert settings_table.main() == 0


def test_every_key_of_a_record_has_a_row():
    text = (PACKAGE / "run" / "README.md").read_text()
    table = text.partition("\n## Keys of metrics.jsonl\n")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in spans(row)}
    keys = {f"seconds.{phase}" for phase in PHASES} | {f"bytes.{kind}" for kind in KINDS}
    sources = "".join(
        (PACKAGE / "core" / f"{name}.py").read_text() for name in ("evaluation", "loop")
    )
    for function in ("iteration_record", "quality", "finish_round"):
        body = re.search(rf"^def {function}\b.*?(?=^def |\Z)", sources, re.M | re.S)[0]
        keys |= set(re.findall(r'"(\w+)": ', body)) | set(re.findall(r'"(test_\w+)"', body))
    keys -= {"seconds", "bytes", "residuals", "layers", "rank", "status", "converged", "estimate"}
    keys |= {f"residuals.{name}" for name in RESIDUALS}
    assert keys - named == set()


def test_calls_that_leave_a_node_are_where_they_are_said_to_be():
    text = (PACKAGE / "README.md").read_text()
    table = text.partition("\n## Where bytes leave the node\n")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:-1] for row in table.splitlines() if row.endswith(".py` |")]
    assert len(rows) > 4
    for _, calls, _, files in rows:
        source = "".join((PACKAGE / name).read_text() for name in spans(files))
        for call in spans(calls):
            assert re.search(rf"\.{call}\(", source), f"{call} is not called in {files}"


# Commands of the first page that say of which results' row they are.
SHOWN_ROW = re.compile(r"^    # (\S+\.json): (.+)\n    (mpirun .+)$", re.M)
ROWS_SHOWN = SHOWN_ROW.findall(READMES[0].read_text())


@pytest.mark.parametrize(("file", "name", "command"), ROWS_SHOWN)
def test_a_command_of_the_first_page_gives_the_figures_of_its_row(file, name, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = cli.parse(program_of(shlex.split(command))[1:])
    found = read_comparison(PACKAGE / "methods" / "results" / file)
    told = readme_tables.told_by_dry_run(settings)
    for run in found.by_row[name]:
        assert run.lr == settings.lr
        assert readme_tables.differing(told, run.measured) == []


def test_a_command_with_a_flag_too_few_is_found_out():
    file, _, command = next(row for row in ROWS_SHOWN if row[1] == "local-sgd int4")
    found = read_comparison(PACKAGE / "methods" / "results" / file)
    measured = found.by_row["local-sgd int4"][0].measured

    def differs(old: str, new: str) -> list[str]:
        words = program_of(shlex.split(command.replace(old, new)))[1:]
        words = [str(ROOT / w) if w.endswith(".toml") else w for w in words]
        return readme_tables.differing(readme_tables.told_by_dry_run(cli.parse(words)), measured)

    assert differs("", "") == []
    assert differs("--payload int4", "") == ["bytes"]
    assert differs("--method", "--model gpt_nano-w32 --method") == ["parameters", "bytes"]
    assert differs("--method", "--local-steps 8 --method") == ["steps", "local steps"]


def test_the_first_page_shows_rows():
    assert len(ROWS_SHOWN) > 4


def test_every_method_has_a_row_and_is_counted():
    table = (PACKAGE / "methods" / "README.md").read_text().partition("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = [name for row in rows for name in spans(row) if not name.startswith("--")]
    assert sorted(named) == sorted(METHODS)
    # Beside PruneX and PacTrain, which the first README names.
    assert f" and {len(METHODS) - 2} more [methods]" in " ".join(READMES[0].read_text().split())


@pytest.mark.parametrize("path", READMES, ids=names)
def test_what_a_readme_names_exists(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert problems(path.read_text(), path.parent) == []


def test_functions_of_the_equations_are_where_they_are_said_to_be():
    text = (PACKAGE / "README.md").read_text()
    rows = [row.split("|")[1:-1] for row in text.splitlines() if row.endswith(".py` |")]
    places = [(spans(functions), spans(files)) for *_, functions, files in rows]
    assert len(places) > 20
    for functions, files in places:
        sources = [(PACKAGE / name).read_text() for name in files]
        for name in functions:
            defined = re.compile(rf"^(def|class) {name}\b", re.M)
            assert any(map(defined.search, sources)), f"{name} is not in {files}"


def test_there_are_commands_of_all_programs():
    assert {program_of(words)[0] for words in all_commands() if program_of(words)} == set(PARSERS)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("    mpirun -n 4 python -m prunex_mpi.train --keep-rato 0.5\n", "--keep-rato"),
        ("    sbatch --nodes=2 batch/train.sbatch --modl resnet18\n", "--modl"),
        ("    python -m prunex_mpi.bench compare --metods dense\n", "--metods"),
        ("    bash batch/quikstart.sh\n", "batch/quikstart.sh"),
        ("    python -m prunex_mpi.exprt runs/a\n", "exprt"),
        (
            "runs `mpirun -n 2 python -m prunex_mpi.bench\ncollectives --modl resnet18` twice",
            "modl",
        ),
        ("with `--keep-ratoi 0.5` or", "--keep-ratoi"),
        ("see `prunex_mpi/core/stat.py`", "prunex_mpi/core/stat.py"),
        ("see [there](prunex_mpi/REDME.md)", "REDME"),
        ("see [there](tests/README.md#falts)", "falts"),
    ],
)
def test_the_check_itself_sees_what_is_wrong(text, word):
    found = problems(text)
    assert found
    assert all(word in problem for problem in found)


def test_the_first_page_names_the_programs():
    table = READMES[0].read_text()
    assert all(f"| `python -m prunex_mpi.{name}` |" in table for name in PARSERS)


DRY_RUNS = [words for words in all_commands() if "--dry-run" in words]


@pytest.mark.any_mpi
@pytest.mark.usefixtures("failing_instead_of_aborting")
@pytest.mark.parametrize("words", DRY_RUNS, ids=" ".join)
def test_dry_runs_print_what_is_shown(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "".join(path.read_text() for path in READMES)
    after = text.partition(f"$ {shlex.join(words)}\n")[2].splitlines()
    shown = itertools.takewhile(lambda line: not line or line.startswith("    "), after)
    assert main(program_of(words)[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in printed if line] == [line.strip() for line in shown if line]


# What makes a training short: its own values of these give way.
SHORT = {
    "--model": "resnet8",
    "--dataset": "synthetic",
    "--image-size": "8",
    "--train-samples": "32",
    "--test-samples": "16",
    "--batch-size": "4",
    "--outer-iterations": "3",
    "--local-steps": "1",
    "--warmup-iterations": "0",
    "--keep-ramp-iterations": "0",
    "--freeze-iteration": "2",
    "--evaluate-every": "3",
    "--ranks-per-node": "1",
    "--run-dir": "run",
}
# Of texts, which a file of settings has, in place of the images.
OF_IMAGES = ("--dataset", "--image-size", "--train-samples", "--test-samples")
SHORT_TEXT = {f: x for f, x in SHORT.items() if f not in OF_IMAGES}
SHORT_TEXT |= {"--model": "gpt_nano-w32", "--context": "16", "--data-dir": "text"}
DROPPED = {*SHORT, "--local-epochs", "--data-dir", "--download", "--init-from", "--lr"}
DROPPED |= {"--tokenizer", "--context", "--on-node-loss", "--teacher"}


def shortened(arguments: list[str]) -> list[str]:
    """Return the arguments of a training that takes a second."""
    kept, dropping = [], False
    for word in [str(ROOT / w) if w.endswith(".toml") else w for w in arguments]:
        if word.startswith("--"):
            dropping = word in DROPPED
        if not dropping:
            kept.append(word)
    if "text" in kept and kept[(at := kept.index("text")) - 1] == "--preset":
        # It is refused for images.
        del kept[at - 1 : at + 1]
    named = kept[kept.index("--method") + 1] if "--method" in kept else "prunex"
    usual = SHORT_TEXT if str(ROOT / "batch/linux_doc.toml") in kept else SHORT
    short = {f: x for f, x in usual.items() if concerns(f[2:].replace("-", "_"), METHODS[named])}
    return [*kept, *(word for item in short.items() for word in item)]


TRAININGS = {
    tuple(shortened(arguments))
    for program, *arguments in map(program_of, filter(program_of, all_commands()))
    if program == "train" and arguments and not {"--dry-run", "--help"} & set(arguments)
}


@pytest.mark.jobs
@pytest.mark.any_mpi
@pytest.mark.long
@pytest.mark.parametrize("arguments", sorted(TRAININGS), ids=" ".join)
def test_trainings_run_as_shown(arguments, tmp_path):
    (tmp_path / "text").mkdir()
    for part in ("train", "test"):
        (tmp_path / "text" / f"{part}.txt").write_text("to be or not to be, that is it. " * 99)
    result = train(2, list(arguments), tmp_path)
    assert result.returncode == 0, result.stderr
    assert "status " in result.stdout
    if "coupled" in arguments:
        result = run_job(1, ["-m", "prunex_mpi.export", "run", "--repeat", "0"], tmp_path)
        assert result.returncode == 0, result.stderr
        assert "removed: " in result.stdout
