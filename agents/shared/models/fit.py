"""Compare a run with its model: errors, and settings that are probably not intended.

Pure: the model's folder was inspected before, or only its config is known, as for a model of the
hub. A problem names the key of the run file, since that is what the user can change.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agents.contract.node import ModelRefusal
from agents.contract.objectives import ROW_FORMATS
from agents.contract.spec import RunSpec
from agents.shared.models.config_findings import is_4_bit, quantization_of, text_of
from agents.shared.models.folder import ModelFolder
from agents.shared.models.safetensors_header import TensorInfo

_LEARNED = re.compile(r"(.*\.)?(wpe|embed_positions|position_embeddings)\.weight")
_NOT_LINEAR = re.compile(
    r"(.*\.)?(embed_\w+|wte|wpe|word_embeddings|embed_in|\w*norm\w*|ln_\w+|router)"
)
# Prefixes that Transformers adds to names of a file.
_PREFIXES = ("", "model.", "transformer.", "base_model.")
# Maximum plausible factor of scaled positions.
_MAX_FACTOR = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Misfit:
    """Value of a run that does not suit its model."""

    severity: Literal["error", "warning"]
    key: str
    """Key of the run file, such as `adapter.targets`."""
    text: str
    """Problem, without a full stop and without the key."""
    hint: str = ""
    """Advice, without a full stop."""


def find_refusals(
    name: str, model: ModelFolder, spec: RunSpec | None = None
) -> tuple[ModelRefusal, ...]:
    """Return all reasons against training a model, the most important first.

    Args:
        name: name of the model, for the messages.
        model: contents of its folder.
        spec: the run; None: any run.
    """
    found = [
        ModelRefusal(message=f"the model {name} {f.message}", hint=f.hint) for f in model.findings
    ]
    # Misfits of a damaged folder would only be consequences of the damage.
    for misfit in find_misfits(spec, model) if spec is not None and not found else ():
        if misfit.severity == "error":
            found.append(ModelRefusal(message=f"{misfit.key} {misfit.text}", hint=misfit.hint))
    return tuple(found)


def find_misfits(spec: RunSpec, model: ModelFolder) -> tuple[Misfit, ...]:
    """Return the settings of a run that do not suit its model, errors first."""
    found = [
        *_check_quantized(spec, model),
        *_check_targets(spec, model.tensors),
        *_check_length(spec, model),
        *_check_rank(spec, model.config),
        *_check_tokenizer(spec, model),
    ]
    return tuple(sorted(found, key=lambda misfit: misfit.severity))


def _check_quantized(spec: RunSpec, model: ModelFolder) -> Iterator[Misfit]:
    method = quantization_of(model.config)
    text = hint = ""
    if not method:
        return
    if spec.adapter.kind == "full":
        text = "is full, but the model is already quantized: its weights cannot be fully trained"
        hint = "Use adapter: {kind: lora}, or use the model that it was made from"
    elif spec.adapter.kind == "qlora" and not is_4_bit(model.config):
        stored = "MXFP4" if method == "mxfp4" else "8 bits"
        text = f"is qlora, but the model is stored in {stored}, which is not turned into NF4"
        hint = "Use a copy of the model in bf16, or adapter: {kind: lora}"
        hint += ", which trains on it in 16 bits" if method == "mxfp4" else ""
    if text:
        yield Misfit(severity="error", key="adapter.kind", text=text, hint=hint)
    elif method == "bitsandbytes":
        yield Misfit(
            severity="warning",
            key="model",
            text="is quantized with bitsandbytes: its adapter cannot be merged for an export",
            hint="Name the model that it was made from, which trains with adapter: {kind: qlora}",
        )


# ---------------------------------------------------------------- targets


def _check_targets(spec: RunSpec, tensors: Mapping[str, TensorInfo]) -> Iterator[Misfit]:
    targets = spec.adapter.targets
    if spec.adapter.kind == "full" or not tensors or targets == "all-linear":
        return
    modules = find_linear(tensors)
    if modules:
        yield from check_targets(targets, modules)
    if modules and isinstance(targets, str):
        yield from _check_beside(targets, modules, tensors)


def check_targets(targets: str | tuple[str, ...], modules: Iterable[str]) -> Iterator[Misfit]:
    """Yield a problem for each target that no linear layer matches.

    Args:
        targets: a regular expression, or names of layers.
        modules: full names of all linear layers.
    """
    names = _name_ends(modules)
    hint = f"Use all-linear, or names from {', '.join(names[:12])}"
    if isinstance(targets, str):
        yield from _check_pattern(targets, modules, hint)
        return
    for target in targets:
        # With a dot, so that only whole parts of a name match.
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            near = difflib.get_close_matches(target, names, n=1, cutoff=0.5)
            guess = f"; did you mean {near[0]}?" if near else ""
            text = f"names {target!r}, and this model has no such linear layer{guess}"
            yield Misfit(severity="error", key="adapter.targets", text=text, hint=hint)


def _check_pattern(pattern: str, modules: Iterable[str], hint: str) -> Iterator[Misfit]:
    # The pattern is applied to the names in Transformers, which may have a prefix.
    if not any(re.fullmatch(pattern, f"{p}{name}") for name in modules for p in _PREFIXES):
        text = f"is the pattern {pattern!r}, which matches no linear layer of this model"
        yield Misfit(severity="error", key="adapter.targets", text=text, hint=hint)


def _check_beside(
    pattern: str, modules: Sequence[str], tensors: Mapping[str, TensorInfo]
) -> Iterator[Misfit]:
    """Yield a problem if a pattern for linear layers also matches a norm, as `.*` at its end
    does.
    """
    norms = (
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 1
    )
    found = next(
        (
            (prefix, name)
            for name in norms
            for prefix in _PREFIXES
            if re.fullmatch(pattern, f"{prefix}{name}")
        ),
        None,
    )
    if found is None:
        return
    prefix, name = found
    # Only if a linear layer matches under the same prefix, as in the model.
    if any(re.fullmatch(pattern, f"{prefix}{module}") for module in modules):
        ends = "|".join(_name_ends(modules)[:12])
        yield Misfit(
            severity="error",
            key="adapter.targets",
            text=f"is the pattern {pattern!r}, which also matches {name}, no linear layer",
            hint=f"Let it end with names of linear layers: ({ends})",
        )


def _name_ends(modules: Iterable[str]) -> list[str]:
    """Return the last parts of names of linear layers, except the head's."""
    return sorted({name.rpartition(".")[2] for name in modules} - {"lm_head"})


def find_linear(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the modules whose weight is a matrix but not an embedding, and the head."""
    names = (
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 2
    )
    found = [name for name in names if not _NOT_LINEAR.fullmatch(name)]
    # A head tied to the embedding has no tensor of its own.
    return [*found, "lm_head"] if found else []


# ---------------------------------------------------------------- sizes


def _check_length(spec: RunSpec, model: ModelFolder) -> Iterator[Misfit]:
    asked = spec.sequence_tokens
    learned = next((name for name in model.tensors if _LEARNED.fullmatch(name)), None)
    if learned is not None:
        # OPT has two more rows than positions, so the config's number is better.
        rows = _longest(model.config) or model.tensors[learned].shape[0]
        if asked > rows:
            yield Misfit(
                severity="error",
                key="sequence_tokens",
                text=f"is {asked:,}, and the model has learned {rows:,} positions only",
                hint=f"Set sequence_tokens to {rows}",
            )
        return
    most = _longest(model.config)
    if most is not None and asked > most:
        # Rotary positions have no end, so training works, but the model never saw these.
        yield Misfit(
            severity="warning",
            key="sequence_tokens",
            text=f"is {asked:,}, and the model was made for {most:,} tokens: what comes after them "
            "in a row is learned badly",
            hint=f"Set sequence_tokens to {most}",
        )


def _longest(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence that a model was made for, in tokens, or None if not given.

    With scaled positions it is their scaled length: Qwen2.5's config has 32,768 and a factor
    of 4.

    >>> _longest({"max_position_embeddings": 32768, "rope_scaling": {"factor": 4.0,
    ...     "original_max_position_embeddings": 32768}})
    131072
    """
    text = text_of(config)
    keys = ("max_position_embeddings", "n_positions", "n_ctx")
    most: int | None = next((text[key] for key in keys if type(text.get(key)) is int), None)
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if most is None or not isinstance(scaling, Mapping):
        return most
    factor, first = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not 1 <= factor <= _MAX_FACTOR:
        return most
    if isinstance(first, int):
        return max(most, int(factor * first))
    # Vicuna's config has only the unscaled length.
    kind = scaling.get("rope_type", scaling.get("type"))
    return int(factor * most) if kind in ("linear", "dynamic") else most


def _check_rank(spec: RunSpec, config: Mapping[str, Any]) -> Iterator[Misfit]:
    hidden = text_of(config).get("hidden_size")
    if spec.adapter.kind != "full" and type(hidden) is int and spec.adapter.rank > hidden:
        yield Misfit(
            severity="warning",
            key="adapter.rank",
            text=f"is {spec.adapter.rank:,}, and the model's layers are {hidden:,} wide: a larger "
            "rank than that adds nothing",
            hint="16 to 64 suits most runs",
        )


def find_beyond(model: ModelFolder) -> tuple[str, ...]:
    """Return the tokens for which a model has no weights."""
    vocab = text_of(model.config).get("vocab_size")
    if type(vocab) is not int:
        return ()
    return tuple(token for token, number in model.tokenizer.added if number >= vocab and token)


def _check_tokenizer(spec: RunSpec, model: ModelFolder) -> Iterator[Misfit]:
    row = ROW_FORMATS.get(spec.data.format)
    wants_chat = row is not None and not row.is_text and model.tensors
    has_template = model.tokenizer.has_template or spec.data.chat_template is not None
    if wants_chat and model.tokenizer.is_there and not has_template:
        text = "has no chat template: a plain one is used, which the trained model needs, too"
        yield Misfit(severity="warning", key="model", text=text)
    if not model.tokenizer.may_end and spec.data.chat_template is None:
        yield Misfit(
            severity="error" if wants_chat else "warning",
            key="model",
            text="has neither a chat template nor an end token, so it cannot learn to stop",
            hint="Name its end token as eos_token in tokenizer_config.json of a copy of the model",
        )
    if (names := model.tokenizer.other_templates) and spec.data.chat_template is None:
        yield Misfit(
            severity="error" if wants_chat else "warning",
            key="model",
            text=f"has the chat templates {', '.join(map(repr, names[:12]))}, and its files do not "
            "say which of them is the default",
            hint="Choose one with data.chat_template, or rename one to default in a copy of the "
            "model's tokenizer_config.json",
        )
    vocab = text_of(model.config).get("vocab_size")
    highest = model.tokenizer.highest
    is_new = highest is not None and highest[0] in spec.data.new_tokens
    if highest is not None and type(vocab) is int and highest[1] >= vocab and not is_new:
        yield Misfit(
            severity="warning",
            key="model",
            text=f"has a tokenizer with {highest[0]!r} as token {highest[1]:,}, and weights for "
            f"{vocab:,} tokens: a row that holds it cannot be trained",
            hint="Use the model's own tokenizer, or name the token in data.new_tokens",
        )
