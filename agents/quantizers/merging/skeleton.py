"""Open a model of Transformers without its weights, and load them a few at a time.

Transformers itself finds the files, chooses types, maps names and joins or cuts tensors, first with
outlines (tensors on the meta device), then with the real ones. Tensors that become one parameter,
such as the matrices of all experts of a layer, are loaded together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import Mxfp4Config, PreTrainedModel
from transformers.core_model_loading import (
    convert_and_load_state_dict_in_model,
    revert_weight_conversion,
)

from agents.errors import ExpectedError
from agents.trainer.model.causal_class import find_causal_class
from agents.trainer.model.file_tensors import group_by_parameter

_META = torch.device("meta")


class Skeleton:
    """Model whose parameters have memory only while they are loaded."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        """Open a folder.

        Args:
            folder: Folder of Transformers.
            **settings: Arguments of `from_pretrained`, such as a configuration for quantizing
                weights while they are loaded, and the device for it.

        Raises:
            ExpectedError: its weights are quantized, so that no update can be added to them.
        """
        self._files = find_files(folder)
        self._groups: dict[str, list[str]] = {}
        self._copies: dict[str, str] = {}
        with self._outlining():
            self.model: Any = find_causal_class().from_pretrained(
                folder,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                **{"dtype": "auto", **_read_16_bits(folder), **settings},
            )
        self._conversions = self.model._weight_conversions

    def load(self) -> Iterator[dict[str, Tensor]]:
        """Yield all parameters by name, those of one group of tensors at a time.

        A yielded group is released when the next is requested. Writing into it changes no file.
        """
        for names in list(self._groups.values()):
            found = self._load(names)
            yield found
            for copy, source in self._copies.items():
                if source in found:
                    # Loaded again, since the caller may have written into the yielded one.
                    yield {copy: self._load(names)[source]}
            del found
        # Values that no file has, as initialized by the class.
        rest = {name: value for name, value in self.model.state_dict().items() if not value.is_meta}
        if rest:
            yield rest

    def revert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with the names and layout of files."""
        self.model._weight_conversions = self._conversions
        found: dict[str, Tensor] = revert_weight_conversion(self.model, dict(tensors))
        return found

    def untie(self, name: str) -> None:
        """Separate a parameter from the embeddings that it shares weights with."""
        embeddings, weight = self.model.get_input_embeddings(), self.model.get_parameter(name)
        above, _, last = name.rpartition(".")
        module = self.model.get_submodule(above)
        if module is embeddings or embeddings.weight is not weight:
            return
        everything = self.model.named_parameters(remove_duplicate=False)
        shared = [other for other, parameter in everything if parameter is weight]
        loaded = next(other for other in shared if other in self._groups)
        self._copies.update({other: loaded for other in {name, *shared} - {loaded}})
        setattr(module, last, nn.Parameter(torch.empty_like(weight), requires_grad=False))
        # Else loading would tie the two again. Multimodal models have two configs.
        for config in (self.model.config, self.model.config.get_text_config()):
            config.tie_word_embeddings = False

    @contextmanager
    def _outlining(self) -> Iterator[None]:
        """Make Transformers load outlines instead of weights inside the block."""
        usual = PreTrainedModel._load_pretrained_model

        def load(model: Any, state: Any, files: Any, config: Any, *rest: Any, **more: Any) -> Any:
            self.model, self._config = model, config
            self._groups = group_by_parameter(model, self._files, config.weight_mapping)
            self._leave_out_repeated()
            outlines: dict[str, Tensor] = {}
            # A meta tensor cannot be quantized; these parameters are outlines already.
            quantized = {name for name in self._groups if self._is_quantized(name)}
            for name in self._groups.keys() - quantized:
                with self._open(self._groups[name]) as slices:
                    outlines |= {
                        k: torch.empty_like(s[...], device=_META) for k, s in slices.items()
                    }
            outlined = replace(config, device_map={"": _META})
            found = usual(model, outlines, None, outlined, *rest, **more)
            found[0].missing_keys -= quantized
            return found

        PreTrainedModel._load_pretrained_model = staticmethod(load)
        try:
            yield
        finally:
            PreTrainedModel._load_pretrained_model = staticmethod(usual)

    def _is_quantized(self, name: str) -> bool:
        """Return whether a parameter is quantized while it is loaded."""
        quantizer = self._config.hf_quantizer
        return quantizer is not None and quantizer.param_needs_quantization(self.model, name)

    def _leave_out_repeated(self) -> None:
        """Skip weights that are tied to equal weights in the same files.

        Transformers compares them when both are loaded, and ties them only then.
        """
        for target, source in self.model.all_tied_weights_keys.items():
            if target in self._groups and source in self._groups:
                both = [self._load(self._groups[name])[name] for name in (target, source)]
                if torch.equal(*both):
                    del self._groups[target]

    def _load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the parameters made from tensors of files; the model keeps its outlines."""
        known = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers()),
        }
        with self._open(names) as slices:
            loaded, _ = convert_and_load_state_dict_in_model(self.model, slices, self._config)
        found: dict[str, Tensor] = {}
        for name in known.keys() & self.model.state_dict().keys() - loaded.missing_keys:
            above, _, last = name.rpartition(".")
            module = self.model.get_submodule(above)
            value = getattr(module, last)
            found[name] = value.detach()
            # Tensors that bitsandbytes stores with packed weights.
            if (state := getattr(value, "quant_state", None)) is not None:
                about = state.as_dict(packed=True)
                found |= {f"{name}.{key}": part for key, part in about.items()}
                module.quant_state = None  # or every module keeps its constants
            setattr(module, last, known[name])
        return found

    @contextmanager
    def _open(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield slices of tensors, which map their files.

        Files are opened for each group, since written pages stay in memory until the last tensor
        that maps the same opened file is gone.
        """
        with ExitStack() as stack:
            opened = {
                path: stack.enter_context(safe_open(path, framework="pt"))
                for path in {self._files[name] for name in names}
            }
            yield {name: opened[self._files[name]].get_slice(name) for name in names}


def find_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a folder."""
    index = folder / "model.safetensors.index.json"
    if index.exists() and not (folder / "model.safetensors").exists():
        places = json.loads(index.read_bytes())["weight_map"]
        paths = {folder / name for name in places.values()}
    else:
        paths = {folder / "model.safetensors"}
    found: dict[str, Path] = {}
    for path in sorted(paths):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _read_16_bits(folder: Path) -> dict[str, Any]:
    """Return the settings that load quantized weights in 16 bits."""
    config = json.loads((folder / "config.json").read_bytes())
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method is None:
        return {}
    if method == "mxfp4":
        return {"quantization_config": Mxfp4Config(dequantize=True)}
    raise ExpectedError(
        f"The base model in {folder} is quantized ({method}), and what was trained cannot be added "
        "to such weights.",
        "Use the adapter with the base model: both are in the checkpoint's folder and on the hub",
    )
