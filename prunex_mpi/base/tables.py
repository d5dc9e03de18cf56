"""Results as tables: for a person as aligned text, for a program as JSON."""

from dataclasses import asdict, dataclass

from prunex_mpi.base.errors import printable

Cell = str | int | float | None


class LossCell(float):
    """A loss: tables show three decimals, since losses of text differ in the third one."""


@dataclass(frozen=True)
class Table:
    """One result: `rows` hold a cell per column, None where nothing could be measured."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()


def format_table(table: Table) -> str:
    """Return title, header, rows and notes as aligned text; numbers stand on the right."""
    cells = [list(table.columns), *([format_cell(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    numeric = [
        all(not isinstance(row[i], str) for row in table.rows) for i in range(len(table.columns))
    ]
    lines = [table.title]
    for row in cells:
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  " + "  ".join(parts).rstrip())
    return "\n".join([*lines, *(f"  {note}" for note in table.notes)])


def format_cell(cell: Cell) -> str:
    """Return a cell as text."""
    if cell is None:
        return "-"
    if isinstance(cell, LossCell):
        return f"{cell:.3f}"
    if isinstance(cell, float):
        return (
            f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.3g}" if cell < 0.1 else f"{cell:.2f}"
        )
    return f"{cell:,}" if isinstance(cell, int) else printable(cell)


def format_lines(rows: list[tuple[str, str]]) -> str:
    """Return aligned "name  value" lines."""
    rows = [(printable(name), printable(value)) for name, value in rows]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def as_json(machine: dict[str, str], tables: list[Table]) -> dict:
    """Return what --json writes: the machine, and each table with its columns and rows."""
    return {"machine": machine, "tables": [asdict(table) for table in tables]}
