"""Key-value store of the ranks as torch wants it, on one address and only for ranks.

With a credential it is the attempt's own store (`agents.rendezvous`). Without one, as under a
manual torchrun, it is the store of torchrun, or torch's TCPStore on a socket opened here, because
torch's own socket listens on every interface.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta

from torch import distributed as dist

from agents.rendezvous.client import StoreClient, StoreError
from agents.rendezvous.host import StoreHost, listen_at, start_store


class RankStore(dist.Store):
    """torch's view of the attempt's store; Gloo and NCCL also call it from C++.

    The creator has to keep a reference: C++ only holds a part of it.
    """

    def __init__(self, client: StoreClient, host: StoreHost | None = None) -> None:
        super().__init__()
        self._client = client
        self._host = host

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self._client.get(key, self.timeout.total_seconds())

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        return self._client.compare_set(key, _bytes(expected), _bytes(value))

    def add(self, key: str, amount: int) -> int:
        return self._client.add(key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        self._client.append(key, _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        try:
            return self._client.check(list(keys))
        except StoreError:
            # NCCL's own threads poll for a signal: an exception there would end the process.
            if _is_thread_of_cpp():
                return False
            raise

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._client.wait(list(keys), (timeout or self.timeout).total_seconds())

    def delete_key(self, key: str) -> bool:
        return self._client.delete(key)

    def num_keys(self) -> int:
        return self._client.count()

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> RankStore:
        """Return this store, which any number of threads may use."""
        return self

    # C++ looks up these names.
    deleteKey = delete_key
    getNumKeys = num_keys

    def close(self) -> None:
        """Close the connections; on rank 0 also the store."""
        self._client.close()
        if self._host is not None:
            self._host.close()


def open_rank_store(
    *, address: str, port: int, credential: str, is_first: bool, timeout_s: float
) -> RankStore:
    """Open the attempt's store; rank 0 starts it.

    Raises:
        ExpectedError: rank 0 cannot listen there.
        StoreError: it could not be reached within `timeout_s`.
    """
    host = start_store(address, port, credential) if is_first else None
    client = StoreClient(address, port, credential)
    try:
        client.connect(timeout_s, host)
    except StoreError:
        if host is not None:
            host.close()
        raise
    return RankStore(client, host)


def open_plain_store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Open the store that the environment of torchrun names, without authentication.

    Raises:
        ExpectedError: rank 0 cannot listen there.
        RuntimeError: not all ranks joined in time.
        ValueError: MASTER_ADDR or MASTER_PORT is missing.
    """
    timeout = timedelta(seconds=timeout_s)
    is_open = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank != 0 or is_open:
        store: dist.Store = next(dist.rendezvous("env://", timeout=timeout))[0]
        return store
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdigit():
        raise ValueError("MASTER_ADDR and MASTER_PORT have to be set")
    # torch's own listener would accept connections on every interface.
    listener = listen_at(address, int(port))
    return dist.TCPStore(
        address,
        int(port),
        world_size,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach(),  # owned and closed by the store
    )


def _is_thread_of_cpp() -> bool:
    # threading makes up such a name for a thread that Python did not start.
    return threading.current_thread().name.startswith("Dummy-")


def _bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8") if isinstance(value, str) else bytes(value)
