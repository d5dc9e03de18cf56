"""The files of a checkpoint: one per rank, and a manifest whose folder becomes valid by a rename.

    RUN/checkpoints/000007-iteration-12-step-3/
        rank-00000.safetensors ...   tensors of one rank, and its numbers as JSON in the metadata
        manifest.json                position, configuration, size and checksum of each rank's file

Everything is written to a folder of another name first. What is read is never executed, file names
are made here and not taken from files, and links are refused.
"""

import errno
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from prunex_mpi.base.errors import DamagedCheckpoint, one_line
from prunex_mpi.base.files import (
    CHECKPOINT,
    FORMAT,
    FileRecord,
    no_links,
    read_record,
    read_text,
    sync,
    write_durably,
)
from prunex_mpi.base.units import MIB

KEEP = 2
PARTIAL = ".partial"
MANIFEST = "manifest.json"
MANIFEST_LIMIT_BYTES = 64 * MIB
# What is brought to the disk at a time.
SYNC_BYTES = 32 * MIB


def valid_names(run: Path) -> list[str]:
    """Return the names of the complete checkpoints of `run`, the newest first; raise OSError."""
    folder = run / "checkpoints"
    if not folder.exists():
        return []
    found = [
        path.name
        for path in folder.iterdir()
        if CHECKPOINT.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(found, key=lambda name: int(name.split("-")[0]), reverse=True)


def begin(run: Path, iteration: int, step: int) -> Path:
    """Make the folder that the ranks write to; remove what an interrupted write left."""
    parent = run / "checkpoints"
    parent.mkdir(exist_ok=True)
    remove_partial(run)
    # Numbers in use count even where the name is not a checkpoint: the rename must not meet it.
    taken = [int(p.name.split("-")[0]) for p in parent.iterdir() if CHECKPOINT.fullmatch(p.name)]
    number = max(taken, default=0) + 1
    partial = parent / f"{number:06d}-iteration-{iteration}-step-{step}{PARTIAL}"
    partial.mkdir()
    return partial


def remove_partial(run: Path) -> None:
    """Remove what an interrupted write left; raise OSError."""
    for left in (run / "checkpoints").iterdir():
        if left.name.endswith(PARTIAL):
            shutil.rmtree(left)


def publish(partial: Path, manifest: dict[str, Any]) -> None:
    """Make a folder of written files a checkpoint: manifest, then one rename.

    All but the last `KEEP` checkpoints are removed.
    """
    body = json.dumps(manifest, allow_nan=False, sort_keys=True)
    text = json.dumps({"crc32": zlib.crc32(body.encode()), "body": body})
    write_durably(partial / MANIFEST, text)
    final = partial.with_name(partial.name.removesuffix(PARTIAL))
    os.rename(partial, final)
    sync(final.parent)
    run = final.parent.parent
    for name in valid_names(run)[KEEP:]:
        # Renamed first: a removal cut short must not leave what looks complete. What stays is
        # removed before the next write, and refused there if need be.
        shutil.rmtree(set_aside(run, name), ignore_errors=True)


def set_aside(run: Path, name: str) -> Path:
    """Take a checkpoint out of the count; what remains is removed before the next write."""
    folder = run / "checkpoints" / name
    return folder.rename(folder.with_name(f"{name}{PARTIAL}"))


def write_rank_file(
    folder: Path, rank: int, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> FileRecord:
    """Write what one rank holds, through to the disk; return the file's size and checksum.

    `tensors` are on the CPU, `numbers` goes through JSON. Raises OSError.
    """
    metadata = {"numbers": json.dumps(numbers, allow_nan=False)}
    return save_tensors(tensors, rank_file(folder, rank), metadata)


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> FileRecord:
    """Write a safetensors file, through to the disk; return its size and checksum.

    `tensors` are on the CPU. Raises OSError.
    """
    own: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()
        # The library takes no two tensors that share memory, nor a view.
        whole = tensor.is_contiguous() and memory.nbytes() == tensor.nbytes
        kept = whole and memory.data_ptr() not in seen
        own[name] = tensor if kept else tensor.clone(memory_format=torch.contiguous_format)
        seen.add(memory.data_ptr())
    try:
        data = memoryview(save(own, metadata))
    # For a type that the library does not know.
    except (SafetensorError, KeyError) as error:
        raise OSError(errno.EIO, one_line(error)) from None
    with open(path, "wb", opener=no_links) as file:
        for start in range(0, len(data), SYNC_BYTES):
            # Piece by piece: a slow file system could else not be told from one that stands still.
            file.write(data[start : start + SYNC_BYTES])
            file.flush()
            os.fsync(file.fileno())
    return FileRecord(len(data), zlib.crc32(data))


def read_manifest(run: Path, name: str) -> dict[str, Any]:
    """Return the manifest of a checkpoint; raise DamagedCheckpoint when it is not whole."""
    path = run / "checkpoints" / name / MANIFEST
    _require_file(path)
    try:
        if path.stat().st_size > MANIFEST_LIMIT_BYTES:
            raise DamagedCheckpoint(f"{MANIFEST} is too large to be one")
        outer = json.loads(read_text(path))
        body, crc32 = outer["body"], outer["crc32"]
        if zlib.crc32(body.encode()) != crc32:
            raise DamagedCheckpoint(f"the checksum of {MANIFEST} is wrong")
        manifest = json.loads(body)
        form = manifest["format"]
    except OSError as error:
        raise DamagedCheckpoint(f"{MANIFEST}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedCheckpoint(f"{MANIFEST} is not what was written") from None
    if form != FORMAT:
        raise DamagedCheckpoint(f"it has format {form}, this version reads {FORMAT}")
    return manifest


def leaders_in(manifest: dict[str, Any]) -> list[int]:
    """Return which rank led each rank's node: the first one of it."""
    nodes, first = manifest["nodes"], {}
    for rank, node in enumerate(nodes):
        first.setdefault(node, rank)
    return [first[node] for node in nodes]


def read_rank_file(
    run: Path, name: str, rank: int, record: FileRecord, keys: Sequence[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what one rank wrote; raise DamagedCheckpoint unless every bit is as written.

    Of its tensors those that `keys` name, or all of them.
    """
    path = rank_file(run / "checkpoints" / name, rank)
    _require_file(path)
    try:
        found = read_record(path)
        if found.size != record.size:
            raise DamagedCheckpoint(f"{path.name} has {found.size} bytes of {record.size}")
        if found != record:
            raise DamagedCheckpoint(f"the checksum of {path.name} is wrong")
        with safe_open(path, framework="pt") as file:
            # Copies: the file is mapped, and may be removed while the run goes on.
            chosen = file.keys() if keys is None else keys
            tensors = {key: file.get_tensor(key).clone() for key in chosen}
            return tensors, json.loads((file.metadata() or {})["numbers"])
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path.name}: {' '.join(str(error).split())[:200]}") from None


def rank_file(folder: Path, rank: int) -> Path:
    """Return where `rank` writes in the folder of a checkpoint."""
    return folder / f"rank-{rank:05d}.safetensors"


def _require_file(path: Path) -> None:
    if path.is_symlink() or not path.is_file():
        raise DamagedCheckpoint(f"{path.name} is missing or is not a plain file")
