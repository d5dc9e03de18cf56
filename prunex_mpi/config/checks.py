"""Which settings do not fit together, though each is fine alone."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from prunex_mpi.base.errors import UserError
from prunex_mpi.settings import fields
from prunex_mpi.settings.fields import Settings, key_of
from prunex_mpi.settings.values import AUTO

# With fewer local steps, momentum that is kept and DiLoCo's outer momentum drive each other.
FEWEST_KEPT = 8


def first_at_target(values: Mapping[str, Any]) -> int:
    """Return the first outer iteration with the target keep ratio."""
    return values["warmup_iterations"] + max(1, values["keep_ramp_iterations"])


def check_together(settings: Settings) -> None:
    """Refuse values that are fine alone and wrong together."""
    if settings.method.check is not None:
        settings.method.check(settings)
    for problem in _problems(settings):
        raise UserError(problem)


def _problems(s: Settings) -> Iterator[str]:
    """Yield what does not fit together, and what to do about it."""
    if not s.local_epochs and not s.local_steps:
        yield "local-epochs and local-steps are both 0; give one of them"
    yield from _of_beginning(s)
    yield from _of_data(s)
    if s.amp == "fp16" and s.method.per_step and not s.method.overflow_safe:
        yield f"amp fp16: what {s.method.name} keeps or scales by must not overflow; use bf16"
    if s.optimizer == "muon" and not s.method.suits_muon:
        yield (
            f"optimizer muon makes matrices orthogonal, which brings back what {s.method.name} "
            "prunes; give sgd or adamw"
        )
    if s.local_steps == AUTO and not s.local_epochs:
        yield "local-steps auto needs local-epochs, which say how long the run is"
    if s.method.by_iteration:
        yield from _of_interval(s)
    if s.method.prunes_groups:
        yield from _of_groups(s)
    if s.method.consensus:
        yield from _of_consensus(s)


def _of_groups(s: Settings) -> Iterator[str]:
    """Yield what does not fit together in which groups are pruned, and what comes of them."""
    with_ratio = [kind for kind in s.groups if kind != "pattern"]
    if len(s.keep_ratio) not in (1, len(with_ratio)):
        but = ", but none for pattern" if "pattern" in s.groups else ""
        yield (
            f"keep-ratio has {len(s.keep_ratio)} values for {len(with_ratio)} groups; give one for "
            f"all or one per group{but}"
        )
    chosen = {"keep-by": s.keep_by != "groups", "score": s.score != "magnitude"}
    for key, given in {**chosen, "remove-dropped": s.remove_dropped}.items():
        if given and s.groups != ("coupled",):
            yield f"{key} is for coupled groups alone; leave it away, or give --groups coupled"
    if s.score != "magnitude" and s.amp == "fp16":
        yield f"amp fp16: gradients that score {s.score} adds up overflow; use bf16"
    if s.remove_dropped and s.method.consensus:
        if not fields.freezes(s):
            yield "remove-dropped needs masks that are final: give freeze-iteration or freeze-drift"
        if s.after_freeze != "local-sgd":
            yield (
                f"after-freeze {s.after_freeze}: its duals are of the whole network; leave "
                "remove-dropped away, or give local-sgd"
            )


def _of_consensus(s: Settings) -> Iterator[str]:
    """Yield what does not fit together in stages of the run, residuals and penalties."""
    target = first_at_target(vars(s))
    last = s.freeze_iteration or s.outer_iterations
    if last > s.outer_iterations:
        yield (
            f"freeze-iteration {last} is after the last of {s.outer_iterations} outer-iterations; "
            "lower it, give a share such as 10/16, or 0 for never"
        )
    if target > last:
        end = "freeze-iteration" if s.freeze_iteration else "outer-iterations"
        yield (
            f"warmup-iterations and keep-ramp-iterations reach the keep ratio in iteration "
            f"{target}, beyond {end} {last}; lower them, or raise that"
        )
    if s.residuals != "every" and s.penalty == "balance":
        yield (
            f"residuals {s.residuals}: penalty balance looks at them in every outer iteration; "
            "leave it at every"
        )
    if s.residuals == "off" and (s.eps_abs or s.eps_rel):
        yield "residuals off: eps-abs and eps-rel would never be looked at; set both to 0"
    for key, rho in (("rho1", s.rho1), ("rho2", s.rho2)):
        if s.penalty == "balance" and not fields.RHO_MIN <= rho <= fields.RHO_MAX:
            yield f"{key} {rho} must be from {fields.RHO_MIN} to {fields.RHO_MAX}"


def check_given(settings: Settings, given: Collection[str]) -> None:
    """Refuse what is `given` otherwise than it is anyway, and made meaningless by another one."""
    s = settings
    own = {s.method.option_name(name): value for name, value in vars(s.options).items()}
    values = {**vars(s), **own}
    # While masks may still change nothing stops a run, and without duals there are no residuals.
    never_stops = fields.freezes(s) and s.after_freeze == "local-sgd"
    means_nothing = (
        ("min_lr_ratio", "lr_schedule", s.lr_schedule != "cosine"),
        ("beta2", "optimizer", s.optimizer == "sgd"),
        ("keep_ratio", "groups", s.groups == ("pattern",)),
        ("keep_floor", "keep_by", s.keep_floor and s.keep_by == "groups"),
        *((name, "after_freeze", values[name] and never_stops) for name in ("eps_abs", "eps_rel")),
        ("inner_momentum", "momentum", s.inner_momentum == "reset" and not s.momentum),
        ("diloco_outer_warmup", "diloco_outer_momentum", not values.get("diloco_outer_momentum")),
        ("dgc_warmup_epochs", "dgc_ratio", values.get("dgc_ratio") == 1),
    )
    for name, other, idle in means_nothing:
        if idle and name in given:
            value = values[other]
            shown = value[0] if isinstance(value, tuple) else value
            raise UserError(
                f"{key_of(name)} means nothing with {key_of(other)} {shown}; leave it away"
            )
    for name, needed, idle in (
        ("min_nodes", "--on-node-loss continue", s.on_node_loss == "stop"),
        ("comm_share", "--local-steps auto", s.local_steps != AUTO),
        ("diloco_alpha", "--overlap-steps", not s.overlap_steps),
    ):
        if idle and name in given:
            raise UserError(f"{key_of(name)} means nothing without {needed}; give it as well")


def _of_interval(s: Settings) -> Iterator[str]:
    """Yield what does not fit together in when and how often nodes exchange."""
    if s.fragments > 1:
        yield from _of_fragments(s)
    if s.rack_of not in ("", "slurm"):
        yield from _of_racks(s)
    if not s.method.averages or not s.overlap_steps:
        return
    if s.evaluate_every == 1:
        yield (
            "overlap-steps: every outer iteration evaluates z and waits for it; "
            "give --evaluate-every 4 or more"
        )
    if 0 < s.local_steps < s.overlap_steps:
        yield f"overlap-steps {s.overlap_steps} is more than the {s.local_steps} local-steps"
    if s.method.consensus and s.residuals == "every":
        yield (
            "overlap-steps: residuals are measured on z in every outer iteration, which waits for "
            "it; give --residuals evaluate or off"
        )


def _of_fragments(s: Settings) -> Iterator[str]:
    """Yield why parts of a message can't be sent apart."""
    if AUTO in (s.local_steps, s.overlap_steps):
        yield (
            "fragments: auto measures messages that go at once; give local-steps and "
            "overlap-steps as numbers"
        )
    if 0 < s.local_steps < s.fragments:
        yield (
            f"fragments {s.fragments} is more than the {s.local_steps} local-steps, after one of "
            "which each leaves; lower it"
        )
    if s.local_steps and s.overlap_steps > s.local_steps // s.fragments:
        yield (
            f"overlap-steps {s.overlap_steps} is more than the {s.local_steps // s.fragments} "
            f"local steps between two of {s.fragments} fragments; lower it"
        )
    if s.method.consensus and (s.after_freeze != "local-sgd" or not fields.freezes(s)):
        yield (
            "fragments: duals need all of z at once; give masks that freeze, and after-freeze "
            "local-sgd"
        )


def _of_racks(s: Settings) -> Iterator[str]:
    """Yield why a pattern can't name racks, or a lost node makes their number wrong."""
    if s.rack_of.isdecimal():
        if not int(s.rack_of):
            yield "rack-of 0: a rack has at least one node; leave it away for no racks"
        if s.on_node_loss == "continue":
            yield (
                f"rack-of {s.rack_of}: once a node is lost, consecutive ones are not those of a "
                "rack; give a pattern of host names, or leave on-node-loss away"
            )
        return
    try:
        if not re.compile(s.rack_of).groups:
            yield f"rack-of {s.rack_of}: put what names the rack in brackets, as in (.*)-node"
    except re.error as error:
        yield f"rack-of {s.rack_of} is no regular expression: {error}"


def _of_beginning(s: Settings) -> Iterator[str]:
    """Yield what does not fit together in the weights that a run begins with, and their images."""
    if s.init_digest and not s.init_from:
        yield "init-digest means nothing without --init-from; give it as well"
    for name in ("teacher_digest", "distillation_alpha", "distillation_tau"):
        if not s.teacher and getattr(s, name) != fields.SHARED[name].default:
            yield f"{key_of(name)} means nothing without --teacher; give it as well"
    if len(s.image_mean) != len(s.image_std) or len(s.image_mean) not in (0, 3):
        yield (
            f"image-mean has {len(s.image_mean)} values and image-std {len(s.image_std)}; give "
            "three of each, or none"
        )


def _of_data(s: Settings) -> Iterator[str]:
    """Yield what means something to other data sets alone, and why a run can't be evaluated."""
    if not s.test_data and not s.val_split:
        yield "no-test-data leaves nothing to evaluate on; give --val-split as well"
    text = s.dataset == fields.TEXT
    for name in fields.OF_IMAGES if text else fields.OF_TEXT:
        if getattr(s, name) != fields.SHARED[name].default:
            yield (
                f"{key_of(name)} is for {'images' if text else 'text'}; leave it away with "
                f"--dataset {s.dataset}"
            )
    if not text and not s.data_dir:
        yield f"--data-dir must not be empty with --dataset {s.dataset}"
    if s.download and s.dataset not in fields.FETCHED:
        yield (
            f"download fetches {' and '.join(fields.FETCHED)} alone; leave it away with --dataset "
            f"{s.dataset}"
        )
    # A data set of the user's is read like files.
    if s.dataset in fields.FROM_FILES or ":" in s.dataset:
        return
    for name in fields.OF_FILES:
        # All that is not a file is in memory anyway.
        if getattr(s, name) not in (fields.SHARED[name].default, "memory"):
            yield (
                f"{key_of(name)} is for image files, which {s.dataset} has none of; leave "
                f"it away, or give --dataset {fields.FROM_FILES[0]}"
            )


def advice(settings: Settings, steps: int) -> list[str]:
    """Return a line for each thing that is known to go wrong with `steps` local steps."""
    lines = []
    kept = settings.method.outer_step and settings.inner_momentum == "keep" and settings.momentum
    if kept and settings.optimizer == "sgd" and steps < FEWEST_KEPT:
        lines.append(
            f"{settings.method.name} keeps the inner momentum over exchanges that are {steps} "
            f"local steps apart: below {FEWEST_KEPT} that is stable at very small learning rates "
            "alone; give --inner-momentum reset"
        )
    if settings.optimizer != "sgd" and settings.inner_momentum == "reset":
        lines.append(
            "adamw takes its first steps after each exchange far too short where its first moment "
            "begins anew; give --inner-momentum keep"
        )
    return lines
