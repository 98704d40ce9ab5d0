"""Interpret the part of PowerShell that the scripts use, with commands that a test provides.

Written after about_Operators, about_Pipelines, about_Return and about_Arrays of Microsoft's
documentation; an unknown construct raises. It is no proof that PowerShell does the same, but a
wrong name, branch, order or index in a script shows.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Iterable
from typing import Any

from tests.powershell.syntax import Node, parse, text_of

Command = Callable[[dict[str, Any], list[Any], list[Any]], Any]
"""Takes named values, positional values and what came through the pipeline."""
_ESCAPES = {"`r": "\r", "`n": "\n", "`t": "\t", "``": "`", '`"': '"', "`$": "$"}
_SIMPLE = frozenset(
    f"{kind}{suffix}"
    for kind in (
        *("logical", "bitwise", "comparison", "additive", "multiplicative", "format", "range"),
        "array_literal",
    )
    for suffix in ("_expression", "_argument_expression")
) | {"unary_expression", "argument_expression", "pipeline_chain", "command_name_expr"}


class Failure(Exception):
    """What a script throws, or a command of the test."""


class Exit(Exception):
    """The script has ended with a code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Return(Exception):
    pass


class _Continue(Exception):
    pass


class Table(dict[str, Any]):
    """A hashtable or an object: its keys are compared without case."""

    def _key(self, name: str) -> str:
        return next((key for key in self if key.lower() == str(name).lower()), str(name))

    def get_member(self, name: str) -> Any:
        return self.get(self._key(name))

    def set_member(self, name: str, value: Any) -> None:
        self[self._key(name)] = value


class ArrayList(list[Any]):
    """System.Collections.ArrayList."""


def as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return " ".join(map(as_text, value))
    return str(value)


def is_true(value: Any) -> bool:
    if isinstance(value, (list, bytes)):
        return is_true(value[0]) if len(value) == 1 else bool(len(value))
    return True if isinstance(value, dict) else bool(value)


def unroll(value: Any) -> list[Any]:
    """Return what a value puts into the pipeline."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, bytes)) else [value]


def collapse(items: list[Any]) -> Any:
    """Return what a variable gets from the pipeline: nothing, the one item, or an array."""
    return None if not items else items[0] if len(items) == 1 else items


def member_of(value: Any, name: str) -> Any:
    lower = name.lower()
    if isinstance(value, Table):
        if lower == "count" and "count" not in {key.lower() for key in value}:
            return len(value)
        return value.get_member(name)
    if isinstance(value, (re.Match, _NoMatch)):
        return _match_member(value, lower)
    if lower in ("length", "count") and isinstance(value, (str, list, bytes)):
        return len(value)
    if value is None:
        return None
    return getattr(value, name)


class _Group:
    def __init__(self, value: str | None) -> None:
        self.Value = value or ""


class Interpreter:
    """Runs one script."""

    def __init__(
        self, commands: dict[str, Command], statics: dict[str, Callable[..., Any]]
    ) -> None:
        self.commands = {name.lower(): command for name, command in commands.items()}
        self.statics = {name.lower(): static for name, static in statics.items()}
        self.functions: dict[str, Node] = {}
        self.scopes: list[dict[str, Any]] = [{"true": True, "false": False, "null": None}]
        self.environ: dict[str, str] = {}

    # -------------------------------------------------------------- entry points

    def run(self, script: str, **parameters: Any) -> tuple[int, list[Any]]:
        """Run a whole script; return its exit code and its output."""
        root = parse(script)
        assert not root.has_error
        output: list[Any] = []
        try:
            self._bind(root, parameters, [])
            self._block(root, output)
        except Exit as end:
            return end.code, output
        return 0, output

    def define(self, script: str) -> None:
        """Take the functions of a script and run nothing."""
        for node in _statements(parse(script)):
            if node.type == "function_statement":
                self._block_of_one(node, [])

    def call(self, name: str, **parameters: Any) -> Any:
        """Call one function of the script."""
        return collapse(self._invoke(name, parameters, [], []))

    # -------------------------------------------------------------- statements

    def _block(self, node: Node, output: list[Any]) -> None:
        for statement in _statements(node):
            self._block_of_one(statement, output)

    def _block_of_one(self, node: Node, output: list[Any]) -> None:
        kind = node.type
        if kind == "function_statement":
            name = next(text_of(part) for part in node.children if part.type == "function_name")
            self.functions[name.lower()] = node
        elif kind == "pipeline":
            output += unroll(self._pipeline(node, is_statement=True))
        elif kind == "if_statement":
            self._if(node, output)
        elif kind in ("while_statement", "for_statement", "foreach_statement"):
            getattr(self, f"_{kind.removesuffix('_statement')}")(node, output)
        elif kind == "switch_statement":
            self._switch(node, output)
        elif kind == "try_statement":
            self._try(node, output)
        elif kind == "flow_control_statement":
            self._flow(node, output)
        elif kind not in ("param_block", "comment", ";", "{", "}", "empty_statement"):
            raise NotImplementedError(f"{kind}: {text_of(node)[:80]}")

    def _if(self, node: Node, output: list[Any]) -> None:
        for part in (node, *_below(node, "elseif_clauses")):
            condition, block = _child(part, "pipeline"), _child(part, "statement_block")
            if is_true(self._pipeline(condition)):
                self._block(block, output)
                return
        for clause in (child for child in node.children if child.type == "else_clause"):
            self._block(_child(clause, "statement_block"), output)

    def _loop(self, block: Node, output: list[Any]) -> None:
        with contextlib.suppress(_Continue):
            self._block(block, output)

    def _while(self, node: Node, output: list[Any]) -> None:
        condition = _child(_child(node, "while_condition"), "pipeline")
        while is_true(self._pipeline(condition)):
            self._loop(_child(node, "statement_block"), output)

    def _for(self, node: Node, output: list[Any]) -> None:
        self._pipeline(_child(_child(node, "for_initializer"), "pipeline"))
        while is_true(self._pipeline(_child(_child(node, "for_condition"), "pipeline"))):
            self._loop(_child(node, "statement_block"), output)
            self._pipeline(_child(_child(node, "for_iterator"), "pipeline"))

    def _foreach(self, node: Node, output: list[Any]) -> None:
        name = _variable_name(_child(node, "variable"))
        for item in unroll(self._pipeline(_child(node, "pipeline"))):
            self._set(name, item)
            self._loop(_child(node, "statement_block"), output)

    def _switch(self, node: Node, output: list[Any]) -> None:
        value = self._pipeline(_child(_child(node, "switch_condition"), "pipeline"))
        for clause in _below(_child(node, "switch_body"), "switch_clauses"):
            wanted = self._value(_child(clause, "switch_clause_condition").children[0])
            if as_text(wanted).lower() == as_text(value).lower():
                self._block(_child(clause, "statement_block"), output)

    def _try(self, node: Node, output: list[Any]) -> None:
        try:
            self._block(_child(node, "statement_block"), output)
        except (Failure, UnicodeDecodeError, OSError) as error:
            clause = _child(_child(node, "catch_clauses"), "catch_clause")
            self._set("_", str(error))
            self._block(_child(clause, "statement_block"), output)

    def _flow(self, node: Node, output: list[Any]) -> None:
        word, value = node.children[0].type, node.children[1:]
        given = self._pipeline(value[0]) if value else None
        if word == "return":
            output += unroll(given)
            raise _Return
        if word == "continue":
            raise _Continue
        raise Exit(given or 0) if word == "exit" else Failure(as_text(given))

    # -------------------------------------------------------------- pipelines and commands

    def _pipeline(self, node: Node, is_statement: bool = False) -> Any:
        parts = [child for child in node.children if child.is_named]
        if len(parts) == 1 and parts[0].type == "assignment_expression":
            self._assign(parts[0])
            return None
        elements = [child for part in parts for child in _chain(part)]
        first, rest = elements[0], elements[1:]
        if first.type == "command":
            items = self._command(first, [])
            if not rest:
                return collapse(items)
        else:
            value = self._value(first)
            if not rest:
                is_silent = is_statement and _innermost(first).type == "post_increment_expression"
                return None if is_silent else value
            items = unroll(value)
        for element in rest:
            items = self._command(element, items)
        return collapse(items)

    def _command(self, node: Node, piped: list[Any]) -> list[Any]:
        named: dict[str, Any] = {}
        words: list[Any] = []
        waiting = ""
        name = node.child_by_field_name("command_name")
        is_call = any(child.type == "command_invokation_operator" for child in node.children)
        target = self._call_target(name) if is_call else text_of(name)
        elements = node.child_by_field_name("command_elements")
        switches = self._switches(target)
        for part in elements.children if elements is not None else ():
            if part.type == "command_argument_sep":
                continue
            if part.type == "command_parameter" and not is_call:
                if waiting:
                    named[waiting] = True
                waiting = text_of(part).removeprefix("-").removesuffix(":").lower()
                if waiting in switches:
                    named[waiting], waiting = True, ""
                continue
            value = text_of(part) if is_call and part.type == "command_parameter" else None
            value = self._value(part) if value is None else value
            if waiting:
                named[waiting], waiting = value, ""
            elif is_call:
                words += unroll(value)  # a program gets each item as an argument of its own
            else:
                words.append(value)
        if waiting:
            named[waiting] = True
        if is_call:
            return unroll(self.commands["&"]({"program": target}, words, piped))
        return self._invoke(target, named, words, piped)

    def _call_target(self, node: Node) -> str:
        inner = node
        while inner.child_count == 1 and inner.type in _SIMPLE | {
            "command_name",
            "path_command_name",
        }:
            inner = inner.children[0]
        return text_of(node) if not text_of(node).startswith("$") else as_text(self._value(inner))

    def _switches(self, name: str) -> set[str]:
        node = self.functions.get(name.lower())
        if node is None:
            return getattr(self.commands.get(name.lower()), "switches", set())
        return {
            n.lower()
            for n, kind, _ in _parameters(_child(node, "script_block"))
            if kind == "switch"
        }

    def _invoke(
        self, name: str, named: dict[str, Any], words: list[Any], piped: list[Any]
    ) -> list[Any]:
        lower = name.lower()
        if lower in ("foreach-object", "where-object"):
            return self._filter(lower, next(iter(named.values())), piped)
        if lower in self.functions:
            block = _child(self.functions[lower], "script_block")
            output: list[Any] = []
            self.scopes.append({})
            try:
                self._bind(block, named, words)
                self._block(block, output)
            except _Return:
                pass
            finally:
                self.scopes.pop()
            return output
        if lower not in self.commands:
            raise NotImplementedError(f"command {name}")
        made = self.commands[lower]({key.lower(): v for key, v in named.items()}, words, piped)
        # A command writes the list that it made as one object.
        return [made] if isinstance(made, ArrayList) else unroll(made)

    def _filter(self, name: str, block: Node, piped: list[Any]) -> list[Any]:
        found: list[Any] = []
        for item in piped:
            self._set("_", item)
            output: list[Any] = []
            self._block(_child(block, "script_block"), output)
            if name == "foreach-object":
                found += output
            elif is_true(collapse(output)):
                found.append(item)
        return found

    def _bind(self, block: Node, named: dict[str, Any], words: list[Any]) -> None:
        given = {key.lower(): value for key, value in named.items()}
        left = list(words)
        for name, kind, default in _parameters(block):
            if name.lower() in given:
                value = given.pop(name.lower())
            elif left and kind != "switch":
                value = left.pop(0)
            else:
                value = self._value(default) if default is not None else None
            self.scopes[-1][name.lower()] = _convert(value, kind)
        assert not given, f"no parameter takes {given}"

    # -------------------------------------------------------------- variables

    def _set(self, name: str, value: Any) -> None:
        self.scopes[-1][name.lower()] = value

    def _get(self, name: str) -> Any:
        lower = name.lower()
        if lower.startswith("env:"):
            return self.environ.get(name[4:].upper())
        return next((scope[lower] for scope in reversed(self.scopes) if lower in scope), None)

    def _assign(self, node: Node) -> None:
        left, operator, right = (child for child in node.children if child.is_named)
        value = self._pipeline(right) if right.type == "pipeline" else self._value(right)
        target = _innermost(left)
        if text_of(operator) == "+=":
            value = _add(self._value(target), value)
        if target.type == "variable":
            name = _variable_name(target)
            if name.lower().startswith("env:"):
                self.environ[name[4:].upper()] = as_text(value)
            else:
                self._set(name, value)
        elif target.type == "member_access":
            owner, member = (child for child in target.children if child.is_named)
            self._value(owner).set_member(text_of(member), value)
        elif target.type == "element_access":
            owner, index = (child for child in target.children if child.is_named)
            self._value(owner)[self._value(index)] = value
        else:
            names = [_variable_name(n) for n in _find_all(target, "variable")]
            for name, item in zip(names, value, strict=True):
                self._set(name, item)

    # -------------------------------------------------------------- expressions

    def _value(self, node: Node) -> Any:
        kind = node.type
        named = [child for child in node.children if child.is_named]
        if kind in _SIMPLE or kind == "parenthesized_expression":
            if len(named) == 1 and len(node.children) in (1, 3) and named[0].type == "pipeline":
                return self._pipeline(named[0])
            return self._operation(node)
        method = getattr(self, f"_value_{kind}", None)
        if method is None:
            raise NotImplementedError(f"{kind}: {text_of(node)[:80]}")
        return method(node, named)

    def _operation(self, node: Node) -> Any:
        if node.child_count == 1:
            return self._value(node.children[0])
        if node.type.startswith("array_literal"):
            return [self._value(child) for child in node.children if child.is_named]
        left, operator, right = node.children
        word = text_of(operator).lower()
        first = self._value(left)
        if word == "-and":
            return is_true(first) and is_true(self._value(right))
        if word == "-or":
            return is_true(first) or is_true(self._value(right))
        return _OPERATIONS[word](first, self._value(right))

    def _value_pipeline(self, node: Node, named: list[Node]) -> Any:
        return self._pipeline(node)

    def _value_variable(self, node: Node, named: list[Node]) -> Any:
        return self._get(_variable_name(node))

    def _value_integer_literal(self, node: Node, named: list[Node]) -> int:
        return int(text_of(node))

    def _value_script_block_expression(self, node: Node, named: list[Node]) -> Node:
        return node

    def _value_generic_token(self, node: Node, named: list[Node]) -> str:
        return text_of(node)

    def _value_string_literal(self, node: Node, named: list[Node]) -> str:
        text = text_of(node)
        if named[0].type == "verbatim_string_characters":
            return text[1:-1].replace("''", "'")
        assert not named[0].named_children, f"a variable in a string: {text}"
        return re.sub(r"`.", lambda found: _ESCAPES[found[0]], text[1:-1])

    def _value_array_expression(self, node: Node, named: list[Node]) -> list[Any]:
        output: list[Any] = []
        for statement in _statements(node):
            self._block_of_one(statement, output)
        return output

    def _value_hash_literal_expression(self, node: Node, named: list[Node]) -> Table:
        table = Table()
        for entry in _find_all(node, "hash_entry", deep=False):
            key, value = (child for child in entry.children if child.is_named)
            table[text_of(key)] = self._pipeline(value)
        return table

    def _value_expression_with_unary_operator(self, node: Node, named: list[Node]) -> Any:
        if node.children[0].type == "cast_expression":
            kind, inner = (child for child in node.children[0].children if child.is_named)
            value = self._value(inner)
            return _convert(value, text_of(kind).strip("[").removesuffix("]").lower())
        word = text_of(node.children[0]).lower()
        value = self._value(node.children[1])
        return not is_true(value) if word == "-not" else -value

    def _value_cast_expression(self, node: Node, named: list[Node]) -> Any:
        return _convert(self._value(named[1]), text_of(named[0])[1:-1].lower())

    def _value_post_increment_expression(self, node: Node, named: list[Node]) -> int:
        before = self._value(named[0])
        self._set(_variable_name(named[0]), before + 1)
        return int(before)

    def _value_member_access(self, node: Node, named: list[Node]) -> Any:
        owner, member = named
        if owner.type == "type_literal":
            return self.statics[f"{text_of(owner)[1:-1]}::{text_of(member)}".lower()]()
        return member_of(self._value(owner), text_of(member))

    def _value_element_access(self, node: Node, named: list[Node]) -> Any:
        owner, index = self._value(named[0]), self._value(named[1])
        if isinstance(index, list):
            return [owner[one] for one in index]
        return owner[index] if -len(owner) <= index < len(owner) else None

    def _value_invokation_expression(self, node: Node, named: list[Node]) -> Any:
        owner, member, arguments = named[0], text_of(named[1]), named[2]
        values = [
            self._value(one)
            for listed in arguments.children
            if listed.type == "argument_expression_list"
            for one in listed.children
            if one.is_named
        ]
        if owner.type == "type_literal":
            return self.statics[f"{text_of(owner)[1:-1]}::{member}".lower()](*values)
        return _call_method(self._value(owner), member, values)


# ------------------------------------------------------------------ .NET and operators


class _NoMatch:
    """A match of a regular expression that found nothing."""


def regex_match(text: str, pattern: str) -> Any:
    return re.search(pattern, text) or _NoMatch()


def regex_matches(text: str, pattern: str) -> list[Any]:
    return [found for found in re.finditer(pattern, text) if found[0]]


def _match_member(value: Any, name: str) -> Any:
    if isinstance(value, _NoMatch):
        return {"success": False, "value": ""}[name]
    groups = [_Group(value[0]), *map(_Group, value.groups())]
    return {"success": True, "value": value[0], "groups": groups}[name]


def _call_method(owner: Any, name: str, values: list[Any]) -> Any:
    if isinstance(owner, ArrayList):
        if name == "Add":
            owner.append(values[0])
            return len(owner) - 1
        if name == "Insert":
            owner.insert(*values)
            return None
        if name == "RemoveRange":
            del owner[values[0] : values[0] + values[1]]
            return None
    if isinstance(owner, str):
        stripped = "".join(values) if all(isinstance(one, str) for one in values) else ""
        texts: dict[str, Callable[[], Any]] = {
            "Substring": lambda: _substring(owner, *values),
            "Trim": lambda: owner.strip(stripped or None),
            "TrimEnd": lambda: owner.rstrip(stripped or None),
            "Contains": lambda: values[0] in owner,
            "StartsWith": lambda: owner.startswith(values[0]),
        }
        return texts[name]()
    if owner is None:
        raise Failure("You cannot call a method on a null-valued expression.")
    return getattr(owner, name)(*values)


def _substring(text: str, start: int, length: int | None = None) -> str:
    end = len(text) if length is None else start + length
    if not 0 <= start <= end <= len(text):
        raise Failure("Index and length must refer to a location within the string.")
    return text[start:end]


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, (list, bytes)):
        return [*left, *(right if isinstance(right, (list, bytes)) else [right])]
    if isinstance(left, str):
        return left + as_text(right)
    return right if left is None else left + right


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, str):
        return right is not None and left.lower() == as_text(right).lower()
    return bool(left == right and (left is None) == (right is None))


def _format(pattern: str, values: Any) -> str:
    listed = values if isinstance(values, list) else [values]
    return re.sub(r"\{(\d+)\}", lambda found: as_text(listed[int(found[1])]), pattern)


def _replace(left: Any, right: list[str]) -> Any:
    if isinstance(left, list):
        return [_replace(one, right) for one in left]
    return re.sub(right[0], right[1], as_text(left), flags=re.IGNORECASE)


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "-eq": _equal,
    "-ne": lambda left, right: not _equal(left, right),
    "-cne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
    "-join": lambda left, right: right.join(map(as_text, unroll(left))),
    "-split": lambda left, right: re.split(right, left),
    "-like": lambda left, right: fnmatch.fnmatch(left.lower(), right.lower()),
    "-match": lambda left, right: re.search(right, as_text(left), re.IGNORECASE) is not None,
    "-replace": _replace,
    "-contains": lambda left, right: any(_equal(one, right) for one in unroll(left)),
    "-f": _format,
    "+": _add,
    "-": lambda left, right: left - right,
    "..": lambda left, right: list(range(left, right + 1)),
}


def _convert(value: Any, kind: str) -> Any:
    if kind == "string":
        return as_text(value)
    if kind == "switch":
        return bool(value)
    if kind == "object[]":
        return value if value is None or isinstance(value, list) else [value]
    if kind == "byte[]":
        return bytes(unroll(value))
    return None if kind == "void" else value


# ------------------------------------------------------------------ the tree


def _statements(node: Node) -> Iterable[Node]:
    for child in node.children:
        if child.type in ("script_block_body", "statement_list", "script_block"):
            yield from _statements(child)
        elif child.is_named:
            yield child


def _child(node: Node, kind: str) -> Node:
    return next(child for child in node.children if child.type == kind)


def _below(node: Node, kind: str) -> list[Node]:
    return [
        one
        for child in node.children
        if child.type == kind
        for one in child.children
        if one.is_named
    ]


def _chain(node: Node) -> list[Node]:
    """Return the elements of a pipeline: commands, and an expression in the first place."""
    if node.type != "pipeline_chain":
        return [node]
    return [child for child in node.children if child.is_named]


def _innermost(node: Node) -> Node:
    while node.child_count == 1 and node.type != "variable":
        node = node.children[0]
    return node


def _find_all(node: Node, kind: str, deep: bool = True) -> list[Node]:
    found = []
    for child in node.children:
        if child.type == kind:
            found.append(child)
            if not deep:
                continue
        if child.type != "pipeline":
            found += _find_all(child, kind, deep)
    return found


def _variable_name(node: Node) -> str:
    return text_of(node).removeprefix("$").strip("{}")


def _parameters(block: Node) -> list[tuple[str, str, Node | None]]:
    """Return name, type and default of each parameter of a script or function."""
    found = []
    for part in block.children:
        if part.type == "param_block":
            for parameter in _find_all(part, "script_parameter"):
                name = _variable_name(_child(parameter, "variable"))
                types = _find_all(parameter, "type_literal")
                kind = text_of(types[0])[1:-1].lower() if types else ""
                defaults = _below(parameter, "script_parameter_default")
                found.append((name, kind, defaults[0] if defaults else None))
    return found
