"""Fixtures shared by all tests; children started by tests find the package through PYTHONPATH."""
from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
os.environ["PYTHONPATH"] = str(ROOT)

import pylloyal  # noqa: E402

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background of a script; children would inherit it, and tests interrupt them
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def stub() -> Iterator[pylloyal.Model]:
    """The engine without weights: its logits are a hash of the cells a branch can see."""
    with pylloyal.Model("stub:n_vocab=300") as model:
        yield model


@pytest.fixture
def model(stub: pylloyal.Model) -> pylloyal.Model:
    """The model the kernel suite runs on; tests/integration puts a tiny real one in its place."""
    return stub


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Every test gives back what it opened (session-wide models aside)."""
    before = pylloyal.live_objects()
    yield
    if left_behind(before):
        import gc

        gc.collect()  # of cycles; only then, for it takes longer than most tests
        left = left_behind(before)
        assert not left, f"left behind: {left}"


def left_behind(before: dict[str, int]) -> dict[str, int]:
    after = pylloyal.live_objects()
    kinds = ("stores", "contexts", "branches", "grammars", "texts", "embedders", "projectors", "prompts")
    return {kind: after[kind] - before[kind] for kind in kinds if after[kind] > before[kind]}
