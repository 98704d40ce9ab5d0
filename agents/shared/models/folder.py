"""Inspect a model's folder before anything is sent or loaded: configs, weights and tokenizer.

Master and nodes use the same function, so that a folder that cannot be trained is named at once,
wherever it lies. Only headers are read: a folder of hundreds of gigabytes takes milliseconds. What
is found has a kind; a finding is an error only if no run can come of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agents.shared.files.folder_files import read_regular
from agents.shared.models.config import MOST_BYTES, parse_config
from agents.shared.models.safetensors_header import (
    MAX_TENSORS,
    HeaderError,
    TensorInfo,
    read_header,
)
from agents.shared.models.sizes import find_odd_sizes, show, text_of
from agents.shared.models.tensors import find_tensor_problems
from agents.shared.models.tokenizer import TokenizerFiles, read_tokenizer

FindingKind = Literal[
    "config",  # config.json is missing, broken, or has sizes that no model has
    "architecture",  # it is no causal language model
    "adapter",  # the folder holds an adapter, or would load one
    "quantized",  # the weights are quantized
    "no_weights",  # there are no weights that are ever opened
    "weights",  # a file of weights is damaged
    "index",  # the list of shards is damaged
    "tensors",  # the weights are not those of the config
    "tokenizer",  # there is no tokenizer, or it is damaged
]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
"""Maximum size of the list of shards; that of a model of 90,000 tensors has 9 MB."""
TRAINABLE_METHODS = ("bitsandbytes", "mxfp4")
"""Values of quant_method whose weights an adapter can be trained on."""
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_NARROW = re.compile(r"F[468](_|$)")
_AGAIN = "Copy or download the file again"
_OTHER_MODEL = "Name a causal language model, such as a folder of Llama, Qwen, Mistral or Gemma"
_SAVE_AGAIN = "Save it again with model.save_pretrained(folder, safe_serialization=True)"
_ORIGINAL = "Name the model that it was made from, in safetensors with 16 or 32 bits"
_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model")
"""Ends of the class names of models that can be language models."""
_ENCODERS = frozenset({
    "bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "distilbert", "albert", "electra",
    "deberta", "deberta-v2", "mpnet", "camembert", "modernbert", "nomic_bert", "longformer",
    "big_bird", "ernie", "esm", "flaubert", "funnel", "ibert", "layoutlm", "luke",
    "megatron-bert", "mobilebert", "mra", "nezha", "nystromformer", "rembert", "roformer",
    "splinter", "squeezebert", "vit", "clip", "siglip", "wav2vec2", "hubert", "whisper",
})  # fmt: skip
NO_TEXT_CLASS = frozenset({
    "aria", "aya_vision", "blip", "blip-2", "chameleon", "cohere2_vision", "deepseek_vl",
    "deepseek_vl_hybrid", "florence2", "glm46v", "glm4v", "glm4v_moe", "granite_speech", "idefics",
    "idefics2", "idefics3", "instructblip", "internvl", "janus", "kosmos-2", "lfm2_vl", "llava",
    "llava_next", "llava_next_video", "llava_onevision", "ovis2", "paligemma",
    "perception_lm", "qwen2_5_omni", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_omni_moe",
    "qwen3_vl", "qwen3_vl_moe", "smolvlm", "video_llava", "vipllava", "voxtral",
})  # fmt: skip
"""Types of models for pictures or sound whose language model Transformers does not load alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFinding:
    """One thing that is wrong with a model's folder."""

    kind: FindingKind
    message: str
    """What is wrong, without a full stop, after the words `the model NAME`."""
    hint: str = ""
    """What to do next, without a full stop."""
    file: str = ""
    """Name of the file; empty: the folder as a whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """What a model's folder holds, and what is wrong with it."""

    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict, repr=False)
    """Tensors of all files of weights by name; empty if they cannot be read."""
    tokenizer: TokenizerFiles = field(default_factory=TokenizerFiles)
    findings: tuple[ModelFinding, ...] = ()
    """Reasons why it cannot be trained, the most important first."""


Parts = Literal["all", "tokenizer", "present", "config"]
"""What is inspected: all; config and tokenizer; config and what else is there; the config alone."""


def inspect_model(folder: Path, *, parts: Parts = "all", whole: bool = True) -> ModelFolder:
    """Inspect a model's folder. Never raises: what cannot be read is a finding.

    Args:
        folder: the folder.
        parts: what must be in it.
        whole: also parse large tokenizers, which takes up to half a second.
    """
    config, found = _read_config(folder)
    findings = found or list(find_config_problems(config))
    names = _list_names(folder)
    adapter = _find_adapter(folder, names)
    # An adapter's folder has no config, and its own finding says more.
    findings = [adapter, *(findings if "config.json" in names else [])] if adapter else findings
    tensors: dict[str, TensorInfo] = {}
    if parts == "all" or (parts == "present" and any(n.endswith(".safetensors") for n in names)):
        tensors, problems = _read_weights(folder, config, names)
        findings += problems if not adapter or "config.json" in names else []
        if tensors and not problems and not findings:
            findings += _compare(config, tensors)
    tokenizer = TokenizerFiles()
    if not adapter and parts != "config":
        tokenizer = read_tokenizer(folder, whole=whole)
        findings += _find_tokenizer_problems(tokenizer, parts)
    return ModelFolder(
        config=config, tensors=tensors, tokenizer=tokenizer, findings=tuple(findings)
    )


def find_config_problems(config: Mapping[str, Any]) -> Iterator[ModelFinding]:
    """Yield what a config alone says against training."""
    for text in find_odd_sizes(config):
        yield ModelFinding(
            kind="config",
            message=f"has a config.json in which {text}",
            hint="Download the config again, or name another model",
            file="config.json",
        )
        return
    yield from _find_other_kind(config)
    method = quantization_of(config)
    if method and method not in TRAINABLE_METHODS:
        yield ModelFinding(
            kind="quantized",
            message=f"is quantized ({show(method)[1:-1]}), and nothing can be trained on it",
            hint=_ORIGINAL,
            file="config.json",
        )


def quantization_of(config: Mapping[str, Any]) -> str:
    """Return the method by which a model is quantized; empty: it is not."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or not settings:
        return ""
    return str(settings.get("quant_method") or "bitsandbytes")


def is_4_bit(config: Mapping[str, Any]) -> bool:
    """Return whether bitsandbytes stores the linear layers in 4 bits, as a QLoRA run holds them."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or quantization_of(config) != "bitsandbytes":
        return False
    return bool(settings.get("load_in_4bit") or settings.get("_load_in_4bit"))


def _find_other_kind(config: Mapping[str, Any]) -> Iterator[ModelFinding]:
    names = [str(one) for one in config.get("architectures") or []]
    family = str(text_of(config).get("model_type", ""))
    why = ""
    if config.get("is_encoder_decoder"):
        why = "has an encoder and a decoder"
    elif family in _ENCODERS and not config.get("is_decoder"):
        why = "reads texts and writes none"
    elif names and not any(name.endswith(_ENDINGS) for name in names):
        why = f"is made for another task ({show(names[0])[1:-1]})"
    elif not names and not config.get("model_type"):
        why = "names no model_type"
    kind = str(config.get("model_type", ""))
    if not why and kind in NO_TEXT_CLASS:
        yield ModelFinding(
            kind="architecture",
            message=f"is made for pictures or sound beside text ({kind}), and Transformers does "
            "not load its language model alone",
            hint=_OTHER_MODEL,
            file="config.json",
        )
    if why:
        message = f"is no causal language model: it {why}"
        yield ModelFinding(
            kind="architecture", message=message, hint=_OTHER_MODEL, file="config.json"
        )


# ---------------------------------------------------------------- files


def _read_config(folder: Path) -> tuple[dict[str, Any], list[ModelFinding]]:
    path = folder / "config.json"
    hint = "Name the folder that save_pretrained or a download from the hub made"
    try:
        return _read_object(path, MOST_BYTES), []
    except FileNotFoundError:
        message = "has no config.json"
    except ValueError as error:
        message = f"has a config.json that {error}"
    except OSError as error:
        message = f"has a config.json that cannot be used: it {error.strerror}"
    return {}, [ModelFinding(kind="config", message=message, hint=hint, file="config.json")]


def _read_object(path: Path, limit: int) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: it is none; the text begins with a verb.
        OSError: it cannot be read.
    """
    try:
        return parse_config(read_regular(path, path.parent, limit), "")
    except ValueError as error:
        raise ValueError(str(error).strip()) from error


def _list_names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _find_adapter(folder: Path, names: list[str]) -> ModelFinding | None:
    """Return a finding if Transformers would load an adapter from this folder."""
    if "adapter_config.json" not in names:
        return None
    base = ""
    try:
        said = _read_object(folder / "adapter_config.json", MOST_BYTES)
        base = str(said.get("base_model_name_or_path") or "")
    except (OSError, ValueError):
        pass
    if "config.json" in names:
        # Transformers would then load the model that adapter_config.json names, not this one.
        message = "holds an adapter_config.json, which stands for another model"
        hint = "Move adapter_config.json out of the folder"
    else:
        message = "is an adapter, not a whole model"
        hint = f"Name the model that it belongs to{f': {show(base)[1:-1]}' if base else ''}"
        hint += ", or merge the adapter into it first"
    return ModelFinding(kind="adapter", message=message, hint=hint, file="adapter_config.json")


def _read_weights(
    folder: Path, config: Mapping[str, Any], names: list[str]
) -> tuple[dict[str, TensorInfo], list[ModelFinding]]:
    """Return the tensors that Transformers would load, and what is wrong with their files."""
    named = config.get("transformers_weights")
    if named is not None and not _is_plain(named, (".safetensors", ".safetensors.index.json")):
        text = f"has a config.json that takes weights from {show(named)}"
        return {}, [ModelFinding(kind="config", message=text, hint=_OTHER_MODEL)]
    chosen = named or (WEIGHTS if WEIGHTS in names else INDEX if INDEX in names else "")
    if not chosen:
        return {}, [_explain_no_weights(names)]
    if chosen.endswith(".json"):
        return _read_shards(folder, chosen)
    return _read_file(folder, chosen)


def _is_plain(name: Any, endings: tuple[str, ...]) -> bool:
    """Return whether a value is the name of a file in the folder itself."""
    if not isinstance(name, str) or not name.endswith(endings) or len(name) > 255:
        return False
    return not name.startswith(".") and not {"/", "\\", "\0", ":"} & set(name)


def _explain_no_weights(names: list[str]) -> ModelFinding:
    endings = {Path(name).suffix for name in names}
    hint = _SAVE_AGAIN
    message = "has no weights in safetensors format"
    if ".safetensors" in endings:
        shards = [name for name in names if name.endswith(".safetensors")]
        message = f"has neither {WEIGHTS} nor {INDEX}, only {shards[0]}"
        hint = "Download the whole folder, or rename the file if it holds all weights"
    elif ".gguf" in endings:
        message += ", only a GGUF file, which is a finished export"
        hint = _ORIGINAL
    elif endings & _PICKLES:
        message += ", only pickled ones, which can run code and are never sent"
    return ModelFinding(kind="no_weights", message=message, hint=hint)


def _read_file(folder: Path, name: str) -> tuple[dict[str, TensorInfo], list[ModelFinding]]:
    try:
        return read_header(folder / name, folder), []
    except FileNotFoundError:
        text = "is missing"
    except HeaderError as error:
        text = str(error)
    except OSError as error:
        text = f"cannot be used: it {error.strerror}"
    message = f"has a damaged file: {_printable(name)} {text}"
    return {}, [ModelFinding(kind="weights", message=message, hint=_AGAIN, file=name)]


def _read_shards(folder: Path, index: str) -> tuple[dict[str, TensorInfo], list[ModelFinding]]:
    try:
        places = _read_places(folder / index)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        message = f"has a damaged list of its files: {index} {said}"
        return {}, [ModelFinding(kind="index", message=message, hint=_AGAIN, file=index)]
    tensors: dict[str, TensorInfo] = {}
    held: dict[str, str] = {}
    for name in sorted(set(places.values())):
        found, findings = _read_file(folder, name)
        if findings:
            return {}, findings  # one damaged file is enough to know
        if doubled := sorted(found.keys() & held):
            both = f"{_printable(held[doubled[0]])} and {_printable(name)}"
            message = f"holds {_printable(doubled[0])} twice, in {both}"
            return {}, [ModelFinding(kind="index", message=message, hint=_AGAIN, file=name)]
        tensors.update(found)
        held.update(dict.fromkeys(found, name))
    findings = list(_find_misplaced(index, places, held))
    return ({} if findings else tensors), findings


def _read_places(path: Path) -> dict[str, str]:
    """Return the file of each tensor.

    Raises:
        ValueError: the text begins with a verb.
    """
    index = _read_object(path, MAX_INDEX_BYTES)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError("has no weight_map")
    if not isinstance(index.get("metadata"), dict):
        raise ValueError("has no metadata")
    if len(places) > MAX_TENSORS:
        raise ValueError(f"names {len(places):,} tensors, and at most {MAX_TENSORS:,} are allowed")
    for tensor, name in places.items():
        if not _is_plain(name, (".safetensors",)):
            raise ValueError(
                f"puts {_printable(tensor)} into {show(name)}, which is no file of the folder"
            )
    return places


def _find_misplaced(
    index: str, places: Mapping[str, str], held: Mapping[str, str]
) -> Iterator[ModelFinding]:
    lost = [name for name, file in places.items() if held.get(name) != file]
    if lost:
        message = (
            f"does not hold what {index} says: {_printable(lost[0])} is not in "
            f"{_printable(places[lost[0]])}" + (f", nor are {len(lost) - 1} more" * (len(lost) > 1))
        )
        yield ModelFinding(kind="index", message=message, hint=_AGAIN, file=index)


def _compare(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> list[ModelFinding]:
    """Return what is wrong with the tensors themselves."""
    # Without a word of it in the config, as a converter that died leaves them.
    packed = next((n for n in tensors if n.endswith((".qweight", ".qzeros", ".weight_packed"))), "")
    # Scales beside weights may be narrow in a model that is not.
    narrow = next(
        (n for n, one in tensors.items() if _NARROW.match(one.dtype) and n.endswith(".weight")), ""
    )
    if not quantization_of(config) and (packed or narrow):
        message = f"holds quantized weights, such as {_printable(packed or narrow)}"
        return [ModelFinding(kind="quantized", message=message, hint=_ORIGINAL)]
    return [
        ModelFinding(
            kind="tensors",
            message=f"does not hold the weights that its config.json describes: {text}",
            hint="Download the folder again, or save model and config together",
        )
        for text in find_tensor_problems(config, tensors, packed=bool(quantization_of(config)))
    ][:1]


def _find_tokenizer_problems(found: TokenizerFiles, parts: Parts) -> Iterator[ModelFinding]:
    hint = (
        "Save it into the folder: AutoTokenizer.from_pretrained(the original model)"
        ".save_pretrained(folder)"
    )
    for file, text in found.problems[:1]:
        message = f"has a damaged tokenizer: {file} {text}"
        yield ModelFinding(kind="tokenizer", message=message, hint=_AGAIN, file=file)
    if not found.is_there and not found.problems and parts != "present":
        message = "has no tokenizer: there is no tokenizer.json, and nothing to make one from"
        yield ModelFinding(kind="tokenizer", message=message, hint=hint)


def _printable(name: str) -> str:
    text = name[:200].encode("unicode_escape").decode("ascii")
    return text if len(text) <= 80 else f"{text[:77]}..."
