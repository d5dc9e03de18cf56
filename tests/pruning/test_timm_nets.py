"""timm's networks through coupled groups: what half of them leaves, and the same outputs."""

import pytest
from timm_nets import NAMES, look_at

pytest.importorskip("timm")
# Of what half of the groups leave, for kinds that differ in what mixes their channels.
LEFT = {
    "levit_128s": 0.3,
    "eca_resnext26ts": 0.3,
    "skresnet18": 0.3,
    "poolformer_s12": 0.3,
    "convnextv2_atto": 0.3,
    "edgenext_xx_small": 0.3,
    "pvt_v2_b0": 0.3,
    "nf_regnet_b0": 0.3,
}


@pytest.mark.long
@pytest.mark.parametrize("name", LEFT)
def test_half_of_the_groups_leave_about_a_quarter(name):
    assert name in NAMES.read_text(encoding="utf-8").split()
    found = look_at(name)
    assert found["failure"] is None and found["left"] <= LEFT[name], found
