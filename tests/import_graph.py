"""Read every import of the project, and find those that break the order of a package.

Imports inside functions and under TYPE_CHECKING count like any other, and so do
`importlib.import_module("...")` and `__import__("...")` with a literal name: an import that is
merely postponed still needs both sides to be understood together.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

Graph = Mapping[str, Mapping[str, "Import"]]
"""From each importer to what it imports, with the first line that does so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One imported name, `from a.b import c` as `a.b.c`, and where it stands."""

    path: str
    line: int
    module: str
    """The module that imports, such as `app.runs.lifecycle.launch`."""
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.name}"


def within(name: str, *packages: str) -> bool:
    """Return whether `name` is one of the packages or lies below it."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def source_files(root: Path, *folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (root / folder).rglob("*.py"))


def module_name(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the absolute names that one syntax node imports; `package` resolves relative ones."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=source, names=names, level=level):
            base = package.split(".")[: -(level - 1) or None] if level else []
            stem = ".".join([*base, *([source] if source else [])])
            yield from (f"{stem}.{alias.name}" for alias in names)
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name


@functools.cache
def imports_of(root: Path, file: Path) -> tuple[Import, ...]:
    """Return what a file imports; read once for all rules."""
    module = module_name(root, file)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return tuple(
        Import(
            path=file.relative_to(root).as_posix(),
            line=getattr(node, "lineno", 0),
            module=module,
            name=name,
        )
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in imported_names(node, package)
    )


def imports_within(root: Path, package: str) -> list[Import]:
    """Return the imports of a package from itself."""
    return [
        found
        for file in source_files(root, package.replace(".", "/"))
        for found in imports_of(root, file)
        if within(found.name, package)
    ]


def child_of(package: str, name: str) -> str:
    """Return the file or folder directly in `package` that a name belongs to.

    >>> child_of("app.gui", "app.gui.kit.theme.Theme")
    'kit'
    """
    return name.removeprefix(package).lstrip(".").partition(".")[0]


def children(root: Path, package: str) -> list[str]:
    """Return the files and folders with code directly in `package`."""
    files = source_files(root, package.replace(".", "/"))
    names = {child_of(package, module_name(root, file)) for file in files}
    return sorted(names - {""})


def ranks_of(order: str) -> dict[str, int]:
    """Return the group of each name in `a b | c | *`, where `*` is everything not named."""
    return {name: rank for rank, group in enumerate(order.split("|")) for name in group.split()}


def unplaced(root: Path, package: str, order: str) -> list[str]:
    """Return the children of a package that its order has no place for."""
    ranks = ranks_of(order)
    return [] if "*" in ranks else [n for n in children(root, package) if n not in ranks]


def upward_imports(root: Path, package: str, order: str) -> list[Import]:
    """Return the imports from a child of `package` to one in a higher group of its order."""
    ranks = ranks_of(order)
    known = set(children(root, package))

    def rank(name: str) -> int:
        child = child_of(package, name)
        return ranks.get(child, ranks.get("*", -1)) if child in known else -1

    return [
        found
        for found in imports_within(root, package)
        if child_of(package, found.module) and rank(found.name) > rank(found.module)
    ]


def file_graph(root: Path, package: str) -> Graph:
    """Return which module of a package imports which other."""
    modules = {module_name(root, f) for f in source_files(root, package.replace(".", "/"))}

    def module_of(name: str) -> str:
        return name if name in modules or "." not in name else module_of(name.rpartition(".")[0])

    return _graph(imports_within(root, package), module_of)


def folder_graph(root: Path, package: str) -> Graph:
    """Return which child of a package imports which other."""
    known = set(children(root, package))
    found = [i for i in imports_within(root, package) if child_of(package, i.name) in known]
    return _graph(found, lambda name: child_of(package, name))


def _graph(imports: Iterable[Import], node_of: Callable[[str], str]) -> Graph:
    graph: dict[str, dict[str, Import]] = defaultdict(dict)
    for found in imports:
        source, target = node_of(found.module), node_of(found.name)
        if source and source != target:
            graph[source].setdefault(target, found)
    return graph


def circles(graph: Graph) -> list[list[Import]]:
    """Return a shortest circle for every module in one, each as the imports that close it.

    Modules in a circle that was found already start no other: what remains of a larger tangle
    shows once the first circle is cut.
    """
    found: list[list[Import]] = []
    seen: set[str] = set()
    for start in sorted(graph):
        if start not in seen and (path := _shortest_circle(graph, start)):
            found.append([graph[a][b] for a, b in pairwise([*path, start])])
            seen |= set(path)
    return found


def _shortest_circle(graph: Graph, start: str) -> list[str]:
    """Return the nodes of a shortest path from `start` back to itself, or none."""
    came_from: dict[str, str] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for target in sorted(graph.get(node, ())):
            if target == start:
                return _path_to(node, came_from)
            if target not in came_from:
                came_from[target] = node
                queue.append(target)
    return []


def _path_to(node: str, came_from: Mapping[str, str]) -> list[str]:
    path = [node]
    while path[0] in came_from:
        path.insert(0, came_from[path[0]])
    return path
