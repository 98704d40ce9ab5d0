"""A model of a few thousand parameters with the demo's tokenizer, made once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.agents.trainer.ranks import DEMO


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=768,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / "model" / name, folder / name)
    return folder


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """End the process that ranks are forked from, once all tests are done."""
    yield
    forkserver._forkserver._stop()
