"""What was measured: a row for each figure, and a report of all of them with the machine they were measured on. JSON lines, both ways."""
from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self, get_args

Label = Literal["product", "control", "peer", "micro"]
BoundOn = Literal["ratio", "median"]
State = Literal["quiet", "contended"]


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, or the reason why there is none.

    Attributes
    ----------
    group, what : str
        Where it belongs, and what was measured; the sides that are compared share both.
    label : "product", "control", "peer" or "micro"
        Whose code ran: this package through its public API, the raw engine, another package, a part of this one.
    path : str
        The code that ran, by name.
    unit : str
    n : int
        Times it was measured.
    median, low, high : float or None
        With the quartiles.
    ratio, ratio_low, ratio_high : float or None
        Median and quartiles of the ratios of neighbours in time, this side over the one that ``note`` or the group names.
    bound, bound_on
        What was promised of ``ratio`` or of ``median``: at most this.
    x : float or None
        Where on its curve the row lies.
    failed : str or None
        Why there are no figures: a failed row has none.
    state : "quiet" or "contended"
    """

    group: str
    what: str
    label: Label
    path: str
    unit: str = ""
    n: int = 0
    median: float | None = None
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    bound: float | None = None
    bound_on: BoundOn = "ratio"
    x: float | None = None
    failed: str | None = None
    note: str = ""
    state: State = "quiet"

    def __post_init__(self) -> None:
        if self.label not in get_args(Label):
            raise ValueError(f"no label is called {self.label}")
        figures = (self.median, self.low, self.high, self.ratio, self.ratio_low, self.ratio_high)
        if self.failed is not None and (self.n or any(figure is not None for figure in figures)):
            raise ValueError(f"{self.what}: a failed row with figures")
        if self.failed is None and self.median is None:
            raise ValueError(f"{self.what}: neither a figure nor a reason")

    @property
    def is_kept(self) -> bool | None:
        """Whether the promise holds; None without a promise, or where there is nothing to hold it against."""
        figure = self.ratio if self.bound_on == "ratio" else self.median
        return None if self.bound is None or figure is None else figure <= self.bound


def failed(group: str, what: str, label: Label, path: str, reason: object, *, note: str = "", x: float | None = None) -> Row:
    """A row for a run that gave no figure."""
    words = str(reason) if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
    return Row(group, what, label, path, failed=words.strip() or "no reason given", note=note, x=x)


@dataclass(frozen=True, slots=True)
class Report:
    """Rows, and what they were measured on.

    Attributes
    ----------
    environment : dict
        As :func:`pylloyal.bench.machine.environment` gives it, with the noise before and after.
    """

    environment: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def to_lines(self) -> str:
        """JSON lines: the environment, then a row each."""
        head = {"environment": self.environment}
        return "".join(json.dumps(item, allow_nan=False, sort_keys=False) + "\n" for item in (head, *map(asdict, self.rows)))

    @classmethod
    def from_lines(cls, text: str | Iterable[str]) -> Self:
        """What :meth:`to_lines` wrote.

        Raises
        ------
        ValueError
            It is something else.
        """
        items = [json.loads(line) for line in (text.splitlines() if isinstance(text, str) else text) if line.strip()]
        if not items or not isinstance(items[0], dict) or set(items[0]) != {"environment"}:
            raise ValueError("the first line has no environment")
        names = {f.name for f in fields(Row)}
        for item in items[1:]:
            if not isinstance(item, dict) or not set(item) <= names:
                raise ValueError(f"no row: {item!r:.200}")
        try:
            return cls(items[0]["environment"], [Row(**item) for item in items[1:]])
        except TypeError as error:
            raise ValueError(f"no row: {error}") from error
