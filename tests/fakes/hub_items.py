"""Believable results of a search of the hub, with the planner's verdicts."""

from __future__ import annotations

from typing import Any

from app.hub.hub_item import HubFit, HubItem

GIB = 1024**3
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
REVISION = "3f6a6f1b" * 5


def _model(name: str, parameters: float, licence: str, *counts: int, **more: Any) -> HubItem:
    return HubItem(
        kind="model",
        name=name,
        num_parameters=round(parameters),
        size_bytes=round(parameters * 2),
        licence=licence,
        downloads=counts[0],
        likes=counts[1],
        revision=REVISION,
        **more,
    )


def hub_items() -> tuple[HubItem, ...]:
    """Return models and data sets as the hub lists them."""
    return (
        _model("Qwen/Qwen3-8B", 8.19e9, "apache-2.0", 8_412_000, 1204, is_cached=True),
        _model(LLAMA, 8.03e9, "llama3.1", 6_100_300, 5310, is_gated=True),
        _model("HuggingFaceTB/SmolLM2-135M", 134_515_008, "apache-2.0", 912_400, 180),
        _model("Qwen/Qwen3-32B", 32.8e9, "apache-2.0", 702_000, 640),
        _model("meta-llama/Llama-3.1-405B", 405.9e9, "llama3.1", 81_020, 960, is_gated=True),
        _model("acme/vision-encoder-large", 1.1e9, "mit", 44_100, 31),
        _model("acme/a-model-with-quite-a-long-name-instruct-2511", 3.2e9, "", 312, 2),
        HubItem(
            kind="data", name="HuggingFaceH4/ultrachat_200k", size_bytes=round(1.5 * GIB),
            rows="100K<n<1M", licence="mit", downloads=48_300, likes=620,
        ),
        HubItem(
            kind="data", name="tatsu-lab/alpaca", size_bytes=24 * 1024**2, rows="10K<n<100K",
            licence="cc-by-nc-4.0", downloads=61_020, likes=840, is_cached=True,
        ),
    )  # fmt: skip


def hub_fits() -> tuple[HubFit, ...]:
    """Return the verdicts on most of those models."""
    return (
        HubFit(
            model="Qwen/Qwen3-8B", verdict="fits", adapter="qlora", text="QLoRA on all three PCs"
        ),
        HubFit(
            model=LLAMA, verdict="fits", adapter="qlora",
            text="QLoRA on all three PCs",
        ),
        HubFit(
            model="HuggingFaceTB/SmolLM2-135M", verdict="fits", text="LoRA on beta", adapter="lora"
        ),
        HubFit(
            model="Qwen/Qwen3-32B", verdict="fits", adapter="qlora",
            text="QLoRA on alpha and beta, with its weights streamed",
        ),
        HubFit(
            model="meta-llama/Llama-3.1-405B", verdict="too-large",
            text="Too large: QLoRA needs 211 GiB on beta, which has 22.9 GiB",
        ),
        HubFit(
            model="acme/vision-encoder-large", verdict="unusable",
            text="The model is an image encoder (ViT), not a causal language model",
        ),
    )  # fmt: skip
