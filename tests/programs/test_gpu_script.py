"""batch/gpu.sh where there is no GPU, and that it is a script at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "batch/gpu.sh"


WITHOUT = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.mark.parametrize(
    ("folder", "python", "says"),
    [
        ("file/out", "false", "can't be made: name another one"),
        pytest.param("out", sys.executable, "sees no GPU here; set PYTHON", marks=WITHOUT),
    ],
)
def test_it_says_what_it_lacks(tmp_path, folder, python, says):
    (tmp_path / "file").touch()
    words, environment = ["bash", str(SCRIPT), str(tmp_path / folder)], {**os.environ}
    result = subprocess.run(
        words, env=environment | {"PYTHON": python}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2 and says in result.stderr
    assert not result.stdout
