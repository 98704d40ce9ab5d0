"""Quantize to bitsandbytes NF4 with double quantization, the format that QLoRA trains on.

The weights are quantized while they are loaded (Dettmers et al. 2023, arXiv:2305.14314), so that
the whole model in half precision is never on the GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agents.quantizers.formats.registry import WriteRequest

_SHARD_SIZE = "5GB"


def write(request: WriteRequest) -> dict[str, Path]:
    """Write the quantized model of Transformers, without its tokenizer."""
    request.begin()
    loaded = load_quantized(request.model, request.job.device)
    loaded.save_pretrained(request.folder, max_shard_size=_SHARD_SIZE)
    return {}


def load_quantized(model: Path, device: str) -> Any:
    """Return the model with its linear weights as NF4."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        # float32 by default, which is slow on GPUs.
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return AutoModelForCausalLM.from_pretrained(
        model,
        quantization_config=settings,
        dtype=torch.bfloat16,
        device_map={"": device},
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
