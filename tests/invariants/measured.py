"""What a reference measures, from logits alone: how sure a model is, and how surprising a token was.

The sampling level takes the kernel's steps in the kernel's precision, and says so where the last bit of a float could decide
whether a token is kept: there it is not held against the kernel.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pylloyal import Sampling

INF = float("inf")
Row = npt.NDArray[np.float32]


def certainty(logits: Row) -> tuple[int, float, float, float] | None:
    """The most likely token, its logit, the entropy in nats, and the logarithm of the sum of exponentials; None where nothing can come."""
    row = logits.astype(np.float64)
    top = float(row.max())
    if top == -INF:
        return None
    e = np.exp(row - top)
    p = e[e > 0] / e.sum()
    return int(np.argmax(row)), top, float(-(p * np.log(p)).sum()), top + float(np.log(e.sum()))


@dataclass(frozen=True)
class Drawn:
    """What a token is drawn from, and how surprising it was; not ``is_sure`` where a rounding decides."""

    surprisal: float
    entropy: float
    is_sure: bool = True


def drawn_from(scores: Row, s: Sampling, token: int) -> Drawn:
    """The same at the sampling level, from what the sampler sees after biases, penalties and grammar."""
    order = np.lexsort((np.arange(len(scores)), -scores))
    order = order[scores[order] > -INF]
    if not len(order):
        return Drawn(INF, 0.0)
    if s.temperature <= 0:
        return Drawn(0.0 if token == order[0] else INF, 0.0)
    kept = order[: s.top_k] if s.top_k > 0 else order
    logits = scores[kept]
    is_sure = True
    if logits[0] == INF:  # more likely than anything finite
        kept = kept[logits == INF]
        logits = np.zeros(len(kept), np.float32)
    if s.typical_p < 1:
        p = softmax(logits).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = float(-np.where(p > 0, p * np.log(p), 0).sum())
            surprise = np.abs(-np.log(p) - entropy)
        by_surprise = np.argsort(surprise, kind="stable")
        n, is_clear = reach(p[by_surprise], s.typical_p)
        edge = surprise[by_surprise]
        is_level = n < len(edge) and p[by_surprise[n]] == p[by_surprise[n - 1]]
        is_sure &= is_clear and (n == len(edge) or is_level or edge[n] - edge[n - 1] > 1e-5)
        chosen = np.sort(by_surprise[:n])  # back in the order of their logits
        kept, logits = kept[chosen], logits[chosen]
    if s.top_p < 1:
        n, is_clear = reach(softmax(logits).astype(np.float64), s.top_p)
        is_sure &= is_clear
        kept, logits = kept[:n], logits[:n]
    if s.min_p > 0:
        floor = logits[0] + np.log(np.float32(s.min_p))
        is_sure &= not ((logits != floor) & (np.abs(logits - floor) < 1e-5 * (1 + np.abs(floor)))).any()
        kept, logits = kept[logits >= floor], logits[logits >= floor]
    with np.errstate(over="ignore", under="ignore"):
        power = (logits - logits[0]) / np.float32(s.temperature)
        weight = np.exp(power).astype(np.float64)
    share = weight / weight.sum()
    some = share[share > 0]
    is_sure &= not ((power > -105) & (power < -85) & (kept == token)).any()  # a float has few digits there, or none
    mine = float(share[kept == token].sum())
    return Drawn(-float(np.log(mine)) if mine > 0 else INF, float(-(some * np.log(some)).sum()), bool(is_sure))


def softmax(logits: Row) -> Row:
    with np.errstate(over="ignore", under="ignore"):
        e = np.exp(logits - logits[0])
        made: Row = (e / e.sum(dtype=np.float64)).astype(np.float32)
    return made


def reach(p: npt.NDArray[np.float64], goal: float) -> tuple[int, bool]:
    """How many of the first make up this share, and whether that is beyond doubt."""
    total = np.cumsum(p)
    n = int(np.searchsorted(total, np.float32(goal))) + 1
    return min(n, len(p)), not (np.abs(total - goal) < 1e-6).any()


@dataclass(frozen=True)
class Sums:
    """Of one level."""

    n: int = 0
    surprisal: float = 0.0
    entropy: float = 0.0
    last_surprisal: float = 0.0
    last_entropy: float = 0.0

    def add(self, surprisal: float, entropy: float) -> Sums:
        return Sums(self.n + 1, self.surprisal + surprisal, self.entropy + entropy, surprisal, entropy)


@dataclass(frozen=True)
class Measured:
    """What has been measured on a branch since it was asked for, at no level, one, or both."""

    of_model: bool = False
    of_sampling: bool = False
    n_tokens: int = 0
    model: Sums = Sums()
    sampling: Sums = Sums()
    is_sure: bool = True  # of the sums of the sampling level

    def take(self, token: int, logits: Row, scores: Row, sampling: Sampling) -> Measured:
        """With one token more, chosen from these."""
        made = replace(self, n_tokens=self.n_tokens + 1)
        if self.of_model:
            found = certainty(logits)
            made = replace(made, model=self.model.add(found[3] - float(logits[token]) if found else INF, found[2] if found else 0.0))
        if self.of_sampling:
            seen = drawn_from(scores, sampling, token)
            if seen.surprisal == INF:  # it could not have been drawn: told, and in no sum
                sums = replace(self.sampling, last_surprisal=INF, last_entropy=seen.entropy)
            else:
                sums = self.sampling.add(seen.surprisal, seen.entropy)
            made = replace(made, sampling=sums, is_sure=self.is_sure and seen.is_sure)
        return made


NOTHING = Measured()


@dataclass(frozen=True)
class Priors:
    tokens: list[int]
    log_probs: list[float]
    n_legal: int


def priors_of(scores: Row, n: int) -> Priors | None:
    """The first n of those that can come, and what their chances are among all that can."""
    order = np.lexsort((np.arange(len(scores)), -scores))
    order = order[scores[order] > -INF]
    if not len(order):
        return None
    row = scores[order].astype(np.float64)
    with np.errstate(under="ignore", over="ignore"):
        log_probs = (row - row[0] - np.log(np.exp(row - row[0]).sum())).astype(np.float32)
    return Priors([int(token) for token in order[:n]], [float(x) for x in log_probs[:n]], len(order))
