"""What a training method declares of itself: its driver, its traits and its own options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class NoOptions:
    """The options of a method that has none of its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Method:
    """Declare a training method, what `--method` chooses from.

    Free of torch and MPI: `driver` names the module in `prunex_mpi.methods` whose
    `outer_iterations` runs it, `code` the one with the functions that are the method's own, where
    it has any. `defaults` holds the settings whose default is another with this method, by name.
    The traits say what core and settings need to know of it; none of them asks for its name.
    """

    name: str
    help: str
    driver: str
    code: str = ""
    options: type = NoOptions
    defaults: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    # Raises UserError for settings that do not fit together with this method.
    check: Callable[[Any], None] | None = None

    # When and what it exchanges: gradients at each local step, or parameters once per outer
    # iteration, in the format of --payload or in one of its own.
    per_step: bool = False
    own_format: bool = False
    # H-SADMM: consensus variables with duals and penalties.
    consensus: bool = False
    # Every rank is a node of its own, nothing is left out of a message.
    flat: bool = False
    # The interval between exchanges follows from the learning rate (QSR).
    quadratic_interval: bool = False
    # Prunes the groups of --groups: while it trains (consensus), or at the end of one outer
    # iteration.
    prunes_groups: bool = False
    prunes_once: bool = False
    # The kinds of groups that it prunes, where they are not those of --groups.
    own_groups: tuple[str, ...] = ()
    # Prunes single weights.
    prunes_weights: bool = False
    # Takes coupled channels out of the network while it trains.
    removes: bool = False
    # Of those that exchange at each step: the step takes the mean gradient as it is.
    plain_mean: bool = False
    # Nodes take their steps along gradients of their own: z is the mean of their parameters.
    drifts: bool = False
    # Momentum is inside what the workers send; the weights are decayed there, too.
    own_momentum: bool = False
    own_decay: bool = False
    # Its momentum is that of --momentum.
    momentum: bool = True
    # A step whose gradient has overflowed in float16 leaves no trace when it is left out.
    overflow_safe: bool = False
    # What its outer step remembers beside theta (DiLoCo's momentum).
    outer_step: bool = False

    @property
    def by_iteration(self) -> bool:
        """Whether nodes exchange once per outer iteration."""
        return not self.per_step

    @property
    def averages(self) -> bool:
        """Whether the message is the parameters, in the format of --payload."""
        return not self.per_step and not self.own_format

    @property
    def local_sgd(self) -> bool:
        """Whether it trains locally without duals."""
        return not self.per_step and not self.consensus

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
        return self.keeps_by_layer or self.prunes_weights

    @property
    def keeps_by_layer(self) -> bool:
        """Whether that share is of each layer's groups."""
        return self.prunes_groups or bool(self.own_groups)

    @property
    def optimizer(self) -> bool:
        """Whether one of torch's optimizers takes its steps."""
        return not self.own_momentum

    @property
    def fixed_interval(self) -> bool:
        """Whether all its outer iterations have as many local steps."""
        return not self.quadratic_interval

    @property
    def fixed_network(self) -> bool:
        """Whether the network stays as it is at each step."""
        return not self.removes

    def has(self, traits: str) -> bool:
        """Return whether the method has all of the named `traits`."""
        return all(getattr(self, trait) for trait in traits.split())

    def option_name(self, option: str) -> str:
        """Return the flat name of one of its options, as flags have it (`dgc_ratio`)."""
        return f"{self.name.replace('-', '_')}_{option}"

    def option_fields(self) -> dict[str, Any]:
        """Return the fields of its own options by flat name."""
        return {self.option_name(option.name): option for option in fields(self.options)}
