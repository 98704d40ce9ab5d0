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
from typing import Any

from agents.trainer import compiling
from agents.trainer.memory import read_available_bytes

ANSWER_TOKENS = 32
_NUM_ANSWERS = 8
_PROMPT_TOKENS = 24
_GPU_NEED, _GPU_SPARE_BYTES = 1.1, 1 << 30
"""Times the weights, and what activations and the context take."""


def choose_place(
    size_bytes: int, device: str, free_gpu_bytes: int, free_bytes: int
) -> tuple[str, bool]:
    """Return where a model is measured, and whether in float32.

    The whole original often fits no GPU that runs what is made of it: then it runs on the CPU, in
    float32 where the memory is there, which is no slower.

    >>> choose_place(13 << 30, "cuda:0", 11 << 30, 20 << 30)
    ('cpu', False)
    >>> choose_place(4 << 30, "cuda:0", 11 << 30, 20 << 30)
    ('cuda:0', False)
    """
    if device != "cpu" and size_bytes * _GPU_NEED + _GPU_SPARE_BYTES <= free_gpu_bytes:
        return device, False
    return "cpu", 2 * size_bytes * _GPU_NEED <= free_bytes


def name_transformers() -> str:
    """Return what loads folders here, with its version."""
    return f"Transformers {importlib.metadata.version('transformers')}"


def weigh(model: Path) -> int:
    """Return the bytes of a folder's weights."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def load_model(model: Path, device: str) -> Any:
    """Return a folder's model, ready to answer, on the device where it fits, else on the CPU.

    What the model before has left is given back first, because what is free decides.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    gc.collect()
    free_gpu_bytes = 0
    if device != "cpu":
        torch.cuda.empty_cache()
        free_gpu_bytes, _ = torch.cuda.mem_get_info(device)
    place, is_wide = choose_place(weigh(model), device, free_gpu_bytes, read_available_bytes())
    _settle_compiling(place)
    plain = {} if place == "cpu" else _name_kernel(model)
    loaded = AutoModelForCausalLM.from_pretrained(
        model,
        **plain,
        dtype=torch.float32 if is_wide else "auto",
        device_map={"": place},
        use_safetensors=True,
        local_files_only=True,
    )
    return loaded.eval()


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
        can = compiling.why_not(torch.device(place)) is None
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


def continue_prompts(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the likeliest continuation of each prompt, up to its end."""
    import torch

    answers = []
    for prompt in prompts:
        ids_BT = torch.tensor([list(prompt)], device=next(model.parameters()).device)
        out_BT = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(out_BT[0, len(prompt) :].tolist())
    return answers


def time_answer(model: Any, prompt: Sequence[int]) -> tuple[float, float]:
    """Return seconds to the first token, and tokens per second after it."""
    import torch

    ids_BT = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": [],
                "attention_mask": torch.ones_like(ids_BT)}  # fmt: skip
    times = []
    for count in (ANSWER_TOKENS, 1, ANSWER_TOKENS):  # the first lets kernels get ready
        started = time.perf_counter()
        model.generate(ids_BT, min_new_tokens=count, max_new_tokens=count, **settings)
        times.append(time.perf_counter() - started)
    _, first_s, all_s = times
    return first_s, (ANSWER_TOKENS - 1) / max(1e-9, all_s - first_s)
