"""A store: one KV cache and the tree of branches that lives in it."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from .. import errors
from .._ffi import capi
from .._ffi.buffers import StepBuffers
from .._ffi.handle import Handle
from .._ffi.load import error_of, library, take_text_at
from .._ffi.memory import Items, Runs, f32_array, i32_array, i32_of, known_ids, new, ref, size, u8_of, u32, u32_of, u64, u64_array, u64_room
from .branch import Branch, Prefillable
from .chat import ChatPrompt
from .grammar import Grammar, constraint_of
from .model import Model
from .outcomes import Finish, Pressure, PromptOutcome, StoreStatistics, Ticks
from .params import KVType, store_params
from .projector import LaidOut
from .sampling import Sampling
from .turn import Turn, interruptibly

if TYPE_CHECKING:
    from .dry_run import Memory


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
    swa_full : bool
        True gives the layers with a sliding window cells for the whole context; False a window's worth for each branch, which is
        far less memory for a long context. Forks see the same cells either way; recycled ones lie in another order, which can move
        last bits.
    deterministic : bool
        Every dispatch holds one branch only, so that what is decoded beside a branch cannot move the last bits of its logits: the
        same calls on it give the same tokens in any company. Slower: a tick takes a dispatch for each branch. Needs flash
        attention (recurrent models aside) and a model opened with ``gpu_layers=0``; holds until cells that were given back are taken again (pruning,
        :meth:`score`, ``swa_full=False``), and with fewer than 512 cells in use, or one thread, or, where attention is this library's own
        (docs/adr/0012), at most twice as many threads as attention heads.
    n_ubatch : int, optional
        Tokens the engine computes at once; ``n_batch`` by default, at least ``n_branches``. A smaller one takes less memory for
        intermediate results, and a dispatch is computed in several parts. Pictures whose rows see each other must fit it, and with
        ``swa_full=False`` and a window smaller than the context it must be ``n_batch``.
    n_rs_seq : int
        Snapshots of recurrent state for each branch. A store never uses any: it costs memory and gives nothing.
    n_outputs : int, optional
        Rows of logits to make room for; ``n_branches`` by default, which is what a store uses.
    offload_kqv, op_offload : bool
        Cells lie on the device of their layer; an accelerator may compute with weights that lie in host memory.

    Raises
    ------
    InsufficientMemoryError, UnsupportedOperationError, InvalidArgumentError
        Nothing was opened.
    """

    def __init__(self, model: Model, *, n_ctx: int | None = None, n_branches: int = 8, n_batch: int | None = None, n_threads: int | None = None,
                 flash_attn: bool | None = None, type_k: KVType = "f16", type_v: KVType = "f16", swa_full: bool = True, deterministic: bool = False, n_ubatch: int | None = None,
                 n_rs_seq: int = 0, n_outputs: int | None = None, offload_kqv: bool = True, op_offload: bool = True) -> None:
        lib = library()
        params = store_params(n_ctx=n_ctx, n_branches=n_branches, n_batch=n_batch, n_ubatch=n_ubatch, n_threads=n_threads, flash_attn=flash_attn, type_k=type_k, type_v=type_v,
                              swa_full=swa_full, deterministic=deterministic, n_rs_seq=n_rs_seq, n_outputs=n_outputs, kv_unified=True, offload_kqv=offload_kqv, op_offload=op_offload)
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
        constraint = constraint_of(grammar)
        with self._turn.take():
            self._lib.pyl_branch_create(self._ptr(), ref(out), start_pos, ref((sampling or Sampling())._struct()), constraint)
        return Branch(self, out.value)

    def branches(self) -> list[Branch]:
        """All live branches, oldest first."""
        return [Branch(self, handle) for handle in self._handles(0)]

    def _handles(self, children_of: int) -> list[int]:
        out = u64_room(self._step.n)
        n = size()
        with self._turn.take():
            self._lib.pyl_branch_list(self._ptr(), children_of, out, self._step.n, ref(n))
        return list(out[: n.value])

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

    def decode_prompts(self, items: Iterable[tuple[Branch, LaidOut]]) -> list[PromptOutcome]:
        """Decode laid-out prompts on branches, encoding their media as they come; one that fails does not stop the others.

        A picture lands whole or, if the engine fails within it, poisons its branch; what fails between two stretches leaves the branch
        at the end of the last whole one. Sampler and grammar are not fed. Ctrl-C stops between two dispatches of text or before a picture; the
        KeyboardInterrupt's ``result`` holds the outcomes, unless nothing had begun.

        Returns
        -------
        list of PromptOutcome
            One for each item.

        Raises
        ------
        ContextOverflowError
            They do not fit together; nothing was decoded.
        InvalidArgumentError
            A branch twice, a placeholder, or a picture whose rows must fit one dispatch and do not (``need``, ``have``); nothing
            was decoded.
        ProjectorMismatchError
            A prompt was laid out for another model.
        """
        pairs = [(self._own(branch), prompt._ptr()) for branch, prompt in items]
        with self._turn.take():
            work = Items(pairs)
            pointer = self._ptr()
            try:
                try:
                    interruptibly(lambda: self._lib.pyl_decode_prompts_n(pointer, work.array, work.n), self.cancel)
                except errors.PylloyalError:
                    if not work.has_run:  # refused as a whole; otherwise each item tells its own
                        raise
                except KeyboardInterrupt as error:
                    if work.has_run:
                        error.result = _outcomes(work)  # type: ignore[attr-defined]
                    raise
                return _outcomes(work)
            finally:
                work.free()

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
            return list(step.tokens[:n])

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
            step.set_tokens(tokens)
            self._lib.pyl_commit_n(self._ptr(), step.branches, step.tokens, n)

    def tick(self, branches: Sequence[Branch], *, n_steps: int = 1, max_tokens: int | Sequence[int | None] | None = None, stop: Sequence[int] = (),
             runs: Iterable[tuple[Branch, Prefillable]] = (), max_run_tokens: int | None = None) -> Ticks:
        """Advance branches together: draw, set aside those that end, decode the others in one dispatch; up to ``n_steps`` times.

        Parameters
        ----------
        branches : sequence of Branch
            Each once, with logits, none poisoned; may be empty.
        n_steps : int
            Ticks to run in one native call. With more than one, Ctrl-C cancels at the next tick, and the KeyboardInterrupt's
            ``result`` holds the :class:`Ticks` before it.
        max_tokens : int or sequence of int or None, optional
            Most tokens to take in this call, 1 or more, for all or for each branch.
        stop : sequence of int
            Token ids that end a branch like an end-of-generation token: drawn, not decoded.
        runs : iterable of (Branch, prompt)
            Prompts of other branches, as for :meth:`prefill`: each dispatch is filled up with their tokens, so that they are read while the
            others speak, without dispatches of their own. What is still unread when the branches are done stays so:
            ``Ticks.n_read`` tells, and the branches' positions do.
        max_run_tokens : int, optional
            Most of their tokens in one dispatch: fewer make each tick quicker. None for as many as fit.

        Raises
        ------
        ContextOverflowError
            Not even the first tick and the runs fit; nothing was drawn.
        UnsupportedOperationError
            Runs in a deterministic store, where branches share no dispatch; nothing was drawn.
        DecodeError, DecodeCancelledError
            A later tick failed; ``result`` holds the :class:`Ticks` before it.
        """
        if not 0 < n_steps < 2**31:
            raise errors.InvalidArgumentError(f"n_steps is {n_steps}; it must be 1 or more")
        if max_run_tokens is not None and not 0 < max_run_tokens < 2**31:
            raise errors.InvalidArgumentError(f"max_run_tokens is {max_run_tokens}; it must be 1 or more")
        reading = Runs((self._own(branch), self._tokens(branch, prompt)) for branch, prompt in runs) if runs else None
        n = len(branches)
        with self._turn.take():
            step = self._buffers(n)
            step.reserve_steps(n_steps)
            stops = i32_array(stop) if len(stop) else None
            limits = None if max_tokens is None else _limits(max_tokens, n)
            # Before the call, so that what is read is true even if an interrupt comes first.
            step.set_tick(n_steps, n, map(self._own, branches), limits, stops, reading and reading.array, max_run_tokens or 0)
            pointer = self._ptr()
            try:
                if n_steps > 1:
                    interruptibly(partial(self._lib.pyl_tick_n, pointer, step.tick_ref, step.lanes, n, step.step_tokens), self.cancel)
                else:
                    self._lib.pyl_tick_n(pointer, step.tick_ref, step.lanes, n, step.step_tokens)
            except errors.PylloyalError as error:
                if error.state != "unchanged":
                    error.result = self._ticks(step, n, n_steps, reading)
                raise
            except KeyboardInterrupt as error:
                error.result = self._ticks(step, n, n_steps, reading)  # type: ignore[attr-defined]
                raise
            return self._ticks(step, n, n_steps, reading)

    @staticmethod
    def _ticks(step: StepBuffers, n: int, n_steps: int, reading: Runs | None) -> Ticks:
        n_ticks, n_dispatches, out_of_cells, counts, reasons = step.read_tick(n)
        said, at = step.step_tokens, 0
        tokens: list[list[int]] = []
        finish: list[Finish | None] = []
        for count, reason in zip(counts, reasons, strict=True):
            tokens.append(said[at : at + count])
            finish.append(_FINISH[reason])
            at += n_steps
        return Ticks(tokens, finish, n_ticks, n_dispatches, bool(out_of_cells), reading.n_landed if reading else [])

    def score(self, prompts: Iterable[Prefillable], *, source: Branch | None = None, tokens: Sequence[int] | None = None) -> npt.NDArray[np.float32]:
        """The logits after each of any number of prompts, through as many forks at a time as leases and cells allow.

        The store is the same afterwards, whether it succeeded or not.

        Parameters
        ----------
        prompts : iterable of prompts
            Each continues ``source``; see :meth:`prefill`.
        source : Branch, optional
            What they have in common, decoded once; None for an empty start.
        tokens : sequence of int, optional
            The tokens whose logits are wanted; None for the whole vocabulary.

        Returns
        -------
        numpy.ndarray, float32, shape (n prompts, n tokens or n_vocab)

        Raises
        ------
        ContextOverflowError
            With the ``index`` of a prompt that does not fit the cells left.
        NoLeaseError
            No branch is left to fork into.
        """
        if source is not None:
            self._own(source)
        is_start = source is None or source.position == 0
        lists = [self._encoded(prompt, is_start) for prompt in prompts]
        n_ids = 0 if tokens is None else len(tokens)
        out = np.empty((len(lists), len(self.model.vocab) if tokens is None else n_ids), np.float32)
        if not out.size:
            return out
        flat, lengths = np.concatenate(lists), np.array([len(item) for item in lists], np.uint32)
        with self._turn.take():
            arguments = (self._ptr(), self._own(source) if source else 0, i32_of(flat), u32_of(lengths), len(lists), i32_array([] if tokens is None else tokens), n_ids, f32_array(out))
            interruptibly(lambda: self._lib.pyl_score_n(*arguments), self.cancel)
        return out

    # ------------------------------------------------------------------------------------------------------------ state

    def from_bytes(self, data: bytes | bytearray | memoryview) -> Branch:
        """Make a new root of a branch that :meth:`Branch.to_bytes` gave; it continues token for token.

        Bit for bit, if its cells lay in the order of its tokens: after pruning, and with ``swa_full=False``, they may not, and last
        bits may differ.

        The bytes are checked against damage, not against malice: load what you would also load as a model.

        Raises
        ------
        FormatError
            Damaged, or not a saved branch.
        UnsupportedOperationError
            Saved with another model, engine, KV type or flash attention; the message names both sides.
        NoLeaseError, ContextOverflowError
            No room for it. Nothing was made in any of these cases.
        """
        out = u64()
        view = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        with self._turn.take():
            self._lib.pyl_branch_load(self._ptr(), ref(out), u8_of(view), view.size)
        return Branch(self, out.value)

    def load(self, path: str | os.PathLike[str]) -> Branch:
        """Make a new root of a branch that :meth:`Branch.save` wrote; see :meth:`from_bytes`.

        Raises
        ------
        OSError
            The file cannot be read.
        """
        return self.from_bytes(Path(path).read_bytes())

    def memory(self) -> Memory:
        """What the engine has allocated for this store and its model, by its own account."""
        from .dry_run import read_memory  # milliseconds to import, and few ask

        with self._turn.take():
            return read_memory(take_text_at(self._lib.pyl_store_memory, 1, self._ptr()))

    def pressure(self) -> Pressure:
        """Live numbers; may be asked from any thread, also while another one is decoding."""
        p = new(capi.pyl_pressure)
        self._lib.pyl_store_pressure(self._ptr(), ref(p))
        return Pressure(p.n_ctx, p.n_batch, p.n_threads, p.cells_used, p.cells_remaining, p.leases_used, p.leases_remaining, p.flash_attn == capi.FLASH_ATTN_ON,
                        p.n_dispatches, p.n_tokens_decoded, p.n_tokens_sampled, p.decode_s, p.sample_s, bool(p.swa_full), bool(p.deterministic), p.n_ubatch)

    def statistics(self) -> StoreStatistics:
        """Where the cells are, and what sharing them saved. Cost: a native call for each branch."""
        depth: dict[int, int] = {}
        infos = {branch._handle: branch._info() for branch in self.branches()}
        for handle in infos:  # oldest first: but a child that was taken over may be older than its parent
            path = [handle]
            while path[-1] not in depth and (above := infos[path[-1]].parent):
                path.append(above)
            base = depth.get(path[-1], 0)
            depth.update((h, base + i) for i, h in enumerate(reversed(path)))
        values = infos.values()
        return StoreStatistics(self.pressure(), sum(not i.parent for i in values), sum(not i.n_children for i in values), sum(bool(i.is_poisoned) for i in values),
                               max(depth.values(), default=0), sum(i.cells_inherited for i in values))

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

    def _tokens(self, branch: Branch, prompt: Prefillable) -> npt.NDArray[np.int32]:
        return self._encoded(prompt, isinstance(prompt, str) and branch.position == 0)

    def _encoded(self, prompt: Prefillable, is_start: bool) -> npt.NDArray[np.int32]:
        if isinstance(prompt, str):
            prompt = self.model.vocab.encode(prompt, add_special=is_start)
        elif isinstance(prompt, ChatPrompt):
            prompt = prompt.tokens()
        return known_ids(prompt, len(self.model.vocab), "text, a ChatPrompt, or a flat sequence of token ids")


_FINISH: Final[list[Finish | None]] = [None, *Finish]


def _limits(max_tokens: int | Sequence[int | None], n: int) -> list[int]:
    """The kernel's form of ``max_tokens``: 0 for no limit."""
    limits = list(max_tokens) if isinstance(max_tokens, Iterable) else [max_tokens] * n
    if len(limits) != n or any(limit is not None and not 0 < limit < 2**32 for limit in limits):
        raise errors.InvalidArgumentError(f"max_tokens is {max_tokens!r}; it must be 1 or more, for all or for each of {n} branches")
    return [0 if limit is None else index(limit) for limit in limits]


def _outcomes(work: Items) -> list[PromptOutcome]:
    return [PromptOutcome(error_of(code, message, state, rc, n_cells > 0) if code else None, n_segments, n_cells) for code, message, state, rc, n_segments, n_cells in work.results()]
