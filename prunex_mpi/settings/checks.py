"""Which settings do not fit together, though each is fine alone."""

from collections.abc import Mapping
from typing import Any

from prunex_mpi.base.errors import UserError
from prunex_mpi.settings.fields import (
    CROSS_ENTROPY,
    ESTIMATED,
    FETCHED,
    FIELDS,
    FORMER_DGC,
    FROM_FILES,
    OF_FILES,
    Settings,
    key_of,
)
from prunex_mpi.settings.methods import (
    AVERAGING,
    BY_GROUPS,
    BY_ITERATION,
    CONSENSUS,
    PER_STEP,
    PRUNING_ONCE,
    SPARED_BY_OVERFLOW,
)
from prunex_mpi.settings.values import AUTO


def first_at_target(values: Mapping[str, Any]) -> int:
    """Return the first outer iteration with the target keep ratio."""
    return values["warmup_iterations"] + max(1, values["keep_ramp_iterations"])


def check_together(settings: Settings) -> None:
    """Refuse values that are fine alone and wrong together."""
    s = settings
    if not s.local_epochs and not s.local_steps:
        raise UserError("local-epochs and local-steps are both 0; give one of them")
    _check_estimate(s)
    _check_batch(s)
    _check_beginning(s)
    _check_data(s)
    _check_rival(s)
    _check_interval(s)
    if s.method not in BY_GROUPS:
        return
    if len(s.keep_ratio) not in (1, len(s.groups)):
        raise UserError(
            f"keep-ratio has {len(s.keep_ratio)} values for {len(s.groups)} groups; "
            "give one for all or one per group"
        )
    if s.keep_by != "groups" and s.groups != ("coupled",):
        raise UserError(f"keep-by {s.keep_by} is for coupled groups alone; give --groups coupled")
    if s.coupled_through != "all" and "coupled" not in s.groups:
        raise UserError(
            f"coupled-through {s.coupled_through} is for coupled groups alone; "
            "give --groups coupled"
        )
    if s.keep_by != "groups" and s.layer_keep_ratio:
        raise UserError(f"keep-by {s.keep_by} has one ratio for all; leave layer-keep-ratio out")
    if s.keep_floor and s.keep_by == "groups":
        raise UserError("keep-floor: a ratio of each layer's groups needs none; give --keep-by")
    if s.score == "gates" and s.groups != ("coupled",):
        raise UserError("score gates is for coupled groups alone; give --groups coupled")
    if s.score != "magnitude" and s.amp == "fp16":
        raise UserError(f"amp fp16: gradients that score {s.score} adds up overflow; use bf16")
    _check_pruning_is_done(s)
    _check_removal(s)
    if s.method not in CONSENSUS:
        return
    target = first_at_target(vars(s))
    last = min(s.freeze_iteration or s.outer_iterations, s.outer_iterations)
    if s.freeze_iteration > s.outer_iterations:
        raise UserError(
            f"freeze-iteration {s.freeze_iteration} is after the last of {s.outer_iterations} "
            "outer-iterations; lower it, give a share such as 10/16, or 0 for never"
        )
    if target > last:
        end = "freeze-iteration" if s.freeze_iteration else "outer-iterations"
        raise UserError(
            f"warmup-iterations and keep-ramp-iterations reach the keep ratio in iteration "
            f"{target}, beyond {end} {last}; lower them, or raise that"
        )
    if s.residuals != "every" and s.penalty == "balance":
        raise UserError(
            f"residuals {s.residuals}: penalty balance looks at them in every outer iteration; "
            "leave it at every"
        )
    if s.residuals == "off" and (s.eps_abs or s.eps_rel):
        raise UserError(
            "residuals off: eps-abs and eps-rel would never be looked at; set both to 0"
        )
    if s.rho_min > s.rho_max:
        raise UserError(f"rho-min {s.rho_min} is above rho-max {s.rho_max}")
    for key, rho in (("rho1", s.rho1), ("rho2", s.rho2)):
        if s.penalty != "fixed" and not s.rho_min <= rho <= s.rho_max:
            raise UserError(
                f"{key} {rho} must lie between rho-min {s.rho_min} and rho-max {s.rho_max}"
            )


def check_given(settings: Settings, usual: Mapping[str, Any]) -> None:
    """Refuse values, other than the `usual` ones, that another setting makes meaningless."""
    s = settings
    means_nothing = (
        ("lr_final", "lr_schedule", s.lr_schedule != "cosine"),
        ("freeze_window", "freeze_drift", s.freeze_drift < 0),
        *((name, "penalty", s.penalty == "fixed") for name in ("rho_factor", "rho_min", "rho_max")),
    )
    for name, other, idle in means_nothing:
        if idle and getattr(s, name) != usual[name]:
            raise UserError(
                f"{key_of(name)} means nothing with {key_of(other)} {getattr(s, other)}; leave it "
                "away"
            )


def known_freeze(settings: Settings) -> int:
    """Return the outer iteration that freezes the masks, 0 where that is not known before."""
    return settings.freeze_iteration if settings.freeze_drift < 0 else 0


def _check_pruning_is_done(settings: Settings) -> None:
    """Refuse what needs to know when pruning is done, where it can't be known."""
    s = settings
    freezes_at = known_freeze(s)
    if s.lr_restart and s.method in CONSENSUS and not freezes_at:
        raise UserError(
            "lr-restart needs to know when the masks freeze: give freeze-iteration, and a negative "
            "freeze-drift"
        )
    done = s.prune_iteration if s.method in PRUNING_ONCE else freezes_at
    if s.lr_restart and done >= s.outer_iterations:
        raise UserError(
            f"lr-restart: no local step is left when pruning is done in the last of "
            f"{s.outer_iterations} outer-iterations; prune earlier, or leave it away"
        )
    if s.dropped == "cut":
        return
    if s.penalty == "balance":
        raise UserError(
            f"dropped {s.dropped}: what it keeps would pass for a residual; leave penalty balance "
            "away"
        )
    if s.theta_start != "z":
        raise UserError(
            f"dropped {s.dropped}: with theta-start {s.theta_start} nothing is cut from theta; "
            "leave one of them away"
        )
    if not freezes_at:
        raise UserError(
            "dropped shrink needs to know when the masks freeze: give freeze-iteration, and a "
            "negative freeze-drift"
        )


def _check_interval(settings: Settings) -> None:
    """Refuse what does not fit together in when and how often nodes exchange."""
    s = settings
    if s.local_steps == AUTO and not s.local_epochs:
        raise UserError("local-steps auto needs local-epochs, which say how long the run is")
    if s.method not in BY_ITERATION:
        return
    if s.local_steps == AUTO and s.frozen_local_steps:
        raise UserError("frozen-local-steps is chosen with local-steps auto; leave it away")
    freezes_at = known_freeze(s)
    if s.frozen_local_steps and s.method in CONSENSUS and not freezes_at:
        raise UserError(
            "frozen-local-steps needs to know when the masks freeze: give freeze-iteration, and a "
            "negative freeze-drift"
        )
    if s.method not in AVERAGING or not s.overlap_steps:
        return
    if s.evaluate_every == 1:
        raise UserError(
            "overlap-steps: every outer iteration evaluates z and waits for it; "
            "give --evaluate-every 4 or more"
        )
    if 0 < s.local_steps < s.overlap_steps:
        raise UserError(
            f"overlap-steps {s.overlap_steps} is more than the {s.local_steps} local-steps"
        )
    if s.method in CONSENSUS and s.residuals == "every":
        raise UserError(
            "overlap-steps: residuals are measured on z in every outer iteration, which waits for "
            "it; give --residuals evaluate or off"
        )


def _check_estimate(settings: Settings) -> None:
    """Refuse what a dry run alone looks at, where there is none, and what its estimate lacks."""
    s = settings
    given = [name for name in ESTIMATED if getattr(s, name) != FIELDS[name].default]
    if given and not s.dry_run:
        raise UserError(f"{key_of(given[0])} means something with --dry-run alone; leave it away")
    if given and not s.link_gbit:
        raise UserError(f"{key_of(given[0])} means nothing without --link-gbit; give it as well")
    if s.step_ms and s.local_steps <= 0:
        raise UserError(
            "step-ms: local-epochs and auto do not say how many steps there are; give "
            "--local-steps as a number"
        )


def _check_batch(settings: Settings) -> None:
    """Refuse what the batch of a step or its loss can't be."""
    s = settings
    if s.batch_size % s.accumulate:
        raise UserError(
            f"accumulate {s.accumulate} does not divide the {s.batch_size} images of batch-size; "
            "give a number that does"
        )
    for name in ("label_smoothing", "mixup", "cutmix"):
        if s.loss != CROSS_ENTROPY and getattr(s, name):
            raise UserError(
                f"{key_of(name)} is for cross-entropy; with --loss {s.loss} leave it away, and do "
                "in that function what it is to do"
            )


def _check_beginning(settings: Settings) -> None:
    """Refuse what does not fit together in the weights that a run begins with, and their images."""
    s = settings
    if s.init_digest and not s.init_from:
        raise UserError("init-digest means nothing without --init-from; give it as well")
    for name in ("teacher_digest", "teacher_share", "teacher_temperature"):
        if not s.teacher and getattr(s, name) != FIELDS[name].default:
            raise UserError(f"{key_of(name)} means nothing without --teacher; give it as well")
    if len(s.image_mean) != len(s.image_std) or len(s.image_mean) not in (0, 3):
        raise UserError(
            f"image-mean has {len(s.image_mean)} values and image-std {len(s.image_std)}; give "
            "three of each, or none"
        )


def _check_data(settings: Settings) -> None:
    """Refuse what means something to other data sets alone."""
    if settings.download and settings.dataset not in FETCHED:
        raise UserError(
            f"download fetches {' and '.join(FETCHED)} alone; leave it away with --dataset "
            f"{settings.dataset}"
        )
    if settings.dataset in FROM_FILES:
        return
    # A data set of the user's is read like files, but what its images come from is not known.
    if ":" in settings.dataset:
        if settings.data_cache:
            raise UserError(
                f"data-cache: nothing tells when an image of {settings.dataset} changes, as the "
                "time of a file does; leave it away"
            )
        return
    for name in OF_FILES:
        # All that is not a file is in memory anyway.
        if getattr(settings, name) not in (FIELDS[name].default, "memory"):
            raise UserError(
                f"{key_of(name)} is for image files, which {settings.dataset} has none of; leave "
                f"it away, or give --dataset {FROM_FILES[0]}"
            )


def _check_removal(settings: Settings) -> None:
    """Refuse to take channels out of the network where that can't be done."""
    s = settings
    if not s.remove_dropped:
        return
    if s.groups != ("coupled",):
        raise UserError("remove-dropped is for coupled groups alone; give --groups coupled")
    if s.method in CONSENSUS and not s.freeze_iteration and s.freeze_drift < 0:
        raise UserError(
            "remove-dropped needs masks that are final: give freeze-iteration or freeze-drift"
        )
    if s.method in CONSENSUS and s.after_freeze != "local-sgd":
        raise UserError(
            f"after-freeze {s.after_freeze}: its duals are of the whole network; leave "
            "remove-dropped away, or give local-sgd"
        )


def _check_rival(settings: Settings) -> None:
    """Refuse what is wrong for one of the other methods alone."""
    s = settings
    if s.method == "prunex-flat" and s.ranks_per_node > 1:
        raise UserError(
            f"ranks-per-node {s.ranks_per_node}: with prunex-flat every rank is a node of its own; "
            "leave it away"
        )
    if s.method == "prunex-flat" and s.leaders_per_node > 1:
        raise UserError(
            f"leaders-per-node {s.leaders_per_node}: with prunex-flat every rank is a node of its "
            "own, which has one leader; leave it away"
        )
    if s.method == "one-shot" and not 1 <= s.prune_iteration <= s.outer_iterations:
        raise UserError(
            f"prune-iteration {s.prune_iteration} must be from 1 to the {s.outer_iterations} "
            "outer-iterations of one-shot"
        )
    if s.method == "prunetrain" and s.compile:
        raise UserError("compile: prunetrain changes the model too often; leave it away")
    if s.method == "prunetrain" and s.reconfigure_every > s.outer_iterations:
        raise UserError(
            f"reconfigure-every {s.reconfigure_every} is more than the {s.outer_iterations} "
            "outer-iterations, so that nothing would be removed; lower it"
        )
    if s.optimizer == "adamw" and s.weight_decay_on == "weights" and s.amp == "fp16":
        raise UserError(
            "weight-decay-on weights: a step of adamw that fp16 leaves out would shrink them all "
            "the same; use --amp bf16, or all"
        )
    if s.method == "dgc":
        _check_dgc(s)
    if s.method == "pactrain":
        _check_pactrain(s)
    if s.amp == "fp16" and s.method in PER_STEP and not spared_by_overflow(s):
        raise UserError(f"amp fp16: what {s.method} keeps or scales by must not overflow; use bf16")
    if s.method == "adacgd" and list(s.ada_levels) != sorted(set(s.ada_levels)):
        raise UserError("ada-levels must ascend, from the coarsest to the finest")


def spared_by_overflow(settings: Settings) -> bool:
    """Say whether a method that exchanges at each step can leave out one that has overflowed."""
    all_blocks = settings.method == "omnireduce" and settings.block_top == 1
    return settings.method in SPARED_BY_OVERFLOW or all_blocks


def _check_dgc(settings: Settings) -> None:
    """Refuse what is wrong for deep gradient compression alone."""
    s = settings
    if s.dgc_clip == FORMER_DGC:
        raise UserError(
            "a run of dgc from before dgc-clip compressed biases and accumulated weight decay; it "
            "can't go on in the same way: start a new run"
        )
    if s.dgc_nesterov and not s.momentum:
        raise UserError("dgc-nesterov means nothing without momentum; leave it away")


def _check_pactrain(settings: Settings) -> None:
    """Refuse what is wrong for PacTrain alone."""
    s = settings
    if len(s.keep_ratio) != 1:
        raise UserError(
            f"keep-ratio has {len(s.keep_ratio)} values; pactrain prunes single weights, not "
            "groups: give one"
        )
    if s.prune_iteration > s.outer_iterations:
        raise UserError(
            f"prune-iteration {s.prune_iteration} must be from 0 to the {s.outer_iterations} "
            "outer-iterations of pactrain"
        )
    for name in ("grasp_batches", "grasp_samples", "grasp_temperature"):
        usual = FIELDS[name].default, FIELDS[name].metadata.get("before")
        if s.prune_by != "grasp" and getattr(s, name) not in usual:
            raise UserError(
                f"{key_of(name)} means nothing to --prune-by {s.prune_by}; leave it away, or give "
                "--prune-by grasp"
            )
    if s.ternary and s.amp == "fp16":
        raise UserError("amp fp16: the scale of --ternary must not overflow; use bf16")
