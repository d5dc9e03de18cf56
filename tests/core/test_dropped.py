"""Groups that z has dropped: cut, or shrunk to nothing so that they may come back."""

import pytest
import torch
from driving import by_name, element_masks, run_driver
from nets import CoupledNet, RandomStream
from nodes import WORLD, nodes_of

from prunex_mpi.config.resolve import make

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

RAMP = {
    "groups": ("coupled",),
    "outer_iterations": 9,
    "warmup_iterations": 1,
    "keep_ramp_iterations": 4,
    "freeze_iteration": 7,
    "lr_schedule": "constant",
    "warmup_ratio": 0.0,
    "rho1": 0.02,
    "rho2": 0.005,
    "bn": "average",
    "residuals": "off",
}


def run(dropped, ranks_per_node=2, grows=0):
    """Return of each outer iteration (mask, theta and u where z has nothing).

    Theta hardly moves, but after iteration `grows`, when it becomes large where z has nothing.
    """
    torch.manual_seed(2)
    settings = make(**RAMP, dropped=dropped, lr=1e-9, divergence_factor=0.0)
    found = []
    with nodes_of(ranks_per_node) as topology:
        stream = RandomStream(WORLD.rank, torch.float64)
        for record, state in run_driver(topology, settings, CoupledNet().double(), stream):
            masks = element_masks(state)
            outside = []
            for flat in (state.theta, state.u):
                parts = by_name(flat, state)
                outside.append(torch.cat([parts[n][~m].abs() for n, m in masks.items()]))
            found.append((state.mask.copy(), *outside))
            for name, mask in masks.items() if record["iteration"] == grows else ():
                by_name(state.theta, state)[name][~mask] *= 100
    return found


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_shrunk_groups_come_back_and_cut_ones_do_not_by_themselves(ranks_per_node):
    for dropped in ("shrink", "cut"):
        masks = [mask for mask, _, _ in run(dropped, ranks_per_node, grows=5)]
        assert (masks[5] == masks[4]).all() == (dropped == "cut")
        if dropped == "shrink":
            # Half of the groups of each set were out, and all of them are large now; so are some
            # that were in, by what they read of the others.
            assert (masks[5] & ~masks[4]).sum() > 0.75 * masks[5].sum()
        assert (masks[6] == masks[5]).all() and (masks[8] == masks[6]).all()


def test_duals_of_dropped_groups_are_nothing_and_theta_lives_on():
    for _, theta, u in run("shrink")[1:6]:
        assert not u.any()
        assert theta.numel() and theta.any()
    for _, theta, _ in run("shrink")[6:]:
        assert not theta.any()


def test_shrunk_groups_are_nothing_before_the_freeze():
    shrunk = [float(theta.norm()) for _, theta, _ in run("shrink")]
    # Dropped from iteration 2 on, and the freeze is at the end of 7.
    assert shrunk[1] > 0 and shrunk[6] == 0.0
    # The mask no longer changes from 5 on: 2/3, 1/2 and 0 of it.
    assert shrunk[5] / shrunk[4] == pytest.approx(1 / 2, rel=1e-5)
