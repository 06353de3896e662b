"""Two commands that do everything, on a machine with nothing but Python 3.11.4+, a C++20 compiler, and pip.

    python3 tools/bootstrap.py demo      build the library, question a picture and a clip from forks of a tiny model
    python3 tools/bootstrap.py tests     build, check and test everything, as continuous integration does

Any other word is the name of a session in noxfile.py (`python3 tools/bootstrap.py --list` shows them all). The environment it
makes is `.venv`, from the hash-locked list in requirements/dev.txt; the engine and the model go into a per-user cache.
"""
from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
LOCK = ROOT / "requirements" / "dev.txt"
TESTS = ("lint", "typing", "lib", "ctest", "instructions", "unit", "integration", "models", "wheel")


def fail(message: str) -> None:
    print(f"bootstrap: {message}", file=sys.stderr)
    sys.exit(1)


def check_machine() -> None:
    """Say what is missing before minutes are spent."""
    if sys.version_info < (3, 11, 4):
        fail(f"Python 3.11.4 or newer is needed; this is {sys.version.split()[0]}")
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++", "cl") if name):
        fail("no C++ compiler was found; install one that speaks C++20 (GCC 11+, Clang 14+), or set CXX")


def environment() -> Path:
    """The Python of `.venv`, with everything in the lock installed; made or brought up to date if need be."""
    python = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = VENV / ".locked"
    wanted = hashlib.sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    print("preparing .venv (once)", flush=True)
    if subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=False).returncode:
        fail("`python -m venv` failed (above); it needs Python's venv module")
    # Wheels alone: building a source archive would fetch build tools that no lock names.
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--only-binary", ":all:", "-r", str(LOCK)]
    done = subprocess.run(install, check=False, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        if "DO NOT MATCH THE HASHES" in done.stderr:
            fail("a package that the index gave is not the one that requirements/dev.txt pins (above), and nothing was installed. "
                 "Either the index or a cache on the way is not to be trusted, or the lock is damaged: compare it with the repository's")
        fail(f"`{' '.join(install)}` failed (above); it needs a package index it can reach")
    stamp.write_text(wanted)
    return python


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    check_machine()
    nox = [str(environment()), "-m", "nox", "--no-venv", "--noxfile", str(ROOT / "noxfile.py")]
    if argv[0] == "--list":
        return subprocess.run([*nox, "--list"], check=False).returncode
    sessions, rest = (TESTS if argv[0] == "tests" else (argv[0],)), argv[1:]
    if rest[:1] == ["--"]:  # as one would write it for nox
        rest = rest[1:]
    started = time.monotonic()
    code = subprocess.run([*nox, "--stop-on-first-error", "--sessions", *sessions, *(["--", *rest] if rest else [])], check=False).returncode
    if argv[0] == "tests":
        print(f"bootstrap: tests {'failed' if code else 'passed'} in {time.monotonic() - started:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
