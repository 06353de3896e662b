"""A store: one KV cache and the tree of branches that lives in it."""
from __future__ import annotations

import _thread
import contextlib
import enum
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import numpy as np

from .. import errors
from .._ffi import capi
from .._ffi.buffers import StepBuffers
from .._ffi.handle import Handle
from .._ffi.load import library
from .._ffi.memory import Runs, i32_array, new, ref, size, u32, u64, u64_array, u64_room
from .branch import Branch, Prefillable
from .chat import ChatPrompt
from .grammar import Grammar
from .model import Model
from .sampling import Sampling
from .turn import Turn

T = TypeVar("T")
KVType = Literal["f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
_FLASH: Final = {None: capi.FLASH_ATTN_AUTO, True: capi.FLASH_ATTN_ON, False: capi.FLASH_ATTN_OFF}


class Finish(enum.IntEnum):
    """Why a branch stopped in a tick."""

    END_OF_GENERATION = capi.FINISH_EOG
    STOP = capi.FINISH_STOP
    LENGTH = capi.FINISH_LENGTH
    ILLEGAL = capi.FINISH_ILLEGAL


@dataclass(frozen=True, slots=True)
class Ticks:
    """What one call of :meth:`Store.tick` did.

    Attributes
    ----------
    tokens : list of list of int
        For each branch the tokens drawn and decoded, in order.
    finish : list of Finish or None
        For each branch why it stopped; None when it can go on.
    n_ticks, n_dispatches : int
    out_of_cells : bool
        True when it returned early because the next tick no longer fits.
    """

    tokens: list[list[int]]
    finish: list[Finish | None]
    n_ticks: int
    n_dispatches: int
    out_of_cells: bool


@dataclass(frozen=True, slots=True)
class Pressure:
    """Live numbers of a store, true at its last dispatch boundary.

    Attributes
    ----------
    n_ctx : int
        Cells of the cache.
    cells_used, cells_remaining : int
        Every cell counted once, however many branches share it.
    leases_used, leases_remaining : int
        Branches alive, and branches that can still be made.
    n_dispatches, n_tokens_decoded, n_tokens_sampled : int
        Since the store was opened.
    decode_s, sample_s : float
        Seconds inside the engine's decode, and sampling.
    """

    n_ctx: int
    n_batch: int
    n_threads: int
    cells_used: int
    cells_remaining: int
    leases_used: int
    leases_remaining: int
    flash_attn: bool
    n_dispatches: int
    n_tokens_decoded: int
    n_tokens_sampled: int
    decode_s: float
    sample_s: float


class Store(Handle):
    """A KV cache and its branches.

    One thread at a time may be inside; another gets :class:`~pylloyal.errors.BusyError` and nothing changes. Different
    stores run in parallel.

    Parameters
    ----------
    model : Model
    n_ctx : int, optional
        Cells of the cache; the model's trained context by default. The engine rounds up to 256.
    n_branches : int
        Branches that can be alive at once, 1 to 256.
    n_batch : int
        Tokens in one dispatch, and so the grain at which a prefill can be cancelled.
    n_threads : int, optional
        By default the cores this process may use (affinity and cgroup quota).
    flash_attn : bool, optional
        None means on, unless the engine cannot open this model with it; :meth:`pressure` tells which.
    type_k, type_v : str
        Types of the cache. A quantised ``type_v`` needs flash attention.

    Raises
    ------
    InsufficientMemoryError, UnsupportedOperationError, InvalidArgumentError
        Nothing was opened.
    """

    def __init__(self, model: Model, *, n_ctx: int | None = None, n_branches: int = 8, n_batch: int | None = None, n_threads: int | None = None,
                 flash_attn: bool | None = None, type_k: KVType = "f16", type_v: KVType = "f16") -> None:
        lib = library()
        params = new(capi.pyl_store_params)
        lib.pyl_store_params_init(ref(params))
        for name, value in (("n_ctx", n_ctx), ("n_branches", n_branches), ("n_batch", n_batch), ("n_threads", n_threads)):
            if value is not None:
                if not 0 < value < 2**31:
                    raise errors.InvalidArgumentError(f"{name} is {value}; it must be 1 or more")
                setattr(params, name, value)
        params.flash_attn = _FLASH[flash_attn]
        for name, kind in (("type_k", type_k), ("type_v", type_v)):
            if not hasattr(capi, f"KV_{kind.upper()}"):
                raise errors.InvalidArgumentError(f"{name} is {kind!r}; it must be one of f16, f32, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl")
            setattr(params, name, getattr(capi, f"KV_{kind.upper()}"))
        pointer, parent = capi.pyl_store_p(), model._ptr()
        super().__init__(pointer, lib.pyl_store_free, parent=model)
        lib.pyl_store_open(ref(pointer), parent, ref(params))
        self.model = model
        self._lib = lib
        self._step = StepBuffers(params.n_branches)
        self._turn = Turn(self)

    def __repr__(self) -> str:
        return "<Store closed>" if self.is_closed else f"<Store of {self.model.path!r}>"

    # ------------------------------------------------------------------------------------------------------------- tree

    def root(self, *, sampling: Sampling | None = None, grammar: Grammar | ChatPrompt | str | None = None, start_pos: int = 0) -> Branch:
        """Make a new, empty branch with a lease of its own.

        Raises
        ------
        NoLeaseError, GrammarError, InvalidArgumentError
            Nothing was made.
        """
        out = u64()
        with self._turn.take():
            self._lib.pyl_branch_create(self._ptr(), ref(out), start_pos, ref((sampling or Sampling())._struct()))
        branch = Branch(self, out.value)
        if grammar is not None:
            try:
                branch.set_grammar(grammar)
            except BaseException:
                branch.prune()
                raise
        return branch

    def branches(self) -> list[Branch]:
        """All live branches, oldest first."""
        return self._list(0)

    def _list(self, parent: int) -> list[Branch]:
        out = u64_room(self._step.n)
        n = size()
        with self._turn.take():
            self._lib.pyl_branch_list(self._ptr(), parent, out, self._step.n, ref(n))
        return [Branch(self, handle) for handle in out[: n.value]]

    def prune(self, branches: Iterable[Branch]) -> None:
        """Prune several branches together: all of them or none.

        Raises
        ------
        BranchHasChildrenError
            One has children that are not in the list; nothing was pruned.
        """
        handles = [self._own(branch) for branch in branches]
        with self._turn.take():
            self._lib.pyl_branch_prune_n(self._ptr(), u64_array(handles), len(handles))

    def retain_only(self, branch: Branch) -> None:
        """Keep one branch and prune every other one."""
        self._own(branch)
        branch.retain_only()

    # --------------------------------------------------------------------------------------------------------- decoding

    def prefill(self, runs: Iterable[tuple[Branch, Prefillable]], *, progress: Callable[[int, int], object] | None = None) -> int:
        """Decode prompts of one or many branches, packed into as few dispatches as fit.

        Ctrl-C is answered between two dispatches: the branches then stand where the last whole dispatch left them, and
        :attr:`Branch.position` tells where.

        Parameters
        ----------
        runs : iterable of (Branch, prompt)
            A prompt is a list of tokens, a :class:`~pylloyal.ChatPrompt`, or text (its special tokens inert; BOS where the
            model wants one at the start). A branch may stand only once; empty prompts are skipped.
        progress : callable, optional
            Called as ``progress(tokens landed, tokens in all)`` after every dispatch.

        Returns
        -------
        int
            Dispatches it took.

        Raises
        ------
        ContextOverflowError
            The tokens do not fit; nothing was decoded.
        DecodeCancelledError
            :meth:`cancel` was called; whole dispatches landed.
        """
        todo = Runs((self._own(branch), self._tokens(branch, prompt)) for branch, prompt in runs)
        self._need_cells(todo.total)
        dispatches, n = 0, u32()
        with self._turn.take():
            n_cancels = self._turn.n_cancels
            while True:
                try:
                    if self._turn.n_cancels != n_cancels:  # asked for between two native calls
                        message = "cancelled between two dispatches"
                        raise errors.DecodeCancelledError(message, errors.Failure(capi.E_CANCELLED, "unchanged", 0, False, None, None, None, message))
                    self._lib.pyl_prefill_n(self._ptr(), todo.array, todo.n, 1, ref(n))
                except errors.KernelError as error:  # of one dispatch; the whole call may have got further
                    todo.advance()
                    if todo.landed:
                        error.partial = True
                        error.state = "advanced" if error.state == "unchanged" else error.state
                    raise
                todo.advance()
                dispatches += n.value
                if progress is not None and n.value:
                    progress(todo.landed, todo.total)
                if todo.landed >= todo.total:
                    return dispatches

    def sample(self, branches: Sequence[Branch]) -> list[int]:
        """Draw one token for each branch; none is decoded.

        Raises
        ------
        NoLogitsError, NothingLegalError
            With the ``index`` of the branch; no random stream has advanced.
        """
        with self._turn.take():
            step = self._buffers(len(branches))
            n = step.set_branches([self._own(branch) for branch in branches])
            self._lib.pyl_sample_n(self._ptr(), step.branches, n, step.tokens)
            return list(step.token_view[:n].tolist())

    def commit(self, branches: Sequence[Branch], tokens: Sequence[int]) -> None:
        """Decode one token for each branch, in one dispatch; their grammars and penalty windows take it too.

        Raises
        ------
        GrammarError
            A token is not legal under its branch's grammar; nothing was decoded.
        ContextOverflowError
            Not that many cells are left; nothing was decoded.
        """
        if len(branches) != len(tokens):
            raise errors.InvalidArgumentError(f"{len(branches)} branches but {len(tokens)} tokens")
        with self._turn.take():
            step = self._buffers(len(branches))
            n = step.set_branches([self._own(branch) for branch in branches])
            step.token_view[:n] = tokens
            self._lib.pyl_commit_n(self._ptr(), step.branches, step.tokens, n)

    def tick(self, branches: Sequence[Branch], *, n_steps: int = 1, max_tokens: int | Sequence[int | None] | None = None, stop: Sequence[int] = ()) -> Ticks:
        """Advance branches together: draw, set aside those that end, decode the others in one dispatch; up to ``n_steps`` times.

        Parameters
        ----------
        n_steps : int
            Ticks to run in one native call. With more than one, Ctrl-C cancels at the next tick, and the KeyboardInterrupt's
            ``result`` holds the :class:`Ticks` before it.
        max_tokens : int or sequence of int or None, optional
            Most tokens to take in this call, 1 or more, for all or for each branch.
        stop : sequence of int
            Token ids that end a branch like an end-of-generation token: drawn, not decoded.

        Raises
        ------
        ContextOverflowError
            Not even the first tick fits; nothing was drawn.
        DecodeError, DecodeCancelledError
            A later tick failed; ``result`` holds the :class:`Ticks` before it.
        """
        if not 0 < n_steps < 2**31:
            raise errors.InvalidArgumentError(f"n_steps is {n_steps}; it must be 1 or more")
        with self._turn.take():
            step = self._buffers(len(branches))
            step.reserve_steps(n_steps)
            n = len(branches)
            lanes = step.lane_view[:n]
            lanes["branch"] = [self._own(branch) for branch in branches]
            lanes["max_tokens"] = _limits(max_tokens, n)
            lanes["n_tokens"] = lanes["finish"] = 0  # so that they are true even if an interrupt comes before the call
            tick = step.tick
            tick.n_steps, tick.n_ticks, tick.n_dispatches, tick.out_of_cells = n_steps, 0, 0, 0
            stops = i32_array(stop) if stop else None
            tick.stop_tokens, tick.n_stop_tokens = stops, len(stop)
            pointer = self._ptr()

            def run() -> None:
                self._lib.pyl_tick_n(pointer, step.tick_ref, step.lanes, n, step.step_tokens)

            try:
                if n_steps > 1:
                    self._interruptibly(run)
                else:
                    run()
            except errors.DecodeError as error:
                if error.state != "unchanged":
                    error.result = self._ticks(step, n, n_steps)
                raise
            except KeyboardInterrupt as error:
                error.result = self._ticks(step, n, n_steps)  # type: ignore[attr-defined]
                raise
            return self._ticks(step, n, n_steps)

    @staticmethod
    def _ticks(step: StepBuffers, n: int, n_steps: int) -> Ticks:
        lanes = step.lane_view[:n]
        counts, finish = lanes["n_tokens"].tolist(), lanes["finish"].tolist()
        if n_steps == 1:
            flat = step.step_view[:n].tolist()
            tokens = [[t] if c else [] for t, c in zip(flat, counts, strict=True)]
        else:
            rows = step.step_view[: n * n_steps].reshape(n, n_steps)
            tokens = [row[:c].tolist() for row, c in zip(rows, counts, strict=True)]
        return Ticks(tokens, [_FINISH[f] for f in finish], step.tick.n_ticks, step.tick.n_dispatches, bool(step.tick.out_of_cells))

    # ------------------------------------------------------------------------------------------------------------ state

    def pressure(self) -> Pressure:
        """Live numbers; may be asked from any thread, also while another one is decoding."""
        p = new(capi.pyl_pressure)
        self._lib.pyl_store_pressure(self._ptr(), ref(p))
        return Pressure(p.n_ctx, p.n_batch, p.n_threads, p.cells_used, p.cells_remaining, p.leases_used, p.leases_remaining, p.flash_attn == capi.FLASH_ATTN_ON,
                        p.n_dispatches, p.n_tokens_decoded, p.n_tokens_sampled, p.decode_s, p.sample_s)

    def cancel(self) -> None:
        """Stop the call another thread is in at its next dispatch boundary; with none running, nothing happens."""
        self._turn.n_cancels += 1
        self._lib.pyl_store_cancel(self._ptr())

    # ---------------------------------------------------------------------------------------------------------- helpers

    def _own(self, branch: Branch) -> int:
        if branch.store is not self:
            raise errors.InvalidArgumentError(f"{branch!r} belongs to another store")
        return branch._handle

    def _buffers(self, n: int) -> StepBuffers:
        if n > self._step.n:
            raise errors.InvalidArgumentError(f"{n} branches in one call; this store holds {self._step.n} at most, so one stands twice or is stale")
        return self._step

    def _need_cells(self, n: int) -> None:
        """A prefill goes dispatch by dispatch; it is refused as a whole before the first."""
        left = self.pressure().cells_remaining
        if n > left:
            message = f"{n} cells wanted, {left} left"
            raise errors.ContextOverflowError(message, errors.Failure(capi.E_CONTEXT, "unchanged", 0, False, None, n, left, message))

    def _tokens(self, branch: Branch, prompt: Prefillable) -> np.ndarray[Any, np.dtype[np.int32]]:
        if isinstance(prompt, str):
            prompt = self.model.vocab.encode(prompt, add_special=branch.position == 0)
        elif isinstance(prompt, ChatPrompt):
            prompt = prompt.tokens()
        array = np.asarray(prompt)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise errors.InvalidArgumentError("a prompt is text, a ChatPrompt, or a flat sequence of token ids")
        if array.size and (array.min() < 0 or array.max() >= len(self.model.vocab)):
            raise errors.InvalidArgumentError(f"a token id is outside the vocabulary of {len(self.model.vocab)}")
        return np.ascontiguousarray(array, np.int32)

    def _interruptibly(self, call: Callable[[], None]) -> None:
        """Run a long native call so that Ctrl-C reaches Python: on a thread of its own, cancelled and waited for."""
        if threading.current_thread() is not threading.main_thread():
            call()
            return
        caught: list[BaseException] = []
        ended: list[bool] = []  # only ever grows, so no interrupt can leave it half-set
        over = threading.Lock()
        over.acquire()

        def body() -> None:
            try:
                call()
            except BaseException as error:
                caught.append(error)
            finally:
                ended.append(True)
                over.release()

        # Bare locks and threads: threading.Thread takes an interrupted join() for a finished thread (bpo-45274), and Event and
        # Condition are Python code that an interrupt can break in the middle.
        interrupt: KeyboardInterrupt | None = None
        start = _thread.start_new_thread
        try:
            start(body, ())  # the first thing inside `try`: an interrupt from here on means that it has started
            while not ended:  # with a timeout: a signal that comes just before a wait does not end it
                over.acquire(timeout=0.05)
        except RuntimeError:  # no new threads: the interpreter is shutting down
            call()
            return
        except KeyboardInterrupt as error:
            interrupt = error
        while not ended:
            with contextlib.suppress(KeyboardInterrupt):
                self.cancel()  # again and again: it may not have got into the kernel yet, and a cancel is for who is inside
                over.acquire(timeout=0.02)
        if interrupt is not None:
            raise interrupt
        if caught:
            raise caught[0]


_FINISH: Final[list[Finish | None]] = [None, *Finish]


def _limits(max_tokens: int | Sequence[int | None] | None, n: int) -> list[int] | int:
    """The kernel's form of ``max_tokens``: 0 for no limit."""
    if max_tokens is None:
        return 0
    limits = [max_tokens] * n if isinstance(max_tokens, int) else list(max_tokens)
    if len(limits) != n or any(limit is not None and limit < 1 for limit in limits):
        raise errors.InvalidArgumentError(f"max_tokens is {max_tokens!r}; it must be 1 or more, for all or for each of {n} branches")
    return [limit or 0 for limit in limits]
