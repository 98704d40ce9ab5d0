"""Remove from a model's JSON files what names code to run: it is neither sent, copied nor exported.

`auto_map` tells Transformers to run classes of a repository instead of its own. A model of a kind
that Transformers knows does not need it, and others cannot be trained here.
"""

from __future__ import annotations

import json
from typing import Any

NAMES = frozenset({"auto_map", "custom_pipelines", "custom_generate"})
"""Keys whose values name code, in any object of any JSON file of a model."""
MOST_BYTES = 16 << 20
"""Size above which a file is not read for them: only vocabularies are so large."""
_VOCABULARIES = ("tokenizer.json", "vocab.json", ".index.json")


def may_name_code(name: str, size_bytes: int) -> bool:
    """Return whether libraries look for such keys in a file of this name.

    >>> may_name_code("config.json", 900), may_name_code("tokenizer.json", 9 << 20)
    (True, False)
    """
    is_config = name.endswith(".json") and not name.endswith(_VOCABULARIES)
    return is_config and size_bytes <= MOST_BYTES


def without_code(data: bytes) -> bytes | None:
    """Return a JSON file's content without the keys that name code; None: it has none.

    What cannot be read is left as it is: whoever loads it says so.

    >>> without_code(b'{"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}}')
    b'{\\n  "model_type": "llama"\\n}\\n'
    """
    # Escapes can spell any name otherwise, and most files have neither.
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
    """Remove the keys everywhere below; return whether there was one."""
    found, left = False, [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            for name in NAMES & one.keys():
                del one[name]
                found = True
            left += one.values()
        elif isinstance(one, list):
            left += one
    return found
