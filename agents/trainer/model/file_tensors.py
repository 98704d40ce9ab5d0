"""Mapping from the tensors in a model's files to the parameters of its class."""

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
    """Return the names of tensors in files, grouped by the (first) parameter that they become.

    Args:
        model: model of Transformers, with or without weights.
        names: names of tensors in its files.
        mapping: conversion to parameters by Transformers (`weight_mapping`); None for no change.
    """
    renamings = [rule for rule in mapping or () if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping or () if isinstance(rule, WeightConverter)]
    known, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, _ = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target = name
        groups.setdefault(target, []).append(name)
    return groups
