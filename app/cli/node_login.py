"""Log in to a new PC from the terminal: ask about programs, host keys and, once, a password.

Nothing is asked with --json, where a program reads the output, or without a terminal.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from app.cli.kit.output import Output, ask_password, confirm
from app.core.action import CoreApi
from app.core.new_nodes import AddNode, CopyKey, ResolveHost, SetAddress
from app.errors import HostKeyUnknown, LoginRefused, RunsPrograms
from app.events import NodeSnapshot
from app.nodes.node import SshAddress

KEY_IS_ADDED = (
    "With its password, typed once and kept nowhere, Rackless adds your key to "
    "~/.ssh/authorized_keys there."
)


def add_login_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a command that logs in to a PC for the first time."""
    parser.add_argument("--key", type=Path, metavar="FILE", help="private key for --ssh")
    parser.add_argument(
        "--accept-host-key",
        metavar="SHA256:...",
        action="append",
        default=[],
        help="host key fingerprint that you have verified, for the first connection; once for each "
        "host on the way",
    )
    parser.add_argument(
        "--run-ssh-config",
        action="store_true",
        help="let ProxyCommand and Match exec of ~/.ssh/config run their programs",
    )


def key_file(args: argparse.Namespace) -> Path | None:
    """Return the file of `--key`: it is stored, and later commands start in other folders."""
    return args.key.expanduser().absolute() if args.key else None


async def resolve_target(
    core: CoreApi, target: str, args: argparse.Namespace, out: Output
) -> SshAddress:
    """Return the address that ~/.ssh/config gives a PC; ask before a program of it runs."""
    agreed: list[str] = []
    key = key_file(args)
    while True:
        try:
            host = await core.do(ResolveHost(target=target, key=key, agreed=tuple(agreed)))
        except RunsPrograms as error:
            if not args.run_ssh_config and (out.as_json or not _allowed(error)):
                raise
            agreed.append(error.command)
            continue
        for note in host.notes:
            out.note(note)
        return host.address


async def act_asking(
    core: CoreApi, request: AddNode | SetAddress, args: argparse.Namespace, out: Output
) -> NodeSnapshot:
    """Add or move a node; ask to confirm host keys, and for a password if no key is accepted.

    `args`: those of `add_login_options`.
    """
    verified: list[str] = list(args.accept_host_key)
    # With several fingerprints, it is not known yet which host has which.
    if len(verified) == 1:
        request = replace(request, accept_host_key=verified.pop())
    while True:
        try:
            return await core.do(request)
        except HostKeyUnknown as error:
            if error.fingerprint in verified:
                verified.remove(error.fingerprint)
            elif args.accept_host_key or out.as_json or not _confirmed(error):
                raise
            # The fingerprint that was shown, not the one of a second connection.
            request = replace(request, accept_host_key=error.fingerprint)
        except LoginRefused as error:
            address = await _copy_key(core, error, request, out)
            # The host key is stored by now; the next host on the way has its own.
            request = replace(request, address=address, accept_host_key=None)


async def _copy_key(
    core: CoreApi, error: LoginRefused, request: AddNode | SetAddress, out: Output
) -> SshAddress:
    """Install a key in the account that refused this PC's keys; return the address."""
    address, accepted = request.address, request.accept_host_key
    if not error.account or out.as_json or not isinstance(address, SshAddress):
        raise error
    out.note(f"{error.message}\n{KEY_IS_ADDED}")
    password = ask_password(f"Password of {error.account} (empty: do not): ")
    if not password:
        raise error
    copied = await core.do(CopyKey(address=address, password=password, accept_host_key=accepted))
    made = "which was just made, " if copied.is_new else ""
    done = "had been added before" if copied.was_there else "is added"
    out.note(f"The key {copied.key}, {made}{done}: {copied.account} lets it in.")
    return copied.address


def _allowed(error: RunsPrograms) -> bool:
    how = "It runs on this PC with your rights, each time that the node is connected or added."
    return confirm(f"{error.message}\n{how}\nMay it run?")


def _confirmed(error: HostKeyUnknown) -> bool:
    """Show the fingerprint of a first connection and ask; without a terminal the answer is no."""
    how = "Compare it on that PC: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
    return confirm(f"{error.message}\n{how}\nDo they match?")
