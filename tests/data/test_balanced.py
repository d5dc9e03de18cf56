"""Draws of as many images of each class, out of shards."""

import torch

from prunex_mpi.data.balanced import class_counts, places_in_draws


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
