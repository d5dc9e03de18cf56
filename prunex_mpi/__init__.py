"""Data-parallel training that prunes while it trains, over MPI."""

__version__ = "0.1.0"
