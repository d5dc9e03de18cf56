"""Average gradients at each local step, while the backward pass still runs.

The flat gradient is cut into buckets from its end, since backward produces the last layers first. A
bucket's Iallreduce starts as soon as all its gradients are there and all buckets before it have
been started, so the order of collectives is the same on every rank even if autograd's is not.

With Open MPI the sums of 4 or more ranks arrive in a vector of their own: in place, its Iallreduce
goes by a binomial tree, and one of 8 ranks sends a bucket 3 times in place of 1.75 times. Elsewhere
as much is sent either way, and a second vector would cost a copy.
"""

from functools import partial

import torch
from torch import Tensor, cuda, nn

from mpi4py import MPI

from prunex_mpi.comm.collectives import mpi_buffer
from prunex_mpi.comm.counted import CountedComm
from prunex_mpi.comm.topology import library_name
from prunex_mpi.models.layout import Layout, trained_parameters

# Smaller than the payload's buckets: the first can leave early, and the last is what is waited for.
BUCKET_BYTES = 4 * 2**20
# Below, Open MPI's Iallreduce takes a binomial tree in any case.
SEPARATE_RANKS = 4


class GradientAverager:
    """Average a flat gradient over a link's ranks, overlapped with backward.

    Of CUDA gradients a hook runs long before the gradient it announces exists. It marks the place
    in the device's queue; when all of backward is queued, each bucket is reduced as soon as its
    mark is reached, by a stream of its own. `late`: a parameter of the last step got several
    gradients, of which some may have been added to a sum that was on its way.
    """

    def __init__(self, link: CountedComm, model: nn.Module, layout: Layout, grad: Tensor) -> None:
        self.link = link
        self.comm = link.comm
        self.handles = []
        self.stream: cuda.Stream | None = None
        self.late = False
        self.listen_to(model, layout, grad)

    def listen_to(self, model: nn.Module, layout: Layout, grad: Tensor) -> None:
        """Average the gradients of `model`, which backward leaves in `grad`, from now on."""
        self.close()
        self.grad = grad
        self.queued = self.comm.size > 1 and is_queued(grad)
        staged = self.link.transport.staging is not None
        self.overlap = self.comm.size > 1 and not self.queued and not staged
        many = self.comm.size >= SEPARATE_RANKS and library_name().startswith("Open MPI")
        separate = self.overlap and many
        self.sums = torch.empty_like(grad) if separate else grad
        self.requests: list[MPI.Request] = []
        self.bounds: list[tuple[int, int]] = []
        self.missing: list[int] = []
        self.listening = False
        self.members: list[int] = []
        if not (self.overlap or self.queued):
            return
        limit = max(1, BUCKET_BYTES // grad.element_size())
        stop = layout.numel
        bucket_of = [0] * len(layout.segments)
        for number in reversed(range(len(layout.segments))):
            segment = layout.segments[number]
            if stop - segment.offset > limit and segment.offset + segment.numel < stop:
                self.bounds.append((segment.offset + segment.numel, stop))
                stop = segment.offset + segment.numel
            bucket_of[number] = len(self.bounds)
        self.bounds.append((0, stop))
        if self.queued:
            self.marks = [cuda.Event() for _ in self.bounds]
            # Torch has few, and hands them out in turn: another one may be the current stream.
            self.stream = self.stream or cuda.Stream(grad.device)
        self.members = [bucket_of.count(b) for b in range(len(self.bounds))]
        parameters = list(trained_parameters(model).values())
        for bucket, parameter in zip(bucket_of, parameters, strict=True):
            hook = partial(self._note, bucket)
            self.handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def begin(self) -> None:
        """Forget the last step; call before backward, that of a batch's last part."""
        self.listening = True
        self.missing = list(self.members)
        self.late = False
        self.requests = []

    def finish_(self) -> None:
        """Leave the mean over `comm`, unless `late`, in the gradient. Collective on `comm`."""
        if self.comm.size == 1:
            # There is nobody to wait for, and so nothing that the device would have to be done for.
            self.link.count(self.grad.nbytes)
            return
        if not self.listening:
            # Nothing has been announced: all of it is there.
            self.begin()
        if self.overlap:
            # Parameters that took no part in the loss fire no hook.
            self._start(all_of_them=True)
            self.listening = False
            self.link.wait_(self.requests, self.sums)
        elif self.queued:
            self._reduce_marked_()
        else:
            self.link.reduce_(self.grad)
        torch.div(self.sums, self.comm.size, out=self.grad)

    def close(self) -> None:
        """Remove the hooks from the model."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _note(self, bucket: int, _parameter: Tensor) -> None:
        if not self.listening:
            return
        self.missing[bucket] -= 1
        self.late |= self.missing[bucket] < 0
        if not self.queued:
            self._start()
        elif self.missing[bucket] == 0:
            self._mark(bucket)

    def _mark(self, bucket: int) -> None:
        self.marks[bucket].record(cuda.current_stream(self.grad.device))

    def _reduce_marked_(self) -> None:
        """Reduce each bucket when the device has its gradients. Collective on `comm`."""
        self.listening = False
        for bucket, missing in enumerate(self.missing):
            if missing > 0:
                # Parameters that took no part in the loss fire no hook.
                self._mark(bucket)
        parts = [self.grad[start:stop] for start, stop in self.bounds]
        # What waits for the current stream would wait for all of backward.
        with cuda.stream(self.stream):
            self.link.reduce_parts_(parts, [mark.wait for mark in self.marks])
        cuda.current_stream(self.grad.device).wait_stream(self.stream)

    def _start(self, all_of_them: bool = False) -> None:
        while len(self.requests) < len(self.bounds):
            number = len(self.requests)
            if self.missing[number] > 0 and not all_of_them:
                break
            start, stop = self.bounds[number]
            total = mpi_buffer(self.sums[start:stop])
            separate = self.sums is not self.grad
            mine = mpi_buffer(self.grad[start:stop]) if separate else MPI.IN_PLACE
            self.requests.append(self.comm.Iallreduce(mine, total, op=MPI.SUM))
        # MPI advances outstanding reductions only inside its own calls.
        MPI.Request.Testall(self.requests)


def is_queued(tensor: Tensor) -> bool:
    """Return whether what computes `tensor` only queues it, and goes on before it is there."""
    return tensor.device.type == "cuda"
