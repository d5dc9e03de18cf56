"""Thin out long curves to what a screen can show: nothing that sticks out is lost."""

import numpy as np

# Columns of points over the width of a picture; each keeps its lowest and its highest.
COLUMNS = 260


def thin(x: np.ndarray, y: np.ndarray, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """Return at most two points per column, its extremes in their order, first and last kept.

    x rises. Points without a finite y are left out first.
    """
    there = np.isfinite(x) & np.isfinite(y)
    x, y = x[there], y[there]
    if len(x) <= 2 * columns or x[-1] <= x[0]:
        return x, y
    column = np.minimum(((x - x[0]) / (x[-1] - x[0]) * columns).astype(int), columns - 1)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    kept = {0, len(x) - 1}
    for begin, end in zip(starts, [*starts[1:], len(x)], strict=True):
        kept.add(begin + int(np.argmin(y[begin:end])))
        kept.add(begin + int(np.argmax(y[begin:end])))
    places = np.array(sorted(kept))
    return x[places], y[places]


def starts_of(size: int, columns: int) -> np.ndarray:
    """Return where each of at most so many columns of `size` points begins."""
    count = min(size, columns)
    return np.unique((np.arange(count) * size / count).astype(int))


def binned(iterations: np.ndarray, columns: int = COLUMNS) -> tuple[np.ndarray, np.ndarray]:
    """Return the borders of at most `columns` columns of iterations, and where each begins.

    The borders lie half an iteration before the first and after the last of a column.
    """
    starts = starts_of(len(iterations), columns)
    edges = np.append(iterations[starts], iterations[-1] + 1) - 0.5
    return edges, starts


def means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the mean of each column, which begins at `starts`; NaN counts as 0."""
    counts = np.diff(np.append(starts, len(values)))
    return np.add.reduceat(np.nan_to_num(values), starts) / counts
