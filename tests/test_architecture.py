"""The layers of the package and the habits that keep it safe, read off its syntax trees."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "prunex_mpi"
NAME = PACKAGE.name

# Quick to import, so that --help and wrong flags answer at once.
PLAIN = {
    *(
        "errors",
        "values",
        "methods",
        "settings",
        "settings_checks",
        "cli",
        "logs",
        "watchdog",
        "files",
    ),
    *("compare_options", "findings", "findings_gpu", "findings_launcher", "findings_ranks"),
}
# Mathematics on tensors and host arrays.
TENSORS = {
    "layout",
    "channel_labels",
    "coupling",
    "groups",
    "sparsity",
    "compaction",
    "residuals",
    "schedule",
    "batchnorm",
    "models",
    "standalone",
    "shrink",
    "removable",
    "finished_run",
    "export_files",
    "batches",
    "data",
    "checkpoint_files",
    "compress",
    "dgc",
    "powersgd",
    "blocks",
    "lasso",
    "memory",
    "support",
    "ternary",
    "unstructured",
}
# Communication, which knows vectors and their layout but not what they mean.
COMMUNICATION = {
    *("comm", "collectives", "exchange", "gradients", "devices", "preemption"),
    *("doctor_facts", "doctor_folder", "doctor_links", "doctor_probe"),
}
# A program that starts no MPI, and what it prints with.
ALONE = {"export", "export_report", "bench_report"}
# Everything else may use all of these.

PICKLING_ALWAYS = {
    *("send", "bsend", "ssend", "isend", "ibsend", "issend", "recv", "irecv", "sendrecv"),
    *("bcast", "allgather", "alltoall", "allreduce", "exscan", "ibcast"),
}
# These names mean other things as well, unless a communicator stands before them.
PICKLING_ON_COMMUNICATORS = {"gather", "scatter", "reduce", "scan"}
COMMUNICATORS = {"comm", "world", "node", "leader", "host", "COMM_WORLD", "COMM_SELF"}
EXECUTING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every module, by its dotted name inside the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


TREES = trees()


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk everything but what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from running_nodes(node)


def imported(tree: ast.AST) -> set[str]:
    """Return the dotted names of all imports, those inside functions included."""
    names = set()
    for node in running_nodes(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = f"{NAME}.{node.module}" if node.level else node.module
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def outside(tree: ast.AST) -> set[str]:
    """Return the top-level names of what is imported from elsewhere."""
    return {name.split(".")[0] for name in imported(tree)} - {NAME}


def inside(tree: ast.AST, modules: Iterable[str]) -> set[str]:
    """Return which of the package's `modules` are imported."""
    dotted = {name.removeprefix(f"{NAME}.") for name in imported(tree) if name.startswith(NAME)}
    return {m for m in modules if m and any(d == m or d.startswith(f"{m}.") for d in dotted)}


GRAPH = {name: inside(tree, TREES) for name, tree in TREES.items()}


def reachable(module: str) -> set[str]:
    """Return all modules that importing `module` can import, itself included."""
    found, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += GRAPH[name]
    return found


def unsafe(tree: ast.AST) -> list[str]:
    """Return the calls and imports that would execute what was received or read."""
    problems = [name for name in outside(tree) if name in EXECUTING_MODULES]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options = {k.arg: ast.unparse(k.value) for k in node.keywords}
        bare = isinstance(node.func, ast.Name) and called in ("eval", "exec", "compile")
        load = called in ("torch.load", "load") and options.get("weights_only") != "True"
        # `load` alone is the package's own reader of data sets unless it came from torch.
        load = load and (called != "load" or "torch.load" in imported(tree))
        numpy_load = called in ("np.load", "numpy.load") and options.get("allow_pickle") == "True"
        if bare or load or numpy_load or options.get("shell") == "True":
            problems.append(called)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        receiver = ast.unparse(node.func.value).split(".")[-1] if method else ""
        if method in PICKLING_ALWAYS or (
            method in PICKLING_ON_COMMUNICATORS and receiver in COMMUNICATORS
        ):
            problems.append(called)
    return problems


def names_of_the_world(tree: ast.AST) -> int:
    """Count where the global communicator is named."""
    return sum(
        (isinstance(node, ast.Attribute) and node.attr == "COMM_WORLD")
        or (isinstance(node, ast.alias) and node.name == "COMM_WORLD")
        or (isinstance(node, ast.Constant) and node.value == "COMM_WORLD")
        for node in ast.walk(tree)
    )


def test_the_layers_name_modules_that_exist() -> None:
    assert not (PLAIN | TENSORS | COMMUNICATION | ALONE) - set(TREES)


@pytest.mark.parametrize("module", sorted(PLAIN))
def test_plain_modules_start_neither_torch_nor_mpi(module: str) -> None:
    assert reachable(module) <= PLAIN
    for name in reachable(module):
        assert not outside(TREES[name]) & {"torch", "torchvision", "mpi4py", "numpy"}


@pytest.mark.parametrize("module", sorted(TENSORS))
def test_mathematics_never_meets_mpi(module: str) -> None:
    assert reachable(module) <= PLAIN | TENSORS
    for name in reachable(module):
        assert "mpi4py" not in outside(TREES[name])


@pytest.mark.parametrize("module", sorted(ALONE))
def test_export_never_meets_mpi(module: str) -> None:
    assert reachable(module) <= PLAIN | TENSORS | ALONE
    assert "mpi4py" not in outside(TREES[module])


@pytest.mark.parametrize("module", sorted(COMMUNICATION))
def test_communication_knows_no_mathematics(module: str) -> None:
    assert GRAPH[module] <= COMMUNICATION | PLAIN | {"layout"}


def test_imports_make_no_circle() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("module", sorted(TREES))
def test_only_programs_name_the_world(module: str) -> None:
    if module not in ("program", "doctor_probe"):
        assert names_of_the_world(TREES[module]) == 0


@pytest.mark.parametrize("module", sorted(TREES))
def test_nothing_received_or_read_is_executed(module: str) -> None:
    assert unsafe(TREES[module]) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from marshal import loads",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "from torch import load\nload(path)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "comm.bcast(x, root=0)",
        "topology.world.gather(x)",
        "MPI.COMM_WORLD.reduce(x)",
        "anything.allreduce(x)",
    ],
)
def test_the_check_itself_sees_unsafe_code(source: str) -> None:
    assert len(unsafe(ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "comm.Bcast(x)\ncomm.Iallreduce(a, b)",
        "torch.gather(x, 0, i)\nfunctools.reduce(f, x)\nx.scatter_(0, i, v)",
        "re.compile('a')",
    ],
)
def test_the_check_itself_lets_safe_code_pass(source: str) -> None:
    assert unsafe(ast.parse(source)) == []


def test_the_check_itself_sees_imports_wherever_they_stand() -> None:
    source = (
        "import torch.nn as nn\n"
        "from prunex_mpi import comm as c\n"
        "from prunex_mpi.data import load\n"
        "if TYPE_CHECKING:\n    import scipy\n"
        "def f():\n    import mpi4py.MPI\n"
    )
    tree = ast.parse(source)
    assert outside(tree) == {"torch", "mpi4py"}
    assert inside(tree, ["comm", "data", "dat", "load"]) == {"comm", "data"}
    assert names_of_the_world(ast.parse("w = MPI.COMM_WORLD\ngetattr(MPI, 'COMM_WORLD')")) == 2


def test_what_the_trees_promise_is_what_python_loads() -> None:
    def loading(modules: set[str]) -> str:
        return "".join(f"import {NAME}.{module}\n" for module in sorted(modules))

    program = (
        f"import sys\n{loading(PLAIN)}"
        "assert not {'torch', 'mpi4py', 'numpy'} & set(sys.modules)\n"
        f"{loading(TENSORS)}assert 'mpi4py' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
