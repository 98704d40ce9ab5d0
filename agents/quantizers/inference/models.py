"""Load a model of Transformers where it fits, let it go on with prompts, and time it."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agents.trainer.kernels import compiling
from agents.trainer.rank.device import read_available_bytes

ANSWER_TOKENS = 32
_NUM_ANSWERS = 8
_PROMPT_TOKENS = 24

# Times the weights, and what activations and the context take.
_GPU_NEED, _GPU_SPARE_BYTES = 1.1, 1 << 30

# Left of the GPU where weights come and go, and are rounded there; what has to stay there.
_STREAM_SPARE_BYTES, _LEAST_RESIDENT_BYTES = 5 << 29, 1 << 30


LIKELIEST: dict[str, Any] = {
    "do_sample": False,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
}
"""Settings that take the likeliest word always, whatever the model's generation_config.json says:
llama.cpp reads none, and Qwen's has a penalty for words that were said."""


class LayerPlace(NamedTuple):
    """Where a model is measured."""

    device: str
    is_wide: bool = False
    """In float32, on a CPU."""
    resident_bytes: int | None = None
    """Of weights that stay on the GPU, while the others come from RAM for each pass; None: all."""


def choose_place(
    size_bytes: int, device: str, free_gpu_bytes: int, free_bytes: int, *, may_stream: bool = False
) -> LayerPlace:
    """Return where a model is measured.

    The whole original often fits no GPU that runs what is made of it. Then, where that is wanted,
    its weights come to the GPU layer by layer: passes over many tokens are far quicker so than on a
    CPU. Else it runs on the CPU, in float32 where the memory is there, which is no slower.

    >>> choose_place(13 << 30, "cuda:0", 11 << 30, 20 << 30)
    LayerPlace(device='cpu', is_wide=False, resident_bytes=None)
    >>> choose_place(4 << 30, "cuda:0", 11 << 30, 20 << 30).device
    'cuda:0'
    >>> choose_place(13 << 30, "cuda:0", 11 << 30, 20 << 30, may_stream=True).resident_bytes / 2**30
    8.5
    """
    if device != "cpu" and size_bytes * _GPU_NEED + _GPU_SPARE_BYTES <= free_gpu_bytes:
        return LayerPlace(device)
    resident = free_gpu_bytes - _STREAM_SPARE_BYTES
    fits_ram = size_bytes * _GPU_NEED <= free_bytes
    if may_stream and device != "cpu" and resident >= _LEAST_RESIDENT_BYTES and fits_ram:
        return LayerPlace(device, resident_bytes=resident)
    return LayerPlace("cpu", is_wide=2 * size_bytes * _GPU_NEED <= free_bytes)


def name_transformers() -> str:
    """Return what loads folders here, with its version."""
    return f"Transformers {importlib.metadata.version('transformers')}"


def weigh(model: Path) -> int:
    """Return the bytes of a folder's weights."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def load_model(model: Path, device: str, *, may_stream: bool = False) -> Any:
    """Return a folder's model, ready to answer, on the device where it fits, else on the CPU.

    What the model before has left is given back first, because what is free decides.

    Args:
        model: folder of Transformers.
        device: of the job.
        may_stream: whether weights may come to the GPU for each pass; see `choose_place`.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    give_back()
    free_gpu_bytes = torch.cuda.mem_get_info(device)[0] if device != "cpu" else 0
    free_bytes = read_available_bytes()
    place = choose_place(weigh(model), device, free_gpu_bytes, free_bytes, may_stream=may_stream)
    _settle_compiling(place.device)
    plain = {} if place.device == "cpu" else _name_kernel(model)
    where: dict[str, Any] = {"device_map": {"": place.device}}
    if place.resident_bytes is not None:
        number = torch.device(place.device).index or 0
        most = {number: place.resident_bytes, "cpu": free_bytes}
        where = {"device_map": "auto", "max_memory": most}
    loaded = AutoModelForCausalLM.from_pretrained(
        model,
        **plain,
        **where,
        dtype=torch.float32 if place.is_wide else "auto",
        use_safetensors=True,
        local_files_only=True,
    )
    return loaded.eval()


def give_back() -> None:
    """Give back the memory of models that are no longer needed.

    Those whose weights come for each pass refer to themselves, so that only this ends them.
    """
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def find_device(model: Any) -> Any:
    """Return where a model's inputs go; weights that come for each pass are nowhere meanwhile.

    Where all of them come, the inputs are brought to them, from wherever they are.
    """
    import torch

    there = (value.device for value in model.parameters() if not value.is_meta)
    return next(there, torch.device("cpu"))


def _settle_compiling(place: str) -> None:
    """Let models compute as they are written where nothing can be compiled.

    GPTQ's kernels in plain PyTorch have torch compile the unpacking of weights at its first use,
    which fails on a PC without a C++ compiler. The one small function needs no pool of compilers,
    each of which would take half a gigabyte.
    """
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.config.suppress_errors = True
    torch._inductor.config.compile_threads = 1
    if place == "cpu":
        can = shutil.which(os.environ.get("CXX", "g++")) is not None
    else:
        can = compiling.find_obstacle(torch.device(place)) is None
    torch.compiler.set_stance("default" if can else "force_eager")


def widen(loaded: Any) -> None:
    """Let an NF4 model on a CPU compute in float32 with plain weights, where the memory is there.

    Of itself it computes in bfloat16, which alone takes a small model half as far from an original
    in float32 as rounding to 4 bits does.
    """
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    layers = [(n, m) for n, m in loaded.named_modules() if isinstance(m, Linear4bit)]
    needed = sum(4 * layer.in_features * layer.out_features for _, layer in layers)
    if needed * _GPU_NEED > read_available_bytes():
        return
    for name, layer in layers:
        layer.weight.quant_state.dtype = torch.float32
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        plain.weight = torch.nn.Parameter(weight, requires_grad=False)
        plain.bias = layer.bias
        loaded.set_submodule(name, plain)
    for value in (*loaded.parameters(), *loaded.buffers()):
        if value.is_floating_point():
            value.data = value.data.float()


def _name_kernel(model: Path) -> dict[str, Any]:
    """Return what keeps gptqmodel from compiling a kernel, which takes minutes and a compiler."""
    from transformers import AwqConfig, GPTQConfig

    config = json.loads((model / "config.json").read_bytes())
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method == "awq":
        return {"quantization_config": AwqConfig(backend="torch_awq")}
    if method == "gptq":
        return {"quantization_config": GPTQConfig(bits=4, backend="torch")}
    return {}


def choose_prompts(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the beginnings of some rows."""
    return [list(row[: min(_PROMPT_TOKENS, len(row) // 2)]) for row in rows[:_NUM_ANSWERS]]


def continue_prompts(
    model: Any, prompts: Sequence[Sequence[int]], *, at_once: bool = False
) -> list[list[int]]:
    """Return the likeliest continuation of each prompt, up to its end.

    Args:
        model: of Transformers.
        prompts: token ids.
        at_once: whether prompts of one length are answered together, for which weights are read,
            or come to the GPU, once for all of them instead of once for each.
    """
    import torch

    groups: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        groups.setdefault(len(prompt) if at_once else -place, []).append(place)
    answers: list[list[int]] = [[] for _ in prompts]
    for group in groups.values():
        ids_BT = torch.tensor([list(prompts[place]) for place in group], device=find_device(model))
        out_BT = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=ANSWER_TOKENS,
            pad_token_id=0,
            **LIKELIEST,
        )
        for place, row in zip(group, out_BT[:, ids_BT.shape[1] :].tolist(), strict=True):
            answers[place] = _cut(row, model.generation_config.eos_token_id)
    return answers


def _cut(answer: list[int], ends: int | Sequence[int] | None) -> list[int]:
    """Return an answer up to its end; behind it is what fills it up to the longest one.

    >>> _cut([5, 2, 0, 0], 2), _cut([5, 6], [2, 3])
    ([5, 2], [5, 6])
    """
    known = {ends} if isinstance(ends, int) else set(ends or ())
    end = next((place for place, token in enumerate(answer) if token in known), len(answer))
    return answer[: end + 1]


def time_answer(model: Any, prompt: Sequence[int]) -> tuple[float, float]:
    """Return seconds to the first token, and tokens per second after it."""
    import torch

    ids_BT = torch.tensor([list(prompt)], device=find_device(model))
    settings = {"pad_token_id": 0, "eos_token_id": [], **LIKELIEST,
                "attention_mask": torch.ones_like(ids_BT)}  # fmt: skip
    times = []
    for count in (ANSWER_TOKENS, 1, ANSWER_TOKENS):  # the first lets kernels get ready
        started = time.perf_counter()
        model.generate(ids_BT, min_new_tokens=count, max_new_tokens=count, **settings)
        times.append(time.perf_counter() - started)
    _, first_s, all_s = times
    return first_s, (ANSWER_TOKENS - 1) / max(1e-9, all_s - first_s)
