"""What another process on every core does to a tick. One hog a core leaves half of each: the fair slow-down is 2."""
from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .noise import usable_cores
from .pairs import Side, compare
from .rows import Row
from .setting import Setting
from .sides import both

GROUP = "contention"
FAIR = 2.0
BOUND = 1.5
HOG = """
import os, sys
core = int(sys.argv[1])
if core >= 0:
    os.sched_setaffinity(0, {core})
print("spinning", flush=True)
while True:
    pass
"""


def rows(setting: Setting) -> Iterator[Row]:
    n, n_steps = 8, setting.times(32, 3)
    prefix = setting.tokens[: setting.times(256, 16)]
    work: dict[str, Any] = {"prefix": prefix, "n_branches": n, "n_steps": n_steps, "skip": 2, "mode": "sampled"}
    with both(setting, n_ctx=len(prefix) + n * (n_steps + 3), n_branches=n + 1) as sides:
        def slow_down(name: str) -> Callable[[], float]:
            def run() -> float:
                quiet = float(sides.ask(name, "ticks", **work)["seconds"])
                with hogs(usable_cores()):
                    busy = float(sides.ask(name, "ticks", **work)["seconds"])
                return busy / quiet / FAIR

            return run

        note = f"{n_steps} ticks together, for a collapse is in the tail; {setting.n_threads} threads on {len(usable_cores())} cores"
        control = Side("control", "llama_decode and the engine's sampler chain", slow_down("control"), note=note) if setting.control else None
        product = Side("product", "Store.tick, a call a tick", slow_down("product"), bound=BOUND, bound_on="median", note=note)
        yield from compare(GROUP, "slow-down of 8 branches beside a process on every core, over the fair 2", "x", control, [product], setting.times(7, 1), n_warm=setting.times(1, 0))


@contextlib.contextmanager
def hogs(cores: Sequence[int]) -> Iterator[None]:
    """A process of normal priority on each core that does nothing but spin; all of them do when this begins."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        for core in cores:
            children.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", HOG, str(core)], stdout=subprocess.PIPE))
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline().strip() != b"spinning":
                raise OSError("a process that should spin did not start")
        yield
    finally:
        for child in children:
            child.kill()
            child.communicate()
