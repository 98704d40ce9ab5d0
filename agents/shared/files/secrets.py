"""Remove secrets from texts that users may paste into a bug report: errors, traces and logs.

Secrets reach such texts unintentionally: a library quotes the headers of a request, a user types a
password into an address, a traceback quotes a variable. So texts are cleaned on output: tokens of
known services by their form, and other secrets by the name before them, in every notation of
settings, programs and requests. A secret without a name and without a known form stays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import IntEnum

HIDDEN = "***"
# Shorter values, such as `yes`, would also remove ordinary words.
_MIN_CHARS = 8
_MAX_NAME = 64
_FORMS = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:hf|npm|gsk|nvapi|pypi|tgp_v1|dop_v1|dckr_pat|github_pat|gh[opsur]|glpat|glrt|wandb_v1)"
    r"[_-][\w-]{12,}"
    r"|api_org_[A-Za-z0-9]{16,}|(?:sk|rk|pk)[-_](?:ant|live|test|proj|or)?[\w-]{16,}"
    r"|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w.-]{16,}"
    r"|hv[sb]\.[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}|AGE-SECRET-KEY-1[0-9A-Z]{20,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}(?:\.[\w-]*)?)"
)
_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY.*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z -]*-----|\Z)"
    r"|(?<=Private-Lines: )\d+(?:(?:\r?\n|\\n)[A-Za-z0-9+/=]+)+"
    r"|(?:b3BlbnNzaC1rZXktdjE[A-Za-z0-9+/]*)(?:(?:\r?\n|\\n)?[A-Za-z0-9+/=]{16,})*",
    re.DOTALL,
)
# The whole value, since it may have several words: a scheme and its credentials.
_HEADER = re.compile(
    r"(?i)((?:proxy-)?authorization|(?<![\w-])(?:set-)?cookie)(\\*['\"]?\s*[:=,]\s*)"
    r"(?:b?(\\*['\"])(?:(?!\3)[^\n])*|(?:[A-Za-z][\w-]*[ \t]+)?[^\s,'\"\\]+"
    r"(?:(?:;[ \t]*|,[ \t]*(?=\w+=))[^\s,;'\"\\]+)*)"
)
_BEARER = re.compile(r"(?i)\b(bearer[ \t]+b?['\"]?)[\w.+/=~-]{8,}")
_PLAIN_LOGIN = re.compile(r"(\bBasic[ \t]+)(?=[A-Za-z0-9+/]*[A-Z0-9+/=])[A-Za-z0-9+/]{7,}={0,2}")
_LOGIN = re.compile(r"(?i)(\blogin\(\s*b?(['\"]))(?:(?!\2)[^\n])+")
_FLAG_USER = re.compile(
    r"((?<![\w-])(?:-u|--user|--proxy-user)[ =]['\"]?[^\s:'\"]{1,64}:)[^\s'\"]+"
)
_MACHINE = re.compile(r"(\blogin\s+\S+\s+password\s+)\S+")
_COMMANDS = re.compile(
    r"(\bsshpass[ \t]+-p[ \t]?|\blogin\b[^\n]{0,80}?[ \t]-p[ \t=]|\blogin[ \t]+(?:--\w+[ \t]+){0,3}"
    r"(?=\w{0,256}\d)(?=\w{20}))[^\s'\"]+"
)
_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://[^\s:/@'\"<>]{0,64}:)[^\s/'\"<>]{1,512}@")
_ALONE_IN_URL = re.compile(
    r"(\b[a-z][a-z0-9+.-]{1,20}://)(?=[\w.~%-]*\d)[\w.~%-]{16,256}@(?=[\w\[])"
)
_IN_ADDRESS = re.compile(r"(?<![\w.])([^\s:/@,'\"<>()]{1,64}):[^\s/@,'\"]{1,256}@(?=[\w\[])")
_IN_QUERY = re.compile(
    r"(?i)([?&#](?:sig|signature|code|auth|x-(?:amz|goog)-\w+)=)(?:[^\s&'\",\\]|\\(?!['\"]))+"
)

_PASSWORDS = (
    *(
        "password",
        "passwords",
        "passwd",
        "passphrase",
        "passcode",
        "pwd",
        "pw",
        "secret",
        "secrets",
    ),
    *("credential", "credentials"),
)
"""Last words of names whose values are always secrets."""
_SECRET_BEFORE = frozenset(
    re.findall(
        r"\w+",
        """
        access account admin api app auth bearer bot client encryption hf hub jupyter license master
        oauth personal private refresh registry secret service session shared signing user wandb
        """,
    )
)
"""Words before `key`, `token` or `pass` that make any value a secret."""
_HARMLESS_BEFORE = frozenset(
    re.findall(
        r"\w+",
        """
        a any audio backward begin bos by cache class cls column config dict each end eos every
        field file first foreign forward full group host image index known last layer map mask max
        model new next no node num one option other pad parent partition per prev primary public
        query row run second sep setting sort special start state stop target that the this tool
        unexpected unk unknown value video your
        """,
    )
)
"""Words before them that mean another thing, such as the end of a text."""
_EMPTY = frozenset(
    re.findall(
        r"\w+",
        """
        true false none null nil yes no on off str bytes string int object optional undefined
        missing required set unset empty
        """,
    )
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_NUMBER = re.compile(r"[-+]?[0-9][0-9_,.]*(?:[eE][-+]?[0-9]+)?(?:[a-zA-Z%/]{0,3})")
_RUN_ID = re.compile(r"[0-9]{8}-[0-9]{6}-\w{1,8}")
_PUBLIC = re.compile(r"SHA256:|MD5:|(?:ssh|ecdsa|sk-ssh)-[a-z0-9-]+$|GPU-|MIG-")
_SPECIAL = re.compile(r"<[^>]{0,60}>|\[[A-Z_]{1,20}\d*\]|\$\{?\w+\}?|%\w+%|\*+|[\W_]{1,3}")
_PATH = re.compile(r"(?:[A-Za-z]:[\\/]|~?/|\.{1,2}/)[\w.@+ /\\~-]*")
_HEX = re.compile(r"[0-9a-fA-F]{32,128}")
_QUOTED = r"""[rbuf]{0,2}(?P<quote>\\*(?:'''|\"\"\"|['"`]))"""
_S, _T = r"\s{0,9}", r"[ \t]{0,9}"
_NAMED = re.compile(
    r"(?i:(?:pass(?:word|wd|phrase|code)|secret|credential)s?|(?:key|token)s?|pass|pwd?|pat)"
    r"(?:[_-]?[0-9]{1,3})?(?![A-Za-z0-9_-])"
    # How the name ends, what stands between, and how the value begins.
    r"(?P<close>\\*['\"`]?\]?\)?)(?P<between>"
    # Pairs of `name` and `value` in JSON, XML and YAML.
    rf"{_S},?{_S}\\*['\"]?value\\*['\"]?{_S}[:=]{_S}|{_S}\n{_T}-?{_T}value{_T}[:=]{_T}"
    # A field with its type, and one with its value on the next line.
    rf"|{_S}:{_S}(?:str|bytes|string|SecretStr|(?:Optional\[)?str\]?(?:{_S}\|{_S}None)?){_S}={_S}"
    rf"|{_S}:{_T}\n[ \t]+(?=[^\s:-]\S*{_T}(?:\n|$))"
    rf"|{_S}(?<!\n)(?:=>|->|:=|:-|==|=|:|%3[dD]|\\u003[dD])[^\S\n]{{0,9}}|{_S}:{_S}(?=[\[{{\\'\"])"
    rf"|{_T},{_S}(?=[rbuf]{{0,2}}\\*['\"])|(?<!['\"])>"
    # An argument, or a word in a sentence.
    rf"|(?:[ \t]{{1,9}}(?:is|was)|{_T}\()?[ \t]{{1,9}}(?=\S)|{_T}\()"
)
_BLOCK = re.compile(r"[|>][+-]?[0-9]?[ \t]*\n(?:(?P<deep>[ \t]+)[^\n]*(?:\n(?P=deep)[^\n]*)*)")
_STRING = re.compile(
    rf"{_QUOTED}(?P<text>(?:\\.|(?!(?P=quote)).){{0,8192}})(?:(?P=quote)|\Z)", re.DOTALL
)
_ESCAPED_STRING = re.compile(
    r"[rbuf]{0,2}(?P<quote>\\+['\"])(?P<text>(?:(?!(?P=quote)).){0,8192})(?:(?P=quote)|\Z)",
    re.DOTALL,
)
_MADE = re.compile(r"[A-Za-z_.]{1,40}\((?=[rbuf]{0,2}\\*['\"])")
_LIST = re.compile(r"[\[({](?=\s*[rbuf]?\\*['\"])[^\])}]{0,8192}[\])}]?")
_BARE = re.compile(r"(?:[^\s'\"`\\]|\\(?!['\"nrt])){1,4096}")
_REST = re.compile(r"[^\n]{1,4096}")
_LINE_START = re.compile(
    r"(?:^|[\n;])[ \t]*(?:-[ \t]+)?(?:export|set|setx|env|declare -x)?[ \t]*$", re.I
)
_COMMAND = re.compile(r"(?i)(?:^|[\s;&|])(?:env|setx|arg|export|set)[ \t]+$")
_FLAG = re.compile(r"(?:^|[\s'\"=(\[,])--?$")
_INSIDE = re.compile(r"[,;&<>()\[\]{}|]")


class _Sureness(IntEnum):
    """How surely a name means a secret."""

    NO = 0
    IF_RANDOM = 1
    """If the value looks random."""
    LIKELY = 2
    """Unless the value is a number, path, public key or special token."""
    ALWAYS = 3


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
        if len(value) >= _MIN_CHARS and means_secret(name, value):
            text = text.replace(value, HIDDEN)
    text = _FORMS.sub(HIDDEN, text)
    text = _HEADER.sub(lambda found: f"{found[1]}{found[2]}{found[3] or ''}{HIDDEN}", text)
    for pattern in (_BEARER, _PLAIN_LOGIN, _LOGIN, _FLAG_USER, _MACHINE, _COMMANDS, _IN_QUERY):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    text = _IN_URL.sub(rf"\1{HIDDEN}@", text)
    text = _hide_named(text)
    text = _ALONE_IN_URL.sub(rf"\1{HIDDEN}@", text)
    return _IN_ADDRESS.sub(rf"\1:{HIDDEN}@", text)


def means_secret(name: str, value: str) -> bool:
    """Return whether a setting or variable of this name holds a secret.

    >>> [means_secret(*pair) for pair in (
    ...     ("HF_TOKEN", "tulips-in-may"), ("eos_token", "</s>"), ("SSH_KEY", "/home/anna/id"))]
    [True, False, False]
    """
    return _is_secret(_judge_name(name), name, value)


def format_trace(error: BaseException) -> str:
    """Return the traceback of an error without secrets."""
    import traceback  # slow (10 ms), and rarely needed

    return hide_secrets("".join(traceback.format_exception(error)))


# ---------------------------------------------------------------- names


def _judge_name(name: str) -> _Sureness:
    words = [word for word in _WORDS.findall(name) if not word.isdigit()]
    if not words:
        return _Sureness.NO
    last, before = words[-1].lower(), words[-2].lower() if len(words) > 1 else ""
    if last.endswith(_PASSWORDS):
        return _Sureness.ALWAYS
    for kind in ("key", "token", "pass", "pat"):
        is_plural = last.endswith(f"{kind}s")
        stem = last.removesuffix("s" if is_plural else "").removesuffix(kind)
        if stem == last or len(stem) == len(last) - is_plural:
            continue
        whose = stem or before
        if whose in _SECRET_BEFORE:
            return _Sureness.ALWAYS
        if is_plural or whose in _HARMLESS_BEFORE:
            return _Sureness.NO
        if not stem:
            return _Sureness.LIKELY if before or name.isupper() else _Sureness.IF_RANDOM
        # `MYKEY` and `hftoken`, but no monkey.
        return _Sureness.IF_RANDOM if name.isupper() or kind == "token" else _Sureness.NO
    return _Sureness.NO


def _is_secret(sure: _Sureness, name: str, value: str) -> bool:
    value = value.strip()
    if not value or value.lower() in _EMPTY or _SPECIAL.fullmatch(value):
        return False
    is_key = name.lower().rstrip("0123456789_-").endswith(("key", "keys"))
    is_path = _is_path(value)
    if sure == _Sureness.ALWAYS:
        return not (is_path or _PUBLIC.match(value) if is_key else name.isupper() and is_path)
    if sure == _Sureness.LIKELY:
        return not (is_path or _NUMBER.fullmatch(value) or _PUBLIC.match(value))
    return sure == _Sureness.IF_RANDOM and _is_random(value)


def _is_path(value: str) -> bool:
    longest = max(re.split(r"[/\\]", value), key=len)
    return bool(_PATH.fullmatch(value)) and not (len(longest) >= 24 and _is_random(longest))


def _is_random(value: str) -> bool:
    """Return whether a value cannot be words, a run id, a name of a layer or a public key."""
    if _HEX.fullmatch(value):
        return True
    if len(value) < 16 or _RUN_ID.fullmatch(value) or _PUBLIC.match(value):
        return False
    longest = max(re.findall(r"[A-Za-z0-9+=]+", value), key=len, default="")
    return len(longest) >= 12 and any(map(str.isdigit, longest)) and any(map(str.isalpha, longest))


# ---------------------------------------------------------------- values after their names


def _hide_named(text: str) -> str:
    """Return a text without the values that follow names of secrets."""
    kept: list[str] = []
    done = 0
    position = 0
    while found := _NAMED.search(text, position):
        position = found.end()
        span = _find_secret(text, found)
        if span is not None:
            kept += [text[done : span[0]], HIDDEN]
            done = position = span[1]
    return "".join([*kept, text[done:]])


def _find_secret(text: str, found: re.Match[str]) -> tuple[int, int] | None:
    """Return the part of a text to hide after a name; None: it is no secret."""
    between, end = found["between"], found.end()
    ahead = text[max(0, found.start() - _MAX_NAME) : found.start()]
    start = found.start() - len(_read_backwards(ahead))
    name = text[start : found.start("close")]
    sure = _judge_name(name)
    if sure == _Sureness.NO:
        return None
    lead = text[max(0, start - _MAX_NAME) : start]
    is_flag = bool(_FLAG.search(lead)) or name.startswith("-")
    is_field = lead.endswith(("?", "&", "(", "(\n")) or is_flag
    if (
        sure == _Sureness.IF_RANDOM
        and name.islower()
        and (is_field or (name == "pass" and _LINE_START.search(lead)))
    ):
        sure = _Sureness.LIKELY
    if not between.strip(" \t(") or between.strip() in ("is", "was"):
        # Words that follow a name are a sentence, unless it is an argument.
        is_argument = (is_flag or "\t" in between or _COMMAND.search(lead)) and "(" not in between
        sure = sure if is_argument else _Sureness.IF_RANDOM
    return _find_value(text, end, name, sure, lead, between)


def _find_value(
    text: str, at: int, name: str, sure: _Sureness, lead: str, between: str
) -> tuple[int, int] | None:
    if block := _BLOCK.match(text, at):
        return block.span() if _is_secret(sure, name, block[0].partition("\n")[2]) else None
    if made := _MADE.match(text, at):
        at = made.end()
    for pattern in (_ESCAPED_STRING, _STRING):
        if string := pattern.match(text, at):
            is_hidden = _is_secret(_weigh_alone(sure, name, string["text"]), name, string["text"])
            return string.span("text") if is_hidden else None
    if several := _LIST.match(text, at):
        return several.span() if sure >= _Sureness.LIKELY else None
    line = _REST.match(text, at)
    is_setting = between.strip() in (":", "=") and _LINE_START.search(lead)
    is_password = name.lower().endswith((*_PASSWORDS, "pass"))
    if is_setting and line and is_password and name.islower() and '"' not in line[0]:
        return line.span() if _is_secret(sure, name, line[0]) else None
    bare = _BARE.match(text, at)
    if bare is None:
        return None
    value = bare[0]
    # Inside a call, an address or JSON, the value ends with the field.
    if not (is_setting and name.isupper()):
        value = _INSIDE.split(value, maxsplit=1)[0].rstrip(".") or value
    if between.strip():
        sure = _weigh_alone(sure, name, value)
    return (at, at + len(value)) if _is_secret(sure, name, value) else None


def _weigh_alone(sure: _Sureness, name: str, value: str) -> _Sureness:
    """Return how surely a value is secret if its name is `token` and no more."""
    is_long = len(value) >= _MIN_CHARS and not value.isalpha() and " " not in value
    return max(sure, _Sureness.LIKELY) if name.lower() == "token" and is_long else sure


def _read_backwards(ahead: str) -> str:
    """Return the beginning of a name that ends at the end of a text, `api ` of `api key`, too."""
    whole = re.search(r"[\w.-]*$", ahead)
    name = whole[0] if whole else ""
    before = ahead[: len(ahead) - len(name)]
    word = re.search(r"([A-Za-z]{2,12}) $", before)
    if not name and word and word[1].lower() in _SECRET_BEFORE | _HARMLESS_BEFORE:
        return word[0]
    return name
