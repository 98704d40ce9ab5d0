"""Store the hub token on a node, in the file of the hub's own tools, so that all downloads use it.

A token that the user has stored is not replaced. Tokens are compared by digest, so the token itself
is sent only to be stored. It is never logged or part of an answer.
https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
"""

from __future__ import annotations

from collections.abc import Mapping

from agents.contract.hub import digest_of, read_file, read_token, token_path
from agents.contract.requests.hub import NodeTokenPlace
from agents.errors import ExpectedError, explain_os_error
from agents.state import write_bytes


def find_token(environ: Mapping[str, str], digest: str) -> NodeTokenPlace:
    """Return whether this node has a token, and whether it has this digest."""
    token = read_token(environ)
    if not token:
        return "none"
    return "same" if digest_of(token) == digest else "other"


def keep_token(environ: Mapping[str, str], token: str) -> NodeTokenPlace:
    """Store a token unless the node has one already.

    Raises:
        ExpectedError: the disk is full or read-only.
    """
    place = find_token(environ, digest_of(token))
    if place != "none":
        return place
    path = token_path(environ)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise explain_os_error(error, f"making {path.parent}") from error
    write_bytes(path, token.encode("utf-8"))
    return "same"


def forget_token(environ: Mapping[str, str], digest: str) -> NodeTokenPlace:
    """Delete the token if it has this digest.

    Raises:
        ExpectedError: it cannot be deleted.
    """
    path = token_path(environ)
    # The user may have logged in with another token since, which must stay.
    if digest_of(read_file(path)) == digest:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ExpectedError(
                f"{path} cannot be deleted: {error.strerror}.", "Delete it on that PC"
            ) from error
    return find_token(environ, digest)
