"""Signals are noted, and time limits leave time for a checkpoint."""

import os
import signal
import time

import pytest

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.signals import ReceivedSignal, catching
from prunex_mpi.comm import preemption
from prunex_mpi.comm.preemption import find_deadline, stop_agreement


def agreed(received: ReceivedSignal, deadline: float | None, reserve_s: float = 0.0) -> str:
    """Return what a job of one rank agrees on within five safe points."""
    with stop_agreement(MPI.COMM_SELF, received, deadline) as stop:
        stop.reserve_s = reserve_s
        for _ in range(5):
            if stop.reached():
                break
        return stop.reason


def test_signals_are_noted_and_given_back():
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)
    with catching() as received:
        assert received.number == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received.number == signal.SIGUSR1
        # A second one, of another kind, does no harm.
        os.kill(os.getpid(), signal.SIGTERM)
        assert agreed(received, None) == "SIGTERM"
    assert before == (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM))


def test_ctrl_c_is_noted_while_training_and_the_second_ends(capfd):
    before = signal.getsignal(signal.SIGINT)
    with catching() as received:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        assert received.number == 0
        received.training = True
        os.kill(os.getpid(), signal.SIGINT)
        assert agreed(received, None) == "SIGINT"
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert "leaving with a checkpoint" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) == before
    with catching() as received:
        received.training = received.quiet = True
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == ""


def test_without_a_request_nothing_stops():
    assert agreed(ReceivedSignal(), None) == ""
    assert agreed(ReceivedSignal(), time.time() + 1000) == ""


def test_the_time_limit_leaves_time_for_the_checkpoint():
    limit = time.time() + preemption.MARGIN_S + 60
    assert agreed(ReceivedSignal(), limit) == ""
    with stop_agreement(MPI.COMM_SELF, ReceivedSignal(), limit) as stop:
        assert not stop.reached()
        assert not stop.reached()
        stop.reserve_s = 70
        assert any(stop.reached() for _ in range(30))
        assert stop.reason == "the time limit"


def test_a_limit_that_leaves_no_time_to_train_is_refused():
    """A job that left after its first step with "go on" would do so for ever."""
    with pytest.raises(UserError, match="no time to train: 12 s of it are kept for leaving"):
        agreed(ReceivedSignal(), time.time() + 10)
    near = time.time() + preemption.MARGIN_S + 60
    with pytest.raises(UserError, match="82 s of it are kept"):
        agreed(ReceivedSignal(), near, reserve_s=70)
    received = ReceivedSignal()
    received.number = signal.SIGUSR1
    assert agreed(received, time.time() + 300) == "SIGUSR1"
    with pytest.raises(UserError, match="no time to train"):
        # As batch/train.sbatch has it told.
        agreed(received, time.time() + 115)
    received.number = signal.SIGTERM
    assert agreed(received, time.time() + 115) == "SIGTERM"


def test_the_deadline_is_the_flag_s_or_slurm_s(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert find_deadline(0.0, 1000.0) is None
    assert find_deadline(60.0, 1000.0) == 1060.0
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    assert find_deadline(0.0, 1000.0) == 1.7e9
    assert find_deadline(60.0, 1000.0) == 1060.0
    # A shell may outlive the job that it was of.
    assert find_deadline(0.0, 1.8e9) is None
    for text in ("Unknown", "²", "-1", "1e9"):
        monkeypatch.setenv("SLURM_JOB_END_TIME", text)
        assert find_deadline(0.0, 1000.0) is None


def test_safe_points_settle_about_a_second_apart(monkeypatch):
    """The distance in steps follows the time of a step, on a clock of our own."""
    now = [0.0]
    monkeypatch.setattr(preemption.time, "perf_counter", lambda: now[0])
    with stop_agreement(MPI.COMM_SELF, ReceivedSignal(), None) as stop:
        for step_s, wanted in ((0.01, 100), (0.2, 5), (3.0, 1)):
            for _ in range(1000):
                now[0] += step_s
                assert not stop.reached()
            assert stop.interval == pytest.approx(wanted, abs=1)
