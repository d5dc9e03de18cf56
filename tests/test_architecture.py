"""The layers of the package and the habits that keep it safe, read off its syntax trees."""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from launch import run_python

PACKAGE = Path(__file__).resolve().parents[1] / "prunex_mpi"
NAME = PACKAGE.name

# The folders from the ground up: each imports from itself and from those before it alone, not from
# those beside it. What lies in no folder is a program, on top of all.
LAYERS = (
    ("base",),
    ("settings",),
    ("data", "models"),
    ("compress", "pruning"),
    ("comm",),
    ("core",),
    ("methods",),
    ("config",),
    ("replica",),
    ("diagnosis",),
    ("run",),
    ("tools",),
    ("research",),
)
# What people run stands on all but this one; of the programs its own entry point alone knows it.
RESEARCH, RESEARCH_PROGRAM = "research", "bench"
LEVELS = {folder: level for level, folders in enumerate(LAYERS) for folder in folders}
# Quick to import, so that --help and wrong flags answer at once.
PLAIN = ("base", "settings", "config")
# Of other folders: what programs import before they have read their flags.
EARLY = (
    "methods.declared",
    "diagnosis.findings",
    "run.program",
)
WITHOUT_MPI = (*PLAIN, "data", "models", "compress", "pruning")
# All that communication knows of mathematics: that a vector has segments.
KNOWN_TO_COMM = "models.layout"
# The algorithm, of which `replicate` is the face: it knows no data set and no file of one.
ALGORITHM = ("comm", "compress", "models", "pruning", "core", "methods", "replica")
HEAVY = {"torch", "torchvision", "mpi4py", "numpy"}

LONGEST_MODULE, LONGEST_PROGRAM, MOST_PARAMETERS = 600, 75, 8
# A list of settings is as long as there are settings.
LONG = "settings.fields"

PICKLING_ALWAYS = {
    *("send", "bsend", "ssend", "isend", "ibsend", "issend", "recv", "irecv", "sendrecv"),
    *("bcast", "allgather", "alltoall", "allreduce", "exscan", "ibcast"),
}
# These names mean other things as well, unless a communicator stands before them.
PICKLING_ON_COMMUNICATORS = {"gather", "scatter", "reduce", "scan"}
COMMUNICATORS = {"comm", "world", "node", "leader", "host", "COMM_WORLD", "COMM_SELF"}
# Its `send` hands a value to a driver, which is no message.
GENERATORS = ("_rounds", "rounds")
EXECUTING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every module, by its dotted name inside the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


@cache
def imported(tree: ast.AST) -> set[str]:
    """Return the dotted names of all imports: in functions and for type checkers as well."""
    names = set()
    for node in ast.walk(tree):
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


@cache
def modules() -> set[str]:
    """Return the names of all modules, without packages, which hold nothing."""
    return {name for name in trees() if (PACKAGE / f"{name.replace('.', '/')}.py").exists()}


@cache
def graph() -> dict[str, set[str]]:
    """Return what each module imports of the package."""
    return {name: inside(trees()[name], modules()) for name in modules()}


def level_of(module: str) -> int:
    """Return the layer of a module: that of its folder, the topmost for a program."""
    return LEVELS[module.split(".")[0]] if "." in module else len(LAYERS)


def upwards(module: str, targets: Iterable[str]) -> list[str]:
    """Return which of `targets` a module must not import."""
    folder = module.split(".")[0]
    return [
        target
        for target in targets
        if target.split(".")[0] != folder and level_of(target) >= level_of(module)
    ]


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Walk the functions: name, and number of parameters without self."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
            yield node.name, len([name for name in names if name not in ("self", "cls")])


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
        # Pillow would try all that it knows, and hand some to other programs.
        any_image = called.split(".")[-2:] == ["Image", "open"] and "formats" not in options
        if bare or load or numpy_load or any_image or options.get("shell") == "True":
            problems.append(called)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        receiver = ast.unparse(node.func.value).split(".")[-1] if method else ""
        if (method in PICKLING_ALWAYS and receiver not in GENERATORS) or (
            method in PICKLING_ON_COMMUNICATORS and receiver in COMMUNICATORS
        ):
            problems.append(called)
    return problems


def values_of_modes(tree: ast.AST) -> int:
    """Count uses of the value of `eval()` or `train()`, which users' modules may not return."""
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("eval", "train")
        and id(node) not in statements
        for node in ast.walk(tree)
    )


def names_of_the_world(tree: ast.AST) -> int:
    """Count where the global communicator is named."""
    return sum(
        (isinstance(node, ast.Attribute) and node.attr == "COMM_WORLD")
        or (isinstance(node, ast.alias) and node.name == "COMM_WORLD")
        or (isinstance(node, ast.Constant) and node.value == "COMM_WORLD")
        for node in ast.walk(tree)
    )


def in_folders(folders: Iterable[str]) -> list[str]:
    return sorted(name for name in modules() if name.split(".")[0] in folders and "." in name)


def test_every_folder_is_a_layer():
    assert {name.split(".")[0] for name in modules() if "." in name} == set(LEVELS)


def found(look: Callable[[str], object], modules: Iterable[str]) -> dict[str, object]:
    """Return what `look` finds in modules, by their names, where it finds anything."""
    return {module: what for module in modules if (what := look(module))}


def test_modules_import_from_below_alone():
    assert found(lambda module: upwards(module, graph()[module]), modules()) == {}


def test_what_people_run_does_not_stand_on_research():
    others = [m for m in modules() if m.split(".")[0] not in (RESEARCH, RESEARCH_PROGRAM)]
    assert found(lambda m: [t for t in graph()[m] if t.startswith(f"{RESEARCH}.")], others) == {}


def test_plain_modules_know_neither_torch_nor_mpi():
    assert found(lambda module: outside(trees()[module]) & HEAVY, in_folders(PLAIN)) == {}


def test_mathematics_never_meets_mpi():
    assert found(lambda m: outside(trees()[m]) & {"mpi4py"}, in_folders(WITHOUT_MPI)) == {}


def test_communication_knows_no_mathematics():
    def look(module: str) -> set[str]:
        return {t.split(".")[0] for t in graph()[module] - {KNOWN_TO_COMM}} - {"base", "comm"}

    assert found(look, in_folders(["comm"])) == {}


def test_the_algorithm_knows_no_data_set():
    def look(module: str) -> list[str]:
        return [target for target in graph()[module] if target.startswith("data.")]

    assert found(look, in_folders(ALGORITHM)) == {}


def test_modules_stay_short():
    def look(module: str) -> int:
        path = PACKAGE / f"{module.replace('.', '/')}.py"
        length = len(path.read_text(encoding="utf-8").splitlines())
        return length * (length > (LONGEST_MODULE if "." in module else LONGEST_PROGRAM))

    assert found(look, modules() - {LONG}) == {}


def test_functions_have_few_parameters():
    def look(module: str) -> list[tuple[str, int]]:
        return [f for f in functions(trees()[module]) if f[1] > MOST_PARAMETERS]

    assert found(look, modules()) == {}


def test_packages_hand_nothing_on():
    for path in PACKAGE.rglob("__init__.py"):
        assert path.parent == PACKAGE or path.read_text(encoding="utf-8") == ""


def test_imports_make_no_circle():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_only_programs_name_the_world():
    named = found(lambda module: names_of_the_world(trees()[module]), trees())
    assert set(named) <= {"run.program", "diagnosis.probe"}


def test_nobody_relies_on_what_changing_modes_returns():
    assert found(lambda module: values_of_modes(trees()[module]), trees()) == {}


def test_the_check_itself_sees_such_values():
    assert values_of_modes(ast.parse("m = n.eval()\nn.train()(x)\nn.train()\nf(n.eval)")) == 2


def test_nothing_received_or_read_is_executed():
    assert found(lambda module: unsafe(trees()[module]), trees()) == {}


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
        "PIL.Image.open(path)",
        "comm.bcast(x, root=0)",
        "topology.world.gather(x)",
        "MPI.COMM_WORLD.reduce(x)",
        "anything.allreduce(x)",
    ],
)
def test_the_check_itself_sees_unsafe_code(source):
    assert len(unsafe(ast.parse(source))) == 1


def test_the_check_itself_sees_imports_wherever_they_stand():
    source = (
        "import torch.nn as nn\n"
        "from prunex_mpi.comm import topology as c\n"
        "from prunex_mpi.data.datasets import load\n"
        "if TYPE_CHECKING:\n    from prunex_mpi.core.state import State\n"
        "def f():\n    import mpi4py.MPI\n"
    )
    tree = ast.parse(source)
    assert outside(tree) == {"torch", "mpi4py"}
    known = ["comm.topology", "data.datasets", "data.data", "core.state"]
    assert inside(tree, known) == {"comm.topology", "data.datasets", "core.state"}
    assert names_of_the_world(ast.parse("w = MPI.COMM_WORLD\ngetattr(MPI, 'COMM_WORLD')")) == 2


def test_what_the_trees_promise_is_what_python_loads():
    def loading(modules: Iterable[str]) -> str:
        return "".join(f"import {NAME}.{module}\n" for module in modules)

    alone = [name for name in modules() if name.startswith("tools.export_")]
    # For these neither torch nor MPI needs to be there.
    drawing = [n for n in modules() if n.startswith(("tools.report.", "research.figures"))]
    program = (
        f"import sys\n{loading([*in_folders(PLAIN), *EARLY])}"
        "assert not {'torch', 'mpi4py', 'numpy'} & set(sys.modules)\n"
        f"{loading([*drawing, 'report', 'run.summary'])}"
        "assert not {'torch', 'mpi4py', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        f"{loading([*in_folders(WITHOUT_MPI), *alone])}assert 'mpi4py' not in sys.modules\n"
    )
    assert_runs(program)


def test_replicate_loads_neither_data_sets_nor_images():
    assert_runs(
        f"import sys\nimport {NAME}\n{NAME}.replicate\n"
        "loaded = [name for name in sys.modules if name.split('.')[0] in ('torchvision', 'PIL')]\n"
        f"assert not loaded and '{NAME}.data' not in sys.modules\n"
    )


def assert_runs(program: str) -> None:
    """Run a program with the package on its path."""
    result = run_python(["-c", program])
    assert result.returncode == 0, result.stderr
