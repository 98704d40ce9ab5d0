"""A micro-batch holds its examples end to end."""

from __future__ import annotations

import numpy as np
import torch

from agents.trainer.data.examples import Example, Segment
from agents.trainer.model.micro_batch import build_micro_batch


def test_examples_lie_end_to_end():
    def segment(length):
        ids = np.arange(length, dtype=np.int32) + 10 * length
        return Segment(1, ids, np.arange(length) == length - 1)

    pair = Example((segment(3), segment(2)))
    batch = build_micro_batch([pair, Example((segment(4),))], torch.device("cpu"))
    assert batch.ids_1M.tolist() == [[30, 31, 32, 20, 21, 40, 41, 42, 43]]
    assert batch.position_1M.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert batch.segments.bounds == (0, 3, 5, 9)
    assert batch.lengths == (5, 4)
    assert batch.predicted_at_N.tolist() == [1, 3, 7]
    assert batch.label_N.tolist() == [32, 21, 43]
    assert batch.segment_N.tolist() == [0, 1, 2]
