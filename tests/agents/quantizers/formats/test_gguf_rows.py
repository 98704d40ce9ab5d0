"""The converter writes the same bytes a few rows at a time, and holds no tensor as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from agents.quantizers.formats import gguf
from tests.agents.quantizers.own_memory import OwnMemory
from tests.agents.trainer.model.mixtures import save_mixture
from tests.agents.trainer.ranks import finish, make_tiny_model, start

MIB = 1 << 20
ROWS, WIDTH = 16384, 1024
KINDS = ("q8_0", "f16", "f32")


def compare(folder: str, models: list[str]) -> None:
    """Convert models as usual and by rows; report what writing one tensor took of memory.

    In a process of its own, which the converter's packages are imported into.
    """
    from agents.quantizers.formats import gguf_rows

    by_rows = gguf_rows.write_by_rows
    gguf_rows.write_by_rows = lambda: None
    _convert(folder, models, "usual")
    from conversion.base import LazyTorchTensor
    from gguf import GGMLQuantizationType, quants
    from gguf.utility import SafetensorsLocal

    def weigh() -> int:
        file = SafetensorsLocal(Path(folder, "one.safetensors"))
        lazy = LazyTorchTensor.from_local_tensor(file.tensors["weight"]).to(torch.float32)
        made = quants.quantize(lazy.numpy(), GGMLQuantizationType.Q8_0)
        with OwnMemory() as memory, Path(folder, "one").open("wb") as out:
            made.tofile(out)
        return memory.peak_bytes

    usual_bytes = weigh()
    gguf_rows._VALUES_AT_ONCE = 1000  # so that small tensors are cut, too
    by_rows()
    gguf_rows.write_by_rows = lambda: None
    _convert(folder, models, "rows")
    gguf_rows._VALUES_AT_ONCE = 1 << 20
    report = {"usual_bytes": usual_bytes, "bytes": weigh()}
    Path(folder, "report.json").write_text(json.dumps(report))


def _convert(folder: str, models: list[str], how: str) -> None:
    for model in models:
        for kind in KINDS:
            gguf._convert_here(model, f"{folder}/{Path(model).name}-{kind}-{how}", kind)


def test_files_are_the_same_and_take_the_memory_of_some_rows(tmp_path):
    models = [
        make_tiny_model(tmp_path / "llama", hidden_size=64),  # whose projections are reordered
        save_mixture(tmp_path / "mixture", "qwen3_moe"),  # whose experts are stacked
    ]
    save_file({"weight": torch.randn(ROWS, WIDTH).bfloat16()}, tmp_path / "one.safetensors")
    assert finish([start(compare, str(tmp_path), [str(one) for one in models])]) == [0]
    for model in models:
        for kind in KINDS:
            usual, rows = (
                Path(f"{tmp_path}/{model.name}-{kind}-{how}").read_bytes()
                for how in ("usual", "rows")
            )
            assert usual == rows
            assert usual[:4] == b"GGUF"
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert report["usual_bytes"] > 5 * ROWS * WIDTH
    assert report["bytes"] < 2 * ROWS * WIDTH
