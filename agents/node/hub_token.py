"""Keep the hub token on a node, in the file of the hub's own tools, so that every download finds
it.

A token of the user's own is left alone. A digest is enough to compare tokens, so the token itself
travels only to be kept. It is never logged, nor part of an answer.
https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
"""

from __future__ import annotations

from collections.abc import Mapping

from agents.contract.hub import digest_of, read_file, read_token, token_path
from agents.contract.requests.hub import NodeTokenPlace
from agents.errors import ExpectedError, explain_os_error
from agents.state import write_bytes


def find_token(environ: Mapping[str, str], digest: str) -> NodeTokenPlace:
    """Return whether this node has a token, and whether its digest is this one."""
    token = read_token(environ)
    if not token:
        return "none"
    return "same" if digest_of(token) == digest else "other"


def keep_token(environ: Mapping[str, str], token: str) -> NodeTokenPlace:
    """Keep a token, unless there is one already.

    Raises:
        ExpectedError: the disk is full or may not be written.
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
    """Delete the token with that digest; any other stays.

    Raises:
        ExpectedError: it may not be deleted.
    """
    path = token_path(environ)
    # The user may have logged in with another token since; that one is theirs.
    if digest_of(read_file(path)) == digest:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ExpectedError(
                f"{path} cannot be deleted: {error.strerror}.", "Delete it on that PC"
            ) from error
    return find_token(environ, digest)
