"""batch/gpu.sh where there is no GPU, and that it is a script at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "batch/gpu.sh"


def test_a_folder_that_can_not_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    result = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path / "file/out")],
        env={**os.environ, "PYTHON": "false"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert "can't be made: name another one" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_it_says_that_there_is_no_gpu(tmp_path):
    result = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path / "out")],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert "sees no GPU here; set PYTHON" in result.stderr
    assert not result.stdout
