"""Remove secrets from texts that users may paste into a bug report: errors, traces and logs.

Secrets reach such texts unintentionally: a library quotes the headers of a request, a user types a
password into an address, a traceback quotes a variable. So texts are cleaned on output, by the form
of secrets and by the environment variables that hold some.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

HIDDEN = "***"
# Shorter values, such as `yes`, would also remove ordinary words.
_MIN_CHARS = 8
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{12,}|(?:ghp|gho|ghs|github_pat|glpat|sk|xoxb|xoxp)[_-][\w-]{16,}"
    r"|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)"
)
_HEADER = re.compile(
    r"((?i:authorization)['\"]?\s*[:=]|\bBearer\b)(?:\s*b?['\"]?(?i:bearer|basic)\b)?"
    r"\s*['\"]?[\w.+/=~-]{8,}"
)
_NAMED = re.compile(
    r"(?i)\b(password|passwd|passphrase|secret|api[_-]?key|(?:access|auth|hub|hf)[_-]?token)"
    r"(\\*['\"]?\s*[:=]\s*\\*['\"]?)(?:[^\s'\",;\\]|\\(?!['\"]))+"
)
_IN_QUERY = re.compile(r"(?i)([?&](?:token|key|signature|x-amz-\w+)=)(?:[^\s&'\",\\]|\\(?!['\"]))+")
_IN_ADDRESS = re.compile(r"(?<![\w.])([^\s:/@,'\"<>()]{1,64}):[^\s/@,'\"]{1,256}@(?=[\w\[])")
_KEY = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY[A-Z -]*-----|\Z)",
    re.DOTALL,
)
_SECRET_NAME = re.compile(r"(?i)(TOKEN|SECRET|PASSWORD|PASSPHRASE|API_KEY)$")


def hide_secrets(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return a text without tokens, passwords and private keys.

    Args:
        text: any text.
        environ: variables; values are removed whose names mean secrets. None: this process's.

    >>> hide_secrets("https://anna:hunter2@x.org?token=abc, hf_abcdefghijklmnop", {})
    'https://anna:***@x.org?token=***, ***'
    >>> hide_secrets("Authorization: Bearer abcdefgh, 40 tokens: 5, node@10.0.0.2:22", {})
    'Authorization: ***, 40 tokens: 5, node@10.0.0.2:22'
    """
    # Keys first: the other patterns would match parts of one and leave the rest.
    text = _KEY.sub(HIDDEN, text)
    for name, value in (os.environ if environ is None else environ).items():
        if _SECRET_NAME.search(name) and len(value) >= _MIN_CHARS:
            text = text.replace(value, HIDDEN)
    text = _TOKENS.sub(HIDDEN, text)
    text = _HEADER.sub(rf"\1 {HIDDEN}", text)
    text = _NAMED.sub(rf"\1\2{HIDDEN}", text)
    text = _IN_QUERY.sub(rf"\1{HIDDEN}", text)
    return _IN_ADDRESS.sub(rf"\1:{HIDDEN}@", text)


def format_trace(error: BaseException) -> str:
    """Return the traceback of an error without secrets."""
    import traceback  # slow (10 ms), and rarely needed

    return hide_secrets("".join(traceback.format_exception(error)))
