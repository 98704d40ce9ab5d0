"""Read and write run files: from YAML to RunSpec, and back.

All misspelt keys and wrong values are reported at once, each with its line. Only plain values are
built, never objects. Scientific numbers without a dot (`2e-4`) are numbers here, unlike in YAML
1.1. Paths are relative to the run file's own folder.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

from agents.contract.data import flatten_columns, flatten_options
from agents.contract.messages import to_wire
from agents.contract.spec import RunSpec, run_keys
from agents.shared.files.folder_files import is_network_path, read_regular
from agents.shared.files.full_disk import name_disk_error
from app.errors import UsageError, UserError
from app.paths import replace_text
from app.runfile.problems import KeyPath, Problem, dotted, find_problems, refuse_key, validate

# A run file has a few dozen lines; a much larger file is the wrong one.
MAX_FILE_BYTES = 1 << 20


_SOURCE_KEYS = {("data", "train"), ("data", "sources")}


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `2e-4` as a number and refuses aliases."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # A run file needs no aliases, and nested ones can fill all memory ("billion laughs").
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not used", problem_mark=mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes texts that `_Loader` would read as numbers."""


_NUMBER = re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def read_run_file(path: Path, settings: Sequence[str] = ()) -> RunSpec:
    """Read a run file; paths in it that exist become absolute.

    Args:
        path: path of the file.
        settings: values that replace those of the file, each as `KEY=VALUE`.

    Raises:
        UsageError: the file is missing, is not YAML, or it or `settings` have invalid keys or
            values.
    """
    try:
        text = read_regular(path, limit=MAX_FILE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not a text file in UTF-8: {error}", "Check that it is a run file."
        ) from error
    except OSError as error:
        raise UsageError(
            f"the run file {path} cannot be read: {error.strerror}",
            "Give the path of a YAML file with at least the keys model and data.",
        ) from error
    return _with_absolute_paths(parse_run(text, str(path), settings), path.absolute().parent)


def parse_run(text: str, source: str = "run file", settings: Sequence[str] = ()) -> RunSpec:
    """Read the text of a run file, with `settings`; errors refer to it as `source`.

    Raises:
        UsageError: the text has problems; it lists all of them with their lines.
    """
    data, lines, problems = load_yaml(text, needed="the keys model and data")
    if isinstance(data, dict) and isinstance(data.get("data"), list):
        # A bare list is one of sources.
        data["data"] = {"sources": data["data"]}
        section = ("data",)
        below = {key: line for key, line in lines.items() if key[:1] == section}
        lines |= {(*section, "sources", *key[1:]): line for key, line in below.items()}
    given = dict(map(_read_setting, settings))
    for key, value in given.items() if isinstance(data, dict) else ():
        _put(data, key, value)
        if key in _SOURCE_KEYS:  # one replaces the other
            for other in _SOURCE_KEYS - given.keys():
                data["data"].pop(other[1], None)
    _restore_off(data)
    _read_data_words(data)
    # A key that is given twice has no single value to check.
    if not problems:
        problems = find_problems(data, lines)
    if problems:
        problems.sort(key=lambda problem: problem.line or 0)
        listed = "\n".join(
            f"{_locate(problem, source, given)}: {problem.text}" for problem in problems
        )
        what = "the file or the values of --set" if given else "the file"
        raise UsageError(listed, f"Correct {what}; nothing was started.")
    spec = validate(data)
    return dataclasses.replace(spec, data=spec.data.simplify())


def _locate(problem: Problem, source: str, given: Collection[KeyPath]) -> str:
    """Return the source of a problem's value: the option or the line."""
    for key in given:
        if problem.path[: len(key)] == key:
            return f"--set {dotted(key)}"
    return f"{source}, line {problem.line}" if problem.line else source


def _read_setting(text: str) -> tuple[KeyPath, Any]:
    """Return key and value of `KEY=VALUE`; the path of a file that exists becomes absolute.

    Raises:
        UsageError: there is no such key, or the value is not YAML.
    """
    name, sign, plain = text.partition("=")
    if not sign:
        raise UsageError(
            f"--set {text} has no value", "Write it as KEY=VALUE, such as --set adapter.rank=32."
        )
    hint = "Correct the value; nothing was started."
    if refusal := refuse_key(name):
        raise UsageError(f"--set {name}: {refusal}", hint)
    value = None
    if plain.strip():
        value, _, problems = load_yaml(plain, needed="a value")
        if problems:
            raise UsageError(f"--set {name}: {problems[0].text}", hint)
    if run_keys()[name].about.names in ("file", "folder") and isinstance(value, str):
        value = _found(value, Path.cwd())
    return tuple(name.split(".")), value


def _put(data: dict[str, Any], key: KeyPath, value: Any) -> None:
    *sections, last = map(str, key)
    for section in sections:
        # A section may be missing or empty in the file.
        if not isinstance(data.get(section), dict):
            data[section] = {}
        data = data[section]
    data[last] = value


def _restore_off(data: Any) -> None:
    """Restore the word `off` for keys that accept it."""
    # YAML 1.1 reads `off` as false.
    if not isinstance(data, dict):
        return
    for name, key in run_keys().items():
        if data.get(name) is False and "off" in key.words:
            data[name] = "off"


def _read_data_words(data: Any) -> None:
    """Write values of `data` that a run file may write in several ways as RunSpec has them."""
    section = data.get("data") if isinstance(data, dict) else None
    if not isinstance(section, dict):
        return
    _flatten(section)
    if isinstance(section.get("rendered"), bool):
        section["rendered"] = "yes" if section["rendered"] else "no"
    evaluation = section.get("eval")
    if isinstance(evaluation, (int, float)) and not isinstance(evaluation, bool):
        section["eval"] = str(evaluation)
    if isinstance(section.get("deduplicate"), bool):  # YAML 1.1 reads `off` as false
        section["deduplicate"] = "exact" if section["deduplicate"] else "off"
    _read_sources(section)


def _read_sources(section: dict[str, Any]) -> None:
    sources = section.get("sources")
    if isinstance(sources, str):
        sources = [sources]
    if not sources:
        return
    # Without a usable first source the problem is that of the sources.
    section.setdefault("train", "-")
    if not isinstance(sources, list):
        return
    section["sources"] = [{"path": one} if isinstance(one, str) else one for one in sources]
    for source in section["sources"]:
        if isinstance(source, dict):
            _flatten(source)
    first = section["sources"][0]
    if section["train"] == "-" and isinstance(first, dict):
        section["train"] = first.get("path") or "-"


def _flatten(section: dict[str, Any]) -> None:
    if isinstance(section.get("columns"), dict):
        section["columns"] = flatten_columns(section["columns"])
    if isinstance(section.get("template_options"), dict):
        section["template_options"] = flatten_options(section["template_options"])


def format_run(spec: RunSpec) -> str:
    """Return a spec as the text of a run file; reading it gives the same spec."""
    plain = to_wire(spec)
    if spec.data.sources:
        del plain["data"]["train"]  # it is the first of them
    return yaml.dump(
        plain,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=100,
    )


def write_run_file(spec: RunSpec, path: Path) -> None:
    """Write a run file atomically.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        replace_text(path, format_run(spec))
    except OSError as error:
        raise UserError(
            f"the run file {path} cannot be written: {name_disk_error(error)}",
            "Choose another folder.",
        ) from error


# ---------------------------------------------------------------- YAML, with the line of each key


def load_yaml(text: str, *, needed: str) -> tuple[Any, dict[KeyPath, int], list[Problem]]:
    """Return the plain values of a file, the line of each key, and problems of the syntax.

    Args:
        text: content of the file.
        needed: keys that the error about an empty file names.
    """
    lines: dict[KeyPath, int] = {}
    problems: list[Problem] = []
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, lines, [Problem(1, f"the file is empty; it needs {needed}")]
        _index(node, (), lines, problems)
        return loader.construct_document(node), lines, problems
    except yaml.MarkedYAMLError as error:
        # Marks count lines from 0, editors from 1.
        mark = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem)))
        return None, lines, [Problem(mark.line + 1 if mark else None, f"this is not YAML: {what}")]
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return None, lines, [Problem(line, f"this is not YAML: {error.reason}")]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return None, lines, [Problem(None, f"this is not YAML: {error}")]


def _index(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], problems: list[Problem]
) -> None:
    """Record the line of each key, and report duplicate keys."""
    # YAML itself would silently use the last value of a duplicate key.
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = (*path, str(key_node.value))
            line = key_node.start_mark.line + 1
            if key in lines:
                problems.append(Problem(line, f"{dotted(key)} is given twice"))
            lines[key] = line
            _index(value_node, key, lines, problems)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _index(item, (*path, number), lines, problems)


# ---------------------------------------------------------------- paths


def _with_absolute_paths(spec: RunSpec, folder: Path) -> RunSpec:
    evaluation, template = spec.data.eval, spec.data.chat_template
    data = dataclasses.replace(
        spec.data,
        train=_found(spec.data.train, folder),
        sources=tuple(
            dataclasses.replace(source, path=_found(source.path, folder))
            for source in spec.data.sources
        ),
        eval=None if evaluation is None else _found(evaluation, folder),
        chat_template=None if template is None else _found(template, folder),
    )
    return dataclasses.replace(spec, model=_found(spec.model, folder), data=data)


def _found(name: str, folder: Path) -> str:
    """Return the absolute path if `name` exists relative to `folder`, else `name` unchanged."""
    # Without checking whether it exists, for which Windows would log in to that computer.
    if os.name == "nt" and is_network_path(name):
        return name
    path = Path(os.path.expanduser(name))  # Path.expanduser would raise for an unknown user
    absolute = path if path.is_absolute() else folder / path
    return os.path.normpath(absolute) if os.path.exists(absolute) else name
