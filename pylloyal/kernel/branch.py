"""A branch: one line of thought in a store, cheap to fork, explicit to prune."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from .. import errors
from .._ffi import capi
from .._ffi.load import library, take_text_at
from .._ffi.memory import MASK64, f32_array, i32_array, i32_of, new, ref, u64_array, u64_room
from .chat import ChatPrompt
from .facts import BranchFacts
from .grammar import Grammar, constraint_of
from .projector import LaidOut
from .sampling import Sampling
from .turn import interruptibly

Prefillable = str | ChatPrompt | Sequence[int] | npt.NDArray[np.integer[Any]]


class Branch(BranchFacts):
    """A handle on one branch of a store. Made by :meth:`Store.root` and :meth:`fork`, never directly.

    It names a leased sequence with its position, sampler, grammar and logits. A pruned branch's handle stays invalid for
    ever: it never comes to mean a newer branch. As a context manager it prunes itself and everything below it.
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.store.is_unusable:
            self.prune_subtree()

    # ------------------------------------------------------------------------------------------------------------- tree

    @overload
    def fork(self, n: None = None, *, seed: int | None = None, logits: bool = True) -> Branch: ...
    @overload
    def fork(self, n: int, *, seed: int | Sequence[int] | None = None, logits: bool = True) -> list[Branch]: ...

    def fork(self, n: int | None = None, *, seed: int | Sequence[int] | None = None, logits: bool = True) -> Branch | list[Branch]:
        """Fork: O(1) in tokens, no decode, no copy of a cell.

        A child continues exactly as this branch would: it has its random stream, penalty window, grammar state and logits.

        Parameters
        ----------
        n : int, optional
            Number of children, made together or not at all; None makes one and returns it bare.
        seed : int or sequence of int, optional
            New random streams: a sequence gives one per child, an int gives child ``i`` the seed ``seed + i``. Without it
            all children would draw the same tokens.
        logits : bool
            Off, the children begin without logits: for those that decode before they are sampled, so that none is kept for them.

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
        self._call(library().pyl_branch_fork_n, out, count, seeds, 0 if logits else capi.FORK_WITHOUT_LOGITS)
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

    def reseed_kv(self, sinks: Sequence[int], tail: Sequence[int] = ()) -> None:
        """Empty this leaf and read ``sinks`` and ``tail`` anew, at positions from 0: for a conversation that grew too long.

        Sampling, grammar, bias and metrics stay as they are. Its own cells are given back first, so it fits a full cache too.

        Raises
        ------
        BranchHasChildrenError, ContextOverflowError, InvalidArgumentError
            Nothing changed.
        DecodeError, DecodeCancelledError, KeyboardInterrupt
            The old cells are gone; :attr:`position` tells how many of the tokens are in.
        """
        tokens = self.store._encoded([*sinks, *tail], False)
        with self.store._turn.take():
            arguments = (self.store._ptr(), self._handle, i32_of(tokens), len(tokens), None)
            interruptibly(lambda: library().pyl_branch_reseed_kv(*arguments), self.store.cancel)

    def retain_only(self) -> None:
        """Keep this branch and prune every other one of the store; it becomes a root that owns all its cells."""
        self._call(library().pyl_branch_retain_only)

    # --------------------------------------------------------------------------------------------------------- decoding

    def prefill(self, prompt: Prefillable | LaidOut) -> int:
        """Decode many tokens, leaving logits for the last; see :meth:`Store.prefill`, and :meth:`Store.decode_prompts` for media.

        Returns
        -------
        int
            Dispatches it took.
        """
        if not isinstance(prompt, LaidOut):
            return self.store.prefill([(self, prompt)])
        before = self.store.pressure().n_dispatches
        outcome = self.store.decode_prompts([(self, prompt)])[0]
        if outcome.error is not None:
            raise outcome.error
        return self.store.pressure().n_dispatches - before

    def commit(self, token: int) -> None:
        """Decode one token; see :meth:`Store.commit`."""
        self.store.commit([self], [token])

    def sample(self) -> int:
        """Draw a token without decoding it; see :meth:`Store.sample`."""
        return self.store.sample([self])[0]

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

    # ------------------------------------------------------------------------------------------------------------ saved

    def to_bytes(self, *, logits: bool = True) -> bytes:
        """This branch as bytes: cells, position, sampler with its random stream and penalty window, grammar with what it has seen,
        bias, steering and metrics. :meth:`Store.from_bytes` makes a root of them, in this process or another.

        Parameters
        ----------
        logits : bool
            The logits too, so that it can be sampled as soon as it is loaded.

        Raises
        ------
        BranchPoisonedError
            Nothing of a poisoned branch is worth keeping.
        """
        flags = capi.SAVE_LOGITS if logits else 0
        with self.store._turn.take():
            return take_text_at(library().pyl_branch_save, 3, self.store._ptr(), self._handle, flags)

    def save(self, path: str | os.PathLike[str], *, logits: bool = True) -> int:
        """Write :meth:`to_bytes` to a file, whole or not at all: a file that was there stays until the new one is complete.

        Returns
        -------
        int
            Bytes written.

        Raises
        ------
        OSError
            It cannot be written; nothing is left behind.
        """
        import tempfile

        data = self.to_bytes(logits=logits)
        target = Path(path)
        descriptor, name = tempfile.mkstemp(prefix=".pylloyal-", dir=target.parent)  # no part of the target's name, which may be as long as names can be
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # an interrupt may come when it has its new name already
                os.unlink(name)
            raise
        return len(data)

    # --------------------------------------------------------------------------------------------------------- settings

    def set_metrics(self, *, model: bool = True, sampling: bool = False) -> None:
        """Measure from now on how surprising its tokens are; :attr:`metrics` tells. Both off stops it. Forks carry the sums on.

        Parameters
        ----------
        model : bool
            Against the model's own distribution. Cost: one pass over the vocabulary for each token.
        sampling : bool
            Against the distribution tokens are drawn from. Cost: one more run of the sampler for each token.
        """
        self._call(library().pyl_branch_set_metrics, (capi.METRICS_MODEL if model else 0) | (capi.METRICS_SAMPLING if sampling else 0))

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

    def reseed(self, seed: int) -> None:
        """Begin a random stream anew; everything else stays."""
        s = replace(self.sampling, seed=seed)._struct()
        s.seed_mode = capi.SEED_RESTART
        self._call(library().pyl_branch_set_sampling, ref(s))

    def set_grammar(self, grammar: Grammar | ChatPrompt | str | None) -> None:
        """Constrain what it says from its next token on; None lifts the constraint.

        A :class:`~pylloyal.ChatPrompt` stands for the grammar that belongs to it (tool calls), eager or lazy; with none, nothing
        is constrained.

        Raises
        ------
        GrammarError
            It does not parse (line and column in the message); the grammar in force stays.
        """
        self._call(library().pyl_branch_set_grammar, constraint_of(grammar))
