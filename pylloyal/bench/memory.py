"""The most memory a process has resident that ticks 32 branches on a prefix."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .pairs import Side, compare
from .rows import Row
from .runner import Runner
from .setting import Setting
from .sides import fresh

GROUP = "memory"
BOUND = 1.05


def rows(setting: Setting) -> Iterator[Row]:
    n, n_steps = 32, setting.times(32, 2)
    prefix = setting.tokens[: setting.times(512, 16)]
    options: dict[str, Any] = {"n_ctx": len(prefix) + n * (n_steps + 1), "n_branches": n + 1}

    def peak(runner: Runner) -> float:
        runner.ask("ticks", prefix=prefix, n_branches=n, n_steps=n_steps, mode="sampled")
        kib = float(runner.ask("memory")["peak_rss_kib"])
        if kib < 0:
            raise OSError("the system does not tell how much memory was resident")
        return kib / 1024

    control = Side("control", "llama_decode and the engine's sampler chain, a new process", fresh(setting, "control", options, peak)) if setting.control else None
    product = Side("product", "Store.tick, a new process, its interpreter and numpy included", fresh(setting, "product", options, peak), bound=BOUND)
    yield from compare(GROUP, f"peak resident memory, {n} branches on {len(prefix)} tokens, {n_steps} ticks", "MiB", control, [product], setting.times(3, 1), n_warm=0)
