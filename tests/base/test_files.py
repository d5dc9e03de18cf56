"""Files that survive a crash."""

import os
import zlib
from pathlib import Path

import pytest

from prunex_mpi.base import files
from prunex_mpi.base.errors import UserError
from prunex_mpi.base.files import (
    FileRecord,
    read_record,
    telling_disk_errors,
    write_durably,
)


@pytest.mark.parametrize("size", [0, 1, 999, files.CHUNK_BYTES, files.CHUNK_BYTES + 3])
def test_records_are_of_the_whole_file_or_of_its_beginning(size, tmp_path):
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data + b"tail")
    assert read_record(tmp_path / "file", size) == FileRecord(size, zlib.crc32(data))
    assert read_record(tmp_path / "file") == FileRecord(size + 4, zlib.crc32(data + b"tail"))
    assert read_record(tmp_path / "file", size + 9).size == size + 4
    assert FileRecord().extended(data).extended(b"tail") == read_record(tmp_path / "file")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_durably(path, "old")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    synced: list[int] = []

    def full(descriptor: int) -> None:
        synced.append(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    problem = r"the thing can't be written: No space left on device"
    with pytest.raises(UserError, match=problem), telling_disk_errors("the thing"):
        write_durably(path, "new")
    assert synced
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_several_processes_write_a_file_at_a_time(tmp_path, monkeypatch):
    """One comes while another is between its temporary file and the name."""
    path, real, others = tmp_path / "file", os.replace, [1, 2]

    def replace(source: Path, target: Path) -> None:
        if others:
            number = others.pop()
            monkeypatch.setattr(files.os, "getpid", lambda: number)
            write_durably(path, f"of {number}")
        real(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    write_durably(path, "of the first")
    assert path.read_text() == "of the first"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_nothing_is_written_through_a_link(tmp_path, monkeypatch):
    own, folder = tmp_path / "own", tmp_path / "folder"
    own.write_text("kept")
    folder.mkdir()
    monkeypatch.setattr(files.os, "getpid", lambda: 7)
    monkeypatch.setattr(files.socket, "gethostname", lambda: "host")
    for name in ("file", "file.host-7.partial", "metrics.jsonl", "lock"):
        (folder / name).symlink_to(own)
    write_durably(folder / "file", "new")
    assert (folder / "file").read_text() == "new" and not (folder / "file").is_symlink()
    with pytest.raises(OSError, match="symbolic links"):
        files.touch(folder / "lock")
    with pytest.raises(OSError, match="symbolic links"):
        open(folder / "metrics.jsonl", "a", opener=files.no_links).close()
    assert own.read_text() == "kept"
