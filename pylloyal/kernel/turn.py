"""Whose turn it is in a store."""
from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from .. import errors

if TYPE_CHECKING:
    from .store import Store

_NOTHING: Final = contextlib.nullcontext()


class Turn:
    """No other thread may be inside the store: ``with store._turn.take(): ...``.

    The kernel refuses a second thread too, but one call here may be several native ones (a prefill is one a dispatch), and they
    share the step buffers. The same thread may come in again: from the progress callback of its own prefill.

    What ``with`` holds is a bare built-in lock: an interrupt can strike between any two bytecodes, but not between that lock's
    being taken and the block's being sure to give it back.

    Attributes
    ----------
    n_cancels : int
        Times :meth:`Store.cancel` was called: whoever is inside compares it with what it was when it came in.
    """

    __slots__ = ("_lock", "_store", "_thread", "n_cancels")

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._thread = 0
        self.n_cancels = 0

    def take(self) -> AbstractContextManager[Any]:
        """What to hold while inside; BusyError while another thread is."""
        if self._store.is_unusable:
            self._store._ptr()  # raises: closed, or in a forked child, where the lock's holder may not exist
        me = threading.get_ident()
        if self._lock.locked():
            if self._thread == me:
                return _NOTHING
            raise errors.BusyError("another thread is inside this store; one call at a time")
        self._thread = me
        return self._lock
