"""A processor without the instructions the library was compiled for: qemu's Nehalem of 2008, which has no AVX. A named refusal, not a dead process."""
from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pylloyal import system_info

ROOT = Path(__file__).resolve().parents[2]
QEMU = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(QEMU is None or (platform.machine(), sys.platform) != ("x86_64", "linux"), reason="needs qemu-user (Debian: qemu-user-static) on x86-64 Linux")]


def emulated(code: str, *arguments: str) -> list[str]:
    # OpenBLAS may have been told by the environment which processor this is.
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS")} | {"PYTHONPATH": str(ROOT)}
    assert QEMU
    done = subprocess.run([QEMU, "-cpu", "Nehalem", sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


def test_a_model_is_refused_with_the_names_of_what_is_missing() -> None:
    model = ROOT / "fixtures" / "models" / "tinyvlm-f16.gguf"
    assert model.exists()
    kind, state, message = emulated("""
import sys, pylloyal
try:
    pylloyal.Model(sys.argv[1])
except pylloyal.PylloyalError as error:
    print(type(error).__name__, error.state, error, sep="\\n")
""", str(model))
    assert (kind, state) == ("UnsupportedOperationError", "unchanged")
    for name in ("avx", "avx2", "fma", "f16c", "bmi2"):
        assert f" {name}," in message
    assert "preset native" in message


def test_the_rest_of_the_library_works_there() -> None:
    """It says what it is, and the stub engine decodes."""
    backends, devices, missing, tokens = emulated("""
import pylloyal
info = pylloyal.system_info()
print(info["backends"], info["devices"], ",".join(info["cpu_missing"]), sep="\\n")
with pylloyal.Model("stub:") as model, model.store(n_ctx=64) as store:
    root = store.root(sampling=pylloyal.Sampling.greedy())
    root.prefill("hello")
    print(len(store.tick([root], n_steps=4).tokens[0]))
""")
    assert (backends, devices, tokens) == ("[]", "[]", "4")
    assert {"avx", "avx2", "fma"} <= set(missing.split(",")) <= set(system_info()["cpu_features"])
