"""A stranger on the nodes' network: tries what the store of an attempt holds, and says how it went.

Reads `{"store": [ADDRESS, PORT], "others": [[ADDRESS, PORT], ...]}` from stdin once torch is
imported, and prints one JSON object.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

NUM_SILENT = 300
KEYS = ("joined/0", "rackless/joined/0", "rackless/alive/0", "//rackless/joined/0", "init/")
"""Keys that the ranks use, with and without the prefixes of torch's stores."""


def try_torch(address: str, port: int) -> dict[str, str]:
    """Use the store as torch's own client does."""
    from torch import distributed as dist

    timeout = timedelta(seconds=2)

    def use(work: Callable[[Any], Any]) -> str:
        try:
            store = dist.TCPStore(
                address, port, None, False, timeout=timeout, wait_for_workers=False
            )
            return f"GOT {work(store)!r}"
        except RuntimeError as error:  # all of torch's errors of a store
            return f"refused: {str(error).splitlines()[0][:120]}"

    works: dict[str, Callable[[Any], Any]] = {
        "set": lambda store: store.set("rackless/alive/1", "stranger") or "written",
        "add": lambda store: store.add("stranger", 1),
        "delete": lambda store: store.delete_key("rackless/joined/0"),
        "count": lambda store: store.num_keys(),
    }
    works |= {f"get {key}": lambda store, key=key: store.get(key) for key in KEYS}
    with ThreadPoolExecutor(len(works)) as pool:
        return dict(zip(works, pool.map(use, works.values()), strict=True))


def try_bytes(address: str, port: int) -> dict[str, str]:
    """Say something that is no handshake, and report what comes back."""
    found = {}
    request = b'{"kind": "get", "key": "rackless/joined/0", "timeout_s": 1}\n'
    for name, words in (("http", b"GET / HTTP/1.1\r\n\r\n"), ("request", request)):
        try:
            with socket.create_connection((address, port), 3) as connection:
                connection.settimeout(3)
                connection.sendall(words)
                said = connection.recv(4096)
                # An alert of TLS tells nothing; anything else is an answer.
                found[name] = "refused" if said[:1] in (b"", b"\x15") else f"GOT {said[:60]!r}"
        except OSError as error:
            found[name] = f"refused: {error}"
    return found


def connect_silently(address: str, port: int) -> list[socket.socket]:
    """Open many connections and say nothing on them."""
    opened = []
    for _ in range(NUM_SILENT):
        try:
            opened.append(socket.create_connection((address, port), 1))
        except OSError:
            break
    return opened


def knock(address: str, port: int) -> str:
    """Report whether a connection is taken at all."""
    try:
        with socket.create_connection((address, port), 1.5):
            return "GOT a connection"
    except OSError as error:
        return f"refused: {error}"


def main() -> None:
    import torch.distributed  # noqa: F401 - it takes seconds, which the run would not wait for

    print("ready", flush=True)
    asked = json.loads(sys.stdin.readline())
    place = tuple(asked["store"])
    silent = connect_silently(*place)
    found = try_bytes(*place)
    for number, other in enumerate(asked["others"]):
        found[f"knock at rank {number}"] = knock(*other)
    found |= try_torch(*place)
    print(json.dumps({"found": found, "silent": len(silent)}), flush=True)
    for connection in silent:
        connection.close()


if __name__ == "__main__":
    main()
