"""Files of tensors: the library reads what was written."""

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from prunex_mpi.base.files import read_record
from prunex_mpi.run import checkpoint_files
from prunex_mpi.run.checkpoint_files import save_tensors

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64),
)


def test_the_library_reads_every_bit(tmp_path):
    bits = torch.arange(1, 481, dtype=torch.uint8)
    tensors = {f"{d}": (bits % 2 if d == torch.bool else bits).view(d) for d in DTYPES}
    tensors |= {"scalar": torch.tensor(7), "none": torch.zeros(0, 3), "ü\n": torch.ones(1, 2, 1)}
    tensors["across"] = torch.arange(6.0).view(2, 3).t()
    record = save_tensors(tensors, tmp_path / "file", {"numbers": "[1]"})
    assert record == read_record(tmp_path / "file")
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        same = [t.contiguous().view(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*same), name
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata() == {"numbers": "[1]"}


def test_a_file_without_tensors_can_be_read(tmp_path):
    assert save_tensors({}, tmp_path / "file") == read_record(tmp_path / "file")
    assert load_file(tmp_path / "file") == {}


def test_what_the_library_does_not_know_is_no_file(tmp_path):
    with pytest.raises(OSError, match="complex128"):
        save_tensors({"a": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "file")


def test_a_file_reaches_the_disk_as_it_grows(tmp_path, monkeypatch):
    """All but the last piece is on the disk before the file is whole."""
    monkeypatch.setattr(checkpoint_files, "SYNC_BYTES", 8192)
    synced, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", note)
    record = save_tensors({"a": torch.rand(10, 1024), "b": torch.rand(5)}, tmp_path / "file")
    assert len(synced) >= 5 and synced[-1] == record.size
