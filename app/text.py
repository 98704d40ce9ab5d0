"""Format figures for display; elsewhere values are in base units.

An unknown value (`None`, or a float that is not a number) is shown as an en dash, never as 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from datetime import datetime

DASH = "\u2013"
"""Sign for an unknown value: an en dash."""
BREAK = "\u200b"
"""Zero-width space, at which a line may break."""
MOST_OF_NAME = 60
"""Maximum length of a file name made from a free text; file systems allow 255 bytes."""
# Characters that Windows, the strictest of the supported systems, forbids in file names.
_NO_NAME = re.compile(r'[/\\:*?"<>|\x00-\x1f]')
# Controls (C0, DEL, C1), direction marks, line separators, characters without width or glyph, and
# halves of surrogate pairs; but not the joiners of Persian words and of emoji.
_INVISIBLE = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f"
    "\\ud800-\\udfff\\ufeff\\ufff9-\\ufffb\\U000e0000-\\U000e007f]"
)
MOST_UNBROKEN = 24
"""Maximum number of unbreakable characters; more do not fit next to a form."""
_UNBROKEN = re.compile(f"[^\\s/\\\\-]{{{MOST_UNBROKEN + 1},}}")
# Between ASCII characters only, since letters of other scripts may be joined.
_BETWEEN = re.compile("(?<=[!-~])(?=[!-~])")

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def is_known(value: float | None) -> bool:
    """Return whether `value` is a finite number."""
    return value is not None and math.isfinite(value)


def show_number(value: float | None, digits: int = 0) -> str:
    """Return `value` with thousands separators.

    >>> show_number(12345.678, 1)
    '12,345.7'
    """
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:,.{digits}f}"


def show_count(value: float | None) -> str:
    """Return a number of downloads or likes in at most four characters.

    >>> show_count(950), show_count(12_345), show_count(8_400_000)
    ('950', '12K', '8.4M')
    """
    if value is None or not math.isfinite(value):
        return DASH
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= scale:
            return f"{value / scale:.{1 if value < 9.95 * scale else 0}f}{unit}"
    return f"{value:.0f}"


def show_loss(value: float | None) -> str:
    """Return a loss with four significant digits, or a word if it is not finite.

    >>> show_loss(2.34567), show_loss(3.02e43)
    ('2.346', '3.02e+43')
    """
    if value is None:
        return DASH
    # In words, since a dash would hide that training diverged.
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinite"
    if value != 0 and not 0.001 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def show_exponent(value: float | None, digits: int = 3) -> str:
    """Return a small number such as a learning rate in short scientific notation.

    >>> show_exponent(1.7e-4), show_exponent(0.005)
    ('1.7e-4', '5e-3')
    """
    if value is None or not is_known(value):
        return DASH
    # Converting the mantissa back to a number drops its trailing zeros.
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def show_share(value: float | None, digits: int = 0) -> str:
    """Return a share from 0 to 1 in percent.

    >>> show_share(0.954)
    '95 %'
    """
    return DASH if not is_known(value) else f"{(value or 0.0) * 100:.{digits}f} %"


def show_bytes(value: float | None) -> str:
    """Return a size with three significant digits and a binary unit.

    >>> show_bytes(12_884_901_888)
    '12.0 GiB'
    """
    if value is None or not math.isfinite(value):
        return DASH
    scaled, unit = float(value), 0
    # From 1000 on instead of 1024, since "1,023 KiB" would need a fourth digit.
    while abs(scaled) >= 1000 and unit < len(_BYTE_UNITS) - 1:
        scaled, unit = scaled / 1024, unit + 1
    digits = 0 if unit == 0 or abs(scaled) >= 100 else 1
    return f"{scaled:.{digits}f} {_BYTE_UNITS[unit]}"


def show_bytes_of(used: float | None, total: float | None) -> str:
    """Return `used` of `total` in the unit of `total`.

    >>> show_bytes_of(6 * 1024**3, 12 * 1024**3)
    '6.0 / 12.0 GiB'
    """
    if total is None or not math.isfinite(total):
        return show_bytes(used)
    number, _, unit = show_bytes(total).partition(" ")
    if used is None or not math.isfinite(used):
        return f"{DASH} / {number} {unit}"
    scale = 1024 ** _BYTE_UNITS.index(unit)
    digits = 0 if unit == "B" or total / scale >= 100 else 1
    return f"{used / scale:.{digits}f} / {number} {unit}"


def show_watts(value: float | None) -> str:
    """Return a power in watts, from 10 kW on in kilowatts."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:.0f} W" if value < 10_000 else f"{value / 1000:.1f} kW"


def show_mhz(value: float | None) -> str:
    """Return a clock rate in megahertz.

    >>> show_mhz(2407.0), show_mhz(None)
    ('2,407 MHz', '\u2013')
    """
    return DASH if value is None else f"{value:,.0f} MHz"


def show_celsius(value: float | None) -> str:
    """Return a temperature."""
    return DASH if not is_known(value) else f"{value:.0f} \u00b0C"


def show_rate(value: float | None, unit: str = "tok/s") -> str:
    """Return a speed such as `1,204 tok/s`."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{show_number(value, 1 if value < 10 else 0)} {unit}"


def show_duration(seconds: float | None) -> str:
    """Return a duration in its two largest units.

    >>> show_duration(3725)
    '1 h 2 min'
    """
    if seconds is None or not math.isfinite(seconds):
        return DASH
    # Both limits are where rounding would give 1000 ms or 10.0 s.
    if seconds < 0.9995:
        return f"{max(seconds, 0.0) * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes < 10 and rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def show_moment(time_s: float | None, now_s: float) -> str:
    """Return a wall clock time as local time, without the date if it is today.

    >>> show_moment(None, 0.0) == DASH
    True
    """
    if time_s is None:
        return DASH
    moment, now = datetime.fromtimestamp(time_s), datetime.fromtimestamp(now_s)
    if moment.date() == now.date():
        return moment.strftime("%H:%M:%S")
    return moment.strftime("%d %b %H:%M" if moment.year == now.year else "%d %b %Y %H:%M")


def count_of(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as `1 node` or `3 nodes`.

    >>> count_of(3, "node")
    '3 nodes'
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def name_layers(span: tuple[int, int]) -> str:
    """Return the layers of a stage, counted from 1.

    Args:
        span: index of the first layer, and of the one after the last.

    >>> name_layers((12, 24)), name_layers((3, 4))
    ('layers 13 to 24', 'layer 4')
    """
    first, stop = span
    return f"layer {stop}" if stop - first == 1 else f"layers {first + 1} to {stop}"


def show_model(model: str) -> str:
    """Shorten a model's folder to its last two parts; a hub id has at most two.

    >>> show_model("/home/anna/models/Llama-2-7b-hf/")
    'models/Llama-2-7b-hf'
    >>> show_model("meta-llama/Llama-2-7b-hf")
    'meta-llama/Llama-2-7b-hf'
    """
    # A path may come from Windows, even if it is shown on another system.
    parts = [part for part in model.replace("\\", "/").split("/") if part]
    return "/".join(parts[-2:])


def short_card(name: str) -> str:
    """Return a device's name without its brand.

    >>> short_card("NVIDIA GeForce RTX 3090")
    'RTX 3090'
    """
    # In this order, since the second prefix follows the first.
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def show_list(names: Sequence[str]) -> str:
    """Join names as in a sentence.

    >>> show_list(["alpha", "beta", "gamma"])
    'alpha, beta and gamma'
    """
    if len(names) < 2:
        return "".join(names) or "nothing"
    return ", ".join(names[:-1]) + " and " + names[-1]


def free_name(wanted: str, taken: Collection[str]) -> str:
    """Return `wanted`, or if it is taken, with the next free number appended.

    >>> free_name("poems", {"poems", "poems-2"})
    'poems-3'
    >>> free_name("run-1", {"run-1"})
    'run-2'
    """
    stem, _, number = wanted.rpartition("-")
    stem, count = (stem, int(number)) if stem and number.isdecimal() else (wanted, 1)
    name = wanted
    while name in taken:
        count += 1
        name = f"{stem}-{count}"
    return name


def let_break(text: str) -> str:
    """Insert a BREAK between the letters of long words, such as file names.

    >>> let_break("step-1 is in /home") == "step-1 is in /home"
    True
    >>> let_break("0" * 64).count(BREAK)
    63
    """
    return _UNBROKEN.sub(lambda found: _BETWEEN.sub(BREAK, found[0]), text)


def shorten(text: str, most: int = 200) -> str:
    """Strip a text and truncate it to `most` characters, followed by dots.

    >>> shorten(" 1.5 "), shorten("9" * 400, 20)
    ('1.5', '99999999999999999999...')
    """
    text = text.strip()
    return text if len(text) <= most else f"{text[:most]}..."


def show_foreign(text: str, keep: str = "") -> str:
    """Return a foreign text with invisible and control characters as escapes.

    Such characters can move a terminal's cursor, set its title and clipboard, reverse the direction
    of the following text, or hide.

    >>> show_foreign("pc\\x1b[2J\\n"), show_foreign("a\\nb\\u202ec", keep="\\n")
    ('pc\\\\x1b[2J\\\\n', 'a\\nb\\\\u202ec')
    """
    if text.isascii() and text.isprintable():
        return text
    return _INVISIBLE.sub(
        lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text
    )


def one_line(text: str) -> str:
    """Return a foreign sentence or name as one line, so that it cannot imitate another line.

    >>> one_line("no room\\nrackless: all is well\\x1b[2J")
    'no room rackless: all is well\\\\x1b[2J'
    """
    if text.isascii() and text.isprintable():
        return text
    return show_foreign(" ".join(text.split("\n")).replace("\r", "").replace("\t", " "))


def file_name(text: str) -> str:
    """Return a valid file name on every system, made from a free text.

    >>> file_name("a/b: c"), len(file_name("x" * 300))
    ('a-b- c', 60)
    """
    return _NO_NAME.sub("-", text)[:MOST_OF_NAME]


def capitalize(text: str) -> str:
    """Return a text with a capital first letter and the rest unchanged.

    >>> capitalize("sending the model to PC-2")
    'Sending the model to PC-2'
    """
    return text[:1].upper() + text[1:]
