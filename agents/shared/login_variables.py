"""Environment variables of a login that change how training behaves, and the fate of each.

A rank and every other program in the training environment start from the node's login, which a user
has set up for other work. A variable that changes the group of ranks, the GPU or the interpreter
must be the same on all nodes, or absent: one that is set on a single node makes the others wait, or
lets a rank compute on a GPU that another one has leased.

`RULES` is the only list. Each row is a pattern per word; the first row that matches a name decides,
and a name without a row is kept. Nodes apply it at every start of a program; the check shows it.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Fate = Literal["kept", "shown", "agreed", "removed", "overruled"]
"""`kept`: has its effect; `shown`: the same, and the check names it; `agreed`: kept for ranks if
all nodes of the run have the same value; `removed`: has no effect; `overruled`: the same, although
its user probably expects one, so that the check warns."""


@dataclass(frozen=True, slots=True)
class Rule:
    patterns: str
    """Names, separated by spaces, with `*` for any text."""
    fate: Fate
    effect: str = ""
    """Effect, to follow "it"; empty for `kept`."""


RULES = (
    # The group of ranks.
    Rule(
        "RANK LOCAL_RANK GROUP_RANK ROLE_RANK NODE_RANK WORLD_SIZE LOCAL_WORLD_SIZE "
        "GROUP_WORLD_SIZE ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT TORCHELASTIC* OMPI_* "
        "PMI_* PMIX_* RACKLESS_BACKEND",
        "removed",
        "places a process in another group of ranks",
    ),
    Rule(
        "TORCH_DIST* TORCH_NCCL_* TORCH_FR_* GLOO_* TP_* NCCL_COMM_ID NCCL_HOSTID NCCL_CONF_FILE "
        "NCCL_RAS_* NCCL_SOCKET_* NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT "
        "NCCL_DESYNC_DEBUG",
        "removed",
        "changes how ranks connect and wait, so that they hang unless all nodes have it",
    ),
    # Messages, and ways between the GPUs of one node.
    Rule("NCCL_DEBUG* NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_SHM_DISABLE NCCL_HOME", "kept"),
    Rule("NCCL_*", "agreed", "chooses how NCCL exchanges data, which has to be equal on all nodes"),
    Rule("NVIDIA_TF32_OVERRIDE", "agreed", "changes the precision of matrix products"),
    # The device.
    Rule("CUDA_VISIBLE_DEVICES", "overruled", "hides or reorders GPUs"),
    Rule(
        "CUDA_DEVICE_ORDER HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL "
        "ZE_AFFINITY_MASK CUDA_MPS_ACTIVE_THREAD_PERCENTAGE CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        "removed",
        "changes which GPU, or how much of it, a program gets",
    ),
    Rule(
        "CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUBLAS_WORKSPACE_CONFIG PYTORCH_*ALLOC_CONF "
        "PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_JIT TRITON_INTERPRET TRITON_DEBUG BNB_CUDA_VERSION",
        "removed",
        "changes speed and memory of a GPU, which Rackless measures and sets itself",
    ),
    Rule(
        "TORCHDYNAMO_* TORCH_COMPILE_* TORCHINDUCTOR_MAX_AUTOTUNE* TORCHINDUCTOR_FREEZING "
        "TORCHINDUCTOR_FX_GRAPH_CACHE TORCHINDUCTOR_FORCE_DISABLE_CACHES",
        "shown",
        "changes how layers are compiled on this node",
    ),
    Rule(
        "ATEN_CPU_CAPABILITY DNNL_* ONEDNN_* MKL_CBWR MKL_ENABLE_INSTRUCTIONS",
        "shown",
        "changes which instructions of the CPU compute",
    ),
    # Threads: each rank gets its part of the cores, at most OMP_NUM_THREADS.
    Rule("OMP_NUM_THREADS KMP_DUPLICATE_LIB_OK KMP_INIT_AT_FORK OMP_DISPLAY_*", "kept"),
    Rule(
        "OMP_* KMP_* GOMP_* MKL_NUM_THREADS MKL_DOMAIN_NUM_THREADS MKL_DYNAMIC "
        "OPENBLAS_NUM_THREADS OPENBLAS_MAIN_FREE GOTO_NUM_THREADS BLIS_NUM_THREADS "
        "NUMEXPR_NUM_THREADS NUMEXPR_MAX_THREADS VECLIB_MAXIMUM_THREADS",
        "removed",
        "sets or pins threads, of which each rank gets its own share (OMP_NUM_THREADS limits it)",
    ),
    # The interpreter. Those of the first row only change output, and where the user's packages are.
    Rule(
        "PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX PYTHONFAULTHANDLER "
        "PYTHONSAFEPATH PYTHONNOUSERSITE PYTHONUSERBASE",
        "kept",
    ),
    # Not all of PYTHON_*, which images of containers and libraries use for themselves.
    Rule(
        "PYTHON[A-Z]* PYTHON_GIL PYTHON_JIT PYTHON_TLBC PYTHON_CPU_COUNT PYTHON_PRESITE "
        "PYTHON_FROZEN_MODULES PYTHON_PERF_JIT_SUPPORT PYTHON_CONTEXT_AWARE_WARNINGS "
        "PYTHON_THREAD_INHERIT_CONTEXT PYTHON_LAZY_IMPORTS",
        "removed",
        "changes Python itself, or what it imports",
    ),
    # Libraries.
    Rule(
        "ACCELERATE_* FSDP_* DEEPSPEED_* USE_TF USE_TORCH USE_JAX USE_FLAX FORCE_TF_AVAILABLE "
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD HF_HUB_ENABLE_*",
        "removed",
        "changes how Transformers or torch load models",
    ),
    Rule(
        "HF_ENDPOINT HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_DATASETS_OFFLINE",
        "shown",
        "changes where this node gets models and data from",
    ),
    Rule("LD_PRELOAD LD_AUDIT LD_LIBRARY_PATH", "shown", "loads libraries into every program"),
    Rule("MALLOC_CHECK_ MALLOC_PERTURB_", "removed", "makes programs check their memory, slowly"),
    Rule("MALLOC_* GLIBC_TUNABLES", "shown", "changes how programs get memory"),
)
EQUAL = {"PYTHONUTF8": "1"}
"""Variables with the same value in every program, since the login's locale decides otherwise."""

LEFT_OUT = "RACKLESS_LEFT_OUT"
"""Variable of a rank with the names of those that it did not get, for its log."""


def find_rule(name: str) -> Rule | None:
    """Return the first rule for a variable.

    >>> find_rule("NCCL_DEBUG").fate, find_rule("NCCL_ALGO").fate, find_rule("EDITOR")
    ('kept', 'agreed', None)
    """
    for rule in RULES:
        if any(fnmatchcase(name, pattern) for pattern in rule.patterns.split()):
            return rule
    return None


def find_odd(environ: Mapping[str, str]) -> dict[str, Rule]:
    """Return the variables of an environment that are not simply kept, with their rules, sorted."""
    found = {name: find_rule(name) for name in sorted(environ)}
    return {
        name: rule
        for name, rule in found.items()
        # Empty means unset, except here: an empty list hides all GPUs.
        if rule and rule.fate != "kept" and (environ[name] or name == "CUDA_VISIBLE_DEVICES")
    }


def program_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program in the training environment, from that of the login.

    >>> program_environ({"HOME": "/h", "PYTHONOPTIMIZE": "2", "NCCL_ALGO": "Ring"})
    {'HOME': '/h', 'PYTHONUTF8': '1'}
    """
    left_out = {
        name for name, rule in find_odd(environ).items() if rule.fate not in ("kept", "shown")
    }
    return {name: value for name, value in environ.items() if name not in left_out} | EQUAL


def agree(variables: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the `agreed` variables with one value on all nodes.

    Args:
        variables: `agreed` variables of each node, by its name.

    >>> agree({"a": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}, "b": {"NCCL_ALGO": "Ring"}})
    {'NCCL_ALGO': 'Ring'}
    """
    first, *others = variables.values() or ({},)
    return {
        name: value
        for name, value in first.items()
        if value and all(other.get(name) == value for other in others)
    }


def visible_card(device: str, device_id: str) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for a program that computes on one device.

    The program then sees only this card, as `cuda:0`.

    Args:
        device: name in the node's own order, such as `cuda:1`, or `cpu`.
        device_id: UUID of the GPU or of its MIG part, as NVML names it.

    >>> visible_card("cpu", "cpu"), visible_card("cuda:1", "unknown")
    ('', '1')
    """
    if device == "cpu":
        return ""
    # The number fits, too, in the order of PCI slots. It differs from NVML's only if CUDA skips a
    # card; the driver under WSL does not promise to know UUIDs here.
    if device_id.startswith(("GPU-", "MIG-")) and "microsoft" not in platform.release().lower():
        return device_id
    return device.removeprefix("cuda:")
