"""Recognize columns that change what a row means, by their names and values.

A row is trained wrongly where a column that says so is ignored: the answer that `label: false`
calls a bad one, the question about a picture that nobody shows. Names are compared word by word, so
that `is_good`, `isGood` and `thumbs-up` are known too; values decide where names cannot.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, Literal

Consequence = Literal["refuse", "warn", "note"]
"""`refuse`: the data is not trained; `warn`: named in preview, plan and run; `note`: listed."""
ALL_FORMATS = ("chat", "alpaca", "preference", "text")
_ASKED = ("chat", "alpaca", "preference")
_CHECKED_ITEMS = 16


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnKind:
    """One meaning that a column can have."""

    kind: str
    words: frozenset[str]
    """Words of a name, one of which is enough."""
    refused_in: tuple[str, ...] = ()
    """Formats whose rows are refused; in others the column is named."""
    noted_in: tuple[str, ...] = ()
    """Formats in which it is merely listed."""
    otherwise: Consequence = "warn"
    """Consequence in the other formats."""
    says: str
    """Follows the column's name in a message."""
    hint: str
    """What to do; {column} is its name."""


_KEEP = "or set data.ignore_columns: [{column}] to train on them all the same"
KINDS = (
    ColumnKind(
        kind="media",
        words=_words(
            "image images img imgs picture pictures photo photos pixel pixels video videos audio"
            " audios waveform spectrogram screenshot screenshots"
        ),
        refused_in=_ASKED,
        says="holds pictures, sound or video, which are not trained",
        hint=f"Take these rows out, {_KEEP}",
    ),
    ColumnKind(
        kind="history",
        words=_words("history histories dialog dialogue dialogues previous prior preceding"),
        refused_in=_ASKED,
        says="holds earlier turns of the conversation, which would be left out",
        hint=f"Write each row as 'messages' with all turns, {_KEEP}",
    ),
    ColumnKind(
        kind="system",
        words=frozenset({"system", "sys"}),
        refused_in=_ASKED,
        otherwise="note",
        says="holds a system prompt, which would be left out",
        hint=f"Rename it to 'system', {_KEEP}",
    ),
    ColumnKind(
        kind="tools",
        words=_words("tool tools function functions apis"),
        refused_in=_ASKED,
        otherwise="note",
        says="offers tools, which are not trained",
        hint=f"Take these rows out, {_KEEP}",
    ),
    ColumnKind(
        kind="weight",
        words=_words(
            "weight weights mask masks masked loss train trainable training learn learnable"
        ),
        refused_in=ALL_FORMATS,
        says="asks to learn these rows less, or in part, which is not possible",
        hint=f"Take these rows out, {_KEEP}",
    ),
    ColumnKind(
        kind="context",
        words=_words(
            "context contexts passage passages document documents paragraph paragraphs knowledge"
            " background article choices options candidates endings premise hypothesis"
            " story"
        ),
        refused_in=("alpaca", "preference"),
        otherwise="note",
        says="holds what the question is about, which would be left out",
        hint=f"Rename it to 'input', or write it into the question, {_KEEP}",
    ),
    ColumnKind(
        kind="score",
        words=_words(
            "score scores rating ratings reward rewards rank ranking grade stars points"
            " helpfulness correctness coherence complexity verbosity quality confidence upvotes"
            " downvotes votes margin toxicity"
        ),
        noted_in=("text", "preference"),
        says="rates the answers, which is not used: all are learned alike",
        hint="Take out the rows that should not be learned",
    ),
    ColumnKind(
        kind="verdict",
        words=_words(
            "label labels good bad kto desirable undesirable preferred preference accepted accept"
            " acceptable rejected reject approved approve disapproved correct incorrect wrong"
            " helpful unhelpful harmful harmless liked like disliked dislike valid invalid safe"
            " unsafe success successful failed fail passed pass thumb thumbs thumbsup thumbsdown"
            " upvoted downvoted verified verdict feedback vote review judgement judgment chosen"
            " positive negative toxic flagged deleted spam hallucination hallucinated usable keep"
            " win winner best outcome reaction"
        ),
        refused_in=_ASKED,
        says="calls rows bad examples, and they would be learned as good ones",
        hint="Take these rows out, pair them with good answers ('chosen' and 'rejected', "
        f"objective: dpo), {_KEEP}",
    ),
    ColumnKind(
        kind="reasoning",
        words=_words(
            "reasoning thinking thought thoughts rationale explanation cot chain"
        ),
        says="holds the reasoning before the answer, which is left out",
        hint="Write it into the answer if it should be learned",
    ),
    ColumnKind(
        kind="split",
        words=frozenset({"split", "fold", "subset"}),
        says="names a held-out split, and the rows are learned all the same",
        hint="Take these rows out, or name them in data.eval",
    ),
    ColumnKind(
        kind="turn",
        words=frozenset({"role", "parent", "speaker"}),
        refused_in=("text",),
        otherwise="note",
        says="tells that the row is one turn of a conversation, which would be learned as a text "
        "of its own",
        hint=f"Write each conversation as one row of 'messages', {_KEEP}",
    ),
    ColumnKind(
        kind="question",
        words=frozenset(),  # the names that `columns` knows
        refused_in=("alpaca", "preference"),
        says="holds another part of the question, which would be left out",
        hint=f"Join the parts in one column, or rename one to 'input', {_KEEP}",
    ),
    ColumnKind(
        kind="answer",
        words=frozenset(),
        says="holds another answer, which is not learned",
        hint="Check that the column which is learned is the right one",
    ),
    ColumnKind(
        kind="reversed",
        words=frozenset(),
        says="rates the chosen answer below the rejected one",
        hint="Check which of the two is the better one",
    ),
    ColumnKind(
        kind="placeholder",
        words=frozenset(),
        says="stands in the texts for a picture, sound or video, and is learned as it is spelled",
        hint="Take these rows out if they make no sense without it",
    ),
    ColumnKind(
        kind="skipped",
        words=frozenset(),
        says="is not trained, so these rows are left out",
        hint="Take these rows out, or write what it says into the text",
    ),
    ColumnKind(
        kind="template",
        words=frozenset(),
        says="is left out, because the model's chat template has no place for it",
        hint="Write it into the message's content if it should be learned",
    ),
    ColumnKind(
        kind="cut",
        words=frozenset(),
        says="",
        hint="Raise sequence_tokens, or divide long rows into shorter ones",
    ),
    ColumnKind(
        kind="ignored",
        words=frozenset(),
        otherwise="note",
        says="is left out, as data.ignore_columns asks",
        hint="",
    ),
    ColumnKind(
        kind="unknown",
        words=frozenset(),
        otherwise="note",
        says="is not used",
        hint="",
    ),
)  # fmt: skip
"""Meanings of columns; of several that fit a name the first counts."""
KIND = {one.kind: one for one in KINDS}
NO_ANSWER = _words(
    "false no n bad wrong incorrect rejected reject undesirable dislike disliked negative neg down"
    " poor low worst terrible awful fail failed failure invalid unsafe harmful toxic lose loser"
    " downvote downvoted 0 -1"
)
"""Spellings of a verdict against an answer."""
_PLAIN_NO = _words(
    "bad wrong incorrect rejected undesirable dislike disliked fail failed failure downvote"
    " downvoted hallucinated"
)
_BEFORE = frozenset({"previous", "prior", "preceding"})
_YES = _words(
    "true yes y good correct right accepted accept chosen desirable like liked positive pos up"
    " great high success won pass passed valid safe helpful win winner 1 +1 upvote upvoted"
)
_THUMBS_DOWN = "\N{THUMBS DOWN SIGN}"
_OPPOSITE = _words(
    "bad undesirable rejected reject disapproved incorrect wrong unhelpful harmful disliked dislike"
    " invalid unsafe failed fail thumbsdown down downvoted negative toxic flagged deleted spam"
    " hallucination hallucinated not"
)
"""Words of names whose `true` is the verdict against an answer."""
_SKIPPING = frozenset({"mask", "masks", "masked", "ignore", "skip", "exclude", "no", "not"})
"""Words of names whose `true` keeps a message from being learned."""
_FLAGS = _words("true false yes no 0 1 0.0 1.0 none")
_FLAG = (True, False, "true", "false")
_COUNTING = _words(
    "num number count width height size duration fps rate author credit license licence title"
    " channel views date language lang category categories type format"
)
"""Words that make of a picture's column one about the picture."""
_MEDIA_STEMS = ("image", "video", "audio", "pixel", "photo", "picture", "screenshot")
_MEDIA_SUFFIX = re.compile(
    r"\.(?:png|jpe?g|gif|webp|bmp|tiff?|heic|wav|mp3|flac|ogg|m4a|mp4|mkv|avi|mov|webm)$",
    re.IGNORECASE,
)
_WHERE_FROM = _words(
    "url urls uri link links source src origin href homepage website avatar icon favicon logo"
)
_ABOUT = _words(
    "model generator generated explanation reason reasons comment id type name source method by"
    " count complete completed length time date"
)
"""Words that make of a column one about ratings, verdicts or reasoning, not one of them."""
_FLAG_WORDS = _words(
    "is in to do for be should shall use used usable train trained training trainable learn learned"
    " learnable loss on this the row sample example message turn token tokens answer assistant"
    " response completion weight weights mask masks masked enabled compute calculate"
)
_WEIGHTS = _words("weight weights mask masks masked")
_LEARNING = _words("train trainable training learn learnable")
_OTHER_WEIGHTS = _words(
    "attention attn padding pad kg lb lbs gram grams body birth molecular atomic gross unit"
    " shipping id idx index name type unk model"
)
"""Words that make of weights and masks those of a thing, or of a tokenizer."""
_MAX_RATING_WORDS = 3
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Markers of multimodal sets; `<video>` of a page in HTML has an end tag, and no marker has one.
_MARKER = re.compile(
    r"<\|?(?P<tag>image|img|picture|video|audio|speech|sound)"
    r"(?:[ _-]?(?:pad|placeholder|token|soft|start|end|here|\d+))*\|?>"
    r"|<(?:start|end)_of_(?:image|audio|video)>|<\|(?:vision|audio)_\w+\|>|\[IMG\]",
    re.IGNORECASE,
)
_PROMPTS = _words("prompt prompts message messages msg instruction instructions text")
_ROLES = _words(
    "system user assistant human gpt bot model prompter chatbot tool function observation"
)
_HELD_OUT = _words("validation valid val dev test testing eval evaluation held heldout")
_MAX_MARKED_CHARS = 1 << 20
_MAX_NAME_CHARS = 1024
_SUFFIX_CHARS = 6


@functools.lru_cache(maxsize=4096)
def split_name(name: str) -> tuple[str, ...]:
    """Return the words of a column's name.

    >>> split_name("isGood"), split_name("image_path"), split_name("kto-tag2")
    (('is', 'good'), ('image', 'path'), ('kto', 'tag', '2'))
    """
    return tuple(word.lower() for word in _WORD.findall(name))


@functools.lru_cache(maxsize=4096)
def find_kind(name: str) -> ColumnKind:
    """Return what a column may mean, by its name alone.

    >>> [find_kind(name).kind for name in ("thumbs_up", "pixel_values", "systemPrompt", "lang")]
    ['verdict', 'media', 'system', 'unknown']
    """
    words = set(split_name(name))
    plain = "".join(split_name(name))
    for one in KINDS:
        if words & one.words or plain in one.words:
            return one
    if any(word.startswith(_MEDIA_STEMS) for word in words):
        return KIND["media"]
    return KIND["unknown"]


def is_empty(value: Any) -> bool:
    """Return whether a value holds nothing: null, white space, or lists and objects of such.

    >>> is_empty([[" ", None]]), is_empty("[]"), is_empty(False), is_empty(float("nan"))
    (True, True, False, True)
    """
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            if one.strip() not in ("", "[]", "{}", "null"):
                return False
        elif isinstance(one, (list, tuple)):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif one is not None and one == one:  # tables write NaN where nothing is
            return False
    return True


def is_media(value: Any) -> bool:
    """Return whether a value is a picture, sound or video, or the name of such a file.

    >>> is_media({"bytes": None, "path": "a.png"}), is_media(["s/1.WAV"]), is_media("a png")
    (True, True, False)
    """
    if isinstance(value, (list, tuple)):
        return any(is_media(one) for one in value[:_CHECKED_ITEMS])
    if isinstance(value, dict):
        bytes_and_path = {"bytes", "path"} <= value.keys() or {"array", "sampling_rate"} <= set(
            value
        )
        return bytes_and_path and not is_empty(value)
    if isinstance(value, str):
        text = value.strip()
        if text[:11].lower().startswith(("data:image/", "data:audio/", "data:video/")):
            return True
        if len(text) > _MAX_NAME_CHARS or _MEDIA_SUFFIX.search(text[-_SUFFIX_CHARS:]) is None:
            return False
        return "\n" not in text and not re.search(r"\s{2}|\s\S+\s", text)
    return isinstance(value, (bytes, bytearray)) and len(value) > 0


def holds_media(value: Any) -> bool:
    """Return whether a value is a picture, sound or video itself, not the name of one.

    >>> holds_media("a.png"), holds_media(["data:image/png;base64,AA"])
    (False, True)
    """
    if isinstance(value, (list, tuple)):
        return any(holds_media(one) for one in value[:_CHECKED_ITEMS])
    if isinstance(value, str):
        return value.lstrip()[:5].lower() == "data:" and is_media(value)
    return is_media(value)


def judge_media(name: str, value: Any) -> Consequence | None:
    """Return the consequence of a column that a picture's name has, or of a value that is one.

    None: it holds none.
    """
    words = set(split_name(name))
    named = find_kind(name).kind == "media"
    if is_media(value):
        return None if words & _WHERE_FROM and not named else "refuse"
    if not named or value is False or value == 0 or is_empty(value):
        return None
    return "warn" if words & _COUNTING else "refuse"


def judge_verdict(name: str, value: Any) -> str:
    """Return `bad`, `good`, or `other` for a value that is no verdict, such as a class of many.

    A list may be `mixed`.

    >>> [judge_verdict("label", value) for value in (False, "True", 0, 3, "bad")]
    ['bad', 'good', 'bad', 'other', 'bad']
    >>> judge_verdict("is_toxic", True), judge_verdict("thumbs_down", False)
    ('bad', 'good')
    """
    if isinstance(value, (list, tuple)):
        found = {judge_verdict(name, one) for one in value[:_CHECKED_ITEMS]}
        if {"good", "bad"} <= found:
            return "mixed"  # of several candidates, or turns; which of them is learned is not said
        return next((one for one in ("bad", "other", "good") if one in found), "other")
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
    text = text.strip().lower().replace("thumbs", "").strip(" _-.!")
    if value == -1 or text == "-1":
        return "bad"
    if _THUMBS_DOWN in text or text in NO_ANSWER:
        said = False
    elif text in _YES or text == "\N{THUMBS UP SIGN}":
        said = True
    else:
        return "other"
    # Only a plain yes or no is turned round: "bad" is bad whatever its column is called.
    if set(split_name(name)) & _OPPOSITE and text in (
        "true",
        "yes",
        "y",
        "1",
        "false",
        "no",
        "n",
        "0",
    ):
        said = not said
    return "good" if said else "bad"


def is_weighted(name: str, value: Any) -> bool:
    """Return whether a weight, mask or flag asks for anything but learning as usual.

    Values that are neither numbers nor flags mean something else.

    >>> is_weighted("weight", 1.0), is_weighted("weight", 0), is_weighted("train", "false")
    (False, True, True)
    >>> is_weighted("loss_mask", True), is_weighted("masked", True), is_weighted("mask", [1, 0])
    (False, True, True)
    >>> is_weighted("loss", 1.7), is_weighted("training_source", "web")
    (False, False)
    >>> is_weighted("in_gsm8k_train", False), is_weighted("attention_mask", [1, 0])
    (False, False)
    """
    words = set(split_name(name))
    if words & _OTHER_WEIGHTS or (words & _LEARNING and not words <= _FLAG_WORDS):
        return False
    if isinstance(value, (list, tuple)):
        flags = {str(one) for one in value if isinstance(one, (bool, int, float))}
        return len(flags) > 1 or any(is_weighted(name, one) for one in value[:1])
    if isinstance(value, str) and value.strip().lower() not in _FLAGS and not _is_number(value):
        return False
    is_loss = "loss" in words and not words & _WEIGHTS
    if not isinstance(value, (str, bool, int, float)) or (is_loss and value not in _FLAG):
        return False
    # A `loss_mask` of 1 is learned, a message that is `masked` is not.
    is_skipping = bool(words & _SKIPPING) and "loss" not in words
    text = str(value).strip().lower()
    usual = ("false", "0", "0.0", "no", "none") if is_skipping else ("true", "1", "1.0", "yes")
    return text not in usual


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_rating(name: str, value: Any) -> bool:
    """Return whether a value is a place on a scale, rather than a text about ratings.

    >>> is_rating("score", "4.5"), is_rating("quality", "very poor"), is_rating("points", ["a: b"])
    (True, True, False)
    >>> is_rating("quality_explanation", "poor"), is_rating("reward_model", "org/name")
    (False, False)
    """
    if set(split_name(name)) & _ABOUT:
        return False
    if isinstance(value, (list, tuple)):
        return any(is_rating(name, one) for one in value[:_CHECKED_ITEMS])
    if isinstance(value, dict):
        return any(is_rating(name, one) for one in value.values())
    if isinstance(value, str) and not _is_number(value):
        words = value.split()
        return 0 < len(words) <= _MAX_RATING_WORDS and not re.search(r"[:/\n]|\w-\d", value)
    return isinstance(value, (bool, int, float, str))


def is_reasoning(name: str, value: Any) -> bool:
    """Return whether a value is reasoning, rather than a flag or figure about it.

    >>> is_reasoning("reasoning", "on"), is_reasoning("is_reasoning_complete", [True])
    (False, False)
    >>> is_reasoning("thinking", "The river is long."), is_reasoning("cot", [{"text": "First"}])
    (True, True)
    """
    if set(split_name(name)) & _ABOUT:
        return False
    if isinstance(value, (list, tuple)):
        return any(is_reasoning(name, one) for one in value[:_CHECKED_ITEMS])
    if isinstance(value, dict):
        return any(is_reasoning(name, one) for one in value.values())
    return isinstance(value, str) and value.strip().lower() not in {*_FLAGS, "on", "off"}


def says_no(value: Any) -> bool:
    """Return whether a value is a word against an answer, whatever its column is called.

    >>> says_no("Incorrect"), says_no("no"), says_no("\N{THUMBS DOWN SIGN}"), says_no(False)
    (True, False, True, False)
    """
    if not isinstance(value, str):
        return False
    text = value.strip().lower()
    return text in _PLAIN_NO or text == _THUMBS_DOWN


def is_history(name: str, value: Any) -> bool:
    """Return whether a value holds turns; what came before need not be one."""
    if isinstance(value, (list, dict)):
        return True
    return isinstance(value, str) and not set(split_name(name)) & _BEFORE


def is_system_prompt(name: str) -> bool:
    """Return whether a name means the text that begins a conversation.

    >>> is_system_prompt("system_prompt"), is_system_prompt("operating_system")
    (True, False)
    """
    first, *rest = split_name(name)
    return first in ("system", "sys") and set(rest) <= _PROMPTS


def is_listed_tools(value: Any) -> bool:
    """Return whether a value lists tools, rather than saying something about them."""
    is_json = isinstance(value, str) and value.lstrip().startswith(("[", "{", "<"))
    return isinstance(value, (list, dict)) or is_json


def is_role(value: Any) -> bool:
    """Return whether a value names who speaks in a conversation with an assistant."""
    return isinstance(value, str) and value.strip().lower() in _ROLES


def is_held_out(value: Any) -> bool:
    """Return whether a value names a split that is not for training."""
    return isinstance(value, str) and bool(_HELD_OUT & set(split_name(value)))


def find_marker(text: str) -> str:
    """Return the first marker of a picture, sound or video in a text; empty: it has none.

    >>> find_marker("<image>What is it?"), find_marker("<|image_1|>"), find_marker("a < image")
    ('<image>', '<|image_1|>', '')
    >>> find_marker("<video><source></video>")
    ''
    """
    text = text[:_MAX_MARKED_CHARS]
    if "<" not in text and "[" not in text:
        return ""
    for found in _MARKER.finditer(text):
        tag = found.group("tag")
        closed = tag is not None and f"</{tag.lower()}>" in text.lower()
        # Qwen-VL writes <img>path</img>, where HTML has no end; all others are the other way round.
        if tag is None or closed == (tag.lower() == "img"):
            return found.group()
    return ""
