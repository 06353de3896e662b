"""The naive way as a runner, ``python -m pylloyal.bench.contexts``: a context of its own for every question, each of which reads the document again.

Made with this package's own library, so that nothing but the way differs.
"""
from __future__ import annotations

import sys
import time
from typing import Any

from .. import Model, Sampling
from .product import Answer, Product, main


class Contexts(Product):
    """One store a question, one after another."""

    def open(self, model: str, n_ctx: int, n_branches: int, n_threads: int, n_batch: int = 512, flash_attn: str = "on") -> Answer:  # noqa: ARG002 rooms of the product's
        """As the product's, but no store is open before a question is there, and each has room for that question alone."""
        start = time.perf_counter()
        self.close()
        self._model = Model(model)
        self._options: dict[str, Any] = {"n_branches": 1, "n_batch": n_batch, "n_threads": n_threads, "flash_attn": flash_attn == "on"}
        return {"seconds": time.perf_counter() - start}

    def document(self, document: list[int], questions: list[list[int]], n_tokens: int) -> Answer:
        model = self._model
        if model is None:
            raise ValueError("nothing is open")
        if not all(questions):
            raise ValueError("a question is empty")
        start = time.perf_counter()
        answers = [self._ask(model, document + question, n_tokens) for question in questions]
        return {"seconds": time.perf_counter() - start, "answers": answers}

    def _ask(self, model: Model, prompt: list[int], n_tokens: int) -> list[int]:
        with model.store(n_ctx=len(prompt) + n_tokens, **self._options) as self._store:
            root = self._root(Sampling.greedy())
            root.prefill(prompt)
            tokens = self._store.tick([root], n_steps=n_tokens - 1).tokens[0] if n_tokens > 1 else []
            answer = [*tokens, *self._store.sample([root])]
        self._store = None
        if len(answer) != n_tokens:
            raise ValueError(f"{len(answer)} tokens came where {n_tokens} were asked for")
        return answer


if __name__ == "__main__":
    sys.exit(main("N contexts", Contexts()))
