"""How long each phase of an export takes on a node, and the memory it needs. Pure.

The phases are those that the job itself measures (agents/quantizers): merging checks, loads, merges
and writes; making reads the texts, measures the original and the control, quantizes and proves.
Every phase is work over a rate: bytes read and written, weights handled on the processor, products
of matrices. Constants for a CPU are fitted to the rows of tests/bench/bench_quantize on one (torch
2.13, gptqmodel 7.6, llama.cpp b10605), memory of GPTQ and AWQ on GPUs to two on an H200; other
constants for GPUs were held against nothing yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.artifacts import Engine
from app.planning.model_shape import ModelShape, choose_targets
from app.quantize.forecast import ArtifactForecast, count_judged_rows
from app.quantize.texts import MOST_TEXTS, TextSizes

_PROMPTS, _ANSWER_TOKENS = 8, 32
_IMPORT_S, _PEFT_S, _BITSANDBYTES_S, _GPTQMODEL_S, _CONVERT_S = 3.4, 2.8, 1.0, 6.0, 5.0
"""PyTorch with Transformers, and what comes later, from a disk that has just read them."""
_PROVE_S = 2.5
"""To load the result."""
_START_S = 0.5
_READ_BYTES_PER_S, _WRITE_BYTES_PER_S = 1.5e9, 0.6e9
_HASH_BYTES_PER_S = 1.2e9
_MERGED_WEIGHTS_PER_S = 0.3e9
"""Of one core: float32 there and back."""
_LAYER_S, _NF4_LAYER_S = 0.0012, 0.0022
"""Of a decoder layer for one token on a GPU: starting its kernels."""
_KEEP_VALUES_PER_S = 45e6
"""Log-probabilities that become half precision, or are compared, on the processor."""
_ROUNDED_WEIGHTS_PER_S = {"cpu": 0.1e9, "gpu": 20e9}
"""Of one core, or of a GPU."""
_NF4_WEIGHTS_PER_S, _UNPACKED_WEIGHTS_PER_S = 70e6, 60e6
"""Of a processor: into NF4, and of 4 bits into what its kernel computes with."""
_GRID, _CLIPS, _CLIP_TOKENS = 26, 11, 512
"""AWQ tries 20 scales for each group of layers, by products of all that the group feeds
(arXiv:2306.00978), and ten clippings of each on 512 tokens."""
_SEARCH_SHARE = {"cpu": 1.05, "gpu": 0.4}
"""Of the rate of long products that those of the search reach: on a CPU that of float32 is known,
and the search is in bfloat16."""
_ROUNDINGS = 31
"""Of each weight: for every scale and every clipping, and at last. On a GPU they are quick."""
_KEPT_PRODUCTS_PER_S, _KEPT_PRODUCT_BYTES = 1.5e9, 4
"""AutoAWQ writes and reads each product of its clippings: what two cores do, and what the memory
of a GPU moves of each."""
_AWQ_VALUE_BYTES = {"cpu": 8.0, "gpu": 2.2}
"""Of what goes into each layer, as it is kept in RAM: on a CPU it is held against in float32."""
_BLOCKS_AT_ONCE = 8
"""Of the search, on a GPU."""
_UNRETURNED_SHARE = 0.5
"""Of those, which the process holds still when the result is loaded."""
_AWQ_LAYER_S = 2.0
_GPTQ_COLUMN_S = {"cpu": 2.5e-4, "gpu": 1.0e-3}
"""Columns are rounded one after the other."""
_ROWS_AT_ONCE, _LOGIT_BYTES = 8, 4
"""Of calibration, whose predictions gptqmodel makes before it leaves them alone."""
_CONVERTED_BYTES_PER_S = 0.25e9
_K_WEIGHTS_PER_S = 12e6
"""Of one core, llama.cpp's K types."""
_LLAMA_TOKEN_S, _LLAMA_WORD_S, _LLAMA_WORDS = 0.002, 4e-6, 1000
"""To ask llama.cpp for a token, and to hand over each of a thousand likely words."""
_BASE_RAM_BYTES = {"cpu": 281_000_000, "gpu": 1_250_000_000}
"""Python, PyTorch and Transformers, on a GPU with CUDA's libraries."""
_WORKSPACE_BYTES = 34_000_000
"""That cuBLAS takes of a GPU at the first product."""
_MERGE_RAM_BYTES = 180_000_000
"""PEFT."""
_LOADED_RAM_BYTES = {"cpu": 281_000_000, "gpu": 572_000_000}
"""Python, PyTorch as it is built for either, and Transformers, while no GPU is used."""
_PACK_RAM_BYTES = {"cpu": 310_000_000, "gpu": 830_000_000}
"""gptqmodel with what it imports."""
_PACK_VRAM_BYTES = 130_000_000
"""That gptqmodel takes of a GPU beside the layer and what goes through it."""
_UNPACK_BYTES = {"nf4": 4, "awq": 24, "gptq": 24}
"""Of one weight of a matrix, while a GPU unpacks it."""
_AWQ_RAM_BYTES = {"cpu": 0, "gpu": 620_000_000}
"""Of its search, however little the text."""
_UNPACK_RAM_BYTES = {"gptqmodel": 390_000_000, "autoawq": 100_000_000}
"""To load the result in the process that made it."""
_NF4_RAM_BYTES = 75_000_000
"""bitsandbytes."""
_LLAMA_RAM_BYTES = 20_000_000
_PREDICT_BYTES, _COMPARE_BYTES = 12, 36
"""Of one word of one token: to predict it, and to hold it against what was remembered."""
_GPU_SPARE, _GPU_SPARE_BYTES = 1.1, 1 << 30
"""As agents/quantizers/models.py decides whether the original is measured on the GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What a node works with."""

    is_gpu: bool
    num_cores: int = 4
    flops_per_s: float = 50e9
    """Products of matrices on the device."""
    memory_bytes_per_s: float = 20e9
    """Of the device."""
    vram_bytes: int | None = None
    """Of its GPU; None: not known, or there is none."""
    ram_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseForecast:
    """What one part of an export takes."""

    name: str
    seconds: float
    ram_bytes: int
    vram_bytes: int | None
    """None: no GPU is used."""


def forecast_phases(
    shape: ModelShape,
    method: str,
    types: Sequence[str],
    made: ArtifactForecast,
    bench: Bench,
    texts: TextSizes = MOST_TEXTS,
    targets: str | tuple[str, ...] | None = "all-linear",
    engine: Engine = "gptqmodel",
) -> tuple[PhaseForecast, ...]:
    """Return the phases of an export in their order.

    Args:
        shape: of the model.
        method: `merged`, or one of `agents.artifacts.METHODS`.
        types: of the method.
        made: its sizes.
        bench: what the node works with.
        texts: that it is calibrated with and judged by.
        targets: linear layers with an adapter, as in a run file; None: all weights were trained.
        engine: what makes AWQ.

    >>> from app.planning.model_shape import read_shape
    >>> from app.quantize.forecast import forecast_artifact
    >>> llama = read_shape({"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
    ...     "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32})
    >>> card = Bench(is_gpu=True, num_cores=8, flops_per_s=50e12, memory_bytes_per_s=450e9,
    ...     vram_bytes=12 << 30, ram_bytes=64 << 30)
    >>> phases = forecast_phases(llama, "awq", (), forecast_artifact(llama, "awq"), card)
    >>> [one.name for one in phases][4:]
    ['texts', 'original', 'control', 'quantize', 'proof']
    >>> max(one.vram_bytes or 0 for one in phases) < 12 << 30
    True
    """
    work = _Work(
        shape=shape, method=method, types=types, made=made, bench=bench, texts=texts,
        targets=targets, engine=engine,
    )  # fmt: skip
    merging = work.merge_phases()
    return merging if method == "merged" else (*merging, *work.make_phases())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    shape: ModelShape
    method: str
    types: Sequence[str]
    made: ArtifactForecast
    bench: Bench
    texts: TextSizes
    targets: str | tuple[str, ...] | None
    engine: Engine

    @property
    def _device(self) -> str:
        return "gpu" if self.bench.is_gpu else "cpu"

    @property
    def _base_ram(self) -> int:
        return _BASE_RAM_BYTES[self._device]

    @property
    def _tokens(self) -> float:
        return self._rows * self.texts.mean_tokens

    @property
    def _rows(self) -> int:
        return count_judged_rows(self.method, self.made.merged_bytes, self.texts)

    @property
    def _answers(self) -> int:
        return min(_PROMPTS, self._rows) * _ANSWER_TOKENS

    @property
    def _original_on_gpu(self) -> bool:
        vram = self.bench.vram_bytes
        return self.bench.is_gpu and (
            vram is None or self.made.merged_bytes * _GPU_SPARE + _GPU_SPARE_BYTES <= vram
        )

    @property
    def _widest(self) -> int:
        return max(one.num_weights for layer in self.shape.layers for one in layer.linears)

    def merge_phases(self) -> tuple[PhaseForecast, ...]:
        whole = self.made.merged_bytes
        adapted = self._count_adapted()
        base = _LOADED_RAM_BYTES[self._device]
        # Weights are mapped from their file; only those that change take memory of their own.
        ram = base + _MERGE_RAM_BYTES + int(whole * adapted / self.shape.num_parameters)
        return (
            _phase("check", _START_S + whole / _HASH_BYTES_PER_S, 20_000_000),
            _phase("load", _IMPORT_S + whole / _READ_BYTES_PER_S, base),
            _phase("merge", _PEFT_S + adapted / _MERGED_WEIGHTS_PER_S, ram),
            _phase("write", whole / _WRITE_BYTES_PER_S, ram),
        )

    def _count_adapted(self) -> int:
        """Return how many weights merging changes."""
        if self.targets is None:
            return self.shape.num_parameters
        layers = self.shape.layers
        chosen = [one for layer in layers for one in choose_targets(layer, self.targets)]
        return sum(one.num_weights for one in chosen)

    def make_phases(self) -> tuple[PhaseForecast, ...]:
        return (
            _phase("texts", _START_S + _IMPORT_S, _LOADED_RAM_BYTES[self._device]),
            self._original(),
            self._control(),
            self._quantize(),
            self._proof(),
        )

    def _judge_s(self, tokens: float, *, on_gpu: bool) -> float:
        """Return seconds to predict rows and to keep or compare what was predicted."""
        flops = self.bench.flops_per_s if on_gpu else self._cpu_flops
        passes = 2.0 * self.shape.num_parameters * tokens / (0.5 * flops)
        return passes + tokens * self.shape.vocab / _KEEP_VALUES_PER_S

    def _answer_s(
        self, size_bytes: float, tokens: int, *, on_gpu: bool, layer_s: float = _LAYER_S
    ) -> float:
        rate = self.bench.memory_bytes_per_s if on_gpu else 15e9
        step = size_bytes / rate + (layer_s if on_gpu else 2e-4) * self.shape.num_layers
        return tokens * step

    @property
    def _cpu_flops(self) -> float:
        return 60e9 * self.bench.num_cores if self.bench.is_gpu else self.bench.flops_per_s

    def _logits_bytes(self, value_bytes: int = 10) -> int:
        """Return what the longest row's predictions take, in half precision and wider."""
        return self.texts.longest_tokens * self.shape.vocab * value_bytes

    def _original(self) -> PhaseForecast:
        whole, on_gpu = self.made.merged_bytes, self._original_on_gpu
        seconds = whole / _READ_BYTES_PER_S + self._judge_s(self._tokens, on_gpu=on_gpu)
        seconds += self._answer_s(whole if on_gpu else 2 * whole, self._answers, on_gpu=on_gpu)
        vram = whole + self._logits_bytes() if on_gpu else 0
        ram = self._base_ram + self._logits_bytes(_PREDICT_BYTES)
        ram += 0 if on_gpu else self._wide_bytes()
        return self._on("original", seconds, ram, vram)

    def _wide_bytes(self) -> int:
        """Return the original in float32, or as it is where that does not fit."""
        whole, ram = self.made.merged_bytes, self.bench.ram_bytes
        return whole if ram is not None and 2 * whole * _GPU_SPARE > ram else 2 * whole

    def _control(self) -> PhaseForecast:
        on_gpu = self._original_on_gpu
        rate = _ROUNDED_WEIGHTS_PER_S["gpu"]
        if not on_gpu:
            rate = _ROUNDED_WEIGHTS_PER_S["cpu"] * self.bench.num_cores
        seconds = self.shape.num_quantized / rate + self._judge_s(self._tokens, on_gpu=on_gpu)
        extra = 4 * 6 * self._widest
        vram = self.made.merged_bytes + max(extra, self._logits_bytes()) if on_gpu else 0
        compared = self._logits_bytes(_COMPARE_BYTES)
        ram = self._base_ram + compared
        if not on_gpu:
            ram = self._base_ram + self._wide_bytes() + max(extra, compared)
        return self._on("control", seconds, ram, vram)

    def _quantize(self) -> PhaseForecast:
        return {
            "nf4": self._quantize_nf4,
            "awq": self._quantize_awq,
            "gptq": self._quantize_gptq,
            "gguf": self._quantize_gguf,
        }[self.method]()

    def _quantize_nf4(self) -> PhaseForecast:
        whole, size = self.made.merged_bytes, self.made.final_bytes
        seconds = _BITSANDBYTES_S + whole / _READ_BYTES_PER_S + size / _WRITE_BYTES_PER_S
        if not self.bench.is_gpu:
            seconds += self.shape.num_quantized / _NF4_WEIGHTS_PER_S
        vram = size + 2 * self._widest * 2
        ram = self._base_ram + _NF4_RAM_BYTES + (size if not self.bench.is_gpu else size // 2)
        return self._on("quantize", seconds, ram, vram)

    def _quantize_awq(self) -> PhaseForecast:
        shape, bench = self.shape, self.bench
        tokens = self.texts.block_tokens
        products = shape.num_quantized * min(tokens, _CLIP_TOKENS) * _CLIPS
        search = 2.0 * shape.num_quantized * tokens * _GRID
        seconds = search / (_SEARCH_SHARE[self._device] * bench.flops_per_s)
        if not bench.is_gpu:
            rate = _ROUNDED_WEIGHTS_PER_S["cpu"] * bench.num_cores
            seconds += _ROUNDINGS * shape.num_quantized / rate
        if self.engine == "gptqmodel":
            seconds += 2.0 * products / bench.flops_per_s
        elif bench.is_gpu:
            seconds += products * _KEPT_PRODUCT_BYTES / bench.memory_bytes_per_s
        else:
            seconds += products / (_KEPT_PRODUCTS_PER_S * bench.num_cores / 2)
        layers = _AWQ_LAYER_S * shape.num_layers if bench.is_gpu else 0.0
        seconds += _GPTQMODEL_S + layers + self._io_s()
        kept = self._kept_value_bytes()
        if not bench.is_gpu:  # of little text, loading takes more than what is kept of it
            kept = max(kept, self._predicted_bytes())
        moved = tokens * 3 * shape.hidden  # inputs, outputs, and those of attention
        at_once = min(tokens, _BLOCKS_AT_ONCE * _CLIP_TOKENS) * (4 * shape.hidden + 3 * shape.ffn)
        vram = self._layer_bytes() + 2 * int(moved + at_once) + _PACK_VRAM_BYTES
        return self._on("quantize", seconds, self._pack_ram() + kept, vram)

    def _count_values(self) -> int:
        """Return how many numbers AWQ keeps of a layer's inputs."""
        return int(self.texts.block_tokens * (6 * self.shape.hidden + 2 * self.shape.ffn))

    def _kept_value_bytes(self) -> int:
        device = self._device
        return int(self._count_values() * _AWQ_VALUE_BYTES[device]) + _AWQ_RAM_BYTES[device]

    def _quantize_gptq(self) -> PhaseForecast:
        shape, bench = self.shape, self.bench
        columns = sum(n * one.num_inputs for layer, n in shape.kinds for one in layer.linears)
        tokens = self.texts.calibration_tokens
        flops = 2.0 * 3 * shape.num_quantized * tokens / (0.4 * bench.flops_per_s)
        seconds = _GPTQMODEL_S + columns * _GPTQ_COLUMN_S[self._device] + flops + self._io_s()
        kept = int(tokens * shape.hidden * 2 * 2) + 4 * 3 * shape.ffn**2
        ram = self._pack_ram() + (0 if bench.is_gpu else kept + self._predicted_bytes())
        return self._on("quantize", seconds, ram, self._layer_bytes() + kept + _PACK_VRAM_BYTES)

    def _io_s(self) -> float:
        whole, size = self.made.merged_bytes, self.made.final_bytes
        return whole / _READ_BYTES_PER_S + (whole + size) / _WRITE_BYTES_PER_S

    def _layer_bytes(self) -> int:
        return 3 * 2 * max(layer.num_parameters for layer in self.shape.layers)

    def _pack_ram(self) -> int:
        return self._base_ram + _PACK_RAM_BYTES[self._device] + self.made.merged_bytes

    def _predicted_bytes(self) -> int:
        rows = min(_ROWS_AT_ONCE, self.texts.calibration_rows)
        return rows * self.texts.longest_tokens * self.shape.vocab * _LOGIT_BYTES

    def _quantize_gguf(self) -> PhaseForecast:
        whole, seconds = self.made.merged_bytes, 0.0
        if not any(kind in ("F16", "Q8_0") for kind, _ in self.made.files):
            seconds = _CONVERT_S + whole / _CONVERTED_BYTES_PER_S  # F16, which they are made of
        for kind, size in self.made.files:
            if kind in ("F16", "Q8_0"):
                seconds += _CONVERT_S + whole / _CONVERTED_BYTES_PER_S
            else:
                seconds += self.shape.num_parameters / (_K_WEIGHTS_PER_S * self.bench.num_cores)
            seconds += size / _WRITE_BYTES_PER_S
        ram = 2 * _LOADED_RAM_BYTES[self._device] + 4 * 4 * max(
            self._widest, self.shape.num_embedding
        )
        return self._on("quantize", seconds, ram, 0)

    def _proof(self) -> PhaseForecast:
        size, ram = self.made.final_bytes, self._base_ram
        if self.method == "gguf":
            words = min(_LLAMA_WORDS, self.shape.vocab)
            step = size / 15e9 / len(self.made.files) + _LLAMA_TOKEN_S + words * _LLAMA_WORD_S
            tokens = self._tokens + self._answers + _ANSWER_TOKENS
            seconds = len(self.made.files) * tokens * step
            biggest = max(amount for _, amount in self.made.files)
            compared = self._logits_bytes(_COMPARE_BYTES)
            return self._on("proof", seconds, ram + compared + _LLAMA_RAM_BYTES + biggest, 0)
        on_gpu = self.bench.is_gpu
        seconds = _PROVE_S + size / _READ_BYTES_PER_S + self._judge_s(self._tokens, on_gpu=on_gpu)
        if not on_gpu:
            seconds += self.shape.num_quantized / _UNPACKED_WEIGHTS_PER_S
        tokens = self._answers + _ANSWER_TOKENS + 1
        layer_s = _NF4_LAYER_S if self.method == "nf4" else _LAYER_S
        seconds += self._answer_s(size, tokens, on_gpu=on_gpu, layer_s=layer_s)
        vram = size + self._logits_bytes() + _UNPACK_BYTES[self.method] * self._widest
        ram += self._logits_bytes(_COMPARE_BYTES)
        ram += _NF4_RAM_BYTES if self.method == "nf4" else _UNPACK_RAM_BYTES[self.engine]
        if not on_gpu:
            ram += self._loaded_bytes()
        elif self.method != "nf4":  # gptqmodel gives little back of what it took
            ram += self._pack_ram() - self._base_ram - _UNPACK_RAM_BYTES[self.engine]
            ram += _AWQ_RAM_BYTES["gpu"] if self.method == "awq" else 0
            vram += _PACK_VRAM_BYTES
        return self._on("proof", seconds, ram, vram)

    def _loaded_bytes(self) -> int:
        """Return what the result takes of a CPU's memory, with what was not given back before it.

        What is not quantized becomes float32, and so do weights that the kernels of GPTQ and AWQ
        have used, and all of NF4 (agents/quantizers/models.py).
        """
        size, shape = self.made.final_bytes, self.shape
        wide = 2 * (shape.num_parameters - shape.num_quantized)
        if self.method == "nf4":
            return size + wide + 4 * shape.num_quantized
        wide += 4 * shape.num_quantized
        kept = self.made.merged_bytes if self.engine == "gptqmodel" else 0
        if self.method == "awq" and self.engine == "gptqmodel":
            kept += int(_UNRETURNED_SHARE * self._kept_value_bytes())
        return kept + size + wide

    def _on(self, name: str, seconds: float, ram: int, vram: int) -> PhaseForecast:
        taken = vram + _WORKSPACE_BYTES if vram else 0
        return _phase(name, seconds, ram, taken if self.bench.is_gpu else None)


def _phase(name: str, seconds: float, ram: int, vram: int | None = None) -> PhaseForecast:
    return PhaseForecast(name=name, seconds=seconds, ram_bytes=int(ram), vram_bytes=vram)
