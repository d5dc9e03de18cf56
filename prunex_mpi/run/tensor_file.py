"""Write a safetensors file through to the disk."""

import errno
import os
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from prunex_mpi.base.errors import one_line
from prunex_mpi.base.files import FileRecord, no_links
from prunex_mpi.base.units import MIB

# What is brought to the disk at a time.
SYNC_BYTES = 32 * MIB


def save_tensors(
    tensors: dict[str, Tensor],
    path: Path,
    metadata: dict[str, str] | None = None,
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
