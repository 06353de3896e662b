"""A native object owned by a Python one.

Freed exactly once: by ``close()``, by leaving a ``with`` block, by the garbage collector, or at exit, whichever comes first.
``weakref.finalize`` rather than ``__del__``: it runs at exit in a known order, and never on a half-made object.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from .. import errors
from . import load


def _release(free: Callable[[Any], int], pointer: Any, generation: int) -> None:
    last = type(pointer)(pointer.value)
    pointer.value = None  # before it is freed: whoever comes now is told that it is closed
    # In a forked child the native object does not exist, and a pointer that is still NULL was never filled in.
    if generation == load.generation and last:
        free(last)


class Handle:
    """Base of classes that own a native object. Closing one closes its children first.

    Made before the native call that fills ``pointer`` in, so that not even an interrupt between the two leaves an orphan.
    """

    def __init__(self, pointer: Any, free: Callable[[Any], int], parent: Handle | None = None) -> None:
        self._pointer = pointer
        self._generation = load.generation
        self._parent = parent  # held strongly: a parent outlives its children
        self._children: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, _release, free, pointer, load.generation)
        if parent is not None:
            parent._children.add(self)

    @property
    def is_closed(self) -> bool:
        return not self._pointer

    @property
    def is_unusable(self) -> bool:
        """True when it was closed, or belongs to the process this one was forked from."""
        return self._generation != load.generation or not self._pointer

    def _ptr(self) -> Any:
        """The native pointer, for a call that follows at once."""
        if self._generation != load.generation:
            raise errors.ForkedProcessError(f"this {type(self).__name__} was made before fork() and does not exist in the child; open a new one here")
        if not self._pointer:
            load.quiet_at_exit()
            raise errors.ClosedError(f"this {type(self).__name__} is closed")
        return self._pointer

    def close(self) -> None:
        """Free the native object, children first. Closing again does nothing."""
        for child in list(self._children):
            child.close()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
