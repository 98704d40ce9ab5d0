"""Every kind of variable has one fate, and no rule is dead."""

from __future__ import annotations

import platform
from fnmatch import fnmatchcase

import pytest

from agents.shared.login_variables import RULES, find_odd, find_rule, program_environ, visible_card

UUID = "GPU-9d4a1f6e-0f0e-4d7b-8e0a-1c2d3e4f5a6b"


@pytest.mark.parametrize(
    ("fate", "names"),
    [
        (
            "removed",
            "TORCH_DISTRIBUTED_DEBUG TORCH_NCCL_BLOCKING_WAIT TORCH_DIST_INIT_BARRIER "
            "GLOO_SOCKET_IFNAME GLOO_DEVICE_TRANSPORT TP_SOCKET_IFNAME NCCL_SOCKET_IFNAME "
            "NCCL_COMM_ID RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT "
            "TORCHELASTIC_RUN_ID OMPI_COMM_WORLD_RANK RACKLESS_BACKEND CUDA_DEVICE_ORDER "
            "HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING "
            "PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF TRITON_INTERPRET "
            "OMP_PROC_BIND OMP_PLACES OMP_THREAD_LIMIT KMP_AFFINITY GOMP_CPU_AFFINITY "
            "MKL_NUM_THREADS OPENBLAS_NUM_THREADS PYTHONOPTIMIZE PYTHONHOME PYTHONPATH "
            "PYTHONSTARTUP PYTHONWARNINGS PYTHONHASHSEED PYTHONMALLOC PYTHONUTF8 PYTHONDEVMODE "
            "PYTHON_GIL PYTHONPLATLIBDIR PYTHONTRACEMALLOC PYTHONIOENCODING ACCELERATE_USE_FSDP "
            "FSDP_SHARDING_STRATEGY USE_TF USE_TORCH HF_HUB_ENABLE_HF_TRANSFER MALLOC_PERTURB_ "
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
        ),
        ("agreed", "NCCL_ALGO NCCL_PROTO NCCL_NET NCCL_IB_DISABLE NCCL_BUFFSIZE NCCL_MAX_CTAS"),
        ("overruled", "CUDA_VISIBLE_DEVICES"),
        (
            "shown",
            "LD_PRELOAD LD_LIBRARY_PATH HF_ENDPOINT HF_HUB_OFFLINE TRANSFORMERS_OFFLINE "
            "TORCHDYNAMO_DISABLE TORCH_COMPILE_DISABLE ATEN_CPU_CAPABILITY DNNL_VERBOSE "
            "MALLOC_ARENA_MAX",
        ),
        (
            "kept",
            "NCCL_DEBUG NCCL_DEBUG_FILE NCCL_P2P_DISABLE PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE "
            "PYTHONUSERBASE OMP_NUM_THREADS KMP_DUPLICATE_LIB_OK",
        ),
    ],
)
def test_fate(fate: str, names: str) -> None:
    found = {name: rule.fate if (rule := find_rule(name)) else None for name in names.split()}
    assert found == dict.fromkeys(names.split(), fate)


def test_variables_of_other_programs_have_no_rule() -> None:
    names = (
        "PATH LANG HF_HOME HTTPS_PROXY NVIDIA_VISIBLE_DEVICES TORCH_CPP_LOG_LEVEL PYTHON_VERSION"
    )
    assert [name for name in names.split() if find_rule(name)] == []


def test_each_pattern_can_decide() -> None:
    """A pattern behind a wider one would never be asked."""
    earlier: list[str] = []
    for rule in RULES:
        for pattern in rule.patterns.split():
            assert not [wide for wide in earlier if fnmatchcase(pattern, wide)], pattern
        earlier += rule.patterns.split()
    assert all(bool(rule.effect) is (rule.fate != "kept") for rule in RULES)


def test_programs_get_a_login_without_them() -> None:
    kept = {"PATH": "/bin", "LD_PRELOAD": "/a.so", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}
    odd = {"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "1", "PYTHONOPTIMIZE": "2", "RANK": "3"}
    assert program_environ({**kept, **odd}) == {**kept, "PYTHONUTF8": "1"}


def test_an_empty_variable_is_unset_except_the_list_of_gpus() -> None:
    assert list(find_odd({"PYTHONHOME": "", "NCCL_ALGO": "", "CUDA_VISIBLE_DEVICES": ""})) == [
        "CUDA_VISIBLE_DEVICES"
    ]


def test_a_card_is_named_by_its_uuid_where_the_driver_knows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mig = "MIG-41b3359c-e721-56e5-8009-12e5797ed514"
    assert [visible_card("cuda:1", card) for card in (UUID, mig, "0")] == [UUID, mig, "1"]
    assert visible_card("cpu", "cpu") == ""
    monkeypatch.setattr(platform, "release", lambda: "5.15.153.1-microsoft-standard-WSL2")
    assert visible_card("cuda:1", UUID) == "1"
