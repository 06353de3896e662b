"""Six numbers of tokens that are easily taken for one another, each with what limits it and what would change it."""
from __future__ import annotations

from dataclasses import dataclass, fields
from functools import total_ordering
from typing import Any, Literal

Bound = Literal["MODEL", "REQUEST", "WEIGHTS", "KV", "COMPUTE", "PROJECTOR", "RESERVE", "CAP", "COLD", "SEQUENCES", "UNKNOWN"]


@total_ordering
@dataclass(frozen=True, slots=True)
class Advice:
    """Tokens that somebody computed, not tokens that somebody asked for.

    It compares and prints as a number, and is none: given as a request it is a TypeError, so that a context that was small once, under
    pressure, is not asked for ever after. ``int(advice)`` says it on purpose.
    """

    tokens: int

    def __int__(self) -> int:
        return self.tokens

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, Advice)):
            return self.tokens == int(other)
        return NotImplemented

    def __lt__(self, other: Advice | int) -> bool:
        return self.tokens < int(other)

    def __hash__(self) -> int:
        return hash(self.tokens)

    def __format__(self, how: str) -> str:
        return format(self.tokens, how)

    def __str__(self) -> str:
        return f"{self.tokens:,}"


@dataclass(frozen=True, slots=True)
class Window:
    """One number.

    Attributes
    ----------
    tokens : Advice
    bound : str
        What it is limited by.
    counterfactual : str
        What would make it more; "" when nothing of ours would.
    """

    tokens: Advice
    bound: Bound
    counterfactual: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"tokens": self.tokens.tokens, "bound": self.bound, "counterfactual": self.counterfactual}


@dataclass(frozen=True, slots=True)
class Windows:
    """The six.

    Attributes
    ----------
    ceiling : Window
        What the model is trained for.
    requested : Window
        What was asked for; with 0 tokens: nothing, take what is good.
    fits : Window
        What memory allows, before the ceiling and the request are looked at.
    served : Window
        The context that will be created: the least of the three.
    hot : Window
        What of it lies in memory, ready to be attended to.
    planned : Window
        What can be addressed with a cold store behind it; without one, what is hot.
    """

    ceiling: Window
    requested: Window
    fits: Window
    served: Window
    hot: Window
    planned: Window

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name).to_json() for field in fields(self)}
