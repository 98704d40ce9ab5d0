"""Load the base model and add the trained parameters.

The base model always stays in evaluation mode: its own dropouts, if it has any, draw from a random
stream that depends on the split of the batch. The adapter's dropout is `dropout.CountedDropout`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from agents.contract.spec import RunSpec
from agents.errors import ExpectedError, first_line
from agents.trainer.data.tokenizer import load_tokenizer as load_tokenizer
from agents.trainer.model import dora, experts, stored_weights
from agents.trainer.model.adapter import add_adapter
from agents.trainer.model.causal_class import find_causal_class
from agents.trainer.model.dropout import DropoutClock, replace_dropouts
from agents.trainer.model.layer_holdings import ChooseLayers, hold_everything
from agents.trainer.model.layer_loading import OpenStore, compute_in, loading_layers
from agents.trainer.model.stage_ends import StageEnds
from agents.trainer.model.vocabulary import train_ends
from agents.trainer.model.weights import Report, read_by_threads
from agents.trainer.rank.device import choose_dtype
from agents.trainer.streaming.layer_stream import LayerStream

_NARROW = (torch.bfloat16, torch.float16)
# Module names of learned position embeddings (GPT-2, OPT, GPT-BigCode).
_LEARNED_POSITIONS = ("wpe", "embed_positions", "position_embeddings")
# PEFT inserts the adapter's name into parameter names, and removes it in files.
_ADAPTER = ".default."


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The base model with its trained parameters."""

    module: nn.Module
    tokenizer: Any
    clock: DropoutClock
    dtype: torch.dtype
    """Type in which the base model computes."""
    autocast: bool
    """True if that type is narrower than the trained parameters."""
    lora: LoraConfig | None
    """Settings of the adapter; None if every parameter is trained."""
    plain_template: bool
    """True if the tokenizer had no chat template and got the plain one."""
    stream: LayerStream | None = None
    """Frozen layers that are copied to the device while it computes; None if all are there."""
    stage: StageEnds | None = None
    """Layers that this rank holds; None if it holds all."""

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trained parameters under their names in checkpoint files."""
        return [
            (_name_in_files(name), parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        ]


def _name_in_files(name: str) -> str:
    """Return PEFT's name in files, without the adapter's name and magnitudes' `.weight`."""
    short = name.replace(_ADAPTER, ".")
    return short.removesuffix(".weight") if "lora_magnitude_vector" in short else short


def load_model(
    spec: RunSpec,
    path: Path,
    device: torch.device,
    report: Report | None = None,
    choose_layers: ChooseLayers = hold_everything,
    open_store: OpenStore | None = None,
) -> nn.Module:
    """Return the base model on the device, every parameter frozen.

    Args:
        spec: spec of the run.
        path: folder of the model.
        device: device of this rank.
        report: called with the progress of reading to a GPU; None for no report.
        choose_layers: decides what this rank holds; other layers are not read.
        open_store: returns the storage of streamed layers; None if no layer is streamed.

    Raises:
        ExpectedError: the folder's model cannot be loaded, or not in parts.
    """
    full = spec.adapter.kind == "full"
    dtype = choose_dtype(spec.precision, device)
    stored_weights.require_known_family(path)
    quantization = stored_weights.choose_quantization(spec.adapter.kind, path, dtype)
    if full and dtype in _NARROW:
        dtype = torch.float32  # master weights; autocast computes in half precision
    settings: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "local_files_only": True}
    settings["trust_remote_code"] = False
    if quantization is not None:
        settings["quantization_config"] = quantization
    if device.type == "cuda" or spec.adapter.kind == "qlora":
        settings["device_map"] = {"": device}
    # On a CPU the mapped files serve as weights if their type fits.
    reading = read_by_threads(device, report) if device.type == "cuda" else nullcontext()
    try:
        with reading, loading_layers(choose_layers, open_store):
            model, loaded = find_causal_class().from_pretrained(
                path, output_loading_info=True, **settings
            )
    except (torch.OutOfMemoryError, ExpectedError):
        raise
    except (
        *(OSError, ValueError, KeyError, RuntimeError, ImportError),
        *(AssertionError, AttributeError, TypeError),  # invalid values in config.json
    ) as error:
        raise ExpectedError(
            f"The model in {path} cannot be loaded: {first_line(error)}.",
            "The folder needs config.json and model.safetensors of a causal language model",
        ) from error
    _refuse_missing(loaded, path)
    model.eval()  # see the module's docstring
    model.requires_grad_(False)
    _keep_layout(model)
    compute_in(model, dtype)
    experts.use_own_products(model)
    _refuse_long_sequences(model, spec.sequence_tokens, path)
    return model


def _refuse_missing(loaded: Mapping[str, Any], path: Path) -> None:
    """Check that every weight was in the files: Transformers fills gaps with random numbers."""
    missing = sorted(str(name) for name in loaded.get("missing_keys") or ())
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise ExpectedError(
            f"The model in {path} is not whole: {missing[0]}{more} not in its files.",
            "Download the folder again, or save model and config together",
        )


def _refuse_long_sequences(model: nn.Module, sequence_tokens: int, path: Path) -> None:
    """Check that a model with learned positions has enough of them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _LEARNED_POSITIONS:
            most = getattr(model.config, "max_position_embeddings", module.num_embeddings)
            if sequence_tokens > most:
                raise ExpectedError(
                    f"The model in {path} has learned {most:,} positions, and sequence_tokens is "
                    f"{sequence_tokens:,}.",
                    f"Set sequence_tokens to {most}",
                )


def refuse_unknown_tokens(model: nn.Module, vocab_size: int, path: Path) -> None:
    """Check that the model knows every token of the data; a tokenizer may know more.

    Raises:
        ExpectedError: a token is unknown.
    """
    num_known = model.get_input_embeddings().num_embeddings
    if vocab_size > num_known:
        raise ExpectedError(
            f"The tokenizer in {path} produced token {vocab_size - 1}, but the model has only "
            f"{num_known:,} tokens, numbered from 0.",
            "Use the model's own tokenizer, or name its tokens in data.new_tokens",
        )


def _keep_layout(model: nn.Module) -> None:
    """Keep bitsandbytes from changing the layout of 4-bit weights on CPUs.

    It does so in evaluation mode, for a kernel without gradients. Code that later dequantizes the
    weights, such as PEFT's DoRA, would read wrong values.
    """
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            # The training flag has no other effect on a linear layer.
            module.training = True


def find_non_text_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the modules of a multimodal model that no text passes through.

    For example the vision tower of Gemma 3 and its projector. Text-only training drops them: they
    would take memory, and weight decay would shrink them.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or model.config.get_text_config() is model.config:
        return ()
    text = [part for part in (decoder, model.get_output_embeddings()) if part is not None]
    return tuple(_find_outside(model, "", text))


def _find_outside(parent: nn.Module, prefix: str, text: Sequence[nn.Module]) -> Iterator[str]:
    for name, child in parent.named_children():
        inside = list(child.modules())
        if any(child is part for part in text):
            continue
        if any(module is part for part in text for module in inside):
            yield from _find_outside(child, f"{prefix}{name}.", text)
        else:
            yield f"{prefix}{name}"


def _drop(model: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        above, _, last = name.rpartition(".")
        setattr(model.get_submodule(above), last, None)


def build_trained_model(
    spec: RunSpec,
    model: nn.Module,
    tokenizer: Any,
    *,
    plain_template: bool,
    device: torch.device,
    stream: LayerStream | None = None,
) -> TrainedModel:
    """Add an adapter with initial values, or make every parameter trainable.

    Raises:
        ExpectedError: the adapter's targets are not in this model, or a streamed layer cannot be
            read.
    """
    dtype = choose_dtype(spec.precision, device)
    clock = DropoutClock(spec.seed)
    lora = None
    non_text = find_non_text_modules(model)
    if spec.adapter.kind == "full":
        _drop(model, non_text)
        model.requires_grad_(True)
    else:
        adapted, lora = add_adapter(model, spec, non_text)
        _drop(model, non_text)  # not earlier: PEFT requires modules that its settings exclude
        model = adapted
        _initialise(model, spec.seed, wide=dtype == torch.float64)
        dora.measure_magnitudes(model, stream)
        if spec.adapter.dropout:
            replace_dropouts(model, spec.adapter.dropout, clock)
            if spec.adapter.dora:
                _apply_dora_dropout(model)
        if spec.also_trained:
            train_ends(model.get_base_model(), spec.also_trained, lora)
    model.to(device)
    autocast = dtype in _NARROW
    if autocast:
        for module in model.modules():
            if isinstance(module, LoraLayer):
                # PEFT casts inputs to the adapter's fp32; autocast would cast them back at once.
                module.cast_input_dtype_enabled = False
    return TrainedModel(
        module=model,
        tokenizer=tokenizer,
        clock=clock,
        dtype=dtype,
        autocast=autocast,
        lora=lora,
        plain_template=plain_template,
        stream=stream,
    )


def _initialise(model: nn.Module, seed: int, *, wide: bool) -> None:
    """Initialise the adapter identically on every machine: A as PEFT does, B zero.

    DoRA's magnitudes follow in `dora`.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        dtype = torch.float64 if wide else torch.float32
        first = torch.zeros(parameter.shape, dtype=dtype)
        if "lora_magnitude_vector" in name:
            first = parameter.data.to(dtype)
        elif "lora_A" in name:
            # A CPU generator per parameter, seeded by its name: CUDA generators differ between
            # GPUs.
            key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            draw = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
            nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=draw)
        parameter.data = first.to(parameter.device)


def _apply_dora_dropout(model: nn.Module) -> None:
    """Enable dropout in DoRA layers: PEFT skips it in layers in evaluation mode.

    The flag is set only on these layers, so the rest of the model stays in evaluation mode.
    """
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.training = True
