"""Windows of a text: what is drawn to train on, what is tested on."""

import numpy as np
import pytest
import torch

from prunex_mpi.base.errors import UserError
from prunex_mpi.data.request import Request
from prunex_mpi.data.text import (
    Windows,
    WindowStream,
    cut,
    rows_at_once,
    take_windows,
    window_batches,
    windows_of,
)
from prunex_mpi.data.text_files import Tokens, read_text_data

TOKENS = Tokens(np.arange(100, dtype=np.uint8))


def stream_of(rank: int = 0, seed: int = 0, stop: int = 90) -> WindowStream:
    return WindowStream(TOKENS, 8, "cpu", stop=stop, batch_size=4, seed=seed, rank=rank, ranks=1)


def test_targets_are_one_further_on_and_stay_in_the_part():
    stream = stream_of(stop=20)
    starts = set()
    for _ in range(50):
        inputs, targets = stream.next()
        assert inputs.shape == targets.shape == (4, 8) and inputs.dtype == torch.int64
        assert torch.equal(inputs + 1, targets) and int(targets.max()) < 20
        starts |= set(inputs[:, 0].tolist())
    assert starts == set(range(12))


def test_windows_depend_on_seed_and_rank_and_go_on_from_a_position():
    first = [stream_of(rank, seed).next()[0].tolist() for rank, seed in ((0, 0), (1, 0), (0, 1))]
    assert first[0] == stream_of().next()[0].tolist()
    assert first[0] != first[1] and first[0] != first[2]
    stream = stream_of()
    for _ in range(3):
        stream.next()
    place = stream.epoch, stream.position, stream.generator.get_state()
    assert place[:2] == (1, 1)
    other = stream_of(seed=7)
    other.epoch, other.position = place[:2]
    other.generator.set_state(place[2])
    assert torch.equal(stream.next()[0], other.next()[0])


def test_windows_of_a_part_cover_it_once():
    windows = windows_of(TOKENS, 30, 57, 8)
    assert list(windows.starts) == [30, 38, 46]
    batches = list(window_batches(windows, batch_size=2, device="cpu", vocabulary=100))
    assert [len(inputs) for inputs, _ in batches] == [2, 1]
    assert torch.cat([targets for _, targets in batches]).flatten().tolist() == list(range(31, 55))


def test_batches_are_smaller_where_logits_are_large():
    windows = Windows(TOKENS, range(0, 40, 4), 4)
    sizes = [
        len(inputs)
        for inputs, _ in window_batches(windows, batch_size=8, device="cpu", vocabulary=2**23)
    ]
    assert sizes == [2] * 5


def test_batches_are_smaller_where_windows_are_long():
    windows = Windows(np.zeros(3 * 2**14 + 1, dtype=np.int64), range(0, 3 * 2**14, 2**14), 2**14)
    most = rows_at_once(windows.context, 65)
    assert most == rows_at_once(windows.context, 2**11) == 2
    assert rows_at_once(windows.context, 2**12) == 1


def asked(context: int, val_split: float = 0.0) -> Request:
    return Request(dataset="text", context=context, val_split=val_split)


def test_the_end_of_what_is_not_tested_on_is_held_out():
    assert cut(1001, 900, asked(8), 1) == (900, 0)
    assert cut(1001, 900, asked(8, 0.1), 1) == (810, 90)


def test_windows_stay_in_the_files_to_train_on_or_in_those_to_test_on(tmp_path):
    for name, letter in {"test.txt": "b", "train.txt": "a"}.items():
        (tmp_path / name).write_text(letter * 40)
    request = Request(dataset="text", data_dir=str(tmp_path), context=8, val_split=0.25)
    text = read_text_data(request)
    found = take_windows(text, request, (0, 1))
    assert found.stop == 30
    for windows, letter, starts in (
        (found.train, "a", [0, 8, 16]),
        (found.val, "a", [30]),
        (found.test, "b", [40, 48, 56, 64]),
    ):
        assert list(windows.starts) == starts
        assert np.all(text.tokens.rows(windows.starts, 9) == ord(letter))


@pytest.mark.parametrize(
    ("count", "val_split", "context", "ranks", "says"),
    [
        (100, 0.0, 90, 1, "context 90 is longer than the 90 tokens to train on"),
        (100, 0.0, 10, 1, "context 10 is longer than the 10 tokens to test on"),
        (1000, 0.01, 20, 1, "longer than the 9 tokens to hold out"),
        (100, 0.0, 9, 10, "10 ranks are more than the 9 windows of 9 tokens"),
    ],
)
def test_too_little_text_is_refused(count, val_split, context, ranks, says):
    with pytest.raises(UserError, match=says):
        cut(count, count * 9 // 10, asked(context, val_split), ranks)
