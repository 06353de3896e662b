"""A branch: one line of thought in a store, cheap to fork, explicit to prune."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
import numpy.typing as npt

from .. import errors
from .._ffi import capi
from .._ffi.load import library
from .._ffi.memory import MASK64, f32_array, floats, i32_array, new, ref, u8_room, u64_array, u64_room
from .chat import ChatPrompt
from .grammar import Grammar
from .sampling import Sampling

if TYPE_CHECKING:
    from .store import Store

Prefillable = str | ChatPrompt | Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The model's view of the next token, at temperature 1.

    Attributes
    ----------
    most_likely : int
        A token.
    entropy : float
        In nats.
    log_sum : float
        Natural log of the sum of exponentials: ``log_sum - logit`` is a token's surprisal.
    max_logit : float
    """

    most_likely: int
    entropy: float
    log_sum: float
    max_logit: float

    def surprisal(self, logit: float) -> float:
        """Nats of surprise at a token with this logit."""
        return self.log_sum - logit


class LogitsView:
    """Logits of a branch without a copy; reading them after they were overwritten raises instead of lying.

    Attributes
    ----------
    array : numpy.ndarray, float32, shape (n_vocab,)
        Read-only. Raises StaleHandleError once the store has decoded or pruned anything since.
    """

    def __init__(self, store: Store, view: capi.pyl_logits_view) -> None:
        self._store, self._view = store, view  # no array is kept: a cycle through one could not be collected

    @property
    def array(self) -> npt.NDArray[np.float32]:
        if library().pyl_store_epoch(self._store._ptr()) != self._view.epoch:
            raise errors.StaleHandleError("these logits were overwritten by a later decode; take a copy with Branch.logits()")
        return floats(self._view.data, self._view.n_vocab, self._store)


class Branch:
    """A handle on one branch of a store. Made by :meth:`Store.root` and :meth:`fork`, never directly.

    It names a leased sequence with its position, sampler, grammar and logits. A pruned branch's handle stays invalid for
    ever: it never comes to mean a newer branch. As a context manager it prunes itself and everything below it.
    """

    __slots__ = ("_handle", "store")

    def __init__(self, store: Store, handle: int) -> None:
        self.store = store
        self._handle = handle

    def __repr__(self) -> str:
        return f"<Branch {self._handle & 0xFFFFFFFF}.{self._handle >> 32}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Branch) and other._handle == self._handle and other.store is self.store

    def __hash__(self) -> int:
        return hash((self._handle, id(self.store)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.store.is_unusable:
            self.prune_subtree()

    def _call(self, function: Any, *arguments: Any) -> None:
        with self.store._turn.take():
            function(self.store._ptr(), self._handle, *arguments)

    # ------------------------------------------------------------------------------------------------------------ facts

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
    def parent(self) -> Branch | None:
        handle = self._info().parent
        return Branch(self.store, handle) if handle else None

    @property
    def children(self) -> list[Branch]:
        return self.store._list(self._handle)

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

    # ------------------------------------------------------------------------------------------------------------- tree

    @overload
    def fork(self, n: None = None, *, seed: int | None = None) -> Branch: ...
    @overload
    def fork(self, n: int, *, seed: int | Sequence[int] | None = None) -> list[Branch]: ...

    def fork(self, n: int | None = None, *, seed: int | Sequence[int] | None = None) -> Branch | list[Branch]:
        """Fork: O(1) in tokens, no decode, no copy of a cell.

        A child continues exactly as this branch would: it has its random stream, penalty window, grammar state and logits.

        Parameters
        ----------
        n : int, optional
            Number of children, made together or not at all; None makes one and returns it bare.
        seed : int or sequence of int, optional
            New random streams: a sequence gives one per child, an int gives child ``i`` the seed ``seed + i``. Without it
            all children would draw the same tokens.

        Raises
        ------
        NoLeaseError
            Fewer than ``n`` branches are left; nothing was made.
        """
        count = 1 if n is None else n
        if count < 0:
            raise errors.InvalidArgumentError(f"cannot make {count} branches")
        seeds: Any = None
        if isinstance(seed, int):
            seeds = u64_array([(seed + i) & MASK64 for i in range(count)])
        elif seed is not None:
            if len(seed) != count:
                raise errors.InvalidArgumentError(f"{len(seed)} seeds for {count} branches")
            seeds = u64_array([s & MASK64 for s in seed])
        out = u64_room(count)
        self._call(library().pyl_branch_fork_n, out, count, seeds)
        made = [Branch(self.store, handle) for handle in out]
        return made[0] if n is None else made

    def prune(self) -> None:
        """Give back this leaf's cells and lease. Pruning again does nothing.

        Raises
        ------
        BranchHasChildrenError
            It has children; nothing changed.
        """
        self.store.prune([self])

    def prune_subtree(self) -> None:
        """Prune this branch and everything below it."""
        self._call(library().pyl_branch_prune_subtree)

    def fast_forward(self, child: Branch) -> None:
        """Take over where a child stands, and let the child go: no decode, no copy of a cell, one lease free again.

        Sequence, position, sampling, grammar, bias, steering and logits become this branch's; it keeps its handle, its parent and its other
        children, and the child's children become its own. Works on recurrent models, and repairs a poisoned branch.

        Raises
        ------
        DivergedError
            Not a direct child, or this branch decoded since the fork; nothing changed.
        """
        self._call(library().pyl_branch_fast_forward, self.store._own(child))

    def retain_only(self) -> None:
        """Keep this branch and prune every other one of the store; it becomes a root that owns all its cells."""
        self._call(library().pyl_branch_retain_only)

    # --------------------------------------------------------------------------------------------------------- decoding

    def prefill(self, prompt: Prefillable) -> int:
        """Decode many tokens, leaving logits for the last; see :meth:`Store.prefill`.

        Returns
        -------
        int
            Dispatches it took.
        """
        return self.store.prefill([(self, prompt)])

    def commit(self, token: int) -> None:
        """Decode one token; see :meth:`Store.commit`."""
        self.store.commit([self], [token])

    def sample(self) -> int:
        """Draw a token without decoding it; see :meth:`Store.sample`."""
        return self.store.sample([self])[0]

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

    def set_logits(self, logits: npt.ArrayLike) -> None:
        """Replace the logits: n_vocab numbers below +infinity; -infinity bans a token. Position and cells stay."""
        row = np.ascontiguousarray(logits, np.float32)
        if row.ndim != 1:
            raise errors.InvalidArgumentError(f"logits of shape {row.shape}; they are one row")
        self._call(library().pyl_branch_set_logits, f32_array(row), row.size)

    def merge_logits(self, experts: Sequence[Branch], alpha: float = 1.0) -> None:
        """Add ``alpha`` times the sum of other branches' logits to this one's: nothing is decoded, no cache is touched.

        With ``alpha`` below 0 it is contrastive decoding. The branch may be its own expert. A token it bans stays banned; what an
        expert bans is banned when ``alpha`` is positive and left alone otherwise.

        Raises
        ------
        NoLogitsError
            With the ``index`` of the expert; nothing changed.
        """
        handles = [self.store._own(expert) for expert in experts]
        self._call(library().pyl_branch_merge_logits, u64_array(handles), len(handles), alpha)

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

    # --------------------------------------------------------------------------------------------------------- settings

    def set_bias(self, bias: Mapping[int, float] | None) -> None:
        """Add to the logits of these tokens whenever it is sampled (-infinity bans one); forks carry it. None clears it."""
        self._set_bias(capi.BIAS, bias)

    def steer(self, bias: Mapping[int, float] | None) -> None:
        """As :meth:`set_bias`, for this branch alone: forks do not carry it."""
        self._set_bias(capi.STEER, bias)

    def _set_bias(self, kind: int, bias: Mapping[int, float] | None) -> None:
        pairs = bias or {}
        self._call(library().pyl_branch_set_bias, kind, i32_array(list(pairs)), f32_array(list(pairs.values())), len(pairs))

    @property
    def sampling(self) -> Sampling:
        """The settings in force, with the seed really used. Assigning changes them; a seed of None keeps the stream."""
        s = new(capi.pyl_sampling)
        self._call(library().pyl_branch_get_sampling, ref(s))
        return Sampling._of(s)

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        self._call(library().pyl_branch_set_sampling, ref(sampling._struct()))

    def set_grammar(self, grammar: Grammar | ChatPrompt | str | None) -> None:
        """Constrain what it says from its next token on; None lifts the constraint.

        A :class:`~pylloyal.ChatPrompt` stands for the grammar that belongs to it (tool calls), eager or lazy; with none, nothing
        is constrained.

        Raises
        ------
        GrammarError
            It does not parse (line and column in the message); the grammar in force stays.
        """
        if grammar is None:
            self._call(library().pyl_branch_set_grammar, None, 0, None)
            return
        if isinstance(grammar, ChatPrompt):
            spec = grammar._constraint()
            self._call(library().pyl_branch_set_chat_grammar, spec, len(spec))
            return
        value = Grammar(grammar) if isinstance(grammar, str) else grammar
        raw = value.gbnf.encode()
        if not raw:
            raise errors.GrammarError("line 1, column 1: the grammar is empty")
        self._call(library().pyl_branch_set_grammar, raw, len(raw), value.root.encode())
