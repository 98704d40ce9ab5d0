"""Load a model of Transformers on a device that fits, continue prompts with it, and time it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agents.foreign_code import forbid
from agents.limits import read_available_bytes
from agents.quantizers.job.heap import return_free_memory
from agents.shared.models.used_files import list_weights
from agents.trainer.kernels import compiling

ANSWER_TOKENS = 32
_NUM_ANSWERS = 8
_PROMPT_TOKENS = 24

# Memory for a model: its weights times the first, plus the second for activations and context.
_GPU_NEED, _GPU_SPARE_BYTES = 1.1, 1 << 30

# Share of the free RAM for weights if not all of them fit; the rest caches their files.
_RAM_SHARE = 0.5
# With streamed weights: GPU memory left free for weights that arrive and are rounded there, and the
# minimum for resident weights.
_STREAM_SPARE_BYTES, _LEAST_RESIDENT_BYTES = 5 << 29, 1 << 30


LIKELIEST: dict[str, Any] = {
    "do_sample": False,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
}
"""Settings that always choose the likeliest word, overriding the model's generation_config.json:
llama.cpp does not read that file, and Qwen's penalizes repeated words."""


class LayerPlace(NamedTuple):
    """Devices on which a model is measured."""

    device: str
    is_wide: bool = False
    """True if it computes in float32, on a CPU."""
    resident_bytes: int | None = None
    """Size of the weights that stay on the GPU; others come from RAM in each pass; None: all
    stay."""
    ram_bytes: int | None = None
    """Size of the weights that stay in RAM; others come from their files in each pass; None: all
    stay."""


def choose_place(
    size_bytes: int, device: str, free_gpu_bytes: int, free_bytes: int, *, may_stream: bool = False
) -> LayerPlace:
    """Return the devices on which a model is measured.

    The whole original often does not fit the GPU that runs the quantized result. If `may_stream`,
    its weights then come to the GPU layer by layer, which makes passes over many tokens far faster
    than on a CPU. Otherwise it runs on the CPU, in float32 if memory allows, which is no slower.
    Weights beyond the RAM are read from the files again for each pass, if `may_stream`.

    >>> choose_place(13 << 30, "cuda:0", 11 << 30, 20 << 30)
    LayerPlace(device='cpu', is_wide=False, resident_bytes=None, ram_bytes=None)
    >>> place = choose_place(140 << 30, "cuda:0", 11 << 30, 24 << 30, may_stream=True)
    >>> place.device, place.resident_bytes / 2**30, place.ram_bytes / 2**30
    ('cuda:0', 8.5, 12.0)
    >>> choose_place(4 << 30, "cuda:0", 11 << 30, 20 << 30).device
    'cuda:0'
    >>> choose_place(13 << 30, "cuda:0", 11 << 30, 20 << 30, may_stream=True).resident_bytes / 2**30
    8.5
    """
    if device != "cpu" and size_bytes * _GPU_NEED + _GPU_SPARE_BYTES <= free_gpu_bytes:
        return LayerPlace(device)
    resident = free_gpu_bytes - _STREAM_SPARE_BYTES
    fits_ram = size_bytes * _GPU_NEED <= free_bytes
    ram = int(_RAM_SHARE * free_bytes) if may_stream and not fits_ram else None
    if may_stream and device != "cpu" and resident >= _LEAST_RESIDENT_BYTES:
        return LayerPlace(device, resident_bytes=resident, ram_bytes=ram)
    return LayerPlace("cpu", ram_bytes=ram, is_wide=2 * size_bytes * _GPU_NEED <= free_bytes)


def name_transformers() -> str:
    """Return the name of the program that loads folders, with its version."""
    return f"Transformers {importlib.metadata.version('transformers')}"


def weigh(model: Path) -> int:
    """Return the size of a folder's weights, in bytes."""
    return sum(path.stat().st_size for path in list_weights(model))


def load_model(model: Path, device: str, *, may_stream: bool = False) -> Any:
    """Return a folder's model, ready to answer, on the device if it fits, else on the CPU.

    The memory of the previous model is released first, because free memory decides the place.

    Args:
        model: folder of Transformers.
        device: device of the job.
        may_stream: True if weights may come to the GPU for each pass; see `choose_place`.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    from agents.trainer.model.causal_class import find_causal_class

    transformers_logging.disable_progress_bar()
    free_gpu_bytes, free_bytes = read_free_memory(device)
    place = choose_place(weigh(model), device, free_gpu_bytes, free_bytes, may_stream=may_stream)
    forbid(model)
    _settle_compiling(place.device)
    plain = {} if place.device == "cpu" else _name_kernel(model)
    where: dict[str, Any] = {"device_map": {"": place.device}}
    if place.resident_bytes is not None:
        number = torch.device(place.device).index or 0
        most = {number: place.resident_bytes, "cpu": place.ram_bytes or free_bytes}
        where = {"device_map": "auto", "max_memory": most}
    elif place.ram_bytes is not None:
        where = {"device_map": "auto", "max_memory": {"cpu": place.ram_bytes}}
    if place.ram_bytes is not None:
        # Required by Transformers, but not written to: weights are read from their files.
        where["offload_folder"] = model
    loaded = find_causal_class().from_pretrained(
        model,
        **plain,
        **where,
        dtype=torch.float32 if place.is_wide else "auto",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    return loaded.eval()


def read_free_memory(device: str) -> tuple[int, int]:
    """Return the free bytes of the device (0 for a CPU) and of RAM, after releasing memory."""
    import torch

    give_back()
    free_gpu_bytes = torch.cuda.mem_get_info(device)[0] if device != "cpu" else 0
    return free_gpu_bytes, read_available_bytes()


def give_back() -> None:
    """Release the memory of models that are no longer needed.

    Models with streamed weights refer to themselves, so only the garbage collector frees them.
    """
    import torch

    return_free_memory()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def find_device(model: Any) -> Any:
    """Return the device for a model's inputs; streamed weights have none between passes.

    If all weights are streamed, hooks move the inputs, so that any device works.
    """
    import torch

    there = (value.device for value in model.parameters() if not value.is_meta)
    return next(there, torch.device("cpu"))


def _settle_compiling(place: str) -> None:
    """Disable torch.compile if nothing can be compiled.

    GPTQ's plain PyTorch kernels compile the unpacking of weights at its first use, which fails on a
    PC without a C++ compiler. That one small function needs no pool of compiler processes, each of
    which would take half a gigabyte.
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
    """Make an NF4 model on a CPU compute in float32 with plain weights, if memory allows.

    By default it computes in bfloat16, which alone moves a small model half as far from a float32
    original as rounding to 4 bits does.
    """
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    layers = [(n, m) for n, m in loaded.named_modules() if isinstance(m, Linear4bit)]
    needed = sum(4 * layer.in_features * layer.out_features for _, layer in layers)
    if needed * _GPU_NEED > read_available_bytes():
        return
    for name, layer in layers:
        # `dequantize_4bit` returns this type; bfloat16 would round the weights again.
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
    """Return settings that avoid gptqmodel's compiled kernels, which take minutes to build."""
    from transformers import AwqConfig, GPTQConfig

    config = json.loads((model / "config.json").read_bytes())
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method == "awq":
        return {"quantization_config": AwqConfig(backend="torch_awq")}
    if method == "gptq":
        # The constructor requires bits, but those in config.json override them.
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
        model: model of Transformers.
        prompts: token ids of each prompt.
        at_once: True to answer prompts of one length together, so that weights are read, or
            streamed to the GPU, once for all of them instead of once for each.
    """
    import torch

    groups: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        # Only equal lengths share a batch, since padding would change the positions of shorter
        # prompts. The negated index is a unique key for each prompt.
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
    """Return an answer up to its end, without the padding up to the longest one.

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
    # No end token, so that every run makes exactly the timed number of tokens.
    settings = {"pad_token_id": 0, "eos_token_id": [], **LIKELIEST,
                "attention_mask": torch.ones_like(ids_BT)}  # fmt: skip
    times = []
    for count in (ANSWER_TOKENS, 1, ANSWER_TOKENS):  # the first one warms up kernels
        started = time.perf_counter()
        model.generate(ids_BT, min_new_tokens=count, max_new_tokens=count, **settings)
        times.append(time.perf_counter() - started)
    _, first_s, all_s = times
    return first_s, (ANSWER_TOKENS - 1) / max(1e-9, all_s - first_s)
