"""How many bytes of tensors are there at once while PyTorch computes, counted call by call."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts storages made inside the block, and the most of them; those from before are none."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: dict[int, int] = {}
        self._older: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for one in tree_iter((args, kwargs)):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in self._known:
                self._older.add(one.untyped_storage()._cdata)
        found = function(*args, **(kwargs or {}))
        for one in tree_iter(found):
            if isinstance(one, torch.Tensor):
                self._see(one.untyped_storage())
        return found

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or key in self._older:
            return
        self._known[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key)
