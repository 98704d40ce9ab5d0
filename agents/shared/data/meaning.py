"""Judge the meaning of a column beyond the trained text, by its name and its values.

A row is trained wrongly if a meaningful column is ignored: the answer that `label: false` rejects,
or the question about a picture that is not shown. The name suggests the meaning, and the value has
to confirm it: an identifier, a number, a date, a URL or a language code says nothing about the
question, whichever name its column has.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from agents.contract.objectives import ROW_FORMATS
from agents.shared.data.columns import THOUGHT_KEYS

Consequence = Literal["refuse", "warn", "note"]
"""Consequence of a finding. `refuse`: the data is not trained; `warn`: named in preview, plan and
run; `note`: only listed."""
Shape = Literal["flag", "number", "name", "word", "text", "parts"]
"""Form of a value. `name`: an identifier, date, URL, file or code; `parts`: a list or an object."""
_CODES = ("number", "name")
_ASKED = tuple(row.name for row in ROW_FORMATS.values() if not row.is_text)
_CHECKED_ITEMS = 16


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class ColumnKind:
    """One meaning that a column can have."""

    kind: str
    says: str
    """Predicate that follows the column's name in a message."""
    hint: str
    """Advice; {column} is the column's name."""
    words: frozenset[str] = frozenset()
    """Words of which one suffices in a name."""
    refused_in: tuple[str, ...] = ()
    """Formats whose rows are refused."""
    otherwise: Consequence = "warn"
    """Consequence in other formats."""


_KEEP = "or set data.ignore_columns: [{column}] to train on them anyway"
_OUT = f"Take these rows out, {_KEEP}"
_HISTORY = "history histories dialog dialogue dialogues previous prior preceding"
_SKIPPED = "ignore ignored skip skipped exclude excluded"
_WEIGHT = (
    f"weight weights mask masks masked loss train trainable training learn learnable {_SKIPPED}"
)
_CONTEXT = (
    "context contexts passage passages document documents paragraph paragraphs knowledge background"
    " article articles choices options candidates endings premise hypothesis story stories"
)
_SCORE = (
    "score scores rating ratings reward rewards rank ranking grade stars points helpfulness"
    " correctness coherence complexity verbosity quality confidence upvotes downvotes votes margin"
    " toxicity"
)
_VERDICT = (
    "label labels good bad kto desirable undesirable preferred preference accepted accept"
    " acceptable rejected reject approved approve disapproved correct incorrect wrong helpful"
    " unhelpful harmful harmless liked like disliked dislike valid invalid safe unsafe success"
    " successful failed fail passed pass thumb thumbs thumbsup thumbsdown upvoted downvoted"
    " verified verdict feedback vote review judgement judgment chosen positive negative toxic"
    " flagged deleted spam hallucination hallucinated usable keep win winner best outcome reaction"
)
# fmt: off
KINDS = (
    ColumnKind("media", "holds pictures, sound or video, which are not trained", _OUT,
               _words("img imgs waveform spectrogram"), refused_in=_ASKED),
    ColumnKind("history", "holds earlier turns of the conversation, which would be left out",
               f"Write each row as 'messages' with all turns, {_KEEP}",
               _words(_HISTORY), refused_in=_ASKED),
    ColumnKind("system", "holds a system prompt, which would be left out",
               f"Set data.columns: [system={{column}}], {_KEEP}",
               _words("system sys"), refused_in=_ASKED, otherwise="note"),
    ColumnKind("tools", "offers tools under another name, which would be left out",
               f"Set data.columns: [tools={{column}}], {_KEEP}",
               _words("tool tools function functions apis"), refused_in=_ASKED, otherwise="note"),
    ColumnKind("weight", "asks to learn these rows less, or in part, which is not possible", _OUT,
               _words(_WEIGHT), refused_in=(*_ASKED, "text")),
    ColumnKind("masked", "marks messages or parts that are not learned", ""),
    ColumnKind("weighted", "weighs how much messages or parts are learned", "", otherwise="note"),
    ColumnKind("context", "holds what the question is about, which would be left out",
               f"Set data.columns: [input={{column}}], {_KEEP}",
               _words(_CONTEXT), refused_in=("alpaca", "preference"), otherwise="note"),
    ColumnKind("better", "holds a better answer than the one that would be learned",
               f"Set data.columns: [output={{column}}], {_KEEP}",
               _words("corrected correction improved revised revision rewritten refined fixed"),
               refused_in=("alpaca",)),
    ColumnKind("options", "sets options of the chat template for single rows, which are not used",
               "Take out the rows that need other options", _words("kwargs")),
    ColumnKind("score", "rates the answers, which is not used: all are learned alike",
               "Take out the rows that should not be learned", _words(_SCORE)),
    ColumnKind("verdict", "calls rows bad examples, and they would be learned as good ones",
               "Take these rows out, pair them with good answers ('chosen' and 'rejected', "
               f"objective: dpo), {_KEEP}", _words(_VERDICT), refused_in=_ASKED),
    ColumnKind("reasoning", "holds the reasoning before the answer, which is left out",
               "Write it into the answer if it should be learned",
               _words("reasoning thinking thought thoughts rationale cot complexcot")),
    ColumnKind("thought", "holds the reasoning before the answer, which is learned if the model's "
               "chat template has a place for it", "", otherwise="note"),
    ColumnKind("split", "names a held-out split, but its rows are learned, too",
               "Take these rows out, or name them in data.eval", _words("split fold subset")),
    ColumnKind("turn", "tells that the row is one turn of a conversation, which would be learned "
               "as a text of its own", f"Write each conversation as one row of 'messages', {_KEEP}",
               _words("role parent speaker"), refused_in=("text",), otherwise="note"),
    # These are not found by words of a name.
    ColumnKind("question", "holds another part of the question, which would be left out",
               f"Set data.columns: [input={{column}}], or join the parts, {_KEEP}",
               refused_in=("alpaca", "preference")),
    ColumnKind("answer", "holds another answer, which is not learned",
               "Check that the column which is learned is the right one, or set data.columns",
               _words("solution truth gold canonical expected code")),
    ColumnKind("reversed", "rates the chosen answer below the rejected one",
               "Check which of the two is the better one"),
    ColumnKind("placeholder", "stands in the texts for a picture, sound or video, and is learned "
               "literally", "Take these rows out if they make no sense without it"),
    ColumnKind("other_system", "is left out in these rows, because their messages have a system "
               "prompt of their own", "Remove one of the two"),
    ColumnKind("skipped", "is not trained, so these rows are left out",
               "Take these rows out, or write what it says into the text"),
    ColumnKind("template", "is left out, because the model's chat template has no place for it",
               "Write it into the message's content if it should be learned"),
    # These are about the chat template; the name is a token or a role.
    ColumnKind("unended", "is learned behind the last answer, because the model's chat template "
               "ends it with no token", "", otherwise="note"),
    ColumnKind("continued", "is written by the model's chat template in another way than in a "
               "chat, so the last answer is learned behind the beginning that a chat shows", "",
               otherwise="note"),
    ColumnKind("empty_thought", "is written before these answers without a thought, and is not "
               "learned: a chat shows it with enable_thinking: false", "", otherwise="note"),
    ColumnKind("own_thought", "begins the thoughts of these answers, and a chat shows an empty one "
               "in their place: the model thinks where a chat enables it", "", otherwise="note"),
    ColumnKind("prompt", "begins otherwise than in a chat, as the model's chat template writes it: "
               "the model may not answer there as it has learned",
               "Compare the preview with a chat, or use a model whose template writes both alike"),
    ColumnKind("dropped_thought", "has thoughts of earlier answers, which the chat template leaves "
               "out", "", otherwise="note"),
    ColumnKind("dropped_turn", "is a role whose turns are left out, because the model's chat "
               "template has no place for it", "Write what these turns say into other turns"),
    ColumnKind("tooled", "offers or calls tools, which need a place in the model's chat template",
               "", otherwise="note"),
    ColumnKind("no_tools", "offers or calls tools, for which the chat template has no place",
               "Use a model whose chat template has tools, take these rows out, "
               f"{_KEEP}", otherwise="refuse"),
    ColumnKind("beyond", "is a token for which the model has no weights, so a row that holds it "
               "cannot be trained",
               "Use the model's own tokenizer, or enlarge its embeddings first"),
    ColumnKind("cut", "", "Raise sequence_tokens, or divide long rows into shorter ones"),
    ColumnKind("documents", "", ""),
    ColumnKind("recognized", "", "", otherwise="note"),
    ColumnKind("rendered", "stands in the texts, which a chat template has written already",
               "Set data.rendered: yes to learn the texts as written, with their answers alone"),
    ColumnKind("ignored", "is left out, as data.ignore_columns asks", ""),
    ColumnKind("unknown", "is not used", "", otherwise="note"),
)
# fmt: on
"""Meanings of columns; if several match a name, the first counts."""
KIND = {row.kind: row for row in KINDS}
_NAMED_ABOUT = _words(
    "id ids uuid guid hash num number count width height size length len duration fps rate date"
    " time timestamp at year author credit license licence title channel views language"
    " languages lang locale category categories genre topic topics subject domain class color tags"
    " status level effort budget type format version index idx position offset name publisher"
    " owner model generator generated source method by complete completed"
)
"""Last words of names of columns with facts about something, such as its length, date or author."""
_NAMED_TEXT = _words("caption description explanation reason reasons comment")
"""The same, but a `context_description` may be a context."""
_COUNTED = _words("num n number count")
"""First words of such names."""
_OF_SYSTEM = _words("system sys prompt prompts message messages msg instruction instructions text")
CHOICES = _words("choices options candidates endings")
_BEFORE = _words("previous prior preceding")
_MEDIA_STEMS = ("image", "video", "audio", "pixel", "photo", "picture", "screenshot")
_MEDIA_SUFFIX = re.compile(
    r"\.(?:png|jpe?g|gif|webp|bmp|tiff?|heic|wav|mp3|flac|ogg|m4a|mp4|mkv|avi|mov|webm)$",
    re.IGNORECASE,
)
_WHERE_FROM = _words(
    "url urls uri link links source src origin href homepage website avatar icon favicon logo"
)
"""Words of columns whose pictures are those of a web page or an author."""
_PLAIN_NO = _words(
    "bad wrong incorrect rejected undesirable dislike disliked fail failed failure downvote"
    " downvoted hallucinated \N{THUMBS DOWN SIGN}"
)
_NO = _PLAIN_NO | _words(
    "false no n reject negative neg down poor low worst terrible awful invalid unsafe harmful"
    " toxic lose loser 0 -1"
)
_YES = _words(
    "true yes y good correct right accepted accept chosen desirable like liked positive pos up"
    " great high success won pass passed valid safe helpful win winner 1 +1 upvote upvoted"
    " \N{THUMBS UP SIGN}"
)
_TURNED = _words("true yes y 1 false no n 0")
_OPPOSITE = _words(
    "bad undesirable rejected reject disapproved incorrect wrong unhelpful harmful disliked dislike"
    " invalid unsafe failed fail thumbsdown down downvoted negative toxic flagged deleted spam"
    " hallucination hallucinated not"
)
"""Words of names for which `true` is a verdict against the answer."""
_FLAGS = _words("true false yes no on off none 0 1 0.0 1.0")
_FLAG_WEIGHTS = {"true": 1, "yes": 1, "on": 1, "false": 0, "no": 0, "off": 0, "none": 0}
_REFUSING = _words(f"{_SKIPPED} no not without")
_SKIPPING = _REFUSING | _words("mask masks masked")
"""Words of names for which `true` excludes a message from learning."""
_WEIGHTS = _words("weight weights mask masks masked")
_OF_ROWS = KIND["weight"].words | _SKIPPING | _words(
    "is in to do for from be should shall use used usable learned on this the row sample sampling"
    " example instance message turn token tokens question prompt answer assistant response"
    " completion output target label labels domain task data dataset importance quality"
    " difficulty enabled compute calculate per lm sft kl ce"
)  # fmt: skip
"""Words in names of weights and flags of rows; with other words, a weight is that of an object or a
tokenizer."""
_MAX_RATING_WORDS = 3
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_CLOCK = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[ap]m)?(?: ?(?:z|utc|gmt|[+-]\d\d:?\d\d))?"
_NAME = re.compile(
    # URLs, dates, times, codes of languages, figures, identifiers and paths, files with blanks
    rf"[a-z][a-z0-9+.-]*://\S+|www\.\S+|{_CLOCK}"
    rf"|\d{{4}}[-/.]\d{{1,2}}(?:[-/.]\d{{1,2}}(?:[ t]{_CLOCK})?)?"
    rf"|(?:[a-z]{{3,9}},? )?(?:{_DAY}\.? {_MONTH}|{_MONTH}(?: +{_DAY})?),? \d{{4}}(?:,? {_CLOCK})?"
    rf"|[a-z]{{3}} {_MONTH} +\d{{1,2}} {_CLOCK} \d{{4}}"
    r"|[a-z]{2,3}(?:[-_][a-z]{2,8})*|[+-]?\d[\d.,]*[a-z]{0,3}%?|[-_.*?/\\ ]+"
    r"|(?=\S*[_/\\:.#@-]|(?:\S*\d){3})[a-z0-9_/\\:.#@~%+-]*[a-z0-9_/\\#]={0,2}"
    r"|\S+(?: \S+){0,4}\.(?:pdf|docx?|txt|md|html?|jsonl?|csv|tsv|xml|xlsx?|pptx?|epub|tex|py)",
    re.IGNORECASE | re.ASCII,
)
_MAX_NAME_CHARS = 1024
_SUFFIX_CHARS = 6
# Markers of multimodal sets. Unlike them, a `<video>` in HTML has an end tag.
_MARKER = re.compile(
    r"<\|?(?P<tag>image|img|picture|video|audio|speech|sound)"
    r"(?:[ _-]?(?:pad|placeholder|token|soft|start|end|here|\d+))*\|?>"
    r"|<(?:start|end)_of_(?:image|audio|video)>|<\|(?:vision|audio)_\w+\|>|\[IMG\]",
    re.IGNORECASE,
)
_MAX_MARKED_CHARS = 1 << 20
_ROLES = _words(
    "system user assistant human gpt bot model prompter chatbot tool function observation"
)
_HELD_OUT = _words("validation valid val dev test testing eval evaluation held heldout")


# ------------------------------------------------------------------- names


@functools.lru_cache(maxsize=4096)
def split_name(name: str) -> tuple[str, ...]:
    """Return the words of a column's name.

    >>> split_name("isGood"), split_name("image_path"), split_name("kto-tag2")
    (('is', 'good'), ('image', 'path'), ('kto', 'tag', '2'))
    """
    return tuple(word.lower() for word in _WORD.findall(name))


@functools.lru_cache(maxsize=4096)
def find_kind(name: str) -> ColumnKind:
    """Return the meaning that a column's name suggests.

    >>> [find_kind(name).kind for name in ("thumbs_up", "pixel_values", "systemPrompt", "lang")]
    ['verdict', 'media', 'system', 'unknown']
    >>> [find_kind(name).kind for name in ("sample_weight", "weight_kg", "operating_system")]
    ['weight', 'unknown', 'unknown']
    """
    words, joined = set(split_name(name)), "".join(split_name(name))
    # Ambiguous words count only among words of their kind: no `weight_kg`, no `operating_system`.
    only = {"weight": _OF_ROWS, "system": _OF_SYSTEM}
    if joined.startswith(_MEDIA_STEMS) or any(word.startswith(_MEDIA_STEMS) for word in words):
        return KIND["media"]
    for row in KINDS:
        is_named = row.words & words or joined in row.words
        if is_named and (row.kind not in only or words <= only[row.kind]):
            return row
    return KIND["unknown"]


def is_about(name: str) -> bool:
    """Return whether a column holds facts about another one, such as its length.

    >>> is_about("score_model"), is_about("numVotes"), is_about("model_score")
    (True, True, False)
    """
    words = split_name(name)
    return bool(words) and (words[-1] in _NAMED_ABOUT | _NAMED_TEXT or words[0] in _COUNTED)


# ------------------------------------------------------------------- values


def is_empty(value: Any) -> bool:
    """Return whether a value is empty: null, white space, or lists and objects of these.

    >>> is_empty([[" ", None]]), is_empty("[]"), is_empty(False), is_empty(float("nan"))
    (True, True, False, True)
    """
    return all(
        leaf.strip() in ("", "[]", "{}", "null")
        if isinstance(leaf, str)
        else leaf is None or leaf != leaf  # tables write NaN for an empty cell
        for leaf in _leaves(value)
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values inside lists and objects, in order."""
    # An own stack, since a foreign value may be nested very deeply.
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, (list, tuple)):
            left += reversed(item)
        elif isinstance(item, dict):
            left += reversed(item.values())
        else:
            yield item


def _some_leaves(value: Any) -> list[Any]:
    return [leaf for leaf in islice(_leaves(value), _CHECKED_ITEMS) if not is_empty(leaf)]


def shape_of(value: Any) -> Shape:
    """Return the form of a non-empty value.

    >>> [shape_of(value) for value in (True, "512", "fr-CA", "doc_17", "2024-05-01", "a/b.txt")]
    ['flag', 'number', 'name', 'name', 'name', 'name']
    >>> [shape_of(value) for value in ("cats", "Ann lives here.", ["Ann", "Oren"], ["a-1", 2])]
    ['word', 'text', 'parts', 'name']
    """
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, (list, tuple, dict)):
        leaves = _some_leaves(value)
        # In a list, "yes" is a choice and "Hi" a turn, not a flag and a code.
        has_words = any(isinstance(leaf, str) and leaf.strip().isalpha() for leaf in leaves)
        is_plain = {shape_of(leaf) for leaf in leaves} <= {"flag", "number", "name"}
        return "name" if is_plain and not has_words else "parts"
    if not isinstance(value, str):
        return "name"  # such as a date of a table
    text = value.strip()
    if text.startswith(("[", "{", "<")):
        return "parts"
    if len(text) > _MAX_NAME_CHARS:
        return "text"
    if text.lower() in _FLAGS:
        return "flag"
    if _is_number(text):
        return "number"
    if _NAME.fullmatch(text):
        return "name"
    return "word" if text.isascii() and len(text.split()) == 1 else "text"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_media(value: Any) -> bool:
    """Return whether a value is a picture, sound or video, or the file name of one.

    >>> is_media({"bytes": None, "path": "a.png"}), is_media(["s/1.WAV"]), is_media("a png")
    (True, True, False)
    """
    if isinstance(value, (list, tuple)):
        return any(map(is_media, value[:_CHECKED_ITEMS]))
    if isinstance(value, dict):
        is_file = {"bytes", "path"} <= value.keys() or {"array", "sampling_rate"} <= value.keys()
        return is_file and not is_empty(value)
    if isinstance(value, str):
        text = value.strip()
        if text[:11].lower().startswith(("data:image/", "data:audio/", "data:video/")):
            return True
        if len(text) > _MAX_NAME_CHARS or _MEDIA_SUFFIX.search(text[-_SUFFIX_CHARS:]) is None:
            return False
        # A file name has no line break, and at most one blank before its end; else it is a
        # sentence.
        return "\n" not in text and not re.search(r"\s{2}|\s\S+\s", text)
    return isinstance(value, (bytes, bytearray)) and len(value) > 0


def _holds_media(value: Any) -> bool:
    """Return whether a value is a picture, sound or video itself, not its file name."""
    if isinstance(value, (list, tuple)):
        return any(map(_holds_media, value[:_CHECKED_ITEMS]))
    return is_media(value) and (not isinstance(value, str) or value.lstrip()[:5].lower() == "data:")


# ------------------------------------------------------------------- both


def judge_column(name: str, value: Any, data_format: str) -> tuple[str, Consequence]:
    """Return kind and consequence of an unread column, judged by one value.

    `score` and `verdict` are decided by all values of the column (`findings`).

    >>> judge_column("context", "Ann lives here.", "alpaca")
    ('context', 'refuse')
    >>> judge_column("context", "ctx-17", "alpaca"), judge_column("context_length", 512, "alpaca")
    (('unknown', 'note'), ('unknown', 'note'))
    """
    media = _judge_media(name, value, data_format)
    if media is not None:
        return "media", media
    kind = find_kind(name)
    if kind.kind == "unknown" and data_format != "text" and says_no(value):
        return "verdict", "warn"
    if kind.kind == "unknown" or not _bears_out(kind.kind, name, value):
        return "unknown", "note"
    if data_format == "alpaca" and name in THOUGHT_KEYS and isinstance(value, str):
        return "thought", "note"
    found = kind.otherwise
    if data_format in kind.refused_in:
        # One word may be the text of a `context`, but is rather a label in a `context_window`.
        is_label = kind.kind in ("history", "context") and len(split_name(name)) > 1
        found = "warn" if is_label and shape_of(value) == "word" else "refuse"
    return (kind.kind, found) if found != "note" else ("unknown", "note")


def _bears_out(kind: str, name: str, value: Any) -> bool:
    """Return whether the value confirms the meaning that the name suggests."""
    match kind:
        case "weight":
            return is_weighted(name, value)
        case "options":
            return any(leaf is True or shape_of(leaf) == "text" for leaf in _some_leaves(value))
        case "answer" | "better":
            return shape_of(value) == "text" or (kind == "better" and shape_of(value) == "word")
        case "split":
            return isinstance(value, str) and not _HELD_OUT.isdisjoint(split_name(value))
        case "turn":
            return isinstance(value, str) and value.strip().lower() in _ROLES
        case "score":
            return is_rating(name, value)
        case "verdict":
            return not is_about(name) or shape_of(value) not in ("flag", "number")
    return _holds_text(kind, name, value)


def _holds_text(kind: str, name: str, value: Any) -> bool:
    """Return whether a value is text or has parts, rather than a name or a number."""
    shape, words, is_list = shape_of(value), split_name(name), isinstance(value, (list, dict))
    is_text = shape in ("word", "text", "parts")
    if is_about(name) and not (is_text and words[-1] in _NAMED_TEXT):
        return False
    if kind == "tools":
        return is_list or shape == "parts"
    if kind == "history" and not _BEFORE.isdisjoint(words):
        return shape == "parts"
    if kind == "context" and is_list and not CHOICES.isdisjoint(words):
        return True
    return is_text or (kind == "reasoning" and shape == "name")


def _judge_media(name: str, value: Any, data_format: str) -> Consequence | None:
    """Return the consequence of a column of pictures, sound or video, or None if it is another
    one.
    """
    words = set(split_name(name))
    is_named, is_held = find_kind(name).kind == "media", is_media(value)
    if not is_named and (not is_held or words & _WHERE_FROM):
        return None
    if not is_held and (value is False or value == 0):
        return None
    if data_format == "text" and not _holds_media(value):
        # A text stands for itself, even if it comes from a page or recording.
        return "warn" if is_named else None
    # In an `image`, a name may be the only reference to a picture; in an `image_id` it is not.
    is_code = len(words) > 1 and not isinstance(value, (list, dict)) and shape_of(value) in _CODES
    return "warn" if not is_held and (is_code or is_about(name)) else "refuse"


def judge_key(key: str, value: Any, *, is_answer: bool) -> tuple[str, Consequence]:
    """Return kind and consequence of an unread key of a message, if no template uses it.

    A bad question is not refused, since questions are not learned.
    """
    media = _judge_media(key, value, "chat")
    if media is not None:
        return "media", media
    kind = find_kind(key).kind
    if kind == "weight" and is_weighted(key, value):
        mark = read_mark(key, value)
        if mark == 0:
            return "masked", "note"
        if mark is not None and 0 < mark <= MAX_WEIGHT:
            return "weighted", "note"
        return "weight", "refuse" if is_answer else "note"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind in ("verdict", "score"):
        is_bad = not is_number and judge_verdict(key, value) == "bad"
        if is_bad and (kind == "verdict" or value is False or says_no(value)):
            return "verdict", "refuse" if is_answer or isinstance(value, bool) else "note"
        if is_answer and is_rating(key, value) and (is_number or kind == "score"):
            return "score", "warn"
    if kind == "reasoning" and _bears_out(kind, key, value):
        return ("thought", "note") if key in THOUGHT_KEYS else ("reasoning", "warn")
    return "unknown", "note"


def judge_verdict(name: str, value: Any) -> Literal["bad", "good", "mixed", "other"]:
    """Return the verdict of a value; `other`: it is not a verdict, such as one class of many.

    >>> [judge_verdict("label", value) for value in (False, "True", 0, 3, "bad", [1, 0])]
    ['bad', 'good', 'bad', 'other', 'bad', 'mixed']
    >>> judge_verdict("is_toxic", True), judge_verdict("thumbs_down", False)
    ('bad', 'good')
    """
    if isinstance(value, (list, tuple)):
        found = {judge_verdict(name, one) for one in _some_leaves(value)}
        if {"good", "bad"} <= found:
            return "mixed"  # several candidates or turns, without the learned one marked
        return "bad" if "bad" in found else "good" if found == {"good"} else "other"
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
    text = text.strip().lower()
    text = text if text == "-1" else text.replace("thumbs", "").strip(" _-.!")
    if text not in _NO | _YES:
        return "bad" if "\N{THUMBS DOWN SIGN}" in text else "other"
    # Only a plain yes or no is inverted: "bad" is bad under any column name.
    is_turned = text in _TURNED and not _OPPOSITE.isdisjoint(split_name(name))
    return "bad" if (text in _NO) != is_turned else "good"


def says_no(value: Any) -> bool:
    """Return whether a value is a word against an answer, under any column name.

    >>> says_no("Incorrect"), says_no("no"), says_no(False)
    (True, False, False)
    """
    return isinstance(value, str) and value.strip().lower() in _PLAIN_NO


def is_rating(name: str, value: Any) -> bool:
    """Return whether a value is a point on a scale, rather than a text about ratings.

    >>> is_rating("score", "4.5"), is_rating("quality", "very poor"), is_rating("points", ["a: b"])
    (True, True, False)
    >>> is_rating("quality_explanation", "poor"), is_rating("reward_model", "org/name")
    (False, False)
    """
    return not is_about(name) and any(map(_is_place, _some_leaves(value)))


def _is_place(value: Any) -> bool:
    if shape_of(value) in ("flag", "number"):
        return True
    is_short = isinstance(value, str) and len(value.split()) <= _MAX_RATING_WORDS
    return is_short and not re.search(r"[:/\n]|\w-\d", value)


def is_weighted(name: str, value: Any) -> bool:
    """Return whether a weight, mask or flag asks for anything but ordinary learning.

    Values that are neither numbers nor flags have another meaning.

    >>> is_weighted("weight", 1.0), is_weighted("weight", 0), is_weighted("train", "false")
    (False, True, True)
    >>> is_weighted("loss_mask", True), is_weighted("masked", True), is_weighted("mask", [1, 0])
    (False, True, True)
    >>> is_weighted("loss", 1.7)
    False
    """
    if isinstance(value, (list, tuple)):
        flags = {str(one) for one in value if isinstance(one, (bool, int, float))}
        return len(flags) > 1 or any(is_weighted(name, one) for one in value[:1])
    words, text = set(split_name(name)), str(value).strip().lower()
    if shape_of(value) not in ("flag", "number"):
        return False
    if "loss" in words and not words & _WEIGHTS and text not in _FLAGS:
        return False  # a loss that was measured, not a weight
    if _is_turned(words):
        return text not in ("false", "0", "0.0", "no", "none")
    return text not in ("true", "1", "1.0", "yes")


MAX_WEIGHT = 100
"""Largest weight of a message or a part."""


def read_mark(name: str, value: Any) -> float | None:
    """Return the weight that a key of a message or a part asks for; None: it asks for none.

    >>> read_mark("train", False), read_mark("weight", "0"), read_mark("masked", True)
    (0.0, 0.0, 0.0)
    >>> read_mark("loss_weight", 0.5), read_mark("train", "yes"), read_mark("loss", 1.7)
    (0.5, 1.0, None)
    """
    is_mark = find_kind(name).kind == "weight" and shape_of(value) in ("flag", "number")
    text = str(value).strip().lower()
    words = set(split_name(name))
    is_measured = "loss" in words and not words & _WEIGHTS and text not in _FLAGS
    if not is_mark or is_measured or text == "nan":
        return None
    weight = float(_FLAG_WEIGHTS.get(text, text))
    return 1 - weight if _is_turned(words) else weight


def _is_turned(words: Set[str]) -> bool:
    # A message with a `loss_mask` of 1 is learned, a `masked` or `no_loss` message is not.
    return bool(words & (_REFUSING if "loss" in words else _SKIPPING))


def find_marker(text: str) -> str:
    """Return the first marker of a picture, sound or video in a text; empty: it has no marker.

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
        # Qwen-VL closes <img>, which HTML does not; other markers have no end, while HTML has.
        if tag is None or closed == (tag.lower() == "img"):
            return found.group()
    return ""
