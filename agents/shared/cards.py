"""Peak figures of GPUs, by the names that drivers and users write."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from agents.shared.card_table import ROWS

GIB = 2**30

# Bandwidth of one PCI Express lane by generation, after encoding, in bytes per second.
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9}

# Share of the bus bandwidth that copies from and to pinned memory reach: 22 to 26 of 31.5 GB/s on
# generation 4 with 16 lanes (bitsandbytes, docs/streaming_analysis).
_REACHED = 0.8

# Compute capabilities of silicon without tensor cores, of which GTX 16 shares that of RTX 20.
_FIRST_TENSOR_CORES = (7, 0)

# Words that name no card: vendor, brand, and what drivers add.
_IDLE_WORDS = (
    "nvidia|geforce|tesla|rtx|gtx|graphics|card|gpu|generation|blackwell|workstation|edition"
    "|desktop|with"
)
_SIZE = re.compile(r"\b(\d{1,3}) ?(?:g|gb|gib)\b")
_FORM_FACTOR = re.compile(r"\b(?:sxm\d?|pcie|hbm\d?e?)\b")
# The brand of other cards is part of this one's name.
_TITAN_RTX = re.compile(r"\btitan ?rtx\b")
_MAX_Q = re.compile(r"\bmax q( design)?\b")
# GPUs of other vendors, which have no CUDA.
_FOREIGN = re.compile(
    r"\b(amd|radeon|rx ?\d{3,4}\w*|\d{4} ?(?:xtx?|gre)|instinct|mi\d{2,3}\w?|intel"
    r"|arc|iris|gaudi|apple|m[1-9]|adreno|ascend|moore threads|mtt|tpu)\b"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """Figures from a data sheet."""

    name: str
    """Name without `NVIDIA` and `GeForce`."""
    flops_per_s: float
    """Peak of dense matrix products in the half precision that training uses."""
    memory_bytes: int
    memory_bytes_per_s: float
    """Bandwidth of the card's own memory."""
    power_w: float
    """Board power; of a laptop's GPU the middle of its range."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    num_multiprocessors: int
    pcie_generation: int
    pcie_lanes: int

    @property
    def is_laptop(self) -> bool:
        """True if the figures depend on the power limit that the laptop's maker sets."""
        return "Laptop" in self.name

    @property
    def has_tensor_cores(self) -> bool:
        """True if half precision is faster than fp32."""
        return self.capability >= _FIRST_TENSOR_CORES and not self.name.startswith("GTX")

    @property
    def bus_bytes_per_s(self) -> float:
        """Speed of copies to and from pinned host memory, in a slot as fast as the card.

        >>> round(find_card("RTX 4070").bus_bytes_per_s / 1e9, 1)
        25.2
        """
        return bus_bytes_per_s(self.pcie_generation, self.pcie_lanes)


def bus_bytes_per_s(generation: int, lanes: int) -> float:
    """Return the speed of copies to and from pinned host memory over PCI Express.

    >>> round(bus_bytes_per_s(3, 4) / 1e9, 1)
    3.2
    """
    return _LANE_BYTES_PER_S[generation] * lanes * _REACHED


@lru_cache(maxsize=1024)
def find_card(name: str, memory_bytes: int | None = None) -> Card | None:
    """Return the card with this name, as a driver or a user writes it; None: not listed.

    Args:
        name: name with or without vendor, spaces and dashes; a size in it is the card's memory.
        memory_bytes: memory that the driver reports, for cards whose name has several sizes.

    >>> find_card("NVIDIA A100-SXM4-80GB").power_w
    400
    >>> find_card("4070 laptop").name, find_card("geforce rtx 4070 Ti").name
    ('RTX 4070 Laptop GPU', 'RTX 4070 Ti')
    >>> find_card("NVIDIA GeForce RTX 4070 Laptop GPU with Max-Q Design")
    >>> find_card("rtx4060ti-16gb").memory_bytes // GIB, find_card("A100 40GB").memory_bytes // GIB
    (16, 40)
    >>> find_card("NVIDIA GeForce RTX 3080", 12 * GIB).memory_bytes_per_s / 1e9
    912.0
    """
    plain, named_gib = _split_name(name)
    gib = named_gib or (round(memory_bytes / GIB) if memory_bytes else None)
    whole = plain.replace("sxm", "")
    # A form factor without a row of its own has the figures of the other one.
    for key in ((whole, gib), (whole, None), (whole.replace("pcie", ""), gib)):
        if key in _NAMES:
            return _make_card(_NAMES[key], named_gib)
    known = _NAMES.get((whole.replace("pcie", ""), None)) or _JOINED.get(_join(name))
    return None if known is None else _make_card(known, named_gib)


@lru_cache(maxsize=1024)
def find_similar(name: str, capability: tuple[int, int] | None = None) -> Card | None:
    """Return the lowest figures of the listed cards of an unlisted one's class; None: no class.

    A class is a series, such as RTX 40 for "RTX 4065", else all cards of one capability.

    >>> find_similar("GeForce RTX 4065").flops_per_s / 1e12
    30.2
    >>> find_similar("Strange 1", (8, 0)).flops_per_s / 1e12, find_similar("Strange 1")
    (165.0, None)
    """
    plain, _ = _split_name(name)
    is_laptop = "laptop" in plain
    series = re.match(r"(10|16|20|30|40|50)\d0|(30|40|50)\d\d", plain)
    names = [one for one in ROWS if ("Laptop" in one) == is_laptop]
    alike = [
        one
        for one in names
        if series and re.match(rf"[GR]TX {plain[:2]}\d\d\b", one) and not re.search(r"Ada|A\d", one)
    ]
    alike = alike or [one for one in names if ROWS[one][4] == capability]
    if not alike:
        return None
    cards = [_make_card(one) for one in alike]
    slowest = min(cards, key=lambda card: card.flops_per_s)
    return replace(slowest, memory_bytes_per_s=min(card.memory_bytes_per_s for card in cards))


def refuse_vendor(name: str) -> str:
    """Return why a GPU of another vendor does not train, as a clause; empty: it may.

    >>> refuse_vendor("Radeon RX 7900 XTX")
    'Rackless trains on NVIDIA GPUs only, as its kernels need CUDA'
    >>> refuse_vendor("RTX 4070"), refuse_vendor("NVIDIA M40")
    ('', '')
    """
    plain = re.sub(r"[^a-z0-9]+", " ", name.lower())
    if not _FOREIGN.search(plain) or re.search(r"\b(nvidia|geforce|tesla|quadro|rtx|gtx)\b", plain):
        return ""
    return "Rackless trains on NVIDIA GPUs only, as its kernels need CUDA"


def list_cards() -> tuple[str, ...]:
    """Return the names of all listed cards."""
    return tuple(ROWS)


def _make_card(name: str, gib: int | None = None) -> Card:
    """Return a row, with the memory that a name gives."""
    tflops, listed_gib, gb_per_s, power_w, capability, processors, generation, lanes = ROWS[name]
    return Card(
        name=name,
        flops_per_s=tflops * 1e12,
        memory_bytes=int((gib or listed_gib) * GIB),
        memory_bytes_per_s=gb_per_s * 1e9,
        power_w=power_w,
        capability=capability,
        num_multiprocessors=processors,
        pcie_generation=generation,
        pcie_lanes=lanes,
    )


def _split_name(name: str) -> tuple[str, int | None]:
    """Return a name without idle words, spaces and dashes, and the GiB that it gives.

    >>> _split_name("NVIDIA GeForce RTX-4060Ti 16 GB"), _split_name("NVIDIA H100 80GB HBM3")
    (('4060ti', 16), ('h100', 80))
    >>> _split_name("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition")
    ('pro6000maxq', None)
    """
    words = re.sub(r"\((r|tm)\)", " ", name.lower())
    # Words that are joined to a number part again: "rtx4090", "4060ti16gb", "1080ti".
    words = re.sub(r"(geforce|rtx|gtx|quadro|titan|super|laptop|ti)(?=[a-z]?\d)", r"\1 ", words)
    words = re.sub(r"(geforce|nvidia|quadro)(?=rtx|gtx)", r"\1 ", words)
    words = re.sub(r"(\d)(ti|super|laptop|ada|sxm|pcie)", r"\1 \2", words)
    words = re.sub(r"(ti)(super|laptop)", r"\1 \2", words)
    words = " ".join(re.sub(r"[^a-z0-9]+", " ", words).split())
    size = _SIZE.search(words)
    words = _SIZE.sub(" ", words)
    is_pcie = "pcie" in words
    words = _FORM_FACTOR.sub(" ", words)
    # A Max-Q design of the PRO series is a card of its own, in laptops it is one of many limits.
    words = _MAX_Q.sub("maxq" if re.search(r"\bpro\b", words) else "with maxq", words)
    kept = re.sub(rf"\b({_IDLE_WORDS})\b", " ", _TITAN_RTX.sub("titan2018", words))
    plain = "".join(kept.split()) + ("pcie" if is_pcie else "")
    return _ALIASES.get(plain, plain), int(size[1]) if size else None


def _join(name: str) -> str:
    """Return a name without idle words, even if no space divides them.

    >>> _join("RTX 4070 Laptop GPU") == _join("GeForceRTX4070LaptopGPU")
    True
    """
    letters = re.sub(r"[^a-z0-9]+", "", name.lower())
    return re.sub(_IDLE_WORDS, "", _TITAN_RTX.sub("titan2018", letters))


_ALIASES = {"dgxspark": "gb10"}


def _index() -> dict[tuple[str, int | None], str]:
    """Return each row by its plain name, with the size that distinguishes it."""
    found: dict[tuple[str, int | None], str] = {}
    for name, row in ROWS.items():
        plain, gib = _split_name(name)
        found[plain, gib or int(row[1])] = name
        if gib is None or not any(_split_name(one)[0] == plain for one in ROWS if one != name):
            found[plain, None] = name
    return found


_NAMES = _index()
_JOINED = {_join(name): name for name in ROWS}


def choose_precision(capability: tuple[int, int] | None) -> Literal["bf16", "fp16", "fp32"]:
    """Return the data type in which training computes with `precision: auto`.

    Args:
        capability: CUDA compute capability of the card; None for a CPU.

    >>> choose_precision((8, 6)), choose_precision((7, 5)), choose_precision(None)
    ('bf16', 'fp16', 'fp32')
    """
    if capability is None:
        return "fp32"
    # Turing and older cards only emulate bf16, although torch calls it supported.
    return "bf16" if capability >= (8, 0) else "fp16"
