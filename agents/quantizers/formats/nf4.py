"""Quantize to bitsandbytes NF4 with double quantization, the format that QLoRA trains on.

Weights are read, quantized (Dettmers et al. 2023, arXiv:2305.14314) and written one at a time, so
that neither the original nor the result is in memory as a whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agents.quantizers.formats.registry import WriteRequest
from agents.quantizers.job.heap import return_free_memory

# Written bytes after which memory is returned to the system; about four times as much was read.
_WRITTEN_BYTES = 1 << 25


def write(request: WriteRequest) -> dict[str, Path]:
    """Write the quantized model of Transformers, without its tokenizer.

    Raises:
        OSError: the disk is full.
    """
    request.begin()
    import torch
    from transformers.utils import logging as transformers_logging

    from agents.quantizers.merging.shard_files import ShardFiles
    from agents.quantizers.merging.skeleton import Skeleton

    transformers_logging.disable_progress_bar()
    with torch.no_grad():
        skeleton = Skeleton(request.model, **_settings(request.job.device))
        model, files = skeleton.model, ShardFiles(request.folder)
        written_bytes = 0
        for tensors in skeleton.load():
            files.write({name: value.cpu() for name, value in skeleton.revert(tensors).items()})
            written_bytes += sum(value.nbytes for value in tensors.values())
            del tensors
            if written_bytes > _WRITTEN_BYTES:
                return_free_memory()
                written_bytes = 0
        files.finish()
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(request.folder)
    return {}


def load_quantized(model: Path, device: str) -> Any:
    """Return the model with its linear weights in NF4, as a whole on its device."""
    from agents.trainer.model.causal_class import find_causal_class

    return find_causal_class().from_pretrained(
        model,
        **_settings(device),
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )


def _settings(device: str) -> dict[str, Any]:
    import torch
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        # The default is float32, which is slow on GPUs.
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {
        "quantization_config": quantization,
        "dtype": torch.bfloat16,
        "device_map": {"": device},
    }
