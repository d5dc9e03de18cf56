"""Data-parallel training that prunes while it trains, over MPI."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["replicate"]


def __getattr__(name: str) -> Any:
    # Importing torch and MPI takes seconds, which the programs' --help has no use for.
    if name == "replicate":
        from prunex_mpi.replica.replicate import replicate

        return replicate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
