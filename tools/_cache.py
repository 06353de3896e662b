"""The per-user cache: where it is, how it is locked, and how an archive gets into it.

Everything the project fetches or compiles once lives outside the clone, keyed by content, so that a second clone (or a
continuous-integration run) starts in seconds. Standard library only: this runs before anything is installed.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


class FetchError(Exception):
    """Something could not be fetched; the message says what, why, and what the user can do."""


def cache_dir() -> Path:
    """The cache root: ``PYLLOYAL_CACHE_DIR``, else the platform's per-user cache folder."""
    if given := os.environ.get("PYLLOYAL_CACHE_DIR"):
        return Path(given).expanduser().resolve()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pylloyal"
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "pylloyal" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pylloyal"


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (created if needed); waits for another process, saying so once.

    The operating system drops the lock with its holder, so a killed build never leaves a stale one behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as handle:
        told = False
        while not _try_lock(handle.fileno()):
            if not told:
                print(f"another process is preparing {what}; waiting for it", file=sys.stderr, flush=True)
                told = True
            time.sleep(0.2)
        yield


if os.name == "nt":
    import msvcrt

    def _try_lock(fd: int) -> bool:
        try:
            os.lseek(fd, 0, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def sha256_of(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    """Raise FetchError naming both digests when ``path`` is not the archive that was pinned."""
    found = sha256_of(path)
    if found != expected:
        raise FetchError(f"{path} is not the pinned archive:\n  expected sha256 {expected}\n  found    sha256 {found}\nNothing was unpacked.")


@contextlib.contextmanager
def scratch_beside(final: Path) -> Iterator[Path]:
    """A temporary folder on the same file system as ``final``, removed whatever happens."""
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".partial-", dir=final.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pip_download(package: str, version: str, sha256: str, into: Path, *, source: bool) -> Path:
    """Fetch one file from the package index with pip, hash-checked, using the user's own index settings.

    Parameters
    ----------
    source : bool
        True for the source archive (its build backend is asked for metadata, nothing is compiled), False for a wheel.

    Raises
    ------
    FetchError
        With pip's own last words, and how to go on without a network.
    """
    requirement = into / "requirement.txt"
    requirement.write_text(f"{package}=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes", "-r", str(requirement), "-d", str(into)]
    command += ["--no-binary", package] if source else ["--only-binary", package]
    print(f"downloading {package} {version}", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        raise FetchError(f"pip could not download {package}=={version} (exit status {done.returncode}):\n  {words}\n"
                         "Without a network, pass the archive itself (see --archive), or set PIP_INDEX_URL / PIP_FIND_LINKS to a mirror.")
    files = [p for p in into.iterdir() if p != requirement]
    if len(files) != 1:
        raise FetchError(f"pip left {len(files)} files for {package}=={version} where one was expected: {[p.name for p in files]}")
    check_sha256(files[0], sha256)
    return files[0]
