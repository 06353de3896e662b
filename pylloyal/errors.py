"""Every exception of the package, and the one table from the kernel's status codes to them.

A refusal is an answer, not a fault: it carries the live numbers that produced it. Whatever failed says what became of the
state: ``unchanged``, ``advanced`` (whole dispatches landed, nothing is damaged) or ``poisoned`` (the branch can only be pruned).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

State = Literal["unchanged", "advanced", "poisoned"]


@dataclass(frozen=True)
class Failure:
    """What the kernel knows about a failure: its ``pyl_error``, as a value."""

    code: int
    state: State
    engine_rc: int
    partial: bool
    index: int | None
    need: int | None
    have: int | None
    message: str


class PylloyalError(Exception):
    """Base of all errors of this package.

    Attributes
    ----------
    state : {"unchanged", "advanced", "poisoned"}
        What became of the branch or store the call was about.
    index : int or None
        Index of the offending item of a sequence argument.
    need, have : int or None
        The numbers of a refusal, in the unit the message names.
    partial : bool
        True when part of the call landed before it failed.
    engine_rc : int
        The engine's own return code, 0 when it was not involved.
    result : object or None
        What had been done when a call failed half-way (for a tick: its :class:`~pylloyal.Ticks` so far).
    """

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure
        self.code = failure.code if failure else 0
        self.state: State = failure.state if failure else "unchanged"
        self.index = failure.index if failure else None
        self.need = failure.need if failure else None
        self.have = failure.have if failure else None
        self.partial = failure.partial if failure else False
        self.engine_rc = failure.engine_rc if failure else 0
        self.result: Any = None


class LibraryError(PylloyalError, ImportError):
    """The native library cannot be used."""


class LibraryNotFoundError(LibraryError):
    """No native library was found, or none could be loaded; the message lists every path tried and how to build one."""


class ABIMismatchError(LibraryError):
    """The native library speaks another version of the ABI than this package."""


class ClosedError(PylloyalError, ValueError):
    """The object was closed."""


class ForkedProcessError(PylloyalError, RuntimeError):
    """The object was made before ``os.fork()`` and is used in the child, where its threads and memory maps do not exist."""


class KernelError(PylloyalError):
    """The kernel refused or failed a call."""


class InvalidArgumentError(KernelError, ValueError):
    """An argument is out of its range or contradicts another."""


class StaleHandleError(KernelError, LookupError):
    """The branch was pruned, or a logits view outlived the decode it showed."""


class BusyError(KernelError):
    """Another thread is inside this store."""


class BranchHasChildrenError(KernelError):
    """The branch has children and the operation needs a leaf."""


class DivergedError(KernelError):
    """The parent moved on after the fork."""


class NoLogitsError(KernelError):
    """The branch has nothing to sample from."""


class NothingLegalError(KernelError):
    """Grammar and logits leave no token to draw."""


class GrammarError(KernelError, ValueError):
    """A grammar does not parse (the message begins with line and column), or a token is not legal under it."""


class TemplateError(KernelError, ValueError):
    """No chat template, or it does not parse, raises, or cannot take what was asked; in its own words."""


class UnsupportedOperationError(KernelError):
    """This model, engine or build cannot do it."""


class FormatError(KernelError, ValueError):
    """Data is not in the format it should be in."""


class KernelIOError(KernelError, OSError):
    """A file could not be opened or read."""


class InternalKernelError(KernelError):
    """A broken promise inside the library; please report it."""


class DecodeError(KernelError):
    """The engine failed in the middle of a dispatch: the branches of that dispatch are poisoned."""


class NoCellsError(DecodeError):
    """The engine found no room although cells were left; unchanged, or advanced by the dispatches before."""


class DecodeCancelledError(DecodeError):
    """The call was cancelled at a dispatch boundary."""


class BranchPoisonedError(DecodeError):
    """An earlier decode of the branch failed half-way; it can only be pruned."""


class MediaError(PylloyalError, ValueError):
    """Something about a picture, a clip or a sound."""


class MediaDecodeError(MediaError):
    """A file cannot be decoded; the message names it and says why."""


class MediaEncodeError(MediaError):
    """The projector cannot prepare or encode a picture or sound."""


class UnsupportedMediaError(MediaError):
    """Media of a kind, size or shape that is not taken."""


class ProjectorMismatchError(MediaError):
    """The projector is not of this model, or there is none; the message names both sides."""


class CapacityError(PylloyalError):
    """Something does not fit; ``need`` and ``have`` say by how much.

    Attributes
    ----------
    binding : str
        What ran out: "cells", "leases", "memory"; of a refused plan what binds it ("KV", "WEIGHTS", ...); "UNKNOWN" and "header" where
        that cannot be told.
    remedies : tuple of str
        What would help, in terms of real settings.
    largest : int
        Of a plan that was refused, the longest context that fits, in tokens; 0: none, or no plan.
    """

    binding = ""
    remedies: tuple[str, ...] = ()
    largest = 0


class ContextOverflowError(CapacityError):
    """The tokens do not fit the cells that are left. Nothing was decoded.

    Attributes
    ----------
    reserved : int
        Cells promised to others, if an admission refused.
    holders : tuple of (str, int)
        Who has most cells, then.
    """

    reserved = 0
    holders: tuple[tuple[str, int], ...] = ()
    binding = "cells"
    remedies = ("prune branches that are done", "open the store with a larger n_ctx")


class NoLeaseError(CapacityError):
    """Every branch the store can hold is alive already."""

    binding = "leases"
    remedies = ("prune branches that are done", "open the store with a larger n_branches")


class InsufficientMemoryError(CapacityError, MemoryError):
    """An allocation failed."""

    binding = "memory"
    remedies: tuple[str, ...] = ("a smaller n_ctx", "a quantised KV type", "a smaller n_batch")


class UnknownMemoryError(CapacityError):
    """How much of a device is free is not known, so nothing is planned on it."""

    binding = "UNKNOWN"
    remedies = ("say how much memory there is",)


class MetadataError(CapacityError, ValueError):
    """A model's header is damaged, hostile, or not one; the message says what and where."""

    binding = "header"


# Status code -> exception. tests/unit/test_drift.py holds this against the header, both ways.
STATUS: dict[str, type[PylloyalError]] = {
    "E_INVALID": InvalidArgumentError,
    "E_CLOSED": ClosedError,
    "E_STALE": StaleHandleError,
    "E_BUSY": BusyError,
    "E_HAS_CHILDREN": BranchHasChildrenError,
    "E_DIVERGED": DivergedError,
    "E_NO_LOGITS": NoLogitsError,
    "E_GRAMMAR": GrammarError,
    "E_UNSUPPORTED": UnsupportedOperationError,
    "E_FORMAT": FormatError,
    "E_IO": KernelIOError,
    "E_INTERNAL": InternalKernelError,
    "E_OUT_OF_MEMORY": InsufficientMemoryError,
    "E_NO_LEASE": NoLeaseError,
    "E_CONTEXT": ContextOverflowError,
    "E_NO_CELLS": NoCellsError,
    "E_CANCELLED": DecodeCancelledError,
    "E_DECODE": DecodeError,
    "E_POISONED": BranchPoisonedError,
    "E_TEMPLATE": TemplateError,
    "E_ILLEGAL": NothingLegalError,
    "E_PROJECTOR": ProjectorMismatchError,
    "E_MEDIA": MediaEncodeError,
}
