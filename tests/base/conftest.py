"""Leave the package's logger as it was."""

from collections.abc import Iterator

import pytest

from prunex_mpi.base.logs import log


@pytest.fixture(autouse=True)
def _restore_the_logger() -> Iterator[None]:
    saved = log.handlers, log.propagate, log.level
    yield
    log.handlers, log.propagate = saved[:2]
    log.setLevel(saved[2])
