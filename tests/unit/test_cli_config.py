"""`pylloyal config`: what a compiler is told, of this package and of an install tree."""
from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import pylloyal
from pylloyal._ffi import load
from pylloyal.cli import main


def words(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["config", *arguments]) == 0
    return shlex.split(capsys.readouterr().out)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An install tree as far as words go, in a folder that a shell would take for two."""
    root = tmp_path / "a tree"
    for name in ("include/pylloyal.h", f"lib/{load.file_names()[0]}", "lib/libpylloyal.a"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "lib" / "pkgconfig").mkdir()
    (root / "lib" / "pkgconfig" / "pylloyal.pc").write_text("Name: pylloyal\nLibs: -lpylloyal\nLibs.private: -lstdc++ -lm\n", encoding="utf-8")
    return root


def test_of_this_package(capsys: pytest.CaptureFixture[str]) -> None:
    flags, *libs = words(capsys, "--cflags", "--libs")
    assert (Path(flags.removeprefix("-I")) / "pylloyal.h").is_file()
    folder = load.candidates()[0].parent
    assert (Path(flags.removeprefix("-I")) / "pylloyal.hpp").is_file()
    assert libs[0] == (f"-L{folder}" if load.candidates()[0].name in load.file_names() else str(load.candidates()[0]))
    assert f"-Wl,-rpath,{folder}" in libs
    assert words(capsys, "--prefix") == [str(Path(pylloyal.__file__).resolve().parent)]


def test_of_a_tree(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words(capsys, "--prefix", str(tree), "--cflags", "--libs") == [f"-I{tree}/include", f"-L{tree}/lib", "-lpylloyal", f"-Wl,-rpath,{tree}/lib"]
    assert words(capsys, "--prefix", str(tree), "--libs", "--static") == [f"{tree}/lib/libpylloyal.a", "-lstdc++", "-lm"]


def test_a_library_of_another_name_is_linked_by_its_path(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    other = tree / "mine.so"
    other.touch()
    monkeypatch.setenv("PYLLOYAL_LIBRARY", str(other))
    assert words(capsys, "--libs") == [str(other), f"-Wl,-rpath,{tree}"]


@pytest.mark.parametrize(("gone", "asked"), [("include/pylloyal.h", ["--cflags"]), ("lib/libpylloyal.a", ["--libs", "--static"]), ("lib/pkgconfig/pylloyal.pc", ["--libs", "--static"]),
                                             (f"lib/{load.file_names()[0]}", ["--libs"])])
def test_what_is_not_there_is_named(gone: str, asked: list[str], tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / gone).unlink()
    assert main(["config", "--prefix", str(tree), *asked]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert Path(gone).name in err
    assert str((tree / gone).parent) in err


def test_the_package_has_no_static_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--libs", "--static"]) == 1
    assert "--component sdk" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [[], ["--static"], ["--cflags", "--static"], ["--prefix", "DIR"]])
def test_wrong_usage(asked: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["config", *asked])
    assert left.value.code == 2
