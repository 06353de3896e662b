"""Whose turn it is in a store."""
from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING

from .. import errors

if TYPE_CHECKING:
    from .store import Store


class Turn:
    """A ``with`` block in which no other thread may be inside the store.

    The kernel refuses a second thread too, but one call here may be several native ones (a prefill is one a dispatch), and they
    share the step buffers. The same thread may come in again: from the progress callback of its own prefill.

    Attributes
    ----------
    is_cancelled : bool
        Set by :meth:`Store.cancel`, cleared when a thread comes in.
    """

    __slots__ = ("_depth", "_lock", "_store", "is_cancelled")

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._depth = 0
        self.is_cancelled = False

    def __enter__(self) -> None:
        if self._store.is_unusable:
            self._store._ptr()  # raises: closed, or in a forked child, where the lock's holder may not exist
        if not self._lock.acquire(blocking=False):
            raise errors.BusyError("another thread is inside this store; one call at a time")
        if self._depth == 0:
            self.is_cancelled = False
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        self._lock.release()
