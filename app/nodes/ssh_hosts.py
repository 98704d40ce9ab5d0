"""Resolve a name that the user typed after `ssh` into an address, by `~/.ssh/config`.

The file is read when a node gets its address, not at each connection, so a run does not depend on
it. Programs that the configuration names (`ProxyCommand`, `Match exec`) run with the rights of the
user, so they run only once the user has agreed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from agents.shared.files.python_child import SAFE_FOLDER, python_environ
from app.errors import RunsPrograms, UsageError, UserError
from app.nodes.node import DEFAULT_SSH_PORT, SshAddress, SshTarget, parse_ssh_target
from app.nodes.ssh_config import (
    ConfigFile,
    HostConfig,
    expand_tokens,
    list_hosts,
    local_user,
    read_host,
    tokens_of,
)

MAX_JUMPS = 8
"""Maximum number of hosts on the route to a node."""
MATCH_TIMEOUT_S = 10.0
"""Maximum duration of a program of `Match exec`, in seconds."""
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SshHost:
    """A host as the configuration describes it."""

    address: SshAddress
    notes: tuple[str, ...]
    """Parts of the configuration that were ignored, as sentences."""


def config_files(home: Path) -> tuple[ConfigFile, ...]:
    """Return the user's file and the system's, as OpenSSH reads them."""
    system = Path("/etc/ssh")
    if sys.platform == "win32":
        system = Path(os.environ.get("PROGRAMDATA", r"C:\ProgramData")) / "ssh"
    return tuple(
        ConfigFile(path=folder / name, folder=folder)
        for folder, name in ((home / ".ssh", "config"), (system, "ssh_config"))
    )


def list_ssh_hosts(files: tuple[ConfigFile, ...]) -> tuple[SshHost, ...]:
    """Return the hosts that the configuration names; those that cannot be read are left out.

    No program runs: a `Match exec` counts as false.
    """
    found = []
    for name in list_hosts(files):
        try:
            target = parse_ssh_target(name)
            found.append(_Resolver(files, None).resolve(target))
        except UserError:  # such as one with a damaged value
            continue
    return tuple(found)


def resolve_host(
    target: SshTarget,
    files: tuple[ConfigFile, ...],
    *,
    key: Path | None = None,
    agreed: Collection[str] = (),
) -> SshHost:
    """Return the address that `ssh` would log in to.

    Args:
        target: address or name as typed.
        files: configuration to follow.
        key: private key file to use instead of those that the files name.
        agreed: commands of the configuration that the user has agreed to.

    Raises:
        RunsPrograms: it names another command; ask the user, then call again with it.
        UserError: the configuration is damaged, or names no host that can be reached.
    """
    found = _Resolver(files, agreed).resolve(target)
    if key is None:
        return found
    return replace(found, address=replace(found.address, key=key))


class _Resolver:
    def __init__(self, files: tuple[ConfigFile, ...], agreed: Collection[str] | None) -> None:
        """`agreed`: commands that may run; None to run no command and not to ask."""
        self._files = files
        self._agreed = agreed
        self._notes: dict[str, None] = {}

    def resolve(self, target: SshTarget) -> SshHost:
        address = self._resolve(target, 0, None)
        return SshHost(address=address, notes=tuple(self._notes))

    def _resolve(self, target: SshTarget, depth: int, jump: str | None) -> SshAddress:
        """Return the address; `jump` replaces the hosts on the route from the configuration."""
        if depth > MAX_JUMPS:
            raise UserError(
                f"Your SSH configuration leads to {target.host} over more than {MAX_JUMPS} hosts",
                "Check that ProxyJump lines in ~/.ssh/config do not form a loop",
            )
        config = read_host(
            target.host, self._files, self._run_match, user=target.user, port=target.port
        )
        self._notes.update(
            (f"{note} in the SSH configuration is not known to Rackless, so it is skipped.", None)
            for note in config.unknown
        )
        tokens = tokens_of(config)
        user = config.values.get("user") or local_user()
        if user is None:
            raise UsageError(
                f"no user name is known to log in to {target.host}", "Write USER@HOST[:PORT]"
            )
        files, agent = _identity_files(config, tokens), config.values.get("identityagent")
        address = SshAddress(
            host=config.hostname,
            port=_port(config),
            user=user,
            identity_files=files,
            only_identity_files=config.is_agent_limited,
            agent=_agent(agent, tokens),
            alias="" if config.hostname == target.host.lower() else target.host,
        )
        command = None if jump is not None else _set_value(config, "proxycommand")
        if command is not None:
            return replace(address, proxy_command=self._ask(expand_tokens(command, tokens)))
        way = jump or _set_value(config, "proxyjump")
        if way is None:
            return address
        return replace(address, jumps=self._jumps(expand_tokens(way, tokens), depth))

    def _jumps(self, way: str, depth: int) -> tuple[SshAddress, ...]:
        """Return the hosts of a ProxyJump value, and those on the route to the first one."""
        # Only the last host follows its own configuration; the hosts before it are the route to it.
        before, _, last = way.rpartition(",")
        text = last.strip().removeprefix("ssh://")
        hop = self._resolve(parse_ssh_target(text), depth + 1, before or None)
        return (*hop.jumps, replace(hop, jumps=()))

    def _ask(self, command: str) -> str:
        if self._agreed is not None and command not in self._agreed:
            raise RunsPrograms(command)
        return command

    def _run_match(self, command: str) -> bool:
        if self._agreed is None:
            return False
        self._ask(command)
        # The command line is the user's own; OpenSSH gives it to a shell, too.
        try:
            done = subprocess.run(
                command,
                shell=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=MATCH_TIMEOUT_S,
                env=python_environ(os.environ),
                cwd=SAFE_FOLDER,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0


def _port(config: HostConfig) -> int:
    text = config.values.get("port", str(DEFAULT_SSH_PORT))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= 65535:
        raise UserError(
            f"Your SSH configuration gives {config.host} the port {text!r}",
            "Write a number from 1 to 65535 in ~/.ssh/config",
        )
    return int(text)


def _set_value(config: HostConfig, option: str) -> str | None:
    """Return the value of an option that may be switched off by `none`."""
    value = config.values.get(option)
    return None if value is None or value.lower() == "none" else value


def _identity_files(config: HostConfig, tokens: Mapping[str, str]) -> tuple[Path, ...]:
    named = [path for path in config.identity_files if path.lower() != "none"]
    return tuple(Path(_expand(path, tokens)) for path in named)


def _agent(value: str | None, tokens: Mapping[str, str]) -> str | None:
    """Return the agent's socket; `SSH_AUTH_SOCK` is the default, `$NAME` another variable."""
    if value is None or value == "SSH_AUTH_SOCK":
        return None
    if value.lower() == "none":
        return "none"
    if value.startswith("$") and not value.startswith("${"):
        return os.environ.get(value[1:], "none")
    return _expand(value, tokens)


def _expand(path: str, tokens: Mapping[str, str]) -> str:
    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise UserError(
                f"Your SSH configuration needs the variable {match[1]} for {path}; it is not set",
                f"Set it, or correct that line: export {match[1]}=...",
            )
        return os.environ[match[1]]

    return os.path.expanduser(expand_tokens(_VARIABLE.sub(variable, path), tokens))
