"""Read the chat template that a run file names, so that the run keeps its text.

A file, the folder of another model, or a model in the hub's cache; nodes get the text, whatever
happens to the file later.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.contract.hub import find_snapshot
from agents.contract.spec import RunSpec
from agents.shared.data.known_templates import KNOWN, is_template
from agents.shared.files.folder_files import ForeignFile, read_regular
from app.errors import UserError

MAX_BYTES = 1 << 20
"""Maximum size of a template's file, in bytes; the longest published ones have 20,000."""
_JINJA, _SETTINGS = "chat_template.jinja", "tokenizer_config.json"


def settle_template(spec: RunSpec) -> RunSpec:
    """Return a spec with the text of its chat template, or a known name. Reads files.

    Raises:
        UserError: there is no such template.
    """
    name = spec.data.chat_template
    if name is None:
        return spec
    return replace(spec, data=replace(spec.data, chat_template=read_template(name)))


def read_template(name: str) -> str:
    """Return the text of a template, or a known name.

    Args:
        name: name, text, file, or model.

    Raises:
        UserError: there is no such template.
    """
    if name in KNOWN or is_template(name):
        return name
    text = _read(name)
    if not is_template(text):
        raise UserError(
            f"data.chat_template: {name} holds no Jinja template",
            "Give a file with a chat template, such as chat_template.jinja.",
        )
    return text


def _read(name: str) -> str:
    path = Path(os.path.expanduser(name))  # Path.expanduser would raise for an unknown user
    try:
        if not path.is_dir() and not path.is_file():
            fetched = None if os.path.isabs(name) else _find_cached(name)
            if fetched is None:
                known = ", ".join(KNOWN)
                raise UserError(
                    f"data.chat_template: there is no file and no model {name!r} on this PC",
                    f"Give a file, the folder of a model, or one of {known}.",
                )
            path = fetched
        return _read_folder(name, path) if path.is_dir() else _read_file(path)
    except ForeignFile as error:
        raise UserError(f"data.chat_template: {error.message}", error.hint) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(
            f"data.chat_template: {path} cannot be read: {reason}",
            "Give a text file in UTF-8 with a chat template.",
        ) from error


def _find_cached(name: str) -> Path | None:
    if name.count("/") != 1 or ".." in name:
        return None
    return find_snapshot(name, os.environ)


def _read_folder(name: str, folder: Path) -> str:
    for file in (_JINJA, "chat_template.json", _SETTINGS):
        path = folder / file
        if path.is_file() and (text := _read_file(path)):
            return text
    raise UserError(
        f"data.chat_template: the model {name} has no chat template",
        "Name another model, or a file with a template.",
    )


def _read_file(path: Path) -> str:
    text = read_regular(path, limit=MAX_BYTES).decode("utf-8-sig")
    if path.suffix != ".json":
        return text
    found = json.loads(text)
    own: Any = found.get("chat_template") if isinstance(found, dict) else None
    if isinstance(own, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in own if isinstance(one, dict)}
        own = named.get("default")
    return own if isinstance(own, str) else ""
