"""Inspect a model's folder before anything is sent or loaded: config, weights and tokenizer.

Master and nodes use the same function, so that an unusable folder is named at once, on either side.
Its files are read first (`model_files`), then judged here. Each finding has a kind; a folder has
findings only if no run can use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.contract.model_files import INDEX, WEIGHTS
from agents.shared.models.config_findings import find_config_problems, quantization_of, text_of
from agents.shared.models.findings import (
    FILE_AGAIN,
    ORIGINAL,
    OTHER_MODEL,
    ModelFinding,
    printable,
    show,
)
from agents.shared.models.model_files import (
    TEMPLATES,
    TOKENIZER_SOURCES,
    ModelFiles,
    Parts,
    read_model_files,
)
from agents.shared.models.safetensors_header import TensorInfo
from agents.shared.models.tensors import find_tensor_problems

_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_NARROW = re.compile(r"F[468](_|$)")
_SAVE_AGAIN = "Save it again with model.save_pretrained(folder, safe_serialization=True)"

# ------------------------------------------------------------------- weights


def gather_weights(files: ModelFiles) -> tuple[dict[str, TensorInfo], list[ModelFinding]]:
    """Return the tensors that Transformers would load, and the faults of their files."""
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
    """Return the faults of the tensors themselves.

    Args:
        config: config of the language model, see `text_of`.
        tensors: tensors of all files.
        is_quantized: True if the config says so.
    """
    # Some converters leave quantized weights without saying so in the config.
    packed = next((n for n in tensors if n.endswith((".qweight", ".qzeros", ".weight_packed"))), "")
    # Only weights count: scales may be narrow in an unquantized model.
    weights = ((name, one) for name, one in tensors.items() if name.endswith(".weight"))
    narrow = next((name for name, one in weights if _NARROW.match(one.dtype)), "")
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
        # The two may differ, and only one would be loaded.
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


# ------------------------------------------------------------------- tokenizer

_MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")
_PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
_MAX_TOKEN_CHARS = 60
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_NO_SOURCE = (b"<!DOCTYPE", b"<html", b"version https://git-lfs")
# Files whose read problems are reported, in this order.
_READ = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    *TEMPLATES,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """Properties of the tokenizer files."""

    problems: tuple[tuple[str, str], ...] = ()
    """Pairs of a file and its fault, which begins with a verb."""
    is_there: bool = True
    """True if a tokenizer can be made from at least one file."""
    has_template: bool = False
    """True if there is a chat template."""
    highest: tuple[str, int] | None = None
    """Added token with the highest number; None: no such token, or the file was not parsed."""
    added: tuple[tuple[str, int], ...] = ()
    """Added tokens with their numbers; empty: none, or the file was not parsed."""
    other_templates: tuple[str, ...] = ()
    """Names of its chat templates if none is the default."""
    may_end: bool = True
    """False if it has neither an end token nor a chat template, so that nothing ends an answer."""


def judge_tokenizer(files: ModelFiles) -> TokenizerFiles:
    """Return the properties and faults of the tokenizer files of a folder."""
    problems = [(name, files.problems[name]) for name in _READ if name in files.problems]
    tokenizer = files.config("tokenizer.json")
    if files.objects.get("tokenizer.json") is not None:
        problems += [("tokenizer.json", text) for text in _find_model_problems(tokenizer)]
    settings = files.config("tokenizer_config.json")
    problems += [("tokenizer_config.json", text) for text in _find_setting_problems(settings)]
    has_file = not files.names.isdisjoint(TEMPLATES)
    has_template = has_file or bool(settings.get("chat_template"))
    added = _find_added(tokenizer)
    if "tokenizer.json" not in files.names and not problems:
        problems += _find_source_problems(files)
    return TokenizerFiles(
        problems=tuple(problems),
        is_there=_is_there(files.names),
        has_template=has_template,
        highest=max(added, key=lambda pair: pair[1], default=None),
        added=added,
        other_templates=() if has_file else _find_other_templates(settings.get("chat_template")),
        may_end=has_template or _has_end(files, settings),
    )


def _find_model_problems(tokenizer: dict[str, Any]) -> Iterator[str]:
    """Yield the faults that keep the tokenizers library from reading tokenizer.json."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    if not isinstance(model, dict):
        yield "has no object named model"
        return
    kind = model.get("type")
    if kind is not None and kind not in _MODELS:
        yield f"has a model of the unknown type {ascii(kind)[:40]}"
    elif not isinstance(model.get("vocab"), (dict, list)) or not model["vocab"]:
        yield "has no vocabulary"
    if added is not None and not (
        isinstance(added, list) and all(isinstance(one, dict) for one in added)
    ):
        yield "has added_tokens that are not a list of objects"


def _find_setting_problems(settings: dict[str, Any]) -> Iterator[str]:
    for name in _SPECIAL:
        if not isinstance(settings.get(name), (str, dict, type(None))):
            yield f"has an {name} that is not text"
    # Some models have several templates, each with a name.
    if not isinstance(settings.get("chat_template"), (str, list, dict, type(None))):
        yield "has a chat_template that is not text"


def _find_source_problems(files: ModelFiles) -> Iterator[tuple[str, str]]:
    """Yield the faults of the files from which a tokenizer would be made."""
    for name in (*TOKENIZER_SOURCES, "vocab.json", "merges.txt"):
        start = files.starts.get(name)
        if start is None and name in files.problems:
            yield name, files.problems[name]
        elif start == b"":
            yield name, "is empty"
        # A failed download leaves a page of HTML, and git without LFS a pointer.
        elif start is not None and start.startswith(_NO_SOURCE):
            yield name, "is a page or a pointer, not the file itself"
    if "vocab.json" in files.starts and "vocab.json" in files.problems:
        yield "vocab.json", files.problems["vocab.json"]


def _is_there(names: frozenset[str]) -> bool:
    if not names.isdisjoint(("tokenizer.json", *TOKENIZER_SOURCES)):
        return True
    return any(n.endswith(".tiktoken") for n in names) or {"vocab.json", "merges.txt"} <= names


def _find_added(tokenizer: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    added = tokenizer.get("added_tokens")
    entries = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    return tuple(
        (one["content"][:_MAX_TOKEN_CHARS], one["id"])
        for one in entries
        if type(one.get("id")) is int and isinstance(one.get("content"), str)
    )


def _find_other_templates(templates: object) -> tuple[str, ...]:
    """Return the names of chat templates without a default."""
    named = templates if isinstance(templates, list) else ()
    names = [str(one.get("name")) for one in named if isinstance(one, dict)]
    return () if "default" in names else tuple(names)


def _has_end(files: ModelFiles, settings: dict[str, Any]) -> bool:
    if settings.get("eos_token") or files.config("special_tokens_map.json").get("eos_token"):
        return True
    # Other classes have an end token by default.
    known = "tokenizer_config.json" in files.objects
    return not known or settings.get("tokenizer_class") not in _PLAIN_CLASSES


# ------------------------------------------------------------------- folder


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """Contents of a model's folder, and its faults."""

    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict, repr=False)
    """Tensors of all weight files by name; empty if they cannot be read."""
    tokenizer: TokenizerFiles = field(default_factory=TokenizerFiles)
    findings: tuple[ModelFinding, ...] = ()
    """Reasons against training it, the most important first."""


def inspect_model(folder: Path, *, parts: Parts = "all", whole: bool = True) -> ModelFolder:
    """Inspect a model's folder. Never raises: an unreadable file is a finding.

    Args:
        folder: the folder.
        parts: parts that must be in it.
        whole: True to parse large tokenizers, too, which takes up to half a second.
    """
    files = read_model_files(folder, parts=parts, whole=whole)
    config, has_config = files.config("config.json"), "config.json" in files.names
    broken, adapter = _find_broken_config(files), _find_adapter(files)
    findings = [broken] if broken else list(find_config_problems(config))
    text, method = text_of(config), quantization_of(config)
    # An adapter's folder has no config, and its own finding is more helpful.
    findings = [adapter, *(findings if has_config else [])] if adapter else findings
    tensors: dict[str, TensorInfo] = {}
    has_weights = any(name.endswith(".safetensors") for name in files.names)
    if parts == "all" or (parts == "present" and has_weights):
        tensors, problems = gather_weights(files)
        findings += problems if not adapter or has_config else []
        # Only intact files are compared: damaged ones would give misleading differences.
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
        message = "has no tokenizer: neither tokenizer.json nor a file to make it from"
        yield ModelFinding(kind="tokenizer", message=message, hint=hint)
