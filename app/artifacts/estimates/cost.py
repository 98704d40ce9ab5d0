"""Forecast the time and memory of each phase of an export on a node. Pure.

The phases are those that the job itself measures (agents/quantizers): merging checks, loads, merges
and writes; making reads the texts, measures the original and the control, quantizes and proves.
Every phase is work over a rate: bytes read and written, weights handled on the processor, products
of matrices; what those rates are, `rates` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agents.contract.formats import EXPORTS, Engine
from app.artifacts.estimates import rates
from app.artifacts.estimates.forecast import ArtifactForecast, count_judged_rows
from app.artifacts.estimates.texts import MOST_TEXTS, TextSizes
from app.planning.model_shape import ModelShape, choose_targets


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Capabilities of the node that makes an export."""

    is_gpu: bool
    num_cores: int = 4
    flops_per_s: float = 50e9
    """Rate of matrix products on the device, in FLOP/s."""
    memory_bytes_per_s: float = 20e9
    """Memory bandwidth of the device, in bytes/s."""
    vram_bytes: int | None = None
    """Free memory of its GPU; None: not known, or no GPU."""
    ram_bytes: int | None = None
    """RAM available to an export; None: not known."""
    holds_result: bool = True
    """Whether its memory holds a packed result; else that is unpacked on the disk for its proof."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseForecast:
    """Forecast of one phase of an export."""

    name: str
    seconds: float
    ram_bytes: int
    vram_bytes: int | None
    """Peak GPU memory; None: no GPU is used."""


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
        method: `merged`, or one of `agents.contract.formats.METHODS`.
        types: of the method.
        made: its sizes.
        bench: what the node works with.
        texts: that it is calibrated with and judged by.
        targets: linear layers with an adapter, as in a run file; None: all weights were trained.
        engine: what makes AWQ.

    >>> from app.planning.model_shape import read_shape
    >>> from app.artifacts.estimates.forecast import forecast_artifact
    >>> llama = read_shape({"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
    ...     "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32})
    >>> card = Bench(is_gpu=True, num_cores=8, flops_per_s=50e12, memory_bytes_per_s=450e9,
    ...     vram_bytes=12 << 30, ram_bytes=64 << 30)
    >>> phases = forecast_phases(llama, "awq", (), forecast_artifact(llama, "awq"), card)
    >>> [one.name for one in phases][-5:]
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
        return rates.BASE_RAM_BYTES[self._device]

    @property
    def _tokens(self) -> float:
        return self._rows * self.texts.mean_tokens

    @property
    def _rows(self) -> int:
        return count_judged_rows(self.method, self.made.merged_bytes, self.texts)

    @property
    def _answers(self) -> int:
        return min(rates.PROMPTS, self._rows) * rates.ANSWER_TOKENS

    @property
    def _answer_passes(self) -> int:
        """Over the weights: a job on a GPU answers all prompts at once."""
        return rates.ANSWER_TOKENS if self.bench.is_gpu else self._answers

    @property
    def _original_on_gpu(self) -> bool:
        vram = self.bench.vram_bytes
        return self.bench.is_gpu and (
            vram is None or self.made.merged_bytes * rates.GPU_SPARE + rates.GPU_SPARE_BYTES <= vram
        )

    @property
    def _resident_bytes(self) -> int | None:
        """Resident GPU memory of an original that is otherwise streamed; None: not streamed."""
        vram = self.bench.vram_bytes
        if vram is None or self._original_on_gpu or not self.bench.is_gpu:
            return None
        room = vram - rates.STREAM_SPARE_BYTES
        if room < rates.LEAST_RESIDENT_BYTES:
            return None
        return room - self._layer_bytes() // 2  # whole layers stay

    @property
    def _is_read_again(self) -> bool:
        """Whether the original comes from its files in each pass, as RAM does not hold it."""
        ram = self.bench.ram_bytes
        return ram is not None and self.made.merged_bytes * rates.GPU_SPARE > ram

    def _stream_s(self, resident_bytes: int, passes: int) -> float:
        come_bytes = self.made.merged_bytes - resident_bytes
        from_files = rates.READ_BYTES_PER_S if self._is_read_again else rates.STREAMED_BYTES_PER_S
        return passes * come_bytes / min(from_files, rates.STREAMED_BYTES_PER_S)

    @property
    def _widest(self) -> int:
        return max(one.num_weights for layer in self.shape.layers for one in layer.linears)

    def merge_phases(self) -> tuple[PhaseForecast, ...]:
        whole = self.made.merged_bytes
        adapted = self._count_adapted()
        base = rates.LOADED_RAM_BYTES[self._device]
        ram = base + rates.MERGE_RAM_BYTES + self._merged_at_once()
        seconds = adapted / rates.MERGED_WEIGHTS_PER_S + whole / rates.WRITE_BYTES_PER_S
        return (
            _phase("check", rates.START_S + self._hash_s(), 20_000_000),
            _phase("load", rates.IMPORT_S[self._device], base),  # hashing has read the files
            _phase("merge", rates.PEFT_S + seconds, ram),
        )

    def _merged_at_once(self) -> int:
        """Return the bytes of what is merged at a time: a tensor, or a matrix of all experts.

        Experts are joined to one tensor, and cut again into those of the files.
        """
        layers = [layer for layer, _ in self.shape.kinds]
        # The embedding is written as it is mapped, unless all weights were trained.
        widest = max(self._widest, self.shape.num_embedding if self.targets is None else 0)
        experts = max(layer.num_experts_params for layer in layers)
        weights = max(widest, rates.MERGED_SHARE_OF_EXPERTS * experts)
        return int(self.made.merged_bytes / self.shape.num_parameters * weights)

    def _hash_s(self) -> float:
        """Return seconds to hash the base model: several files at once, each on a core."""
        whole = self.made.merged_bytes
        at_once = min(rates.HASHED_AT_ONCE, self.bench.num_cores)
        return max(min(whole, rates.SHARD_BYTES), whole / at_once) / rates.HASH_BYTES_PER_S

    def _count_adapted(self) -> int:
        """Return how many weights merging changes."""
        if self.targets is None:
            return self.shape.num_parameters
        layers = self.shape.layers
        chosen = [one for layer in layers for one in choose_targets(layer, self.targets)]
        return sum(one.num_weights for one in chosen)

    def make_phases(self) -> tuple[PhaseForecast, ...]:
        return (
            _phase(
                "texts",
                rates.START_S + rates.IMPORT_S[self._device],
                rates.LOADED_RAM_BYTES[self._device],
            ),
            self._original(),
            self._control(),
            self._quantize(),
            self._proof(),
        )

    def _judge_s(self, tokens: float, *, on_gpu: bool) -> float:
        """Return seconds to predict rows and to keep or compare what was predicted."""
        flops = self.bench.flops_per_s if on_gpu else self._cpu_flops
        passes = 2.0 * self.shape.num_parameters * tokens / (0.5 * flops)
        return passes + tokens * self.shape.vocab / rates.KEEP_VALUES_PER_S

    def _answer_s(
        self, size_bytes: float, tokens: int, *, on_gpu: bool, layer_s: float = rates.LAYER_S
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
        resident = self._resident_bytes
        if resident is not None:
            return self._original_streamed(resident)
        seconds = whole / rates.READ_BYTES_PER_S + self._judge_s(self._tokens, on_gpu=on_gpu)
        seconds += rates.CUDA_S if self.bench.is_gpu else 0
        seconds += self._answer_s(
            whole if on_gpu else 2 * whole, self._answer_passes, on_gpu=on_gpu
        )
        if not on_gpu and self._is_read_again:
            seconds += self._stream_s(self._wide_bytes(), self._rows + self._answer_passes)
        vram = whole + self._logits_bytes() if on_gpu else 0
        ram = self._base_ram + self._logits_bytes(rates.PREDICT_BYTES)
        ram += 0 if on_gpu else self._wide_bytes()
        return self._on("original", seconds, ram, vram)

    def _original_streamed(self, resident: int) -> PhaseForecast:
        whole = self.made.merged_bytes
        seconds = whole / rates.READ_BYTES_PER_S + self._judge_s(self._tokens, on_gpu=True)
        seconds += rates.CUDA_S
        seconds += self._answer_s(resident, self._answer_passes, on_gpu=True)
        seconds += self._stream_s(resident, self._rows + self._answer_passes)
        ram = self._base_ram + self._logits_bytes(rates.PREDICT_BYTES)  # the rest is mapped
        vram = resident + self._logits_bytes() + 2 * self._widest
        return self._on("original", seconds, ram, vram)

    def _control_streamed(self, resident: int) -> PhaseForecast:
        come = self.made.merged_bytes - resident
        rounded = self.shape.num_quantized + self._rows * come / 2
        seconds = rounded / rates.ROUNDED_WEIGHTS_PER_S["gpu"]
        seconds += self._judge_s(self._tokens, on_gpu=True) + self._stream_s(resident, self._rows)
        ram = self._base_ram + self._logits_bytes(rates.COMPARE_BYTES)
        vram = resident + max(rates.ROUND_BYTES * self._widest, self._logits_bytes())
        return self._on("control", seconds, ram, vram)

    def _wide_bytes(self) -> int:
        """Return the original in float32, or as it is where that does not fit; half of the RAM
        where not even that does.
        """
        whole, ram = self.made.merged_bytes, self.bench.ram_bytes
        if ram is not None and self._is_read_again:
            return int(rates.RAM_SHARE * ram)
        return whole if ram is not None and 2 * whole * rates.GPU_SPARE > ram else 2 * whole

    def _control(self) -> PhaseForecast:
        on_gpu = self._original_on_gpu
        resident = self._resident_bytes
        if resident is not None:
            return self._control_streamed(resident)
        rate = rates.ROUNDED_WEIGHTS_PER_S["gpu"]
        if not on_gpu:
            rate = rates.ROUNDED_WEIGHTS_PER_S["cpu"] * self.bench.num_cores
        seconds = self.shape.num_quantized / rate + self._judge_s(self._tokens, on_gpu=on_gpu)
        rounded = rates.ROUND_BYTES * self._widest
        vram = self.made.merged_bytes + max(rounded, self._logits_bytes()) if on_gpu else 0
        compared = self._logits_bytes(rates.COMPARE_BYTES)
        ram = self._base_ram + compared
        if not on_gpu:
            ram = self._base_ram + self._wide_bytes() + max(4 * 6 * self._widest, compared)
        return self._on("control", seconds, ram, vram)

    def _quantize(self) -> PhaseForecast:
        own = {
            "awq": self._quantize_awq,
            "gptq": self._quantize_gptq,
            "gguf": self._quantize_gguf,
        }
        return own.get(self.method, self._quantize_by_loading)()

    def _quantize_by_loading(self) -> PhaseForecast:
        whole, size = self.made.merged_bytes, self.made.final_bytes
        of_format = rates.FORMATS[self.method]
        seconds = of_format.import_s + whole / rates.READ_BYTES_PER_S
        seconds += 2 * size / rates.WRITE_BYTES_PER_S  # once apart, once in files
        if not self.bench.is_gpu:
            seconds += self.shape.num_quantized / of_format.weights_per_s
        # Weights come one by one, and what they took is given back from time to time.
        widest = max(self._widest, self.shape.num_embedding)
        at_once = rates.WEIGHT_AT_ONCE_BYTES[self._device] * widest
        ram = self._base_ram + of_format.ram_bytes + at_once + rates.UNRETURNED_BYTES
        return self._on("quantize", seconds, ram, at_once)

    def _quantize_awq(self) -> PhaseForecast:
        shape, bench = self.shape, self.bench
        tokens = self.texts.block_tokens
        products = shape.num_quantized * min(tokens, rates.CLIP_TOKENS) * rates.CLIPS
        search = 2.0 * shape.num_quantized * tokens * rates.GRID
        seconds = search / (rates.SEARCH_SHARE[self._device] * bench.flops_per_s)
        if not bench.is_gpu:
            rate = rates.ROUNDED_WEIGHTS_PER_S["cpu"] * bench.num_cores
            seconds += rates.ROUNDINGS * shape.num_quantized / rate
        if self.engine == "gptqmodel":
            seconds += 2.0 * products / bench.flops_per_s
        elif bench.is_gpu:
            seconds += products * rates.KEPT_PRODUCT_BYTES / bench.memory_bytes_per_s
        else:
            seconds += products / (rates.KEPT_PRODUCTS_PER_S * bench.num_cores / 2)
        if bench.is_gpu:
            seconds += rates.AWQ_LAYER_S * shape.num_layers
            seconds += shape.num_quantized / rates.AWQ_WEIGHTS_PER_S
        seconds += rates.GPTQMODEL_S + self._io_s()
        kept = self._kept_value_bytes()
        if not bench.is_gpu:  # of little text, loading takes more than what is kept of it
            kept = max(kept, self._predicted_bytes())
        moved = tokens * 3 * shape.hidden  # inputs, outputs, and those of attention
        at_once = min(tokens, rates.BLOCKS_AT_ONCE * rates.CLIP_TOKENS) * (
            4 * shape.hidden + 3 * shape.ffn
        )
        held = 3 * self._layer_bytes() + 2 * int(moved)
        if self.engine == "autoawq":  # which packs on the processor, and keeps its products
            most_inputs = max(one.num_inputs for layer in shape.layers for one in layer.linears)
            at_once = max(at_once, rates.KEPT_OUTPUTS * rates.CLIP_TOKENS * most_inputs)
            vram = held + 2 * int(at_once)
            return self._on("quantize", seconds, self._pack_ram("autoawq") + kept, vram)
        vram = held + 2 * int(at_once) + rates.PACK_VRAM_BYTES
        more = 2 * int(tokens * (max(shape.hidden, shape.ffn) + shape.hidden)) + 4 * self._widest
        has_room = vram + more + rates.WORKSPACE_BYTES < (bench.vram_bytes or 0)
        if has_room:
            vram += more  # inputs, outputs and weights, which are copied for each scale elsewhere
        return self._on("quantize", seconds, self._pack_ram() + kept, vram)

    def _count_values(self) -> int:
        """Return how many numbers AWQ keeps of a layer's inputs."""
        return int(self.texts.block_tokens * (6 * self.shape.hidden + 2 * self.shape.ffn))

    def _searched_bytes(self) -> int:
        """Return what gptqmodel's search for AWQ's scales takes of a CPU's memory."""
        tokens, shape = self.texts.block_tokens, self.shape
        most = max(one.num_inputs for layer in shape.layers for one in layer.linears)
        # Those of all linear layers, and the absolute values of the widest.
        kept = rates.CPU_INPUT_BYTES * tokens * (6 * shape.hidden + shape.ffn + most)
        kept += min(rates.CPU_MEAN_BYTES, 4 * tokens * most)
        at_once = min(tokens, rates.BLOCKS_AT_ONCE * rates.CLIP_TOKENS)
        kept += rates.CPU_ACTIVATION_BYTES * at_once * (4 * shape.hidden + 3 * shape.ffn)
        return int(kept) + rates.CPU_WEIGHT_BYTES * self._widest

    def _kept_value_bytes(self) -> int:
        if self.engine == "gptqmodel" and not self.bench.is_gpu:
            return self._searched_bytes()
        kept = int(self._count_values() * rates.AWQ_VALUE_BYTES[self._device])
        return kept + (rates.AWQ_RAM_BYTES if self.engine == "gptqmodel" else 0)

    def _quantize_gptq(self) -> PhaseForecast:
        shape, bench = self.shape, self.bench
        linears = [(one, n) for layer, n in shape.kinds for one in layer.linears]
        columns = sum(n * one.num_inputs for one, n in linears)
        tokens = self.texts.calibration_tokens
        flops = 2.0 * 3 * shape.num_quantized * tokens / (0.4 * bench.flops_per_s)
        seconds = rates.GPTQMODEL_S + flops + self._io_s()
        seconds += columns * rates.GPTQ_COLUMN_S[self._device]
        seconds += sum(n for _, n in linears) * rates.GPTQ_LINEAR_S[self._device]
        seconds += shape.num_quantized * rates.GPTQ_PACKED_S[self._device]
        kept = int(tokens * shape.hidden * 2 * 2) + 4 * 3 * shape.ffn**2
        ram = self._pack_ram() + (0 if bench.is_gpu else kept + self._predicted_bytes())
        return self._on(
            "quantize", seconds, ram, 3 * self._layer_bytes() + kept + rates.PACK_VRAM_BYTES
        )

    def _io_s(self) -> float:
        whole, size = self.made.merged_bytes, self.made.final_bytes
        return whole / rates.READ_BYTES_PER_S + (whole + size) / rates.WRITE_BYTES_PER_S

    def _layer_bytes(self) -> int:
        return 2 * max(layer.num_parameters for layer in self.shape.layers)

    def _pack_ram(self, engine: Engine = "gptqmodel") -> int:
        held = int(rates.PACKED_SHARE[self._device] * self.made.merged_bytes)
        if engine == "gptqmodel":
            held = min(held, self._layers_held_bytes())
        return self._base_ram + rates.PACK_RAM_BYTES[engine][self._device] + held

    def _layers_held_bytes(self) -> int:
        """Return what gptqmodel holds of a model: a few layers, and what is outside of them."""
        outside = self.shape.num_embedding + self.shape.num_head
        return rates.LAYERS_HELD * self._layer_bytes() + 2 * outside

    def _predicted_bytes(self) -> int:
        rows = min(rates.ROWS_AT_ONCE, self.texts.calibration_rows)
        return rows * self.texts.longest_tokens * self.shape.vocab * rates.LOGIT_BYTES

    def _quantize_gguf(self) -> PhaseForecast:
        seconds, kinds = 0.0, {kind for kind, _ in self.made.files}
        if "F16" not in kinds and kinds - {"Q8_0"}:
            seconds = self._convert_s()  # F16, which the K types are made of
        for kind, size in self.made.files:
            if kind in ("F16", "Q8_0"):
                seconds += self._convert_s()
            else:
                seconds += self.shape.num_parameters / (
                    rates.K_WEIGHTS_PER_S * self.bench.num_cores
                )
            seconds += size / rates.WRITE_BYTES_PER_S
        ram = self._base_ram + rates.LOADED_RAM_BYTES[self._device]
        largest = max(self._widest, self.shape.num_embedding)
        ram += rates.CONVERT_WEIGHT_BYTES[self._device] * largest
        return self._on("quantize", seconds, ram, 0)

    def _convert_s(self) -> float:
        whole = self.made.merged_bytes
        return rates.CONVERT_S[self._device] + whole / rates.CONVERTED_BYTES_PER_S

    def _proof(self) -> PhaseForecast:
        size, ram = self.made.final_bytes, self._base_ram
        if EXPORTS[self.method].runtime == "llama.cpp":
            words = min(rates.LLAMA_WORDS, self.shape.vocab)
            rate = rates.LLAMA_BYTES_PER_S * self.bench.num_cores
            step = (
                size / min(rate, rates.LLAMA_MOST_BYTES_PER_S) / len(self.made.files)
                + rates.LLAMA_TOKEN_S[self._device]
                + words * rates.LLAMA_WORD_S
            )
            tokens = self._tokens + self._answers + rates.ANSWER_TOKENS
            seconds = len(self.made.files) * tokens * step
            compared = self._logits_bytes(rates.COMPARE_BYTES)
            return self._on("proof", seconds, ram + compared + rates.LLAMA_RAM_BYTES, 0)
        if not self.bench.holds_result:
            return self._proof_unpacked()
        on_gpu, of_format = self.bench.is_gpu, rates.FORMATS[self.method]
        seconds = (
            rates.PROVE_S
            + size / rates.READ_BYTES_PER_S
            + self._judge_s(self._tokens, on_gpu=on_gpu)
        )
        if not on_gpu:
            seconds += self.shape.num_quantized / rates.UNPACKED_WEIGHTS_PER_S
        tokens = self._answer_passes + rates.ANSWER_TOKENS + 1
        moved = size
        if on_gpu:
            moved += of_format.weight_bytes * self.shape.num_quantized
        seconds += self._answer_s(moved, tokens, on_gpu=on_gpu, layer_s=of_format.layer_s)
        vram = size + self._logits_bytes() + of_format.unpack_bytes * self._widest
        ram = self._held_ram()
        if on_gpu and EXPORTS[self.method].calibrated:
            vram += rates.PACK_VRAM_BYTES
        else:
            ram += self._logits_bytes(rates.COMPARE_BYTES) + (0 if on_gpu else self._loaded_bytes())
        return self._on("proof", seconds, ram, vram)

    def _proof_unpacked(self) -> PhaseForecast:
        """Return what takes as long as measuring the original, once the result is unpacked."""
        held, bench = self._held_ram(), self.bench
        if bench.ram_bytes is not None:
            bench = replace(bench, ram_bytes=max(0, bench.ram_bytes - held))
        left = replace(self, bench=bench)
        original = left._original()
        seconds = original.seconds + self.made.final_bytes / rates.READ_BYTES_PER_S
        seconds += 2 * self.made.merged_bytes / rates.WRITE_BYTES_PER_S  # once apart, once in files
        if not bench.is_gpu:
            per_s = rates.FORMATS[self.method].unpacked_per_s * bench.num_cores
            seconds += self.shape.num_quantized / per_s
        measured = self._logits_bytes(rates.COMPARE_BYTES)
        measured += 0 if original.vram_bytes else left._wide_bytes()
        ram = held + max(measured, rates.UNPACKED_BYTES * self._widest)
        return _phase("proof", seconds, ram, original.vram_bytes)

    def _held_ram(self) -> int:
        """Return what the process holds when the result is loaded."""
        if self.bench.is_gpu and EXPORTS[self.method].calibrated:
            # gptqmodel returns little of its memory.
            ram = self._pack_ram() + (rates.AWQ_RAM_BYTES if self.method == "awq" else 0)
            if self.engine == "autoawq":  # which is still there when gptqmodel loads the result
                ram += rates.PACK_RAM_BYTES["autoawq"]["gpu"] + self._kept_value_bytes()
            return ram
        ram = self._base_ram + (
            rates.FORMATS[self.method].ram_bytes or rates.UNPACK_RAM_BYTES[self.engine]
        )
        if self.bench.is_gpu or not EXPORTS[self.method].calibrated or self.engine != "gptqmodel":
            return ram
        ram += min(self.made.merged_bytes, self._layers_held_bytes())
        if self.method == "awq":
            ram += int(rates.UNRETURNED_SHARE * self._kept_value_bytes())
        return ram

    def _loaded_bytes(self) -> int:
        """Return what the result takes of a CPU's memory.

        What is not quantized becomes float32, and so do weights that the kernels of GPTQ and AWQ
        have used, and all of NF4 (agents/quantizers/inference/models.py).
        """
        size, shape = self.made.final_bytes, self.shape
        wide = 2 * (shape.num_parameters - shape.num_quantized)
        return size + wide + 4 * shape.num_quantized

    def _on(self, name: str, seconds: float, ram: int, vram: int) -> PhaseForecast:
        taken = vram + rates.WORKSPACE_BYTES if vram else 0
        return _phase(name, seconds, ram, taken if self.bench.is_gpu else None)


def _phase(name: str, seconds: float, ram: int, vram: int | None = None) -> PhaseForecast:
    return PhaseForecast(name=name, seconds=seconds, ram_bytes=int(ram), vram_bytes=vram)
