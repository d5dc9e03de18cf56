"""Compare what was read from JSON with what is written: by its form, not by its values."""

from typing import Any


def alike(template: Any, value: Any) -> bool:
    """Say whether `value` has the keys, lengths and types of `template`, all the way down.

    What is None in `template` may be anything, and so may the length of an empty list.
    """
    if template is None:
        return True
    if isinstance(template, dict):
        return (
            isinstance(value, dict)
            and template.keys() == value.keys()
            and all(alike(template[key], value[key]) for key in template)
        )
    if isinstance(template, list):
        return isinstance(value, list) and (
            not template or (len(template) == len(value) and all(map(alike, template, value)))
        )
    return type(value) is type(template) or (isinstance(template, float) and type(value) is int)
