"""Which tensors of a model's files become which parameter of its class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


def group_by_parameter(model: Any, names: Iterable[str], mapping: Any) -> dict[str, list[str]]:
    """Return the names of tensors in files by the (first) parameter that they become.

    Args:
        model: of Transformers, with or without weights.
        names: of tensors in its files.
        mapping: how Transformers turns them into parameters (`weight_mapping`); None: as they are.
    """
    renamings = [one for one in mapping or () if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping or () if isinstance(one, WeightConverter)]
    known, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, _ = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target = name
        groups.setdefault(target, []).append(name)
    return groups
