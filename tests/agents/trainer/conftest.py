"""Models of a few thousand parameters with the demo's tokenizer, made once."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.agents.trainer.ranks import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tiny_wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are blocks of 64 values, as NF4 wants them."""
    folder = tmp_path_factory.mktemp("wide-model")
    return make_tiny_model(folder, hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """End the process that ranks are forked from, once all tests are done."""
    yield
    forkserver._forkserver._stop()
