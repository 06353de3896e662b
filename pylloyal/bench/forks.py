"""Forks of a long branch: what one takes, that no cell is copied, and what 64 of them add to the process before they decode."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .pairs import Side, compare
from .rows import Row
from .runner import Runner
from .setting import Setting
from .sides import both, fresh

GROUP = "forks"
N = 64


def rows(setting: Setting) -> Iterator[Row]:
    prefix = setting.tokens[: setting.times(4000, 100)]
    what = f"{N} forks of a {len(prefix):,}-token branch"
    options: dict[str, Any] = {"n_ctx": len(prefix) + N, "n_branches": N + 1}
    work: dict[str, Any] = {"prefix": prefix, "n": N}
    with both(setting, **options) as sides:
        def microseconds(answer: dict[str, Any]) -> float:
            return float(answer["seconds"]) / N * 1e6

        yield from compare(GROUP, f"{what}, each", "us", sides.control("llama_memory_seq_cp", microseconds, "forks", **work), [
            sides.product("Branch.fork(64)", microseconds, "forks", bound=100.0, bound_on="median", note="promised: microseconds", **work)], setting.times(5, 2))
        yield from compare(GROUP, f"{what}, cells they take", "cells", None, [
            sides.product("Store.pressure", lambda answer: float(answer["cells"]), "forks", bound=0.0, bound_on="median", **work)], 1, n_warm=0)

    def grown(runner: Runner) -> float:
        answer = runner.ask("forks", **work)
        if answer["rss_before_kib"] < 0:
            raise OSError("the system does not tell how much memory is resident")
        return (float(answer["rss_after_kib"]) - float(answer["rss_before_kib"])) / 1024

    control = Side("control", "llama_memory_seq_cp, a new process", fresh(setting, "control", options, grown)) if setting.control else None
    product = Side("product", "Branch.fork(64), a new process", fresh(setting, "product", options, grown), bound=1.0, bound_on="median")
    yield from compare(GROUP, f"{what}, resident memory they add", "MiB", control, [product], setting.times(3, 1), n_warm=0)
