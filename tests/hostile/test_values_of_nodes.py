"""Values of a lying node in commands, advice and repairs: for itself, and for other PCs."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.names import SAFE_NAME
from agents.contract.node import EnvironmentReport, GpuFacts, InterfaceFacts, NodeFacts
from agents.contract.requests.examination import (
    DeviceFacts,
    DriverFacts,
    Examination,
    NetworkFacts,
    RdmaFacts,
    Route,
    SystemFacts,
    WslFacts,
)
from agents.contract.wake import WakeTarget
from agents.contract.wire import WireError, from_wire, to_wire
from app.nodes.node import check_node_name
from app.provisioning.check import GROUP_CHECKS, NODE_CHECKS
from app.provisioning.check_row import CheckRow
from app.provisioning.repairs import show_command
from tests.fakes.checked import FACTS, checked, group_of

Attack = Callable[..., None]
# As `shlex.quote` writes them.
_IN_QUOTES = re.compile(r"""('[^']*'|"'")+""")
ROOT = Path(__file__).resolve().parents[2]
SHELL = (
    "$(id>pwned)",
    "`id`",
    "x; id",
    "x | id",
    "x && id",
    "x\nid",
    "-o ProxyCommand=id",
    "'; id; '",
    '"; id; "',
    "x\x1b[2Jid",
    "%$(id)",
    "~root",
)


@pytest.mark.parametrize("text", SHELL)
def test_an_address_or_a_device_with_shell_text_is_refused_when_it_is_read(
    text: str, attack: Attack
) -> None:
    device = {"name": "eth0", "address": "10.0.0.1"}
    refused: list[tuple[Any, dict[str, Any]]] = [
        (InterfaceFacts, {**device, "name": text}),
        (InterfaceFacts, {**device, "address": text}),
        (InterfaceFacts, {**device, "address": f"fe80::1%{text}"}),
        (InterfaceFacts, {**device, "broadcast": text}),
        (NodeFacts, {**to_wire(FACTS), "address": f"10.0.0.1{text}"}),
        (NodeFacts, {**to_wire(FACTS), "address": f"fe80::1%{text}"}),
        (Route, {"address": text}),
        (Route, {"address": "10.0.0.1", "device": text}),
        (Route, {"address": "10.0.0.1", "gateway": text}),
        (DeviceFacts, {"name": text}),
        (RdmaFacts, {"name": text}),
        (SystemFacts, {"hostname_addresses": [text]}),
        (WakeTarget, {"mac": "aa:bb:cc:dd:ee:ff", "broadcast": "10.0.0.255", "device": text}),
    ]
    for kind, value in refused:
        with pytest.raises((WireError, ValueError)):
            from_wire(kind, value)
    attack(given=f"names and addresses such as {text!r}", tried="to be read", happened="refused")


@pytest.mark.parametrize("text", SHELL)
def test_a_version_user_or_package_with_shell_text_is_not_known(text: str) -> None:
    system = from_wire(
        SystemFacts, {"user": text, "first_process": text, "home": text, "boot_id": text}
    )
    assert (system.user, system.first_process, system.home, system.boot_id) == (None,) * 4
    driver = from_wire(DriverFacts, {"module_version": text, "library_version": text})
    assert (driver.module_version, driver.library_version) == (None, None)
    assert from_wire(WslFacts, {"linux_driver": text}).linux_driver is None
    report = from_wire(EnvironmentReport, {"python": text, "python_version": text})
    assert (report.python, report.python_version) == (None, None)
    card = from_wire(GpuFacts, {"uuid": "u", "index": 0, "name": "x", "driver": text, "cuda": text})
    assert (card.driver, card.cuda) == (None, None)


def test_absurd_sizes_are_not_known() -> None:
    for number in (-1, 0, 2**40):
        device = from_wire(DeviceFacts, {"name": "eth0", "mtu": number, "speed_mbit": number})
        assert (device.mtu, device.speed_mbit) == (None, None)
    for ports in ([-1, 5], [1, 70_000]):
        with pytest.raises(WireError):
            from_wire(NetworkFacts, {"port_range": ports})


def lying_rows(text: str) -> Iterator[CheckRow]:
    """Yield the rows of two nodes, of which one says `text` wherever its agent may."""
    odd = {
        "home": f"/home/{text}", "temporary_folder": f"/tmp/{text}", "user": text,
        "hostname_addresses": ["127.0.1.1"], "home_file_system": text, "sudo": "none",
        "first_process": "systemd", "ends_at_logout": True, "lingers": False, "swap_bytes": 0,
        "shm_bytes": 1, "shm_free_bytes": 1, "inodes": 5, "inodes_free": 1, "may_sleep": True,
        "clock_synchronised": False, "clock_service": "none",
    }  # fmt: skip
    for wsl in (None, {"linux_driver": text, "version": text, "config": [text]}):
        for state in ({"home_writable": False}, {"home_executable": False}, {}):
            for free in ({"temporary_writable": False}, {"temporary_free_bytes": 1}, {}):
                for addresses in (["127.0.1.1"], [], ["10.9.9.9"], None):
                    facts = from_wire(
                        NodeFacts,
                        {
                            **to_wire(FACTS),
                            **{"hostname": text, "os": f"Ubuntu {text}", "kernel": text},
                            **{"compiler": None, "gpu_problem": text},
                        },
                    )
                    system = {**odd, **state, **free, "hostname_addresses": addresses}
                    examination = from_wire(
                        Examination,
                        {
                            "system": system,
                            "driver": {"smi_message": text, "module_version": text},
                            "wsl": wsl,
                        },
                    )
                    liar = replace(checked(facts=facts), examination=examination)
                    honest = checked(name="b", address="10.0.0.2")
                    for judge in NODE_CHECKS:
                        yield from judge(liar)
                    for compare in GROUP_CHECKS:
                        yield from compare(group_of(liar, honest))


@pytest.mark.parametrize("text", [text for text in SHELL if text.isprintable()])
def test_no_advice_and_no_repair_has_the_text_of_a_node_as_a_part_of_its_command(
    text: str, attack: Attack
) -> None:
    given = 0
    for row in lying_rows(text):
        steps = row.repair.steps if row.repair else ()
        # Before the colon is prose.
        for shown in (row.fix.partition(": ")[2] or row.fix, *map(show_command, steps)):
            assert text not in _IN_QUOTES.sub("", shown), shown
            given += 1
        for step in steps:
            assert not any(text in word for word in (*step.run, *step.undo)), step
    attack(given=f"facts with {text!r}", tried="to reach a command", happened=f"{given} are safe")


# ---------------------------------------------------------------- all commands that are shown

_COMMAND = re.compile(
    r"(?:^|[\s:`(;&|'])(?:sudo|ssh|ssh-keygen|ping|rackless|nmcli|netplan|wsl|docker|vllm|ollama"
    r"|llama-[a-z]+|ip|df|findmnt|getent|grep|chmod|chown|du|touch|iw|ufw|mount|apt-get|systemctl"
    r"|loginctl|dpkg|ethtool|nvidia-smi|hf|tail|cat|ls|rm|scp|curl|journalctl|firewall-cmd|git|ssh-add|ssh-copy-id)"
    r"(?:[ X][^.\n]*)?$"
)
_QUOTED = re.compile(
    r"^(posix_command|powershell_command|command_here|shlex\.(quote|join)|_\w+_command)\("
)
# Checked where they enter: ids of runs and names of nodes have no sign for a shell; numbers.
_PLAIN = re.compile(
    r"^([\w.]*run_id|([\w.]+\.)?(node|step|rank|port|index)|(node|client|self|twin|other)\.name)$"
)
# What is no command, or is made of our own constants, by file and expression.
_OURS = {
    ("agents/contract/mandate.py", "about"),
    ("agents/election/member.py", "what"),
    ("agents/election/member.py", "text"),
    ("agents/shared/files/full_disk.py", "where"),
    ("app/provisioning/system_repairs.py", "old"),
    ("app/provisioning/system_repairs.py", "seed"),
    ("app/cli/check.py", "row.topic"),
    ("app/cli/kit/failures.py", "failure.topic"),
    ("app/cli/main.py", "version('rackless')"),
    ("app/cli/nodes.py", "what"),
    ("app/presentation/limit_text.py", "limit.place"),
    ("app/nodes/bootstrap.py", "ARCHIVES_KEPT + 1"),
    ("app/nodes/bootstrap.py", "AGENT_FOLDER"),
    ("app/nodes/bootstrap.py", "package"),
    ("app/provisioning/changes.py", "MAX_PASSWORD_BYTES"),
    ("app/provisioning/changes.py", "name"),
    ("app/provisioning/torch_build.py", "name"),
    ("app/provisioning/torch_locks.py", "file"),
    ("app/provisioning/torch_locks.py", "DRIVERS[TorchBuild.CUDA_13]"),
    ("app/provisioning/environment.py", "name"),
    ("app/provisioning/check_rules.py", "name"),
    ("app/provisioning/checks/torch.py", "name"),
    ("app/provisioning/checks/reduce.py", "name"),
    ("app/provisioning/windows/repair.py", "memory"),
    ("agents/node/facts.py", "own_id"),
    ("agents/trainer/rank/heat_watch.py", "lower_w"),
}


def shown_values() -> Iterator[tuple[str, int, str]]:
    """Yield file, line and expression of each value in the text of a command that is shown."""
    for path in sorted((*ROOT.glob("app/**/*.py"), *ROOT.glob("agents/**/*.py"))):
        name = path.relative_to(ROOT).as_posix()
        for joined in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(joined, ast.JoinedStr):
                continue
            before = ""
            for part in joined.values:
                if isinstance(part, ast.Constant):
                    before += str(part.value)
                elif isinstance(part, ast.FormattedValue):
                    if _COMMAND.search(before):
                        yield name, joined.lineno, ast.unparse(part.value)
                    before += "X"


def test_every_shown_command_quotes_what_others_may_have_named() -> None:
    seen = list(shown_values())
    bare = [
        (name, line, value)
        for name, line, value in seen
        if not _QUOTED.match(value) and not _PLAIN.match(value) and (name, value) not in _OURS
    ]
    assert bare == []
    assert len(seen) > 100
    for text in SHELL:
        assert SAFE_NAME.fullmatch(text) is None
        with pytest.raises(Exception, match=r".") as refused:
            check_node_name(text)
        assert refused.type.__name__ == "UsageError"
