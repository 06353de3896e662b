"""The checks of tools/check_wheel.py that compare and forbid can fail, and say what is wrong."""
from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import check_wheel
import pytest

NAME = "pylloyal-1.0-py3-none-linux_x86_64.whl"
MEMBERS = {"pylloyal/_lib/linux-x86_64/libpylloyal.so": b"\x7fELF", "pylloyal/_lib/linux-x86_64/THIRD_PARTY_NOTICES.txt": b"", "pylloyal/include/pylloyal.h": b"", "pylloyal/include/pylloyal.hpp": b"", "pylloyal/models/tinyvlm-f16.gguf": b"",
           "pylloyal/models/mmproj-tinyvlm-f16.gguf": b"", "pylloyal-1.0.dist-info/sboms/pylloyal.cdx.json": b"{}", "pylloyal-1.0.dist-info/licenses/LICENSE": b""}


def wheel(folder: Path, members: dict[str, bytes], *, minute: int = 0, mode: int = 0o644) -> Path:
    folder.mkdir()
    with zipfile.ZipFile(folder / NAME, "w") as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, (2020, 1, 1, 0, minute, 0))
            info.external_attr = mode << 16
            archive.writestr(info, data)
    return folder / NAME


def test_same_wheels_are_the_same(tmp_path: Path) -> None:
    check_wheel.check_same(wheel(tmp_path / "a", MEMBERS), wheel(tmp_path / "b", MEMBERS))


@pytest.mark.parametrize(("how", "words"), [
    ({"members": MEMBERS | {"pylloyal/include/pylloyal.h": b"changed"}}, r"\['pylloyal/include/pylloyal\.h'\]"),
    ({"members": {name: data for name, data in MEMBERS.items() if not name.endswith("LICENSE")}}, r"\['pylloyal-1\.0\.dist-info/licenses/LICENSE'\]"),
    ({"members": MEMBERS, "minute": 1}, r"LICENSE.*libpylloyal\.so"),
    ({"members": MEMBERS, "mode": 0o600}, r"LICENSE.*libpylloyal\.so"),
    ({"members": dict(reversed(MEMBERS.items()))}, "order of their members"),
], ids=["contents", "a member", "times", "permissions", "order"])
def test_wheels_that_differ_are_told_apart(how: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=words):
        check_wheel.check_same(wheel(tmp_path / "a", MEMBERS), wheel(tmp_path / "b", **how))  # type: ignore[arg-type]


def test_what_must_be_in_a_wheel(tmp_path: Path) -> None:
    assert check_wheel.check_contents(wheel(tmp_path / "whole", MEMBERS), [tmp_path]) == "pylloyal/_lib/linux-x86_64/libpylloyal.so"
    for number, name in enumerate(MEMBERS):
        with pytest.raises(SystemExit, match="the wheel lacks"):
            check_wheel.check_contents(wheel(tmp_path / str(number), {other: data for other, data in MEMBERS.items() if other != name}), [tmp_path])


def test_a_path_of_this_machine_is_found(tmp_path: Path) -> None:
    """Also in a compressed member."""
    made = tmp_path / "x" / NAME
    made.parent.mkdir()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in MEMBERS.items():
            archive.writestr(name, data + (f"\0{tmp_path}/source/ggml.c:1\0" * 50).encode() if name.endswith(".so") else data)
    with pytest.raises(SystemExit, match=r"paths of this machine.*libpylloyal\.so"):
        check_wheel.check_contents(made, [tmp_path])


def test_an_environment_is_compared_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "site" / "__pycache__").mkdir(parents=True)
    (tmp_path / "site" / "__pycache__" / "numpy.pyc").touch()
    before = check_wheel.listing(tmp_path)
    (tmp_path / "site" / "__pycache__" / "other.pyc").touch()
    assert check_wheel.listing(tmp_path) == before, "Python writes those when it imports what was there before"
    (tmp_path / "site" / "pylloyal" / "__pycache__").mkdir(parents=True)
    (tmp_path / "site" / "pylloyal" / "__pycache__" / "x.pyc").touch()
    (tmp_path / "site" / "empty").mkdir()
    assert check_wheel.listing(tmp_path) - before == {"site/pylloyal", "site/pylloyal/__pycache__", "site/pylloyal/__pycache__/x.pyc", "site/empty"}


def test_files_of_git_are_copied_and_no_others(tmp_path: Path) -> None:
    tree = check_wheel.copy_tree(tmp_path / "a clone")
    assert (tree / "pyproject.toml").read_bytes() == (check_wheel.ROOT / "pyproject.toml").read_bytes()
    assert not (tree / "pylloyal" / "include").exists()
    assert not list((tree / "pylloyal").rglob("*.so"))
    assert not (tree / ".venv").exists()


def test_this_python_is_among_those_tried() -> None:
    assert check_wheel.interpreters()["{}.{}".format(*sys.version_info[:2])] == sys.executable
