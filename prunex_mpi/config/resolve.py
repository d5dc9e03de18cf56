"""Lay presets, files and flags over each other and resolve them to the settings of a run.

Here a setting has a flat name: `a_b` for one that methods share, `METHOD_c` for a method's own.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cache
from importlib import resources
from typing import Any

import tomli_w

from prunex_mpi.base.errors import UserError, meant, quote
from prunex_mpi.base.files import FORMAT, tomllib
from prunex_mpi.base.imports import hub_defaults, hub_folder
from prunex_mpi.config.checks import check_given, check_together, first_at_target
from prunex_mpi.methods.declared import METHODS, OPTIMIZER_DEFAULTS
from prunex_mpi.settings.fields import DATASET_DEFAULTS, OF_THE_JOB, SHARED, TEXT, Settings, key_of
from prunex_mpi.settings.method import Method
from prunex_mpi.settings.values import AUTO, convert, in_words, left_open, setting

BY_NAME = {method.name: method for method in METHODS}


@dataclasses.dataclass(frozen=True)
class _Given:
    """What is given beside the settings, or in another form than they have."""

    method: str = setting("model", "training method", "prunex", choices=tuple(BY_NAME))
    epochs: Fraction = setting(
        "training", "length of the run, in place of outer-iterations", Fraction(0), low=0
    )


GIVEN = {field.name: field for field in dataclasses.fields(_Given)}
# The method that has a setting to itself, by flat name.
OWNER = {name: method for method in METHODS for name in method.option_fields()}
# All that can be given, by flat name.
FIELDS = {
    **SHARED,
    **GIVEN,
    **{name: field for method in METHODS for name, field in method.option_fields().items()},
}


def concerns(name: str, method: Method) -> bool:
    """Return whether a setting, by flat name, has a meaning for `method`."""
    if name in OWNER:
        return OWNER[name] is method
    return method.has(FIELDS[name].metadata.get("of", ""))


def methods_of(name: str) -> tuple[str, ...]:
    """Return the names of the methods that a setting has a meaning for."""
    return tuple(method.name for method in METHODS if concerns(name, method))


def toml_key(name: str) -> str:
    """Return how a setting is named in files, for messages: `a-b`, or `METHOD.c`."""
    if name not in OWNER:
        return key_of(name)
    method = OWNER[name]
    return f"{method.name}.{key_of(name.removeprefix(method.option_name('')))}"


KEYS = {toml_key(name): name for name in FIELDS}

# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------

# What stands beside the settings in the file that a run has written: the versions of the software,
# and the settings as they were asked for, where another value was measured or found.
OF_A_RUN = ("versions", "asked")


def is_of_a_run(table: Mapping[str, Any]) -> bool:
    """Return whether a run has written the TOML table: only such files have all of these."""
    return isinstance(table.get("versions"), dict) and {"preset", "method"} <= table.keys()


def from_table(table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Convert a TOML table to values by flat name; a method's own stand in a table of its name.

    Raises UserError for an unknown key, a bad value, and the file of a run of another format.
    """
    if is_of_a_run(table) and str(table["versions"].get("format")) != str(FORMAT):
        raise UserError(
            f"{source} is of a run of another version of prunex_mpi, which this one can't read: "
            "use that version, or start a new run"
        )
    given: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict) and key in BY_NAME:
            given |= {f"{key}.{own}": item for own, item in value.items()}
        elif not (isinstance(value, dict) and key in OF_A_RUN):
            given[key] = value
    for key in given:
        if key not in KEYS:
            guess = meant(key, KEYS, "; train --help all names them")
            raise UserError(f"unknown key {quote(key)} in {source}{guess}")
    return {
        KEYS[key]: convert(FIELDS[KEYS[key]], value, f"{key} in {source}")
        for key, value in given.items()
    }


def to_toml(settings: Settings, extra: Mapping[str, object], asked: Settings | None = None) -> str:
    """Write what means something to the method as TOML that `--config` reads back to the same.

    `extra` becomes the table `[versions]`, and what of `asked` was something else `[asked]`.
    """
    values = flat_values(settings)
    table = _to_table(values, values)
    table["versions"] = {key: str(value) for key, value in extra.items()} | {"format": str(FORMAT)}
    others = flat_values(asked) if asked else values
    differing = [name for name in values if others[name] != values[name]]
    if differing:
        table["asked"] = _to_table(others, differing)
    return tomli_w.dumps(table)


def _to_table(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return what TOML writes of the values of some settings, by key, methods' own in tables."""
    table: dict[str, Any] = {}
    for name in names:
        if concerns(name, BY_NAME[values["method"]]):
            method, _, key = toml_key(name).rpartition(".")
            into = table.setdefault(method, {}) if method else table
            value = values[name]
            if isinstance(value, Fraction):
                value = int(value) if value.denominator == 1 else str(value)
            if left_open(FIELDS[name], value):
                value = "auto"
            into[key] = list(value) if isinstance(value, tuple) else value
    return table


# --------------------------------------------------------------------------------------------------
# Presets and defaults
# --------------------------------------------------------------------------------------------------


@cache
def preset_values(preset: str) -> dict[str, Any]:
    """Return the values that a preset names, by flat name; of all others it has the recipe's."""
    return from_table(tomllib.loads(preset_text(preset)), f"preset {preset}")


def preset_text(preset: str) -> str:
    """Return the file of a preset, which begins with a comment on what it is for."""
    folder = resources.files("prunex_mpi.config").joinpath("presets")
    return folder.joinpath(f"{preset}.toml").read_text("utf-8")


@cache
def neutral(method: Method) -> dict[str, Any]:
    """Return the values, not resolved, of a run of `method` by the recipe on images with SGD.

    Those of settings that mean nothing to a method stay as they are here.
    """
    values = {n: field.default for n, field in FIELDS.items() if OWNER.get(n, method) is method}
    del values["epochs"]
    return values | {n: v for n, v in preset_values("recipe").items() if n in values}


def defaults(preset: str, method: Method, optimizer: str = "", dataset: str = "") -> dict[str, Any]:
    """Return the values, not resolved yet, of a run that is given nothing but these.

    The optimizer and the data set are not among them, but for those that the preset names. Without
    an optimizer it is the data set's. A preset's rates are those of the optimizer that it names.
    """
    recipe, suits = preset_values("recipe"), preset_values(preset).get("optimizer", "")

    def of_method(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if concerns(name, method)}

    named = of_method(preset_values(preset))
    if suits == "muon" and not method.suits_muon:
        named.pop("optimizer", None)
    own = of_method(DATASET_DEFAULTS.get(dataset or named.get("dataset", ""), {}))
    # A preset for a data set knows better than what suits any run on it.
    if {"dataset", "optimizer"} <= named.keys():
        del own["optimizer"]
    for values in (method.defaults, named, own):
        optimizer = optimizer or values.get("optimizer", "")
    own |= {**method.defaults, **of_method(OPTIMIZER_DEFAULTS.get(optimizer, {}))}
    for name in OPTIMIZER_DEFAULTS.get(suits, {}).keys() & named.keys():
        own[name] = named[name] if optimizer == suits else own.get(name, recipe[name])
    return {**neutral(method), **named, **own, "preset": preset, "method": method.name}


# --------------------------------------------------------------------------------------------------
# Settings
# --------------------------------------------------------------------------------------------------


def make(preset: str = "recipe", **overrides: object) -> Settings:
    """Return a preset's settings with `overrides` by flat name, checked as flags are.

    Raises UserError for an unknown name or a bad value.

    >>> make("thin", method="dgc", dgc_ratio=0.01).options.ratio
    0.01
    """
    preset = convert(FIELDS["preset"], preset, "preset")
    return build(preset, _convert_all(overrides))


def build(preset: str, given: Mapping[str, Any], run: Mapping[str, Any] | None = None) -> Settings:
    """Lay what is `given`, converted, over a preset, or over a `run` by it; resolve and check.

    What the file of the run says was judged when that began.
    """
    laid = over(run or {}, given)
    model = laid.get("model", "")
    if hub_folder(model) and laid.get("dataset", TEXT) == TEXT:
        laid = over({"dataset": TEXT, **hub_defaults(model, laid)}, laid)
    method = BY_NAME[laid.get("method", "prunex")]
    if not method.by_iteration and given.get("local_steps") == AUTO:
        raise UserError(
            f"local-steps auto: {method.name} exchanges in every step; give a number, or "
            "local-epochs alone"
        )
    dataset = preset_values(preset).get("dataset", laid.get("dataset"))
    if laid.get("dataset", dataset) != dataset:
        raise UserError(
            f"preset {preset} is for dataset {dataset}; leave it or dataset {laid['dataset']} away"
        )
    usual = defaults(preset, method, *(laid.get(key, "") for key in ("optimizer", "dataset")))
    values = over(usual, laid)
    _count_epochs(values)
    settings = _resolve({**values, "preset": preset, "method": method.name})
    check_given(settings, [name for name, value in given.items() if value != usual.get(name)])
    return settings


def with_overrides(settings: Settings, **changes: object) -> Settings:
    """Return a copy with some values replaced, by flat name, checked like any other.

    What was a share of the outer iterations stays where it is. Raises UserError for an unknown
    name, a bad value, and what other values were chosen by.
    """
    before, converted = flat_values(settings), _convert_all(changes)
    changed = [name for name, value in converted.items() if value != before.get(name)]
    for name in ("preset", "method", "optimizer", "epochs"):
        if name in changed:
            raise UserError(f"{key_of(name)} cannot be changed in settings that are resolved")
    found = _resolve(over(before, converted))
    check_given(found, changed)
    return found


def flat_values(settings: Settings) -> dict[str, Any]:
    """Return all values of resolved settings by flat name."""
    method = settings.method
    values = {name: getattr(settings, name) for name in SHARED} | {"method": method.name}
    own = {method.option_name(k): value for k, value in vars(settings.options).items()}
    return values | own


def over(weaker: Mapping[str, Any], stronger: Mapping[str, Any]) -> dict[str, Any]:
    """Return one layer over another: of what can be said in two ways, the stronger one's counts.

    Epochs and steps exclude each other, unless the steps are left to be measured: the epochs then
    say how long the run is. Raises UserError where a layer says both.
    """
    below = dict(weaker)
    steps, epochs = stronger.get("local_steps", 0) > 0, stronger.get("local_epochs")
    if steps and epochs:
        raise UserError("local-epochs and local-steps are both given; keep one of them")
    if stronger.get("epochs") and "outer_iterations" in stronger:
        raise UserError("epochs and outer-iterations are both given; keep one of them")
    if steps:
        below["local_epochs"] = Fraction(0)
    if epochs and below.get("local_steps", 0) > 0:
        below["local_steps"] = 0
    if "outer_iterations" in stronger:
        below.pop("epochs", None)
    if stronger.get("epochs"):
        below.pop("outer_iterations", None)
    return {**below, **stronger}


def _count_epochs(values: dict[str, Any]) -> None:
    """Set the outer iterations by the length of the run in epochs, where that is given."""
    epochs = values.pop("epochs", 0)
    if not epochs:
        return
    if not values["local_epochs"] or values["local_steps"] > 0:
        raise UserError(
            "epochs: how many local-steps there are in an epoch is not known yet; give "
            "outer-iterations, or local-epochs in place of local-steps"
        )
    outer = max(1, round(epochs / values["local_epochs"]))
    where = f"epochs {epochs}: outer-iterations"
    values["outer_iterations"] = convert(FIELDS["outer_iterations"], outer, where)


def _convert_all(values: Mapping[str, object]) -> dict[str, Any]:
    for name in values:
        if name not in FIELDS:
            raise UserError(f"unknown setting {name!r}{meant(name, FIELDS)}")
    return {
        name: convert(
            FIELDS[name], value.name if isinstance(value, Method) else value, toml_key(name)
        )
        for name, value in values.items()
    }


def _resolve(values: Mapping[str, Any]) -> Settings:
    """Refuse what means nothing to the method, turn shares into iterations, check the whole."""
    method = BY_NAME[values["method"]]
    found = dict(neutral(method))
    for name, value in values.items():
        if concerns(name, method):
            found[name] = value
        elif value != found.get(name):
            raise UserError(
                f"{toml_key(name)} means nothing to method {method.name}; leave it away (it is for "
                f"{', '.join(methods_of(name))})"
            )
    outer = found["outer_iterations"]
    for name in found:
        if FIELDS[name].metadata.get("share") and concerns(name, method):
            value = Fraction(found[name])
            count = math.floor(value * outer + Fraction(1, 2)) if value < 1 else int(value)
            if name == "freeze_iteration" and 0 < value < 1:
                # Rounding must neither turn the freeze off (0) nor leave it an iteration before
                # the keep ratio is reached. Its two predecessors are resolved already.
                count = max(count, 1)
                count += first_at_target(found) == count + 1
            found[name] = count
    if found["local_steps"] > 0:
        found["local_epochs"] = Fraction(0)
    own = {f.name: found[method.option_name(f.name)] for f in dataclasses.fields(method.options)}
    shared = {name: found[name] for name in SHARED}
    settings = Settings(**shared, method=method, options=method.options(**own))
    check_together(settings)
    return settings


# --------------------------------------------------------------------------------------------------
# Runs that there are
# --------------------------------------------------------------------------------------------------


def check_saved(saved: Mapping[str, Any], where: str) -> Settings:
    """Return the settings of a run; raise UserError unless `saved` holds all and they fit."""
    method = BY_NAME.get(saved.get("method", ""), METHODS[0])
    for name in neutral(method):
        if name not in saved and concerns(name, method):
            raise UserError(
                f"{where} has no {toml_key(name)}; put back the file that the run wrote"
            )
    try:
        return _resolve(saved)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def resumed(
    saved: Mapping[str, Any], given: Mapping[str, Any], asked: Mapping[str, Any] | None = None
) -> Settings:
    """Return the settings of a run that goes on: those `saved` in its config.toml, by flat name.

    What is `given` beside them may only repeat them, or what was `asked` for where that was
    something else, except for OF_THE_JOB. Raises UserError that names the first difference.
    """
    first = {**saved, **(asked or {})}
    given = {name: v for name, v in given.items() if name not in saved or v != saved[name]}
    again = over(first, given)
    _count_epochs(again)
    # Before the rest, which these two decide.
    for name in ("method", "outer_iterations"):
        if again[name] != first[name]:
            raise UserError(_differs(name, again[name], saved[name]))
    before, now = flat_values(_resolve(first)), flat_values(_resolve(again))
    for name in (*given, *now):
        if name not in OF_THE_JOB and now.get(name) != before.get(name):
            raise UserError(_differs(name, now[name], saved.get(name)))
    of_job = {name: value for name, value in given.items() if name in OF_THE_JOB}
    return _resolve({**saved, **of_job, "resume": True})


def _differs(name: str, new: object, old: object) -> str:
    return (
        f"--{key_of(name)} {in_words(new)} differs from the run's {in_words(old)}; a resumed run "
        "keeps its settings: leave it away, or start a new run"
    )


def first_difference(saved: Mapping[str, Any], settings: Settings) -> str | None:
    """Return the first setting, but of the job, in which a `saved` run is another than `settings`.

    Raises UserError where `saved` is no whole run.
    """
    before, now = flat_values(check_saved(saved, "it")), flat_values(settings)
    for name in now:
        if name not in OF_THE_JOB and before.get(name) != now[name]:
            return toml_key(name)
    return None
