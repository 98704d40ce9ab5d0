"""Transformers with PEFT where accelerate keeps the layers that a card has no room for on the CPU.

As their documents have it: `device_map` puts as many layers on the GPU as fit, in NF4, and the
others on the CPU, where they stay in 16 bits (`llm_int8_enable_fp32_cpu_offload`) and are copied to
the GPU in each pass. All layers recompute: otherwise autograd would keep every copy. Where the
device is the CPU itself, the others are on the disk, so that the same hooks are at work.

The weights of layers that wait elsewhere are placeholders without content until they are called,
and PEFT makes their adapters alike. Adapters stay on the device, so they are made there again.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from tests.bench.engines.chat_rows import make_rows
from tests.bench.engines.engine_shapes import GIB, list_values
from tests.bench.engines.fresh_process import Emit
from tests.bench.engines.peer_training import (
    Bounds,
    PeerJob,
    StepClock,
    choose_attention,
    describe_adapter,
    make_batches,
    set_recompute,
)
from tests.bench.engines.random_model import use_random_weights

# Parts of the cap that the layers on the GPU may take; the first that trains counts.
_SHARES = (0.6, 0.4, 0.2, 0.0)


def train_offloaded(emit: Emit, job: PeerJob, folder: str, cap_gib: float) -> None:
    """Report tokens per second of each number of sequences at once, under a cap."""
    import torch

    use_random_weights()
    on_gpu = job.device != "cpu"
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_gib * GIB / total)
    bounds = Bounds()
    bounds.register()
    attention = choose_attention(job)
    rows = make_rows(job.lengths, list_values(job.shape, size=job.size)["vocab_size"])
    for share in _SHARES:
        found = 0
        model = None
        try:
            model, num_on_gpu = _load(job, Path(folder), share * cap_gib * GIB, attention)
            clock = StepClock(model, job.device)
            for count in job.at_once:
                batches = make_batches(job, rows, count, attention, bounds)
                row = {"at_once": count, "layers_on_gpu": num_on_gpu}
                emit({**row, **clock.run(batches, job.step_tokens, job.seconds)})
                found += 1
        except torch.OutOfMemoryError as error:
            emit({"refused": f"{share:.0%} of the cap for layers: {error}"})
        if found:
            return
        del model
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def _load(job: PeerJob, folder: Path, most_bytes: float, attention: str) -> tuple[Any, int]:
    """Return the model with its adapters, and the number of its layers on the GPU."""
    import torch
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    config = AutoConfig.from_pretrained(folder)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    ends_bytes = 4 * config.vocab_size * hidden
    layer_bytes = 0.52 * hidden * (2 * hidden + 3 * config.intermediate_size)
    fitting = max(0, min(layers, int((most_bytes - ends_bytes) / layer_bytes)))
    gpu: Any = 0 if job.device != "cpu" else "cpu"
    places = {"model.embed_tokens": gpu, "model.norm": gpu, "model.rotary_emb": gpu, "lm_head": gpu}
    elsewhere = "disk" if gpu == "cpu" else "cpu"
    for place in range(layers):
        places[f"model.layers.{place}"] = gpu if place < fitting else elsewhere
    settings: dict[str, Any] = {}
    if job.kind == "qlora":
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_enable_fp32_cpu_offload=True,
        )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=places, attn_implementation=attention,
        use_safetensors=True, local_files_only=True, offload_folder=folder / "offloaded",
        **settings,
    )  # fmt: skip
    base.config.use_cache = False
    model = get_peft_model(base, describe_adapter(job), autocast_adapter_dtype=False).train()
    _place_adapters(model, job.device)
    model.enable_input_require_grads()
    set_recompute(model, "all")
    return model, fitting


def _place_adapters(model: Any, device: str) -> None:
    """Put all adapters on the device, those of offloaded layers with new initial values."""
    import torch
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        parts = [layer.lora_A["default"], layer.lora_B["default"]]
        is_empty = any(one.weight.is_meta for one in parts)
        for part in parts:
            if is_empty:
                part.to_empty(device=device)
            part.to(device, torch.bfloat16)
        if is_empty:
            layer.reset_lora_parameters("default", init_lora_weights=True)
