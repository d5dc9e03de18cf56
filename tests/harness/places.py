"""Where the networks of tests are: on the CPU, or on the GPU that batch/gpu.sh tries.

PRUNEX_TEST_DEVICE is cpu (the default) or cuda; PRUNEX_TEST_BUFFERS says what MPI is given there:
device memory, or host memory that tensors are copied to and from.
"""

import os

import torch

DEVICE = torch.device(os.environ.get("PRUNEX_TEST_DEVICE", "cpu"))
BUFFERS = os.environ.get("PRUNEX_TEST_BUFFERS", "host")


class Moved:
    """A stream of batches that come to DEVICE."""

    def __init__(self, stream) -> None:
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def next(self):
        """Return images and labels of the next batch on DEVICE."""
        images, labels = self.stream.next()
        return images.to(DEVICE), labels.to(DEVICE)
