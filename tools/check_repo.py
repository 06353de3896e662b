"""Check what no compiler does: nothing in the repository names a machine's paths or where packages are downloaded from.

    python tools/check_repo.py
"""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = {
    "an absolute path of somebody's machine": re.compile(r"(?<![\w.])/(?:root|work|home/\w+|Users/\w+)/"),
    "a download address": re.compile(r"https?://[^\s)>\"']*(?:/simple/|\.whl|\.tgz|\.tar\.gz|/pool/)|files\.python" + r"hosted|py" + r"pi\.org|registry\.np" + r"mjs"),
}


def is_lock(name: str) -> bool:
    return name.startswith("requirements/") or name.rpartition("/")[2] == "package-lock.json"


def main() -> int:
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for name in names:
        path = ROOT / name
        if path == Path(__file__) or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            found += [f"{name}:{number}: {what}: {line.strip()[:120]}" for what, pattern in PATTERNS.items() if pattern.search(line)]
            if is_lock(name) and re.search(r"https?://", line):
                found.append(f"{name}:{number}: an address in a lock file: {line.strip()[:120]}")
    print("\n".join(found), file=sys.stderr) if found else None
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
