"""Tens of thousands of random calls of every function of the ABI, in children: none dies, none breaks a promise, nothing is left."""
from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pylloyal._ffi import capi

pytestmark = pytest.mark.slow
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(("model", "n"), [("stub:", 24_000), ("tiny-llama", 24_000), ("tiny-mamba", 6_000), ("tiny-qwen2vl", 6_000)])
def test_random_calls(run_child: Run, tiny: Callable[[str], str], tmp_path: Path, model: str, n: int) -> None:
    last = tmp_path / "last"
    done = run_child([sys.executable, str(Path(__file__).with_name("fuzz.py")), tiny(model), "1", str(n), str(last)])
    assert (done.returncode, done.stderr) == (0, ""), f"exit status {done.returncode} in {last.read_text().strip()}\n{done.stderr}"
    said = json.loads(done.stdout)
    landed, refused = said["landed"], said["refused"]
    assert sum(landed.values()) + sum(refused.values()) > 0.8 * n
    # It came through the first checks: nearly every function did what it is for, and most codes were given.
    names = {name for name, *_ in capi.PROTOTYPES}
    assert names == landed.keys() | refused.keys()
    assert len(names - landed.keys()) <= len(names) // 10, names - landed.keys()
    assert len(said["codes"]) > 10
