"""Push an artifact to the Hugging Face hub, with the token stored on this PC.

The token is sent only to the hub and never shown. The verification report is not pushed, since it
contains paths of this PC; the card is pushed with its figures and only the names of those files.
https://huggingface.co/docs/huggingface_hub/guides/upload
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agents.contract.requests.exports import PROOF_FILE
from agents.contract.run import FileEntry
from agents.shared.files.folder_files import ForeignFile, read_regular, require_own
from app.errors import UsageError, UserError
from app.hub.hub_token import read_stored_token

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PLACE = r"((?:[/~\\]|[A-Za-z]:)[^`\"\n]*)"
# Files that contain paths of this PC, with patterns of the paths. The card comes first, so that a
# card that the hub refuses fails before hours of uploading weights.
_PLACES = {
    "README.md": re.compile(rf"^(- (?:Base|Trained on): `){_PLACE}(`)", re.MULTILINE),
    "adapter/adapter_config.json": re.compile(rf'("base_model_name_or_path": "){_PLACE}(")'),
}
_LOGIN = "Make one with write access at https://huggingface.co/settings/tokens, then: hf auth login"


def is_hub_id(text: str) -> bool:
    """Return whether `text` can be the id of a model on the hub.

    >>> is_hub_id("anna/poems-awq"), is_hub_id("anna/my poems"), is_hub_id("anna/a/b")
    (True, False, False)
    """
    return _ID.fullmatch(text) is not None


def push_folder(folder: Path, files: Sequence[FileEntry], hub_id: str, private: bool) -> str:
    """Push files to the model `hub_id`, created if missing; return its address.

    Files that the hub has already are skipped, so a repeated push resumes an interrupted one.

    Raises:
        UserError: there is no token, it gives no write access, or the hub cannot be reached.
    """
    if not is_hub_id(hub_id):
        raise UsageError(
            f"{hub_id} is no id on the hub", "Write it as NAME/MODEL, such as anna/poems-awq."
        )
    _require_own(folder, files)
    api, token = _connect()
    with _translated(hub_id, token):
        address = str(api.create_repo(hub_id, private=private, exist_ok=True))
        sent = [entry.path for entry in pushed(files)]
        for path in [path for path in _PLACES if path in sent]:
            sent.remove(path)
            text = hide_places(path, read_regular(folder / path, folder).decode("utf-8"))
            api.upload_file(
                repo_id=hub_id,
                path_or_fileobj=text.encode("utf-8"),
                path_in_repo=path,
                commit_message=f"Add {path}",
            )
        api.upload_folder(
            repo_id=hub_id,
            folder_path=folder,
            # The hub's client reads these as patterns, so brackets and stars are escaped.
            allow_patterns=[_escape(path) for path in sent],
            commit_message="Add the model",
        )
    return address


def _require_own(folder: Path, files: Sequence[FileEntry]) -> None:
    """Check that no file has been replaced by a link since the artifact was registered.

    Raises:
        UserError: a file leads out of the folder, or cannot be read.
    """
    try:
        for entry in pushed(files):
            require_own(folder / entry.path, folder)
    except ForeignFile as error:
        raise UserError(error.message, f"{error.hint}.") from error
    except OSError as error:
        raise UserError(
            f"{folder} cannot be read: {error.strerror}", "Check that its disk is connected."
        ) from error


def hide_places(path: str, text: str) -> str:
    """Return the text with paths of this PC reduced to their last part.

    >>> card = "- Base: `org/base`\\n- Trained on: `/home/anna/x.jsonl`, sha256 `2`"
    >>> print(hide_places("README.md", card))
    - Base: `org/base`
    - Trained on: `x.jsonl`, sha256 `2`
    """
    return _PLACES[path].sub(_name_only, text)


def _name_only(found: re.Match[str]) -> str:
    parts = [part for part in re.split(r"[/\\]", found[2]) if part]
    return f"{found[1]}{parts[-1] if parts else ''}{found[3]}"


def pushed(files: Sequence[FileEntry]) -> list[FileEntry]:
    """Return the files of an artifact that are pushed to the hub."""
    return [entry for entry in files if entry.path != PROOF_FILE]


def read_files(hub_id: str, files: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    """Return the files on the hub with their hashes, as far as it publishes them.

    Raises:
        UserError: the hub cannot be reached.
    """
    api, token = _connect()
    with _translated(hub_id, token):
        siblings = api.model_info(hub_id, files_metadata=True).siblings or ()
    known = {entry.path: entry for entry in files}
    found = []
    for file in siblings:
        expected = known.get(file.rfilename)
        # For small files the hub publishes only the size, so an equal size counts as unchanged.
        # Files that were pushed without paths have another size, and the card may be edited there.
        is_same = expected and (expected.size_bytes == file.size or file.rfilename in _PLACES)
        same = expected.sha256 if expected and is_same else ""
        sha256 = file.lfs.sha256 if file.lfs else same
        found.append(FileEntry(path=file.rfilename, size_bytes=file.size or 0, sha256=sha256))
    return tuple(found)


def _escape(path: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", path)


def _connect() -> tuple[Any, str]:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    token = read_stored_token()
    if not token:
        raise UserError("there is no token of the hub on this PC", _LOGIN)
    disable_progress_bars()  # they would overwrite the output of a command
    return HfApi(token=token, library_name="rackless"), token


@contextlib.contextmanager
def _translated(hub_id: str, token: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except HfHubHTTPError as error:
        # `from None`, here and below, since the original error may quote the token.
        raise _explain(hub_id, error, token) from None
    except (HTTPError, OSError) as error:
        raise UserError(
            f"the hub cannot be reached: {_first_line(error, token)}",
            "Check this PC's network, then try again: files on the hub are not sent twice.",
        ) from None
    except ValueError as error:  # such as a card that the hub rejects
        raise UserError(
            f"the hub refuses {hub_id}: {_first_line(error, token)}",
            "Correct the named problem, then try again.",
        ) from None


def _explain(hub_id: str, error: Any, token: str) -> UserError:
    code = getattr(error.response, "status_code", None)
    owner = hub_id.partition("/")[0]
    if code == 401:
        return UserError(f"the hub no longer accepts this PC's token, for {hub_id}", _LOGIN)
    if code == 403:
        return UserError(
            f"this PC's token may not write to {hub_id}",
            f"Use a token with write access to {owner}, or push to a name of your own.",
        )
    # The hub answers 404 for a missing model and for another user's private one.
    if code == 404:
        return UserError(f"the hub has no {hub_id} that this token may see", "Check the name.")
    return UserError(f"the hub refused {hub_id}: {_first_line(error, token)}", "Try again later.")


def _first_line(error: Exception, token: str) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].replace(token, "***")[:300]
