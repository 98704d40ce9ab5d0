"""Artifacts as folders on this PC: recognize them, and bundle them for a node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.formats import EXPORTS, is_known_type
from agents.contract.requests.exports import PROOF_FILE, Origin
from agents.contract.wire import from_wire
from agents.shared.files.folder_files import ForeignFile, list_own
from app.artifact import Verdict
from app.artifacts.folder_json import read_object
from app.errors import UserError
from app.library.bundles import Source, make_bundle, refused
from app.storage.hashes import HashStore

# Suffixes of files that a runtime reads; cards are not sent.
_SENT_SUFFIXES = frozenset({".safetensors", ".json", ".model", ".txt", ".jinja"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A folder with a model."""

    folder: Path
    method: str
    """Format: `merged`, or one of `agents.contract.formats.METHODS`."""
    types: tuple[str, ...] = ()
    """Types of the format: for GGUF those with files, for GPTQ the one in its proof."""

    def file_of(self, kind: str | None) -> Path:
        """Return the GGUF file of a type, by default of the first type.

        Raises:
            UserError: there is no file of that type.
        """
        spelled = {name.lower(): name for name in self.types}
        wanted = spelled.get(kind.lower(), kind) if kind else next(iter(self.types), "")
        found = sorted(self.folder.glob(f"*-{wanted}.gguf"))
        if not found:
            raise UserError(
                f"{self.folder} has no {wanted or 'GGUF'} file",
                f"It has {', '.join(self.types)}." if self.types else "Export it again.",
            )
        return found[0]


def read_artifact(folder: Path) -> Artifact:
    """Return the artifact in a folder.

    Raises:
        UserError: the folder holds neither an export nor any other model.
    """
    reason = f"it has neither {PROOF_FILE} nor config.json"
    try:
        if not (folder / PROOF_FILE).exists():
            return _recognise(folder)
        about = read_object(folder, PROOF_FILE)
        method, proofs = about["method"], about["proofs"]
        if method in EXPORTS and method != "merged":
            names = [str(proof["name"]).removeprefix(f"{method} ") for proof in proofs]
            types = [name for name in names if is_known_type(method, name)]
            return Artifact(folder=folder, method=method, types=tuple(types))
        reason = f"its {PROOF_FILE} is of a format that is not known"
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        odd = PROOF_FILE if (folder / PROOF_FILE).exists() else "config.json"
        reason = f"its {odd} cannot be read ({str(error)[:200]})"
    raise UserError(
        f"{folder} is no artifact: {reason}", "Name a folder that rackless export made, or a run."
    )


def _recognise(folder: Path) -> Artifact:
    """Return the artifact in a folder without a proof.

    Raises:
        OSError: it has no config.json.
    """
    files = sorted(folder.glob("*-*.gguf"))
    if files:
        types = {path.stem.rpartition("-")[2]: path for path in files}
        odd = next((path for kind, path in types.items() if not is_known_type("gguf", kind)), None)
        if odd is not None:
            raise UserError(
                f"{folder} is no artifact: the name of {odd.name!a} does not end with a type of "
                "GGUF",
                "Rename the file, such as NAME-Q8_0.gguf, or move it away.",
            )
        return Artifact(folder=folder, method="gguf", types=tuple(types))
    config = read_object(folder, "config.json")
    found = (config.get("quantization_config") or {}).get("quant_method")
    known = (row.name for row in EXPORTS.values() if row.quant_method == found and found)
    return Artifact(folder=folder, method=next(known, "merged"))


def read_verdicts(folder: Path) -> tuple[Verdict, ...]:
    """Return the measured quality of an artifact; empty: not measured."""
    try:
        proofs = read_object(folder, PROOF_FILE)["proofs"]
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


def read_origin(folder: Path) -> Origin | None:
    """Return the origin of an artifact; None: its files do not name it, as in a merged model."""
    try:
        return from_wire(Origin, read_object(folder, PROOF_FILE)["origin"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def bundle_artifact(artifact: Artifact, kind: str | None, hashes: HashStore) -> Source:
    """Return the files that a node needs to run it. Hashes files that are new or changed."""
    folder = artifact.folder
    if EXPORTS[artifact.method].runtime == "llama.cpp":
        file = artifact.file_of(kind)
        return make_bundle("models", file.stem, folder, [file], hashes, member=file.name)
    try:
        files = list_own(folder, _is_sent)
    except ForeignFile as error:
        raise refused(error) from error
    return make_bundle("models", folder.name, folder, files, hashes)


def _is_sent(name: str) -> bool:
    is_shown = not name.startswith(".") and name != PROOF_FILE
    return is_shown and Path(name).suffix in _SENT_SUFFIXES
