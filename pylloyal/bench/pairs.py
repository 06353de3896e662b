"""Sides that are compared run in turns, A B B A, so that a machine that changes changes both; what counts is the ratio of neighbours."""
from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .rows import BoundOn, Label, Row, failed


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of one value, that value."""
    if len(values) < 2:
        return (values[0],) * 3
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


@dataclass(slots=True)
class Side:
    """One way to do the work that is compared.

    Attributes
    ----------
    run : callable
        Does it once and returns its figure.
    """

    label: Label
    path: str
    run: Callable[[], float]
    bound: float | None = None
    bound_on: BoundOn = "ratio"
    note: str = ""
    figures: list[float] = field(default_factory=list)
    reason: BaseException | None = None

    def measure(self, keep: bool = True) -> None:
        """Once more; a side that failed once has failed, and keeps no figure."""
        if self.reason is not None:
            return
        try:
            figure = self.run()
        except Exception as error:
            self.reason = error
            self.figures.clear()
            return
        if keep:
            self.figures.append(figure)


def measure(sides: Sequence[Side | None], n: int, *, n_warm: int = 1, before: Callable[[], object] | None = None) -> None:
    """Warm the sides, then measure them in turns ``n`` times, every other time the last one first; None stands for a side there is not.

    Parameters
    ----------
    before : callable, optional
        Called before each round.
    """
    for i in range(n_warm + n):
        if before is not None:
            before()
        for side in sides[:: 1 if i % 2 == 0 else -1]:
            if side is not None:
                side.measure(keep=i >= n_warm)


def rows_of(group: str, what: str, unit: str, control: Side | None, sides: Sequence[Side], *, x: float | None = None, against: str = "") -> Iterator[Row]:
    """A row for the control, if there is one, and for each side: its figures, and their ratios to the control's, neighbour by neighbour.

    A side that failed is a failed row. Without a control (none given, or it failed) there are figures and no ratios.

    Parameters
    ----------
    against : str
        What the control is, if that is not plain; goes into the notes of the ratios.
    """
    for side in [*([control] if control else []), *sides]:
        if side.reason is not None or not side.figures:
            yield failed(group, what, side.label, side.path, side.reason or "was not measured", note=side.note, x=x)
            continue
        low, median, high = quartiles(side.figures)
        row = Row(group, what, side.label, side.path, unit, len(side.figures), median, low, high, bound=side.bound, bound_on=side.bound_on, note=side.note, x=x)
        if side is control:
            yield row
        elif control is None:
            yield replace(row, note="; ".join(filter(None, (side.note, "no control to compare with" if side.label != "micro" and side.bound_on == "ratio" else ""))))
        elif control.reason is not None or min(control.figures) <= 0:
            yield replace(row, note="; ".join(filter(None, (side.note, "the control failed" if control.reason is not None else "the control has 0 or less: no ratio"))))
        else:
            ratio_low, ratio, ratio_high = quartiles([ours / theirs for theirs, ours in zip(control.figures, side.figures, strict=True)])
            yield replace(row, ratio=ratio, ratio_low=ratio_low, ratio_high=ratio_high, note="; ".join(filter(None, (side.note, against and f"ratio to {against}"))))


def compare(group: str, what: str, unit: str, control: Side | None, sides: Sequence[Side], n: int, *, n_warm: int = 1, before: Callable[[], object] | None = None, x: float | None = None,
            against: str = "") -> Iterator[Row]:
    """:func:`measure`, then :func:`rows_of`; a side that fails does not stop the others. ``n_warm`` is 0 for what takes minutes."""
    measure([control, *sides], n, n_warm=n_warm, before=before)
    yield from rows_of(group, what, unit, control, sides, x=x, against=against)
