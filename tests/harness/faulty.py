"""The training program with one fault in it: `mpirun ... python faulty.py FAULT flags`.

FAULT is JSON: {"rank": R, "at": "module:function", "side": "before" or "after", "call": K, "what":
one of FAULTS, mistake or wait, "mark": FILE}, or a list of such. At the K-th call of the function
on rank R FILE is made, and then the fault happens; with call 0 it never does. The functions are
replaced by name: the product knows nothing of it.
"""

import json
import os
import resource
import signal
import sys
import time
from functools import reduce, wraps
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

# Room for the watchdog's record, which is rewritten in place, and for nothing of a checkpoint.
FULL_DISK_BYTES = 4096
# Those that campaigns draw.
FAULTS = ("kill", "term", "stop", "raise", "exit", "vanish", "full-disk", "hang")


def noisy(num_classes: int, image_size: int) -> Any:
    """A model whose result depends on statistics and on random numbers that go on."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


def happen(fault: dict[str, Any]) -> None:
    """Leave the mark and do what the fault says."""
    mark = Path(fault["mark"])
    mark.touch()
    what = fault["what"]
    signals = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
    if what in signals:
        os.kill(os.getpid(), signals[what])
    elif what == "raise":
        raise RuntimeError("broken on purpose")
    elif what == "mistake":
        from prunex_mpi.base.errors import UserError

        raise UserError("a mistake on purpose")
    elif what == "exit":
        sys.exit(0)
    elif what == "vanish":
        os._exit(0)
    elif what == "full-disk":
        # The kernel then refuses to make any file longer; Python ignores the signal for it.
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, FULL_DISK_BYTES))
    elif what == "hang":
        while True:
            pass
    elif what == "wait":
        # Until the test has done what it has to do meanwhile.
        while mark.exists():
            time.sleep(0.05)
    else:
        raise ValueError(f"unknown fault {what}")


def install(fault: dict[str, Any]) -> None:
    """Wrap the function that `fault` names."""
    module, name = fault["at"].split(":")
    *owners, last = name.split(".")
    owner = reduce(getattr, owners, import_module(module))
    real = getattr(owner, last)
    calls = count(1)

    @wraps(real)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        due = next(calls) == fault["call"]
        if due and fault["side"] == "before":
            happen(fault)
        result = real(*args, **kwargs)
        if due and fault["side"] == "after":
            happen(fault)
        return result

    setattr(owner, last, wrapped)


def main() -> int:
    # All of it, and what the first optimizer imports: a short --timeout must not end a job that
    # still imports.
    import_module("torch._dynamo")
    # With what the program itself gives MPI to begin: other settings sum in another order.
    from prunex_mpi.run.program import start_mpi

    world = start_mpi()
    from prunex_mpi import train
    from prunex_mpi.comm import preemption

    # A job of seconds would be over before its ranks agree to stop.
    preemption.PERIOD_S = 0.0
    given = json.loads(sys.argv[1])
    for fault in given if isinstance(given, list) else [given]:
        if world.rank == fault["rank"]:
            install(fault)
    return train.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
