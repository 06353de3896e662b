"""Children: Python processes that are strict about warnings and must end as expected, without a word on stderr."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 40.0  # a child that takes longer hangs
STRICT = ("-X", "dev", "-W", "error")
MODELS = ["stub:"] + ([os.environ["PYLLOYAL_TEST_MODEL"]] if os.environ.get("PYLLOYAL_TEST_MODEL") else [])

# What every child begins with; the tests' scripts use these names.
PROLOGUE = """
import atexit, ctypes, gc, itertools, os, random, signal, sys, threading, time, weakref
import numpy as np
import pylloyal
from pylloyal import Model, Sampling, Store, errors, live_objects

MODEL = sys.argv[1]
NOTHING = dict.fromkeys(("models", "weights", "stores", "contexts", "branches", "grammars", "texts", "embedders", "projectors", "prompts"), 0)
PROMPT = [7 + i * 31 % 200 for i in range(40)]

def until(fact, seconds=20.0):
    '''Poll until it holds, or fail.'''
    end = time.monotonic() + seconds
    while not (value := fact()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.0005)
    return value

def raises(kind, call):
    '''The exception; anything else fails.'''
    try:
        value = call()
    except kind as error:
        return error
    raise AssertionError(f"{call} gave {value!r} instead of {kind}")

def in_child(body, seconds=20):
    '''Fork, run the body in the child, and exit there as a script does: by SystemExit, with every finalizer.'''
    pid = os.fork()
    if pid == 0:
        signal.alarm(seconds)  # a child that hangs dies of it
        body()
        sys.exit(0)
    return pid

def wait_for(pid):
    assert os.waitpid(pid, 0)[1] == 0, "the forked child failed"

def fresh_logits(model, tokens, n_batch=None):
    '''Logits after these tokens in a store of their own.'''
    with model.store(n_ctx=max(256, len(tokens) + 8), n_branches=1, n_batch=n_batch) as store:
        root = store.root()
        root.prefill(tokens)
        return root.logits()

ENDLESS = 'root ::= "' + "a" * 40_000 + '"'  # token 97 and nothing else, so no end of generation comes in between

def everything(model_path=MODEL, **options):
    '''One of each, with a history; all of it reachable from what is returned.'''
    model = Model(model_path)
    store = Store(model, n_ctx=512, n_branches=6, **options)
    root = store.root(sampling=Sampling(seed=1))
    root.prefill(PROMPT)
    kids = root.fork(3, seed=5)
    store.tick(kids[:2], n_steps=3)
    grammar = store.root(grammar='root ::= "abc"')
    grammar.prefill(PROMPT[:3])
    other = model.store(n_ctx=256, n_branches=1)
    view = kids[0].logits_view()
    text = model.vocab.stream(["stop"])
    text.feed([104, 105])
    return model, store, root, kids, grammar, other, view, view.array, text
"""
Child = Callable[..., str]


def run(script: Path, model: str, *, code: int, flags: tuple[str, ...], env: dict[str, str]) -> tuple[str, str]:
    """Run a script in a session of its own; when it hangs, kill whatever it left there too."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MALLOC_"))} | {"PYTHONPATH": str(ROOT)} | env
    with subprocess.Popen([sys.executable, *flags, str(script), model], env=kept, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"the child did not end in {SECONDS:g} seconds\n{out}\n{err}")
    assert process.returncode == code, f"exit status {process.returncode}\n{out}\n{err}"
    return out, err


@pytest.fixture
def child(tmp_path: Path) -> Child:
    """Run a script after the prologue; it must exit with ``code``, and say nothing on stderr unless ``stderr`` (a pattern) is given.

    ``before`` goes before the prologue. Returns what it printed.
    """

    def start(script: str, model: str = "stub:", *, before: str = "", code: int = 0, stderr: str = "", flags: tuple[str, ...] = STRICT, **env: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(before) + PROLOGUE + textwrap.dedent(script), encoding="utf-8")
        out, err = run(path, model, code=code, flags=flags, env=env)
        if stderr:
            assert re.fullmatch(stderr, err, re.S), err
        else:
            assert err == "", err
        return out

    return start


@pytest.fixture(params=MODELS, ids=["stub", "file"][: len(MODELS)])
def model(request: pytest.FixtureRequest) -> str:
    """The stub engine, and the model file of PYLLOYAL_TEST_MODEL when there is one."""
    return str(request.param)
