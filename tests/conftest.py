"""Fixtures shared by serial and parallel tests."""

import gc
import logging
import os
import sys

import pytest
import torch

from prunex_mpi.base.errors import log

# Every rank of a parallel test and the oracle in one process must add in the same order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# Nor may a GPU round to TF32 what the oracle computes in float32.
torch.backends.cudnn.allow_tf32 = False

_FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser):
    parser.addoption("--fault-trials", type=int, default=0, help="number of faults to draw")
    parser.addoption("--fault-seed", type=int, default=1, help="seed of the first chain of faults")
    parser.addoption("--soak-iterations", type=int, default=60, help="outer iterations of a soak")


_loaded = 0


def _freeze_what_is_loaded():
    """Leave modules out of collections from now on: after each test they would take a second."""
    global _loaded
    gc.collect()
    if len(sys.modules) > _loaded:
        gc.freeze()
        _loaded = len(sys.modules)


def pytest_collection_modifyitems(items):
    """Let the file that takes longest come first: at the end one process would be left with it."""
    items.sort(key=lambda item: item.path.name != "test_cluster.py")


def pytest_collection_finish(session):
    _freeze_what_is_loaded()


@pytest.fixture(autouse=True)
def _forget_the_logger():
    """Let no test find handlers that a program has set up in another one."""
    yield
    log.handlers, log.propagate = [], True
    log.setLevel(logging.NOTSET)


@pytest.fixture
def leaving_early(monkeypatch):
    """Have any --time-limit end a run when its ranks agree for the second time."""
    from prunex_mpi.comm.preemption import TIME_LIMIT, StopAgreement

    def wanted(stop):
        return TIME_LIMIT if stop.deadline is not None and stop.went_on else 0

    monkeypatch.setattr(StopAgreement, "_wanted", wanted)


@pytest.fixture
def failing_instead_of_aborting(monkeypatch):
    """Have a program that would abort the job fail its test."""
    from prunex_mpi.run import program

    def abort_job(_world):
        raise AssertionError("the program aborted the job")

    monkeypatch.setattr(program, "abort_job", abort_job)
    hook = program.sys.excepthook
    yield
    program.sys.excepthook = hook


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(autouse=True)
def _end_together(request):
    """Let all ranks finish a parallel test before the next one starts its collectives.

    A rank whose test has failed does not wait for those that wait for it: it ends the job (-x).
    """
    yield
    if request.node.get_closest_marker("mpi") and _FAILED not in request.node.stash:
        from mpi4py import MPI

        _freeze_what_is_loaded()
        MPI.COMM_WORLD.Barrier()
