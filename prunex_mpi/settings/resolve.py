"""Lay presets, files and flags over each other and resolve them to the settings of a run."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from importlib import resources
from typing import Any

import tomli_w

from prunex_mpi.base.errors import UserError, meant, quote
from prunex_mpi.settings.checks import check_given, check_together, first_at_target
from prunex_mpi.settings.fields import (
    FIELDS,
    GRASP_BELOW,
    OF_THE_JOB,
    Settings,
    concerns,
    key_of,
    methods_of,
)
from prunex_mpi.settings.methods import METHOD_DEFAULTS, OPTIMIZER_DEFAULTS, PRESET_DEFAULTS
from prunex_mpi.settings.values import (
    AUTO,
    convert,
    left_open,
    split_layer_keep_ratio,
    to_be_found,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def preset_values(preset: str) -> dict[str, Any]:
    """Read a preset file; return converted values by field name."""
    file = resources.files("prunex_mpi.settings").joinpath("presets", f"{preset}.toml")
    return from_table(tomllib.loads(file.read_text("utf-8")), f"preset {preset}")


# What stands beside the settings in the file that a run has written: the versions of the software,
# and the settings as they were asked for, where another value was measured or found.
OF_A_RUN = ("versions", "asked")


def from_table(table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Convert a TOML table to values by field name.

    A run has written a file with a table `versions`: settings that it lacks, because they came
    later, are what they were to that run, and those that its method has no use for what they are
    today. Raises UserError for an unknown key and for a value of the wrong type or range.
    """
    names = {key_of(name): name for name in FIELDS}
    if isinstance(table.get("versions"), dict):
        rules = {name: field.metadata for name, field in FIELDS.items()}
        names |= {rule["former"]: name for name, rule in rules.items() if "former" in rule}
    values = {}
    for key, value in table.items():
        if key in OF_A_RUN and isinstance(value, dict):
            continue
        if key not in names:
            guess = meant(key, names, "; train --help names them")
            raise UserError(f"unknown key {quote(key)} in {source}{guess}")
        values[names[key]] = convert(FIELDS[names[key]], value, f"{key} in {source}")
    if is_of_a_run(table):
        return _of_its_method(_whole(values))
    return values


def is_of_a_run(table: Mapping[str, Any]) -> bool:
    """Say whether a run has written the TOML table: only such files have all of these."""
    return isinstance(table.get("versions"), dict) and {"preset", "method"} <= table.keys()


def _joined(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what came to mean something to a run's method after it, as it was without."""
    return {
        name: value
        for name, field in FIELDS.items()
        for methods, later, value in field.metadata.get("joined", ())
        if saved.get("method") in methods and later not in saved
    }


def build(preset: str, layers: Sequence[Mapping[str, Any]]) -> Settings:
    """Lay converted values over a preset, the later the stronger; resolve and check the result."""
    method = next((x["method"] for x in reversed(layers) if "method" in x), "prunex")
    optimizer = next((x["optimizer"] for x in reversed(layers) if "optimizer" in x), "sgd")
    usual = _defaults(preset, method, optimizer)
    values = dict(usual)
    for layer in layers:
        _lay_over(values, _given_to(method, preset, layer))
    settings = _resolve({**values, "preset": preset})
    check_given(settings, usual)
    return settings


def _given_to(method: str, preset: str, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer that another method's file is without what nobody has given there.

    That is defaults which one of them ignores, and of settings that mean nothing to `method` what
    stands for a run from before there were such.
    """
    written_by = layer.get("method", method)
    if written_by == method:
        return dict(layer)
    theirs, before = _defaults(preset, written_by, layer.get("optimizer", "sgd")), _before()
    kept = {}
    for name, value in layer.items():
        both = {written_by, method} <= {*methods_of(name)}
        former = method not in methods_of(name) and name in before and value == before[name]
        if both or (value != theirs[name] and not former):
            kept[name] = value
    return kept


def _defaults(preset: str, method: str, optimizer: str = "sgd") -> dict[str, Any]:
    """Return the values, not resolved yet, of a run that is given nothing but these.

    The optimizer is not among them: a file that names one gives it.
    """
    values = {name: field.default for name, field in FIELDS.items()} | preset_values(preset)
    own = {**METHOD_DEFAULTS.get(method, {}), **PRESET_DEFAULTS.get((preset, method), {})}
    by_optimizer = OPTIMIZER_DEFAULTS.get(optimizer, {}).items()
    own |= {name: value for name, value in by_optimizer if method in methods_of(name)}
    return {**values, **own, "preset": preset, "method": method}


def make(preset: str = "recipe", **overrides: object) -> Settings:
    """Return a preset's settings with `overrides`, checked as flags are.

    Raises UserError for an unknown name or a bad value.
    """
    preset = convert(FIELDS["preset"], preset, "preset")
    return build(preset, [_convert_all(overrides)])


def with_overrides(settings: Settings, **changes: object) -> Settings:
    """Return a copy with some values replaced, checked like any other.

    Raises UserError for an unknown name, a bad value, or another preset or method.
    """
    for name in ("preset", "method"):
        if changes.get(name, getattr(settings, name)) != getattr(settings, name):
            raise UserError(f"{name} cannot be changed in settings that are already resolved")
    values = {name: getattr(settings, name) for name in FIELDS}
    _lay_over(values, _convert_all(changes))
    return _resolve(values)


def check_saved(saved: Mapping[str, Any], where: str) -> Settings:
    """Return the settings of a run; raise UserError unless `saved` holds all and they fit."""
    whole = _whole(saved)
    missing = [key_of(name) for name in FIELDS if name not in whole]
    if missing:
        raise UserError(f"{where} has no {missing[0]}; put back the file that the run wrote")
    try:
        return _resolve(_of_its_method(whole))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def resumed(
    saved: Mapping[str, Any], given: Mapping[str, Any], asked: Mapping[str, Any] | None = None
) -> Settings:
    """Return the settings of a run that goes on: those `saved` in its config.toml, by field name.

    What is `given` beside them may only repeat them, or what was `asked` for where that was
    something else, except for OF_THE_JOB, where it counts, and for more outer iterations than
    before; what stands as a share of them stays at the iteration where it was. Raises UserError
    that names the first difference.
    """
    whole = _of_its_method({**_whole(saved), "resume": True})
    if asked:
        given = _without_repeated({**whole, **asked}, given)
    before, after = _resolve(dict(whole)), whole
    # What was measured or found when the run began is kept.
    _lay_over(after, {k: v for k, v in given.items() if not to_be_found(FIELDS[k], v)})
    length, after["outer_iterations"] = after["outer_iterations"], before.outer_iterations
    if length < before.outer_iterations:
        raise UserError(
            f"--outer-iterations {length} is fewer than the run's {before.outer_iterations}; a "
            "resumed run can become longer, not shorter: leave it away, or start a new run"
        )
    settings = _resolve(after)
    for name in FIELDS:
        old, new = getattr(before, name), getattr(settings, name)
        if name not in OF_THE_JOB and old != new:
            raise UserError(
                f"--{key_of(name)} {_plain(new)} differs from the run's {_plain(old)}; a resumed "
                "run keeps its settings: leave it away, or start a new run"
            )
    if length > before.outer_iterations:
        return _resolve({**vars(settings), "outer_iterations": length})
    return settings


def _without_repeated(asked: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is `given` beyond what was `asked` for when the run began."""
    before, again = _resolve(dict(asked)), dict(asked)
    _lay_over(again, given)
    again["outer_iterations"] = before.outer_iterations
    after = _resolve(again)
    return {
        name: value
        for name, value in given.items()
        if getattr(after, name) != getattr(before, name)
        or (name == "outer_iterations" and value != before.outer_iterations)
    }


def first_difference(saved: Mapping[str, Any], settings: Settings) -> str | None:
    """Return the first setting in which the run of a saved config.toml is another than `settings`.

    What describes the job does not count. Raises UserError where `saved` is no whole run.
    """
    before = check_saved(saved, "it")
    for name in FIELDS:
        if name not in OF_THE_JOB and getattr(before, name) != getattr(settings, name):
            return key_of(name)
    return None


def _whole(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's values with those that its file does not name, since they came later."""
    return {**_before(), **saved, **_joined(saved)}


def _before() -> dict[str, Any]:
    """Return what settings that came later are to runs whose files do not name them."""
    rules = {name: field.metadata for name, field in FIELDS.items()}
    return {name: rule["before"] for name, rule in rules.items() if "before" in rule}


def _of_its_method(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's values; what its method has no use for is as it would be today.

    Its file names the defaults of its day, which may have been others.
    """
    today = _defaults(saved["preset"], saved["method"])
    method = saved["method"]
    return {n: value if method in methods_of(n) else today[n] for n, value in saved.items()}


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def layer_keep_ratios(settings: Settings) -> tuple[tuple[str, float], ...]:
    """Return the (pattern, ratio) pairs of `layer_keep_ratio` in order."""
    return tuple(split_layer_keep_ratio(item) for item in settings.layer_keep_ratio)


def to_toml(settings: Settings, extra: Mapping[str, object], asked: Settings | None = None) -> str:
    """Write settings as TOML text that `--config` reads back to an equal Settings.

    `extra` (the versions of the software) becomes the table `[versions]`, which is not read back,
    and what of `asked` was something else the table `[asked]`, for `resumed`.
    """
    table: dict[str, Any] = {key_of(name): _to_toml_value(name, settings) for name in FIELDS}
    table["versions"] = {key: str(value) for key, value in extra.items()}
    others = [n for n in FIELDS if asked and getattr(asked, n) != getattr(settings, n)]
    if asked and others:
        table["asked"] = {key_of(name): _to_toml_value(name, asked) for name in others}
    return tomli_w.dumps(table)


def _to_toml_value(name: str, settings: Settings) -> Any:
    value = getattr(settings, name)
    if isinstance(value, Fraction):
        value = int(value) if value.denominator == 1 else str(value)
    if left_open(FIELDS[name], value):
        value = "auto"
    return list(value) if isinstance(value, tuple) else value


def _convert_all(values: Mapping[str, object]) -> dict[str, Any]:
    for name in values:
        if name not in FIELDS:
            raise UserError(f"unknown setting {name!r}{meant(name, FIELDS)}")
    return {name: convert(FIELDS[name], value, key_of(name)) for name, value in values.items()}


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
    _put_foreign_back(values)
    own = [name for name in FIELDS if concerns(name, values)]
    _resolve_shares(values, own)
    if values["local_steps"] > 0:
        values["local_epochs"] = Fraction(0)
    if values["prune_by"] == "auto" and concerns("prune_by", values):
        values["prune_by"] = _score_at(values["keep_ratio"])
    settings = Settings(**values)
    check_together(settings)
    return settings


def _score_at(keep_ratio: Sequence[float]) -> str:
    """Return what `--prune-by auto` is at a keep ratio."""
    return "magnitude" if keep_ratio[0] >= GRASP_BELOW else "grasp"


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


def _who_lacks(name: str, method: str) -> str:
    """Return to whom a setting means nothing, and what to do, to end an error."""
    if method not in methods_of(name):
        for_whom = ", ".join(methods_of(name))
        return f"method {method}; leave it away (it is for {for_whom})"
    other, value = FIELDS[name].metadata["unless"]
    return f"method {method} with {key_of(other)} {value}; leave it away"


def _put_foreign_back(values: dict[str, Any]) -> None:
    """Leave what the method has no use for at its default; refuse it where it is given as another.

    Shares among them stay shares. As a count, the default is what a run of the same length by
    another method has written into its file; one that is past may be there as well.
    """
    untouched = _defaults(values["preset"], values["method"])
    resolved = {**untouched, "outer_iterations": values["outer_iterations"]}
    _resolve_shares(resolved, FIELDS)
    resolved["prune_by"] = _score_at(values["keep_ratio"])
    rules = {name: field.metadata for name, field in FIELDS.items()}
    past = {**resolved, **{name: rule["past"] for name, rule in rules.items() if "past" in rule}}
    _resolve_shares(past, FIELDS)
    for name in FIELDS:
        if concerns(name, values):
            continue
        if values[name] not in (untouched[name], resolved[name], past[name]):
            raise UserError(f"{key_of(name)} means nothing to {_who_lacks(name, values['method'])}")
        values[name] = untouched[name]
