"""Forecast the quantizing phase: AWQ and GPTQ, formats made by loading, and GGUF. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from app.artifacts.estimates import rates
from app.artifacts.estimates.work import PhaseForecast, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeWork(Work):
    """Work with the phase in which the model is quantized."""

    def _quantize(self) -> PhaseForecast:
        own = {
            "awq": self._quantize_awq,
            "gptq": self._quantize_gptq,
            "gguf": self._quantize_gguf,
        }
        return own.get(self.method, self._quantize_by_loading)()

    def _quantize_by_loading(self) -> PhaseForecast:
        whole, size, bench = self.made.merged_bytes, self.made.final_bytes, self.bench
        of_format = rates.FORMATS[self.method]
        seconds = of_format.import_s + whole / rates.READ_BYTES_PER_S
        # Written twice: tensor by tensor, then joined into files.
        seconds += 2 * size / rates.WRITE_BYTES_PER_S
        if not bench.is_gpu:
            seconds += self._num_quantized / of_format.weights_per_s
        # Weights are processed one by one, and their memory is freed from time to time.
        at_once = rates.WEIGHT_AT_ONCE_BYTES[self._device] * self._widest
        if bench.is_gpu:  # 16-bit tensors pass through the GPU; a CPU writes the mapped ones
            at_once = max(at_once, 2 * self.shape.num_embedding)
        experts = max(layer.num_experts_params for layer, _ in self.shape.kinds)
        # Experts stay in 16 bits, but are joined into one parameter and split again.
        at_once = max(at_once, int(2 * rates.MERGED_SHARE_OF_EXPERTS * experts))
        ram = self._base_ram + of_format.ram_bytes + at_once + rates.UNRETURNED_BYTES
        return self._on("quantize", seconds, ram, at_once)

    def _quantize_awq(self) -> PhaseForecast:
        shape, bench = self.shape, self.bench
        tokens = self.texts.block_tokens
        products = self._num_quantized * min(tokens, rates.CLIP_TOKENS) * rates.CLIPS
        search = 2.0 * self._num_reached * tokens * rates.GRID
        seconds = search / (rates.SEARCH_SHARE[self._device] * bench.flops_per_s)
        if not bench.is_gpu:
            rate = rates.ROUNDED_WEIGHTS_PER_S["cpu"] * bench.num_cores
            seconds += rates.ROUNDINGS * self._num_quantized / rate
        if self.engine == "gptqmodel":
            seconds += 2.0 * products / bench.flops_per_s
        elif bench.is_gpu:
            seconds += products * rates.KEPT_PRODUCT_BYTES / bench.memory_bytes_per_s
        else:
            seconds += products / (rates.KEPT_PRODUCTS_PER_S * bench.num_cores / 2)
        if bench.is_gpu:
            seconds += rates.AWQ_LAYER_S * shape.num_layers
            seconds += self._num_quantized / rates.AWQ_WEIGHTS_PER_S
        seconds += rates.GPTQMODEL_S + self._io_s()
        kept = self._kept_value_bytes()
        if not bench.is_gpu:  # with little text, loading takes more memory than the kept inputs
            kept = max(kept, self._predicted_bytes())
        moved = tokens * 3 * shape.hidden  # inputs, outputs, and those of attention
        at_once = min(tokens, rates.BLOCKS_AT_ONCE * rates.CLIP_TOKENS) * (
            4 * shape.hidden + 3 * shape.ffn
        )
        held = 3 * self._layer_bytes() + 2 * int(moved)
        if self.engine == "autoawq":  # it packs on the CPU, and keeps its products
            most_inputs = max(
                linear.num_inputs for layer in shape.layers for linear in layer.linears
            )
            at_once = max(at_once, rates.KEPT_OUTPUTS * rates.CLIP_TOKENS * most_inputs)
            vram = held + 2 * int(at_once)
            return self._on("quantize", seconds, self._pack_ram("autoawq") + kept, vram)
        vram = held + 2 * int(at_once) + rates.PACK_VRAM_BYTES
        more = 2 * int(tokens * (max(shape.hidden, shape.ffn) + shape.hidden)) + 4 * self._widest
        has_room = vram + more + rates.WORKSPACE_BYTES < (bench.vram_bytes or 0)
        # With enough room, inputs, outputs and weights stay on the GPU; otherwise gptqmodel copies
        # them there for each scale.
        if has_room:
            vram += more
        return self._on("quantize", seconds, self._pack_ram() + kept, vram)

    def _searched_bytes(self) -> int:
        """Return the RAM of gptqmodel's search for AWQ's scales on a CPU, in bytes."""
        tokens, shape = self.texts.block_tokens, self.shape
        most = max(linear.num_inputs for layer in shape.layers for linear in layer.linears)
        # Inputs of all linear layers, and absolute values of the widest input.
        kept = rates.CPU_INPUT_BYTES * tokens * (6 * shape.hidden + shape.ffn + most)
        kept += min(rates.CPU_MEAN_BYTES, 4 * tokens * most)
        at_once = min(tokens, rates.BLOCKS_AT_ONCE * rates.CLIP_TOKENS)
        kept += rates.CPU_ACTIVATION_BYTES * at_once * (4 * shape.hidden + 3 * shape.ffn)
        return int(kept) + rates.CPU_WEIGHT_BYTES * self._widest

    def _kept_value_bytes(self) -> int:
        if self.engine == "gptqmodel" and not self.bench.is_gpu:
            return self._searched_bytes()
        values = int(self.texts.block_tokens * (6 * self.shape.hidden + 2 * self.shape.ffn))
        kept = int(values * rates.AWQ_VALUE_BYTES[self._device])
        return kept + (rates.AWQ_RAM_BYTES if self.engine == "gptqmodel" else 0)

    def _quantize_gptq(self) -> PhaseForecast:
        shape, bench = self.shape, self.bench
        linears = [(linear, n) for layer, n in shape.kinds for linear in layer.linears]
        columns = sum(n * one.num_inputs for one, n in linears)
        tokens = self.texts.calibration_tokens
        flops = 2.0 * 3 * self._num_reached * tokens / (0.4 * bench.flops_per_s)
        seconds = rates.GPTQMODEL_S + flops + self._io_s()
        seconds += columns * rates.GPTQ_COLUMN_S[self._device]
        seconds += sum(n for _, n in linears) * rates.GPTQ_LINEAR_S[self._device]
        seconds += self._num_quantized * rates.GPTQ_PACKED_S[self._device]
        kept = int(tokens * shape.hidden * 2 * 2)  # inputs and outputs of a layer stay in RAM
        solved, ram = self._solved_bytes(), self._pack_ram() + kept
        if not bench.is_gpu:
            ram += solved + self._predicted_bytes()
        vram = 3 * self._layer_bytes() + solved + rates.PACK_VRAM_BYTES
        return self._on("quantize", seconds, ram, vram)

    def _solved_bytes(self) -> int:
        """Return the bytes to round a layer's weights by GPTQ, without the layer itself."""
        # The Hessians of all experts of a layer are collected in one pass, hence together.
        linears = [linear for layer, _ in self.shape.kinds for linear in layer.linears]
        widest = max(
            4 * linear.num_inputs**2
            + rates.GPTQ_WEIGHT_BYTES * linear.num_weights
            + rates.GPTQ_INPUT_BYTES * linear.num_inputs
            for linear in linears
        )
        expert_inputs = max(self.shape.hidden, self.shape.expert_ffn)
        return max(widest, 4 * self.shape.num_experts * expert_inputs**2)

    def _quantize_gguf(self) -> PhaseForecast:
        seconds, kinds = 0.0, {kind for kind, _ in self.made.files}
        if "F16" not in kinds and kinds - {"Q8_0"}:
            seconds = self._convert_s()  # K types are quantized from an F16 file
        for kind, size in self.made.files:
            if kind in ("F16", "Q8_0"):
                seconds += self._convert_s()
            else:
                seconds += self.shape.num_parameters / (
                    rates.K_WEIGHTS_PER_S * self.bench.num_cores
                )
            seconds += size / rates.WRITE_BYTES_PER_S
        converter = rates.LOADED_RAM_BYTES[self._device] + rates.CONVERT_RAM_BYTES
        converter += rates.REORDERED_WEIGHT_BYTES * self._most_reordered
        quantizer = 0
        if kinds - {"F16", "Q8_0"}:
            # The experts of a layer are one tensor for each of their three matrices.
            experts = max(layer.num_experts_params for layer, _ in self.shape.kinds) // 3
            largest = max(self._widest, self.shape.num_embedding, self.shape.num_head, experts)
            quantizer = rates.K_WEIGHT_BYTES * largest
        return self._on("quantize", seconds, self._base_ram + max(converter, quantizer), 0)

    @property
    def _most_reordered(self) -> int:
        """Number of weights of the largest matrix whose rows the GGUF converter may reorder."""
        linears = [linear for layer in self.shape.layers for linear in layer.linears]
        found = [linear.num_weights for linear in linears if linear.name not in rates.NOT_REORDERED]
        return max(found, default=0)

    def _convert_s(self) -> float:
        whole = self.made.merged_bytes
        return rates.CONVERT_S[self._device] + whole / rates.CONVERTED_BYTES_PER_S
