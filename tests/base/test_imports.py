"""Modules are imported that the user has named; a file alone names none."""

import sys

import pytest

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.imports import check_named, import_function
from prunex_mpi.config.cli import read_flags

TRAP = "raise SystemExit('this was executed')\n"


def test_what_a_file_alone_names_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="repeat it as --model trap:f"):
        check_named("model", "trap:f", ["other:f"], "plan.json")
    with pytest.raises(UserError, match="repeat it as --model trap:f"):
        check_named("model", "trap:f", ["trap:g"], "plan.json")
    assert "trap" not in sys.modules
    check_named("model", "trap:f", ["trap:g"], "plan.json", whole=False)
    check_named("model", "trap:f", ["trap:f"], "plan.json")
    check_named("model", "resnet8", [], "plan.json")


@pytest.mark.parametrize("name", ["trap:f", "parts.trap:f"])
def test_a_module_inside_the_folder_that_is_read_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / "run/parts").mkdir(parents=True)
    for path in ("run/trap.py", "run/parts/__init__.py", "run/parts/trap.py"):
        (tmp_path / path).write_text(TRAP)
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.syspath_prepend(str(tmp_path / "run"))
    with pytest.raises(UserError, match="is a module inside"):
        check_named("model", name, [name], "config.toml", tmp_path / "run")


@pytest.mark.parametrize("flags", [["--model", "nets:small"], ["--model=nets:small"]])
def test_flags_name_what_may_be_imported(tmp_path, flags):
    (tmp_path / "file.toml").write_text('model = "nets:small"\n')
    file = ["--config", str(tmp_path / "file.toml")]
    assert read_flags([*file, *flags]).model == "nets:small"
    with pytest.raises(UserError, match="--model nets:small"):
        read_flags(file)
    (tmp_path / "file.toml").write_text('dataset = "data:own"\n')
    with pytest.raises(UserError, match="--dataset data:own"):
        read_flags([*file, *flags])


def test_a_name_that_is_no_function_is_refused():
    with pytest.raises(UserError, match="has no function 'none'"):
        import_function("model", "json:none", "to build it")
