"""What the command line knows about terminals: which escapes may be used, how wide text is, and where it breaks.

Escapes are written only to a terminal, colours only without ``NO_COLOR``, and a model's text never carries escapes of its own to one.
"""
from __future__ import annotations

import os
import re
import shutil
import unicodedata
from typing import TextIO

BOLD, DIM, CYAN = "1", "2", "36"
ERASE_LINE, CLEAR = "\x1b[K", "\x1b[2J\x1b[H"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"

_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class Terminal:
    """One output stream.

    Attributes
    ----------
    is_live : bool
        True when it is a terminal that can redraw.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_colour = self.is_live and not os.environ.get("NO_COLOR")

    def write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()

    def paint(self, text: str, *codes: str) -> str:
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if self._has_colour and text else text

    def size(self) -> tuple[int, int]:
        """Columns and lines, now."""
        try:
            found = os.get_terminal_size(self.stream.fileno())
        except (OSError, ValueError):
            found = os.terminal_size((0, 0))
        if not (found.columns and found.lines):
            found = shutil.get_terminal_size()
        return found.columns, found.lines


def plural(n: int, noun: str, nouns: str | None = None) -> str:
    """A number with its noun: ``1 token``, ``2,048 tokens``."""
    return f"{n:,} {noun if n == 1 else nouns or noun + 's'}"


def rate(n: int, seconds: float) -> str:
    """Tokens per second, or nothing while there is nothing to divide."""
    speed = n / seconds if seconds > 0 else 0.0
    return f", {speed:,.{0 if speed >= 100 else 1}f} tokens/s" if n and speed else ""


def clean(text: str) -> str:
    """Text that is safe on a terminal: no control characters but the newline, no change of direction."""
    return _CONTROL.sub(lambda found: {"\t": "    ", "\r": "", "\u2028": "\n", "\u2029": "\n"}.get(found[0], "\ufffd"), text)


def width(text: str) -> int:
    """Columns a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.category(c) in ("Mn", "Me", "Cf") else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, columns: int) -> int:
    """How many characters of ``text`` fit into so many columns; one at least."""
    if text.isascii():
        return max(1, min(len(text), columns))
    n = used = 0
    while n < len(text) and (used := used + width(text[n])) <= columns:
        n += 1
    return max(1, n)


def fit(text: str, columns: int) -> str:
    """``text`` in exactly so many columns: shortened with an ellipsis, or filled up with spaces."""
    text = text.rstrip()
    if width(text) > columns:
        text = text[: cut(text, columns - 1)] + "…"
    return text + " " * (columns - width(text))


def wrap(text: str, columns: int) -> list[str]:
    """Lines of at most so many columns, not counting the spaces they end in; the last one is where more text may be added."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in re.findall(r" *[^ ]+ *| +", paragraph) if paragraph else ():
            if line and width(line + word.rstrip()) > columns:
                lines.append(line)
                line = ""
            line += word
            while width(line.rstrip()) > columns:
                n = cut(line, columns)
                lines.append(line[:n])
                line = line[n:]
        lines.append(line)
    return lines


class Wrapped:
    """Text that grows, wrapped: only its last line is looked at again."""

    def __init__(self, columns: int, text: str = "") -> None:
        self.columns = columns
        self.lines = wrap(text, columns)

    def add(self, text: str) -> None:
        self.lines[-1:] = wrap(self.lines[-1] + text, self.columns)

    def tail(self, n: int) -> list[str]:
        """The last ``n`` lines, filled up with empty ones."""
        shown = self.lines[-n:]
        return shown + [""] * (n - len(shown))
