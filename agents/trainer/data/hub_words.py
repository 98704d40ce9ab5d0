"""Patterns for downloads from the Hugging Face hub, and explanations of failed ones.

Separate from reading data, since a master on Windows also downloads models.
"""

from __future__ import annotations

from agents.errors import ExpectedError

TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
"""Files of a tokenizer, as patterns of the hub's tools."""
NO_TOKENIZER_FILES = ["*/*", "*.index.json"]
"""Files of other formats and lists of weights, which match those patterns."""
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]
"""Files of a model, copies of its weights included, as patterns of the hub's tools."""
HUB = "https://huggingface.co"
_GIVE_TOKEN = "give the node your token: rackless nodes token --give, or the window's settings"


def explain_download(name: str, kind: str, page: str, error: Exception) -> ExpectedError:
    """Return an error that explains a failed download: usually a licence or a missing token."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return ExpectedError(
            f"{name} is behind a licence on the hub that this node's account has not accepted.",
            f"Accept it at {page}, then {_GIVE_TOKEN}",
        )
    if isinstance(error, RepositoryNotFoundError):
        return ExpectedError(
            f"{name} is not a {kind} on this node, and on the hub it is missing or private.",
            f"Check the spelling; if it is private, {_GIVE_TOKEN}",
        )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ExpectedError(
        f"{name} is not a {kind} on this node and cannot be fetched from the hub: {lines[0]}",
        f"Check the spelling and the network, or give the path of a {kind}",
    )
