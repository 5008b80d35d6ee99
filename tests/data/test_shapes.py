from __future__ import annotations

import numpy as np
import pytest
import torch

from boxcov import BoxcovError
from boxcov._torch.process_state import item_seed
from boxcov.data import batched, loaded, shapes


def test_a_frame_depends_on_seed_and_index_alone() -> None:
    frames = shapes.frames(count=5, seed=3)
    state = torch.get_rng_state()
    first = frames[4][0]
    assert torch.equal(shapes.frames(count=9, seed=3)[4][0], first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(shapes.frames(count=5, seed=4)[4][0], first)
    assert torch.equal(frames[-1][0], first)
    with pytest.raises(IndexError):
        frames[5]


def test_a_seed_of_numpy_is_that_of_python() -> None:
    frame, same = shapes.frames(seed=3)[0], shapes.frames(seed=np.int64(3))[0]
    assert torch.equal(same[0], frame[0])


def test_a_scene_has_room_for_25_objects() -> None:
    assert max(len(t[0]["boxes"]) for _, t in shapes.frames(count=40, objects=25)) > 20
    with pytest.raises(BoxcovError, match="room for 25 objects, got 26"):
        shapes.frames(objects=26)


def test_seeds_of_any_size_are_taken() -> None:
    assert item_seed(2, 5) == 2_000_011
    assert item_seed(10**17, 3) < 2**64
    one, other = (loaded(shapes.frames(seed=10**17 + i), 0, seed=10**17)[0] for i in (0, 1))
    assert not torch.equal(one[0], other[0])


def test_the_picture_shows_the_boxes() -> None:
    image = shapes.render(torch.tensor([[16.0, 8.0, 4.0, 8.0, 0.0]]))
    rows, columns = (image > 0.5).nonzero(as_tuple=True)
    metres = shapes.METRES / shapes.PIXELS
    assert (int(columns.min()) * metres, (int(columns.max()) + 1) * metres) == (12, 20)
    assert (int(rows.min()) * metres, (int(rows.max()) + 1) * metres) == (6, 10)
    assert float(image[16, 38]) > float(image[16, 26])  # the front is bright


def test_batches_hold_every_frame_once() -> None:
    batches = batched(shapes.frames(count=7), 3)
    assert [len(inputs) for inputs, _ in batches] == [3, 3, 1]
    assert [len(targets) for _, targets in batches] == [3, 3, 1]
    assert torch.equal(batches[1][0][2:], shapes.frames(count=7)[5][0])


def test_batches_merge_tensors_lists_and_dicts() -> None:
    frames = [({"x": torch.ones(1, 2)}, None), ({"x": torch.zeros(1, 2)}, None)]
    inputs, targets = batched(frames, 2)[0]
    assert inputs["x"].tolist() == [[1, 1], [0, 0]]
    assert targets is None
    with pytest.raises(BoxcovError, match="cannot merge str"):
        batched([("a", None)], 1)[0]
    images = [(torch.zeros(1, 3, 4, width), [{}]) for width in (4, 5)]
    with pytest.raises(BoxcovError, match=r"shapes \(1, 3, 4, 4\), \(1, 3, 4, 5\) into a batch"):
        batched(images, 2)[0]
    with pytest.raises(BoxcovError, match="at least 1, got 0"):
        batched(frames, 0)


def test_bad_counts() -> None:
    with pytest.raises(BoxcovError, match="at least 0, got -1"):
        shapes.frames(count=-1)
