"""Build libpylloyal with one of the presets of ``libsrc/CMakePresets.json`` and put it into the package.

    python tools/build_lib.py [native | cpu | cuda | vulkan | metal | stub | asan | tsan | tsan-llama | coverage] [--test | --no-install]
    python tools/build_lib.py all | PLATFORM...           the portable libraries of other platforms too: tools/platforms.py

The first build of a preset compiles llama.cpp into the per-user cache (minutes); every later one takes seconds. Standard
library only; cmake (and ninja, if there is one) are taken from the running Python's environment first.
"""
from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cross import PLATFORMS, Platform

ROOT = Path(__file__).resolve().parents[1]
LIBSRC = ROOT / "libsrc"


class BuildError(Exception):
    """The library could not be built; the message says why."""


def program(name: str) -> str | None:
    """A program of this environment, or of the PATH."""
    beside = Path(sys.executable).parent / (name + (".exe" if os.name == "nt" else ""))
    return str(beside) if beside.exists() else shutil.which(name)


def engine_progress(folder: Path, since: float) -> str:
    """How far the engine's compilation is that this build folder has begun after ``since``, as ``[6/187]``; "" when it compiles none.

    Its output goes to a log in the cache, whose path CMake leaves in the folder once the compilation is this build's own: one that
    waits for another build of the same engine has none to show.
    """
    note = folder / "engine-log"
    if not note.exists() or note.stat().st_mtime < since:
        return ""
    try:
        with open(note.read_text(encoding="utf-8"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.startswith("[")]
    except FileNotFoundError:
        return ""
    return lines[-1].split("]")[0] + "]" if lines else ""


def _watch(folder: Path, stop: threading.Event) -> None:
    """Say now and then how far the engine's compilation is."""
    started, said = time.time(), ""
    while not stop.wait(15):
        if (far := engine_progress(folder, started)) not in ("", said):
            said = far
            print(f"   {time.time() - started:4.0f} s  {far} of llama.cpp", flush=True)


def build(preset: str, install: bool = True, name: str = "", options: tuple[str, ...] = ()) -> Path:
    """Configure, build and install; returns the build folder.

    Parameters
    ----------
    name : str
        Of the folder in ``build``, when it is not the preset's.
    options : tuple of str
        More words for CMake's configuration.

    Raises
    ------
    BuildError
        No cmake, or it failed (its output has been printed).
    """
    cmake = program("cmake")
    if cmake is None:
        raise BuildError("cmake was not found; `python3 tools/bootstrap.py lib` brings its own")
    folder = ROOT / "build" / (name or preset)
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if (ninja := program("ninja")) and not (folder / "Makefile").exists() else []
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(folder, stop), daemon=True)
    watcher.start()
    try:
        for command in ([cmake, "--preset", preset, "-B", str(folder), *generator, f"-DPython3_EXECUTABLE={sys.executable}", *options], [cmake, "--build", str(folder), "--parallel"],
                        *([[cmake, "--install", str(folder), "--prefix", str(ROOT), "--component", "python"]] if install else [])):
            if code := subprocess.run(command, cwd=LIBSRC, check=False, stdout=subprocess.DEVNULL if "--install" in command else None).returncode:
                raise BuildError(f"`{' '.join(command)}` failed with exit status {code}")
    finally:
        stop.set()
        watcher.join()
    return folder


def build_platform(platform: Platform, toolchain: Path, emulator: list[str] | None) -> Path:
    """Build and install the library of a platform, with its C and C++ tests where an emulator (empty: none needed) can run them."""
    options = [f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", f"-DPYL_BUILD_TESTS={'OFF' if emulator is None else 'ON'}"]
    if emulator:
        options.append(f"-DCMAKE_CROSSCOMPILING_EMULATOR={';'.join(emulator)}")
    return build("cross", name=platform.name, options=tuple(options))


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in ("all", *PLATFORMS):
        import platforms  # which builds with what is above

        return platforms.main(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="native", choices=["native", "cpu", "cuda", "vulkan", "metal", "stub", "asan", "tsan", "tsan-llama", "coverage"])
    parser.add_argument("--test", action="store_true", help="run its C and C++ tests instead of putting it into the package")
    parser.add_argument("--no-install", action="store_true", help="build it, and leave it in build/PRESET")
    args = parser.parse_args(words)
    try:
        folder = build(args.preset, install=not (args.test or args.no_install))
        if args.test:
            return subprocess.run([program("ctest") or "ctest", "--test-dir", str(folder), "--output-on-failure"], check=False).returncode
    except BuildError as error:
        print(f"build_lib: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
