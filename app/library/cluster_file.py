"""Read cluster files, which describe PCs to plan for that are not nodes, or not bought yet.

    nodes:
      - {name: alpha, gpus: [RTX 5070 Ti], ram_gib: 32, system: linux, disk_gb_per_s: 3.5}
      - {name: beta, gpus: [{card: RTX 4070, memory_gib: 12, count: 2, power_limit_w: 180}]}
      - {name: gamma, gpus: [{card: Custom 1, memory_gib: 16, tflops: 60, memory_gb_per_s: 500,
         capability: 8.6, pcie_generation: 4, pcie_lanes: 4}], pc_power_w: 90}
    links:
      default: {gbit_per_s: 1, latency_ms: 0.2}
      alpha beta: {gbit_per_s: 2.5}
      alpha gamma: {gbit_per_s: 0.6, half_duplex: true}
    uplinks:
      - {nodes: [beta, gamma], gbit_per_s: 1}
    price_per_kwh: 0.3

Only `nodes` with names are required. All problems are reported at once, each with its line.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.contract.node import Calibration
from agents.shared.cards import GIB, bus_bytes_per_s, find_card, list_cards, refuse_vendor
from agents.shared.files.folder_files import read_regular
from app.errors import UsageError
from app.library.cluster_export import MEASURED
from app.planning.hardware.cluster import (
    ASSUMED,
    Cluster,
    LinkSpeed,
    Pair,
    PlannedGpu,
    PlannedNode,
    System,
    Uplink,
    ethernet,
    guess_desktop,
)
from app.runfile.problems import KeyPath, Problem, dotted
from app.runfile.run_file import MAX_FILE_BYTES, load_yaml

# Numbers that have no fraction.
_WHOLE = ("count", "pcie_generation", "pcie_lanes")
_SYSTEMS: tuple[System, ...] = ("linux", "windows", "wsl")
_MAX_GPUS = 16
_NODE_KEYS = ("name", "gpus", "ram_gib", "system", "disk_gb_per_s", "compiler", "pc_power_w")
_GPU_NUMBERS = (
    "memory_gib", "count", "power_limit_w", "tflops", "memory_gb_per_s", "capability",
    "pcie_generation", "pcie_lanes", "reserved_gib", "used_gib",
)  # fmt: skip
_GPU_KEYS = ("card", *_GPU_NUMBERS, "measured")
# Bounds of each number, which catch a wrong unit such as MiB for GiB.
_LIMITS = {
    "ram_gib": (1.0, 65536.0),
    "disk_gb_per_s": (0.01, 1000.0),
    "memory_gib": (1.0, 1024.0),
    "count": (1.0, float(_MAX_GPUS)),
    "power_limit_w": (10.0, 2000.0),
    "gbit_per_s": (0.001, 1000.0),
    "latency_ms": (0.0, 10000.0),
    "reserved_gib": (0.0, 1024.0),
    "used_gib": (0.0, 1024.0),
    "context_gib": (0.0, 64.0),
    "to_host_gb_per_s": (0.01, 10000.0),
    "from_host_gb_per_s": (0.01, 10000.0),
    "unpack_billion_per_s": (0.01, 100000.0),
    "tflops": (0.1, 10000.0),
    "memory_gb_per_s": (10.0, 50000.0),
    "capability": (3.0, 20.0),
    "pcie_generation": (1.0, 5.0),
    "pcie_lanes": (1.0, 16.0),
    "pc_power_w": (0.0, 2000.0),
    "price_per_kwh": (0.0, 1000.0),
}


def read_cluster_file(path: Path) -> Cluster:
    """Read a cluster file.

    Raises:
        UsageError: the file is missing, is not YAML, or holds a value that is not allowed.
    """
    try:
        text = read_regular(path, limit=MAX_FILE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file in UTF-8: {error}") from error
    except OSError as error:
        raise UsageError(
            f"the cluster file {path} cannot be read: {error.strerror}",
            "Give the path of a YAML file with the key nodes.",
        ) from error
    return parse_cluster(text, str(path))


def parse_cluster(text: str, source: str = "cluster file") -> Cluster:
    """Read the text of a cluster file; `source` is its name in errors.

    Raises:
        UsageError: the text has problems; it lists all of them with their lines.
    """
    data, lines, problems = load_yaml(text, needed="the key nodes")
    reader = _ClusterReader(lines, problems)
    # Values of a file that is not valid YAML would only add misleading problems.
    cluster = reader.read(data) if not problems else Cluster(nodes=())
    if problems:
        problems.sort(key=lambda problem: problem.line or 0)
        listed = "\n".join(
            f"{source}, line {one.line}: {one.text}" if one.line else f"{source}: {one.text}"
            for one in problems
        )
        raise UsageError(listed, "Correct the file; nothing was planned.")
    return cluster


class _ClusterReader:
    """Builder of a cluster from YAML values that collects problems."""

    def __init__(self, lines: dict[KeyPath, int], problems: list[Problem]) -> None:
        self._lines = lines
        self._problems = problems

    def read(self, data: Any) -> Cluster:
        found = self._mapping((), data, ("nodes", "links", "uplinks", "price_per_kwh"))
        entries = found.get("nodes")
        if not isinstance(entries, list) or not entries:
            self._report(("nodes",), "nodes must be a list with at least one PC")
            return Cluster(nodes=())
        nodes = tuple(self._node(("nodes", i), entry) for i, entry in enumerate(entries))
        names = [node.name for node in nodes]
        for place, name in enumerate(names):
            if name and name in names[:place]:
                self._report(("nodes", place), f"the name {name} stands twice")
        links, default = self._links(found.get("links"), names)
        return Cluster(
            nodes=nodes,
            links=links,
            default_link=default,
            uplinks=self._uplinks(found.get("uplinks"), names),
            price_per_kwh=self._number(("price_per_kwh",), found.get("price_per_kwh")),
        )

    def _node(self, path: KeyPath, entry: Any) -> PlannedNode:
        known = self._mapping(path, entry, _NODE_KEYS)
        name = known.get("name")
        if not isinstance(name, str) or not name or " " in name:
            self._report((*path, "name"), f"{dotted(path)}.name must be a name without spaces")
            # A placeholder, so that the problems after this one are reported, too.
            name = ""
        system = known.get("system", "linux")
        if system not in _SYSTEMS:
            words = ", ".join(_SYSTEMS)
            self._report((*path, "system"), f"system is {system!r}; it must be one of {words}")
            system = "linux"
        ram_gib = self._number((*path, "ram_gib"), known.get("ram_gib"))
        disk_gb_per_s = self._number((*path, "disk_gb_per_s"), known.get("disk_gb_per_s"))
        compiler = known.get("compiler", True)
        if not isinstance(compiler, bool):
            self._report((*path, "compiler"), f"{dotted(path)}.compiler must be true or false")
        gpus = known.get("gpus", [])
        if not isinstance(gpus, list):
            self._report((*path, "gpus"), f"{dotted(path)}.gpus must be a list of cards")
            gpus = []
        cards = [card for i, gpu in enumerate(gpus) for card in self._gpus((*path, "gpus", i), gpu)]
        return PlannedNode(
            name=name,
            gpus=tuple(
                replace(
                    card,
                    device=f"cuda:{index}",
                    # Unless told, screens are assumed to be on the first card.
                    desktop_bytes=(guess_desktop(system) if index == 0 else 0)
                    if used_bytes is None
                    else used_bytes,
                )
                for index, (card, used_bytes) in enumerate(cards)
            ),
            ram_bytes=None if ram_gib is None else int(ram_gib * GIB),
            system=system,
            disk_bytes_per_s=None if disk_gb_per_s is None else disk_gb_per_s * 1e9,
            has_compiler=compiler is not False,
            pc_w=self._number((*path, "pc_power_w"), known.get("pc_power_w")),
        )

    def _gpus(self, path: KeyPath, entry: Any) -> list[tuple[PlannedGpu, int | None]]:
        """Return the cards of one entry, a name or a mapping with their number, each with the bytes
        that other programs hold; None: not given.
        """
        known = {"card": entry} if isinstance(entry, str) else self._mapping(path, entry, _GPU_KEYS)
        name = known.get("card")
        if not isinstance(name, str):
            self._report(path, f"{dotted(path)} must be the name of a card, or {{card: NAME, ...}}")
            return []
        refusal = refuse_vendor(name)
        if not refusal and re.search(r"\bmig\b|\b\dg\.\d+gb\b", name.lower()):
            refusal = "Rackless trains on whole GPUs only, not on slices of one"
        if refusal:
            self._report(path, f"{name} cannot train: {refusal}; leave it out")
            return []
        values = {key: self._number((*path, key), known.get(key)) for key in _GPU_NUMBERS}
        memory_gib = values["memory_gib"]
        if find_card(name) is None and memory_gib is None:
            near = difflib.get_close_matches(name, list_cards(), n=1, cutoff=0.5)
            guess = f"did you mean {near[0]}? Else " if near else ""
            self._report(
                path,
                f"the card {name} is not known; {guess}add its memory: "
                f"{{card: {name}, memory_gib: 12}}",
            )
            return []
        capability = values["capability"]
        card = PlannedGpu(
            name=name,
            memory_bytes=None if memory_gib is None else int(memory_gib * GIB),
            power_limit_w=values["power_limit_w"],
            reserved_bytes=_scale_bytes(values["reserved_gib"]),
            calibration=self._measured((*path, "measured"), name, known.get("measured")),
            capability=None if capability is None else _divide_capability(capability),
            flops_per_s=_scale(values["tflops"], 1e12),
            memory_bytes_per_s=_scale(values["memory_gb_per_s"], 1e9),
        )
        generation, lanes = values["pcie_generation"], values["pcie_lanes"]
        if generation is not None or lanes is not None:
            listed = card.similar
            slot = (generation or (listed.pcie_generation if listed else 3), lanes or 16.0)
            card = replace(card, bus_bytes_per_s=bus_bytes_per_s(*map(int, slot)))
        return [(card, _scale_bytes(values["used_gib"]))] * int(values["count"] or 1)

    def _measured(self, path: KeyPath, card: str, data: Any) -> Calibration | None:
        """Return measured rates, as an export of nodes writes them."""
        if data is None:
            return None
        known = self._mapping(path, data, (*MEASURED, "context_gib"))
        rates: dict[str, Any] = {
            name: value * unit
            for key, (name, unit) in MEASURED.items()
            if (value := self._number((*path, key), known.get(key))) is not None
        }
        context_gib = self._number((*path, "context_gib"), known.get("context_gib"))
        return replace(Calibration(card=card, context_bytes=_scale_bytes(context_gib)), **rates)

    def _uplinks(self, data: Any, names: list[str]) -> tuple[Uplink, ...]:
        """Return the cables that PCs share."""
        if data is None:
            return ()
        if not isinstance(data, list):
            self._report(("uplinks",), "uplinks must be a list")
            return ()
        found = []
        for number, entry in enumerate(data):
            path: KeyPath = ("uplinks", number)
            known = self._mapping(path, entry, ("nodes", "gbit_per_s"))
            nodes = known.get("nodes")
            if not isinstance(nodes, list) or not nodes or not set(map(str, nodes)) <= set(names):
                self._report(
                    (*path, "nodes"), f"{dotted(path)}.nodes must list PCs of this file by name"
                )
                continue
            gbit = self._number((*path, "gbit_per_s"), known.get("gbit_per_s", 1))
            rate = ethernet(gbit or 1.0).bytes_per_s
            found.append(Uplink(nodes=frozenset(map(str, nodes)), bytes_per_s=rate))
        return tuple(found)

    def _links(self, data: Any, names: list[str]) -> tuple[dict[Pair, LinkSpeed], LinkSpeed]:
        entries = {} if data is None else self._mapping(("links",), data, None)
        links: dict[Pair, LinkSpeed] = {}
        default = ASSUMED
        for key, entry in entries.items():
            link = self._link(("links", key), entry)
            pair = str(key).split()
            if key == "default":
                default = link
            elif len(pair) == 2 and pair[0] != pair[1] and set(pair) <= set(names):
                links[frozenset(pair)] = link
            else:
                text = f"links.{key} must be default, or the names of two nodes, such as "
                self._report(("links", key), text + " ".join([*names, "alpha", "beta"][:2]))
        return links, default

    def _link(self, path: KeyPath, entry: Any) -> LinkSpeed:
        known = self._mapping(path, entry, ("gbit_per_s", "latency_ms", "half_duplex"))
        half_duplex = known.get("half_duplex", False)
        if not isinstance(half_duplex, bool):
            self._report(
                (*path, "half_duplex"), f"{dotted(path)}.half_duplex must be true or false"
            )
        gbit = self._number((*path, "gbit_per_s"), known.get("gbit_per_s", 1))
        latency_ms = self._number((*path, "latency_ms"), known.get("latency_ms"))
        return ethernet(
            gbit or 1.0,
            None if latency_ms is None else latency_ms / 1000,
            half_duplex=half_duplex is True,
        )

    def _mapping(self, path: KeyPath, data: Any, keys: tuple[str, ...] | None) -> Mapping[str, Any]:
        """Return `data` if it is a mapping with only these keys."""
        if not isinstance(data, dict):
            what = dotted(path) or "the file"
            self._report(path, f"{what} must be a list of `key: value` lines")
            return {}
        for key in data if keys is not None else ():
            if key not in (keys or ()):
                near = difflib.get_close_matches(str(key), keys or (), n=1, cutoff=0.6)
                text = f"{dotted((*path, str(key)))} is not known; "
                known = ", ".join(keys or ())
                text += f"did you mean {near[0]}?" if near else f"the keys here are {known}"
                self._report((*path, str(key)), text)
        return data

    def _number(self, path: KeyPath, value: Any) -> float | None:
        """Return a number within its bounds; None: it is missing or invalid."""
        if value is None:
            return None
        low, high = _LIMITS[str(path[-1])]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_whole = path[-1] not in _WHOLE or isinstance(value, int)
        if is_number and is_whole and math.isfinite(value) and low <= value <= high:
            return float(value)
        kind = "a number" if path[-1] not in _WHOLE else "a whole number"
        self._report(
            path, f"{dotted(path)} is {value!r}; it must be {kind} from {low:g} to {high:g}"
        )
        return None

    def _report(self, path: KeyPath, text: str) -> None:
        # A missing key has no line of its own: take that of the innermost key around it.
        line = next(
            (self._lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._lines),
            None,
        )
        self._problems.append(Problem(line, text))


def _scale(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _scale_bytes(gib: float | None) -> int | None:
    return None if gib is None else round(gib * GIB)


def _divide_capability(value: float) -> tuple[int, int]:
    """Return a compute capability as CUDA gives it.

    >>> _divide_capability(8.6), _divide_capability(12.0)
    ((8, 6), (12, 0))
    """
    tenths = round(value * 10)
    return tenths // 10, tenths % 10
