"""What one ``pylloyal ask`` did: filled in while it runs, so that it is true whenever it ends."""
from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from .terminal import plural, rate


@dataclass
class Answer:
    """One fork.

    Attributes
    ----------
    finish : str or None
        "end_of_generation", "stop", "length", "illegal" or "cancelled"; None while it goes on.
    """

    question: str | None
    seed: int
    text: str = ""
    tokens: int = 0
    finish: str | None = None


@dataclass
class Report:
    """Numbers that were measured, but for ``separate_prefix_tokens``.

    Attributes
    ----------
    prefix_tokens : int
        Tokens of the shared prefix that were decoded.
    prefix_cells : int
        Cells they take; every fork sees them.
    question_tokens : int
        Tokens after the prefix, of all forks together.
    media, slack : int
        Blocks of rows in the prefix, and its cells less its positions.
    encoder_runs : int
    cells_used, n_ctx : int
        Cells in use at the end (nothing is pruned before), and cells there are.
    """

    model: str
    seed: int
    answers: list[Answer]
    prefix_tokens: int = 0
    prefix_cells: int = 0
    question_tokens: int = 0
    prefill_dispatches: int = 0
    tick_dispatches: int = 0
    ticks: int = 0
    cells_used: int = 0
    n_ctx: int = 0
    n_batch: int = 0
    media: int = 0
    slack: int = 0
    encoder_runs: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"load": 0.0, "prefill": 0.0, "generate": 0.0})

    @property
    def tokens_generated(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def separate_prefix_tokens(self) -> int:
        """Prefix tokens that as many separate runs would have decoded; computed."""
        return self.prefix_tokens * len(self.answers)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to a phase, also when it is left by an exception."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def cancel(self) -> None:
        """Mark what is not finished as cancelled."""
        for answer in self.answers:
            answer.finish = answer.finish or "cancelled"

    def to_json(self) -> str:
        """One line of JSON."""
        values: dict[str, Any] = asdict(self)
        answers = values.pop("answers")
        values["seconds"] = {phase: round(seconds, 6) for phase, seconds in self.seconds.items()}
        return json.dumps({**values, "branches": len(answers), "tokens_generated": self.tokens_generated, "separate_prefix_tokens": self.separate_prefix_tokens, "answers": answers})

    def summary(self) -> list[str]:
        """Lines for a person to read."""
        n, s = len(self.answers), self.seconds
        rows = [("prefix", f"{plural(self.prefix_tokens, 'token')} decoded once, {plural(self.prefix_cells, 'cell')} shared by {plural(n, 'branch', 'branches')}"),
                ("cells", f"{self.cells_used:,} used in all, of {self.n_ctx:,}"),
                ("dispatches", f"{self.prefill_dispatches + self.tick_dispatches:,}: {self.prefill_dispatches:,} prefill + {self.tick_dispatches:,} tick (in {plural(self.ticks, 'tick')})"),
                ("generated", plural(self.tokens_generated, "token") + rate(self.tokens_generated, s["generate"])),
                ("finish", ", ".join(f"{count} {finish}" for finish, count in Counter(answer.finish for answer in self.answers).items())),
                ("seconds", f"load {s['load']:.2f}, prefill {s['prefill']:.2f}, generate {s['generate']:.2f}"),
                ("seed", str(self.seed))]
        if self.media:
            rows.insert(1, ("media", f"{plural(self.media, 'block')} of rows, encoded in {plural(self.encoder_runs, 'run')}; slack {self.slack} cells"))
        if n > 1:
            rows.append(("separately", f"{n} runs would have decoded {self.separate_prefix_tokens:,} prefix tokens (computed: {self.prefix_tokens:,} x {n})"))
        return [f"{name:<12}{value}" for name, value in rows]
