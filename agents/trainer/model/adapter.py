"""Add an adapter to a base model, which may lack layers that other ranks hold.

The names and classes of the whole model determine the adapter's settings, so every rank has the
settings that a single process would have. PEFT then finds the targets that are on this rank.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from peft import LoraConfig, get_peft_model
from peft.tuners import tuners_utils
from peft.utils.constants import DUMMY_TARGET_MODULES, MIN_TARGET_MODULES_FOR_OPTIMIZATION
from torch import nn
from transformers.pytorch_utils import Conv1D

from agents.contract.spec import AdapterSpec, RunSpec
from agents.errors import ExpectedError, first_line
from agents.trainer.model import experts
from agents.trainer.model.layer_loading import AbsentModule, as_whole
from agents.trainer.model.nf4_experts import find_routers

# PEFT adapts no output projection of these families' Mamba layers: training kernels skip it.
_MAMBA_TYPES = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
_MAMBA_OUTPUT = "out_proj"
# Settings with which PEFT adds no adapter, but everything else that comes with one.
_NO_TARGETS: dict[str, Any] = {
    "target_modules": DUMMY_TARGET_MODULES,
    "target_parameters": None,
    "exclude_modules": None,
}


def add_adapter(
    model: nn.Module, spec: RunSpec, non_text: Sequence[str]
) -> tuple[nn.Module, LoraConfig]:
    """Return a model with an adapter, as PEFT wraps it, and the settings of the adapter.

    Args:
        model: base model; it gets no adapter if all adapted layers are on other ranks.
        spec: source of the adapter's settings.
        non_text: modules that no text passes through.

    Raises:
        ExpectedError: its targets are not in this model.
    """
    with as_whole(model):
        lora = _lora_config(spec.adapter, model, non_text)
        _require_targets(model, lora, spec, non_text)
        targets = lora.target_modules
        if targets == "all-linear":
            # A stage sees only its own layers; the names must be those of the whole model.
            targets = _name_all_linear(model, lora)
    # PEFT refuses targets that it does not find, so absent parts are excluded.
    settings = _limit_to_parts(model, lora)
    try:
        with experts.names_as_they_are():
            peft_model: nn.Module = get_peft_model(model, settings)
    except ValueError as error:
        names = _list_names(_find_linears(dict(model.named_modules())))
        raise ExpectedError(
            f"The adapter does not fit this model: {first_line(error)}.",
            f"Use all-linear, or names from {names}",
        ) from error
    experts.connect_adapters(peft_model)
    # PEFT detects whether a class stores weights transposed.
    lora.target_modules, lora.fan_in_fan_out = targets, settings.fan_in_fan_out
    return peft_model, lora


def find_unfit_linears(model: nn.Module) -> list[str]:
    """Return the linear layers whose class or family no adapter fits."""
    is_mamba = model.config.model_type in _MAMBA_TYPES
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (_is_more_than_linear(module) or (is_mamba and name.endswith(f".{_MAMBA_OUTPUT}")))
    ]


def _is_more_than_linear(module: nn.Module) -> bool:
    """Return whether it is a class of one model, like Llama 4's router, which returns a tuple."""
    own = type(module).__module__.startswith("transformers.models.")
    return isinstance(module, nn.Linear) and own


def _lora_config(adapter: AdapterSpec, model: nn.Module, non_text: Sequence[str]) -> LoraConfig:
    left_out = list(non_text)
    if adapter.targets == "all-linear":
        # A router that is a linear layer is adapted only if the user names it.
        left_out += [name for name, _ in find_routers(model)]
        left_out += find_unfit_linears(model)
    targets = adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets)
    # PEFT writes the number into its config file: 32, not 32.0.
    alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=alpha,
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        target_modules=targets,
        target_parameters=experts.name_targets(model) if adapter.experts else None,
        exclude_modules=_match_inside(dict.fromkeys(left_out)) if left_out else None,
        task_type="CAUSAL_LM",
    )


def _match_inside(names: Iterable[str]) -> str:
    """Return a regular expression for some modules and everything inside them."""
    return rf"({'|'.join(map(re.escape, names))})(\..*)?"


def _require_targets(
    model: nn.Module, lora: LoraConfig, spec: RunSpec, non_text: Sequence[str]
) -> None:
    """Check that the adapter's targets are linear layers of the whole model.

    Raises:
        ExpectedError: some are not.
    """
    out = tuple(f"{name}." for name in non_text)
    modules = {k: module for k, module in model.named_modules() if not f"{k}.".startswith(out)}
    layers = _find_linears(modules)
    hint = f"Use all-linear, or names from {_list_names(layers)}"
    targets = spec.adapter.targets
    if targets != "all-linear":
        for target in (targets,) if isinstance(targets, str) else targets:
            meant = _find_meant(target, modules, is_pattern=isinstance(targets, str))
            if not meant & layers:
                raise ExpectedError(
                    f"adapter.targets: this model has no linear layer {target!r}.", hint
                )
            for other in sorted(meant - layers):
                raise ExpectedError(
                    f"adapter.targets: {target!r} also matches {other or 'the model'!r}, "
                    "which is not a linear layer.",
                    hint,
                )
    if spec.adapter.experts and not lora.target_parameters:
        raise ExpectedError(
            "adapter.experts is true, but this model has no experts that an adapter fits.",
            "Set adapter.experts to false",
        )


def _name_all_linear(model: nn.Module, lora: LoraConfig) -> set[str]:
    """Return the names by which PEFT describes an adapter of all linear layers of a model."""
    named = tuners_utils._maybe_include_all_linear_layers(copy.copy(lora), model)
    found = set(named.target_modules or ())
    # PEFT shortens long lists of names to minimal endings.
    if len(found) < MIN_TARGET_MODULES_FOR_OPTIMIZATION:
        return found
    others = {name for name, _ in model.named_modules()} - found
    return set(tuners_utils._find_minimal_target_modules(found, others))


def _limit_to_parts(model: nn.Module, lora: LoraConfig) -> LoraConfig:
    """Return the settings with which PEFT adapts the parts of a model on this rank."""
    modules = dict(model.named_modules())
    absent = [name for name, part in modules.items() if isinstance(part, AbsentModule)]
    if not absent:
        return lora
    if not _has_targets(model, modules, lora):
        return replace(lora, **_NO_TARGETS)
    return replace(
        lora,
        exclude_modules="|".join(filter(None, (lora.exclude_modules, _match_inside(absent)))),
        target_parameters=lora.target_parameters if experts.name_targets(model) else None,
    )


def _has_targets(model: nn.Module, modules: Mapping[str, nn.Module], lora: LoraConfig) -> bool:
    """Return whether an adapter has targets in the parts of a model on this rank."""
    if lora.target_parameters and experts.name_targets(model):
        return True
    targets, linears = lora.target_modules, _find_linears(modules)
    if targets == "all-linear":
        return bool(linears)
    names = [targets] if isinstance(targets, str) else list(targets or ())
    is_pattern = isinstance(targets, str)
    return any(_find_meant(name, modules, is_pattern=is_pattern) & linears for name in names)


def _find_linears(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of the linear layers that an adapter fits."""
    return {
        name
        for name, module in modules.items()
        if isinstance(module, (nn.Linear, Conv1D)) and not _is_more_than_linear(module)
    }


def _list_names(layers: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in layers}))


def _find_meant(target: str, modules: Mapping[str, nn.Module], *, is_pattern: bool) -> set[str]:
    """Return the modules that PEFT selects by a regular expression or the ending of a name."""
    if not is_pattern:
        return {name for name in modules if f".{name}".endswith(f".{target}")}
    return {name for name in modules if re.fullmatch(target, name)}
