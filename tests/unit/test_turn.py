"""Whose turn it is: never two threads', never waited for, and given back whatever strikes."""
from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import pytest

import pylloyal
from pylloyal import errors
from pylloyal.kernel.turn import Turn

T = TypeVar("T")


@pytest.fixture
def turn(model: pylloyal.Model) -> Iterator[Turn]:
    with model.store(n_ctx=256, n_branches=2, n_batch=16, n_threads=1) as store:
        yield store._turn


class Other:
    """A second thread, told what to do and waited for; the wait has an end only so that a fault fails instead of hanging."""

    def __init__(self) -> None:
        self._todo: list[Callable[[], Any]] = []
        self._asked, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._outcome: Any = None
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._asked.acquire()
            try:
                self._outcome = self._todo.pop()()
            except BaseException as error:
                self._outcome = error
            self._done.release()

    def does(self, call: Callable[[], T]) -> T:
        self._todo.append(call)
        self._asked.release()
        assert self._done.acquire(timeout=30), "the other thread waits for something"
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        result: T = self._outcome
        return result


def test_of_two_threads_on_their_way_in_the_second_is_refused_not_held(turn: Turn) -> None:
    a, b = Other(), Other()
    coming_a, coming_b = a.does(turn.take), b.does(turn.take)  # neither has seen the other
    a.does(coming_a.__enter__)
    with pytest.raises(errors.BusyError):
        b.does(coming_b.__enter__)
    a.does(lambda: coming_a.__exit__(None, None, None))
    b.does(coming_b.__enter__)
    b.does(lambda: coming_b.__exit__(None, None, None))


def test_who_is_inside_stays_known_when_another_was_on_its_way(turn: Turn) -> None:
    other = Other()
    here, _ = turn.take(), other.does(turn.take)

    def enter() -> None:
        with turn.take():
            pass

    with here:
        with turn.take(), turn.take():  # as a progress callback comes in again
            pass
        with pytest.raises(errors.BusyError):  # and having come back out, this thread is still inside
            other.does(enter)
    other.does(enter)


def test_the_turn_is_given_back_after_an_error(turn: Turn) -> None:
    with pytest.raises(ZeroDivisionError), turn.take():
        raise ZeroDivisionError
    assert not turn._lock._is_owned()


class Struck:
    """A lock that is interrupted as soon as it is taken."""

    def __init__(self, lock: Any) -> None:
        self._is_owned, self.release, self._acquire = lock._is_owned, lock.release, lock.acquire

    def acquire(self, blocking: bool) -> bool:
        self._acquire(blocking=blocking)
        raise KeyboardInterrupt


def test_an_interrupt_with_the_lock_just_taken_leaves_it_free(turn: Turn) -> None:
    lock, turn._lock = turn._lock, Struck(turn._lock)
    with pytest.raises(KeyboardInterrupt), turn.take():
        pytest.fail("came in")
    turn._lock = lock
    assert not lock._is_owned()
    Other().does(lambda: lock.acquire(blocking=False))


def test_an_interrupt_at_any_line_of_the_way_in_and_out_leaves_it_free(turn: Turn) -> None:
    """Every line that Python runs between the statement and the block, and between the block and what follows it."""

    def strike(nth: int) -> bool:
        left = nth

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.endswith("turn.py") or event not in ("call", "line"):
                return trace
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with turn.take():
                pass
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    n = 0
    while strike(n):
        assert not turn._lock._is_owned()
        n += 1
    assert n > 4 and not turn._lock._is_owned()
