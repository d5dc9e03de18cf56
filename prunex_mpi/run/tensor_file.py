"""Write a safetensors file piece by piece, through to the disk.

The library writes a whole file in one call, and the system brings one to the disk in one: on a slow
file system neither can be told from one that stands still.
"""

import errno
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from prunex_mpi.base.errors import one_line
from prunex_mpi.base.files import CHUNK_BYTES, FileRecord, no_links
from prunex_mpi.base.units import MIB

# What is brought to the disk at a time.
SYNC_BYTES = 32 * MIB
ALIGNMENT = 8


def save_tensors(
    tensors: dict[str, Tensor],
    path: Path,
    metadata: dict[str, str] | None = None,
) -> FileRecord:
    """Write a safetensors file, through to the disk; return its size and checksum.

    `tensors` are on the CPU. Raises OSError.
    """
    # As the library does: each tensor lies where its elements may.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    size = crc32 = waiting = 0
    syncing: Future | None = None
    with open(path, "wb", opener=no_links) as file, ThreadPoolExecutor(1) as disk:
        for piece in _pieces(tensors, names, metadata):
            # The disk works meanwhile.
            crc32 = zlib.crc32(piece, crc32)
            file.write(piece)
            size, waiting = size + len(piece), waiting + len(piece)
            if waiting >= SYNC_BYTES:
                if syncing is not None:
                    syncing.result()
                file.flush()
                syncing, waiting = disk.submit(os.fsync, file.fileno()), 0
        if syncing is not None:
            syncing.result()
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, crc32)


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor on the CPU, uint8 [n]; contiguous ones are not copied."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def _pieces(
    tensors: dict[str, Tensor], names: Sequence[str], metadata: dict[str, str] | None
) -> Iterator[bytes | np.ndarray]:
    """Yield the file: the length of its header, the header, the bytes of each tensor."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        kind = {"dtype": _kind(tensor.dtype), "shape": list(tensor.shape)}
        header[name] = {**kind, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)
    yield len(text).to_bytes(ALIGNMENT, "little") + text
    for name in names:
        data = bytes_of(tensors[name])
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


@cache
def _kind(dtype: torch.dtype) -> str:
    """Return what the library calls a dtype; raise OSError for one that it does not write."""
    try:
        file = save({"": torch.empty(0, dtype=dtype)})
    except (SafetensorError, KeyError) as error:
        raise OSError(errno.EIO, one_line(error)) from None
    length = int.from_bytes(file[:ALIGNMENT], "little")
    return json.loads(file[ALIGNMENT : ALIGNMENT + length])[""]["dtype"]
