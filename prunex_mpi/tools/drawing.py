"""How all pictures look: colours, marks, the style, and what becomes of a figure."""

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's, told apart by those who cannot see red and green; then other dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Of the phases of an outer iteration.
PHASE_COLOURS = {
    "local": COLOURS[0],
    "intra": COLOURS[5],
    "project": COLOURS[2],
    "inter": COLOURS[1],
    "dual": COLOURS[3],
    "evaluate": COLOURS[4],
    "setup": COLOURS[6],
}
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
# So many curves can be told apart.
MOST_CURVES = len(COLOURS) * len(DASHES)
# Dark for much and light for little, alike to all eyes and in grey.
SHADES = "cividis"
DPI = 150
# Letters of a path that is a curve, not a mark.
LONG_PATH = 1000
# The inches of a picture that fills a column of the page.
WIDTH = 7.0
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "white",
    "svg.fonttype": "path",
    # Equal pictures are equal files.
    "svg.hashsalt": "prunex_mpi",
    "hatch.linewidth": 0.6,
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw in this style, whatever the user's own is."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        # A name in letters that the font lacks is still told by its number, and by the tables.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def new_figure(height: float, width: float = WIDTH) -> "Figure":
    """Return an empty figure of so many inches, which lays itself out."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_panel(height: float) -> "tuple[Figure, Axes]":
    """Return a figure of so many inches with one panel, and the panel."""
    figure = new_figure(height)
    return figure, figure.subplots()


def look_of(number: int) -> dict[str, str]:
    """Return colour and dash of the curve of this number."""
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": dash}


def marker_of(number: int) -> str:
    """Return the marker of the curve of this number."""
    return MARKERS[number % len(MARKERS)]


def plain(text: str) -> str:
    """Return a name as matplotlib shows it letter by letter: no mathematics, nothing left out."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("$", r"\$")
    # A label that begins with an underscore is left out of legends.
    return f" {text}" if text.startswith("_") else text


def named_look(number: int, name: str) -> dict[str, str]:
    """Return mark, colour, dash and label of the curve of this number, as `plot` takes them."""
    return {"mark": marker_of(number), **look_of(number), "label": plain(name)}


def legend_above(panel: "Axes", columns: int = 4) -> None:
    """Name the curves of a panel above it, where the legend covers nothing."""
    handles, names = panel.get_legend_handles_labels()
    if not handles:
        return
    panel.legend(
        handles,
        names,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=min(columns, len(handles)),
        borderaxespad=0.2,
        columnspacing=1.4,
        handlelength=2.2,
    )


def legend_on_top(panel: "Axes", columns: int = 3) -> None:
    """Name the curves of a panel above all panels of its figure."""
    handles, names = panel.get_legend_handles_labels()
    panel.figure.legend(handles, names, loc="outside upper center", ncols=columns)


def name_bars(panel: "Axes", names: Sequence[str]) -> None:
    """Name horizontal bars, of which the first stands on top."""
    panel.set_yticks(range(len(names)), [plain(name) for name in names], fontsize=7)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.grid(False, axis="y")


def stack_bars(
    panel: "Axes",
    names: Sequence[str],
    parts: Iterable[tuple[str, "np.ndarray", Mapping[str, object]]],
) -> None:
    """Draw a horizontal bar for each name; its parts are label, widths and look, one per name."""
    base = 0.0
    for label, widths, look in parts:
        panel.barh(range(len(names)), widths, left=base, height=0.8, label=label, **look)
        base = base + widths
    name_bars(panel, names)


def as_svg(figure: "Figure", name: str, title: str) -> str:
    """Return a figure as an <svg> to stand in a page, as wide as its place.

    `name` begins all its identifiers, of which each is there once and referred to, so that no two
    things of a page share one; `title` says what it shows to those who do not see it.
    """
    from html import escape

    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.S)
    text = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", _each_once(text))
    # More decimals than a screen shows are most of what is drawn.
    text = re.sub(r'(?<=\sd=")[^"]+', lambda found: _shortened(found[0]), text)
    head = re.search(r"<svg[^>]*>", text)
    box = re.search(r'viewBox="[^"]*"', head[0]) if head else None
    if head is None or box is None:
        raise RuntimeError("matplotlib has written an SVG without a viewBox")
    label = escape(title, quote=True)
    opened = (
        f'<svg role="img" aria-label="{label}" {box[0]} xmlns="http://www.w3.org/2000/svg" '
        'xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return opened + text[head.end() :]


def _each_once(text: str) -> str:
    """Return an SVG without identifiers that nothing refers to, and each other one once.

    Below matplotlib 3.11 equal images in one figure, as those of two colour bars, share one.
    """
    wanted = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))

    def kept(found: re.Match[str]) -> str:
        there = found[1] in wanted
        wanted.discard(found[1])
        return found[0] if there else ""

    return re.sub(r'\sid="([^"]*)"', kept, text)


def _shortened(path: str) -> str:
    """Return what a path draws on one line, in hundredths of a point, a long curve in tenths."""
    decimals = 1 if len(path) > LONG_PATH else 2
    return " ".join(re.sub(rf"(\.\d{{{decimals}}})\d+", r"\1", path).split())
