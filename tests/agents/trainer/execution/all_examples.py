"""Examples in memory, as data of a run."""

import numpy as np


class AllExamples:
    """What `agents.trainer.data.examples.Examples` promises, over a list."""

    def __init__(self, examples):
        self._examples = list(examples)
        self.num_tokens = np.array([one.num_tokens for one in self._examples], dtype=np.int32)
        self.parts = (len(self._examples),)
        self.weights = np.array([one.num_targets for one in self._examples], dtype=np.int32)

    def __len__(self):
        return len(self._examples)

    def __getitem__(self, index):
        return self._examples[index]
