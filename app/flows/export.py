"""Export: what is asked, what each format is for, and what is wrong with an answer."""

from __future__ import annotations

from dataclasses import dataclass

from agents.artifacts import TYPES, USUAL_TYPES


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One way to export, in the words of the person who wants to use the result."""

    key: str
    label: str
    help: str


FORMATS = (
    Format(
        key="merged",
        label="Whole model",
        help="Base and adapter in one, nothing rounded. For Transformers, vLLM, or to go on with.",
    ),
    Format(
        key="gguf",
        label="GGUF",
        help="For llama.cpp, Ollama, LM Studio: runs on CPUs and small cards too.",
    ),
    Format(
        key="awq",
        label="AWQ, 4 bits",
        help="Rounding fitted to your data. For vLLM, TGI and Transformers on NVIDIA cards.",
    ),
    Format(
        key="gptq",
        label="GPTQ",
        help="Rounding fitted to your data, in 4 or 8 bits. For the same programs.",
    ),
    Format(
        key="nf4",
        label="NF4, 4 bits",
        help="What QLoRA trains on. For Transformers with bitsandbytes; the quickest to make.",
    ),
)
_TYPE_WORDS = {
    "F16": "F16, nothing lost",
    "Q8_0": "Q8_0, hardly to be told from it",
    "Q6_K": "Q6_K",
    "Q5_K_M": "Q5_K_M",
    "Q4_K_M": "Q4_K_M, the usual small one",
    "Q3_K_M": "Q3_K_M, for when nothing else fits",
    "4-bit": "4 bits",
    "8-bit": "8 bits, nearer to the original",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    to: str = "merged"
    types: tuple[str, ...] = ()
    folder: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Review:
    types: tuple[tuple[str, str], ...]
    """(type, what the person reads) that the format offers."""
    usual: tuple[str, ...]
    """Chosen where nothing else is."""
    takes_one: bool
    """Only one type at a time."""
    problems: dict[str, str]
    """Field -> what is wrong with it."""

    @property
    def is_ready(self) -> bool:
        """Tell whether the export can start."""
        return not self.problems


def review(answers: Answers) -> Review:
    """Check the answers."""
    offered = offered_types(answers.to)
    problems: dict[str, str] = {}
    if offered and not answers.types:
        problems["types"] = "Choose at least one type."
    if answers.to == "gptq" and len(answers.types) > 1:
        problems["types"] = "Choose one; the other makes a second export."
    if not answers.folder.strip():
        problems["folder"] = "Name a new folder for the result."
    return Review(
        types=tuple((kind, _TYPE_WORDS[kind]) for kind in offered),
        usual=usual_types(answers.to),
        takes_one=answers.to == "gptq",
        problems=problems,
    )


def offered_types(to: str) -> tuple[str, ...]:
    """Return the types of a format; empty where there is nothing to choose.

    >>> offered_types("gptq"), offered_types("merged")
    (('4-bit', '8-bit'), ())
    """
    return TYPES.get(to, ())


def usual_types(to: str) -> tuple[str, ...]:
    """Return what is chosen when nobody has."""
    return USUAL_TYPES.get(to, ())


def suggest_folder(home: str, run_name: str, to: str) -> str:
    """Return a place for the result.

    >>> suggest_folder("/home/me/", "my run", "gguf")
    '/home/me/my run-gguf'
    """
    return f"{home.rstrip('/')}/{run_name}-{to}"
