"""Detect how a base model's weights are stored, and choose how a run loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

from agents.contract.spec import AdapterKind
from agents.errors import ExpectedError
from agents.shared.models.config_findings import is_4_bit


def choose_quantization(kind: AdapterKind, path: Path, dtype: torch.dtype) -> Any:
    """Return Transformers' settings to quantize weights while they load, or None.

    None loads weights as they are stored, which for QLoRA may already be in 4 bits.

    Args:
        kind: kind of the run's adapter.
        path: folder of the model.
        dtype: type in which the run computes.

    Raises:
        ExpectedError: weights in this form cannot be trained this way.
    """
    method = _read_quantization(path)
    if kind == "full" and method:
        raise ExpectedError(
            f"The model in {path} is already quantized, so its weights cannot be fully trained.",
            "Use adapter: {kind: lora}, or use the model that it was made from",
        )
    # No kernel here multiplies MXFP4, so it is always converted.
    if method == "mxfp4":
        return _dequantize_mxfp4(kind, path)
    if kind != "qlora":
        return None
    if not method:
        return _nf4(dtype)
    if not is_4_bit(_read_config(path)):
        raise ExpectedError(
            f"The model in {path} is already quantized ({method}), which is not turned into NF4.",
            "Use adapter: {kind: lora}, or the model that it was made from",
        )
    return None


def require_known_family(path: Path) -> None:
    """Check that Transformers supports the model's family: code of a model never runs.

    Raises:
        ExpectedError: it does not.
    """
    family = _read_config(path).get("model_type")
    if isinstance(family, str) and family not in CONFIG_MAPPING:
        raise ExpectedError(
            f"The model in {path} is of the family {family[:80]!a}, which Transformers "
            f"{transformers.__version__} does not have.",
            "Name a model of another family (docs/models.md lists some): code that comes with a "
            "model is never run",
        )


def _read_config(path: Path) -> dict[str, Any]:
    """Return the model's config.json; empty on an error, which loading reports better."""
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _read_quantization(path: Path) -> str:
    """Return the method that quantized the model's files; empty if they are not quantized."""
    settings = _read_config(path).get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    # Some files name no method, but are quantized.
    return str(method or ("unknown" if settings else ""))


def _dequantize_mxfp4(kind: AdapterKind, path: Path) -> Any:
    """Return the settings that load experts in MXFP4, like gpt-oss's, in the run's type."""
    if kind == "qlora":
        raise ExpectedError(
            f"The experts of the model in {path} are in MXFP4 already, which is not turned into "
            "NF4.",
            "Use adapter: {kind: lora}, which trains on them in 16 bits, or a copy of the model in "
            "bf16",
        )
    from transformers import Mxfp4Config

    return Mxfp4Config(dequantize=True)


def _nf4(dtype: torch.dtype) -> Any:
    try:
        import bitsandbytes  # noqa: F401 - transformers checks too late, with a worse message
    except ImportError as error:
        raise ExpectedError(
            "adapter.kind: qlora needs the package bitsandbytes, which the training environment "
            f"of this node does not have ({error}).",
            "Use adapter: {kind: lora}, or build the environment with rackless nodes setup",
        ) from error
    from agents.trainer.model.nf4_experts import ExpertsNf4Config

    # QLoRA's own settings: NF4 with double quantization.
    return ExpertsNf4Config(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
