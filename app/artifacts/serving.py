"""Commands that serve an artifact, for the programs that load its format.

The programs are not run here. The configuration is compared with the fields that vLLM reads
(vllm/model_executor/layers/quantization: auto_awq.py, auto_gptq.py, bitsandbytes.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agents.contract.formats import EXPORTS
from app.artifact import ArtifactSnapshot
from app.shell_words import posix_command

NOT_TRIED = "Not tested here."
# Group sizes of vLLM's fast kernels (marlin_utils.py); others run slowly or not.
_MARLIN_GROUPS = (-1, 32, 64, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeCommand:
    """Command with which one program serves an artifact."""

    runtime: str
    """Program: one of `app.artifacts.RUNTIMES`."""
    title: str
    command: str
    notes: tuple[str, ...] = ()
    """Remarks to read before its use, in whole sentences."""
    modelfile: str | None = None
    """Text of the Modelfile that a command for Ollama uses."""
    modelfile_name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedFolder:
    """Facts about a copy on this PC that serving needs."""

    path: str
    config: Mapping[str, Any]
    """Content of its config.json; empty: no such file, as with GGUF."""
    files: tuple[tuple[str, str], ...] = ()
    """(type, file name) of each GGUF file."""
    templates: Mapping[str, str]
    """Ollama's template with its stops, as lines of a Modelfile, by GGUF type."""
    template_problems: Mapping[str, str]
    """Reason why the model's template cannot be written in a Modelfile, by GGUF type."""
    stops: Mapping[str, str] = field(default_factory=dict)
    """Token that ends an answer, if the file names one in addition to its end token, by GGUF
    type."""


def serve_commands(artifact: ArtifactSnapshot, folder: ServedFolder) -> tuple[ServeCommand, ...]:
    """Return the commands, for a Linux PC on which the program is installed."""
    row = EXPORTS[artifact.format]
    if row.runtime == "llama.cpp":
        found = []
        for kind, file in folder.files:
            found.append(_llama_cpp(artifact, folder, kind, file))
            found.append(_ollama(artifact, folder, kind, file))
        return tuple(found)
    found = [_vllm(artifact, folder)]
    if row.tgi:
        found.append(_tgi(artifact, folder))
    return tuple(found)


def _vllm(artifact: ArtifactSnapshot, folder: ServedFolder) -> ServeCommand:
    command = posix_command("vllm", "serve", folder.path, "--served-model-name", artifact.name)
    problems = check_vllm_config(artifact.format, folder.config)
    checked = "The configuration has every field that vLLM reads, with valid values."
    return ServeCommand(
        runtime="vllm", title="vLLM", command=command, notes=(*(problems or (checked,)), NOT_TRIED)
    )


def _tgi(artifact: ArtifactSnapshot, folder: ServedFolder) -> ServeCommand:
    method = EXPORTS[artifact.format].quant_method
    quantize = ("--quantize", method) if method else ()
    image = "ghcr.io/huggingface/text-generation-inference:latest"
    return ServeCommand(
        runtime="tgi",
        title="Text Generation Inference",
        command=posix_command(
            *("docker", "run", "--rm", "--gpus", "all", "--shm-size", "1g"),
            *("-p", "127.0.0.1:8080:80", "--mount", _mount(folder.path)),
            *(image, "--model-id", "/model", *quantize),
        ),
        notes=(NOT_TRIED,),
    )


def _mount(path: str) -> str:
    """Return the value of Docker's --mount, which is parsed as one line of CSV.

    >>> _mount("/m/poems: 2"), _mount("/m/a,b")
    ('type=bind,src=/m/poems: 2,dst=/model,readonly', 'type=bind,"src=/m/a,b",dst=/model,readonly')
    """
    source = f"src={path}"
    if "," in path or '"' in path:
        quoted = source.replace('"', '""')
        source = f'"{quoted}"'
    return f"type=bind,{source},dst=/model,readonly"


def _llama_cpp(
    artifact: ArtifactSnapshot, folder: ServedFolder, kind: str, file: str
) -> ServeCommand:
    path = f"{folder.path}/{file}"
    ran = [name for name in artifact.runtimes if name.startswith("llama.cpp")]
    proved = (f"This file was loaded and generated text in {ran[0]}.",) if ran else ()
    return ServeCommand(
        runtime="llama.cpp",
        title=f"llama.cpp, {kind}",
        command=posix_command(
            *("llama-server", "-m", path, "--jinja", "--host", "127.0.0.1", "--port", 8080)
        ),
        notes=(*proved, "llama-server itself: not tested here."),
    )


def _ollama(artifact: ArtifactSnapshot, folder: ServedFolder, kind: str, file: str) -> ServeCommand:
    model = f"{artifact.name}:{kind}".lower()
    modelfile = f"Modelfile-{kind}"
    template = folder.templates.get(kind, "")
    why = folder.template_problems.get(kind, "")
    end = folder.stops.get(kind, "")
    stop = f"PARAMETER stop {json.dumps(end)}\n" if end else ""
    note = (
        "The Modelfile has the model's own chat template."
        if template
        else f"The model's chat template cannot be written in a Modelfile: {why}. "
        "Ollama picks a similar one, or none, so compare its answers."
    )
    return ServeCommand(
        runtime="ollama",
        title=f"Ollama, {kind}",
        command=posix_command("ollama", "create", model, "-f", f"{folder.path}/{modelfile}")
        + f" && {posix_command('ollama', 'run', model)}",
        notes=(note, NOT_TRIED),
        modelfile=f"FROM ./{file}\n{template}{stop if stop not in template else ''}",
        modelfile_name=modelfile,
    )


# ---------------------------------------------------------------- what vLLM reads


def check_vllm_config(kind: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the reasons why vLLM would refuse a config.json, in whole sentences.

    >>> check_vllm_config("awq", {"architectures": ["LlamaForCausalLM"], "quantization_config":
    ...     {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}})
    ()
    """
    problems = []
    if not config.get("architectures"):
        problems.append("config.json names no architecture, by which vLLM chooses its model.")
    found = config.get("quantization_config")
    if kind == "merged":
        return (*problems, *(["config.json says that it is quantized."] if found else []))
    if not isinstance(found, dict):
        return (*problems, "config.json has no quantization_config.")
    checks: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
        "awq": _check_awq,
        "gptq": _check_gptq,
        "nf4": _check_nf4,
    }
    method = EXPORTS[kind].quant_method
    if found.get("quant_method") != method:
        problems.append(f"quant_method is {found.get('quant_method')!r}; vLLM expects {method!r}.")
    return (*problems, *(checks[kind](found) if kind in checks else ()))


def _check_awq(found: Mapping[str, Any]) -> list[str]:
    bits = found.get("w_bit", found.get("bits"))
    group = found.get("q_group_size", found.get("group_size"))
    problems = [] if bits == 4 else [f"bits is {bits!r}; vLLM reads AWQ of 4 bits only."]
    if not isinstance(found.get("zero_point"), bool):
        problems.append("zero_point is missing; vLLM needs it.")
    return problems + _check_group(group)


def _check_gptq(found: Mapping[str, Any]) -> list[str]:
    problems = [f"{name} is missing; vLLM needs it." for name in ("desc_act",) if name not in found]
    if found.get("bits") not in (4, 8) or found.get("sym") is not True:
        problems.append(
            f"bits is {found.get('bits')!r} and sym {found.get('sym')!r}; "
            "vLLM reads symmetric weights of 4 or 8 bits."
        )
    return problems + _check_group(found.get("group_size"))


def _check_group(group: object) -> list[str]:
    if group in _MARLIN_GROUPS:
        return []
    return [f"group_size is {group!r}; vLLM's kernels take {', '.join(map(str, _MARLIN_GROUPS))}."]


def _check_nf4(found: Mapping[str, Any]) -> list[str]:
    storage = found.get("bnb_4bit_quant_storage") or "uint8"
    problems = [] if found.get("load_in_4bit") else ["load_in_4bit is not set; vLLM reads it."]
    if storage != "uint8":
        problems.append(f"bnb_4bit_quant_storage is {storage!r}; vLLM takes 'uint8' only.")
    return problems
