"""A tick of 1, 8 and 32 branches, beside the same tick of the raw engine: with the engine's own sampler chain, and without any sampling."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .pairs import compare
from .rows import Row
from .setting import Setting
from .sides import both

GROUP = "ticks"
SAMPLED = "top_k 40, top_p 0.95, min_p 0.05, temperature 0.8"
WITH_SAMPLER, WITHOUT = 1.00, 1.03  # the promises


def rows(setting: Setting) -> Iterator[Row]:
    prefix = setting.tokens[: setting.times(128, 16)]
    skip, rounds = setting.times(4, 1), setting.times(12, 3)
    for n, full in ((1, 48), (8, 24), (32, 12)):  # a third of a second or more of each on a small model
        n_steps = setting.times(full, 3)

        def milliseconds(answer: dict[str, Any], n_steps: int = n_steps) -> float:
            return float(answer["seconds"]) / n_steps * 1e3

        what = f"tick of {n} branch{'es' if n > 1 else ''}"
        work: dict[str, Any] = {"prefix": prefix, "n_branches": n, "n_steps": n_steps, "skip": skip}
        with both(setting, n_ctx=len(prefix) + n * (n_steps + skip + 1), n_branches=n + 1) as sides:
            yield from compare(GROUP, f"{what}, sampled", "ms", sides.control(f"llama_decode and the engine's sampler chain, {SAMPLED}", milliseconds, "ticks", mode="sampled", **work), [
                sides.product("Store.tick, a call a tick", milliseconds, "ticks", mode="sampled", bound=WITH_SAMPLER, **work),
                sides.product(f"Store.tick, {n_steps} ticks in a call", milliseconds, "ticks", mode="sampled", at_once=True, bound=WITH_SAMPLER, **work)], rounds, n_warm=0, before=sides.open)
            yield from compare(GROUP, f"{what}, greedy", "ms", sides.control("llama_decode and the engine's greedy sampler", milliseconds, "ticks", mode="greedy", **work), [
                sides.product("Store.tick, a call a tick", milliseconds, "ticks", mode="greedy", bound=WITH_SAMPLER, **work)], rounds, n_warm=0, before=sides.open)
            yield from compare(GROUP, f"{what}, beside no sampling", "ms", sides.control("llama_decode alone, tokens given", milliseconds, "ticks", mode="none", **work), [
                sides.product("Store.commit, tokens given", milliseconds, "ticks", mode="none", bound=WITHOUT, **work),
                sides.product("Store.tick, sampled", milliseconds, "ticks", mode="sampled", bound=WITHOUT, **work)], rounds, n_warm=0, before=sides.open)
