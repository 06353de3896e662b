"""Ctrl-C, answered at places of our choosing.

The default, an exception between any two bytecodes, can strike inside an import, a half-drawn screen or the clean-up after the first
one. Here it is remembered, and raised where the command asks; a second one, while the first is being answered, changes nothing.
"""
from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """Takes SIGINT over, unless this is not the main thread or the signal is ignored (``nohup``, a script's ``&``).

    Attributes
    ----------
    asked : bool
        True once Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.asked = False
        self._is_at_once = False
        self._owns = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        if self._owns:
            self._before = signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        is_first, self.asked = not self.asked, True
        if is_first and self._is_at_once:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self.asked:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """While something blocks that only an exception ends, such as reading standard input."""
        self._is_at_once = True
        try:
            self.check()
            yield
        finally:
            self._is_at_once = False

    def end(self, *, is_exiting: bool) -> None:
        """Give SIGINT back to whoever had it; or, when the process is about to exit, to nobody, so that its status stands."""
        if self._owns:
            signal.signal(signal.SIGINT, signal.SIG_IGN if is_exiting else self._before)
            self._owns = False
