"""Whole processes from outside: what importing the package adds to an interpreter's start, and the time to the first token of ``pylloyal ask``."""
from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .pairs import Side, compare
from .rows import Row
from .runner import ANSWER_SECONDS, RunnerError, RunnerTimeoutError
from .setting import TEXT, Setting

GROUP = "starts"
IMPORTS = {"import pylloyal": "import pylloyal", "import pylloyal and load the library": "from pylloyal._ffi.load import library; library()"}


def rows(setting: Setting) -> Iterator[Row]:
    nothing = Side("micro", "python -c pass", timed([sys.executable, "-c", "pass"]))
    sides = [Side("micro", what, timed([sys.executable, "-c", code])) for what, code in IMPORTS.items()]
    yield from compare(GROUP, "start of an interpreter", "ms", nothing, sides, setting.n, against="python -c pass")
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "document.txt"
        document.write_text(TEXT * setting.times(8, 1), encoding="utf-8")
        ask = [sys.executable, "-m", "pylloyal", "ask", setting.model, "--document", str(document), "--raw", "--greedy", "--max-tokens", "1", "--threads", str(setting.n_threads)]
        control = Side("control", "bench_control first", timed([*setting.control, "first", setting.model, str(document), str(setting.n_threads)])) if setting.control else None
        yield from compare(GROUP, "start to first token and end of the process", "ms", control, [Side("product", "pylloyal ask --raw --max-tokens 1", timed(ask))], setting.n)


def timed(command: Sequence[str]) -> Callable[[], float]:
    """Milliseconds from the start of a process to its end; one that fails, or says nothing where it should, has no time."""
    def run() -> float:
        start = time.perf_counter()
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise RunnerTimeoutError(f"{command[0]} did not end in {ANSWER_SECONDS:g} s") from error
        seconds = time.perf_counter() - start
        if done.returncode != 0:
            raise RunnerError(f"{Path(command[0]).name} ended with status {done.returncode}: {done.stderr.decode('utf-8', 'replace').strip()[-400:]}")
        return seconds * 1e3

    return run
