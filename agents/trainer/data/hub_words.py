"""What is asked of the Hugging Face hub, and why it did not give it.

Apart from the reading of data, since a master on Windows downloads models as well.
"""

from __future__ import annotations

from agents.errors import ExpectedError

TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
"""Patterns of the hub's tools."""
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]
"""What training needs of a model, as patterns of the hub's tools."""
HUB = "https://huggingface.co"
_GIVE_TOKEN = "give the node your token: rackless nodes token --give, or the window's settings"


def explain_download(name: str, kind: str, page: str, error: Exception) -> ExpectedError:
    """Return an error that explains why a download failed: usually a licence or no token."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return ExpectedError(
            f"{name} is behind a licence on the hub, which does not let this node in.",
            f"Accept it at {page}, then {_GIVE_TOKEN}",
        )
    if isinstance(error, RepositoryNotFoundError):
        return ExpectedError(
            f"{name} is no {kind} on this node, and the hub knows none or keeps it private.",
            f"Check the spelling; if it is private, {_GIVE_TOKEN}",
        )
    said = str(error).strip().splitlines() or [type(error).__name__]
    return ExpectedError(
        f"{name} is no {kind} on this node and cannot be fetched from the hub: {said[0]}",
        f"Check the spelling and the network, or give the path of a {kind}",
    )
