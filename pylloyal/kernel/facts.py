"""What a branch is and where it stands; nothing here changes anything."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from .. import errors
from .._ffi import capi
from .._ffi.load import library
from .._ffi.memory import f32_array, i32_array, i32_of, new, ref, size, u8_room
from .measures import BranchStatistics, Distribution, LogitsView, Metrics, Priors

if TYPE_CHECKING:
    from .store import Store


class BranchFacts:
    """The reading half of :class:`~pylloyal.Branch`."""

    __slots__ = ("_handle", "store")

    def __init__(self, store: Store, handle: int) -> None:
        self.store = store
        self._handle = handle

    def __repr__(self) -> str:
        return f"<Branch {self._handle & 0xFFFFFFFF}.{self._handle >> 32}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BranchFacts) and other._handle == self._handle and other.store is self.store

    def __hash__(self) -> int:
        return hash((self._handle, id(self.store)))

    def _call(self, function: Any, *arguments: Any) -> None:
        with self.store._turn.take():
            function(self.store._ptr(), self._handle, *arguments)

    def _info(self) -> capi.pyl_branch_info:
        info = new(capi.pyl_branch_info)
        self._call(library().pyl_branch_describe, ref(info))
        return info

    @property
    def is_alive(self) -> bool:
        """False once it was pruned, or its store closed."""
        try:
            self._info()
        except (errors.StaleHandleError, errors.ClosedError):
            return False
        return True

    @property
    def position(self) -> int:
        """Where its next token goes."""
        return int(self._info().position)

    @property
    def cells_own(self) -> int:
        """Cells this branch decoded itself."""
        return int(self._info().cells_own)

    @property
    def cells_inherited(self) -> int:
        """Cells before its fork point, owned by its ancestors."""
        return int(self._info().cells_inherited)

    @property
    def parent(self) -> Self | None:
        handle = self._info().parent
        return type(self)(self.store, handle) if handle else None

    @property
    def children(self) -> list[Self]:
        """Its forks, oldest first."""
        return [type(self)(self.store, handle) for handle in self.store._handles(self._handle)]

    @property
    def ancestors(self) -> list[Self]:
        """Its parent, that one's parent, and so on up to the root; empty for a root."""
        found: list[Self] = []
        above = self.parent
        while above is not None:
            found.append(above)
            above = above.parent
        return found

    @property
    def descendants(self) -> list[Self]:
        """Everything below it, parents before their children."""
        found = self.children
        for branch in found:  # grows as it goes
            found.extend(branch.children)
        return found

    @property
    def root(self) -> Self:
        """The topmost branch above it: itself, when it has no parent."""
        return (self.ancestors or [self])[-1]

    @property
    def depth(self) -> int:
        """Forks between it and its root; 0 for a root."""
        return len(self.ancestors)

    @property
    def slack(self) -> int:
        """Cells it reads less the positions they stand at: pictures take more cells than positions."""
        return int(self._info().slack)

    @property
    def is_leaf(self) -> bool:
        return bool(self._info().n_children == 0)

    @property
    def has_logits(self) -> bool:
        """True when it can be sampled."""
        return bool(self._info().has_logits)

    @property
    def is_poisoned(self) -> bool:
        """True after a decode failed half-way: it can only be pruned."""
        return bool(self._info().is_poisoned)

    @property
    def last_token(self) -> int | None:
        """The last token committed, by :meth:`commit` or a tick."""
        token = int(self._info().last_token)
        return token if token >= 0 else None

    @property
    def metrics(self) -> Metrics:
        """How surprising its tokens were, since :meth:`Branch.set_metrics`."""
        m = new(capi.pyl_metrics)
        self._call(library().pyl_branch_get_metrics, ref(m))
        return Metrics._of(m)

    def statistics(self) -> BranchStatistics:
        """Everything countable about it."""
        info = self._info()
        return BranchStatistics(info.position, info.cells_own, info.cells_inherited, info.n_children, self.depth, info.n_sampled, self.metrics)

    # ----------------------------------------------------------------------------------------------------------- logits

    def logits(self) -> npt.NDArray[np.float32]:
        """A copy of the logits, float32, shape (n_vocab,).

        Raises
        ------
        NoLogitsError
            Nothing was decoded on it yet.
        """
        return self.logits_view().array.copy()

    def logits_view(self) -> LogitsView:
        """The logits without a copy, readable until the store's next decode or prune."""
        view = new(capi.pyl_logits_view)
        self._call(library().pyl_branch_logits, ref(view))
        return LogitsView(self.store, view)

    def distribution(self) -> Distribution:
        """How sure the model is of the next token, from the logits alone. Cost: one pass over the vocabulary."""
        d = new(capi.pyl_distribution)
        self._call(library().pyl_branch_distribution, ref(d))
        return Distribution(d.most_likely, d.entropy, d.log_sum, d.max_logit)

    def legal(self, tokens: Sequence[int]) -> list[bool]:
        """Whether each token may come next under the grammar and the bias; neither changes."""
        out = u8_room(len(tokens))
        self._call(library().pyl_branch_legal_n, i32_array(tokens), len(tokens), out)
        return [bool(x) for x in out]

    def is_legal(self, token: int) -> bool:
        """Whether one token may come next; see :meth:`legal`."""
        return self.legal([token])[0]

    def logits_at(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits of some tokens, float32, shape (n,), without a copy of the others."""
        out = np.empty(len(tokens), np.float32)
        self._call(library().pyl_branch_logits_at, i32_array(tokens), len(tokens), f32_array(out))
        return out

    def surprisal(self, token: int) -> float:
        """Nats of surprise the model would have at this token, at temperature 1. Cost: one pass over the vocabulary."""
        return self.distribution().surprisal(float(self.logits_at([token])[0]))

    def priors(self, n: int | None = None) -> Priors:
        """The most likely tokens among those that grammar, bias and steering allow; nothing changes.

        Parameters
        ----------
        n : int, optional
            How many; None for all.

        Raises
        ------
        NoLogitsError
            Nothing was decoded on it yet.
        NothingLegalError
            Grammar and bias allow no token.
        """
        room = min(n, len(self.store.model.vocab)) if n is not None else len(self.store.model.vocab)
        if room < 0:
            raise errors.InvalidArgumentError(f"n is {n}; it must be 0 or more")
        tokens, log_probs = np.empty(room, np.int32), np.empty(room, np.float32)
        found, n_legal = size(), size()
        self._call(library().pyl_branch_priors, i32_of(tokens), f32_array(log_probs), room, ref(found), ref(n_legal))
        return Priors(tokens[: found.value], log_probs[: found.value], n_legal.value)
