"""Cells at run time: who has been promised how many, and what is left for whoever asks next.

A store refuses by itself what does not fit at the moment of a call. That is too late for work that needs several calls: half of it is
done when the cells run out. So work asks here first, for all it will need, and gives back what it did not.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal, Self

from ..errors import ClosedError, ContextOverflowError, InvalidArgumentError

Zone = Literal["headroom", "soft", "hard"]
N_HOLDERS: Final = 5


@dataclass(frozen=True, slots=True)
class Cells:
    """Live numbers.

    Attributes
    ----------
    total, used : int
        Cells of the store, and those that hold something.
    reserved : int
        Promised and not yet used.
    remaining : int
        Neither used nor promised.
    zone : {"headroom", "soft", "hard"}
        "headroom": above the soft floor, nothing to think of. "soft": below it, new work had better wait. "hard": below the hard floor,
        what is left belongs to work that is under way.
    """

    total: int
    used: int
    reserved: int
    remaining: int
    zone: Zone


class Admission:
    """The ledger of a store's cells.

    Parameters
    ----------
    total : int
    used : callable
        Gives the cells in use, live.
    hard_floor : int
        Cells that nobody is promised: at least one dispatch, so that what is under way can always be finished.
    soft_floor : int
        At least the hard floor.
    holders : callable, optional
        Names the largest holders of cells, for refusals.

    Thread-safe.
    """

    def __init__(self, total: int, used: Callable[[], int], *, hard_floor: int, soft_floor: int, holders: Callable[[], Sequence[tuple[str, int]]] | None = None) -> None:
        if not 0 <= hard_floor <= soft_floor <= total:
            raise InvalidArgumentError(f"a hard floor of {hard_floor:,} and a soft floor of {soft_floor:,} of {total:,} cells; the hard one is the lower, and neither is more than there is")
        self.total, self.hard_floor, self.soft_floor = total, hard_floor, soft_floor
        self._used, self._holders = used, holders or (lambda: ())
        self._lock = threading.Lock()
        self._reservations: dict[int, Reservation] = {}
        self._next = 0

    def cells(self) -> Cells:
        """Live numbers."""
        with self._lock:
            return self._cells()

    def can_admit(self, n: int) -> bool:
        """Whether :meth:`admit` would, at this moment."""
        return self.cells().remaining - n >= self.hard_floor

    def admit(self, n: int, what: str = "") -> Reservation:
        """Promise n cells.

        Raises
        ------
        ContextOverflowError
            They would go below the hard floor. Nothing was promised; ``need``, ``have``, ``reserved`` and ``holders`` are live.
        InvalidArgumentError
            n is no number of cells.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise InvalidArgumentError(f"{n!r} cells cannot be promised")
        with self._lock:
            now = self._cells()
            if now.remaining - n >= self.hard_floor:
                self._next += 1
                made = self._reservations[self._next] = Reservation(self, self._next, n, what)
                return made
        have = max(0, now.remaining - self.hard_floor)
        largest = sorted(self._holders(), key=lambda row: -row[1])[:N_HOLDERS]
        error = ContextOverflowError(f"{what or 'this'} needs {n:,} cells and {have:,} can be promised: of {now.total:,}, {now.used:,} are used, {now.reserved:,} promised and"
                                     f" {self.hard_floor:,} kept back" + (f"; most are held by {', '.join(f'{name} ({n_cells:,})' for name, n_cells in largest)}" if largest else ""))
        error.need, error.have, error.reserved, error.holders = n, have, now.reserved, tuple(largest)
        raise error

    def _cells(self) -> Cells:
        used = self._used()
        reserved = sum(reservation.left for reservation in self._reservations.values())
        remaining = self.total - used - reserved
        zone: Zone = "headroom" if remaining > self.soft_floor else ("soft" if remaining > self.hard_floor else "hard")
        return Cells(self.total, used, reserved, remaining, zone)


@dataclass(eq=False)
class Reservation:
    """Cells somebody was promised. A context manager: leaving it gives back what was not used.

    Attributes
    ----------
    n_cells : int
        Promised at first.
    what : str
    left : int
        Of these, not yet used.
    """

    _admission: Admission = field(repr=False)
    _number: int = field(repr=False)
    n_cells: int
    what: str
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.n_cells

    @property
    def is_released(self) -> bool:
        return self._number not in self._admission._reservations

    def use(self, n: int) -> None:
        """Say that n of them are about to be decoded: from then on the store counts them.

        Raises
        ------
        ContextOverflowError
            So many were not promised. Nothing changed.
        ClosedError
            They were given back.
        """
        with self._admission._lock:
            if self.is_released:
                raise ClosedError(f"the reservation of {self.n_cells:,} cells was given back")
            if not 0 <= n <= self.left:
                error = ContextOverflowError(f"{self.what or 'this'} was promised {self.n_cells:,} cells, of which {self.left:,} are left, and wants to use {n:,}")
                error.need, error.have = n, self.left
                raise error
            self.left -= n

    def release(self) -> None:
        """Give back what is left. Doing it again does nothing."""
        with self._admission._lock:
            self._admission._reservations.pop(self._number, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
