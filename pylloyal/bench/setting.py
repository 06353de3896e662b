"""What the groups are given: the model, the sides there are, how often to measure. It starts runners and ends them."""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .. import Model
from .runner import Runner

PRODUCT = (sys.executable, "-m", "pylloyal.bench.product")
TEXT = ("It was a bright cold day by the sea, and the ship lay still. Nobody aboard had spoken since the morning watch; the mate read aloud, "
        "the cook counted his knives, and far to the south a single sail stood on the horizon like a thought that will not come nearer. ")


@dataclass
class Setting:
    """One run of the benchmark.

    Attributes
    ----------
    control : sequence of str or None
        Command line of the raw engine's runner; without one, rows have no ratios.
    peers : mapping
        Command lines of the peers' runners, by name.
    is_quick : bool
        Fewer repetitions, smaller work: shows that it runs, and no more.
    """

    model: str
    n_threads: int
    control: Sequence[str] | None = None
    peers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_quick: bool = False
    flash_attn: str = "on"
    product: Sequence[str] = PRODUCT

    @property
    def n(self) -> int:
        """Pairs to measure of what takes seconds."""
        return 3 if self.is_quick else 7

    def times(self, full: int, quick: int) -> int:
        """A size of the work."""
        return quick if self.is_quick else full

    @cached_property
    def tokens(self) -> list[int]:
        """A long text of this model's own tokens; prefixes of it are prefixes."""
        one, = self.encode([TEXT])
        return [*self.begin(TEXT), *(one * (40_000 // len(one)))]

    def begin(self, text: str) -> list[int]:
        """Tokens of a text that nothing stands before: with the token that begins a sequence, if the model wants one."""
        with Model(self.model, vocab_only=True) as model:
            head = [model.vocab.bos] if model.vocab.adds_bos and model.vocab.bos is not None else []
            return [*head, *model.vocab.encode(text)]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts, inert and without specials."""
        with Model(self.model, vocab_only=True) as model:
            return [model.vocab.encode(text) for text in texts]

    def start(self, name: str) -> Runner:
        """The runner of a side: "product", "control" or a peer's name.

        Raises
        ------
        RunnerError
            It does not start.
        """
        command = self.product if name == "product" else self.control if name == "control" else self.peers[name]
        if command is None:
            raise ValueError("no control was given")
        return Runner(name, command)

    @contextlib.contextmanager
    def opened(self, name: str, **options: Any) -> Iterator[Runner]:
        """A side's runner with this model open; ``options`` as the operation "open" has them.

        Raises
        ------
        RunnerError
            It does not start, or cannot open the model.
        """
        with self.start(name) as runner:
            runner.ask("open", **{"model": self.model, "n_threads": self.n_threads, "flash_attn": self.flash_attn, **options})
            yield runner
