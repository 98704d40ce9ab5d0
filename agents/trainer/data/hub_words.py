"""Patterns for downloads from the Hugging Face hub, and explanations of failed ones.

Separate from reading data, since a master on Windows also downloads models.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from agents.errors import ExpectedError, explain_os_error
from agents.shared.data.files import KINDS

TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
"""Files of a tokenizer, as patterns of the hub's tools."""
NO_TOKENIZER_FILES = ["*/*", "*.index.json"]
"""Files of other formats and lists of weights, which match those patterns."""
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]
"""Files of a model, copies of its weights included, as patterns of the hub's tools."""
CONVERTED = "refs/convert/parquet"
"""Revision of a data set with the hub's own conversion to Parquet."""
OWN_FILES = [f"*{suffix}" for suffix in KINDS if suffix != ".md"]
"""Files of a data set, as patterns of the hub's tools."""
HUB = "https://huggingface.co"
_GIVE_TOKEN = "give the node your token: rackless nodes token --give, or the window's settings"


def name_converted(splits: Iterable[str], part: str = "*") -> list[str]:
    """Return the patterns of converted files.

    >>> name_converted(["train"])
    ['*/train/*.parquet', '*/partial-train/*.parquet']
    """
    # Of a large data set the hub converts only the first part, in folders named `partial-SPLIT`.
    return [f"{part}/{start}{word}/*.parquet" for word in splits for start in ("", "partial-")]


def explain_download(name: str, kind: str, page: str, error: Exception) -> ExpectedError:
    """Return an error that explains a failed download: usually a licence or a missing token."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return ExpectedError(
            f"{name} is behind a licence on the hub that this node's account has not accepted.",
            f"Accept it at {page}, then {_GIVE_TOKEN}",
        )
    if isinstance(error, RevisionNotFoundError):
        return ExpectedError(
            f"{name} has no such revision on the hub.", f"See its branches and tags at {page}"
        )
    if isinstance(error, RepositoryNotFoundError):
        return ExpectedError(
            f"{name} is not a {kind} on this node, and on the hub it is missing or private.",
            f"Check the spelling; if it is private, {_GIVE_TOKEN}",
        )
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    if status == 401:
        return ExpectedError(
            f"The hub does not accept this node's token, for {name}.",
            f"Make one at {HUB}/settings/tokens, then {_GIVE_TOKEN}",
        )
    if status == 429:
        return ExpectedError(
            f"The hub answers no more requests of this node for now, so {name} is not downloaded.",
            "Wait some minutes, then download it again: what is complete is kept",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return explain_os_error(error, f"downloading {name}")
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ExpectedError(
        f"{name} is not a {kind} on this node and cannot be fetched from the hub: {lines[0]}",
        f"Check the spelling and the network, or give the path of a {kind}",
    )
