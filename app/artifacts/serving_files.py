"""Read the facts that serving needs from a copy on this PC, and write the Modelfile."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.contract.formats import is_known_type
from agents.shared.files.full_disk import name_disk_error
from agents.shared.models.gguf_file import read_metadata
from app.artifact import ArtifactSnapshot
from app.artifacts.chat_template import express
from app.artifacts.folder_json import read_object
from app.artifacts.record import folder_here
from app.artifacts.serving import ServeCommand, ServedFolder, serve_commands
from app.errors import UserError
from app.paths import replace_text


def hand_off(artifact: ArtifactSnapshot) -> tuple[ServeCommand, ...]:
    """Return the commands that serve an artifact from its folder on this PC.

    Raises:
        UserError: this PC has no copy.
    """
    return serve_commands(artifact, _read_folder(artifact, folder_here(artifact)))


def write_modelfile(artifact: ArtifactSnapshot, command: ServeCommand) -> Path | None:
    """Write a command's Modelfile next to the weights; None: the command has no Modelfile.

    Raises:
        UserError: the folder is gone, or cannot be written.
    """
    if command.modelfile is None:
        return None
    path = folder_here(artifact) / command.modelfile_name
    try:
        replace_text(path, command.modelfile)  # it never writes through a link
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {name_disk_error(error)}",
            "Copy the artifact to another folder.",
        ) from error
    return path


def _read_folder(artifact: ArtifactSnapshot, folder: Path) -> ServedFolder:
    config: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        config = read_object(folder, "config.json")
    # A name of several lines would add lines to a Modelfile.
    names = sorted(path.name for path in folder.glob("*.gguf") if path.name.isprintable())
    types = [kind for kind in artifact.types if is_known_type(artifact.format, kind)]
    files = [(kind, name) for kind in types for name in names if f"-{kind}." in name]
    templates, problems, stops = {}, {}, {}
    # Cached, since the files of a model share one template and each translation starts a process.
    translate = functools.cache(_translate_template)
    for kind, name in files:
        try:
            about = read_metadata(folder / name)
            stops[kind] = _name_token(about, "eot")
            templates[kind] = translate(*_read_template(about))
        except (OSError, ValueError) as error:
            problems[kind] = str(error)
    return ServedFolder(
        path=str(folder),
        config=config,
        files=tuple(files),
        templates=templates,
        template_problems=problems,
        stops=stops,
    )


def _read_template(about: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a GGUF file's chat template with the model's first and last token.

    Raises:
        ValueError: the file has no template.
    """
    template = about.get("tokenizer.chat_template")
    if not isinstance(template, str):
        raise ValueError("the file has none")
    return template, _name_token(about, "bos"), _name_token(about, "eos")


def _translate_template(template: str, bos_token: str, eos_token: str) -> str:
    """Return the lines of a Modelfile that give a GGUF file its own template.

    Raises:
        ValueError: the template cannot be translated.
    """
    found = express(template, bos_token, eos_token)
    stop = f"PARAMETER stop {json.dumps(found.stop)}\n" if found.stop else ""
    return f'TEMPLATE """{found.to_go()}"""\n{stop}'


def _name_token(about: Mapping[str, Any], name: str) -> str:
    tokens = about.get("tokenizer.ggml.tokens", [])
    number = about.get(f"tokenizer.ggml.{name}_token_id")
    if not isinstance(tokens, list) or not isinstance(number, int):
        return ""
    return str(tokens[number]) if 0 <= number < len(tokens) else ""
