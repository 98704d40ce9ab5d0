"""Judge torch, CUDA and NCCL as reported by the training environments."""

from __future__ import annotations

import re
from collections.abc import Mapping

from agents.contract.node import TorchFacts
from app.provisioning.check_row import CheckedGroup, CheckRow, make_row
from app.provisioning.checks.majority import find_odd
from app.provisioning.torch_build import advise_one_build, numbers_of
from app.text import show_list

_CARD = re.compile(r"(sm|compute)_(\d+)(\d)[a-z]?")


def judge_torch(group: CheckedGroup, builds: Mapping[str, TorchFacts]) -> tuple[CheckRow, ...]:
    """Compare the builds with each other, and each with the GPUs of its node."""
    return (*_judge_versions(group, builds), *_judge_cards(group, builds))


def _judge_versions(group: CheckedGroup, builds: Mapping[str, TorchFacts]) -> list[CheckRow]:
    # A CPU build has no CUDA to compare, and connects to the others over Gloo.
    on_gpus = {name: one for name, one in builds.items() if group.nodes[name].facts.gpus}
    odd_torch = find_odd({name: one.version.partition("+")[0] for name, one in builds.items()})
    odd_cuda = find_odd({name: one.cuda or "none" for name, one in on_gpus.items()})
    odd_nccl = find_odd({name: one.nccl or "none" for name, one in on_gpus.items()})
    facts = {name: node.facts for name, node in group.nodes.items()}
    families = {name: one.version.partition("+")[2] for name, one in on_gpus.items()}
    rows = []
    for name, one in builds.items():
        text = f"torch {one.version}, CUDA {one.cuda or 'none'}, NCCL {one.nccl or 'none'}"
        fix = f"Build the same environment everywhere: rackless nodes setup {name}"
        if name in odd_torch:
            odd = odd_torch[name]
            said = f"{text}, while {odd.who} have torch {odd.value}"
            rows.append(make_row("torch", name, "fail", said, fix, evidence=text))
        elif name in odd_cuda or name in odd_nccl:
            what, odd = ("CUDA", odd_cuda[name]) if name in odd_cuda else ("NCCL", odd_nccl[name])
            said = f"{text}, while {odd.who} have {what} {odd.value}; runs between them use Gloo"
            fix = advise_one_build(facts, families) or fix
            rows.append(make_row("torch", name, "warn", said, fix, evidence=text))
        else:
            rows.append(make_row("torch", name, "pass", text, "", evidence=text))
    return rows


def _judge_cards(group: CheckedGroup, builds: Mapping[str, TorchFacts]) -> list[CheckRow]:
    rows = []
    for name, one in builds.items():
        gpus = group.nodes[name].facts.gpus
        if not gpus:
            continue
        evidence = f"{show_list(one.architectures) or 'no kernels'}; {one.num_gpus} GPUs seen"
        fix = f"rackless nodes setup {name}"
        lost = [
            gpu.name
            for gpu in gpus
            if gpu.capability and not has_kernels(gpu.capability, one.architectures)
        ]
        # First: a card that torch does not see says nothing about kernels.
        if one.num_gpus < len(gpus):
            text = f"torch sees {one.num_gpus} of {len(gpus)} GPUs: CUDA {one.cuda or 'none'}"
            fix = f"Update the driver, or build again: rackless nodes setup {name}"
            rows.append(make_row("cuda", name, "fail", text, fix, evidence=evidence))
        elif lost:
            text = f"torch {one.version} has no kernels for {show_list(lost)}"
            rows.append(make_row("cuda", name, "fail", text, fix, evidence=evidence))
        else:
            text = f"torch {one.version} has kernels for all its cards"
            rows.append(make_row("cuda", name, "pass", text, "", evidence=evidence))
    return rows


def has_kernels(capability: str, architectures: tuple[str, ...]) -> bool:
    """Return True if a build serves a card of that compute capability.

    Machine code runs on cards of its own generation with the same or a higher minor number; PTX
    (`compute_`) is compiled on any newer card (CUDA C++ Programming Guide, 3.1.2 and 3.1.3).

    >>> has_kernels("8.9", ("sm_86", "sm_90")), has_kernels("12.0", ("sm_86", "sm_90"))
    (True, False)
    >>> has_kernels("12.0", ("sm_86", "compute_90")), has_kernels("8.9", ("sm_90",))
    (True, False)
    """
    card = numbers_of(capability)
    for architecture in architectures:
        match = _CARD.fullmatch(architecture)
        if match is None:
            continue
        built = (int(match[2]), int(match[3]))
        if match[1] == "compute" and built <= card:
            return True
        # Code for a single chip, such as sm_90a, runs on exactly that chip.
        exact = architecture[-1].isalpha()
        if built == card or (not exact and built[0] == card[0] and built <= card):
            return True
    return False
