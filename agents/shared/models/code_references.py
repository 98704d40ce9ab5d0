"""Remove references to code from a model's JSON files; they are not sent, copied or exported.

`auto_map` tells Transformers to run classes of a repository instead of its own. Models of a kind
that Transformers knows do not need it, and others cannot be trained here.
"""

from __future__ import annotations

import json
from typing import Any

NAMES = frozenset({"auto_map", "custom_pipelines", "custom_generate"})
"""Keys whose values name code, in any object of any JSON file of a model."""
MOST_BYTES = 16 << 20
"""Maximum size of a file that is searched, in bytes: only vocabularies are larger."""
_VOCABULARIES = ("tokenizer.json", "vocab.json", ".index.json")


def may_name_code(name: str, size_bytes: int) -> bool:
    """Return whether libraries search a file of this name for such keys.

    >>> may_name_code("config.json", 900), may_name_code("tokenizer.json", 9 << 20)
    (True, False)
    """
    is_config = name.endswith(".json") and not name.endswith(_VOCABULARIES)
    return is_config and size_bytes <= MOST_BYTES


def without_code(data: bytes) -> bytes | None:
    """Return a JSON file's content without the keys that name code, or None if it has none.

    Invalid JSON is left unchanged, since its reader reports it.

    >>> without_code(b'{"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}}')
    b'{\\n  "model_type": "llama"\\n}\\n'
    """
    # Escapes can spell a name differently; most files have neither escapes nor names.
    if b"\\u" not in data and not any(name.encode() in data for name in NAMES):
        return None
    try:
        value = json.loads(data)
        if not _drop(value):
            return None
        return json.dumps(value, indent=2).encode("ascii") + b"\n"
    except (ValueError, RecursionError):
        return None


def _drop(value: Any) -> bool:
    """Remove the keys at any depth; return whether any was found."""
    # An own stack, since a foreign file may be nested very deeply.
    found, left = False, [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            for name in NAMES & item.keys():
                del item[name]
                found = True
            left += item.values()
        elif isinstance(item, list):
            left += item
    return found
