"""Windows of a text as batches: drawn by a seed to train on, one after the other to test on.

What is held out (`--val-split`) is the end of the part to train on. A window is `context` tokens,
and the targets are those one further on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.data.batches import Device, seed_, upload
from prunex_mpi.data.request import Request
from prunex_mpi.data.text_files import Text, Tokens

# Logits of a batch at once, where there is no gradient: 256 MiB in float32.
MOST_LOGITS, HIDDEN = 2**26, 2**11


@dataclass(frozen=True)
class Windows:
    """Windows of a text, by where they begin; each has one token more than `context` behind it."""

    tokens: Tokens
    starts: range
    context: int

    def __len__(self) -> int:
        return len(self.starts)

    def part(self, part: slice) -> "Windows":
        return replace(self, starts=self.starts[part])


def pairs(rows: np.ndarray, device: Device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 [b, context] each, of rows of one token more."""
    both = upload(torch.from_numpy(rows), device)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


class WindowStream:
    """Draw endless batches of windows from the first `stop` tokens of a text.

    They are drawn with replacement from a generator seeded by (seed, rank). An epoch is as many as
    cover the part once, on all `ranks` together. The position is all in `epoch`, `position` and
    `generator`; `order` is empty: nothing is shuffled.
    """

    waited = 0.0

    def __init__(
        self,
        tokens: Tokens,
        context: int,
        device: Device,
        *,
        stop: int,
        batch_size: int,
        seed: int,
        rank: int,
        ranks: int,
    ) -> None:
        self.tokens, self.context, self.stop = tokens, context, stop
        self.device = torch.device(device)
        self.batch_size = batch_size
        self.order = torch.zeros(0, dtype=torch.int64)
        self.steps_per_epoch = max(1, self.samples_among(ranks, 0) // batch_size)
        self.generator = torch.Generator()
        self.reshuffle([seed, rank])

    def reshuffle(self, entropy: Sequence[int]) -> None:
        """Begin a first epoch with windows drawn from `entropy`."""
        seed_(self.generator, entropy)
        self.epoch, self.position = 0, 0

    def samples_among(self, ranks: int, order: int) -> int:
        """Return the windows of an epoch of a rank among `ranks`; the `order` is empty."""
        return (self.stop - 1) // self.context // ranks

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the next batch, int64 [b, context] each, on the device."""
        if self.position == self.steps_per_epoch:
            self.epoch, self.position = self.epoch + 1, 0
        self.position += 1
        last = self.stop - self.context
        starts = torch.randint(last, (self.batch_size,), generator=self.generator)
        return pairs(self.tokens.rows(starts.numpy(), self.context + 1), self.device)


def rows_at_once(predictions: int, classes: int) -> int:
    """Return how many rows, each with logits [predictions, classes], a network may be given.

    Where there are few classes what it computes in between is wider.
    """
    return max(1, MOST_LOGITS // max(1, predictions * max(classes, HIDDEN)))


def window_batches(
    shard: Windows, *, batch_size: int, device: Device, vocabulary: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all windows in order as inputs and targets, fewer at a time where logits are large."""
    batch_size = min(batch_size, rows_at_once(shard.context, vocabulary))
    for first in range(0, len(shard), batch_size):
        starts = shard.starts[first : first + batch_size]
        yield pairs(shard.tokens.rows(starts, shard.context + 1), device)


def cut(count: int, begin: int, request: Request, ranks: int) -> tuple[int, int]:
    """Return how many of `count` tokens are to train on and, behind them, held out.

    Both are before `begin`, from where on the others are to test on. Raises UserError (UNREADABLE)
    for a part that has no window, or too few for all ranks.
    """
    most, context = request.train_samples or 0, request.context
    trained = most * context + 1 if most else begin
    if trained > begin:
        raise UserError(
            f"--train-samples {most}: there are only {(begin - 1) // context} windows of "
            f"{context} tokens; 0 takes all"
        )
    val = round(trained * request.val_split)
    train = trained - val
    for tokens, purpose, needed in (
        (train, "train on", True),
        (count - begin, "test on", request.test_samples is not None),
        (val, "hold out", request.val_split > 0),
    ):
        if needed and tokens <= context:
            raise UserError(
                f"context {context} is longer than the {tokens:,} tokens to {purpose}, of "
                f"{count:,} in all: lower --context, or give more text",
                UNREADABLE,
            )
    if (train - 1) // context < ranks:
        raise UserError(
            f"{ranks} ranks are more than the {(train - 1) // context} windows of {context} "
            "tokens to train on: start fewer ranks, lower --context, or give more text",
            UNREADABLE,
        )
    return train, val


def windows_of(tokens: Tokens, first: int, stop: int, context: int) -> Windows:
    """Return the windows of a part one after the other, without fewer tokens at its end."""
    count = (stop - first - 1) // context
    return Windows(tokens, range(first, first + count * context, context), context)


@dataclass(frozen=True)
class TextSet:
    """One rank's windows of a text, and what is known of the whole, as `Dataset` has of images.

    Those to train on are drawn from the tokens before `stop`. Totals are tokens of all ranks.
    """

    text: Text
    context: int
    stop: int
    train: Windows
    test: Windows | None  # None where none are to be read
    val: Windows | None
    train_total: int
    test_total: int
    val_total: int
    reader: None = None

    @property
    def num_classes(self) -> int:
        """The vocabulary."""
        return self.text.tokenizer.size

    @property
    def class_names(self) -> tuple[str, ...]:
        """What tells this vocabulary from another one."""
        return self.text.tokenizer.names

    @property
    def digest(self) -> str:
        return self.text.digest

    def sizes(self) -> dict[str, int]:
        """Return what a network has to fit, by the names of a factory's parameters."""
        return {"vocab_size": self.num_classes, "context": self.context}

    def describe(self) -> str:
        """Return what there is, in a part of a line."""
        held_out = f"{self.val_total:,} held out, " if self.val_total else ""
        return (
            f"{self.train_total:,} tokens to train on, {held_out}{self.test_total:,} to test on, "
            f"a vocabulary of {self.num_classes:,}"
        )

    def close(self) -> None:
        """Do nothing: mapped files end with the process."""


def take_windows(text: Text, request: Request, part: tuple[int, int]) -> TextSet:
    """Return the windows of rank `part[0]` of `part[1]`. Raises UserError for impossible counts."""
    (rank, size), tokens, context = part, text.tokens, request.context
    trains, tested = request.train_samples is not None, request.test_samples
    count, begin = len(tokens), text.begin
    # What is tested alone needs no window for each rank.
    trained, held = cut(count, begin, request, size if trains else 1)
    per_rank = (trained - 1) // context // size if trains else 0
    first = rank * per_rank * context
    test = windows_of(tokens, begin, count, context)
    if tested is not None and tested > len(test):
        raise UserError(
            f"--test-samples {tested}: there are only {len(test)} windows of {context} tokens; 0 "
            "takes all"
        )
    test = test.part(slice(0, tested or len(test)))
    val = windows_of(tokens, trained, trained + held, context)
    share = slice(rank, None, size)
    return TextSet(
        text=text,
        context=context,
        stop=trained,
        train=Windows(tokens, range(first, first + per_rank * context, context), context),
        test=None if tested is None else test.part(share),
        val=val.part(share) if request.val_split else None,
        train_total=trained,
        test_total=0 if tested is None else len(test) * context,
        val_total=len(val) * context if request.val_split else 0,
    )
