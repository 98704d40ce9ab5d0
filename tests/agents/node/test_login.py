"""A node names the odd variables of its login, and the file of each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agents.contract.node import LoginVariable
from agents.contract.wire import WireError, from_wire, to_wire
from agents.node.login import read_login_variables

ODD = {"NCCL_ALGO": "Ring", "PYTHONOPTIMIZE": "2", "CUDA_VISIBLE_DEVICES": "1"}


def test_only_values_that_are_compared_leave_the_node(tmp_path: Path) -> None:
    found = read_login_variables({**ODD, "LD_PRELOAD": "/secret.so", "HOME": "/h"}, tmp_path)
    assert [(one.name, one.value) for one in found] == [
        ("CUDA_VISIBLE_DEVICES", ""),
        ("LD_PRELOAD", ""),
        ("NCCL_ALGO", "Ring"),
        ("PYTHONOPTIMIZE", ""),
    ]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("~/.bashrc", "export NCCL_ALGO=Ring"),
        ("~/.profile", "cd /tmp; NCCL_ALGO=Ring export NCCL_ALGO"),
        ("~/.ssh/environment", "NCCL_ALGO=Ring"),
        ("~/.config/environment.d/gpu.conf", "NCCL_ALGO=Ring"),
        ("~/.config/fish/config.fish", "set -gx NCCL_ALGO Ring"),
        ("/etc/environment", 'NCCL_ALGO="Ring"'),
        ("/etc/security/pam_env.conf", "NCCL_ALGO DEFAULT=Ring"),
        ("/etc/profile.d/nccl.sh", "  export NCCL_ALGO=Ring"),
        ("/etc/ssh/sshd_config.d/10-env.conf", "SetEnv LANG=C NCCL_ALGO=Ring"),
    ],
)
def test_file_of_a_variable(tmp_path: Path, file: str, line: str) -> None:
    home, root = tmp_path / "home", tmp_path / "root"
    base, name = (home, file[2:]) if file.startswith("~") else (root, file[1:])
    (base / name).parent.mkdir(parents=True)
    (base / name).write_text(
        f"# NCCL_ALGO=Tree\nexport MY_NCCL_ALGO=Tree NCCL_ALGO2=Tree\n{line}\n"
    )
    (one,) = read_login_variables({"NCCL_ALGO": "Ring"}, home, root)
    assert one.file == file


def test_no_file_is_named_for_a_comment_or_another_name(tmp_path: Path) -> None:
    text = "# export NCCL_ALGO=Tree\nexport MY_NCCL_ALGO=Tree NCCL_ALGO_2=Tree\n"
    (tmp_path / ".bashrc").write_text(text)
    # A pipe without a writer would block its reader.
    os.mkfifo(tmp_path / ".profile")
    (one,) = read_login_variables({"NCCL_ALGO": "Ring"}, tmp_path, tmp_path / "none")
    assert one.file == ""


def test_values_that_are_no_plain_text_are_not_compared(tmp_path: Path) -> None:
    values = ("R\ning", "x" * 300, "R\u00e9")
    found = [read_login_variables({"NCCL_ALGO": value}, tmp_path)[0] for value in values]
    assert [one.value for one in found] == ["", "", ""]
    assert read_login_variables({"NCCL_$(id)": "1"}, tmp_path) == ()


@pytest.mark.parametrize(
    "lie",
    [
        {"name": "NCCL_ALGO; id"},
        {"name": ""},
        {"value": "Ring\n"},
        {"value": "x" * 300},
        {"file": "~/$(id)"},
        {"file": "-rf /"},
    ],
)
def test_a_node_cannot_name_other_things(lie: dict[str, str]) -> None:
    said = to_wire(LoginVariable(name="NCCL_ALGO", value="Ring", file="~/.bashrc"))
    assert from_wire(LoginVariable, said).value == "Ring"
    with pytest.raises(WireError):
        from_wire(LoginVariable, {**said, **lie})
