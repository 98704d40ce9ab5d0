"""Read the files of a model's folder, each once, before they are judged.

Only headers of weights are read: a folder of hundreds of gigabytes takes milliseconds. The folder
is untrusted, so every file has a size limit, and no link may lead out of the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

from agents.contract.model_files import MAX_INDEX_BYTES, find_weights, is_plain
from agents.shared.files.folder_files import open_regular
from agents.shared.models.config import MOST_BYTES, parse_config
from agents.shared.models.findings import printable, show
from agents.shared.models.safetensors_header import MAX_TENSORS, TensorInfo, read_header

Parts = Literal["all", "tokenizer", "present", "config"]
"""Parts to inspect: `all`; `tokenizer`: with config; `present`: config and other present files;
`config`: alone."""
MAX_TOKENIZER_BYTES = 256 << 20
"""Maximum size of tokenizer.json, in bytes; for a vocabulary of 262,000 tokens it has 33 MB."""
MAX_JSON_BYTES = 64 << 20
"""Maximum size of other JSON files of a tokenizer, in bytes."""
MAX_TEMPLATE_BYTES = 4 << 20
"""Maximum size of a chat template, in bytes; the longest known ones have about ten thousand."""
TOKENIZER_SOURCES = (
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model.v3",
    "tekken.json", "tiktoken.model", "vocab.txt",
)  # fmt: skip
"""Files that each hold a complete tokenizer."""
TEMPLATES = ("chat_template.jinja", "chat_template.json")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
# Larger files are parsed only if time does not matter, since a plan must answer at once.
_QUICK_BYTES = 1 << 20
_END_BYTES = 64
_Parse = Callable[[bytes], dict[str, Any] | None]


@dataclass(kw_only=True, slots=True)
class ModelFiles:
    """Contents of a model's folder. The mappings lack missing files."""

    names: frozenset[str] = frozenset()
    """Names of all entries that are not hidden."""
    objects: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """Objects of JSON files by file; None: too large to be parsed now, or a template."""
    starts: dict[str, bytes] = field(default_factory=dict)
    """First bytes of files that a tokenizer is made from, without leading white space."""
    headers: dict[str, dict[str, TensorInfo]] = field(default_factory=dict)
    """Tensors of each weight file that Transformers would load, up to the first damaged file."""
    weights: str | None = ""
    """File from which Transformers takes the weights, or the list of them; empty: neither exists;
    None: the config names one that is not a file of the folder."""
    problems: dict[str, str] = field(default_factory=dict)
    """Reason why a file cannot be used, by file; it begins with a verb."""

    def config(self, name: str) -> dict[str, Any]:
        """Return the object in a file; empty: it cannot be used."""
        return self.objects.get(name) or {}


def read_model_files(folder: Path, *, parts: Parts, whole: bool) -> ModelFiles:
    """Return the contents of a model's folder; an unreadable file is a problem, not an error.

    Args:
        folder: the folder.
        parts: parts that must be in it.
        whole: True to parse a large tokenizer.json, too, which takes up to half a second.
    """
    files = ModelFiles(names=_list_names(folder))
    for name in ("config.json", "adapter_config.json"):
        _read_object(folder, name, files, MOST_BYTES, _parse_config)
    has_weights = any(name.endswith(".safetensors") for name in files.names)
    if parts == "all" or (parts == "present" and has_weights):
        _read_weights(folder, files)
    if parts != "config" and "adapter_config.json" not in files.names:
        _read_tokenizer(folder, files, whole=whole)
    return files


def _list_names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(p.name for p in folder.iterdir() if not p.name.startswith("."))
    except OSError:
        return frozenset()


def _read(folder: Path, name: str, files: ModelFiles, take: Callable[[BinaryIO], None]) -> None:
    """Pass an open file to `take`; record a problem unless the file is missing."""
    try:
        with open_regular(folder / name, folder) as file:
            take(file)
    except FileNotFoundError:
        pass
    except ValueError as error:
        files.problems[name] = str(error).strip()
    except OSError as error:
        files.problems.setdefault(name, f"cannot be used: {error.strerror}")


def _read_object(
    folder: Path, name: str, files: ModelFiles, limit: int, parse: _Parse, quick: int | None = None
) -> None:
    """Read the object of a JSON file; of a file beyond `quick` bytes, check only its ends."""

    def take(file: BinaryIO) -> None:
        size = file.seek(0, 2)
        file.seek(0)
        if size > limit:
            raise ValueError(f"cannot be used: it has more than {limit} bytes")
        if quick is None or size <= quick:
            files.objects[name] = parse(file.read(limit))
            return
        # A JSON object that was cut off lacks its last brace.
        start = file.read(_END_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        file.seek(-_END_BYTES, 2)
        if start != b"{" or file.read().rstrip()[-1:] != b"}":
            raise ValueError("is cut off, or no JSON object")
        files.objects[name] = None

    _read(folder, name, files, take)


def _parse_config(data: bytes) -> dict[str, Any]:
    return parse_config(data, "")


def _parse_object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {str(error)[:80]}") from error
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def _read_weights(folder: Path, files: ModelFiles) -> None:
    named = files.config("config.json").get("transformers_weights")
    files.weights = find_weights(files.names, named)
    shards = [files.weights] if files.weights else []
    if files.weights and files.weights.endswith(".json"):
        _read_object(folder, files.weights, files, MAX_INDEX_BYTES, _parse_index)
        shards = sorted(set(files.config(files.weights).get("weight_map", {}).values()))
    for name in shards:
        _read(folder, name, files, partial(_keep_header, files, name))
        if name not in files.headers:
            files.problems.setdefault(name, "is missing")
            return  # one damaged file suffices to refuse the folder


def _parse_index(data: bytes) -> dict[str, Any]:
    index = parse_config(data, "")
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError("has no weight_map")
    # Transformers requires it, too.
    if not isinstance(index.get("metadata"), dict):
        raise ValueError("has no metadata")
    if len(places) > MAX_TENSORS:
        raise ValueError(f"names {len(places):,} tensors, and at most {MAX_TENSORS:,} are allowed")
    for tensor, name in places.items():
        # A path with folders could name any file of the PC.
        if not is_plain(name, (".safetensors",)):
            raise ValueError(
                f"puts {printable(tensor)} into {show(name)}, which is not a file of the folder"
            )
    return index


def _keep_header(files: ModelFiles, name: str, file: BinaryIO) -> None:
    files.headers[name] = read_header(file)


def _read_tokenizer(folder: Path, files: ModelFiles, *, whole: bool) -> None:
    quick = None if whole else _QUICK_BYTES
    _read_object(folder, "tokenizer.json", files, MAX_TOKENIZER_BYTES, _parse_object, quick)
    for name in _SETTINGS:
        _read_object(folder, name, files, MAX_JSON_BYTES, _parse_object, quick)
    for name in TEMPLATES:
        _read_object(folder, name, files, MAX_TEMPLATE_BYTES, lambda data: None)
    if "tokenizer.json" in files.names:
        return
    for name in (*TOKENIZER_SOURCES, "vocab.json", "merges.txt"):
        _read(folder, name, files, partial(_keep_start, files, name))
    _read_object(folder, "vocab.json", files, MAX_JSON_BYTES, _parse_object)


def _keep_start(files: ModelFiles, name: str, file: BinaryIO) -> None:
    files.starts[name] = file.read(_END_BYTES).lstrip()
