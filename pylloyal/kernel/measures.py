"""What the logits of a branch say."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .. import errors
from .._ffi import capi
from .._ffi.load import library
from .._ffi.memory import floats

if TYPE_CHECKING:
    from .store import Store


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


@dataclass(frozen=True, slots=True)
class Priors:
    """The most likely of the tokens that may come next, most likely first.

    Attributes
    ----------
    tokens : numpy.ndarray, int32, shape (n,)
    log_probs : numpy.ndarray, float32, shape (n,)
        Natural logs; they sum to 1 over all tokens allowed.
    n_legal : int
        How many tokens are allowed.
    """

    tokens: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    n_legal: int


@dataclass(frozen=True, slots=True)
class Level:
    """Sums over the tokens measured at one level, in nats.

    Attributes
    ----------
    n_tokens : int
    surprisal, entropy : float
        Sums over them.
    last_surprisal, last_entropy : float
        Of the newest token measured.
    """

    n_tokens: int
    surprisal: float
    entropy: float
    last_surprisal: float
    last_entropy: float

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean surprisal, infinity where that is too large for a float; NaN before the first token."""
        if not self.n_tokens:
            return math.nan
        try:
            return math.exp(self.surprisal / self.n_tokens)
        except OverflowError:
            return math.inf

    @property
    def mean_entropy(self) -> float:
        """Nats a token; NaN before the first."""
        return self.entropy / self.n_tokens if self.n_tokens else math.nan


@dataclass(frozen=True, slots=True)
class Metrics:
    """How surprising the tokens of a branch were since :meth:`Branch.set_metrics`.

    Attributes
    ----------
    n_tokens : int
        Tokens that commits and ticks decoded while there were logits to measure them by.
    model : Level or None
        Against the model's own distribution at temperature 1; None when it is not measured.
    sampling : Level or None
        Against the distribution tokens are drawn from, after grammar, penalties, truncation and temperature. A token that could
        not have been drawn (a forced one) has a ``last_surprisal`` of infinity and is left out of the sums.
    """

    n_tokens: int
    model: Level | None
    sampling: Level | None

    @classmethod
    def _of(cls, m: capi.pyl_metrics) -> Metrics:
        return cls(m.n_tokens,
                   Level(m.n_tokens, m.model_surprisal, m.model_entropy, m.last_model_surprisal, m.last_model_entropy) if m.levels & capi.METRICS_MODEL else None,
                   Level(m.n_inside, m.sampling_surprisal, m.sampling_entropy, m.last_sampling_surprisal, m.last_sampling_entropy) if m.levels & capi.METRICS_SAMPLING else None)


@dataclass(frozen=True, slots=True)
class BranchStatistics:
    """Everything countable about a branch.

    Attributes
    ----------
    position : int
        Where its next token goes.
    cells_own, cells_inherited : int
        Cells it decoded itself, and those before its fork point.
    n_children, depth : int
        Forks below it directly, and forks between it and its root.
    n_sampled : int
        Draws since its seed was set.
    metrics : Metrics
    """

    position: int
    cells_own: int
    cells_inherited: int
    n_children: int
    depth: int
    n_sampled: int
    metrics: Metrics
