"""Inputs of an export's forecast, and its phases that measure the original. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.contract.formats import Engine
from app.artifacts.estimates import rates
from app.artifacts.estimates.forecast import (
    ArtifactForecast,
    count_judged_rows,
    count_quantized,
)
from app.artifacts.estimates.texts import TextSizes
from app.planning.shape.model_shape import ModelShape


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
    """Free memory of its GPU, in bytes; None: not known, or no GPU."""
    ram_bytes: int | None = None
    """RAM available to an export, in bytes; None: not known."""
    holds_result: bool = True
    """True if its memory holds a packed result, which is otherwise unpacked on the disk for its
    proof."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseForecast:
    """Forecast of one phase of an export."""

    name: str
    seconds: float
    ram_bytes: int
    vram_bytes: int | None
    """Peak GPU memory, in bytes; None: no GPU is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One export on one node, with the phases that measure its original."""

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
    def _num_quantized(self) -> int:
        return count_quantized(self.shape, self.method)

    @property
    def _num_reached(self) -> int:
        """Number of quantized weights that a token is multiplied with."""
        linear, shape = self.shape.num_quantized, self.shape
        experts = self._num_quantized - linear
        return linear + experts * shape.num_experts_met // max(1, shape.num_experts)

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
        """Number of passes over the weights to generate all answers."""
        # A job on a GPU answers all prompts at once.
        return rates.ANSWER_TOKENS if self.bench.is_gpu else self._answers

    @property
    def _original_on_gpu(self) -> bool:
        vram = self.bench.vram_bytes
        return self.bench.is_gpu and (
            vram is None or self.made.merged_bytes * rates.GPU_SPARE + rates.GPU_SPARE_BYTES <= vram
        )

    @property
    def _resident_bytes(self) -> int | None:
        """GPU memory of the resident part of a streamed original, in bytes; None: not streamed."""
        vram = self.bench.vram_bytes
        if vram is None or self._original_on_gpu or not self.bench.is_gpu:
            return None
        room = vram - rates.STREAM_SPARE_BYTES
        if room < rates.LEAST_RESIDENT_BYTES:
            return None
        return room - self._layer_bytes() // 2  # whole layers stay: half a layer is lost on average

    @property
    def _is_read_again(self) -> bool:
        """True if each pass reads the original from its files, since RAM does not hold it."""
        ram = self.bench.ram_bytes
        return ram is not None and self.made.merged_bytes * rates.GPU_SPARE > ram

    def _stream_s(self, resident_bytes: int, passes: int) -> float:
        come_bytes = self.made.merged_bytes - resident_bytes
        from_files = rates.READ_BYTES_PER_S if self._is_read_again else rates.STREAMED_BYTES_PER_S
        return passes * come_bytes / min(from_files, rates.STREAMED_BYTES_PER_S)

    @property
    def _widest(self) -> int:
        return max(linear.num_weights for layer in self.shape.layers for linear in layer.linears)

    def _judge_s(self, tokens: float, *, on_gpu: bool) -> float:
        """Return the seconds to predict rows and to store or compare the predictions."""
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
        # The rate of a bench with a GPU is the GPU's, so assume a typical rate per core.
        return 60e9 * self.bench.num_cores if self.bench.is_gpu else self.bench.flops_per_s

    def _logits_bytes(self, value_bytes: int = 10) -> int:
        """Return the bytes of the longest row's predictions, in half precision and wider."""
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
        """Return bytes of the float32 model, else of its own dtype, else half the RAM."""
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
        """Return the bytes that gptqmodel holds of a model: a few layers, embedding and head."""
        outside = self.shape.num_embedding + self.shape.num_head
        return rates.LAYERS_HELD * self._layer_bytes() + 2 * outside

    def _predicted_bytes(self) -> int:
        rows = min(rates.ROWS_AT_ONCE, self.texts.calibration_rows)
        return rows * self.texts.longest_tokens * self.shape.vocab * rates.LOGIT_BYTES

    def _on(self, name: str, seconds: float, ram: int, vram: int) -> PhaseForecast:
        taken = vram + rates.WORKSPACE_BYTES if vram else 0
        return make_phase(name, seconds, ram, taken if self.bench.is_gpu else None)


def make_phase(name: str, seconds: float, ram: int, vram: int | None = None) -> PhaseForecast:
    return PhaseForecast(name=name, seconds=seconds, ram_bytes=int(ram), vram_bytes=vram)
