"""What a compiler is told, for programs that use the kernel through its C ABI: cc program.c $(pylloyal config --cflags --libs)

The header and the library are those of this package, installed or editable; `--prefix DIR` is for an install tree of the sdk
(`cmake --install build/native --prefix DIR --component sdk`), which alone has the static library.
"""
from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from .. import errors, get_include
from .interrupts import Interrupts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cflags", action="store_true", help="where pylloyal.h and pylloyal.hpp are")
    parser.add_argument("--libs", action="store_true", help="the library, and where a program finds it when it runs")
    parser.add_argument("--static", action="store_true", help="with --libs: the static library, and what it needs")
    parser.add_argument("--prefix", nargs="?", const="", metavar="DIR", help="an install tree to speak of; without DIR, print the folder everything lies in")


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Print one line of words that a shell takes apart again."""
    from .commands import UsageError

    if args.static and not args.libs:
        raise UsageError("--static says which --libs")
    if not (args.cflags or args.libs or args.prefix == ""):
        raise UsageError("nothing to print: --cflags, --libs or --prefix")
    tree = Path(args.prefix).absolute() if args.prefix else None
    words = [str(Path(__file__).resolve().parents[1])] if args.prefix == "" else []
    if args.cflags:
        words.append(f"-I{_there(tree / 'include' if tree else Path(get_include()), 'pylloyal.h')}")
    if args.libs:
        words += static_words(tree) if args.static else shared_words(tree)
    interrupts.check()
    sys.stdout.write(" ".join(shlex.quote(word) for word in words) + "\n")
    return 0


def shared_words(tree: Path | None) -> list[str]:
    """The shared library by name, and its folder for the compiler and for the program that comes of it.

    Raises
    ------
    LibraryNotFoundError
        It is not there.
    """
    from .._ffi.load import candidates, file_names

    found = [path for path in ([tree / "lib" / name for name in file_names()] if tree else candidates()) if path.is_file()]
    if not found:
        raise errors.LibraryNotFoundError(f"no {' or '.join(file_names())} in {tree / 'lib' if tree else candidates()[0].parent}")
    folder = found[0].parent
    by_name = [f"-L{folder}", "-lpylloyal"] if found[0].name in file_names() else [str(found[0])]  # PYLLOYAL_LIBRARY may be called anything
    return [*by_name, *([] if sys.platform == "win32" else [f"-Wl,-rpath,{folder}"])]


def static_words(tree: Path | None) -> list[str]:
    """The static library by its path, for by name the linker prefers the shared one beside it; and what its pkg-config file says it needs.

    Raises
    ------
    LibraryNotFoundError
        There is none: wheels carry the shared library alone.
    """
    if tree is None:
        raise errors.LibraryNotFoundError("this package has the shared library alone; the static one is in an install tree: "
                                          "`cmake --install build/native --prefix DIR --component sdk`, and then --prefix DIR")
    library = _there(tree / "lib", "libpylloyal.a") / "libpylloyal.a"
    lines = (_there(tree / "lib" / "pkgconfig", "pylloyal.pc") / "pylloyal.pc").read_text(encoding="utf-8").splitlines()
    needs = next(line.removeprefix("Libs.private:") for line in lines if line.startswith("Libs.private:"))
    return [str(library), *needs.split()]


def _there(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise errors.LibraryNotFoundError(f"no {name} in {folder}")
    return folder
