"""Python's own cost of a tick: the whole of Store.tick less the native call, on the engine without weights."""
from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from .. import Model, Sampling
from .._ffi.load import library
from .pairs import Side, compare
from .rows import Row
from .setting import Setting

GROUP = "micro"
BOUND_US = 100.0


class TimedLibrary:
    """Stands before the native library and adds up the time spent inside one of its functions."""

    def __init__(self, lib: Any, name: str) -> None:
        self._lib, self._name, self.seconds = lib, name, 0.0
        inner = getattr(lib, name)

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = inner(*arguments)
            self.seconds += time.perf_counter() - start
            return result

        self._timed = timed

    def __getattr__(self, name: str) -> Any:
        return self._timed if name == self._name else getattr(self._lib, name)


def rows(setting: Setting) -> Iterator[Row]:
    n_ticks = setting.times(60, 3)
    with Model("stub:") as model:
        for n in (1, 8, 32):
            with model.store(n_ctx=4096, n_branches=n + 1, n_threads=1) as store:
                root = store.root(sampling=Sampling.greedy())
                root.prefill([65, 66, 67])

                def tick(n: int = n, store: Any = store, root: Any = root) -> float:
                    forks = root.fork(n)
                    store._lib = timed = TimedLibrary(library(), "pyl_tick_n")
                    start = time.perf_counter()
                    for _ in range(n_ticks):
                        store.tick(forks)
                    seconds = time.perf_counter() - start - timed.seconds
                    store._lib = library()
                    store.prune(forks)
                    return seconds / n_ticks * 1e6

                side = Side("micro", "Store.tick less pyl_tick_n, stub engine", tick, bound=BOUND_US if n == 32 else None, bound_on="median")
                yield from compare(GROUP, f"Python per tick, {n} branch{'es' if n > 1 else ''}", "us", None, [side], setting.times(9, 2))
