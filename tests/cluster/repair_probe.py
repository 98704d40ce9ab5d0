"""A master for tests, inside the master's namespace: repairs the range of ports of one node.

The password comes on stdin. One JSON line each: the row of the check, the change, the row after it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from app.cli.kit.output import plain
from app.core.core import Core
from app.core.new_nodes import AddNode
from app.core.nodes import CheckNodes
from app.core.repairs import ApplyRepair, RetestRow, ShowRepair
from app.errors import AdminRefused
from app.nodes.node import SshAddress

CHECK = "ports"


async def main(options: argparse.Namespace, password: str) -> None:
    address = SshAddress(host=options.host, user=options.user, key=options.key)
    async with Core.open(options.home) as core:
        await core.do(AddNode(name="pc", address=address, accept_host_key=options.fingerprint))
        rows = await core.do(CheckNodes(names=("pc",)))
        (row,) = [one for one in rows if one.check == CHECK]
        say(row=row.status, message=row.message)
        if row.repair is None:
            return
        shown = await core.do(ShowRepair(node="pc", repair=row.repair))
        say(admin=shown.admin)
        try:
            await core.do(
                ApplyRepair(node="pc", repair=row.repair, shown=shown, password="not the password")
            )
        except AdminRefused as error:
            say(refused=error.message)
        change = await core.do(
            ApplyRepair(node="pc", repair=row.repair, shown=shown, password=password)
        )
        say(change=plain(change))
        (again,) = await core.do(RetestRow(row=row))
        say(row=again.status, message=again.message)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--user", required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--home", type=Path, required=True)
    asyncio.run(main(parser.parse_args(), sys.stdin.readline().rstrip("\n")))
