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
from prunex_mpi.data.text_files import Prepared, Tokenizer, embedded_text, forget, prepare

# Logits of a batch at once, where there is no gradient: 256 MiB in float32.
MOST_LOGITS, HIDDEN = 2**26, 2**11


@dataclass(frozen=True)
class Tokens:
    """All tokens of a text, in arrays one after the other, which may be files that are mapped."""

    pieces: tuple[np.ndarray, ...]
    ends: np.ndarray  # int64, of each piece

    def __len__(self) -> int:
        return int(self.ends[-1])

    def rows(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens from each start on, int64 [starts, length]."""
        if len(self.pieces) == 1:
            places = np.asarray(starts, dtype=np.int64)[:, None] + np.arange(length)
            return self.pieces[0][places].astype(np.int64)
        rows = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(rows, starts, strict=True):
            self._read_(row, int(start))
        return rows

    def _read_(self, row: np.ndarray, start: int) -> None:
        number = int(np.searchsorted(self.ends, start, side="right"))
        done = 0
        while done < len(row):
            piece = self.pieces[number]
            first = start + done - (int(self.ends[number]) - len(piece))
            part = piece[first : first + len(row) - done]
            row[done : done + len(part)] = part
            done, number = done + len(part), number + 1


def join(pieces: Sequence[np.ndarray]) -> Tokens:
    """Return arrays as one text; those that are empty are left out."""
    held = tuple(piece for piece in pieces if len(piece))
    return Tokens(held, np.cumsum([len(piece) for piece in held], dtype=np.int64))


def map_tokens(prepared: Prepared) -> Tokens:
    """Map the tokens of a text that has been prepared on this machine. Raises UserError."""
    if not prepared.files:
        return join([np.frombuffer(embedded_text(), dtype=np.uint8)])
    pieces = []
    for path in prepared.files:
        # What is empty can't be mapped, and is no piece.
        try:
            with open(path, "rb") as file:
                empty = not file.read(1)
            if not empty:
                pieces.append(np.asarray(np.memmap(path, dtype=prepared.type, mode="r")))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot map {path}: {error}", UNREADABLE) from None
    return join(pieces)


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


@dataclass(frozen=True)
class Text:
    """A text on this machine: its tokens, and what is known of it."""

    tokens: Tokens
    tokenizer: Tokenizer
    length: int  # bytes
    begin: int  # of the tokens to test on
    test_bytes: int
    digest: str
    told: bool  # whether names of files have told the parts
    found: str
    lacking: str  # what is not in the tokens

    @property
    def bytes_per_token(self) -> float:
        """The bytes of a token, the mean over the part to test on, or over all where none is."""
        if self.begin == len(self.tokens):
            return self.length / len(self.tokens)
        return self.test_bytes / (len(self.tokens) - self.begin)


def read_text_data(data_dir: str, tokenizer: str, known: Tokenizer | None = None) -> Text:
    """Prepare and map a text for this process alone. Raises UserError as `prepare` does."""
    return text_of(prepare(data_dir, tokenizer, known), last=True)


def text_of(prepared: Prepared, last: bool = False) -> Text:
    """Return what has been prepared, mapped; the `last` one takes temporary names away."""
    try:
        tokens = map_tokens(prepared)
    finally:
        if last and prepared.temporary:
            forget(prepared.files)
    names = "tokenizer", "length", "begin", "test_bytes", "digest", "told", "found", "lacking"
    return Text(tokens, **{name: getattr(prepared, name) for name in names})


@dataclass(frozen=True)
class Parts:
    """How many tokens the parts of a text have: `train`, behind them `val`, from `begin` `test`."""

    train: int
    val: int
    begin: int
    test: int


def parts_of(
    count: int,
    begin: int,
    val_split: float,
    context: int,
    ranks: int,
    most: int = 0,
    with_test: bool = True,
) -> Parts:
    """Cut `count` tokens: those before `begin` to train on, whose end is held out, others to test.

    Of the former the first `most` windows, unless 0. Without `with_test` there may be no others.
    Raises UserError (UNREADABLE) for a part that
    has no window of `context` tokens, or too few for all ranks.
    """
    trained = begin
    if most:
        trained = most * context + 1
        if trained > begin:
            raise UserError(
                f"--train-samples {most}: there are only {(begin - 1) // context} windows of "
                f"{context} tokens; 0 takes all"
            )
    val = round(trained * val_split)
    parts = Parts(trained - val, val, begin, count - begin)
    named = {"train": "train on", "test": "test on", "val": "hold out"}
    needed = {"train": True, "test": with_test, "val": val_split > 0}
    for name, purpose in named.items():
        tokens = getattr(parts, name)
        if needed[name] and tokens <= context:
            raise UserError(
                f"context {context} is longer than the {tokens:,} tokens to {purpose}, of "
                f"{count:,} in all: lower --context, or give more text",
                UNREADABLE,
            )
    if (parts.train - 1) // context < ranks:
        raise UserError(
            f"{ranks} ranks are more than the {(parts.train - 1) // context} windows of {context} "
            "tokens to train on: start fewer ranks, lower --context, or give more text",
            UNREADABLE,
        )
    return parts


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


def take_windows(
    text: Text,
    context: int,
    *,
    samples: tuple[int | None, int | None],
    val_split: float,
    part: tuple[int, int],
) -> TextSet:
    """Return the windows of rank `part[0]` of `part[1]`. Raises UserError for impossible counts.

    `samples` are the windows to train and to test on, 0 for all, None for none.
    """
    (wanted, tested), (rank, size), tokens = samples, part, text.tokens
    if text.tokenizer.size < 2:
        raise UserError("the text is one character over and over: give another one", UNREADABLE)
    # What is tested alone needs no window for each rank.
    trains = wanted is not None
    ranks = size if trains else 1
    with_test = tested is not None
    parts = parts_of(len(tokens), text.begin, val_split, context, ranks, wanted or 0, with_test)
    per_rank = (parts.train - 1) // context // size if trains else 0
    first = rank * per_rank * context
    test = windows_of(tokens, parts.begin, len(tokens), context)
    if tested is not None and tested > len(test):
        raise UserError(
            f"--test-samples {tested}: there are only {len(test)} windows of {context} tokens; 0 "
            "takes all"
        )
    test = test.part(slice(0, tested or len(test)))
    val = windows_of(tokens, parts.train, parts.train + parts.val, context)
    share = slice(rank, None, size)
    return TextSet(
        text=text,
        context=context,
        stop=parts.train,
        train=Windows(tokens, range(first, first + per_rank * context, context), context),
        test=test.part(share) if with_test else None,
        val=val.part(share) if val_split else None,
        train_total=parts.train,
        test_total=len(test) * context if with_test else 0,
        val_total=len(val) * context if val_split else 0,
    )
