"""What a person is told who has asked for what can't be."""

from collections.abc import Callable
from types import ModuleType

import pytest

from prunex_mpi.base.errors import USAGE, UserError


def assert_refused(call: Callable[[], object], *culprits: str) -> None:
    """Assert that `call` raises one short line that names all `culprits`."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert caught.value.exit_code == USAGE
    assert all(culprit in message for culprit in culprits), message
    assert len(message.splitlines()) == 1 and len(message) < 400


def refused_by(
    program: ModuleType, capsys: pytest.CaptureFixture, *arguments: object
) -> tuple[int, str]:
    """Return the exit code and the one line of a program's call that is refused."""
    code = program.main(list(map(str, arguments)))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{program.__name__}: error: ")
    return code, line
