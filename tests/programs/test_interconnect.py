"""The interconnect is a matter of the MPI's configuration: whatever carries them, one result."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from launch import is_open_mpi, launcher, train
from safetensors.torch import load_file

pytestmark = pytest.mark.jobs

FLAGS = (
    *("--model", "resnet8", "--dataset", "synthetic", "--image-size", "8", "--progress", "off"),
    *("--train-samples", "64", "--test-samples", "16", "--batch-size", "4"),
    *("--outer-iterations", "6", "--local-steps", "2", "--ranks-per-node", "2"),
)
# Ranks of one machine would meet in shared memory whatever the netmod is.
APART = {"MPIR_CVAR_NOLOCAL": "1"}
# The first of each is what the others are compared with.
PATHS = {
    "openmpi": {
        "shared memory": {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "sm,self"},
        "tcp": {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self"},
        # Open MPI leaves UCX alone where there is no InfiniBand, unless any device will do.
        "ucx": {
            "OMPI_MCA_pml": "ucx",
            "OMPI_MCA_opal_common_ucx_tls": "any",
            "OMPI_MCA_opal_common_ucx_devices": "any",
            "UCX_TLS": "tcp,self",
        },
    },
    "mpich": {
        "ucx": {**APART, "MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp,self"},
        "ofi": {**APART, "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"},
    },
}


def paths() -> dict[str, dict[str, str]]:
    """Return the settings that this MPI has been built for."""
    program = Path(launcher()[0])
    kind = "openmpi" if is_open_mpi() else "mpich"
    info = program.with_name("ompi_info" if kind == "openmpi" else "mpichversion")
    if not info.exists():
        pytest.skip(f"{info.name}, which says what the MPI is built for, is not beside {program}")
    built = subprocess.run([info], capture_output=True, text=True).stdout
    marks = {"tcp": "btl: tcp", "ucx": "pml: ucx", "shared memory": "btl: sm"}
    if kind == "mpich":
        marks = {"ucx": "ucx", "ofi": "ofi"}
    return {name: PATHS[kind][name] for name in PATHS[kind] if marks[name] in built}


@pytest.mark.long
def test_what_carries_the_messages_does_not_change_the_result(tmp_path):
    found = paths()
    if len(found) < 2:
        pytest.skip(f"this MPI has one path only: {', '.join(found)}")
    runs = {}
    for name, variables in found.items():
        folder = tmp_path / name.replace(" ", "-")
        done = train(4, [*FLAGS, "--run-dir", str(folder)], tmp_path, **variables)
        assert done.returncode == 0, f"{name}: {(done.stdout + done.stderr)[-3000:]}"
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        runs[name] = [json.loads(line) for line in lines], load_file(folder / "state.safetensors")
    first, *others = runs.values()
    for records, weights in others:
        for record, expected in zip(records, first[0], strict=True):
            for key in ("bytes", "density", "mask_drift", "frozen", "iteration"):
                assert record[key] == expected[key]
            for key in ("train_loss", "test_loss", "test_accuracy"):
                assert record[key] == pytest.approx(expected[key], rel=1e-12)
            for residual, value in expected["residuals"].items():
                # None once the duals are retired.
                wanted = value if value is None else pytest.approx(value, rel=1e-12)
                assert record["residuals"][residual] == wanted
        for key, value in weights.items():
            expected = first[1][key]
            # Bit for bit: two ranks of a node, and two leaders, add two numbers in any order.
            assert torch.equal(value, expected), key
