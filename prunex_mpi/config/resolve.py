"""Lay presets, files and flags over each other and resolve them to the settings of a run.

Here a setting has a flat name: `a_b` for one that methods share, `METHOD_c` for a method's own.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from importlib import resources
from typing import Any

import tomli_w

from prunex_mpi.base.errors import UserError, meant, quote
from prunex_mpi.base.files import FORMAT, tomllib
from prunex_mpi.config.checks import check_given, check_together, first_at_target
from prunex_mpi.methods.declared import METHODS, OPTIMIZER_DEFAULTS
from prunex_mpi.settings.fields import (
    DATASET_DEFAULTS,
    OF_THE_JOB,
    SHARED,
    Settings,
    key_of,
)
from prunex_mpi.settings.method import Method
from prunex_mpi.settings.values import AUTO, convert, in_words, left_open, setting, to_be_found

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


def preset_values(preset: str) -> dict[str, Any]:
    """Read a preset, which names what differs from the recipe; return values by flat name."""
    return _named_by("recipe") | _named_by(preset)


def _named_by(preset: str) -> dict[str, Any]:
    return from_table(tomllib.loads(_preset_text(preset)), f"preset {preset}")


def preset_comment(preset: str) -> str:
    """Return the comment with which the file of a preset begins: what it is for."""
    lines = _preset_text(preset).splitlines()
    return "\n".join(line.removeprefix("# ") for line in lines[: lines.index("")])


def _preset_text(preset: str) -> str:
    folder = resources.files("prunex_mpi.config").joinpath("presets")
    return folder.joinpath(f"{preset}.toml").read_text("utf-8")


# What stands beside the settings in the file that a run has written: the versions of the software,
# and the settings as they were asked for, where another value was measured or found.
OF_A_RUN = ("versions", "asked")
# Defaults that presets had before: the files of runs have them, also where they mean nothing.
FORMER = {
    "warmup_iterations": Fraction(1, 16),
    "keep_ramp_iterations": Fraction(5, 16),
    "freeze_iteration": Fraction(7, 16),
}


def from_table(table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Convert a TOML table to values by flat name; a method's own stand in a table of its name.

    Of what means nothing to the method of a run, a FORMER default in its file counts as today's.
    Raises UserError for an unknown key, a bad value, and the file of a run of another format.
    """
    if is_of_a_run(table) and str(table["versions"].get("format")) != str(FORMAT):
        raise UserError(
            f"{source} is of a run of another version of prunex_mpi, which this one can't read: "
            "use that version, or start a new run"
        )
    names = {key_of(name): name for name in (*SHARED, *GIVEN)}
    values = {}
    for key, value in table.items():
        if key in OF_A_RUN and isinstance(value, dict):
            continue
        if key in BY_NAME and isinstance(value, dict):
            values |= _own_from_table(BY_NAME[key], value, source)
            continue
        if key not in names:
            guess = meant(key, [*names, *BY_NAME], "; train --help all names them")
            raise UserError(f"unknown key {quote(key)} in {source}{guess}")
        values[names[key]] = convert(FIELDS[names[key]], value, f"{key} in {source}")
    if is_of_a_run(table):
        # Former files lack it.
        values.setdefault("test_data", True)
        method = BY_NAME[values["method"]]
        now = defaults(values["preset"], method)
        for name, former in FORMER.items():
            if not concerns(name, method) and values.get(name) == former:
                values[name] = now[name]
    return values


def _own_from_table(method: Method, table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Convert the table of a method's own options."""
    names = {key_of(field.name): field.name for field in dataclasses.fields(method.options)}
    values = {}
    for key, value in table.items():
        if key not in names:
            guess = meant(key, names, f"; train --help {method.name} names them")
            raise UserError(f"unknown key {quote(key)} in [{method.name}] of {source}{guess}")
        name = method.option_name(names[key])
        values[name] = convert(FIELDS[name], value, f"{method.name}.{key} in {source}")
    return values


def is_of_a_run(table: Mapping[str, Any]) -> bool:
    """Return whether a run has written the TOML table: only such files have all of these."""
    return isinstance(table.get("versions"), dict) and {"preset", "method"} <= table.keys()


def build(
    preset: str, layers: Sequence[Mapping[str, Any]], asked: Mapping[str, Any] | None = None
) -> Settings:
    """Lay converted values over a preset, the later the stronger; resolve and check the result.

    With `asked` the first layer is the file of a run, of which that had been asked for otherwise.
    """
    given = together(preset, layers, asked)
    method = BY_NAME[given.get("method", "prunex")]
    # A preset or the file of another method may say so.
    if not method.by_iteration and layers and layers[-1].get("local_steps") == AUTO:
        raise UserError(
            f"local-steps auto: {method.name} exchanges in every step; give a number, or "
            "local-epochs alone"
        )
    usual = defaults(preset, method, *(given.get(key, "") for key in ("optimizer", "dataset")))
    values = dict(usual)
    _lay_over(values, given)
    _count_epochs(values, given)
    settings = _resolve({**values, "preset": preset, "method": method.name})
    # What the file of a run says was judged when that began.
    check_given(settings, [usual] if asked is None else [usual, layers[0]])
    return settings


def together(
    preset: str, layers: Sequence[Mapping[str, Any]], asked: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return as one what layers, the later the stronger, give to their method; as for `build`."""
    name = next((x["method"] for x in reversed(layers) if "method" in x), "prunex")
    given: dict[str, Any] = {}
    for layer in layers:
        given = _over(given, _given_to(BY_NAME[name], preset, layer, asked or {}))
    return given


def _over(weaker: Mapping[str, Any], stronger: Mapping[str, Any]) -> dict[str, Any]:
    """Return two layers as one: of what can be said in two ways, the stronger one's way counts."""
    rest = dict(weaker)
    if stronger.get("local_steps", 0) > 0:
        rest.pop("local_epochs", None)
    if stronger.get("local_epochs") and rest.get("local_steps", 0) > 0:
        rest["local_steps"] = 0
    if "outer_iterations" in stronger:
        rest.pop("epochs", None)
    if stronger.get("epochs"):
        rest.pop("outer_iterations", None)
    return {**rest, **stronger}


def _count_epochs(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Set the outer iterations by the length of the run in epochs, where that is given."""
    epochs = values.pop("epochs", 0)
    if not epochs:
        return
    if "outer_iterations" in given:
        raise UserError("epochs and outer-iterations are both given; keep one of them")
    if not values["local_epochs"] or values["local_steps"] > 0:
        raise UserError(
            "epochs: how many local-steps there are in an epoch is not known yet; give "
            "outer-iterations, or local-epochs in place of local-steps"
        )
    outer = max(1, round(epochs / values["local_epochs"]))
    where = f"epochs {epochs}: outer-iterations"
    values["outer_iterations"] = convert(FIELDS["outer_iterations"], outer, where)


def _given_to(
    method: Method, preset: str, layer: Mapping[str, Any], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a layer of another method's file without the defaults that mean nothing to both.

    Where a run has measured something, what had been `asked` for says whether it was given.
    """
    written_by = BY_NAME[layer.get("method", method.name)]
    if written_by is method:
        return dict(layer)
    given = {**layer, **asked}
    theirs = defaults(preset, written_by, *(given.get(key, "") for key in ("optimizer", "dataset")))
    resolved = theirs | {"outer_iterations": given.get("outer_iterations", 1)}
    _resolve_shares(resolved, [name for name in FIELDS if name in resolved])
    return {
        name: value
        for name, value in layer.items()
        if (concerns(name, written_by) and concerns(name, method))
        or given[name] not in (theirs.get(name), resolved.get(name), _off(name))
    }


def _off(name: str) -> Any:
    """Return what a setting is where it means nothing, None where that is its default."""
    return FIELDS[name].metadata.get("off")


def defaults(preset: str, method: Method, optimizer: str = "", dataset: str = "") -> dict[str, Any]:
    """Return the values, not resolved yet, of a run that is given nothing but these.

    The optimizer and the data set are not among them, but for those that the preset names. Without
    an optimizer it is the data set's. A preset's rates are those of the optimizer that it names.
    """
    recipe, of_preset = _named_by("recipe"), _named_by(preset)
    suits = of_preset.get("optimizer", "")
    # What means nothing to the method stays as it is without a preset.
    named = {n: v for n, v in of_preset.items() if n in recipe or concerns(n, method)}
    dataset = dataset or named.get("dataset", "")
    values = {
        name: field.default for name, field in FIELDS.items() if OWNER.get(name, method) is method
    }
    del values["epochs"]
    values |= {name: value for name, value in (recipe | named).items() if name in values}
    of_dataset = DATASET_DEFAULTS.get(dataset, {}).items()
    own = {name: value for name, value in of_dataset if concerns(name, method)}
    optimizer = optimizer or named.get("optimizer", "") or own.get("optimizer", "")
    own |= method.defaults
    by_optimizer = OPTIMIZER_DEFAULTS.get(optimizer, {})
    own |= {name: value for name, value in by_optimizer.items() if concerns(name, method)}
    for name in OPTIMIZER_DEFAULTS.get(suits, {}).keys() & named.keys():
        own[name] = named[name] if optimizer == suits else own.get(name, recipe[name])
    return {**values, **own, "preset": preset, "method": method.name}


def make(preset: str = "recipe", **overrides: object) -> Settings:
    """Return a preset's settings with `overrides` by flat name, checked as flags are.

    Raises UserError for an unknown name or a bad value.

    >>> make("thin", method="dgc", dgc_ratio=0.01).options.ratio
    0.01
    """
    preset = convert(FIELDS["preset"], preset, "preset")
    return build(preset, [_convert_all(overrides)])


def with_overrides(settings: Settings, **changes: object) -> Settings:
    """Return a copy with some values replaced, by flat name, checked like any other.

    What was a share of the outer iterations stays where it is. Raises UserError for an unknown
    name, a bad value, and what other values were chosen by.
    """
    before, converted = flat_values(settings), _convert_all(changes)
    for name in ("preset", "method", "optimizer", "epochs"):
        if converted.get(name, before.get(name)) != before.get(name):
            raise UserError(f"{key_of(name)} cannot be changed in settings that are resolved")
    values = dict(before)
    _lay_over(values, converted)
    found = _resolve(values)
    check_given(found, [before])
    return found


def flat_values(settings: Settings) -> dict[str, Any]:
    """Return all values of resolved settings by flat name."""
    method = settings.method
    values = {name: getattr(settings, name) for name in SHARED} | {"method": method.name}
    own = {method.option_name(k): value for k, value in vars(settings.options).items()}
    return values | own


def check_saved(saved: Mapping[str, Any], where: str) -> Settings:
    """Return the settings of a run; raise UserError unless `saved` holds all and they fit."""
    method = BY_NAME.get(saved.get("method", ""), METHODS[0])
    names = ["method", *SHARED, *method.option_fields()]
    missing = [toml_key(name) for name in names if name not in saved]
    if missing:
        raise UserError(f"{where} has no {missing[0]}; put back the file that the run wrote")
    try:
        return _resolve(dict(saved))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def resumed(
    saved: Mapping[str, Any], given: Mapping[str, Any], asked: Mapping[str, Any] | None = None
) -> Settings:
    """Return the settings of a run that goes on: those `saved` in its config.toml, by flat name.

    What is `given` beside them may only repeat them, or what was `asked` for where that was
    something else, except for OF_THE_JOB and for more outer iterations than before; shares of these
    stay at the iteration where they were. Raises UserError that names the first difference.
    """
    whole = {**saved, "resume": True}
    given = _without_epochs({**whole, **(asked or {})}, given)
    if asked:
        given = _without_repeated({**whole, **asked}, given)
    before, after = flat_values(_resolve(dict(whole))), whole
    # What was measured or found when the run began is kept.
    _lay_over(after, {k: v for k, v in given.items() if not to_be_found(FIELDS[k], v)})
    length, after["outer_iterations"] = after["outer_iterations"], before["outer_iterations"]
    if length < before["outer_iterations"]:
        raise UserError(
            f"--outer-iterations {length} is fewer than the run's {before['outer_iterations']}; a "
            "resumed run can become longer, not shorter: leave it away, or start a new run"
        )
    if after["method"] != before["method"]:
        raise UserError(_differs("method", after["method"], before["method"]))
    settings = _resolve(after)
    now = flat_values(settings)
    for name, old in before.items():
        if name not in OF_THE_JOB and old != now[name]:
            raise UserError(_differs(name, now[name], old))
    if length > before["outer_iterations"]:
        return _resolve({**now, "outer_iterations": length})
    return settings


def _differs(name: str, new: object, old: object) -> str:
    return (
        f"--{key_of(name)} {in_words(new)} differs from the run's {in_words(old)}; a resumed run "
        "keeps its settings: leave it away, or start a new run"
    )


def _without_epochs(before: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is `given`, with outer iterations in place of epochs of the run of `before`."""
    if "epochs" not in given:
        return given
    values = {**before, "epochs": given["epochs"]}
    _lay_over(values, {k: v for k, v in given.items() if k in ("local_epochs", "local_steps")})
    _count_epochs(values, given)
    counted = values["outer_iterations"]
    if before["local_steps"] == AUTO and counted != before["outer_iterations"]:
        raise UserError(
            "epochs differ from the run's, which has measured its local-steps; to make it longer "
            "give outer-iterations"
        )
    rest = {name: value for name, value in given.items() if name != "epochs"}
    return {**rest, "outer_iterations": counted} if given["epochs"] else rest


def _without_repeated(asked: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is `given` beyond what was `asked` for when the run began."""
    if given.get("method", asked["method"]) != asked["method"]:
        return dict(given)
    before, again = flat_values(_resolve(dict(asked))), dict(asked)
    _lay_over(again, given)
    again["outer_iterations"] = before["outer_iterations"]
    after = flat_values(_resolve(again))
    return {
        name: value
        for name, value in given.items()
        if after[name] != before[name]
        or (name == "outer_iterations" and value != before["outer_iterations"])
    }


def first_difference(saved: Mapping[str, Any], settings: Settings) -> str | None:
    """Return the first setting, but of the job, in which a `saved` run is another than `settings`.

    Raises UserError where `saved` is no whole run.
    """
    before, now = flat_values(check_saved(saved, "it")), flat_values(settings)
    for name in now:
        if name not in OF_THE_JOB and before.get(name) != now[name]:
            return toml_key(name)
    return None


def to_toml(settings: Settings, extra: Mapping[str, object], asked: Settings | None = None) -> str:
    """Write settings as TOML text that `--config` reads back to an equal Settings.

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
        value = _to_toml_value(name, values[name])
        method, _, key = toml_key(name).rpartition(".")
        if method:
            table.setdefault(method, {})[key] = value
        else:
            table[key] = value
    return table


def _to_toml_value(name: str, value: Any) -> Any:
    if isinstance(value, Fraction):
        value = int(value) if value.denominator == 1 else str(value)
    if left_open(FIELDS[name], value):
        value = "auto"
    return list(value) if isinstance(value, tuple) else value


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


def _lay_over(values: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Update `values`; epochs and steps exclude each other, so the stronger layer's one counts.

    Not so where the steps are left to be measured: the epochs then say how long the run is.
    """
    epochs, steps = layer.get("local_epochs", 0), layer.get("local_steps", 0)
    if epochs and steps > 0:
        raise UserError("local-epochs and local-steps are both given; keep one of them")
    values.update(layer)
    if epochs and values.get("local_steps") != AUTO:
        values["local_steps"] = 0


def _resolve(values: dict[str, Any]) -> Settings:
    """Turn shares into iterations, drop the epochs that steps replace, check the whole."""
    method = BY_NAME[values["method"]]
    _put_foreign_back(values, method)
    _resolve_shares(values, [name for name in values if concerns(name, method)])
    if values["local_steps"] > 0:
        values["local_epochs"] = Fraction(0)
    own = {f.name: values[method.option_name(f.name)] for f in dataclasses.fields(method.options)}
    settings = Settings(
        **{name: values[name] for name in SHARED},
        method=method,
        options=method.options(**own),
    )
    check_together(settings)
    return settings


def _resolve_shares(values: dict[str, Any], names: Iterable[str]) -> None:
    outer = values["outer_iterations"]
    for name in names:
        if FIELDS[name].metadata.get("share"):
            value = Fraction(values[name])
            count = math.floor(value * outer + Fraction(1, 2)) if value < 1 else int(value)
            if name == "freeze_iteration" and 0 < value < 1:
                # Rounding must neither turn the freeze off (0) nor leave it an iteration before
                # the keep ratio is reached. Its two predecessors are resolved already.
                count = max(count, 1)
                count += first_at_target(values) == count + 1
            values[name] = count


def _put_foreign_back(values: dict[str, Any], method: Method) -> None:
    """Set what the method has no use for to its default; refuse it where it is given as another."""
    untouched = defaults(values["preset"], method)
    for name in list(values):
        if concerns(name, method):
            continue
        if values[name] not in (untouched.get(name), _off(name)):
            for_whom = ", ".join(methods_of(name))
            raise UserError(
                f"{toml_key(name)} means nothing to method {method.name}; leave it away (it is for "
                f"{for_whom})"
            )
        if name in OWNER:
            del values[name]
        else:
            values[name] = untouched[name] if _off(name) is None else _off(name)
