"""The disk of a node: an old model, the last checkpoint of a run, and an interrupted transfer."""

from __future__ import annotations

from app.artifacts.node_storage import FreedStorage
from app.artifacts.storage_rules import NodeStorage, StoredItem
from app.core.action import Report
from app.core.storage import FreeStorage, ReadStorage

MODEL, PARTIAL = "models/llama-8b-0011223344556677", "store/partial/abcd"
CHECKPOINT = "runs/r-1/checkpoints/step-00000400"
LAST = "the last checkpoint that can be reached; beta does not answer"


class FakeStorage:
    def __init__(self, calls: list[tuple[object, ...]]) -> None:
        self._calls = calls
        self.items = [
            StoredItem(kind="model", name=MODEL, size_bytes=16 << 30, used_s=1.7e9),
            StoredItem(
                kind="checkpoint", name=CHECKPOINT, size_bytes=6 << 30, used_s=1.7e9, protected=LAST
            ),
            StoredItem(kind="partial", name=PARTIAL, size_bytes=2 << 30, used_s=1.7e9),
        ]
        self.changed: dict[str, str] = {}
        """Items that are needed by the time that they are deleted, with the reason."""

    async def look(self, action: ReadStorage, report: Report) -> NodeStorage:
        return NodeStorage(
            node=action.node,
            items=tuple(self.items),
            size_bytes=sum(item.size_bytes for item in self.items),
            disk_bytes=100 << 30,
            disk_free_bytes=40 << 30,
        )

    async def free(self, action: FreeStorage, report: Report) -> FreedStorage:
        self._calls.append(("storage.free", action.node, *action.names))
        gone = [
            one for one in self.items if one.name in action.names and one.name not in self.changed
        ]
        self.items = [one for one in self.items if one not in gone]
        return FreedStorage(
            node=action.node,
            freed_bytes=sum(one.size_bytes for one in gone),
            deleted=tuple(one.name for one in gone),
            kept=tuple((name, why) for name, why in self.changed.items() if name in action.names),
        )
