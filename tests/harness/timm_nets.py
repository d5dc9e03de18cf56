"""Coupled groups of timm's networks: what half of them leaves, CPU seconds, and why.

`python tests/harness/timm_nets.py [NAME ...]` prints a line of JSON per network. A family is a
module of timm and the letters that a name begins with; the smallest of each family counts, where it
has less than 32 million parameters. `--find` prints their names, which are kept in `NAMES`.
"""

import argparse
import json
import re
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from masking import plan_of
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.groups import find_groups
from prunex_mpi.pruning.projection import group_squared_norms, select
from prunex_mpi.pruning.removable import attempt, find_tried

NAMES = Path(__file__).with_name("timm_names.txt")
LARGEST = 32e6


def find_names() -> list[str]:
    """Return the name of the smallest network of each family; takes minutes."""
    import timm

    best: dict[tuple[str, str], tuple[int, str]] = {}
    for module in timm.list_modules():
        for name in timm.list_models(module=module):
            with torch.device("meta"):
                size = sum(p.numel() for p in timm.create_model(name).parameters())
            family = module, re.match("[a-z]+", name)[0]
            if family[1] != "test" and size < LARGEST:
                best[family] = min(best.get(family, (size, name)), (size, name))
    return [name for _, name in best.values()]


def build(name: str) -> tuple[nn.Module, Images]:
    """Return a network of timm with random weights, in evaluation mode, and its inputs."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    return model, Images(model.default_cfg["input_size"][-1], 10)


def look_at(name: str) -> dict[str, object]:
    """Return the share of parameters that half of each set leaves, seconds, and what went wrong."""
    model, inputs = build(name)
    start = time.process_time()
    try:
        coupling = find_tried(model, inputs)
    except UserError as error:
        seconds = round(time.process_time() - start, 1)
        return {"name": name, "refused": str(error), "seconds": seconds}
    seconds = time.process_time() - start
    layout = build_layout(model)
    groups = find_groups(model, layout, ("coupled",), (0.5,), coupling=coupling)
    scores = group_squared_norms(torch.randn(layout.numel), layout, groups, groups.kinds[0]).numpy()
    mask = select(scores, groups.kinds[0], 1.0)
    kept = plan_of(layout, groups, mask, torch.device("cpu")).numel
    failure = attempt(model, coupling, ~mask, inputs)
    reasons: Counter[str] = Counter()
    for line in coupling.excluded:
        layer, _, reason = line.partition(" [coupled]: ")
        reasons[reason] += model.get_parameter(layer).numel()
    return {
        "name": name,
        "left": round(kept / layout.numel, 3),
        "seconds": round(seconds, 1),
        "failure": failure,
        "stays": {k: round(n / layout.numel, 3) for k, n in reasons.most_common(4)},
    }


def main() -> None:
    """Print a line per network."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all of the list")
    parser.add_argument("--find", action="store_true", help="print the names of the list")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.find:
        print("\n".join(find_names()))
        return
    for name in options.names or NAMES.read_text(encoding="utf-8").split():
        print(json.dumps(look_at(name)), flush=True)


if __name__ == "__main__":
    main()
