"""The hash-locked environment of tools/bootstrap.py, made from nothing: a lock and an index of the test's own, and no network."""
from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOX = "import sys\nprint('nox was asked for', sys.argv[1:])\n"  # what bootstrap runs in the end

pytestmark = pytest.mark.slow


def wheel(index: Path, name: str, code: str) -> str:
    """Put a wheel into ``index``; returns its line of a lock."""
    files = {f"{name}/__init__.py": "", f"{name}/__main__.py": code, f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
             f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    rows = [f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}" for path, text in files.items()]
    record = f"{name}-1.0.dist-info/RECORD"
    path = index / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in (files | {record: "\n".join([*rows, f"{record},,"]) + "\n"}).items():
            archive.writestr(zipfile.ZipInfo(inner), text)
    return line(path, name)


def line(path: Path, name: str) -> str:
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


class Clone:
    """A clone with nothing in it but the tool and its lock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder / "clone", folder / "index"
        self.index.mkdir()
        (self.folder / "tools").mkdir(parents=True)
        (self.folder / "requirements").mkdir()
        shutil.copyfile(ROOT / "tools" / "bootstrap.py", self.folder / "tools" / "bootstrap.py")

    def lock(self, text: str) -> None:
        (self.folder / "requirements" / "dev.txt").write_text(text, encoding="utf-8")

    def bootstrap(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))} | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index), "PIP_CONFIG_FILE": os.devnull}
        return subprocess.run([sys.executable, str(self.folder / "tools" / "bootstrap.py"), *words], cwd=self.folder.parent, env=env, capture_output=True, text=True, check=False)

    def installed(self) -> set[str]:
        return {path.name for path in (self.folder / ".venv").rglob("site-packages/*") if path.suffix != ".dist-info"} & {"nox", "other"}


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_an_empty_environment_is_made_once(clone: Clone) -> None:
    clone.lock(wheel(clone.index, "nox", NOX))
    first = clone.bootstrap("lint", "--", "-x", "--", "y")
    assert first.returncode == 0, first.stderr
    assert "preparing .venv" in first.stdout
    assert "'--sessions', 'lint', '--', '-x', '--', 'y']" in first.stdout
    assert "'--sessions', 'lint', '--', '-x']" in clone.bootstrap("lint", "-x").stdout  # as is known by heart, or as nox has it
    assert clone.installed() == {"nox"}
    again = clone.bootstrap("lint")
    assert again.returncode == 0
    assert "preparing" not in again.stdout
    assert "nox was asked for" in again.stdout


def test_another_package_than_the_locked_one_is_refused(clone: Clone) -> None:
    """Also after an environment was made: a changed lock makes it anew, and a refusal leaves none that would be taken for good."""
    good = wheel(clone.index, "nox", NOX)
    other = wheel(clone.index, "other", "")
    clone.lock(good)
    assert clone.bootstrap("lint").returncode == 0
    clone.lock(other + good.replace("sha256:", "sha256:00000000")[:len(good) - 1] + "\n")
    for _ in range(2):
        refused = clone.bootstrap("lint")
        assert refused.returncode == 1
        assert "nox was asked for" not in refused.stdout
        assert "is not the one that requirements/dev.txt pins" in refused.stderr
        assert "nothing was installed" in refused.stderr
        assert "Expected sha256 00000000" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert clone.installed() == set()


def test_what_has_no_hash_or_would_have_to_be_built_is_refused(clone: Clone) -> None:
    clone.lock(wheel(clone.index, "nox", NOX) + "other==1.0\n")
    wheel(clone.index, "other", "")
    refused = clone.bootstrap("lint")
    assert refused.returncode == 1
    assert "other" in refused.stderr
    assert clone.installed() == set()

    (clone.index / "other-1.0-py3-none-any.whl").unlink()
    ran = clone.folder.parent / "ran"
    source = clone.index / "other-1.0.tar.gz"
    with tarfile.open(source, "w:gz") as archive:
        for name, text in {"other-1.0/PKG-INFO": "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n", "other-1.0/setup.py": f"open({str(ran)!r}, 'w')\n"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    clone.lock((clone.folder / "requirements" / "dev.txt").read_text(encoding="utf-8").replace("other==1.0\n", line(source, "other")))
    refused = clone.bootstrap("lint")
    assert refused.returncode == 1
    assert "needs a package index it can reach" in refused.stderr
    assert not ran.exists(), "code of a source archive was run"
    assert clone.installed() == set()
