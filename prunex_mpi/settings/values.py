"""Convert and check one value of a setting by the rules of its field.

A field is made by `setting`: its type and its metadata are the rules.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, get_args

from prunex_mpi.base.errors import UserError, meant, quote

_NO_DEFAULT = dataclasses.MISSING
# What stands for `auto` where a number is left to the run.
AUTO = -1
_MAX_INT = 2**63 - 1
RULES = (
    *("choices", "low", "high", "above", "below", "share", "words", "optional"),
    *("named", "metavar", "auto", "of"),
)


def setting(section: str, text: str, default: Any = _NO_DEFAULT, **rules: Any) -> Any:
    """Make a field of settings, with its help `text`.

    `rules` are choices, low, high (inclusive), above, below (exclusive), share, words, optional,
    metavar; others raise TypeError. `named` shows the form of what may be given beside the choices:
    what has a colon. With `auto` a number may be left to the run. `of` holds the
    traits (properties of `Method`) that a method must have for the setting to mean something: with
    any other method it can't be given.
    """
    if unknown := rules.keys() - RULES:
        raise TypeError(f"no rules of a setting: {', '.join(sorted(unknown))}; there are {RULES}")
    return dataclasses.field(default=default, metadata={"section": section, "help": text, **rules})


def option(text: str, default: Any, **rules: Any) -> Any:
    """Make a field of a method's own options; rules as those of `setting`."""
    return setting("", text, default, **rules)


def left_open(field: dataclasses.Field, value: object) -> bool:
    """Return whether `value`, converted, leaves the field to the run, to measure or to compute."""
    return bool(field.metadata.get("auto")) and value == AUTO


def in_words(value: object) -> str:
    """Return a value of a setting, or what a file holds of it, as help, tables and messages do."""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) or "none"


def convert(field: dataclasses.Field, value: object, where: str) -> Any:
    """Return `value` as `field` stores it before resolution (shares still as fractions).

    `where` names the value in errors. Raises UserError for a wrong type, choice or range.
    """
    if not get_args(field.type):
        return _convert_item(field, field.type, value, where)
    items = list(value) if isinstance(value, list | tuple) else [value]
    if not items and not field.metadata.get("optional"):
        raise UserError(f"{where} needs at least one value")
    converted = tuple(_convert_item(field, get_args(field.type)[0], item, where) for item in items)
    if field.metadata.get("choices") and len(set(converted)) < len(converted):
        twice = next(item for item in converted if converted.count(item) > 1)
        raise UserError(f"{where} names {twice!r} twice")
    return converted


def choices_shown(rules: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a field with choices takes, for messages and help."""
    return *rules["choices"], *([rules["named"]] if "named" in rules else [])


def _convert_item(field: dataclasses.Field, kind: type, value: object, where: str) -> Any:
    """Convert and check one value of a field."""
    rules = field.metadata
    if rules.get("auto") and value == "auto":
        return AUTO
    if rules.get("share") or kind is Fraction:
        return _check_share(value, bool(rules.get("share")), where)
    if "words" in rules:
        return _to_count_or_word(value, rules["words"], where)
    number = kind in (int, float)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= _MAX_INT else math.inf
    if not isinstance(value, kind) or (number and isinstance(value, bool)):
        wanted = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
        raise UserError(f"{where} must be {wanted[kind]}, not {quote(value)}")
    if number:
        _check_range(value, rules, where)
    elif isinstance(value, str):
        _check_text(value, rules, where)
    return value


def _to_count_or_word(value: object, words: tuple[str, ...], where: str) -> str:
    """Return one of `words` or a whole number from 1 on, as text."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and (text in words or re.fullmatch(r"0*[1-9]\d{0,17}", text)):
        return text
    raise UserError(
        f"{where} must be {', '.join(words)} or a whole number from 1 on, not {quote(value)}"
    )


def to_fraction(value: object, where: str) -> Fraction:
    """Convert 3, 0.25, "0.25" or "1/4"; a float counts as the decimal it is written as."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str | Fraction):
            raise ValueError
        if isinstance(value, int | Fraction):
            return Fraction(value)
        # Fraction("1e999999999") would never return: only p/q goes to Fraction as it is.
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d{1,18}/\d{1,18}\s*", value):
            return Fraction(value)
        return Fraction(repr(float(value)))
    except (ValueError, ZeroDivisionError):
        message = f"{where} must be a number or a fraction such as 1/4, not {quote(value)}"
        raise UserError(message) from None


def _check_share(given: object, share: bool, where: str) -> Fraction:
    value = to_fraction(given, where)
    if not 0 <= value <= _MAX_INT:
        raise UserError(f"{where} must be from 0 to {_MAX_INT}, not {quote(value)}")
    # 1 is one outer iteration, which nobody means by 16/16.
    written_as_share = value.denominator != 1 or (isinstance(given, str) and "/" in given)
    if share and value >= 1 and written_as_share:
        raise UserError(
            f"{where} must be a whole number of outer iterations or a share below 1, "
            f"not {quote(given)}"
        )
    return value


def _check_range(value: float, rules: Mapping[str, Any], where: str) -> None:
    if not math.isfinite(value):
        raise UserError(f"{where} must be finite, not {value}")
    bounds = {
        "at least": ("low", lambda bound: value >= bound),
        "above": ("above", lambda bound: value > bound),
        "at most": ("high", lambda bound: value <= bound),
        "below": ("below", lambda bound: value < bound),
    }
    for words, (rule, holds) in bounds.items():
        if rule in rules and not holds(rules[rule]):
            raise UserError(f"{where} must be {words} {rules[rule]}, not {value}")
    if abs(value) > _MAX_INT:
        raise UserError(f"{where} must be at most {_MAX_INT}, not {value}")


def _check_text(value: str, rules: Mapping[str, Any], where: str) -> None:
    choices = rules.get("choices")
    if choices and value not in choices and not ("named" in rules and ":" in value):
        guess = meant(value, choices)
        valid = ", ".join(choices_shown(rules))
        raise UserError(f"{where}: unknown value {quote(value)}{guess} (valid: {valid})")
    if not value and not rules.get("optional"):
        raise UserError(f"{where} must not be empty")
    # Lone surrogates are how Python shows bytes of the command line that are not UTF-8.
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UserError(f"{where} must be printable UTF-8 text, not {quote(value)}")
