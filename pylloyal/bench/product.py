"""The product as a runner: ``python -m pylloyal.bench.product``. Operations and answers are those of libsrc/bench/control.cpp.

Everything goes through the public API, as a user's program would.
"""
from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import Branch, Model, Sampling, Store, drain_logs, system_info
from ..errors import PylloyalError

Answer = dict[str, Any]


def peak_kib() -> int:
    """The most this process ever had resident; -1 where the system does not tell."""
    return _kib("/proc/self/status", "VmHWM:")


def rss_kib() -> int:
    """Resident now. The rollup is exact; the other is put together from each core's count now and then."""
    exact = _kib("/proc/self/smaps_rollup", "Rss:")
    return exact if exact >= 0 else _kib("/proc/self/status", "VmRSS:")


def _kib(file: str, key: str) -> int:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return -1
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), -1)


class Product:
    """The operations; one model and one store at a time."""

    def __init__(self) -> None:
        self._model: Model | None = None
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        if self._store is None:
            raise ValueError("nothing is open")
        return self._store

    def open(self, model: str, n_ctx: int, n_branches: int, n_threads: int, n_batch: int = 512, flash_attn: str = "on") -> Answer:
        start = time.perf_counter()
        self.close()
        self._model = Model(model)
        self._store = self._model.store(n_ctx=n_ctx, n_branches=n_branches, n_batch=n_batch, n_threads=n_threads, flash_attn=flash_attn == "on")
        return {"seconds": time.perf_counter() - start}

    def _root(self, sampling: Sampling) -> Branch:
        """An empty branch that never ends by itself, and neither do its forks."""
        return self.store.root(sampling=replace(sampling, ignore_eog=True))

    def ticks(self, prefix: list[int], n_branches: int, n_steps: int, mode: str, skip: int = 0, seed: int = 1, at_once: bool = False) -> Answer:
        """``at_once``: all steps in one native call, otherwise a call each."""
        if mode not in ("none", "greedy", "sampled"):
            raise ValueError(f"no mode is called {mode}")
        store = self.store
        with self._root(Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05) if mode == "sampled" else Sampling.greedy()) as root:
            root.prefill(prefix)
            forks = root.fork(n_branches, seed=seed)
            said: list[list[int]] = [[] for _ in forks]

            def tick(steps: int) -> None:
                for lane, tokens in zip(said, store.tick(forks, n_steps=steps).tokens, strict=True):
                    lane.extend(tokens)

            def commit(step: int) -> None:
                tokens = [prefix[(i + step) % len(prefix)] for i in range(n_branches)]
                store.commit(forks, tokens)
                for lane, token in zip(said, tokens, strict=True):
                    lane.append(token)

            for step in range(skip):
                commit(step) if mode == "none" else tick(1)
            start = time.perf_counter()
            if mode == "none":
                for step in range(skip, skip + n_steps):
                    commit(step)
            elif at_once:
                tick(n_steps)
            else:
                for _ in range(n_steps):
                    tick(1)
            seconds = time.perf_counter() - start
        _need_all(said, skip + n_steps)
        return {"seconds": seconds, "tokens": said}

    def document(self, document: list[int], questions: list[list[int]], n_tokens: int) -> Answer:
        if not all(questions):
            raise ValueError("a question is empty")
        store = self.store
        start = time.perf_counter()
        with self._root(Sampling.greedy()) as root:
            root.prefill(document)
            forks = root.fork(len(questions))
            store.prefill(list(zip(forks, questions, strict=True)))
            prefill_s = time.perf_counter() - start
            # The last token is drawn and not decoded: nobody asks what comes after it.
            answers = store.tick(forks, n_steps=n_tokens - 1).tokens if n_tokens > 1 else [[] for _ in forks]
            last = store.sample(forks)
            seconds = time.perf_counter() - start
        answers = [[*tokens, token] for tokens, token in zip(answers, last, strict=True)]
        _need_all(answers, n_tokens)
        return {"seconds": seconds, "prefill_s": prefill_s, "answers": answers}

    def forks(self, prefix: list[int], n: int) -> Answer:
        store = self.store
        with self._root(Sampling.greedy()) as root:
            root.prefill(prefix)
            before, cells = rss_kib(), store.pressure().cells_used
            start = time.perf_counter()
            root.fork(n)
            seconds = time.perf_counter() - start
            return {"seconds": seconds, "rss_before_kib": before, "rss_after_kib": rss_kib(), "cells": store.pressure().cells_used - cells}

    def memory(self) -> Answer:
        return {"peak_rss_kib": peak_kib(), "rss_kib": rss_kib()}

    def close(self) -> Answer:
        for handle in (self._store, self._model):
            if handle is not None:
                handle.close()
        self._store = self._model = None
        return {}


def _need_all(said: Sequence[Sequence[int]], n: int) -> None:
    """A tick that ran out of cells ends early and is no error to a user; here it would be a figure for less work."""
    for i, tokens in enumerate(said):
        if len(tokens) != n:
            raise ValueError(f"branch {i} has {len(tokens)} of {n} tokens: the cells ran out")


OPERATIONS: Sequence[str] = ("open", "ticks", "document", "forks", "memory", "close")


def main(name: str = "product", product: Product | None = None) -> int:
    """Answer line by line until standard input ends."""
    product = product or Product()
    operations: dict[str, Callable[..., Answer]] = {name: getattr(product, name) for name in OPERATIONS}
    info = system_info()
    print(json.dumps({"runner": name, "versions": {"pylloyal": info["version"], "engine": info["engine"]}}), flush=True)
    for line in sys.stdin:
        try:
            arguments = json.loads(line)
            op = arguments.pop("op")
            if op not in operations:
                raise ValueError(f"no operation is called {op}")
            answer = operations[op](**arguments)
        except (PylloyalError, ValueError, TypeError, KeyError, AttributeError, OSError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        drain_logs()
        print(json.dumps(answer), flush=True)
    product.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
