"""Whose turn it is in a store."""
from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING

from .. import errors

if TYPE_CHECKING:
    from .store import Store


class Turn:
    """No other thread may be inside the store while one holds a ticket: ``with store._turn.take(): ...``.

    The kernel refuses a second thread too, but one call here may be several native ones (a prefill is one a dispatch), and they
    share the step buffers. The same thread may come in again: from the progress callback of its own prefill.

    A lock would do, were it not for Ctrl-C: an exception between any two bytecodes can strike right after it was taken, and it
    would stay taken. A ticket counts only while the call that took it is still running.

    Attributes
    ----------
    n_cancels : int
        Times :meth:`Store.cancel` was called: whoever is inside compares it with what it was when it came in.
    """

    __slots__ = ("_holder", "_lock", "_store", "n_cancels")

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()  # held for a few bytecodes; a `with` on a built-in lock is safe from interrupts
        self._holder: Ticket | None = None
        self.n_cancels = 0

    def take(self) -> Ticket:
        """A ticket for the calling function, or BusyError while another thread holds one."""
        if self._store.is_unusable:
            self._store._ptr()  # raises: closed, or in a forked child, where the lock's holder may not exist
        ticket = Ticket(id(sys._getframe(1)))
        with self._lock:
            holder = self._holder
            if holder is None or holder.is_over:
                self._holder = ticket
            elif holder.thread != ticket.thread:
                if holder.is_running():
                    raise errors.BusyError("another thread is inside this store; one call at a time")
                self._holder = ticket
        return ticket


class Ticket:
    """The right to be inside, until its ``with`` block ends or the call that took it is gone."""

    __slots__ = ("_call", "is_over", "thread")

    def __init__(self, call: int) -> None:
        self._call = call
        self.thread = threading.get_ident()
        self.is_over = False

    def is_running(self) -> bool:
        """True while the call that took it is on its thread's stack."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None and id(frame) != self._call:
            frame = frame.f_back
        return frame is not None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.is_over = True
