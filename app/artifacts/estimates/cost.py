"""Forecast the time and memory of each phase of an export on a node. Pure.

The phases are those that the job itself measures (agents/quantizers): merging checks, loads, merges
and writes; making reads the texts, measures the original and the control, quantizes and verifies
the result. Each phase takes work over a rate: bytes read and written, weights processed by the CPU,
products of matrices. The rates are in `rates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agents.contract.formats import EXPORTS, Engine
from app.artifacts.estimates import rates
from app.artifacts.estimates.forecast import ArtifactForecast
from app.artifacts.estimates.quantize_cost import QuantizeWork
from app.artifacts.estimates.texts import MOST_TEXTS, TextSizes
from app.artifacts.estimates.work import Bench, PhaseForecast, make_phase
from app.planning.shape.model_shape import ModelShape, choose_targets


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
        shape: shape of the model.
        method: `merged`, or one of `agents.contract.formats.METHODS`.
        types: types of the method.
        made: forecast sizes of the result.
        bench: capabilities of the node.
        texts: sizes of the texts for calibration and for the proof.
        targets: linear layers with an adapter, as in a run file; None: all weights were trained.
        engine: package that makes AWQ.

    >>> from app.planning.shape.model_shape import read_shape
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
    work = _ExportPhases(
        shape=shape, method=method, types=types, made=made, bench=bench, texts=texts,
        targets=targets, engine=engine,
    )  # fmt: skip
    merging = work.merge_phases()
    return merging if method == "merged" else (*merging, *work.make_phases())


@dataclass(frozen=True, kw_only=True, slots=True)
class _ExportPhases(QuantizeWork):
    def merge_phases(self) -> tuple[PhaseForecast, ...]:
        whole = self.made.merged_bytes
        adapted = self._count_adapted()
        base = rates.LOADED_RAM_BYTES[self._device]
        ram = base + rates.MERGE_RAM_BYTES + self._merged_at_once()
        seconds = adapted / rates.MERGED_WEIGHTS_PER_S + whole / rates.WRITE_BYTES_PER_S
        return (
            make_phase("check", rates.START_S + self._hash_s(), 20_000_000),
            make_phase("load", rates.IMPORT_S[self._device], base),  # hashing has read the files
            make_phase("merge", rates.PEFT_S + seconds, ram),
        )

    def _merged_at_once(self) -> int:
        """Return the bytes merged at a time: of a tensor, or of a matrix of all experts."""
        # Experts are joined into one tensor, and split again into the tensors of the files.
        layers = [layer for layer, _ in self.shape.kinds]
        # The mapped embedding is written directly, unless all weights were trained.
        widest = max(self._widest, self.shape.num_embedding if self.targets is None else 0)
        experts = max(layer.num_experts_params for layer in layers)
        weights = max(widest, rates.MERGED_SHARE_OF_EXPERTS * experts)
        return int(self.made.merged_bytes / self.shape.num_parameters * weights)

    def _hash_s(self) -> float:
        """Return the seconds to hash the base model, several files at once on one core each."""
        whole = self.made.merged_bytes
        at_once = min(rates.HASHED_AT_ONCE, self.bench.num_cores)
        return max(min(whole, rates.SHARD_BYTES), whole / at_once) / rates.HASH_BYTES_PER_S

    def _count_adapted(self) -> int:
        """Return the number of weights that merging changes."""
        if self.targets is None:
            return self.shape.num_parameters
        layers = self.shape.tell_apart(self.targets).layers
        chosen = [linear for layer in layers for linear in choose_targets(layer, self.targets)]
        return sum(one.num_weights for one in chosen)

    def make_phases(self) -> tuple[PhaseForecast, ...]:
        return (
            make_phase(
                "texts",
                rates.START_S + rates.IMPORT_S[self._device],
                rates.LOADED_RAM_BYTES[self._device],
            ),
            self._original(),
            self._control(),
            self._quantize(),
            self._proof(),
        )

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
            seconds += self._num_quantized / rates.UNPACKED_WEIGHTS_PER_S
        tokens = self._answer_passes + rates.ANSWER_TOKENS + 1
        moved = size
        if on_gpu:
            moved += of_format.weight_bytes * self._num_quantized
        seconds += self._answer_s(moved, tokens, on_gpu=on_gpu, layer_s=of_format.layer_s)
        vram = size + self._logits_bytes() + of_format.unpack_bytes * self._widest
        ram = self._held_ram()
        if on_gpu and EXPORTS[self.method].calibrated:
            vram += rates.PACK_VRAM_BYTES
        else:
            ram += self._logits_bytes(rates.COMPARE_BYTES) + (0 if on_gpu else self._loaded_bytes())
        return self._on("proof", seconds, ram, vram)

    def _proof_unpacked(self) -> PhaseForecast:
        """Return the proof of a result that is unpacked on the disk because no memory holds it."""
        # The unpacked result is as large as the original, and is measured in the same way.
        held, bench = self._held_ram(), self.bench
        if bench.ram_bytes is not None:
            bench = replace(bench, ram_bytes=max(0, bench.ram_bytes - held))
        left = replace(self, bench=bench)
        original = left._original()
        seconds = original.seconds + self.made.final_bytes / rates.READ_BYTES_PER_S
        # Written twice: tensor by tensor, then joined into files.
        seconds += 2 * self.made.merged_bytes / rates.WRITE_BYTES_PER_S
        if not bench.is_gpu:
            per_s = rates.FORMATS[self.method].unpacked_per_s * bench.num_cores
            seconds += self._num_quantized / per_s
        measured = self._logits_bytes(rates.COMPARE_BYTES)
        measured += 0 if original.vram_bytes else left._wide_bytes()
        ram = held + max(measured, rates.UNPACKED_BYTES * self._widest)
        return make_phase("proof", seconds, ram, original.vram_bytes)

    def _held_ram(self) -> int:
        """Return the bytes of RAM that the process holds when the result is loaded."""
        if self.bench.is_gpu and EXPORTS[self.method].calibrated:
            # gptqmodel frees little of its memory before the proof.
            ram = self._pack_ram() + (rates.AWQ_RAM_BYTES if self.method == "awq" else 0)
            if self.engine == "autoawq":  # still in memory when gptqmodel loads the result
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
        """Return the bytes of RAM of the loaded result on a CPU."""
        # Weights that are not quantized become float32, and so do those that the kernels of GPTQ
        # and AWQ have used, and all of NF4 (agents/quantizers/inference/models.py).
        size, shape = self.made.final_bytes, self.shape
        wide = 2 * (shape.num_parameters - self._num_quantized)
        return size + wide + 4 * self._num_quantized
