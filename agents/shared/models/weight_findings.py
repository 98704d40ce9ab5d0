"""Judge the weights of a model's folder: files that Transformers would load, and their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agents.shared.models.findings import (
    FILE_AGAIN,
    ORIGINAL,
    OTHER_MODEL,
    ModelFinding,
    printable,
    show,
)
from agents.shared.models.model_files import INDEX, WEIGHTS, ModelFiles
from agents.shared.models.safetensors_header import TensorInfo
from agents.shared.models.tensors import find_tensor_problems

_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_NARROW = re.compile(r"F[468](_|$)")
_SAVE_AGAIN = "Save it again with model.save_pretrained(folder, safe_serialization=True)"


def gather_weights(files: ModelFiles) -> tuple[dict[str, TensorInfo], list[ModelFinding]]:
    """Return the tensors that Transformers would load, and what is wrong with their files."""
    if files.weights is None:
        named = files.config("config.json").get("transformers_weights")
        text = f"has a config.json that takes weights from {show(named)}"
        return {}, [ModelFinding(kind="config", message=text, hint=OTHER_MODEL)]
    if not files.weights:
        return {}, [_explain_no_weights(sorted(files.names))]
    if files.weights.endswith(".json"):
        return _gather_shards(files, files.weights)
    return _take_header(files, files.weights)


def compare_weights(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], *, is_quantized: bool
) -> list[ModelFinding]:
    """Return what is wrong with the tensors themselves.

    Args:
        config: of the language model, see `text_of`.
        tensors: of all files.
        is_quantized: whether the config says so.
    """
    # Without a word of it in the config, as a converter that died leaves them.
    packed = next((n for n in tensors if n.endswith((".qweight", ".qzeros", ".weight_packed"))), "")
    # Scales beside weights may be narrow in a model that is not.
    narrow = next(
        (n for n, one in tensors.items() if _NARROW.match(one.dtype) and n.endswith(".weight")), ""
    )
    if not is_quantized and (packed or narrow):
        message = f"holds quantized weights, such as {printable(packed or narrow)}"
        return [ModelFinding(kind="quantized", message=message, hint=ORIGINAL)]
    return [
        ModelFinding(
            kind="tensors",
            message=f"does not hold the weights that its config.json describes: {text}",
            hint="Download the folder again, or save model and config together",
        )
        for text in find_tensor_problems(config, tensors, packed=is_quantized)
    ][:1]


def _explain_no_weights(names: list[str]) -> ModelFinding:
    endings = {Path(name).suffix for name in names}
    hint = _SAVE_AGAIN
    message = "has no weights in safetensors format"
    if ".safetensors" in endings:
        shards = [name for name in names if name.endswith(".safetensors")]
        message = f"has neither {WEIGHTS} nor {INDEX}, only {shards[0]}"
        hint = "Download the whole folder, or rename the file if it holds all weights"
    elif ".gguf" in endings:
        message += ", only a GGUF file, which is a finished export"
        hint = ORIGINAL
    elif endings & _PICKLES:
        message += ", only pickled ones, which can run code and are never sent"
    return ModelFinding(kind="no_weights", message=message, hint=hint)


def _take_header(files: ModelFiles, name: str) -> tuple[dict[str, TensorInfo], list[ModelFinding]]:
    if name in files.headers:
        return files.headers[name], []
    message = f"has a damaged file: {printable(name)} {files.problems[name]}"
    return {}, [ModelFinding(kind="weights", message=message, hint=FILE_AGAIN, file=name)]


def _gather_shards(
    files: ModelFiles, index: str
) -> tuple[dict[str, TensorInfo], list[ModelFinding]]:
    if index not in files.objects:
        problem = files.problems.get(index, "is missing")
        message = f"has a damaged list of its files: {index} {problem}"
        return {}, [ModelFinding(kind="index", message=message, hint=FILE_AGAIN, file=index)]
    places: Mapping[str, str] = files.config(index)["weight_map"]
    tensors: dict[str, TensorInfo] = {}
    held: dict[str, str] = {}
    for name in sorted(set(places.values())):
        found, findings = _take_header(files, name)
        if findings:
            return {}, findings
        if doubled := sorted(found.keys() & held):
            both = f"{printable(held[doubled[0]])} and {printable(name)}"
            message = f"holds {printable(doubled[0])} twice, in {both}"
            return {}, [ModelFinding(kind="index", message=message, hint=FILE_AGAIN, file=name)]
        tensors.update(found)
        held.update(dict.fromkeys(found, name))
    findings = list(_find_misplaced(index, places, held))
    return ({} if findings else tensors), findings


def _find_misplaced(
    index: str, places: Mapping[str, str], held: Mapping[str, str]
) -> Iterator[ModelFinding]:
    lost = [name for name, file in places.items() if held.get(name) != file]
    if lost:
        message = (
            f"does not hold what {index} says: {printable(lost[0])} is not in "
            f"{printable(places[lost[0]])}" + (f", nor are {len(lost) - 1} more" * (len(lost) > 1))
        )
        yield ModelFinding(kind="index", message=message, hint=FILE_AGAIN, file=index)
