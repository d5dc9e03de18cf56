"""Draws of as many images of each class, out of shards."""

import pytest
import torch

from prunex_mpi.base.errors import UserError
from prunex_mpi.data.balanced import class_counts, hold_out, places_in_draws


def test_draws_take_the_first_images_of_each_class_over_all_shards() -> None:
    """Two draws of two images of three classes, out of two shards, by hand."""
    shards = [torch.tensor([2, 0, 0, 1, 0]), torch.tensor([1, 0, 2, 1, 2, 0, 2, 1, 1])]
    # Numbers of the images over both shards: of class 0 1, 2, 4, 6, 10; of 1 3, 5, 8, 12, 13; of 2
    # 0, 7, 9, 11.
    wanted = [1, 2, 3, 5, 0, 7, 4, 6, 8, 12, 9, 11]
    found = [-1] * len(wanted)
    before = torch.zeros(3, dtype=torch.int64)
    for start, labels in zip((0, 5), shards, strict=True):
        own, places = places_in_draws(labels, before, 2, 2)
        for image, place in zip(own.tolist(), places.tolist(), strict=True):
            assert found[place] == -1
            found[place] = start + image
        before += class_counts(labels, 3)
    assert found == wanted


def test_the_same_share_of_each_class_is_held_out_in_the_order_there_was() -> None:
    labels = torch.tensor([0] * 20 + [1] * 10 + [2] * 1)
    order = torch.randperm(31, generator=torch.Generator().manual_seed(3))
    kept, held = hold_out(order, labels, 0.2)
    assert labels[held].bincount().tolist() == [4, 2]
    assert labels[kept].bincount().tolist() == [16, 8, 1]
    for part in (kept, held):
        places = [order.tolist().index(i) for i in part.tolist()]
        assert places == sorted(places)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(31))
    # Something of each class stays to train on.
    assert labels[hold_out(order, labels, 0.99)[0]].bincount().tolist() == [1, 1, 1]
    # Of small classes some have one to hold out.
    labels = torch.arange(10).repeat(2)
    assert labels[hold_out(torch.arange(20), labels, 0.2)[1]].tolist() == [1, 3, 6, 8]
    # What classes of one image can't give is not taken from others, but for half an image.
    labels = torch.cat([torch.arange(900), torch.full((100,), 900), torch.tensor([950] * 20)])
    held = hold_out(torch.arange(1020), labels, 0.1)[1]
    assert labels[held].bincount().tolist() == [0] * 900 + [10] + [0] * 49 + [2]
    labels = torch.arange(10).repeat(2)
    order = torch.arange(20)
    with pytest.raises(UserError, match=r"val-share 0\.01"):
        hold_out(order, labels, 0.01)
