"""Find a model's config.json without its weights: on this PC, in a shipped table, or on the hub.

A plan needs a few hundred bytes of a model, so nothing else is fetched. The configs of popular
models ship with Rackless (resources/models/known.json), since several are gated on the hub and a
plan should not wait for an approval.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.hub import HubFile, HubSnapshot, is_copied
from agents.contract.wire import from_wire, to_wire
from agents.shared.files.full_disk import removing_half
from agents.shared.models.config import MOST_BYTES, find_config, parse_config
from app.errors import UserError
from app.paths import private_folder

# Time after which a failed fetch is retried, in seconds.
_FORGET_S = 60.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
Fetch = Callable[[str, Mapping[str, str]], bytes]
"""Returns the bytes of a file from its address and headers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocatedConfig:
    config: Mapping[str, Any]
    source: str
    """Source in words; empty: the model's folder."""


class ConfigLibrary:
    """Configs of models, each fetched once.

    Args:
        folder: cache of fetched configs.
        environ: environment of this process, which locates the hub and its cache.
        fetch: downloads a file of the hub.
    """

    def __init__(
        self, folder: Path, environ: Mapping[str, str] | None = None, fetch: Fetch | None = None
    ) -> None:
        self._folder = folder
        self._environ = os.environ if environ is None else environ
        self._fetch = fetch or fetch_file
        self._known: dict[str, dict[str, Any]] | None = None
        self._failed: dict[str, tuple[float, UserError]] = {}

    def find_here(self, model: str) -> LocatedConfig | None:
        """Return the config from this PC, or None if it is not here.

        Raises:
            UserError: the config cannot be used.
        """
        try:
            config = find_config(model, self._environ)
        except ValueError as error:
            raise UserError(f"the model {model} cannot be planned: {error}") from error
        if config is not None:
            return LocatedConfig(config=config, source="")
        with contextlib.suppress(OSError, ValueError):
            kept = self._kept(model).read_bytes()
            return LocatedConfig(config=parse_config(kept, model), source="fetched before")
        known = self._read_known().get(model.lower())
        return LocatedConfig(config=known, source="from Rackless's own table") if known else None

    def fetch(self, model: str) -> LocatedConfig:
        """Return the config of a hub id. Takes seconds: do not call it on the event loop.

        Raises:
            UserError: it is not a hub id, or cannot be fetched.
        """
        if not is_hub_id(model):
            raise UserError(
                f"there is no model folder {model} here, and it is not a hub id",
                "Give the folder's path (relative to the run file), or a hub id such as org/name.",
            )
        # A failure is cached, else every plan would wait for the hub, up to its time limit.
        failed = self._failed.get(model)
        if failed is not None and time.monotonic() - failed[0] < _FORGET_S:
            raise failed[1]
        try:
            data = self._ask_hub(model)
        except UserError as error:
            self._failed[model] = (time.monotonic(), error)
            raise
        with contextlib.suppress(OSError):  # without the cache the next plan fetches it, too
            private_folder(self._folder)
            with removing_half(self._kept(model)) as kept:
                kept.write_bytes(data)
        return LocatedConfig(config=parse_config(data, model), source="from the hub")

    def list_files(self, model: str) -> HubSnapshot | None:
        """Return the newest revision of a hub id, with the hashes that the hub gives its files.

        Only files that nodes copy are listed. Takes seconds: do not call it on the event loop.

        Returns:
            The snapshot; None if the hub cannot be asked, or gives no usable answer.
        """
        if self._is_offline():
            return None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            told = json.loads(self._get(f"api/models/{model}?blobs=true"))
            files = []
            for one in told["siblings"]:
                if is_copied(one["rfilename"]):
                    blob = (one.get("lfs") or {}).get("sha256") or one["blobId"]
                    files.append(HubFile(path=one["rfilename"], blob=blob, size_bytes=one["size"]))
            # Decoded once more, since an address of `HF_ENDPOINT` may answer anything.
            wire = to_wire(HubSnapshot(revision=told["sha"], files=tuple(files)))
            return from_wire(HubSnapshot, wire, "the hub's answer")
        return None

    def _get(self, path: str) -> bytes:
        from app.hub import hub_http  # on use, here and below: most commands never fetch

        address = f"{hub_http.read_endpoint(self._environ)}/{path}"
        return self._fetch(address, hub_http.make_headers(self._environ))

    def _is_offline(self) -> bool:
        from app.hub.hub_http import is_offline

        return is_offline(self._environ)

    def _ask_hub(self, model: str) -> bytes:
        from urllib.error import HTTPError  # on use: most commands never fetch

        hint = "Give the path of a folder with its config.json, or try again with a network."
        if self._is_offline():
            raise UserError(f"the config of {model} is not here, and HF_HUB_OFFLINE is set", hint)
        try:
            data = self._get(f"{model}/resolve/main/config.json")
            # Validated before it is stored, so that the cache never holds an unusable config.
            parse_config(data, model)
        except HTTPError as error:
            error.close()  # the error holds the open response
            raise UserError(
                f"the hub gives no config of {model}: {_reason(error.code)}",
                hint,
                topic="model-download",
            ) from error
        except (OSError, ValueError) as error:
            text = str(getattr(error, "reason", error))
            raise UserError(f"the config of {model} cannot be fetched: {text}", hint) from error
        return data

    def _kept(self, model: str) -> Path:
        return self._folder / f"{re.sub('[^A-Za-z0-9._-]', '--', model)}.json"

    def _read_known(self) -> dict[str, dict[str, Any]]:
        if self._known is None:
            self._known = {
                name.lower(): entry["config"] for entry in read_known() for name in entry["names"]
            }
        return self._known


def read_known() -> list[dict[str, Any]]:
    """Return the shipped models: `names`, `parameters` as published, and `config`."""
    import importlib.resources  # on use: lists of runs need no model

    file = importlib.resources.files("resources").joinpath("models", "known.json")
    known: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return known


def is_hub_id(model: str) -> bool:
    """Return whether `model` has the form of a hub id.

    >>> is_hub_id("org/name"), is_hub_id("./folder"), is_hub_id("a/b/c")
    (True, False, False)
    """
    return _HUB_ID.fullmatch(model) is not None


def fetch_file(address: str, headers: Mapping[str, str]) -> bytes:
    """Return a small file of the hub.

    Raises:
        OSError: the network failed, or the hub refused the request.
        ValueError: the file is too large for a config.
    """
    from app.hub.hub_http import ask  # on use: most commands never fetch

    return ask(address, headers, MOST_BYTES).data


def _reason(code: int) -> str:
    if code in (401, 403):
        return (
            "it is behind a licence or private, and the token of this PC (see the window's "
            "settings) gives no access, or there is no such model"
        )
    return "there is no such model" if code == 404 else f"it answers {code}"
