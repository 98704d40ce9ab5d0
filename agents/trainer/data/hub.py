"""Find data and models on this node, or download them from the Hugging Face hub.

Only one split of a data set is downloaded: the one for training or the one for evaluation. The hub
also keeps most data sets as Parquet (revision `refs/convert/parquet`, files
`CONFIG/train/0000.parquet`), which needs no code of the data set. Otherwise its own files are used.
https://huggingface.co/docs/dataset-viewer/parquet
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from agents.contract.spec import RunSpec
from agents.errors import ExpectedError
from agents.foreign_code import forbid
from agents.shared.data.files import KINDS
from agents.shared.data.splits import HELD_OUT, choose_split
from agents.shared.models.config_findings import quantization_of
from agents.shared.models.fit import find_refusals
from agents.shared.models.folder import ModelFolder, inspect_model
from agents.trainer.data.hub_fetch import fetch_matching, fetch_model
from agents.trainer.data.hub_words import (
    CONVERTED,
    HUB,
    NO_TOKENIZER_FILES,
    OWN_FILES,
    TOKENIZER_FILES,
    explain_download,
    name_converted,
)
from agents.trainer.data.rows import (
    DataFiles,
    choose_split_files,
    find_files,
    list_files,
    require_one_kind,
)

Download = Callable[..., str]
"""Function with the signature of `huggingface_hub.snapshot_download`."""


def find_model(path: str, spec: RunSpec | None = None) -> Path:
    """Return the model's folder, checked, and downloaded if `path` is a hub id.

    Args:
        path: folder or hub id.
        spec: run that trains the model; None for any other use.

    Raises:
        ExpectedError: the path is neither a folder nor a model on the hub, or the model cannot be
            loaded.
    """
    folder = _find_folder(path)
    found = inspect_model(folder)
    if spec is None and quantization_of(found.config):  # it cannot be trained, but it can generate
        usable = tuple(finding for finding in found.findings if finding.kind != "quantized")
        found = replace(found, findings=usable)
    refuse_unusable(path, found, spec)
    return folder


def refuse_unusable(name: str, model: ModelFolder, spec: RunSpec | None = None) -> None:
    """Reject a model whose files are damaged or are not those of a causal language model.

    Raises:
        ExpectedError: the message names the file and its fault.
    """
    for refusal in find_refusals(name, model, spec):
        # Other messages start with a key of the run file, which stays in lower case.
        message = re.sub("^the model", "The model", refusal.message)
        raise ExpectedError(f"{message}.", refusal.hint)


def find_tokenizer(path: str) -> Path:
    """Return a folder with the model's tokenizer; like `find_model`, without the weights."""
    folder = _find_folder(path, tokenizer=True)
    found = inspect_model(folder, parts="tokenizer")
    # Its data can be shown even if no run can train the model.
    broken = tuple(finding for finding in found.findings if finding.kind == "tokenizer")
    refuse_unusable(path, replace(found, findings=broken))
    return folder


def _find_folder(path: str, *, tokenizer: bool = False) -> Path:
    folder = Path(path)
    if folder.is_dir():
        # Code in a model's folder must never run.
        forbid(folder)
        return folder
    # Not a hub id, so the hub is not asked.
    if folder.is_absolute() or path.count("/") > 1:
        raise ExpectedError(f"{path} does not exist.", "Check the model of the run file")
    if not tokenizer:
        return fetch_model(path)
    from huggingface_hub import snapshot_download

    only = {"allow_patterns": TOKENIZER_FILES, "ignore_patterns": NO_TOKENIZER_FILES}
    try:
        return Path(snapshot_download(path, **only))
    except Exception as error:
        raise explain_download(path, "folder", f"{HUB}/{path}", error) from error


def find_data(
    name: str,
    download: Download | None = None,
    *,
    held_out_from: str | None = None,
    split: str | None = None,
) -> DataFiles:
    """Return the files of a path on this node, or of a data set `org/name` or `org/name:config`.

    Args:
        name: path or data set.
        download: downloads from the hub; None for the hub's own function.
        held_out_from: training data, if `name` is evaluation data. Selects the validation split,
            else the test split, else everything.
        split: name of the split to select instead.

    Raises:
        ExpectedError: neither exists, or the training data set has no held-out split.
    """
    held_out = held_out_from is not None
    path = Path(name)
    plain = name.count("/") != 1 or name.startswith((".", "~")) or path.suffix.lower() in KINDS
    # A path on this node takes precedence over a data set of the same name.
    if path.exists() or path.is_absolute() or plain:
        return find_files(path, held_out=held_out, split=split)
    download = download or _download
    if split is not None:
        return _find_named(name, download, split)
    converted = _find_converted(name, download, held_out=True) if held_out else ()
    if converted:
        return DataFiles(name=name, paths=converted)
    converted = _find_converted(name, download, held_out=False)
    if converted:
        _refuse_same(name, held_out_from)
        return DataFiles(name=name, paths=converted)
    folder, found = _fetch_own(name, download)
    chosen = choose_split(folder, found, held_out=True) if held_out else []
    if not chosen:
        _refuse_same(name, held_out_from)
        chosen = choose_split(folder, found, held_out=False) or found
    return DataFiles(name=name, paths=require_one_kind(name, chosen))


def _find_named(name: str, download: Download, split: str) -> DataFiles:
    dataset, _, config = name.partition(":")
    if files := _try_converted(dataset, download, (split,)):
        return DataFiles(name=name, paths=_choose_config(name, config, files))
    folder, found = _fetch_own(name, download)
    return choose_split_files(name, folder, found, split)


def _refuse_same(name: str, held_out_from: str | None) -> None:
    if name == held_out_from:
        raise ExpectedError(
            f"{name} holds out nothing to evaluate with: it has neither a validation nor a "
            "test split.",
            "Give other data as data.eval, or none",
        )


def _fetch_own(name: str, download: Download) -> tuple[Path, list[Path]]:
    dataset, _, config = name.partition(":")
    if "/" in config or config in (".", ".."):
        raise ExpectedError(
            f"{name}: {config!r} is not a part of a data set.", "Write org/name or org/name:part"
        )
    try:
        folder = Path(download(dataset, repo_type="dataset", allow_patterns=OWN_FILES))
    except ExpectedError:
        raise
    except Exception as error:
        raise explain_download(
            name, "file or folder", f"{HUB}/datasets/{dataset}", error
        ) from error
    return folder / config, list_files(folder / config)


def _download(
    dataset: str, *, repo_type: str, allow_patterns: list[str], revision: str | None = None
) -> str:
    return str(fetch_matching(dataset, allow_patterns, revision))


def _find_converted(name: str, download: Download, *, held_out: bool) -> tuple[Path, ...]:
    dataset, _, config = name.partition(":")
    files = _try_converted(dataset, download, tuple(HELD_OUT) if held_out else ("train",))
    if held_out:  # another configuration's held-out split does not help
        files = [file for file in files if config in ("", file.parent.parent.name)]
    if not files:
        return ()
    chosen = _choose_config(name, config, files)
    return tuple(choose_split(chosen[0].parent.parent, chosen, held_out=held_out))


def _try_converted(dataset: str, download: Download, names: Sequence[str]) -> list[Path]:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = name_converted(names)
    try:
        folder = download(dataset, repo_type="dataset", revision=CONVERTED, allow_patterns=wanted)
    except (HfHubHTTPError, LocalEntryNotFoundError):
        return []  # not every data set was converted
    return sorted(file for pattern in wanted for file in Path(folder).glob(pattern))


def _choose_config(name: str, config: str, files: list[Path]) -> tuple[Path, ...]:
    known = sorted({file.parent.parent.name for file in files})
    wanted = config or ("default" if "default" in known else known[0])
    if wanted not in known or (not config and len(known) > 1 and wanted != "default"):
        raise ExpectedError(
            f"{name} has the parts {', '.join(known)}.",
            f"Name one of them, such as {name.partition(':')[0]}:{known[0]}",
        )
    return tuple(file for file in files if file.parent.parent.name == wanted)
