"""A package index with a tiny build of torch that needs what the real one does."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.packages import make_wheel

BUILD = "2.13.0+cu126"
PYTHONS = ("311", "312", "313", "314")
LINUX = 'platform_system == "Linux"'


def put_torch(folder: Path, machines: tuple[str, ...] = ("x86_64",)) -> None:
    """Write the wheels of a build for CUDA 12.6, and of all that it needs beside `train.lock`."""
    for machine in machines:
        for python in PYTHONS:
            make_wheel(
                folder,
                "torch",
                BUILD,
                tag=f"cp{python}-cp{python}-manylinux_2_28_{machine}",
                needs=(
                    "sympy>=1.13.3",
                    f"cuda-toolkit[cublas]==12.6.3; {LINUX}",
                    f"cuda-bindings<13,>=12.9.4; {LINUX}",
                    f'nvidia-nccl-cu12==2.29.3; {LINUX} and platform_machine == "x86_64"',
                    'tomli-later>=1; python_version < "3.12"',
                    'opt-einsum>=3.3; extra == "opt-einsum"',
                ),
            )
    for version in ("12.9.4", "12.9.7", "12.9.9", "13.5.0"):
        needs = ("cuda-pathfinder~=1.1",)
        make_wheel(folder, "cuda_bindings", version, needs=needs)
    for version in ("1.8.0", "1.9.0", "1.9.5"):
        make_wheel(folder, "cuda_pathfinder", version)
    make_wheel(
        folder,
        "cuda_toolkit",
        "12.6.3",
        needs=(
            'nvidia-cublas-cu12==12.6.4.1; extra == "cublas"',
            'nvidia-cufft-cu12==11.3.0.4; extra == "cufft"',
        ),
    )
    make_wheel(folder, "nvidia_cublas_cu12", "12.6.4.1", tag="py3-none-manylinux_2_27_x86_64")
    make_wheel(folder, "nvidia_cublas_cu12", "12.6.4.1", tag="py3-none-manylinux_2_27_aarch64")
    make_wheel(folder, "nvidia_cublas_cu12", "12.6.4.1", tag="py3-none-win_amd64")
    make_wheel(folder, "nvidia_nccl_cu12", "2.29.3", tag="py3-none-manylinux_2_18_x86_64")
    make_wheel(folder, "tomli_later", "2.0")
    make_wheel(folder, "sympy", "1.14.0")  # as in train.lock
