"""How noisy the machine is: the same fixed work on every usable core at once should take the same time again and again, and never wait for its core."""
from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SPREAD_LIMIT = 1.25
WAIT_LIMIT = 0.03
STEAL_LIMIT = 0.02

# Each child hashes the same bytes for about 20 ms, 20 times, once all have started; hashlib needs nothing and touches no file.
PROBE = """
import hashlib, json, os, sys, time
core = int(sys.argv[1])
if core >= 0:
    os.sched_setaffinity(0, {core})
data = bytes(range(256)) * 64
def work():
    start, used = time.perf_counter(), time.process_time()
    for _ in range(N):
        hashlib.blake2b(data).digest()
    return time.perf_counter() - start, time.process_time() - used
N = 100
while (took := work()[0]) < 0.005:
    N *= 2
N = max(1, round(N * 0.02 / took))
print(N, flush=True)
N = int(sys.stdin.readline())
for _ in range(2):
    work()
print(json.dumps([work() for _ in range(20)]), flush=True)
"""

Probe = Callable[[Sequence[int]], list[list[tuple[float, float]]]]


@dataclass(frozen=True, slots=True)
class Noise:
    """What the work took.

    Attributes
    ----------
    n : int
        Times it was done, on all cores together.
    seconds : float
        Median of them.
    spread : float
        90th percentile over the 10th, of each core's own; the worst core's.
    waited : float
        Share of the time in which the work wanted its core and did not have it: a steady neighbour is even, and shows here.
    steal : float or None
        Share of the cores' time that the hypervisor gave to others meanwhile; None where the system does not tell.
    load : float or None
        Processes that wanted a core in the last minute, before the work.
    """

    n: int
    seconds: float
    spread: float
    waited: float
    steal: float | None = None
    load: float | None = None

    @property
    def is_quiet(self) -> bool:
        return self.spread <= SPREAD_LIMIT and self.waited <= WAIT_LIMIT and (self.steal is None or self.steal <= STEAL_LIMIT)

    def describe(self) -> str:
        """One line for a person."""
        words = [f"the same work took {self.seconds * 1e3:.1f} ms (median of {self.n}), 90th over 10th percentile {self.spread:.2f} (limit {SPREAD_LIMIT:g})",
                 f"waited {self.waited:.1%} of the time for a core (limit {WAIT_LIMIT:.0%})"]
        if self.steal is not None:
            words.append(f"{self.steal:.1%} of the cores' time went to others (limit {STEAL_LIMIT:.0%})")
        if self.load is not None:
            words.append(f"load before {self.load:.2f}")
        return ", ".join(words)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_quiet": self.is_quiet, "limits": {"spread": SPREAD_LIMIT, "waited": WAIT_LIMIT, "steal": STEAL_LIMIT}}


def usable_threads() -> int:
    """How many cores this process may use, its control group's quota counted: what a store takes by default."""
    from .. import Model

    with Model("stub:") as model, model.store(n_ctx=256, n_branches=1) as store:
        return store.pressure().n_threads


def usable_cores() -> list[int]:
    """As many cores as this process may use, by number; -1 where they have none."""
    n = usable_threads()
    return sorted(os.sched_getaffinity(0))[:n] if hasattr(os, "sched_getaffinity") else [-1] * n


def measure(cores: Sequence[int] | None = None, probe: Probe | None = None) -> Noise:
    """Do the work on every core at the same time and say how even it was; about a second.

    Parameters
    ----------
    probe : callable, optional
        Gives the seconds of each repetition and those it had its core, a list a core.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    before = _jiffies()
    times = (probe or _run)(usable_cores() if cores is None else cores)
    after = _jiffies()
    steal = None
    if before and after and after[1] > before[1]:
        steal = (after[0] - before[0]) / (after[1] - before[1])
    spreads = []
    for core in times:
        tenths = statistics.quantiles([seconds for seconds, _ in core], n=10, method="inclusive")
        spreads.append(tenths[-1] / tenths[0])
    everything = [seconds for core in times for seconds, _ in core]
    had = sum(used for core in times for _, used in core)
    return Noise(len(everything), statistics.median(everything), max(spreads), max(0.0, 1 - had / sum(everything)), steal, load)


def _run(cores: Sequence[int]) -> list[list[tuple[float, float]]]:
    children = [subprocess.Popen([sys.executable, "-I", "-S", "-c", PROBE, str(core)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for core in cores]
    try:
        amounts = [json.loads(child.stdout.readline()) for child in children if child.stdout]
        for child in children:
            assert child.stdin is not None
            child.stdin.write(f"{max(amounts)}\n")
            child.stdin.flush()
        return [[(float(seconds), float(used)) for seconds, used in json.loads(child.communicate()[0])] for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.communicate()


def _jiffies() -> tuple[int, int] | None:
    """Stolen and all time of all cores since the start, where the system tells."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    values = [int(word) for word in words[1:9]]
    return (values[7], sum(values)) if len(values) == 8 else None
