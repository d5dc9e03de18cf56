"""What is asked of `replicate`: settings that mean something in one's own loop, as the flags do."""

from collections.abc import Mapping
from typing import Any

import torch

from prunex_mpi.base.errors import UserError, meant
from prunex_mpi.config.resolve import BY_NAME, FIELDS, make
from prunex_mpi.methods.exchanges import exchange_of
from prunex_mpi.settings.fields import OF_SECTION, Settings, key_of

# Settings of the algorithm, which mean here what they mean to the program.
SECTIONS = ("sparsity", "consensus", "penalties", "exchange")
OTHERS = (
    *("preset", "method", "seed", "outer_iterations", "local_steps", "inner_momentum"),
    *("clip_grad", "evaluate_every", "mpi_buffers", "ranks_per_node", "rack_of", "piece_kib"),
)
ACCEPTED = {*OTHERS, *(name for section in SECTIONS for name in OF_SECTION[section])}
INSTEAD = {
    "lr": "that of the optimizer",
    "sparsity": "keep_ratio, the share that stays",
    "lr_schedule": "a scheduler of torch",
    "momentum": "that of the optimizer",
    "weight_decay": "that of the optimizer",
    "optimizer": "an optimizer as the third argument",
    "batch_size": "that of the loader",
    "amp": "torch.autocast around the loss, and scaler= for float16",
    "local_epochs": "local_steps",
    "device": "a model that is there",
    "model_ema_decay": "torch.optim.swa_utils",
}


def settings_of(
    given: Mapping[str, Any], optimizer: object, *, has_example: bool, calibrates: bool
) -> Settings:
    """Return the settings of an own loop; raise UserError for what means nothing to one."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"the third argument of replicate is of type {type(optimizer).__name__}; give a "
            "torch.optim.Optimizer of model.parameters()"
        )
    for name in ("outer_iterations", "local_steps"):
        if type(given.get(name)) is not int or given[name] < 1:
            raise UserError(
                f"replicate needs {name}=, a number from 1 on: the run has outer_iterations times "
                "local_steps steps"
            )
    given = {"evaluate_every": given["outer_iterations"], **given}
    method = BY_NAME.get(given.get("method", "prunex"))
    if method is None:
        # Says which names there are.
        make(method=given["method"])
    own = set(method.option_fields())
    if exchange_of(method).own_decay:
        own |= {"momentum", "weight_decay"}
        given.setdefault("weight_decay", 0.0)
    for name in given.keys() - ACCEPTED - own:
        if name in INSTEAD:
            raise UserError(f"{name} is no setting of replicate; give {INSTEAD[name]}")
        if name not in FIELDS:
            guess = method.option_name(name)
            hint = (
                f"; did you mean {guess!r}"
                if guess in own
                else meant(name, ACCEPTED | own, "; prunex_mpi/settings/README.md has the names")
            )
            raise UserError(f"replicate has no setting {name!r}{hint}")
        raise UserError(
            f"{key_of(name)} means nothing in one's own loop, which brings model, data and files; "
            "leave it away"
        )
    if method.by_iteration and not calibrates:
        given.setdefault("bn", "average")
    settings = make(**given)
    if method.by_iteration and settings.bn == "recalibrate" and not calibrates:
        raise UserError("bn recalibrate needs batches; give calibrate=, or bn='average'")
    if (method.removes or method.keeps_by_layer) and not has_example:
        raise UserError(
            f"method {method.name} prunes groups, which are found by following a batch through the "
            "model; give example=, a batch as the model takes it"
        )
    plain = isinstance(optimizer, torch.optim.SGD)
    if method.own_momentum and not (plain and not optimizer.param_groups[0]["momentum"]):
        raise UserError(
            f"{method.name} has a momentum of its own; give torch.optim.SGD without momentum"
        )
    return settings
