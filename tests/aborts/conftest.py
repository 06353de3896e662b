"""Two kinds of children: the engine used directly and wrongly (``raw``), which dies or lies, and Python as close to that as our API lets it come.

A child of the second kind ends with ``sound(store)``: the store still does what a new one does, everything closes, nothing is left.
"""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0  # a hang, not slowness

PROLOGUE = """
import ctypes, os, sys
import numpy as np
import pylloyal
from pylloyal import LogLevel, Model, Sampling, Store, drain_logs, errors, live_objects, set_log_level
from pylloyal._ffi import capi
from pylloyal._ffi.load import library
from pylloyal._ffi.memory import i32_array, i32_room, new, ref, u32, u64, u64_array, u64_room

MODEL = sys.argv[1]
lib = library()
model = Model(MODEL)

def some(n, salt=0):
    return [(7 + i * 31 + i * i % 13 + salt * 17) % 250 for i in range(n)]

# With q8_0 matrices and flash attention decoding is bit-exact (63 rows a dispatch: with ggml's own, too); with f32 and without it, right to some digits.
SETTINGS = {"n_ctx": 512, "n_branches": 4, "n_batch": 63, "n_threads": 1}
if "f32" in MODEL:
    SETTINGS |= {"flash_attn": False, "type_k": "f32", "type_v": "f32"}

def opened(**options):
    return model.store(**SETTINGS | options)

def refused(kind, call, *arguments, state="unchanged", **keywords):
    '''The exception, and nothing else will do.'''
    try:
        value = call(*arguments, **keywords)
    except kind as error:
        assert type(error) is kind and error.state == state, (type(error), error.state)
        return error
    raise AssertionError(f"{call} gave {value!r} instead of {kind.__name__}")

def afresh(tokens, **options):
    '''What the logits should be: this text alone, in a store of its own.'''
    with opened(**{"n_branches": 1, "n_ctx": max(512, len(tokens)), **options}) as store:
        root = store.root()
        root.prefill(tokens)
        return root.logits()

def apart(a, b):
    return float(np.abs(a - b).max())

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

def in_use():
    '''Bytes in use by malloc's own count, which is exact; glibc has it.'''
    count = ctypes.CDLL(None).mallinfo2
    count.restype = Mallinfo
    info = count()
    return info.uordblks + info.hblkhd

def sound(store):
    '''Emptied, it reads, forks and goes on like a new one; then everything is closed, and nothing is left in the process.'''
    for branch in store.branches():
        branch.prune_subtree()
    assert (store.pressure().cells_used, store.pressure().leases_used) == (0, 0)
    root = store.root()
    root.prefill(some(20))
    children = root.fork(min(63, store.pressure().leases_remaining))
    store.commit(children, some(len(children), 1))
    for child, token in list(zip(children, some(len(children), 1)))[::10]:
        assert apart(child.logits(), afresh(some(20) + [token])) < 1e-3
    assert apart(root.logits(), afresh(some(20))) < 1e-3
    store.close()
    model.close()
    assert not any(live_objects().values()), live_objects()
    print("sound")
"""

Child = Callable[..., list[str]]
Raw = Callable[..., dict[str, str]]
Dies = Callable[..., str]


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run a child in a session of its own; when it hangs, kill whatever it left there too."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MALLOC_", "LLAMA_"))} | {"PYTHONPATH": str(ROOT), "GGML_NO_BACKTRACE": "1"} | env
    with subprocess.Popen(command, env=kept, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"the child did not end in {SECONDS:g} seconds\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture
def run_child() -> Callable[..., subprocess.CompletedProcess[str]]:
    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The path of a tiny model, made when it is first asked for; ``stub:`` and a path stand for themselves.

    ``tiny-llama-8192`` is tiny-llama with a vocabulary of that size; ``tiny-llama/f32`` has matrices of f32 instead of q8_0.
    """
    folder = tmp_path_factory.mktemp("tiny")

    def path(name: str) -> str:
        if name.startswith("stub:") or name.endswith(".gguf"):
            return name
        name, _, quant = name.partition("/")
        file = folder / f"{name}-{quant}.gguf"
        if not file.exists():
            n_vocab = name.partition("-llama-")[2]
            if n_vocab:
                spec = tiny_models.SPECS["tiny-llama"]
                tiny_models.SPECS[name] = replace(spec, n_vocab=int(n_vocab), keys={**spec.keys, "vocab_size": int(n_vocab)}, tensors=spec.tensors.replace("512]", f"{n_vocab}]"))
            tiny_models.write(file, name, quant=quant or "q8_0")
            if n_vocab:
                del tiny_models.SPECS[name]
        return str(file)

    return path


@pytest.fixture(scope="session")
def raw_engine() -> Path:
    """The program of libsrc/tests/raw_engine.cpp. Not skipped without it: half of every test here would be missing."""
    found = sorted((ROOT / "build").glob("*/raw_engine*"))
    if not found:
        pytest.fail("raw_engine is not built; `python3 tools/bootstrap.py lib` builds it (preset native)")
    return found[0]


@pytest.fixture
def raw(raw_engine: Path, tiny: Callable[[str], str]) -> Raw:
    """What the engine itself does in a case: the values it printed, by name."""

    def start(case: str, model: str, **env: str) -> dict[str, str]:
        done = run([str(raw_engine), case, tiny(model)], **env)
        assert (done.returncode, done.stderr) == (0, ""), (done.returncode, done.stdout, done.stderr)
        return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())

    return start


@pytest.fixture
def dies(raw_engine: Path, tiny: Callable[[str], str]) -> Dies:
    """Runs a case in which the engine must abort, in the call named; returns its last words."""

    def start(case: str, model: str, call: str) -> str:
        done = run([str(raw_engine), case, tiny(model)])
        assert done.returncode == -signal.SIGABRT, (done.returncode, done.stdout, done.stderr)
        assert done.stdout.splitlines()[-1] == f"survived until {call}"
        return done.stderr

    return start


@pytest.fixture
def child(tmp_path: Path, tiny: Callable[[str], str]) -> Child:
    """Run a script after the prologue, strict about warnings; it must exit with 0 and say nothing on stderr. Returns the lines it printed."""

    def start(script: str, model: str = "tiny-llama", **env: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text(PROLOGUE + textwrap.dedent(script), encoding="utf-8")
        done = run([sys.executable, "-X", "dev", "-W", "error", str(path), tiny(model)], **env)
        assert (done.returncode, done.stderr) == (0, ""), f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout.splitlines()

    return start
