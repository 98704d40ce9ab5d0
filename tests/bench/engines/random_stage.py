"""A rank of the trainer whose weights are drawn on its own device when they are read.

A folder with the weights of 70B would be 140 GB. Here a rank draws the layers that it holds, each
tensor by its name, so that every cut of a model has the same weights; everything else is the
trainer's own.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Be one rank of an attempt, by the environment that the trainer reads."""
    from agents.trainer.__main__ import main as train
    from tests.bench.engines.random_model import keep_no_layers, use_random_weights

    use_random_weights()
    # One after the other: what waits to be quantized would take more than the rank may have.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    keep_no_layers()
    return train()


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
