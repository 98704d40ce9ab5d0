"""Find data and models: paths on this node, else fetched from the Hugging Face hub.

Of a data set it is the training split, as files. The hub keeps most data sets as Parquet, too
(revision `refs/convert/parquet`, files `CONFIG/train/0000.parquet`), which needs no code of the
data set; else its own files are taken.
https://huggingface.co/docs/dataset-viewer/parquet
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents.errors import UserError
from agents.trainer.data.files import KINDS
from agents.trainer.data.rows import DataFiles, find_files, one_kind

_CONVERTED = "refs/convert/parquet"
_CONVERTED_FILES = ["*/train/*.parquet", "*/partial-train/*.parquet"]
_OWN_FILES = [f"*{suffix}" for suffix in KINDS if suffix != ".md"]
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_HUB = "https://huggingface.co"
_GIVE_TOKEN = "give the node your token: rackless nodes token --give, or the window's settings"
Download = Callable[..., str]
"""As `huggingface_hub.snapshot_download`."""


def find_model(path: str) -> Path:
    """Return the model's folder, fetched from the hub where `path` is a hub id.

    Raises:
        UserError: it is neither a folder nor on the hub.
    """
    return _find_folder(path, [*_TOKENIZER_FILES, "*.safetensors"])


def find_tokenizer(path: str) -> Path:
    """Return a folder with the model's tokenizer; like `find_model` without the weights."""
    return _find_folder(path, _TOKENIZER_FILES)


def _find_folder(path: str, patterns: list[str]) -> Path:
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or path.count("/") > 1:
        raise UserError(f"{path} does not exist.", "Check the model of the run file")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception as error:
        raise _explain(path, "folder", f"{_HUB}/{path}", error) from error


def _explain(name: str, kind: str, page: str, error: Exception) -> UserError:
    """Return in words why the hub does not give it: most often a licence, or no token."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return UserError(
            f"{name} is behind a licence on the hub, which does not let this node in.",
            f"Accept it at {page}, then {_GIVE_TOKEN}",
        )
    if isinstance(error, RepositoryNotFoundError):
        return UserError(
            f"{name} is no {kind} on this node, and the hub knows none or keeps it private.",
            f"Check the spelling; if it is private, {_GIVE_TOKEN}",
        )
    said = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(
        f"{name} is no {kind} on this node and cannot be fetched from the hub: {said[0]}",
        f"Check the spelling and the network, or give the path of a {kind}",
    )


def find_data(name: str, download: Download | None = None) -> DataFiles:
    """Return the files of a path on this node, or of a data set `org/name` or `org/name:config`.

    Raises:
        UserError: there is neither.
    """
    path = Path(name)
    plain = name.count("/") != 1 or name.startswith((".", "~")) or path.suffix.lower() in KINDS
    if path.exists() or path.is_absolute() or plain:
        return find_files(path)
    download = download or _download
    dataset, _, config = name.partition(":")
    converted = _try_converted(dataset, download)
    if converted:
        return DataFiles(name=name, paths=_choose_config(name, config, converted))
    try:
        folder = Path(download(dataset, repo_type="dataset", allow_patterns=_OWN_FILES))
    except Exception as error:
        raise _explain(name, "file or folder", f"{_HUB}/datasets/{dataset}", error) from error
    found = list(find_files(folder / config if config else folder).paths)
    train = [file for file in found if "train" in file.relative_to(folder).as_posix().lower()]
    return DataFiles(name=name, paths=one_kind(name, train or found))


def _download(dataset: str, **options: Any) -> str:
    from huggingface_hub import snapshot_download

    return str(snapshot_download(dataset, **options))


def _try_converted(dataset: str, download: Download) -> list[Path]:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = download(
            dataset, repo_type="dataset", revision=_CONVERTED, allow_patterns=_CONVERTED_FILES
        )
    except (HfHubHTTPError, LocalEntryNotFoundError):
        return []  # not every data set was converted
    return sorted(Path(folder).glob("*/*train/*.parquet"))


def _choose_config(name: str, config: str, files: list[Path]) -> tuple[Path, ...]:
    known = sorted({file.parent.parent.name for file in files})
    wanted = config or ("default" if "default" in known else known[0])
    if wanted not in known or (not config and len(known) > 1 and wanted != "default"):
        raise UserError(
            f"{name} has the parts {', '.join(known)}.",
            f"Name one of them, such as {name.partition(':')[0]}:{known[0]}",
        )
    return tuple(file for file in files if file.parent.parent.name == wanted)
