"""What a store answers with."""
from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .. import errors
from .._ffi import capi


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
    n_read : list of int
        For each of the runs its tokens that are in the cache now.
    """

    tokens: list[list[int]]
    finish: list[Finish | None]
    n_ticks: int
    n_dispatches: int
    out_of_cells: bool
    n_read: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pressure:
    """Live numbers of a store, true at its last dispatch boundary.

    Attributes
    ----------
    n_ctx : int
        Cells of the cache.
    n_batch, n_ubatch : int
        Tokens of a dispatch, and those the engine computes at once.
    n_threads : int
        Threads that decode and draw.
    cells_used, cells_remaining : int
        Every cell counted once, however many branches share it.
    leases_used, leases_remaining : int
        Branches alive, and branches that can still be made.
    flash_attn, swa_full, deterministic : bool
        As the store was opened; ``swa_full`` is True for a model without a sliding window.
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
    swa_full: bool
    deterministic: bool
    n_ubatch: int


@dataclass(frozen=True, slots=True)
class PromptOutcome:
    """What became of one prompt of :meth:`Store.decode_prompts`.

    Attributes
    ----------
    error : PylloyalError or None
        Why it stopped; its ``state`` says what became of the branch.
    n_segments, n_cells : int
        Stretches and cells that landed.
    """

    error: errors.PylloyalError | None
    n_segments: int
    n_cells: int


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Where the cells of a store are, and what sharing them saved.

    Attributes
    ----------
    pressure : Pressure
    n_roots, n_leaves, n_poisoned : int
        Branches of that kind.
    depth : int
        Forks on the longest way from a root to a leaf.
    cells_inherited : int
        Sum over the branches: cells that each would hold once more if it had been read by itself.
    """

    pressure: Pressure
    n_roots: int
    n_leaves: int
    n_poisoned: int
    depth: int
    cells_inherited: int
