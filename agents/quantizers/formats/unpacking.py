"""Unpack a quantized model of Transformers to 16 bits, matrix by matrix.

A packed model must fit on a GPU or in RAM, since its layers unpack their weights themselves; plain
weights can be read from their files for each pass. The written weights are those that the packed
layers multiply with, computed in the same way, in the type of the model: bitsandbytes unpacks NF4;
AWQ and GPTQ need only operations of PyTorch.

Shape letters: O outputs, I inputs, G groups of inputs that share a scale, P words of 32 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from agents.quantizers.job.heap import return_free_memory
from agents.quantizers.merging.shard_files import ShardFiles
from agents.quantizers.merging.skeleton import find_files

_WORD_BITS = 32
# Position in an AWQ word of each of its eight columns.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# Bounds the memory of a matrix's codes, which is several times that of its weights.
_INPUTS_AT_ONCE = 1024
# Written bytes after which memory is returned to the system.
_WRITTEN_BYTES = 1 << 28

Parts = Mapping[str, Tensor]
"""Tensors of one packed matrix, by the part of their names after the layer's."""


class _Layout(NamedTuple):
    words: str
    """Suffix of the packed codes, after the layer's name."""
    others: tuple[str, ...]
    """Suffixes of the tensors needed for unpacking, unless they begin with that of the codes."""
    unpack: Callable[[Parts, Mapping[str, Any], torch.dtype, str], Tensor]
    """Function that returns weights (O, I), given the parts, the quantization's settings, the type
    in which layers compute, and the device."""


class PackedModel:
    """Folder of Transformers in NF4, AWQ or GPTQ."""

    def __init__(self, folder: Path) -> None:
        self._config = json.loads((folder / "config.json").read_bytes())
        self._about = self._config["quantization_config"]
        self._dtype: torch.dtype = getattr(torch, self._config["dtype"])
        self._layout = _LAYOUTS[self._about["quant_method"]]
        self._files = find_files(folder)
        self._matrices = self._group()
        self._plain = sorted(
            self._files.keys() - {name for parts in self._matrices.values() for name in parts}
        )

    @property
    def num_packed(self) -> int:
        """Number of packed weights."""
        bits = int(self._about.get("bits") or 4)
        words = f".{self._layout.words}"
        return sum(self._weigh(f"{layer}{words}") * 8 // bits for layer in self._matrices)

    @property
    def plain_bytes(self) -> int:
        """Size of the weights that are not packed, in bytes."""
        return sum(map(self._weigh, self._plain))

    @property
    def unpacked_bytes(self) -> int:
        """Size of the unpacked model, in bytes."""
        return self._dtype.itemsize * self.num_packed + self.plain_bytes

    def unpack(self, folder: Path, device: str) -> None:
        """Write the unpacked model, without its tokenizer, into a new folder.

        Args:
            folder: folder to create.
            device: device that unpacks.

        Raises:
            OSError: the disk is full.
        """
        folder.mkdir()
        config = {k: v for k, v in self._config.items() if k != "quantization_config"}
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        files, written_bytes = ShardFiles(folder), 0
        for name, tensor in self._read(device):
            files.write({name: tensor})
            written_bytes += tensor.nbytes
            del tensor
            if written_bytes > _WRITTEN_BYTES:
                return_free_memory()
                written_bytes = 0
        files.finish()

    def _read(self, device: str) -> Iterator[tuple[str, Tensor]]:
        for name in self._plain:
            yield name, self._load(name)
        for layer, names in self._matrices.items():
            parts = {name.removeprefix(f"{layer}."): self._load(name) for name in names}
            weight_OI = self._layout.unpack(parts, self._about, self._dtype, device)
            yield f"{layer}.weight", weight_OI.to(self._dtype).cpu().contiguous()

    def _group(self) -> dict[str, list[str]]:
        """Return the names of each packed matrix's tensors, by the name of its layer."""
        found: dict[str, list[str]] = {}
        for name in sorted(self._files):
            for part in (self._layout.words, *self._layout.others):
                layer, _, rest = name.rpartition(f".{part}")
                if layer and (not rest or rest.startswith(".")):
                    found.setdefault(layer, []).append(name)
                    break
        # An unquantized layer of an NF4 model has a `weight`, too, but no other parts.
        return {layer: names for layer, names in found.items() if len(names) > 1}

    def _weigh(self, name: str) -> int:
        with safe_open(self._files[name], framework="pt") as file:
            return int(file.get_slice(name)[...].nbytes)  # mapped, not read

    def _load(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


def _unpack_nf4(parts: Parts, about: Mapping[str, Any], dtype: torch.dtype, device: str) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    del about, dtype  # each matrix has its own settings and type
    state = {name.removeprefix("weight."): part for name, part in parts.items() if name != "weight"}
    weight_OI: Tensor = dequantize_4bit(
        parts["weight"].to(device), QuantState.from_dict(state, device=torch.device(device))
    )
    return weight_OI


def _unpack_awq(parts: Parts, about: Mapping[str, Any], dtype: torch.dtype, device: str) -> Tensor:
    bits = int(about["bits"])
    places = torch.tensor(_AWQ_PLACES, device=device)
    zeros_GO = _open_columns(parts["qzeros"].to(device), bits, places)
    words_IP = parts["qweight"]

    def read_codes(begin: int, end: int) -> Tensor:
        return _open_columns(words_IP[begin:end].to(device), bits, places)

    group_I = torch.arange(len(words_IP), device=device) // int(about["group_size"])
    # AWQ's layers convert the scales to their own type; GPTQ's use them as stored.
    return _scale(read_codes, zeros_GO, parts["scales"].to(device, dtype), group_I)


def _unpack_gptq(parts: Parts, about: Mapping[str, Any], dtype: torch.dtype, device: str) -> Tensor:
    del dtype
    bits = int(about["bits"])
    each = _WORD_BITS // bits
    places = torch.arange(each, device=device)
    # The layout stores each zero point minus one.
    zeros_GO = _open_columns(parts["qzeros"].to(device), bits, places) + 1
    words_PO = parts["qweight"]

    def read_codes(begin: int, end: int) -> Tensor:
        words = words_PO[begin // each : -(-end // each)].to(device)
        return _open_columns(words.t(), bits, places).t()

    return _scale(
        read_codes, zeros_GO, parts["scales"].to(device), parts["g_idx"].to(device).long()
    )


def _open_columns(words_IP: Tensor, bits: int, places: Tensor) -> Tensor:
    """Return the codes (I, O) of words that pack columns, in the order of `places`.

    >>> _open_columns(torch.tensor([[0x21]]), 4, torch.arange(8))[:, :3].tolist()
    [[1, 2, 0]]
    """
    codes = (words_IP[..., None] >> (bits * places).to(words_IP.dtype)) & ((1 << bits) - 1)
    return codes.flatten(-2)


def _scale(
    read_codes: Callable[[int, int], Tensor], zeros_GO: Tensor, scales_GO: Tensor, group_I: Tensor
) -> Tensor:
    """Return weights (O, I) on the CPU, in the type of the scales, computing some inputs at a
    time.
    """
    num_inputs, num_outputs = len(group_I), scales_GO.shape[1]
    weight_OI = torch.empty(num_outputs, num_inputs, dtype=scales_GO.dtype)
    for begin in range(0, num_inputs, _INPUTS_AT_ONCE):
        end = min(begin + _INPUTS_AT_ONCE, num_inputs)
        at = group_I[begin:end]
        some_IO = (read_codes(begin, end) - zeros_GO[at]) * scales_GO[at]
        weight_OI[:, begin:end] = some_IO.t()
    return weight_OI


_LAYOUTS = {
    "bitsandbytes": _Layout("weight", (), _unpack_nf4),
    "awq": _Layout("qweight", ("qzeros", "scales"), _unpack_awq),
    "gptq": _Layout("qweight", ("qzeros", "scales", "g_idx"), _unpack_gptq),
}
