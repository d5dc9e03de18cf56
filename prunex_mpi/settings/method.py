"""What a training method declares of itself: its kind, its traits and its own options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class NoOptions:
    """The options of a method that has none of its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Method:
    """Declare a training method, what `--method` chooses from.

    Free of torch and MPI. `kind` is how it trains: "consensus", or "flat consensus" where every
    rank is a node of its own; "local" steps whose parameters are averaged; or an exchange "per
    step". `defaults` holds the settings whose default is another with this method, by name. The
    traits say what core and settings need to know of it before its code is
    there; none of them asks for its name.
    """

    name: str
    help: str
    kind: str
    options: type = NoOptions
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Raises UserError for settings that do not fit together with this method.
    check: Callable[[Any], None] | None = None

    # What it sends is no mean of parameters in the format of --payload: it has an exchange of its
    # own (`methods/exchanges.py`).
    own_exchange: bool = False
    # What it prunes: the "groups" of --groups, single "weights", "kernels" and patterns of them, or
    # "channels", which it takes out of the network while it trains.
    prunes: str = ""
    # Where momentum is: in torch's "optimizer", in what "workers" send, likewise and "fixed", not
    # that of --momentum, or likewise for the matrices of hidden layers, whose "update" arrives.
    momentum_in: str = "optimizer"
    # A step whose gradient has overflowed in float16 leaves no trace when it is left out.
    overflow_safe: bool = False
    # The interval between exchanges follows from the learning rate (QSR).
    quadratic_interval: bool = False

    def takes(self, option: str) -> bool:
        """Return whether `option` is one of its own."""
        return any(own.name == option for own in fields(self.options))

    @property
    def per_step(self) -> bool:
        """Whether it exchanges gradients at each local step."""
        return self.kind == "per step"

    @property
    def flat(self) -> bool:
        """Whether every rank is a node of its own, and nothing is left out of a message."""
        return self.kind == "flat consensus"

    @property
    def consensus(self) -> bool:
        """Whether it has consensus variables with duals and penalties."""
        return self.flat or self.kind == "consensus"

    @property
    def prunes_groups(self) -> bool:
        """Whether it prunes the groups of --groups."""
        return self.prunes == "groups"

    @property
    def own_groups(self) -> tuple[str, ...]:
        """The kinds of groups that it prunes, where they are not those of --groups."""
        return ("kernel", "pattern") if self.prunes == "kernels" else ()

    @property
    def removes(self) -> bool:
        """Whether it takes coupled channels out of the network while it trains."""
        return self.prunes == "channels"

    @property
    def suits_muon(self) -> bool:
        """Whether orthogonal steps leave alone what it prunes: weights, or what a lasso shrinks."""
        return self.prunes in ("", "groups")

    @property
    def prunes_once(self) -> bool:
        """Whether it prunes at the end of one outer iteration."""
        return self.takes("prune_iteration")

    @property
    def outer_step(self) -> bool:
        """Whether a step with a momentum of its own follows each exchange (DiLoCo)."""
        return self.takes("outer_momentum")

    @property
    def momentum(self) -> bool:
        """Whether its momentum is that of --momentum."""
        return self.momentum_in != "fixed"

    @property
    def by_iteration(self) -> bool:
        """Whether nodes exchange once per outer iteration."""
        return not self.per_step

    @property
    def averages(self) -> bool:
        """Whether the message is the parameters, in the format of --payload."""
        return not self.own_exchange

    @property
    def local_sgd(self) -> bool:
        """Whether it trains locally without duals."""
        return self.kind == "local"

    @property
    def nodes(self) -> bool:
        """Whether there are nodes between ranks and z."""
        return not self.flat

    @property
    def shrinks(self) -> bool:
        """Whether the payload is smaller once pruning is done."""
        return self.prunes_groups and not self.flat

    @property
    def keeps_a_share(self) -> bool:
        """Whether it keeps the share --keep-ratio of groups or weights."""
        return self.keeps_by_layer or self.prunes == "weights"

    @property
    def keeps_by_layer(self) -> bool:
        """Whether that share is of each layer's groups."""
        return self.prunes_groups or bool(self.own_groups)

    @property
    def optimizer(self) -> bool:
        """Whether --optimizer takes its steps, or some of them; else the workers send momentum."""
        return self.momentum_in in ("optimizer", "update")

    @property
    def steps_on_gradient(self) -> bool:
        """Whether steps begin with the mean gradient alone, which has no momentum yet."""
        return self.momentum_in == "optimizer"

    def has(self, traits: str) -> bool:
        """Return whether the method has all of the named `traits`."""
        return all(getattr(self, trait) for trait in traits.split())

    def option_name(self, option: str) -> str:
        """Return the flat name of one of its options, as flags have it (`dgc_ratio`)."""
        return f"{self.name.replace('-', '_')}_{option}"

    def option_fields(self) -> dict[str, Any]:
        """Return the fields of its own options by flat name."""
        return {self.option_name(option.name): option for option in fields(self.options)}
