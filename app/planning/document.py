"""The plan as a document: what a start executes, with an id, and the conditions it was made under.

The id is a hash of everything that a start decides: mode, GPUs in the order of their ranks, shares,
layers and settings. The conditions tell why a plan made later differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from agents.contract.messages import to_wire
from agents.contract.parallel import PARALLEL
from app.planning.build_context import choose_cluster
from app.planning.candidate import Candidate, PlanRequest
from app.planning.hardware.cluster import Cluster, PlannedNode

_NODE, _LINK = "node ", "link of "


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDocument:
    """A plan that was shown, as a start executes it."""

    candidate: Candidate
    conditions: dict[str, str]
    """Hash of each input that the plan depends on, by name: nodes, links, model, data, runs."""

    @property
    def id(self) -> str:
        """Hash of what a start decides."""
        return identify(self.candidate)


def identify(candidate: Candidate) -> str:
    """Return the id of a plan: equal plans have equal ids, however fast they are forecast."""
    decided = [
        candidate.mode,
        [
            {
                "place": [gpu.node, gpu.device],
                "share": round(gpu.share, 9),
                "stage": [gpu.replica, gpu.layers, gpu.max_in_flight, gpu.offloads],
                "streams": [gpu.num_streamed, gpu.streams_from],
                "setting": to_wire(gpu.setting),
            }
            for gpu in candidate.gpus
        ],
    ]
    return _hash(json.dumps(decided))


def make_document(request: PlanRequest, candidate: Candidate) -> PlanDocument:
    """Return the document of a plan."""
    cluster = choose_cluster(request.spec, request.cluster)
    names = sorted(node.name for node in cluster.nodes)
    conditions = {_NODE + node.name: _hash(_describe_node(node)) for node in cluster.nodes}
    return PlanDocument(
        candidate=candidate,
        conditions={
            **conditions,
            **{
                f"{_LINK}{one} and {other}": _hash(repr(cluster.link(one, other)))
                for place, one in enumerate(names)
                for other in names[place + 1 :]
            },
            "model": _hash(repr(request.shape)),
            "data": _hash(repr(request.data)),
            "runs": _hash(repr(request.learned)),
        },
    )


def say_changes(shown: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return what changed since a plan was shown, as a clause; empty: nothing.

    >>> shown = {"node a": "1", "node b": "2", "link of a and b": "3", "model": "4"}
    >>> say_changes(shown, {"node a": "1", "model": "5"})
    'b is away and the model changed'
    """
    found = []
    for name in [*shown, *(name for name in now if name not in shown)]:
        if shown.get(name) == now.get(name):
            continue
        if name.startswith(_NODE):
            node = name.removeprefix(_NODE)
            verb = "is away" if name not in now else "is there" if name not in shown else "changed"
            found.append(f"{node} {verb}")
        elif name.startswith(_LINK) and name in shown and name in now:
            found.append(f"the {name} was measured")
        elif name in _CHANGES:
            found.append(_CHANGES[name])
    return " and ".join(filter(None, [", ".join(found[:-1]), *found[-1:]]))


_CHANGES = {
    "model": "the model changed",
    "data": "the data changed or was counted",
    "runs": "a finished run corrected the forecast",
}


def describe_choice(cluster: Cluster, candidate: Candidate) -> str:
    """Return mode and GPUs of a plan, such as `data parallel on tower:0 and laptop`."""
    places = cluster.name_places((gpu.node, gpu.device) for gpu in candidate.gpus)
    where = f"{', '.join(places[:-1])} and {places[-1]}" if len(places) > 1 else places[0]
    return f"{PARALLEL[candidate.mode].label} on {where}"


def _describe_node(node: PlannedNode) -> str:
    # Without the memory that other programs hold just now, which changes every second.
    gpus = [
        (gpu.name, gpu.device, gpu.memory_bytes, gpu.power_limit_w, gpu.calibration)
        for gpu in node.gpus
    ]
    rest = (node.ram_bytes, node.system, node.has_compiler, node.disk_bytes_per_s)
    return repr((gpus, rest))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
