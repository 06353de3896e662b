"""The other platforms: which there are, and the compiler that builds for all of them on one Linux machine.

The compiler is zig's C and C++ front end (Clang, with every platform's C library headers and a libc++ of its own), a wheel of the
package index locked by hash in ``requirements/cross.txt`` and unpacked once into the per-user cache (docs/adr/0010). CMake
sees it as a toolchain file and five programs, written beside it. Standard library only.
"""
from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cache import FetchError, cache_dir, locked, scratch_beside

LOCK = Path(__file__).resolve().parents[1] / "requirements" / "cross.txt"


@dataclass(frozen=True)
class Platform:
    """One row of the table of platforms.

    Attributes
    ----------
    triple : str
        zig's target: with the oldest glibc, Windows or macOS that the library may need.
    system, processor : str
        CMake's names.
    folder : str
        In ``pylloyal/_lib``: what ``platform.system()`` and ``platform.machine()`` say there, in lower case.
    library : str
        File name of the library.
    """

    name: str
    triple: str
    system: str
    processor: str
    library: str

    @property
    def folder(self) -> str:
        return f"{self.system}-{self.processor}".lower()


PLATFORMS = {p.name: p for p in (
    Platform("linux-x86_64", "x86_64-linux-gnu.2.17", "Linux", "x86_64", "libpylloyal.so"),
    Platform("linux-aarch64", "aarch64-linux-gnu.2.17", "Linux", "aarch64", "libpylloyal.so"),
    Platform("windows-x86_64", "x86_64-windows-gnu", "Windows", "AMD64", "pylloyal.dll"),
    Platform("macos-arm64", "aarch64-macos.11.0", "Darwin", "arm64", "libpylloyal.dylib"),
    Platform("macos-x86_64", "x86_64-macos.11.0", "Darwin", "x86_64", "libpylloyal.dylib"),
)}


def compiler() -> Path:
    """The folder of the locked zig, fetched with pip on the first call.

    Raises
    ------
    FetchError
        pip failed, or the index holds another file than the locked one.
    """
    lock = LOCK.read_bytes()
    folder = cache_dir() / "toolchain" / hashlib.sha256(lock).hexdigest()[:16]
    if (folder / "complete").exists():
        return folder / "ziglang"
    with locked(folder.with_suffix(".lock"), "the cross compiler"):
        if not (folder / "complete").exists():
            with scratch_beside(folder) as scratch:
                print("fetching the cross compiler (100 MB, once)", file=sys.stderr, flush=True)
                command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps", "--target", str(scratch / "tree"), "-r", str(LOCK)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise FetchError(f"pip could not install {LOCK.name} (exit status {done.returncode}):\n  " + "\n  ".join(done.stderr.strip().splitlines()[-12:]))
                (scratch / "tree" / "ziglang" / "zig").chmod(0o755)
                (scratch / "tree" / "complete").touch()
                os.rename(scratch / "tree", folder)
    return folder / "ziglang"


def toolchain(platform: Platform) -> Path:
    """CMake's toolchain file for a platform, with the programs it names; written anew at each call, the same bytes each time."""
    zig = compiler()
    folder = zig.parent / platform.name
    folder.mkdir(exist_ok=True)
    version = subprocess.run([str(zig / "zig"), "version"], capture_output=True, text=True, check=True).stdout.strip()
    # Its own cache of C libraries compiled for a target goes where all else goes; paths in the programs it makes do not name this machine.
    home = f'ZIG_GLOBAL_CACHE_DIR="{zig.parent / "cache"}" ZIG_LOCAL_CACHE_DIR="{zig.parent / "cache"}"'
    # -g0: zig would write debug information that nobody asked for. -O2, which what comes after overrules: CMake's first look at a compiler says
    # nothing of it, and zig would build its C and C++ libraries once more, for debugging.
    programs = {"cc": f"cc -target {platform.triple} -g0 -O2", "c++": f"c++ -target {platform.triple} -g0 -O2", "ar": "ar", "ranlib": "ranlib", "rc": "rc"}
    for name, words in programs.items():
        write(folder / name, f'#!/bin/sh\n{home} exec "{zig / "zig"}" {words} "$@"\n')
        (folder / name).chmod(0o755)
    # zig's linker writes install names itself; CMake only wants to know that the program is there.
    write(folder / "install_name_tool", '#!/bin/sh\necho "install_name_tool: nothing here needs it" >&2\nexit 1\n')
    (folder / "install_name_tool").chmod(0o755)
    lines = [f"set(CMAKE_SYSTEM_NAME {platform.system})", f"set(CMAKE_SYSTEM_PROCESSOR {platform.processor})", f'set(PYL_TARGET "zig {version} {platform.triple}")',
             *(f'set({variable} "{folder / name}")' for variable, name in (("CMAKE_C_COMPILER", "cc"), ("CMAKE_CXX_COMPILER", "c++"), ("CMAKE_AR", "ar"), ("CMAKE_RANLIB", "ranlib"),
                                                                          ("CMAKE_RC_COMPILER", "rc"), ("CMAKE_INSTALL_NAME_TOOL", "install_name_tool"))),
             # GNU binutils of this machine do not know the other formats.
             'set(CMAKE_STRIP "CMAKE_STRIP-NOTFOUND")', 'set(CMAKE_OSX_SYSROOT "")' if platform.system == "Darwin" else "",
             # The final name at once: there is no install_name_tool to change it with.
             'set(CMAKE_BUILD_WITH_INSTALL_NAME_DIR ON)\nset(CMAKE_INSTALL_NAME_DIR "@rpath")' if platform.system == "Darwin" else "",
             "set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)", *(f"set(CMAKE_FIND_ROOT_PATH_MODE_{what} ONLY)" for what in ("LIBRARY", "INCLUDE", "PACKAGE")),
             f'set(CMAKE_FIND_ROOT_PATH "{folder}")', ""]
    write(folder / "toolchain.cmake", "\n".join(lines))
    return folder / "toolchain.cmake"


def write(path: Path, text: str) -> None:
    """Leave a file that says this already alone: CMake and other builds look at its time."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
