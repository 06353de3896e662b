"""Whether two sides gave the same greedy answers, and if not, how near to each other the two most likely tokens were where they first differ.

Sides that decode the same tokens in other dispatches add up in another order, and last bits move (docs/testing.md, "How exact the same is"): text then
flips where two tokens are almost as likely. That is counted and told; a difference where the model is sure is a fault of one side.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import Model, Sampling, TokenFlags
from .questions import Work

NEAR_TIE = 1.25  # logits: as far as another attention was seen to move SmolLM2's; weights in q4_k moved by 2.0


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of an answer that the two sides do not share.

    Attributes
    ----------
    question, step : int
    ours, theirs : int
        The tokens.
    margin : float
        Logits between the two most likely tokens there.
    gap : float
        Logits between the most likely token and the less likely one of ``ours`` and ``theirs``.
    """

    question: int
    step: int
    ours: int
    theirs: int
    margin: float
    gap: float

    @property
    def is_near_tie(self) -> bool:
        return self.gap <= NEAR_TIE

    def describe(self) -> str:
        kind = "near tie" if self.is_near_tie else "NOT a near tie"
        chosen = "" if self.gap <= self.margin else f", one that was chosen is {self.gap:.2g} from the first"
        return f"question {self.question + 1} from token {self.step + 1} ({kind}: the two most likely are {self.margin:.2g} apart{chosen})"


def first_differences(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[int, int]:
    """Question -> the first step at which the answers differ; those that are the same are not in it. A shorter answer differs where it ends.

    Raises
    ------
    ValueError
        Not as many answers on both sides.
    """
    found = {}
    for question, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if list(a) != list(b):
            found[question] = next((step for step, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return found


def differences(model: str, n_threads: int, work: Work, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[Difference]:
    """Where the answers differ, with the margins there: each place is read anew, from forks of the document.

    Raises
    ------
    ValueError
        Not as many answers on both sides, or an answer too short to hold a token where it differs.
    """
    steps = first_differences(ours, theirs)
    if any(step >= min(len(ours[question]), len(theirs[question])) for question, step in steps.items()):
        raise ValueError("answers are of different lengths")
    if not steps:
        return []
    n_cells = work.n_cells + 256
    with Model(model) as opened, opened.store(n_ctx=n_cells, n_branches=len(steps) + 1, n_threads=n_threads) as store:
        root = store.root(sampling=Sampling.greedy())
        root.prefill(work.document)
        logits = store.score([[*work.questions[question], *ours[question][:step]] for question, step in steps.items()], source=root)
        ends = TokenFlags.END_OF_GENERATION
        logits[:, [token for token, flags in enumerate(opened.vocab.flags(range(len(opened.vocab)))) if flags & ends]] = -np.inf  # no side draws these
    return [difference(question, step, ours[question][step], theirs[question][step], row) for (question, step), row in zip(steps.items(), logits, strict=True)]


def difference(question: int, step: int, ours: int, theirs: int, logits: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Difference:
    """What the logits at a place say of the two tokens."""
    second, first = np.partition(logits, -2)[-2:]
    return Difference(question, step, ours, theirs, float(first - second), float(first - min(logits[ours], logits[theirs])))


def summary(n: int, found: Sequence[Difference]) -> str:
    """For a note: how many are the same, and every one that is not."""
    return "; ".join([f"{n - len(found)} of {n} the same", *(difference.describe() for difference in found)])


def not_near(found: Sequence[Difference]) -> int:
    """Differences that nothing excuses."""
    return sum(not difference.is_near_tie for difference in found)
