"""Folders of models that are too big to make: names and shapes, with weights drawn when read.

A 70B in 16 bits takes 140 GB of disk and minutes to write. Here the folder has the head of a
safetensors file and a hole behind it. A rank whose process has called `use_random_weights` reads
as from any file, and gets random numbers that were made on its device.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.bench.engines.chat_rows import save_tokenizer
from tests.bench.engines.engine_shapes import Size, make_config

# Spread of the weights, as Transformers initialises them.
_DEVIATION = 0.02


def save_outline(folder: Path, name: str, *, layers: int | None, size: Size) -> None:
    """Save configuration, tokenizer, and the head of the weights' file."""
    import torch
    from transformers import AutoModelForCausalLM

    config = make_config(name, layers=layers, size=size)
    config.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for key, tensor in model.state_dict().items():
        if key in getattr(model, "all_tied_weights_keys", {}):
            continue
        offsets = [place, place + tensor.nbytes]
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
        place += tensor.nbytes
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + place)  # a hole, which takes no disk


def keep_no_layers() -> None:
    """Let this process write no layer for a later run."""
    from agents.errors import ExpectedError
    from agents.trainer.streaming.layer_files import StreamedLayerFiles

    def refuse(self: StreamedLayerFiles, num_bytes: int) -> None:
        raise ExpectedError("this benchmark keeps no layers.")

    StreamedLayerFiles.prepare = refuse  # type: ignore[method-assign]


class RandomFile:
    """Stands in for an open safetensors file."""

    def __init__(self, path: Any, *args: Any, **more: Any) -> None:
        with open(path, "rb") as file:
            self._header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        self._metadata = self._header.pop("__metadata__")

    def __enter__(self) -> RandomFile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def metadata(self) -> dict[str, str]:
        """Return what the file says of itself."""
        found: dict[str, str] = self._metadata
        return found

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._header)

    def get_slice(self, name: str) -> RandomSlice:
        """Return what makes a tensor when it is indexed."""
        return RandomSlice(name, self._header[name]["shape"])


class RandomSlice:
    """Stands in for a tensor of a file."""

    def __init__(self, name: str, shape: list[int]) -> None:
        self._name = name
        self._shape = shape

    def get_dtype(self) -> str:
        """Return its type in the language of safetensors."""
        return "BF16"

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return self._shape

    def __getitem__(self, index: Any) -> Any:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        if len(self._shape) == 1:  # norms
            return torch.ones(self._shape, dtype=torch.bfloat16, device=device)
        draw = torch.Generator(device).manual_seed(
            int.from_bytes(hashlib.sha256(self._name.encode()).digest()[:4], "little")
        )
        made = torch.empty(self._shape, dtype=torch.bfloat16, device=device)
        return made.normal_(std=_DEVIATION, generator=draw)


def use_random_weights() -> None:
    """Let this process read folders of `save_outline`; called before CUDA is used."""
    # As the trainer sets it, before it imports torch.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from transformers import modeling_utils

    from agents.trainer import __main__ as entry
    from agents.trainer.model import model

    known: Future[str] = Future()
    known.set_result("random")
    entry.start_reading = lambda attempt: known  # type: ignore[assignment]
    model.read_by_threads = lambda device, report: nullcontext()  # type: ignore[assignment]
    modeling_utils.safe_open = RandomFile
