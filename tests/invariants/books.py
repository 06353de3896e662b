"""What a store is made of, what is counted, and what is refused: the nouns of :mod:`.reference`.

A branch is the cells it can see, and a cell is a token at a position. Slots, sequences, rows of logits and whatever else a kernel
keeps books about is absent: what a kernel says about itself must follow from this.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from pylloyal import Sampling, errors

from .measured import NOTHING, Measured, Row


class Cell(NamedTuple):
    position: int
    token: int
    dispatch: int  # which decode made it,
    owner: int     # for which branch: two that look alike are two nevertheless


@dataclass(frozen=True)
class Seen:
    """Logits that follow from the (position, token) pairs a branch sees,"""

    cells: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Given:
    """that were set,"""

    row: bytes


@dataclass(frozen=True, eq=False)  # each is its own: comparing the whole ancestry of two would take for ever
class Merged:
    """or that were computed from others."""

    own: Key
    experts: tuple[Key, ...]
    alpha: float


Key = Seen | Given | Merged
Bias = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class State:
    """What a fork has from its parent (but for the steering), and what fast_forward hands over."""

    sampling: Sampling            # with its seed
    n_sampled: int = 0            # draws since the seed was set
    window: tuple[int, ...] = ()  # tokens committed so far: what penalties look back at
    grammar: bytes | None = None  # what it still has to say, in a grammar of one string; None is free
    last_token: int | None = None
    logits: Key | None = None
    bias: Bias = ()
    steer: Bias = ()
    measured: Measured = NOTHING


@dataclass(eq=False, repr=False)
class Branch:
    state: State
    start: int
    born: int
    parent: Branch | None = None
    cells: tuple[Cell, ...] = ()
    inherited: int = 0  # of its cells, those before its fork point
    doubtful: int = 0   # cells of the decode that failed half-way: charged, whether or not they landed

    position = property(lambda self: self.start + len(self.cells))
    own = property(lambda self: len(self.cells) - self.inherited + self.doubtful)
    is_poisoned = property(lambda self: self.doubtful > 0)

    def __repr__(self) -> str:
        return f"b{self.born}"


@dataclass(frozen=True)
class Kept:
    """A branch as it was saved: all of it but its place in a tree."""

    state: State
    start: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Reason:
    """One thing that is wrong with a call. A number that is None is not told."""

    kind: type[errors.PylloyalError]
    index: int | None = None
    need: int | None = None
    have: int | None = None


class Refused(Exception):
    """Nothing has changed. With several reasons a kernel may name any."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        super().__init__(*reasons)
        self.reasons = reasons


class Failed(Exception):
    """The engine failed, or was told to stop; ``state`` says what became of the branches of the call."""

    def __init__(self, kind: type[errors.PylloyalError], state: errors.State, partial: bool, engine_rc: int = 0) -> None:
        super().__init__(kind.__name__, state)
        self.kind, self.state, self.partial, self.engine_rc = kind, state, partial, engine_rc
        self.index: int | None = None  # of the branch it struck, where it strikes one
        self.n_landed = 0              # of the branches before it, those that are in
        self.result: Any = None


@dataclass
class Books:
    n_ctx: int
    n_batch: int
    n_branches: int
    pieces: Sequence[bytes]                      # what each token says
    eog: frozenset[int]                          # tokens that end a generation
    logits_of: Callable[[Branch], Row]           # what a branch is measured by
    verdict: Callable[[int], int] = lambda n: 0  # what the engine says of its n-th decode
    is_deterministic: bool = False               # a dispatch holds one branch
    live: list[Branch] = field(default_factory=list)  # oldest first
    n_born: int = 0
    n_dispatches: int = 0
    n_decoded: int = 0
    n_sampled: int = 0
    has_recycled: bool = False  # cells were made and given back within one operation

    @property
    def cells_used(self) -> int:
        """Every cell once, however many can see it."""
        return len({cell for branch in self.live for cell in branch.cells}) + sum(branch.doubtful for branch in self.live)

    @property
    def cells_left(self) -> int:
        return self.n_ctx - self.cells_used

    @property
    def leases_left(self) -> int:
        return self.n_branches - len(self.live)

    def children(self, parent: Branch) -> list[Branch]:
        return [branch for branch in self.live if branch.parent is parent]

    def below(self, top: Branch) -> list[Branch]:
        return [top, *(branch for child in self.children(top) for branch in self.below(child))]

    # ------------------------------------------------------------------------------------------- what is wrong with a call

    def refuse(self, *reasons: Iterable[Reason]) -> None:
        if found := [reason for several in reasons for reason in several]:
            raise Refused(found)

    def unfit(self, *branches: Branch, ready: bool = False) -> Iterable[Reason]:
        """Branches that are pruned, poisoned or, if they have to be ready, without logits."""
        for i, branch in enumerate(branches):
            if branch not in self.live:
                yield Reason(errors.StaleHandleError, i)
            elif branch.is_poisoned:
                yield Reason(errors.BranchPoisonedError, i)
            elif ready and branch.state.logits is None:
                yield Reason(errors.NoLogitsError, i)

    def twice(self, branches: Sequence[Branch]) -> Iterable[Reason]:
        return (Reason(errors.InvalidArgumentError, i) for i, branch in enumerate(branches) if branch in branches[:i])

    def cells(self, n: int) -> Iterable[Reason]:
        return [Reason(errors.ContextOverflowError, None, n, self.cells_left)] if n > self.cells_left else []

    def leases(self, n: int) -> Iterable[Reason]:
        return [Reason(errors.NoLeaseError, None, n, self.leases_left)] if n > self.leases_left else []

    def strange(self, tokens: Iterable[int]) -> Iterable[Reason]:
        """Tokens outside the vocabulary."""
        return (Reason(errors.InvalidArgumentError, i) for i, token in enumerate(tokens) if not 0 <= token < len(self.pieces))


def wrong(is_wrong: object, kind: type[errors.PylloyalError] = errors.InvalidArgumentError) -> Iterable[Reason]:
    return [Reason(kind)] if is_wrong else []


def unplaced(reasons: Iterable[Reason]) -> Iterable[Reason]:
    """The same where there is nothing to count: a call about one branch has no index to tell."""
    return (replace(reason, index=None) for reason in reasons)


def senseless(s: Sampling) -> Iterable[Reason]:
    return wrong(not (np.isfinite(s.temperature) and 0 < s.top_p <= 1 and 0 <= s.min_p <= 1 and 0 < s.typical_p <= 1 and s.penalty_repeat > 0 and 0 <= s.penalty_last_n <= 65536))
