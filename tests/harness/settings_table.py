"""Write the table of settings, prunex_mpi/settings/README.md, from the code, or check it.

python tests/harness/settings_table.py [--check]
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from prunex_mpi.config import cli
from prunex_mpi.config.resolve import (
    BY_NAME,
    FIELDS,
    OWNER,
    defaults,
    methods_of,
    preset_text,
    preset_values,
)
from prunex_mpi.settings.fields import PRESETS, key_of
from prunex_mpi.settings.values import choices_shown

PAGE = Path(__file__).resolve().parents[2] / "prunex_mpi" / "settings" / "README.md"
HEADER = """\
# Every setting

Written by `python tests/harness/settings_table.py` from the code. The flag `--batch-size` is the
key `batch-size` of a file for `--config`; the option `--dgc-ratio` of a method is the key `ratio`
of its table `[dgc]`. Flags beat the file, the file beats the preset. Defaults are those of the
preset `recipe` and of `prunex`, or of the method that has the setting; `auto` is measured, or
follows from the run.
"""
TABLE = "| setting | default | meaning |\n|---|---|---|\n"


def main() -> int:
    """Rewrite the page, or say that it is not what the code says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail on differences")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
    if not same:
        print(f"{PAGE} is not what the code says; run this without --check")
    return 0 if same else 1


def page() -> str:
    """Return the page: settings by group, then those of each method, then the presets."""
    sections = dict.fromkeys(field.metadata["section"] for field in FIELDS.values())
    parts = [HEADER]
    for section in filter(None, sections):
        names = [n for n, field in FIELDS.items() if field.metadata["section"] == section]
        parts.append(f"## {section.capitalize()}\n\n{TABLE}{''.join(map(row, names))}")
    parts.append("## Options of one method\n")
    for method in BY_NAME.values():
        names = [name for name, owner in OWNER.items() if owner is method]
        if names:
            parts.append(f"### `{method.name}`\n\n{TABLE}{''.join(map(row, names))}")
    parts.append("## Presets\n\nWhat each sets beside `recipe`:\n\n" + "".join(presets()))
    return "\n".join(parts)


def row(name: str) -> str:
    """Return the row of a setting."""
    field = FIELDS[name]
    methods = methods_of(name)
    method = BY_NAME["prunex" if "prunex" in methods else methods[0]]
    default = defaults("recipe", method).get(name, field.default)
    meaning = field.metadata["help"]
    if field.metadata.get("choices") and name not in ("method", "preset"):
        meaning += f" ({', '.join(choices_shown(field.metadata))})"
    return f"| `--{key_of(name)}` | `{cli.shown(name, default)}` | {meaning} |\n"


def presets() -> Iterator[str]:
    """Yield a paragraph for each preset: what it is for, and what it sets."""
    recipe = preset_values("recipe")
    for preset in PRESETS:
        differing = {n: v for n, v in preset_values(preset).items() if recipe.get(n) != v}
        sets = ", ".join(f"`--{key_of(n)} {cli.shown(n, v)}`" for n, v in differing.items())
        lines = preset_text(preset).splitlines()
        about = " ".join(line.removeprefix("# ") for line in lines[: lines.index("")])
        yield f"- **`{preset}`**: {about} {sets}\n".replace(" \n", "\n")


if __name__ == "__main__":
    sys.exit(main())
