"""Inspect a model's folder before anything is sent or loaded: configs, weights and tokenizer.

Master and nodes use the same function, so that a folder that cannot be trained is named at once,
wherever it lies. Its files are read first (`model_files`), then judged here. Each finding has a
kind; it is an error only if no run can come of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.shared.models.config_findings import (
    find_config_problems,
    quantization_of,
    text_of,
)
from agents.shared.models.findings import FILE_AGAIN, ModelFinding, show
from agents.shared.models.model_files import ModelFiles, Parts, read_model_files
from agents.shared.models.safetensors_header import TensorInfo
from agents.shared.models.tokenizer import TokenizerFiles, judge_tokenizer
from agents.shared.models.weight_findings import compare_weights, gather_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """What a model's folder holds, and what is wrong with it."""

    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict, repr=False)
    """Tensors of all files of weights by name; empty if they cannot be read."""
    tokenizer: TokenizerFiles = field(default_factory=TokenizerFiles)
    findings: tuple[ModelFinding, ...] = ()
    """Reasons why it cannot be trained, the most important first."""


def inspect_model(folder: Path, *, parts: Parts = "all", whole: bool = True) -> ModelFolder:
    """Inspect a model's folder. Never raises: what cannot be read is a finding.

    Args:
        folder: the folder.
        parts: what must be in it.
        whole: also parse large tokenizers, which takes up to half a second.
    """
    files = read_model_files(folder, parts=parts, whole=whole)
    config, has_config = files.config("config.json"), "config.json" in files.names
    broken, adapter = _find_broken_config(files), _find_adapter(files)
    findings = [broken] if broken else list(find_config_problems(config))
    text, method = text_of(config), quantization_of(config)
    # An adapter's folder has no config, and its own finding says more.
    findings = [adapter, *(findings if has_config else [])] if adapter else findings
    tensors: dict[str, TensorInfo] = {}
    has_weights = any(name.endswith(".safetensors") for name in files.names)
    if parts == "all" or (parts == "present" and has_weights):
        tensors, problems = gather_weights(files)
        findings += problems if not adapter or has_config else []
        if tensors and not problems and not findings:
            findings += compare_weights(text, tensors, is_quantized=bool(method))
    tokenizer = TokenizerFiles()
    if not adapter and parts != "config":
        tokenizer = judge_tokenizer(files)
        findings += _find_tokenizer_problems(tokenizer, parts)
    return ModelFolder(
        config=config, tensors=tensors, tokenizer=tokenizer, findings=tuple(findings)
    )


def _find_broken_config(files: ModelFiles) -> ModelFinding | None:
    if "config.json" in files.objects:
        return None
    said = files.problems.get("config.json")
    message = f"has a config.json that {said}" if said else "has no config.json"
    hint = "Name the folder that save_pretrained or a download from the hub made"
    return ModelFinding(kind="config", message=message, hint=hint, file="config.json")


def _find_adapter(files: ModelFiles) -> ModelFinding | None:
    """Return a finding if Transformers would load an adapter from this folder."""
    if "adapter_config.json" not in files.names:
        return None
    base = str(files.config("adapter_config.json").get("base_model_name_or_path") or "")
    if "config.json" in files.names:
        # Transformers would then load the model that adapter_config.json names, not this one.
        message = "holds an adapter_config.json, which stands for another model"
        hint = "Move adapter_config.json out of the folder"
    else:
        message = "is an adapter, not a whole model"
        hint = f"Name the model that it belongs to{f': {show(base)[1:-1]}' if base else ''}"
        hint += ", or merge the adapter into it first"
    return ModelFinding(kind="adapter", message=message, hint=hint, file="adapter_config.json")


def _find_tokenizer_problems(found: TokenizerFiles, parts: Parts) -> Iterator[ModelFinding]:
    hint = (
        "Save it into the folder: AutoTokenizer.from_pretrained(the original model)"
        ".save_pretrained(folder)"
    )
    for file, text in found.problems[:1]:
        message = f"has a damaged tokenizer: {file} {text}"
        yield ModelFinding(kind="tokenizer", message=message, hint=FILE_AGAIN, file=file)
    if not found.is_there and not found.problems and parts != "present":
        message = "has no tokenizer: there is no tokenizer.json, and nothing to make one from"
        yield ModelFinding(kind="tokenizer", message=message, hint=hint)
