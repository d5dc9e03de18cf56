"""Find the groups that a method prunes in a model, and the rules by which they can be taken out."""

from dataclasses import replace

from torch import nn

from prunex_mpi.base.errors import UserError, log
from prunex_mpi.models.dummy_input import find_ends
from prunex_mpi.models.inputs import Inputs
from prunex_mpi.models.layout import Layout
from prunex_mpi.pruning.channel_trace import Rules
from prunex_mpi.pruning.coupling import find_coupling
from prunex_mpi.pruning.groups import INSTEAD, Groups, find_groups, out_of_reach
from prunex_mpi.pruning.projection import with_budget
from prunex_mpi.pruning.removable import find_rules, training_failure
from prunex_mpi.settings.fields import Settings


def choose_rules(settings: Settings, model: nn.Module, inputs: Inputs) -> Rules:
    """Try by which rules coupled groups can be taken out of `model`, on the CPU; if need be."""
    removing = settings.method.removes
    if not removing and (not settings.method.prunes_groups or "coupled" not in settings.groups):
        return Rules()
    rules = find_rules(model, inputs, Rules(layers=removing))
    if settings.remove_dropped or removing:
        reason = training_failure(model, find_coupling(model, inputs, rules), inputs)
        what, instead = "remove-dropped", "leave remove-dropped away"
        if removing:
            what, instead = f"method {settings.method.name}", "choose another method"
        if reason:
            raise UserError(
                f"{what}: a smaller network could not be trained, since the model reads channels "
                f"in training alone ({reason}); {instead}"
            )
    return rules


def make_groups(
    settings: Settings,
    model: nn.Module,
    layout: Layout,
    inputs: Inputs,
    rules: Rules | None = None,
) -> Groups:
    """Find the groups of `model`, which is on the CPU; none for methods that do not prune them.

    `rules` are those of `choose_rules`, which are chosen here without.
    """
    kinds = settings.method.own_groups or settings.groups
    if not (settings.method.removes or settings.method.keeps_by_layer):
        return Groups((), (), 0, ())
    if rules is None:
        rules = choose_rules(settings, model, inputs)
    if settings.method.removes:
        coupling = find_coupling(model, inputs, rules)
        return find_groups(model, layout, ("coupled",), (1.0,), coupling=coupling)
    coupling = None
    if "coupled" in kinds:
        coupling = find_coupling(model, inputs, rules)
    found = find_groups(
        model,
        layout,
        kinds,
        settings.keep_ratio,
        coupling=coupling,
        ends=None if kinds == ("coupled",) else find_ends(model, inputs),
        instead="choose another --method" if settings.method.own_groups else INSTEAD,
    )
    if settings.keep_by != "groups":
        found = with_budget(found, layout, settings.keep_by, settings.keep_floor)
    return replace(found, by_gate=settings.score == "gates")


def log_unpruned(settings: Settings, groups: Groups, numel: int) -> None:
    """Log which channels of a model of `numel` parameters are not pruned, and why."""
    for excluded in groups.excluded:
        log.info("not pruned: %s", excluded)
    line = out_of_reach(groups, numel)
    if line and settings.method.prunes_groups:
        log.warning("%s", line)
