"""Measure what the documentation claims, as ratios against a control in the same run.

    python tools/bench.py MODEL.gguf [--only python,forks,threads,headers] [--json]

Shared machines are noisy: absolute times are printed for orientation, only ratios mean anything, and nothing else should be running.
Every row names the path that produced it; a measurement that fails is a failed row.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf

import pylloyal
from pylloyal import Branch, Model, Sampling, Store


@dataclass
class Row:
    """One measurement: what, by which path, the figure, and its ratio to the control of its group."""

    what: str
    path: str
    value: float | None
    unit: str
    ratio: float | None = None
    note: str = ""


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


def python_per_tick(_model: Path) -> Iterator[Row]:
    """Python's own cost of a tick: the whole of Store.tick less the native call, on the stub engine."""
    with Model("stub:") as model:
        for n in (1, 8, 32):
            with model.store(n_ctx=4096, n_branches=40, n_threads=1) as store:
                root = store.root(sampling=Sampling.greedy())
                root.prefill([65, 66, 67])
                best = float("inf")
                for _ in range(5):
                    forks = root.fork(n)
                    store._lib = timed = TimedLibrary(pylloyal._ffi.load.library(), "pyl_tick_n")
                    start = time.perf_counter()
                    for _ in range(60):
                        store.tick(forks)
                    best = min(best, (time.perf_counter() - start - timed.seconds) / 60)
                    store.prune(forks)
                yield Row(f"Python per tick, {n} branches", "Store.tick less pyl_tick_n, stub engine, best of 5 x 60", best * 1e6, "us", note="promised: below 100 us at 32" if n == 32 else "")


def ask_by_forks(model: Model, prefix: list[int], tails: list[list[int]], n_steps: int) -> None:
    with model.store(n_ctx=2048, n_branches=len(tails) + 1) as store:
        root = store.root(sampling=Sampling.greedy())
        root.prefill(prefix)
        forks = root.fork(len(tails))
        store.prefill(list(zip(forks, tails, strict=True)))
        store.tick(forks, n_steps=n_steps)


def ask_by_contexts(model: Model, prefix: list[int], tails: list[list[int]], n_steps: int) -> None:
    for tail in tails:
        with model.store(n_ctx=1024, n_branches=1) as store:
            root = store.root(sampling=Sampling.greedy())
            root.prefill(prefix + tail)
            store.tick([root], n_steps=n_steps)


def forks_against_contexts(path: Path) -> Iterator[Row]:
    """Eight questions on one prefix: eight forks of one store against eight stores."""
    with Model(path) as model:
        prefix = model.vocab.encode("The sea was calm and the ship lay still. " * 60)[:512]
        tails = [model.vocab.encode(f"\n\nQuestion {i}: what happened then?\nAnswer:") for i in range(8)]
        times: dict[str, list[float]] = {"forks": [], "contexts": []}
        for _ in range(2):
            for name, run in (("contexts", ask_by_contexts), ("forks", ask_by_forks)):
                start = time.perf_counter()
                run(model, prefix, tails, 16)
                times[name].append(time.perf_counter() - start)
        contexts, forks = min(times["contexts"]), min(times["forks"])
        yield Row("8 questions on 512 tokens, 16 tokens each", "eight stores, one after another (control)", contexts, "s", 1.0)
        yield Row("8 questions on 512 tokens, 16 tokens each", "eight forks of one store, one dispatch a tick", forks, "s", forks / contexts)


@contextmanager
def busy_cores() -> Iterator[None]:
    """One process on every core that does nothing but spin, at normal priority."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def tick_ms(store: Store, forks: list[Branch], n: int) -> float:
    """Mean milliseconds of a tick: a collapse is in the tail, so not the median."""
    spent = []
    for _ in range(n):
        start = time.perf_counter()
        store.commit(forks, [100 + i for i in range(len(forks))])
        spent.append((time.perf_counter() - start) * 1e3)
    return statistics.fmean(spent)


def threads_on_a_busy_machine(path: Path) -> Iterator[Row]:
    """A tick of eight branches, quiet and with a spinning process on every core, by number of threads."""
    wait = pylloyal.system_info()["engine"]["threads"]
    with Model(path) as model:
        prefix = model.vocab.encode("The sea was calm and the ship lay still. " * 60)[:256]
        for threads in sorted({1, os.cpu_count() or 1}):
            with model.store(n_ctx=2048, n_branches=9, n_threads=threads) as store:
                root = store.root(sampling=Sampling.greedy())
                root.prefill(prefix)
                forks = root.fork(8)
                tick_ms(store, forks, 3)
                quiet = min(tick_ms(store, forks, 15) for _ in range(2))
                with busy_cores():
                    busy = [tick_ms(store, forks, 15) for _ in range(3)]
                yield Row("tick of 8 branches, quiet", f"{threads} threads, {wait} barrier (control)", quiet, "ms", 1.0)
                yield Row("tick of 8 branches, every core busy", f"{threads} threads, {wait} barrier, worst of 3", max(busy), "ms", max(busy) / quiet)


N_WORDS = 262_144


def write_vocabulary(path: Path) -> None:
    """A header with a vocabulary as large as they come, its scores and kinds, and hardly a model."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (("context_length", 8192), ("embedding_length", 640), ("block_count", 18), ("attention.head_count", 4), ("attention.head_count_kv", 1)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_token_list([f"word {i}" for i in range(N_WORDS)])
    writer.add_token_scores([-float(i) for i in range(N_WORDS)])
    writer.add_token_types([1] * N_WORDS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


OPENERS = {
    "gguf.GGUFReader (control)": "from gguf import GGUFReader as opened",
    "Header and geometry": "from pylloyal.capacity.header import Header\nfrom pylloyal.capacity.geometry import geometry\ndef opened(path): return geometry(Header(path))",
    "plan, all of it": "import pylloyal\ndef opened(path): return pylloyal.plan(path, memory='24GiB').to_json()",
}
DRY_RUN = {"the engine's dry run": "from pylloyal.kernel.dry_run import dry_run\nfrom pylloyal._ffi.load import library\nlibrary()\ndef opened(path): return dry_run(path)"}
# Memory is the process's own peak, mapped pages included, so each way has a process to itself.
OPENED = """
import sys, time
{import_}
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak of what was imported is forgotten
before, start = peak(), time.perf_counter()
kept = opened(sys.argv[1])
print((time.perf_counter() - start) * 1e3, (peak() - before) / 1024)
"""


def headers_against_gguf(path: Path) -> Iterator[Row]:
    """Opening a header, and with ours knowing the shape of the model's memory: time, and the most memory it took."""
    with tempfile.TemporaryDirectory() as folder:
        synthetic = Path(folder) / "vocabulary.gguf"
        write_vocabulary(synthetic)
        for what, file in ((path.stem[:20], path), (f"{N_WORDS:,} words", synthetic)):
            best: dict[str, list[float]] = {}
            for _ in range(3):
                for name, import_ in (OPENERS | DRY_RUN if file is path else OPENERS).items():  # the synthetic one has no tensors to lay out
                    out = subprocess.run([sys.executable, "-c", OPENED.format(import_=import_), str(file)], capture_output=True, text=True, check=True).stdout
                    seen = [float(word) for word in out.split()]
                    best[name] = [min(pair) for pair in zip(seen, best.get(name, seen), strict=True)]
            control = next(iter(best.values()))
            for i, (quantity, unit) in enumerate((("time", "ms"), ("peak memory", "MiB"))):
                for name, figures in best.items():
                    yield Row(f"open {what}: {quantity}", f"{name}, best of 3 processes", figures[i], unit, figures[i] / control[i])


GROUPS: dict[str, Callable[[Path], Iterator[Row]]] = {"python": python_per_tick, "forks": forks_against_contexts, "threads": threads_on_a_busy_machine, "headers": headers_against_gguf}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", default=",".join(GROUPS), help="comma-separated groups: " + ", ".join(GROUPS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for name in args.only.split(","):
        try:
            for row in GROUPS[name](args.model):
                rows.append(row)
                if not args.json:
                    ratio = "       " if row.ratio is None else f"{row.ratio:6.2f}x" if row.ratio >= 0.1 else f"{row.ratio:6.2g}x"
                    print(f"{row.what:44} {row.value:10.2f} {row.unit:3} {ratio}  {row.path}{'  (' + row.note + ')' if row.note else ''}", flush=True)
        except Exception as error:
            rows.append(Row(name, "failed", None, "", note=f"{type(error).__name__}: {error}"))
            if not args.json:
                print(f"{name:44} FAILED {error}", flush=True)
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    return 1 if any(row.value is None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
