"""What a page is made of, and how it becomes HTML."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from prunex_mpi import __version__
from prunex_mpi.base.errors import UserError, quote
from prunex_mpi.base.tables import Table, format_cell
from prunex_mpi.tools.drawing import DPI, as_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# More columns of a table do not fit beside something else.
FEW_COLUMNS, MANY_COLUMNS = 8, 12


@dataclass(frozen=True)
class Picture:
    """A figure with its title and, below it, what has to be known to read it.

    `name` is that of its file.
    """

    name: str
    title: str
    figure: "Figure"
    note: str = ""


@dataclass(frozen=True)
class Section:
    """Pictures and tables under a heading."""

    title: str
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    text: str = ""


@dataclass(frozen=True)
class Page:
    """A page: `lead` answers in words, `notices` say what the reader must not overlook."""

    title: str
    source: str
    lead: Sequence[str]
    sections: Sequence[Section]
    notices: Sequence[str] = field(default=())


def pictures_of(*found: tuple[str, str, "Figure | None", str]) -> list[Picture]:
    """Return those pictures that there are; each is a name, a title, a figure and a note."""
    return [Picture(*parts) for parts in found if parts[2] is not None]


def to_html(page: Page) -> str:
    """Return the page as one HTML file that holds all it shows."""
    from jinja2 import Environment, StrictUndefined

    text = resources.files("prunex_mpi.tools.report").joinpath("page.html").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    sections = [_section(section, number) for number, section in enumerate(page.sections)]
    # Not those without anything: a run may have nothing to say to a heading.
    shown = [s for s in sections if s["pictures"] or s["tables"] or s["text"]]
    return environment.from_string(text).render(
        page={**vars(page), "sections": shown}, version=__version__
    )


def _section(section: Section, number: int) -> dict[str, object]:
    pictures = [
        {**vars(picture), "svg": as_svg(picture.figure, f"p{number}-{i}", picture.title)}
        for i, picture in enumerate(section.pictures)
    ]
    return {**vars(section), "pictures": pictures, "tables": list(map(_table, section.tables))}


def _table(table: Table) -> dict[str, object]:
    # A column of numbers stands on the right, whatever one of its cells lacks.
    kinds = [
        any(isinstance(cell, int | float) for cell in column)
        and not any(isinstance(cell, str) for cell in column)
        for column in zip(*table.rows, strict=True)
    ] or [False] * len(table.columns)

    def cells(texts: Iterable[str]) -> list[dict[str, object]]:
        return [{"text": text, "number": kind} for text, kind in zip(texts, kinds, strict=True)]

    columns = cells(table.columns) if table.columns else []
    rows = [cells(map(format_cell, row)) for row in table.rows]
    size = "wide" if len(kinds) > FEW_COLUMNS else ""
    size += " widest" if len(kinds) > MANY_COLUMNS else ""
    return {**vars(table), "columns": columns, "rows": rows, "size": size}


def write_pngs(page: Page, folder: Path) -> int:
    """Write each picture of a page as NAME.png into a folder; return how many there are."""
    pictures = [picture for section in page.sections for picture in section.pictures]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            picture.figure.savefig(folder / f"{picture.name}.png", dpi=DPI)
    except OSError as error:
        where = quote(str(folder), 250)
        raise UserError(f"--png {where}: {error.strerror}; choose another folder") from None
    return len(pictures)
