"""Opening a model's header, planning from it and the engine's dry run, beside gguf.GGUFReader: time, and the most memory each takes."""
from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .pairs import Side, measure, rows_of
from .rows import Row
from .runner import RunnerError
from .setting import Setting

GROUP = "headers"
N_WORDS = 262_144
READER = ("gguf.GGUFReader", "from gguf import GGUFReader as opened")
WAYS = {
    "Header and geometry": "from pylloyal.capacity.header import Header\nfrom pylloyal.capacity.geometry import geometry\ndef opened(path): return geometry(Header(path))",
    "plan, all of it": "import pylloyal\ndef opened(path): return pylloyal.plan(path, memory='24GiB').to_json()",
}
DRY_RUN = {"the engine's dry run": "from pylloyal.kernel.dry_run import dry_run\nfrom pylloyal._ffi.load import library\nlibrary()\ndef opened(path): return dry_run(path)"}
# Memory is the process's own peak, mapped pages included, so each way has a process to itself.
OPENED = """
import json, sys, time
{code}
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak of what was imported is forgotten
before, start = peak(), time.perf_counter()
kept = opened(sys.argv[1])
seconds = time.perf_counter() - start
print(json.dumps([seconds * 1e3, (peak() - before) / 1024]))
"""


def rows(setting: Setting) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        synthetic = Path(folder) / "vocabulary.gguf"
        write_vocabulary(synthetic, setting.times(N_WORDS, 1000))
        files = [] if setting.model.startswith("stub:") else [("this model's header", setting.model, WAYS | DRY_RUN)]
        for what, path, ways in [*files, (f"a header of {setting.times(N_WORDS, 1000):,} words", str(synthetic), WAYS)]:  # the last has no tensors to lay out
            yield from compared(what, path, ways, setting.times(5, 1))


def compared(what: str, path: str, ways: dict[str, str], n: int) -> Iterator[Row]:
    """Each way in a process of its own; two rows of it, from the same runs."""
    peaks: dict[str, list[float]] = {}

    def opening(name: str, code: str) -> Callable[[], float]:
        def run() -> float:
            done = subprocess.run([sys.executable, "-c", OPENED.format(code=code), path], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RunnerError(f"ended with status {done.returncode}: {done.stderr.strip()[-400:]}")
            milliseconds, mebibytes = json.loads(done.stdout)
            peaks.setdefault(name, []).append(mebibytes)
            return float(milliseconds)

        return run

    control = Side("peer", READER[0], opening(*READER)) if importlib.util.find_spec("gguf") else None
    sides = [Side("micro", name, opening(name, code)) for name, code in ways.items()]
    measure([control, *sides], n, n_warm=0)
    yield from rows_of(GROUP, f"{what}: time", "ms", control, sides, against=READER[0])
    for side in [*([control] if control else []), *sides]:
        side.figures = peaks.get(side.path, []) if side.reason is None else []
    yield from rows_of(GROUP, f"{what}: peak memory", "MiB", control, sides, against=READER[0])


def write_vocabulary(path: Path, n_words: int) -> None:
    """A header with a vocabulary as large as they come, its scores and kinds, and hardly a model."""
    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    uint32, float32, string, array, int32 = 4, 6, 8, 9, 5
    numbers = {"context_length": 8192, "embedding_length": 640, "block_count": 18, "attention.head_count": 4, "attention.head_count_kv": 1}
    values = [text("general.architecture") + struct.pack("<I", string) + text("llama"),
              *(text(f"llama.{key}") + struct.pack("<II", uint32, value) for key, value in numbers.items()),
              text("tokenizer.ggml.tokens") + struct.pack("<IIQ", array, string, n_words) + b"".join(text(f"word {i}") for i in range(n_words)),
              text("tokenizer.ggml.scores") + struct.pack("<IIQ", array, float32, n_words) + struct.pack(f"<{n_words}f", *(-float(i) for i in range(n_words))),
              text("tokenizer.ggml.token_type") + struct.pack("<IIQ", array, int32, n_words) + struct.pack(f"<{n_words}i", *[1] * n_words)]
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + b"".join(values)
    path.write_bytes(raw + bytes(-len(raw) % 32))
