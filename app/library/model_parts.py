"""Choose the files of a model that a node needs for its stages of a pipeline."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agents.contract.messages import to_wire
from agents.contract.model_cut import Stage
from agents.contract.run import FileEntry
from agents.shared.files.folder_files import open_regular
from agents.shared.models.model_parts import PARTS_PREFIX, ModelParts, Outline, find_needless_files
from agents.shared.models.safetensors_header import HeaderError, TensorInfo, read_header
from agents.shared.models.tensors import find_ends, map_layers
from app.library.bundles import Source

_LENGTH_BYTES = 8


def choose_parts(model: Source, stages: Sequence[Stage], num_layers: int) -> Source:
    """Return the source of the files that a node needs; the model itself if it needs all.

    Args:
        model: source of the whole model.
        stages: stages of the node's ranks.
        num_layers: number of layers of the model.
    """
    if model.root is None or model.destination is None or model.member is not None:
        return model
    root, entries = Path(model.root), {entry.path: entry for entry in model.files}
    with contextlib.suppress(OSError, HeaderError, ValueError):
        tensors = {}
        for path in entries:
            if path.endswith(".safetensors"):
                with open_regular(root / path, root) as file:
                    tensors[path] = read_header(file)
        config = json.loads((root / "config.json").read_bytes())
        needless = _find_needless(config, tensors, stages, num_layers)
        if needless:
            return _part(model, needless, stages, is_tied=_is_tied(config))
    return model


def _find_needless(
    config: dict[str, object],
    tensors: dict[str, dict[str, TensorInfo]],
    stages: Sequence[Stage],
    num_layers: int,
) -> list[str]:
    every = {name: info for found in tensors.values() for name, info in found.items()}
    layer_of = map_layers(config, every)
    # A model whose layers have unusual names is sent whole.
    if set(layer_of.values()) != set(range(num_layers)):
        return []
    return find_needless_files(
        tensors, layer_of, find_ends(every), stages, is_tied=_is_tied(config)
    )


def _is_tied(config: dict[str, object]) -> bool:
    """Return whether the head may be the embedding."""
    # Families differ in the default of a missing value, so it counts as tied.
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    return config.get("tie_word_embeddings", inner.get("tie_word_embeddings")) is not False


def _part(model: Source, needless: list[str], stages: Sequence[Stage], *, is_tied: bool) -> Source:
    root = Path(model.root or "")
    has_head = any(stage.has_head for stage in stages)
    parts = ModelParts(
        files=model.files,
        outlines=tuple(_outline(root, path) for path in needless),
        layers=tuple(
            sorted({n for stage in stages for n in range(stage.first_layer, stage.stop_layer)})
        ),
        has_embedding=any(stage.has_embedding for stage in stages) or (has_head and is_tied),
        has_head=has_head,
    )
    text = json.dumps(to_wire(parts), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    name = f"{PARTS_PREFIX}{digest[:16]}.json"
    kept = tuple(entry for entry in model.files if entry.path not in needless)
    own = FileEntry(path=name, size_bytes=len(text), sha256=digest)
    # All cuts of a model share one folder on the node, so a resume with another cut sends only the
    # missing files.
    return replace(
        model,
        destination=f"{model.destination}-parts",
        files=(*kept, own),
        member=name,
        written=((name, text),),
    )


def _outline(root: Path, path: str) -> Outline:
    with open_regular(root / path, root) as file:
        start = file.read(_LENGTH_BYTES)
        raw = start + file.read(int.from_bytes(start, "little"))
    return Outline(path=path, header_base64=base64.b64encode(raw).decode("ascii"))
