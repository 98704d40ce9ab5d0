"""Take secrets and names of people out of a report.

Secrets go by their form (`agents/shared/files/secrets.py`). Names of people go where they are home
folders or logins: paths and addresses quote them everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from agents.shared.files.secrets import HIDDEN, hide_secrets, means_secret

PERSON = "USER"
_HOMES = re.compile(
    r"(?i)((?<![\w.-])/(?:home|Users)/|[A-Z]:(?:\\\\|\\|/)Users(?:\\\\|\\|/))([^/\\\s\"':;,]+)"
)
# Logins that identify no user.
_COMMON = frozenset(("root", "ubuntu", "debian", "user", "admin", "public", "default", "all users"))
_MIN_NAME = 3
# Longer texts are sentences, not names of settings.
_MAX_NAME = 64
# The end of a private key whose beginning was cut off: its lines of base64 have no other sign.
_END_OF_KEY = re.compile(r"\A(?:(?!-----BEGIN).)*?-----END [A-Z ]{0,40}PRIVATE KEY-----", re.DOTALL)
_LONG_TOKEN = re.compile(r"(?<![A-Za-z0-9+/=_-])[A-Za-z0-9+/_-]{40,}={0,2}(?![A-Za-z0-9+/=_-])")
_HEX = re.compile(r"[0-9a-f]{40,64}")


def find_people(texts: Iterable[str]) -> frozenset[str]:
    """Return the names of people whose home folders the texts mention."""
    found = {match[2] for text in texts for match in _HOMES.finditer(text)}
    return frozenset(name for name in found if _is_person(name))


def scrub(text: str, people: Iterable[str]) -> str:
    """Return a text without secrets, and with `USER` for each of the people.

    Args:
        text: of any kind.
        people: names of logins and home folders; empty: names stay.

    >>> scrub("anna@pc: /home/anna/x HF_TOKEN=hf_abcdefghijklmnop", ("anna",))
    'USER@pc: /home/USER/x HF_TOKEN=***'
    """
    text = hide_secrets(_END_OF_KEY.sub(HIDDEN, text))
    # A long random text that is no hash may be a key of an unlisted kind.
    text = _LONG_TOKEN.sub(_hide_random, text)
    for name in sorted(filter(_is_person, people), key=len, reverse=True):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", PERSON, text)
    return text


def scrub_json(value: Any, people: Iterable[str]) -> Any:
    """Return a plain value with every text in it scrubbed, so that it is JSON afterwards, too.

    >>> scrub_json({"password": "x", "rows": ["/home/anna"]}, ("anna",))
    {'password': '***', 'rows': ['/home/USER']}
    """
    if isinstance(value, str):
        return scrub(value, people)
    if isinstance(value, list):
        # A name and its value, such as `--token` and what follows it in an argv.
        names = ["", *(item if isinstance(item, str) else "" for item in value)]
        return [_scrub_named(name, item, people) for name, item in zip(names, value, strict=False)]
    if isinstance(value, dict):
        return {
            scrub(key, people): _scrub_named(_name_of(key, value), item, people)
            for key, item in value.items()
        }
    return value


def _name_of(key: str, fields: dict[str, Any]) -> str:
    """Return the name of a value: its key, or in a pair of `name` and `value` the name."""
    name = fields.get("name", fields.get("key"))
    return name if key.lower() == "value" and isinstance(name, str) else key


def _scrub_named(name: str, value: Any, people: Iterable[str]) -> Any:
    """Scrub a value; where its name means a secret, no text or number in it stays."""
    if isinstance(value, (dict, list)):
        items = value.values() if isinstance(value, dict) else value
        is_secret = means_secret(name, "x") and len(name) <= _MAX_NAME
        cleaned = [_scrub_named(name, item, people) for item in items] if is_secret else None
        if cleaned is None:
            return scrub_json(value, people)
        keys = [scrub(key, people) for key in value] if isinstance(value, dict) else None
        return cleaned if keys is None else dict(zip(keys, cleaned, strict=True))
    if isinstance(value, bool) or value is None or len(name) > _MAX_NAME:
        return value if not isinstance(value, str) else scrub(value, people)
    # Not if the value alone is recognised as well: then only the secret in it is replaced.
    if means_secret(name, str(value)) and hide_secrets(str(value), {}) == str(value):
        return HIDDEN
    return scrub_json(value, people)


def _is_person(name: str) -> bool:
    return len(name) >= _MIN_NAME and name.lower() not in _COMMON


def _hide_random(match: re.Match[str]) -> str:
    token = match[0]
    kinds = (str.islower, str.isupper, str.isdigit)
    is_random = all(any(test(sign) for sign in token) for test in kinds)
    # A path of files has many short parts; hashes are wanted, to compare them.
    is_path = token.count("/") > 1 or max(map(len, re.split(r"[/_-]", token))) < 16
    return HIDDEN if is_random and not is_path and not _HEX.fullmatch(token) else token
