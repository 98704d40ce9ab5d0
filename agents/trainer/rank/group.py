"""The ranks of an attempt and their common operations.

Not DistributedDataParallel: it rebuilds its buckets after the first step, so a resumed run would
add in another order than an uninterrupted one, and it requires every rank in every backward pass.
One flat buffer, summed once per step, has neither problem, allows a rank without work, and costs
LoRA nothing, since its gradients are small.

Before the first collective the ranks communicate only through the key-value store of the
rendezvous, with short deadlines, so all ranks report a rank that cannot load within a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from agents.errors import ExpectedError
from agents.rendezvous.connections import outlast_outages
from agents.rendezvous.interfaces import LOOPBACK_DEVICE, choose_variables, listen_on
from agents.trainer.rank import process_group
from agents.trainer.rank.store import RankStore, open_plain_store, open_rank_store

JOIN_TIMEOUT_S = 120.0
"""Time that a rank waits for the others to start, in seconds."""
LOAD_TIMEOUT_S = 1800.0
"""Time that a rank waits for another one to load without a sign of life, in seconds."""
REMAKE_TIMEOUT_S = 10.0
"""Time for running ranks to find each other again, in seconds."""
# Time that rank 0 stays after a failure so that others can read the reason in its store, in
# seconds.
_LINGER_S = 3.0
_POLL_S = 0.02
_SLOW_POLL_S = 0.1
# Gloo wraps its reason in the location in its source and advice.
_SOURCE_PLACE = re.compile(r"^\[[^\]]*:\d+\] ")
_ADVICE = " This is typically caused by"


class PeerLost(ExpectedError):
    """Raised when another rank is gone: the cause of the failure is on that rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Position of this process, from the environment that torchrun or the supervisor sets."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; unset ones keep their default."""
        values = {name: os.environ.get(name.upper()) for name in cls.__slots__}
        return cls(**{name: int(value) for name, value in values.items() if value})


class Group:
    """All ranks together. A single rank opens and sends nothing.

    `rank` and `world_size` are positions in this group; `members` has the first number of each
    rank, in order. They agree until ranks are lost and the others regroup.
    """

    def __init__(
        self,
        ranks: Ranks,
        names: list[str],
        waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Create the group, without connections.

        Args:
            ranks: position of this process.
            names: name of each rank for messages, in order.
            waiting: returns a context in which this rank waits for others.
        """
        self._waiting = waiting
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.members = tuple(range(ranks.world_size))
        self.generation = 0
        """Number of times that survivors of a loss have regrouped."""
        self._is_on_one_node = ranks.local_world_size == ranks.world_size
        # Names for messages, such as `rank 2 (node gamma, cuda:0)`, by the ranks' first numbers.
        self._all_names = names
        self._names = names
        self._store: dist.Store | None = None
        # Kept because C++ holds no reference, and closed at the end.
        self._root: dist.Store | None = None
        self._num_signs = 0
        self._num_collectives = 0
        # Latest sign of life of each other rank.
        self._seen_signs: dict[int, str] = {}
        # Why sums of this group are void although their library reports no error.
        self._interruption = ""

    def join(self, backend: str, device: torch.device, credential: str = "") -> None:
        """Connect to the other ranks; needs MASTER_ADDR and MASTER_PORT in the environment.

        Args:
            backend: `gloo` or `nccl`.
            device: device of this rank.
            credential: credential of the attempt; if empty, the store accepts every connection.

        Raises:
            ExpectedError: not all ranks joined in time.
        """
        if self.world_size == 1:
            return
        # torchrun has opened its own store, which knows no credential.
        if not credential or "TORCHELASTIC_RUN_ID" in os.environ:
            self._open(lambda: open_plain_store(self.rank, self.world_size, JOIN_TIMEOUT_S))
        else:
            self._open(
                lambda: self._open_own_store(
                    os.environ["MASTER_ADDR"],
                    int(os.environ["MASTER_PORT"]),
                    credential,
                    JOIN_TIMEOUT_S,
                )
            )
        self._wait_for_all(JOIN_TIMEOUT_S)
        self._choose_interface()
        self._connect(backend, device)

    def remake(
        self,
        members: Sequence[int],
        *,
        generation: int,
        place: tuple[str, int],
        credential: str,
        backend: str,
        device: torch.device,
    ) -> None:
        """Become the group of these ranks after the old one is dissolved.

        Args:
            members: first numbers of its ranks, in order: at least two, including this rank's own.
            generation: number of the new group.
            place: address and port of its store, which the first member opens.
            credential: credential of the attempt.
            backend: `gloo` or `nccl`.
            device: device of this rank.

        Raises:
            ExpectedError: not all ranks joined in time.
        """
        own = self.members[self.rank]
        self.members, self.generation = tuple(members), generation
        self.rank, self.world_size = self.members.index(own), len(self.members)
        self._names = [self._all_names[number] for number in self.members]
        self._seen_signs, self._interruption = {}, ""
        self._open(lambda: self._open_own_store(*place, credential, REMAKE_TIMEOUT_S))
        self._wait_for_all(REMAKE_TIMEOUT_S)
        self._connect(backend, device)

    def _connect(self, backend: str, device: torch.device) -> None:
        store = dist.PrefixStore("group", self._store)
        try:
            with self._waiting():
                process_group.connect(backend, device, store, self.rank, self.world_size)
        except (RuntimeError, ValueError) as error:
            raise PeerLost(
                f"{self._names[self.rank]} could not connect to the other ranks: {_first(error)}.",
                "Run rackless check: a firewall or the wrong network interface is likely",
            ) from error
        outlast_outages()

    def _open(self, open_store: Callable[[], dist.Store]) -> None:
        try:
            with self._waiting():
                self._root = open_store()
        except (RuntimeError, ValueError, KeyError) as error:
            if self.rank == 0:
                raise self._lack_ranks(_first(error)) from error
            raise PeerLost(
                f"{self._names[self.rank]} could not reach rank 0 at {_place()} "
                f"within {JOIN_TIMEOUT_S:.0f} s: {_first(error)}.",
                "Read the log of rank 0; then run rackless check for the network between them",
            ) from error
        # Each group has its own keys: a rank that was left behind must not find those of another.
        self._store = dist.PrefixStore(f"rackless/{self.generation}", self._root)

    def _open_own_store(
        self, address: str, port: int, credential: str, timeout_s: float
    ) -> dist.Store:
        return open_rank_store(
            address=address,
            port=port,
            credential=credential,
            is_first=self.rank == 0,
            timeout_s=timeout_s,
        )

    def _wait_for_all(self, timeout_s: float) -> None:
        try:
            self.exchange("joined", {}, timeout_s=timeout_s)
        except PeerLost as error:
            if self.rank == 0:
                raise self._lack_ranks(error.message.rstrip(".")) from error
            raise

    def _lack_ranks(self, reason: str) -> ExpectedError:
        return ExpectedError(
            f"{self._names[0]} waited at {_place()} for the other ranks to start, for at most "
            f"{JOIN_TIMEOUT_S:.0f} s: {reason}.",
            "Read the logs of the other ranks; then run rackless check for the network between "
            "them",
        )

    def _choose_interface(self) -> None:
        """Make Gloo and NCCL listen on one interface if the supervisor has not named it."""
        if all(name in os.environ for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")):
            return
        chosen = (
            listen_on(LOOPBACK_DEVICE)
            if self._is_on_one_node
            else choose_variables(os.environ["MASTER_ADDR"], self.rank == 0)
        )
        # A user may have set one of them.
        for name, value in chosen.items():
            os.environ.setdefault(name, value)

    def exchange(
        self, topic: str, value: dict[str, Any], *, timeout_s: float = LOAD_TIMEOUT_S
    ) -> list[dict[str, Any]]:
        """Send `value` to every rank and return the values of all ranks, in rank order.

        A value with a `failure` (message and hint) ends the wait of every rank at once. The wait is
        extended while a missing rank calls `signal_alive`.

        Raises:
            ExpectedError: a rank failed.
            PeerLost: a missing rank sent nothing within `timeout_s`.
        """
        if self._store is None:
            _raise_failure(value)
            return [value]
        with self._waiting():
            return self._exchange(topic, value, timeout_s)

    def _exchange(
        self, topic: str, value: dict[str, Any], timeout_s: float
    ) -> list[dict[str, Any]]:
        self._guard(lambda store: store.set(f"{topic}/{self.rank}", json.dumps(value)))
        values: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        pause_s = _POLL_S
        # Polled: a blocking get of one key would miss the failure of another rank.
        while len(values) < self.world_size:
            for rank in range(self.world_size):
                if rank not in values and self._has_sent(topic, rank):
                    values[rank] = self._read(topic, rank)
                    self._end_on_failure(topic, rank, values[rank])
            if len(values) < self.world_size:
                missing = [rank for rank in range(self.world_size) if rank not in values]
                if time.monotonic() > deadline:
                    self._expect_alive(topic, missing)
                    deadline = time.monotonic() + timeout_s
                time.sleep(pause_s)
                # A rank that loads for minutes must not be polled 50 times a second by all others.
                pause_s = min(pause_s * 1.1, _SLOW_POLL_S)
        return [values[rank] for rank in range(self.world_size)]

    def agree(self, topic: str, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Call `work` on every rank, and return the results of all ranks, in rank order.

        A failure on one rank ends all ranks at once, with the same reason.

        Raises:
            ExpectedError: `work` failed on this rank or on another one.
        """
        try:
            value = work()
        except ExpectedError as error:
            self.exchange(topic, {"failure": {"message": error.message, "hint": error.hint}})
            raise
        except Exception as error:
            # A bug: the other ranks still have to learn the reason before this one ends.
            words = f"{type(error).__name__}: {error}"
            failure = {"message": words, "hint": "Read the log of that rank"}
            with contextlib.suppress(ExpectedError):  # the crash itself is raised below
                self.exchange(topic, {"failure": failure})
            raise
        return self.exchange(topic, value)

    def _end_on_failure(self, topic: str, rank: int, value: dict[str, Any]) -> None:
        if not value.get("failure"):
            return
        # Rank 0 waits for this mark before it ends and takes the store with it.
        self._guard(lambda store: store.set(f"{topic}/seen/{self.rank}", "1"))
        keys = [f"{topic}/seen/{number}" for number in range(self.world_size)]
        deadline = time.monotonic() + _LINGER_S
        # Rank 0 hosts the store, so it stays until the others have read the reason.
        while self.rank == 0 and time.monotonic() < deadline:
            if self._guard(lambda store: store.check(keys)):
                break
            time.sleep(_POLL_S)
        if rank == self.rank:
            _raise_failure(value)
        raise PeerLost(
            f"{self._names[self.rank]} lost its connection to {self._names[rank]}, which failed: "
            f"{value['failure']['message']}",
            value["failure"]["hint"],
        )

    def _read(self, topic: str, rank: int) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self._guard(lambda store: store.get(f"{topic}/{rank}")))
        return value

    def _has_sent(self, topic: str, rank: int) -> bool:
        return bool(self._guard(lambda store: store.check([f"{topic}/{rank}"])))

    def signal_alive(self) -> None:
        """Extend the wait of the ranks that wait for this one.

        Raises:
            PeerLost: rank 0, which hosts the store, is gone.
        """
        if self._store is not None:
            # A counter, since an unchanged value would be no sign of life.
            self._num_signs += 1
            self._guard(lambda store: store.set(f"alive/{self.rank}", str(self._num_signs)))

    def _expect_alive(self, topic: str, missing: list[int]) -> None:
        """Raise unless a missing rank has given a sign of life since the last call."""
        signs = {rank: self._read_sign(rank) for rank in missing}
        alive = [
            rank for rank, sign in signs.items() if sign and sign != self._seen_signs.get(rank)
        ]
        self._seen_signs.update(signs)
        if not alive:
            silent = ", ".join(self._names[rank] for rank in missing)
            raise PeerLost(
                f"{self._names[self.rank]} timed out waiting for {silent} ({topic}).",
                "Read the log of that rank, and run rackless check for its node",
            )

    def _read_sign(self, rank: int) -> str:
        key = f"alive/{rank}"
        if not self._guard(lambda store: store.check([key])):
            return ""
        return str(self._guard(lambda store: store.get(key)).decode("ascii"))

    def _guard(self, use: Callable[[Any], Any]) -> Any:
        try:
            return use(self._store)
        except RuntimeError as error:
            raise PeerLost(
                f"{self._names[self.rank]} lost its connection to rank 0: {_first(error)}.",
                "Read the log of rank 0",
            ) from error

    def sum(self, tensor: Tensor) -> None:
        """Sum the tensor over all ranks, in place, with the same result on each.

        Raises:
            PeerLost: another rank is gone.
        """
        if self._store is None:
            return
        self._collect(lambda: dist.all_reduce(tensor))

    @property
    def is_connected(self) -> bool:
        """True if there are other ranks, and the group is neither left nor dissolved."""
        return self._store is not None

    @property
    def failure(self) -> str:
        """Error that NCCL reports of an aborted sum; empty if none. Safe in any thread."""
        return process_group.find_failure() if self._store is not None else ""

    def require_whole(self) -> None:
        """Raise if a sum on GPUs was aborted: its result looks like any other.

        Call it when results have arrived on the host.

        Raises:
            PeerLost: another rank is gone.
        """
        failure = self._interruption or self.failure
        if failure:
            raise PeerLost(
                f"{self._names[self.rank]} lost its connection to another rank: {failure}.",
                "Find the rank that ended first; its log says why",
            )

    def interrupt(self, reason: str) -> None:
        """End the sums that this rank waits for with PeerLost in its loop.

        Safe in any thread, for a group that has lost a rank; the group is unusable afterwards.
        """
        self._interruption = reason
        if self._store is not None:
            process_group.interrupt()

    def dissolve(self) -> None:
        """Close all connections, so that the other ranks notice, and no sum writes any more.

        Call it in the thread that waits for the sums, after one of them has raised PeerLost.
        """
        self.interrupt("the group was dissolved")
        self.leave()

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Start a `sum`; the returned function waits for it and raises PeerLost as `sum` does.

        All ranks have to start their sums in the same order.
        """
        if self._store is None:
            return lambda: None
        work = self._collect(lambda: dist.all_reduce(tensor, async_op=True))

        def wait() -> None:
            self._collect(work.wait)

        return wait

    def start_send(self, tensor: Tensor, to: int, *, tag: int) -> Callable[[], None]:
        """Start to send a tensor to a rank; it must not change before it is sent. Needs Gloo.

        Args:
            tensor: contiguous tensor in host memory.
            to: receiving rank.
            tag: number that the receiver uses, too.

        Returns:
            A function that waits until it is sent, and raises PeerLost as `sum` does.
        """
        return self._start_message(lambda: dist.isend(tensor, to, tag=tag))

    def start_receive(self, tensor: Tensor, source: int, *, tag: int) -> Callable[[], None]:
        """Start to receive a tensor from a rank; see `start_send`."""
        return self._start_message(lambda: dist.irecv(tensor, source, tag=tag))

    def _start_message(self, begin: Callable[[], Any]) -> Callable[[], None]:
        work = self._collect(begin)

        def wait() -> None:
            self._collect(work.wait)

        return wait

    def copy_from_first(self, tensor: Tensor) -> None:
        """Replace the tensor by that of rank 0; raises PeerLost as `sum` does."""
        if self._store is None:
            return
        self._collect(lambda: dist.broadcast(tensor, src=0))

    def _collect(self, work: Callable[[], Any]) -> Any:
        try:
            with self._waiting():
                result = work()
        except RuntimeError as error:
            # These are faults of this rank that only surfaced in a collective.
            if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
                raise
            raise PeerLost(
                f"{self._names[self.rank]} lost its connection to another rank: {_first(error)}.",
                "Find the rank that ended first; its log says why",
            ) from error
        self._num_collectives += 1
        # NCCL opens connections when it first uses an algorithm, at some early collective. So the
        # socket options are set after collectives 1, 2, 4, 8 and so on.
        if self._num_collectives & (self._num_collectives - 1) == 0:
            outlast_outages()
        return result

    def leave(self) -> None:
        """Close the connections."""
        if self._store is not None:
            process_group.disconnect(is_interrupted=bool(self._interruption))
        self._store = None
        if isinstance(self._root, RankStore):
            self._root.close()
        self._root = None


def _place() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _first(error: Exception) -> str:
    """Return the first line of an error of torch, without source location and advice.

    >>> _first(RuntimeError("[/gloo/pair.cc:553] Connection closed by peer [::1]:9. This is "
    ...     "typically caused by a remote worker crashing.\\nStack"))
    'Connection closed by peer [::1]:9'
    """
    line = str(error).strip().split("\n", 1)[0]
    line = _SOURCE_PLACE.sub("", line).partition(_ADVICE)[0]
    return line[:300].rstrip(".") or type(error).__name__


def _raise_failure(value: dict[str, Any]) -> None:
    failure = value.get("failure")
    if failure:
        raise ExpectedError(failure["message"], failure["hint"])
