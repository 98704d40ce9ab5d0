"""Parse PowerShell with tree-sitter's grammar, and list the commands that a script calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

Node = Any


def parse(text: str) -> Node:
    """Return the tree of a script; skips the test where the parser is not installed."""
    tree_sitter = pytest.importorskip("tree_sitter")
    grammar = pytest.importorskip("tree_sitter_powershell")
    parser = tree_sitter.Parser(tree_sitter.Language(grammar.language()))
    return parser.parse(text.encode()).root_node


def text_of(node: Node) -> str:
    return node.text.decode()


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all below it."""
    yield node
    for child in node.children:
        yield from walk(child)


def calls(root: Node) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each command that is called by name, and its parameters with their dash."""
    for node in walk(root):
        if node.type == "command" and not _is_program(node):
            name = text_of(node.child_by_field_name("command_name"))
            elements = node.child_by_field_name("command_elements")
            parts = elements.children if elements is not None else ()
            yield name, tuple(text_of(part) for part in parts if part.type == "command_parameter")


def programs(root: Node) -> set[str]:
    """Return what a script starts with the call operator."""
    found = (node for node in walk(root) if node.type == "command" and _is_program(node))
    return {text_of(node.child_by_field_name("command_name")) for node in found}


def _is_program(command: Node) -> bool:
    return any(child.type == "command_invokation_operator" for child in command.children)


def functions(root: Node) -> dict[str, tuple[str, ...]]:
    """Return the functions that a script defines, each with its parameters."""
    found = {}
    for node in walk(root):
        if node.type == "function_statement":
            name = next(text_of(part) for part in node.children if part.type == "function_name")
            parameters = [
                text_of(child)
                for part in walk(node)
                if part.type == "script_parameter"
                for child in part.children
                if child.type == "variable"
            ]
            found[name] = tuple("-" + one.removeprefix("$") for one in parameters)
    return found


def methods(root: Node) -> set[str]:
    """Return `Type::Member` of each static member that a script uses."""
    found = set()
    for node in walk(root):
        if node.type in ("invokation_expression", "member_access"):
            parts = [child for child in node.children if child.is_named]
            if parts[0].type == "type_literal" and len(parts) > 1:
                found.add(f"{text_of(parts[0]).strip('[]')}::{text_of(parts[1])}")
    return found
