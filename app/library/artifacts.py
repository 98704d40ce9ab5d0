"""Artifacts as folders on this PC: what they are, and how they get to a node."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.artifacts import METHODS, PROOF_FILE
from app.errors import UserError
from app.events import Verdict
from app.library.bundles import Source, make_bundle
from app.storage.hashes import HashStore

_SENT_SUFFIXES = frozenset({".safetensors", ".json", ".model", ".txt", ".jinja"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A folder that an export made."""

    folder: Path
    method: str
    """`merged`, or one of `agents.artifacts.METHODS`."""
    types: tuple[str, ...] = ()
    """Of GGUF: those whose files are there."""

    def file_of(self, kind: str | None) -> Path:
        """Return the GGUF file of a type, or the first one.

        Raises:
            UserError: there is none of that type.
        """
        wanted = kind or (self.types[0] if self.types else "")
        found = sorted(self.folder.glob(f"*-{wanted}.gguf"))
        if not found:
            raise UserError(
                f"{self.folder} has no {wanted or 'GGUF'} file",
                f"It has {', '.join(self.types)}." if self.types else "Export it again.",
            )
        return found[0]


def read_artifact(folder: Path) -> Artifact:
    """Return what a folder is.

    Raises:
        UserError: no export made it.
    """
    try:
        about = json.loads((folder / PROOF_FILE).read_bytes())
        method, proofs = about["method"], about["proofs"]
        if method in METHODS:
            types = tuple(str(one["name"]) for one in proofs) if method == "gguf" else ()
            return Artifact(folder=folder, method=method, types=types)
    except FileNotFoundError:
        if (folder / "config.json").is_file():
            return Artifact(folder=folder, method="merged")
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(
        f"{folder} is no artifact: it has neither {PROOF_FILE} nor config.json",
        "Name a folder that rackless export made, or a run.",
    )


def read_verdicts(folder: Path) -> tuple[Verdict, ...]:
    """Return what was measured of an artifact; empty where nothing was."""
    try:
        proofs = json.loads((folder / PROOF_FILE).read_bytes())["proofs"]
        return tuple(_verdict(proof) for proof in proofs)
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def _verdict(proof: dict[str, Any]) -> Verdict:
    return Verdict(
        name=proof["name"],
        keep=proof["keep"],
        problems=tuple(proof["problems"]),
        kl=proof["distance"]["kl"],
        control_kl=proof["control"]["kl"],
        perplexity=proof["distance"]["perplexity"],
        original_perplexity=proof["original_perplexity"],
        size_bytes=proof["size_bytes"],
        tokens_per_s=proof["tokens_per_s"],
    )


def bundle_artifact(artifact: Artifact, kind: str | None, hashes: HashStore) -> Source:
    """Return what is sent to a node to run it there. Hashes files that changed since last time."""
    folder = artifact.folder
    if artifact.method == "gguf":
        file = artifact.file_of(kind)
        return make_bundle("models", file.stem, folder, [file], hashes, member=file.name)
    files = [p for p in folder.iterdir() if p.is_file() and p.suffix in _SENT_SUFFIXES]
    shown = [p for p in files if not p.name.startswith(".") and p.name != PROOF_FILE]
    return make_bundle("models", folder.name, folder, shown, hashes)
