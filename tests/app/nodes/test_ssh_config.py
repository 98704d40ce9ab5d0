"""~/.ssh/config: the same hosts, users, ports, keys and jumps as OpenSSH's own `ssh -G`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from app.errors import RunsPrograms, UserError
from app.nodes.node import SshTarget, parse_ssh_target
from app.nodes.ssh_config import ConfigFile, local_user, read_host
from app.nodes.ssh_hosts import list_ssh_hosts, resolve_host

# (configuration, what is typed after `ssh`)
CONFIGS = [
    ("Host gamer\n HostName 192.168.1.20\n User anna\n Port 2222\n", ("gamer", "GAMER", "other")),
    ("Host=gamer\nHostName = 10.0.0.2 # the big one\nPort\t=\t2200\n", ("gamer",)),
    ("Port 2200\nHost a\nPort 2201\nHost *\nUser zoe\n", ("a", "b", "bob@a")),
    ("Host a* !ab\nUser x\nHost ?b c\nUser y\nHost *\nUser z\n", ("a1", "ab", "c", "d")),
    ("Host gpu-?\n HostName %h.lan\n", ("gpu-1", "gpu-11")),
    ("Host a\n HostName pc%%1.lan\n", ("a",)),
    ("Host a\nIdentityFile ~/k1\nHost *\nIdentityFile /k2\nIdentityFile ~/k1\n", ("a", "b")),
    ("Host a\nIdentitiesOnly yes\nIdentityAgent ~/sock\nHost *\nIdentitiesOnly no\n", ("a", "b")),
    ("Host in\n ProxyJump bob@gate:2022,second\nHost gate\n User g\n", ("in", "gate")),
    ("Host *.in\nProxyJump gate\nHost x.in\nProxyCommand nc %h %p\n", ("x.in", "y.in")),
    ("Host a\nProxyJump none\nHost *\nProxyJump gate\n", ("a", "b")),
    ("Host a\nProxyCommand nc -X 5 %h %p # not a comment\nHost *\nProxyJump g\n", ("a",)),
    ("Match host 10.*\nUser ten\nHost a\nHostName 10.1.1.1\nMatch host 10.*\nPort 7\n", ("a",)),
    ("Match originalhost a,b user anna\nPort 7\nHost *\nUser z\n", ("a", "anna@a", "anna@c")),
    ("Match !host a\nPort 7\nMatch all\nUser u\n", ("a", "b")),
    # From here on: held back while the reader was written.
    ("Match host=a\nPort 7\nMatch final host b.lan\nUser f\nHost b\nHostName b.lan\n", ("a", "b")),
    ('Host "a b" c\nUser "anna"\nIdentityFile "~/my key"\n', ("c",)),
    ("host A\nPORT 9\nhOsT *\nuser q\n", ("A", "a")),
    ("# all\n\n   # more\nHost a # mine\n\tPort 5\r\n", ("a",)),
    ("Include more/*.conf\nHost a\nPort 1\n", ("a", "b")),
    ("Host a\nInclude more/1.conf\nUser late\nHost b\nInclude more/2.conf\n", ("a", "b", "c")),
    ("Include missing.conf\nHost a\nPort 3\n", ("a",)),
    ("Match localuser nobody-here\nPort 3\nMatch localuser *\nPort 4\n", ("a",)),
    ('Match exec "test %n = a"\nPort 3\nMatch exec false\nUser no\n', ("a", "b")),
    ("Match host a exec true\nUser y\nMatch host b exec false\nUser n\n", ("a", "b")),
    ("Host a\nHostName 2001:db8::7\nPort 22\n", ("a",)),
    ("Host *\nIdentityFile ~/.ssh/%r_%h_%p\nHost a\nUser later\nPort 8\n", ("a",)),
    ("Host web.*,db\nUser comma\nHost db\nUser d\n", ("db", "web.x")),
    ("Host a\nForwardAgent yes\nServerAliveInterval 5\nHost b\nPort 6\n", ("a", "b")),
    ("IgnoreUnknown Unknown*\nHost a\nUnknownThing 1\nPort 6\n", ("a",)),
    ("Host a\nIdentityFile C:\\\\keys\\one\nIdentityFile none\n", ("a",)),
    ("Host j\nProxyJump ssh://bob@gate:2022\n", ("j",)),
]
MORE = {
    "1.conf": "Host b\nPort 11\nHost a\nUser included\n",
    "2.conf": "Host c\nUser two\nHost b\nIdentityFile ~/two\n",
}


def write(folder: Path, text: str) -> tuple[ConfigFile, ...]:
    (folder / ".ssh" / "more").mkdir(parents=True)
    for name, content in MORE.items():
        (folder / ".ssh" / "more" / name).write_text(content)
    path = folder / ".ssh" / "config"
    # OpenSSH looks for relative includes in the home of the passwd entry alone.
    path.write_text(text.replace("Include more", f"Include {folder}/.ssh/more"))
    return (ConfigFile(path=path, folder=path.parent),)


def ask_openssh(path: Path, target: SshTarget) -> dict[str, list[str]]:
    words = [*(["-l", target.user] if target.user else []), target.host]
    done = subprocess.run(
        ["ssh", "-F", str(path), "-G", *words], capture_output=True, text=True, check=True
    )
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(name, []).append(value)
    return found


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no OpenSSH")
@pytest.mark.parametrize(("text", "typed"), CONFIGS)
def test_hosts_are_those_of_openssh(tmp_path: Path, text: str, typed: tuple[str, ...]) -> None:
    files = write(tmp_path, text)
    for name in typed:
        target = SshTarget(host=name.rpartition("@")[2], user=name.rpartition("@")[0] or None)
        config = read_host(target.host, files, run_with_shell, user=target.user)
        wanted = ask_openssh(files[0].path, target)
        values = config.values
        assert config.hostname == wanted["hostname"][0], name
        assert values.get("user", local_user()) == wanted["user"][0], name
        assert values.get("port", "22") == wanted["port"][0], name
        assert config.is_agent_limited == (wanted["identitiesonly"] == ["yes"]), name
        agent = os.path.expanduser(values.get("identityagent", "SSH_AUTH_SOCK"))
        assert agent == wanted.get("identityagent", ["SSH_AUTH_SOCK"])[0], name
        if config.identity_files:
            assert config.identity_files == wanted["identityfile"], name
        jump, command = values.get("proxyjump", "none"), values.get("proxycommand", "none")
        assert jump.removeprefix("ssh://") == wanted.get("proxyjump", ["none"])[0], name
        assert command == wanted.get("proxycommand", ["none"])[0], name


def run_with_shell(command: str) -> bool:
    return subprocess.run(command, shell=True, check=False).returncode == 0


def write_plain(folder: Path, text: str) -> tuple[ConfigFile, ...]:
    (folder / "config").write_text(text)
    return (ConfigFile(path=folder / "config", folder=folder),)


def test_jump_hosts_are_resolved_by_the_configuration_as_well(tmp_path: Path) -> None:
    files = write_plain(
        tmp_path,
        "Host lab\n HostName 10.0.0.5\n ProxyJump zoe@inner:2022\n"
        "Host inner\n HostName 192.0.2.7\n ProxyJump outer\n"
        "Host outer\n HostName 203.0.113.9\n User root\n IdentityFile ~/.ssh/%n\n",
    )
    address = resolve_host(parse_ssh_target("anna@lab"), files).address
    assert [str(hop) for hop in address.hops] == [
        "root@203.0.113.9:22",
        "zoe@192.0.2.7:2022",
        "anna@10.0.0.5:22",
    ]
    assert address.hops[0].identity_files == (Path.home() / ".ssh" / "outer",)
    assert address.hops[0].label == "outer (203.0.113.9:22)"
    # Hosts of two networks may have one private address, so the way is part of the name.
    assert address.known_as == "[10.0.0.5]:22@[192.0.2.7]:2022@[203.0.113.9]:22"
    # Hosts before the last one are those that its line names, not those of its own ProxyJump.
    chain = write_plain(tmp_path, "Host c\nProxyJump a,b\nHost b\nProxyJump x\n")
    hops = resolve_host(parse_ssh_target("c"), chain).address.hops
    assert [hop.host for hop in hops] == ["a", "b", "c"]


def test_jumps_that_lead_to_each_other_end(tmp_path: Path) -> None:
    files = write_plain(tmp_path, "Host a\nProxyJump b\nHost b\nProxyJump a\n")
    with pytest.raises(UserError, match="more than 8 hosts"):
        resolve_host(parse_ssh_target("a"), files)


def test_no_program_runs_before_the_user_has_agreed(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    files = write_plain(
        tmp_path, f"Match host b exec 'touch {mark}'\nPort 7\nHost a\nProxyCommand nc %h %p\n"
    )
    for name, command in (("a", "nc a 22"), ("b", f"touch {mark}")):
        with pytest.raises(RunsPrograms) as caught:
            resolve_host(parse_ssh_target(name), files)
        assert caught.value.command == command
        assert not mark.exists()
    assert resolve_host(parse_ssh_target("a"), files, agreed=("nc a 22",)).address.proxy_command
    assert [host.address.host for host in list_ssh_hosts(files)] == ["a"]
    assert not mark.exists()
    agreed = (f"touch {mark}",)
    assert resolve_host(parse_ssh_target("b"), files, agreed=agreed).address.port == 7
    assert mark.exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Host a\nPort x\n", "the port 'x'"),
        ("Host a\nPort\n", "config:2: Port has no value"),
        ('Host a\nUser "anna\n', "config:2: quotes"),
        ("Match host\nPort 3\n", "lacks its pattern"),
        ("Host a\nIdentityFile ~/%z\n", "'%z'"),
        ("Host a\nIdentityFile ${NOT_SET_HERE}/k\n", "variable NOT_SET_HERE"),
        ("Include config\n", "include each other"),
    ],
)
def test_a_damaged_configuration_names_its_line(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UserError, match=named.replace("$", r"\$")):
        resolve_host(parse_ssh_target("a"), write_plain(tmp_path, text))


def test_a_condition_that_is_not_known_is_named_and_skipped(tmp_path: Path) -> None:
    files = write_plain(tmp_path, "Match !localnetwork 10.0.0.0/8\nPort 7\nHost a\nUser u\n")
    host = resolve_host(parse_ssh_target("a"), files)
    assert (host.address.port, host.address.user) == (22, "u")
    assert "Match localnetwork" in host.notes[0]
