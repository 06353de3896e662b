"""Whose turn it is in a store, and how a long turn is interrupted."""
from __future__ import annotations

import _thread
import contextlib
import threading
from collections.abc import Callable
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

    Taking the turn and learning whose it is are one step, the lock's: it knows its owner. It is taken by what ``with`` enters, not
    before, so that an interrupt on the way there leaves nothing taken; and what ``with`` leaves by is the lock's own ``__exit__``,
    which no interrupt can keep from giving back.

    Attributes
    ----------
    n_cancels : int
        Times :meth:`Store.cancel` was called: whoever is inside compares it with what it was when it came in.
    """

    __slots__ = ("__exit__", "_lock", "_store", "n_cancels")

    __exit__: Callable[..., None]

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock: Any = threading.RLock()
        self.__exit__ = self._lock.__exit__
        self.n_cancels = 0

    def take(self) -> AbstractContextManager[Any]:
        """What to hold while inside; entering it is BusyError while another thread is."""
        if self._store.is_unusable:
            self._store._ptr()  # raises: closed, or in a forked child, where the lock's holder may not exist
        return _NOTHING if self._lock._is_owned() else self

    def __enter__(self) -> None:
        # Python looks for signals after calls and jumps, not between this function's return and the `with` it returns to.
        try:
            if not self._lock.acquire(blocking=False):
                raise errors.BusyError("another thread is inside this store; one call at a time")
        except BaseException:
            if self._lock._is_owned():  # an interrupt came with the lock just taken
                self._lock.release()
            raise


def interruptibly(call: Callable[[], None], cancel: Callable[[], None]) -> None:
    """Run a long native call so that Ctrl-C reaches Python: on a thread of its own, cancelled and waited for."""
    if threading.current_thread() is not threading.main_thread():
        call()
        return
    caught: list[BaseException] = []
    ended: list[bool] = []  # only ever grows, so no interrupt can leave it half-set
    over = threading.Lock()
    over.acquire()

    def body() -> None:
        try:
            call()
        except BaseException as error:
            caught.append(error)
        finally:
            ended.append(True)
            over.release()

    # Bare locks and threads: threading.Thread takes an interrupted join() for a finished thread (bpo-45274), and Event and
    # Condition are Python code that an interrupt can break in the middle.
    interrupt: KeyboardInterrupt | None = None
    start = _thread.start_new_thread
    try:
        start(body, ())  # the first thing inside `try`: an interrupt from here on means that it has started
        while not ended:  # with a timeout: a signal that comes just before a wait does not end it
            over.acquire(timeout=0.25)
    except RuntimeError:  # no new threads: the interpreter is shutting down
        call()
        return
    except KeyboardInterrupt as error:
        interrupt = error
    while not ended:
        with contextlib.suppress(KeyboardInterrupt):
            cancel()  # again and again: it may not have got into the kernel yet, and a cancel is for who is inside
            over.acquire(timeout=0.02)
    if interrupt is not None:
        raise interrupt
    if caught:
        raise caught[0]
