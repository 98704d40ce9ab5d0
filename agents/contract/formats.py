"""Export formats, one row each, read by all code that makes or shows one.

A new format is a row here and a module of the same name in `agents/quantizers/formats`; its time
and memory are a row of `app/artifacts/estimates/rates.py`. Command line, wizard, checks and cards
loop over the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Method = Literal["nf4", "awq", "gptq", "gguf"]
"""Formats that need quantizing; the merged model keeps half precision."""

Engine = Literal["gptqmodel", "autoawq"]
ENGINES: tuple[Engine, ...] = ("gptqmodel", "autoawq")
"""Packages that can make AWQ; the first one measures better and is maintained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFormat:
    """Properties of a format."""

    name: str
    """Value of `--to`, of a job's `method` and of an artifact's format."""
    label: str
    """Name in the export wizard."""
    summary: str
    """Programs and purposes that it suits, for the wizard."""
    made_by: str = ""
    """Package and paper of the method, for the card; `{engine}` is the engine of the job."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Variants with their labels; empty: it has no variants."""
    usual_types: tuple[str, ...] = ()
    """Types of an export for which the user chose none."""
    joins_types: bool = False
    """True if one job makes several types, sharing work, as files of one artifact."""
    converted_types: tuple[str, ...] = ()
    """Types that need no tool that is built with a C++ compiler."""
    bits_per_weight: float | None = None
    """Bits of a quantized weight, including its share of the scales; None: they depend on the
    type."""
    calibrated: bool = False
    """True if its rounding is fitted to texts, in groups of weights (see `choose_group`)."""
    needs_gpu: bool = False
    """True if it cannot be made on a CPU."""
    runtime: Literal["transformers", "llama.cpp"] = "transformers"
    """Program that loads the result for its proof and for chats."""
    lock: str | None = None
    """File of `resources/environments` with the packages to make and load it; None: the training
    environment suffices."""
    loaded_with: str = ""
    """Packages that Transformers loads it with, as arguments of pip, for the card."""
    quant_method: str | None = None
    """Value of `quant_method` in its config.json; None: it has no such field."""
    tgi: bool = True
    """True if Text Generation Inference can load it."""
    engines: tuple[Engine, ...] = ENGINES[:1]
    """Packages that can make it."""


# One 8-bit scale for 64 weights, and a 32-bit one for 256 of those (arXiv:2305.14314).
_NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)

# A 16-bit scale and a 4-bit zero point for 128 weights (arXiv:2306.00978).
_AWQ_BITS = 4 + 20 / 128

EXPORTS: dict[str, ExportFormat] = {
    row.name: row
    for row in (
        ExportFormat(
            name="merged",
            label="Merged model",
            summary="Base model and adapter in one, at full precision. For Transformers, vLLM or "
            "further training.",
        ),
        ExportFormat(
            name="gguf",
            label="GGUF",
            summary="For llama.cpp, Ollama and LM Studio. Also runs on CPUs and small GPUs.",
            made_by="llama.cpp",
            types={
                "F16": "F16, lossless",
                "Q8_0": "Q8_0, nearly lossless",
                "Q6_K": "Q6_K",
                "Q5_K_M": "Q5_K_M",
                "Q4_K_M": "Q4_K_M, the usual choice",
                "Q3_K_M": "Q3_K_M, when nothing else fits",
            },
            usual_types=("Q8_0",),
            joins_types=True,
            converted_types=("F16", "Q8_0"),
            runtime="llama.cpp",
            lock="gguf",
        ),
        ExportFormat(
            name="awq",
            label="AWQ, 4-bit",
            summary="Calibrated on your data. For vLLM, TGI and Transformers on NVIDIA GPUs.",
            made_by="{engine}, AWQ in its classic layout (arXiv:2306.00978)",
            bits_per_weight=_AWQ_BITS,
            calibrated=True,
            lock="gptqmodel",
            loaded_with="gptqmodel",
            quant_method="awq",
            engines=ENGINES,
        ),
        ExportFormat(
            name="gptq",
            label="GPTQ",
            summary="Calibrated on your data, 4-bit or 8-bit. For vLLM, TGI and Transformers on "
            "NVIDIA GPUs.",
            made_by="gptqmodel, GPTQ (arXiv:2210.17323)",
            types={"4-bit": "4-bit", "8-bit": "8-bit, closer to the original"},
            usual_types=("4-bit",),
            calibrated=True,
            lock="gptqmodel",
            loaded_with="gptqmodel optimum",
            quant_method="gptq",
        ),
        ExportFormat(
            name="nf4",
            label="NF4, 4-bit",
            summary="The format QLoRA trains on, and the fastest to make. For Transformers with "
            "bitsandbytes.",
            made_by="bitsandbytes NF4 with double quantization (arXiv:2305.14314)",
            bits_per_weight=_NF4_BITS,
            loaded_with="bitsandbytes",
            quant_method="bitsandbytes",
            tgi=False,  # TGI quantizes to NF4 while loading, and cannot load NF4 files
        ),
    )
}
"""Every format by its name; the order is that of the wizard."""

# llama.cpp, tools/quantize/quantize.cpp; some publishers add L and XL.
_GGUF_TYPES = frozenset(
    f"{bits}{kind}"
    for bits, kinds in (
        ("", ("F32", "F16", "BF16", "TQ1_0", "TQ2_0", "MXFP4", "MXFP4_MOE", "Q8_0", "Q8_K")),
        ("Q4_", ("0", "1", "0_4_4", "0_4_8", "0_8_8")),
        ("Q5_", ("0", "1")),
        ("IQ", ("1_S", "1_M", "2_XXS", "2_XS", "2_S", "2_M", "3_XXS", "3_XS", "3_S", "3_M")),
        ("IQ4_", ("NL", "XS")),
        *((f"Q{n}_K", ("", "_S", "_M", "_L", "_XL")) for n in (2, 3, 4, 5, 6, 8)),
    )
    for kind in kinds
)


def is_known_type(format_name: str, kind: str) -> bool:
    """Return whether a format has a type, in any case; those of GGUF are llama.cpp's, too.

    The name of a type comes from a file's name or a proof, and becomes a part of commands and of
    other files' names.

    >>> is_known_type("gguf", "iq4_xs"), is_known_type("gptq", "8-bit")
    (True, True)
    >>> is_known_type("gguf", "$(id)"), is_known_type("gguf", "../x"), is_known_type("x", "F16")
    (False, False, False)
    """
    row = EXPORTS.get(format_name)
    if row is None:
        return False
    return kind in row.types or (row.name == "gguf" and kind.upper() in _GGUF_TYPES)


FORMATS = tuple(EXPORTS)
METHODS = tuple(name for name in FORMATS if name != "merged")

GROUPS = (128, 64, 32)
"""Numbers of weights of AWQ and GPTQ that share a scale; the first that divides every layer's input
is used."""

# Keys that every current transformer has in its configuration. GPT-2 and Mamba use others, and
# neither gptqmodel nor AutoAWQ quantizes them.
_SIZES = {"hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers"}

# AWQ's search for clipping takes the outputs of a layer in blocks of this many.
_AWQ_ROWS = 64


def choose_group(config: Mapping[str, Any], method: str) -> int:
    """Return the largest group that divides the inputs of all linear layers, for AWQ and GPTQ.

    >>> choose_group({"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 512,
    ...     "num_hidden_layers": 4}, "gptq")
    64

    Raises:
        ValueError: this model cannot be quantized with the method; the message says why.
    """
    if not config.keys() >= _SIZES:
        raise ValueError(
            f"{method} does not support this kind of model ({config.get('model_type')}), whose "
            "layers are built differently"
        )
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    # Some models, such as Qwen3, have heads wider than hidden / heads.
    width = config.get("head_dim") or hidden // heads
    # Configs without the field are of models whose heads have keys of their own.
    keys = config.get("num_key_value_heads") or heads
    inputs = (hidden, heads * width, config["intermediate_size"], *_find_more_inputs(config))
    outputs = (hidden, heads * width, keys * width, config["intermediate_size"])
    inputs = tuple(size for size in inputs if size)
    groups = [group for group in GROUPS if all(size % group == 0 for size in inputs)]
    if not groups:
        raise ValueError(
            f"the layers of this model have {', '.join(map(str, sorted(set(inputs))))} inputs; "
            f"{method} needs multiples of {GROUPS[-1]}"
        )
    odd = [size for size in outputs if size % _AWQ_ROWS]
    if method == "awq" and odd:
        raise ValueError(
            f"a layer of this model has {odd[0]} outputs; awq needs multiples of {_AWQ_ROWS}"
        )
    return groups[0]


def _find_more_inputs(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield input sizes of other layers: linear attention, Mamba, latent attention, experts."""

    def product(*names: str) -> int:
        # A missing size makes the product 0, which the caller drops.
        sizes = [config.get(name) for name in names]
        return math.prod(size if isinstance(size, int) else 0 for size in sizes)

    yield product("linear_num_value_heads", "linear_value_head_dim")
    yield product("mamba_expand", "hidden_size")
    yield product("mamba_num_heads", "mamba_head_dim")
    if config.get("kv_lora_rank"):
        # DeepSeek's latent attention: values have a width of their own.
        yield product("num_attention_heads", "v_head_dim")
    for name in ("q_lora_rank", "kv_lora_rank", "mamba_d_ssm", "shared_intermediate_size"):
        yield product(name)
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        yield product(name)
