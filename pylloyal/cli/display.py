"""How answers are shown while they are written: side by side on a terminal, line by line everywhere else.

The columns are a block of lines at the bottom of the terminal, redrawn by moving the cursor up. Every frame is one write that hides
the cursor and shows it again, so there is nothing to restore, however the program ends.
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .terminal import BOLD, CLEAR, CYAN, DIM, ERASE_LINE, HIDE_CURSOR, SHOW_CURSOR, Terminal, Wrapped, clean, fit, plural, rate, wrap

MIN_COLUMNS, MIN_ROWS, MAX_ROWS = 30, 3, 14
GAP = " │ "
FRAME_S = 0.05


class Display:
    """Shows how reading goes on ``err``, and nothing of the answers: the display of ``--json``, and the base of the others."""

    def __init__(self, err: Terminal) -> None:
        self._err = err

    def notes(self, notes: Sequence[str]) -> None:
        """Say what the template changed about the messages."""
        for note in notes:
            self._err.write(f"pylloyal: note: {clean(note)}\n")

    def reading(self, read: int, total: int, seconds: float) -> None:
        """Progress of the prefill, on a terminal only."""
        if self._err.is_live:
            self._err.write(f"\rreading {read:,} / {plural(total, 'token')}{rate(read, seconds)}{ERASE_LINE}")

    def has_read(self, read: int, total: int, seconds: float, dispatches: int) -> None:
        """The last line about reading."""
        part = "" if read == total else f"{read:,} of "
        line = f"read {part}{plural(total, 'token')} in {seconds:.2f} s{rate(read, seconds)}, {plural(dispatches, 'dispatch', 'dispatches')}"
        self._err.write(f"\r{self._err.paint(line, DIM)}{ERASE_LINE}\n" if self._err.is_live else line + "\n")

    def add(self, i: int, text: str) -> None:
        """Answer ``i`` goes on with ``text``."""

    def finish(self, i: int) -> None:
        """Answer ``i`` is complete."""

    def draw(self, ticks: int, tokens: int, seconds: float) -> None:
        """A tick is over."""

    def close(self) -> None:
        """Leave the terminal as it should be, with all text there is on it."""


class Lines(Display):
    """``[i] text``, for each line as soon as it is complete."""

    def __init__(self, err: Terminal, out: Terminal, n: int) -> None:
        super().__init__(err)
        self._out = out
        self._pending = [""] * n
        self._is_shown = [False] * n

    def add(self, i: int, text: str) -> None:
        *lines, self._pending[i] = (self._pending[i] + (clean(text) if self._out.stream.isatty() else text)).split("\n")
        for line in lines:
            self._print(i, line)

    def finish(self, i: int) -> None:
        if self._pending[i] or not self._is_shown[i]:
            self._print(i, self._pending[i])
            self._pending[i] = ""

    def close(self) -> None:
        for i, pending in enumerate(self._pending):
            if pending:
                self.finish(i)

    def _print(self, i: int, line: str) -> None:
        self._is_shown[i] = True
        self._out.write(f"[{i + 1}] {line}".rstrip(" ") + "\n")


class Flow(Display):
    """One answer on a terminal: simply written, as it comes."""

    def __init__(self, err: Terminal, out: Terminal) -> None:
        super().__init__(err)
        self._out = out
        self._end = "\n"

    def add(self, i: int, text: str) -> None:  # noqa: ARG002
        if text:
            self._end = text[-1]
            self._out.write(clean(text))

    def close(self) -> None:
        if self._end != "\n":
            self._out.write("\n")


@dataclass(frozen=True)
class Layout:
    """A grid: ``per_row`` columns side by side, each with a heading and ``rows`` lines of text."""

    per_row: int
    columns: int
    rows: int

    @classmethod
    def of(cls, n: int, size: tuple[int, int]) -> Layout | None:
        """The grid for ``n`` answers, or None when the terminal is too small for it."""
        columns, lines = size[0] - 1, size[1] - 2  # a full last column may wrap; the status line, and the one the cursor is on
        bands = -(-n // max(1, (columns + len(GAP)) // (MIN_COLUMNS + len(GAP))))
        per_row = -(-n // bands)
        grid = cls(per_row, (columns + len(GAP)) // per_row - len(GAP), min(lines // bands - 1, MAX_ROWS))
        return grid if grid.columns >= MIN_COLUMNS and grid.rows >= MIN_ROWS else None


class Columns(Display):
    """All answers side by side, the tail of each; in the end, each in full."""

    def __init__(self, err: Terminal, out: Terminal, headings: Sequence[str]) -> None:
        super().__init__(err)
        self._out = out
        self._headings = [clean(heading).replace("\n", " ") for heading in headings]
        self._texts = [""] * len(headings)
        self._is_done = [False] * len(headings)
        self._wrapped: list[Wrapped] = []
        self._size: tuple[int, int] | None = None
        self._grid: Layout | None = None
        self._height = 0
        self._drawn_at = 0.0

    def add(self, i: int, text: str) -> None:
        text = clean(text)
        self._texts[i] += text
        if self._wrapped:
            self._wrapped[i].add(text)

    def finish(self, i: int) -> None:
        self._is_done[i] = True

    def draw(self, ticks: int, tokens: int, seconds: float) -> None:
        if time.monotonic() - self._drawn_at < FRAME_S:
            return
        start = self._up()
        if (size := self._out.size()) != self._size:
            if self._size is not None:
                start = CLEAR  # what was drawn has been wrapped anew by the terminal: there is no way back up
            self._size, self._grid = size, Layout.of(len(self._texts), size)
            self._wrapped = [Wrapped(self._grid.columns, text) for text in self._texts] if self._grid else []
        going = self._is_done.count(False)
        status = f"{plural(ticks, 'tick')}, {going} of {len(self._texts)} writing, {plural(tokens, 'token')}{rate(tokens, seconds)}"
        lines = [*self._block(), self._out.paint(fit(status, size[0] - 1).rstrip(), DIM)]
        self._height = len(lines)
        self._out.write(HIDE_CURSOR + start + "".join(f"{line}{ERASE_LINE}\n" for line in lines) + SHOW_CURSOR)
        self._drawn_at = time.monotonic()

    def close(self) -> None:
        if not any(self._texts) and not self._height:
            return
        columns = self._out.size()[0] - 1
        parts = [self._up(), f"{ERASE_LINE}\n" * self._height, self._up()]
        for heading, text in zip(self._headings, self._texts, strict=True):
            parts += self._out.paint("\n".join(line.rstrip() for line in wrap(heading, columns)), BOLD, CYAN), "\n", text.strip("\n"), "\n\n"
        self._height = 0
        self._out.write("".join(parts))

    def _up(self) -> str:
        return f"\r\x1b[{self._height}A" if self._height else "\r"

    def _block(self) -> list[str]:
        """The lines of the grid."""
        if (grid := self._grid) is None:
            return []
        lines: list[str] = []
        for first in range(0, len(self._texts), grid.per_row):
            band = range(first, min(first + grid.per_row, len(self._texts)))
            lines.append(GAP.join(self._out.paint(fit(self._headings[i], grid.columns), *((DIM,) if self._is_done[i] else (BOLD, CYAN))) for i in band))
            tails = [self._wrapped[i].tail(grid.rows) for i in band]
            lines += [GAP.join(fit(line, grid.columns) for line in row) for row in zip(*tails, strict=True)]
        return lines


def choose(err: Terminal, out: Terminal, headings: Sequence[str], *, is_json: bool) -> Display:
    """The display for this output."""
    if is_json:
        return Display(err)
    if out.is_live and len(headings) == 1:
        return Flow(err, out)
    if out.is_live and Layout.of(len(headings), out.size()) is not None:
        return Columns(err, out, headings)
    return Lines(err, out, len(headings))
