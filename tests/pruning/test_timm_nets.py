"""timm's networks through coupled groups: what half of them leaves, and the same outputs."""

import pytest
from timm_nets import NAMES, look_at

pytest.importorskip("timm")
# Of kinds that differ in what mixes their channels.
KINDS = (
    *("levit_128s", "eca_resnext26ts", "skresnet18", "poolformer_s12"),
    *("convnextv2_atto", "edgenext_xx_small", "pvt_v2_b0", "nf_regnet_b0"),
)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_half_of_the_groups_leave_about_a_quarter(name):
    assert name in NAMES.read_text(encoding="utf-8").split()
    found = look_at(name)
    assert found["failure"] is None and found["left"] <= 0.3, found
