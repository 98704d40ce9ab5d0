"""What the programs that quantize were measured to do in a second, and to take.

Constants for a CPU are fitted to the rows of tests/bench/bench_quantize on one (torch 2.13,
gptqmodel 7.6, llama.cpp b10605); those for a GPU to 26 on H200s
(tests/app/quantize/measured_on_gpus.jsonl): memory to all, seconds to the 19 whose GPU and cores
nothing else used. Where there are two, `cpu` and `gpu` are the device of the job.
"""

from __future__ import annotations

from dataclasses import dataclass

PROMPTS, ANSWER_TOKENS = 8, 32
IMPORT_S = {"cpu": 3.4, "gpu": 11.0}
"""PyTorch as it is built for either, with Transformers: on a GPU's PC from 6 s, if its memory still
holds what the disk has read, to 15."""
CUDA_S = 2.0
"""To begin with a GPU."""
PEFT_S, GPTQMODEL_S = 2.8, 6.0
"""Seconds to import packages that come later."""
CONVERT_S = {"cpu": 5.0, "gpu": 15.0}
"""For llama.cpp's converter to start."""
PROVE_S = 2.5
"""To load the result."""
START_S = 0.5
READ_BYTES_PER_S, WRITE_BYTES_PER_S = 3.5e9, 2.4e9
HASH_BYTES_PER_S, HASHED_AT_ONCE = 1.2e9, 4
"""Of one core, and files at once (agents/trainer/checkpoint/fingerprint.py)."""
MERGED_WEIGHTS_PER_S = 0.3e9
"""Of one core: float32 there and back."""
LAYER_S = 0.0012
"""Of a decoder layer for one token on a GPU: starting its kernels."""
KEEP_VALUES_PER_S = 45e6
"""Log-probabilities that become half precision, or are compared, on the processor."""
ROUNDED_WEIGHTS_PER_S = {"cpu": 0.1e9, "gpu": 20e9}
"""Of one core, or of a GPU."""
UNPACKED_WEIGHTS_PER_S = 60e6
"""Weights of 4 bits that a processor unpacks for its kernel in a second."""
GRID, CLIPS, CLIP_TOKENS = 26, 11, 512
"""AWQ tries 20 scales for each group of layers, by products of all that the group feeds
(arXiv:2306.00978), and ten clippings of each on 512 tokens."""
SEARCH_SHARE = {"cpu": 1.05, "gpu": 0.1}
"""Of the rate of long products that those of the search reach: on a CPU that of float32 is known,
and the search is in bfloat16."""
ROUNDINGS = 31
"""Of each weight: for every scale and every clipping, and at last. On a GPU they are quick."""
KEPT_PRODUCTS_PER_S, KEPT_PRODUCT_BYTES = 1.5e9, 4
"""AutoAWQ writes and reads each product of its clippings: what two cores do, and what the memory
of a GPU moves of each."""
KEPT_OUTPUTS = 256
"""Of a matrix, whose products it keeps at once."""
AWQ_VALUE_BYTES = {"cpu": 8.0, "gpu": 1.5}
"""Of what goes into each layer, as it is kept in RAM: on a CPU it is held against in float32."""
BLOCKS_AT_ONCE = 8
"""Of the search, on a GPU."""
UNRETURNED_SHARE = 0.5
"""Of those, which the process holds still when the result is loaded."""
AWQ_LAYER_S, AWQ_WEIGHTS_PER_S = 1.1, 50e6
"""On a GPU: of a decoder layer, and what its weights add to that."""
GPTQ_COLUMN_S = {"cpu": 2.5e-4, "gpu": 1.7e-4}
"""Columns are rounded one after the other."""
GPTQ_LINEAR_S, GPTQ_PACKED_S = {"cpu": 0.0, "gpu": 0.14}, {"cpu": 0.0, "gpu": 5.7e-8}
"""Of a layer of weights and of each of them, to be packed and written."""
ROWS_AT_ONCE, LOGIT_BYTES = 8, 4
"""Of calibration, whose predictions gptqmodel makes before it leaves them alone."""
CONVERTED_BYTES_PER_S = 0.25e9
K_WEIGHTS_PER_S = 12e6
"""Of one core, llama.cpp's K types."""
LLAMA_TOKEN_S, LLAMA_WORD_S, LLAMA_WORDS = {"cpu": 0.002, "gpu": 0.01}, 4e-6, 1000
"""To ask llama.cpp for a token (its threads wait for each other, and a PC with GPUs has more of
them), and to hand over each of a thousand likely words."""
LLAMA_BYTES_PER_S, LLAMA_MOST_BYTES_PER_S = 7.5e9, 55e9
"""Of weights that llama.cpp reads for a token: by one core, and by all that a PC has."""
CONVERT_WEIGHT_BYTES = {"cpu": 12, "gpu": 5}
"""Of one weight of the largest matrix, while it is converted."""
BASE_RAM_BYTES = {"cpu": 281_000_000, "gpu": 1_250_000_000}
"""Python, PyTorch and Transformers, on a GPU with CUDA's libraries."""
ROUND_BYTES = 10
"""Of a weight, while a GPU rounds it for the control."""
WORKSPACE_BYTES = 34_000_000
"""That cuBLAS takes of a GPU at the first product."""
MERGE_RAM_BYTES = 180_000_000
"""PEFT."""
LOADED_RAM_BYTES = {"cpu": 281_000_000, "gpu": 572_000_000}
"""Python, PyTorch as it is built for either, and Transformers, while no GPU is used."""
PACK_RAM_BYTES = {
    "gptqmodel": {"cpu": 310_000_000, "gpu": 1_150_000_000},
    "autoawq": {"cpu": 310_000_000, "gpu": 560_000_000},
}
"""Either with what it imports."""
PACKED_SHARE = {"cpu": 1.0, "gpu": 0.26}
"""Of the model, that it has in memory of its own."""
SHARD_BYTES = 5_000_000_000
"""Of one file of a model; those of a result come from the GPU to be written."""
PACK_VRAM_BYTES = 130_000_000
"""That gptqmodel takes of a GPU beside the layer and what goes through it."""
AWQ_RAM_BYTES = {"cpu": 0, "gpu": 620_000_000}
"""Of its search, however little the text."""
UNPACK_RAM_BYTES = {"gptqmodel": 390_000_000, "autoawq": 100_000_000}
"""To load the result in the process that made it."""
LLAMA_RAM_BYTES = 55_000_000
"""llama.cpp, which maps the file."""
PREDICT_BYTES, COMPARE_BYTES = 12, 36
"""Of one word of one token: to predict it, and to hold it against what was remembered."""
GPU_SPARE, GPU_SPARE_BYTES = 1.1, 1 << 30
"""As agents/quantizers/inference/models.py decides whether the original is measured on the GPU."""
STREAM_SPARE_BYTES, LEAST_RESIDENT_BYTES = 5 << 29, 1 << 30
"""The same: left of a GPU to which weights come for each pass, and what has to stay there."""
STREAMED_BYTES_PER_S = 6e9
"""From ordinary memory of the PC to a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatRates:
    """What a result that Transformers loads takes; the last four only while it is made by loading.

    Formats that are made by loading, such as NF4, are quantized by Transformers itself, weight by
    weight; those of gptqmodel have formulas of their own in `cost`.
    """

    layer_s: float
    """Seconds that one decoder layer takes for one token on a GPU, besides moving weights."""
    weight_bytes: int
    """Bytes that the memory of a GPU moves to unpack one weight."""
    unpack_bytes: int
    """Bytes of GPU memory for one weight of a matrix while it is unpacked."""
    import_s: float = 0.0
    """Seconds to import the package that quantizes."""
    weights_per_s: float = 0.0
    """Weights that a CPU quantizes in a second."""
    ram_bytes: int = 0
    """Memory of the package that quantizes, in bytes."""


FORMATS = {
    "nf4": FormatRates(
        layer_s=0.0022, weight_bytes=0, unpack_bytes=4, import_s=1.0, weights_per_s=70e6,
        ram_bytes=75_000_000,
    ),
    # PyTorch's own operations unpack the results of gptqmodel, several of them for each weight.
    "awq": FormatRates(layer_s=0.007, weight_bytes=120, unpack_bytes=24),
    "gptq": FormatRates(layer_s=0.007, weight_bytes=120, unpack_bytes=24),
}  # fmt: skip
