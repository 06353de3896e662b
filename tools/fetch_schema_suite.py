"""Fetch the public JSON-Schema test suite into the per-user cache and print its folder.

    python tools/fetch_schema_suite.py

It comes inside the source archive of the `jsonschema` package, pinned in requirements/schema-suite.txt; nothing of the package
is installed or run by the tests. Hash-checked, once per machine.
"""
from __future__ import annotations

import os
import re
import sys
import tarfile
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cache import FetchError, cache_dir, locked, pip_download, scratch_beside

LOCK = Path(__file__).resolve().parents[1] / "requirements" / "schema-suite.txt"
DRAFTS = ("draft7", "draft2020-12")


def fetch() -> Path:
    """Folder with one subfolder a draft; downloads the archive the first time (370 kB).

    Raises
    ------
    FetchError
        No network, or the archive is not the one that was pinned.
    """
    pin = re.fullmatch(r"([\w-]+)==([\w.]+) \\\s+--hash=sha256:([0-9a-f]{64})\s+", LOCK.read_text(encoding="utf-8"))
    if not pin:
        raise FetchError(f"{LOCK} is not one package with one hash")
    package, version, sha256 = pin.groups()
    final = cache_dir() / "schema-suite" / sha256[:16]
    if final.exists():
        return final
    with locked(final.with_suffix(".lock"), "the JSON-Schema test suite"):
        if not final.exists():
            with scratch_beside(final) as scratch:
                unpack(pip_download(package, version, sha256, scratch, source=True), scratch / "suite")
                os.replace(scratch / "suite", final)
    return final


def unpack(archive: Path, into: Path) -> None:
    """The drafts' folders out of ``*/json/tests`` in the archive, and the suite's licence."""
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts[1:]
            wanted = parts[:2] == ("json", "tests") and len(parts) > 3 and parts[2] in DRAFTS
            if member.isfile() and (wanted or parts == ("json", "LICENSE")):
                member.name = "/".join(parts[2:] if wanted else parts[1:])
                tar.extract(member, into, filter="data")
    if missing := [draft for draft in DRAFTS if not any((into / draft).glob("*.json"))]:
        raise FetchError(f"{archive.name} holds no tests of {', '.join(missing)}")


def main() -> int:
    try:
        print(fetch())
    except (FetchError, OSError) as error:
        print(f"fetch_schema_suite: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
