"""Measured speeds and memory of the programs that quantize.

Constants for a CPU are fitted to measurements by tests/bench/bench_quantize on one CPU (torch 2.13,
gptqmodel 7.6, llama.cpp b10605); those for a GPU to 26 measurements on H200s
(tests/app/quantize/measured_on_gpus.jsonl): memory to all, times to the 19 with an otherwise idle
PC. If a constant has two values, `cpu` and `gpu` name the device of the job.
"""

from __future__ import annotations

from dataclasses import dataclass

PROMPTS, ANSWER_TOKENS = 8, 32
# Import of PyTorch (the build for the device) and Transformers, in seconds. A PC with a GPU takes
# 6 s with a warm page cache, and up to 15 s without.
IMPORT_S = {"cpu": 3.4, "gpu": 11.0}
# Initialisation of CUDA, in seconds.
CUDA_S = 2.0
# Additional imports of PEFT and gptqmodel, in seconds.
PEFT_S, GPTQMODEL_S = 2.8, 6.0
# Start of llama.cpp's converter, in seconds.
CONVERT_S = {"cpu": 5.0, "gpu": 15.0}
# Loading the result for its proof, in seconds.
PROVE_S = 2.5
START_S = 0.5
READ_BYTES_PER_S, WRITE_BYTES_PER_S = 3.5e9, 2.4e9
# Hashing rate of one core, and number of files at once (agents/trainer/checkpoint/fingerprint.py).
HASH_BYTES_PER_S, HASHED_AT_ONCE = 1.2e9, 4
# Merged weights per second of one core, including the conversion to float32 and back.
MERGED_WEIGHTS_PER_S = 0.3e9
# Overhead of a decoder layer per token on a GPU for kernel launches, in seconds.
LAYER_S = 0.0012
# Log-probabilities that the CPU converts to half precision, or compares, per second.
KEEP_VALUES_PER_S = 45e6
# Weights per second that one core, or a GPU, rounds for the baseline.
ROUNDED_WEIGHTS_PER_S = {"cpu": 0.1e9, "gpu": 20e9}
# Rate at which a CPU unpacks 4-bit weights for its kernel, in weights per second.
UNPACKED_WEIGHTS_PER_S = 60e6
# AWQ tries 20 scales per group of layers, each with products of all inputs of the group
# (arXiv:2306.00978), and ten clippings of each on 512 tokens.
GRID, CLIPS, CLIP_TOKENS = 26, 11, 512
# Rate of the search's products relative to long products. It may exceed 1 on a CPU, whose known
# rate is for float32, since the search runs in bfloat16.
SEARCH_SHARE = {"cpu": 1.05, "gpu": 0.1}
# Roundings of each weight: one per scale and clipping, and the final one. Negligible on a GPU.
ROUNDINGS = 31
# AutoAWQ writes and reads each product of its clippings: products per second on two cores, and
# GPU memory traffic per product in bytes.
KEPT_PRODUCTS_PER_S, KEPT_PRODUCT_BYTES = 1.5e9, 4
# Outputs of a matrix whose products AutoAWQ keeps at once.
KEPT_OUTPUTS = 256
# RAM per value of a layer's inputs, in bytes; for a CPU that of AutoAWQ, which compares in float32.
AWQ_VALUE_BYTES = {"cpu": 8.0, "gpu": 1.5}
# Blocks that the search processes at once.
BLOCKS_AT_ONCE = 8
# RAM of gptqmodel's search on a CPU, in bytes: per kept input value, per value computed at once,
# per weight of a layer's widest matrix, which it copies twice; and the maximum for the mean of
# inputs in float32.
CPU_INPUT_BYTES, CPU_ACTIVATION_BYTES, CPU_WEIGHT_BYTES = 2, 4, 8
CPU_MEAN_BYTES = 1 << 30
# Share of that RAM which the process still holds when the result is loaded.
UNRETURNED_SHARE = 0.5
# Quantizing on a GPU: seconds per decoder layer, and additional weights per second.
AWQ_LAYER_S, AWQ_WEIGHTS_PER_S = 1.1, 50e6
# Seconds per column: GPTQ rounds columns one after the other.
GPTQ_COLUMN_S = {"cpu": 2.5e-4, "gpu": 1.7e-4}
# Packing and writing: seconds per linear layer, and per weight.
GPTQ_LINEAR_S, GPTQ_PACKED_S = {"cpu": 0.0, "gpu": 0.14}, {"cpu": 0.0, "gpu": 5.7e-8}
# Memory of GPTQ in addition to a layer's Hessian, in bytes: per weight, and per input for the rows
# copied at a time. Must match agents/quantizers/formats/gptq_by_gptqmodel.py.
GPTQ_WEIGHT_BYTES, GPTQ_INPUT_BYTES = 8, 12 << 10
# Calibration rows at once, and bytes per logit: gptqmodel computes the logits and discards them.
ROWS_AT_ONCE, LOGIT_BYTES = 8, 4
CONVERTED_BYTES_PER_S = 0.25e9
# Weights per second that one core quantizes to llama.cpp's K types.
K_WEIGHTS_PER_S = 12e6
# Overhead of llama.cpp per token, in seconds (its threads wait for each other, and a PC with GPUs
# has more of them), and of handing over each of the 1,000 likeliest tokens.
LLAMA_TOKEN_S, LLAMA_WORD_S, LLAMA_WORDS = {"cpu": 0.002, "gpu": 0.01}, 4e-6, 1000
# Weights that llama.cpp reads per token, in bytes per second: one core, and all cores of a PC.
LLAMA_BYTES_PER_S, LLAMA_MOST_BYTES_PER_S = 7.5e9, 55e9
# RAM of llama.cpp's converter in addition to its imports, small since it writes tensors a few rows
# at a time; and per weight of a matrix whose rows it reorders: in float32, before and after.
CONVERT_RAM_BYTES, REORDERED_WEIGHT_BYTES = 20_000_000, 8
# Linear layers whose rows it does not reorder.
NOT_REORDERED = ("o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
# RAM of llama.cpp's quantizer to the K types, per weight of its largest tensor: in float32, and the
# same for the result.
K_WEIGHT_BYTES = 8
# RAM of Python, PyTorch and Transformers; on a GPU with CUDA's libraries.
BASE_RAM_BYTES = {"cpu": 281_000_000, "gpu": 1_250_000_000}
# GPU memory per weight while it is rounded for the baseline, in bytes.
ROUND_BYTES = 10
# GPU memory that cuBLAS takes at the first product.
WORKSPACE_BYTES = 34_000_000
# Weights in memory while a matrix of a layer's experts is merged or loaded for NF4, as a share of
# the experts' weights: gate and up are two thirds, held joined and as in the files.
MERGED_SHARE_OF_EXPERTS = 4 / 3
# RAM of PEFT, and of the rows that are merged at once.
MERGE_RAM_BYTES = 62_000_000
# RAM of Python, PyTorch (the build of the device) and Transformers while no GPU is used.
LOADED_RAM_BYTES = {"cpu": 281_000_000, "gpu": 572_000_000}
# RAM of each quantizing package with its imports.
PACK_RAM_BYTES = {
    "gptqmodel": {"cpu": 310_000_000, "gpu": 1_150_000_000},
    "autoawq": {"cpu": 310_000_000, "gpu": 560_000_000},
}
# Share of the model that the package holds in RAM.
PACKED_SHARE = {"cpu": 1.0, "gpu": 0.26}
# Maximum number of layers that gptqmodel holds: the current one, its copies and results. Memory of
# finished layers is freed (agents/quantizers/job/heap.py): 12 layers of 23 MB took 0.11 GB in
# addition to the package, and 0.40 GB without freeing.
LAYERS_HELD = 4
# Memory to quantize one matrix by loading, in bytes per weight; a CPU needs more to look up codes.
WEIGHT_AT_ONCE_BYTES = {"cpu": 36, "gpu": 8}
# Memory that accumulates before it is freed when weights are quantized one by one, in bytes.
UNRETURNED_BYTES = 4 << 25
# GPU memory that CUDA itself takes.
GPU_CONTEXT_BYTES = 600 << 20
# Maximum size of one file of a model; results are written from GPU memory file by file.
SHARD_BYTES = 5_000_000_000
# GPU memory of gptqmodel in addition to the layer and its activations.
PACK_VRAM_BYTES = 130_000_000
# RAM of gptqmodel's AWQ search for a GPU, independent of the amount of text.
AWQ_RAM_BYTES = 620_000_000
# RAM to load the result in the process that made it.
UNPACK_RAM_BYTES = {"gptqmodel": 390_000_000, "autoawq": 100_000_000}
# RAM of llama.cpp, without the file, which it maps.
LLAMA_RAM_BYTES = 55_000_000
# Memory per vocabulary entry and token, in bytes: for prediction, and for comparison with the
# reference.
PREDICT_BYTES, COMPARE_BYTES = 12, 36
# Must match agents/quantizers/inference/models.py, which decides whether the original is measured
# on the GPU.
GPU_SPARE, GPU_SPARE_BYTES = 1.1, 1 << 30
# Must match the same module: GPU memory left free when weights are streamed, and the minimum that
# must stay resident.
STREAM_SPARE_BYTES, LEAST_RESIDENT_BYTES = 5 << 29, 1 << 30
# Must match it as well: share of the free RAM used for weights if not all of them fit.
RAM_SHARE = 0.5
# RAM per weight of the largest matrix while a result is unpacked, in bytes.
UNPACKED_BYTES = 6
# Transfer rate from pageable RAM to a GPU.
STREAMED_BYTES_PER_S = 6e9


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatRates:
    """Costs of a result that Transformers loads.

    Formats made by loading, such as NF4, are quantized by Transformers weight by weight. For those
    of gptqmodel the fields with defaults do not apply; `quantize_cost` has their formulas.
    """

    layer_s: float
    """Time of one decoder layer per token on a GPU, without moving weights, in seconds."""
    weight_bytes: int
    """GPU memory traffic to unpack one weight, in bytes."""
    unpack_bytes: int
    """GPU memory for one weight of a matrix while it is unpacked, in bytes."""
    unpacked_per_s: float
    """Weights that one core unpacks to 16 bits per second; a GPU is faster than the disk."""
    import_s: float = 0.0
    """Time to import the quantizing package, in seconds."""
    weights_per_s: float = 0.0
    """Weights that a CPU quantizes per second."""
    ram_bytes: int = 0
    """RAM of the quantizing package, in bytes."""


FORMATS = {
    "nf4": FormatRates(
        layer_s=0.0022, weight_bytes=0, unpack_bytes=4, import_s=1.0, weights_per_s=70e6,
        ram_bytes=75_000_000, unpacked_per_s=450e6,
    ),
    # gptqmodel's results are unpacked by several operations of PyTorch for each weight.
    "awq": FormatRates(layer_s=0.007, weight_bytes=120, unpack_bytes=24, unpacked_per_s=28e6),
    "gptq": FormatRates(layer_s=0.007, weight_bytes=120, unpack_bytes=24, unpacked_per_s=20e6),
}  # fmt: skip
