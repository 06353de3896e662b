"""Build the library and the wheel of every platform on one Linux machine, check their files, run what can be run, and print a table.

    python tools/platforms.py [all | NAME...] [--no-wheel] [--out FOLDER]

Each platform: compiled with the locked cross compiler (``tools/cross.py``), put into ``pylloyal/_lib/<platform>``, held to what is
written below (exports, needed libraries, oldest system), run under an emulator where there is one, and packed into a wheel whose tag
says what the file itself needs. What could not be run is said in the table, and why.
"""
from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build_lib
from _cache import FetchError, cache_dir
from build_lib import BuildError
from cross import PLATFORMS, Platform, toolchain
from shared_library import SharedLibrary, read

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "build" / "tiny" / "tiny-llama.gguf"

# What every installation of the system has. Linux: of manylinux's list, the C library's own parts alone; zig links its libc++ in.
SYSTEM_LIBRARIES = {
    "Linux": re.compile(r"lib(c|m|pthread|dl|rt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+"),
    "Windows": re.compile(r"(kernel32|ntdll|ws2_32|bcrypt|crypt32|userenv|advapi32|shell32|api-ms-win-crt-[\w-]+|api-ms-win-core-synch-l1-2-0)\.dll", re.IGNORECASE),
    "Darwin": re.compile(r"/usr/lib/libSystem\.B\.dylib"),
}
OLDEST = {"Linux": (2, 17), "Windows": (10, 0), "Darwin": (11, 0)}  # nothing may need a newer one
FORMATS = {"Linux": "ELF", "Windows": "PE", "Darwin": "Mach-O"}
# zig's linker shows these of every dylib (and knows no list of exports there: what else is hidden is so by its visibility).
LINKERS_OWN: dict[str, set[str]] = {"ELF": set(), "PE": set(), "Mach-O": {"__dso_handle", "_mh_dylib_header"}}
# Nor does it hide, on x86-64, what the C++ ABI itself makes visible: the description of a function type of built-in types alone (std::function<bool(char)>,
# in a lexer of the engine). It is weak, and the same in every program.
BUILT_IN_TYPES = re.compile(r"_ZT[IS]P?F[a-z]+E")
MACHINES = {"AMD64": "x86_64"}
BASELINE = {"ssse3", "avx", "avx2", "fma", "f16c", "bmi2"}  # of x86-64-v3, what the engine's code asks for
NEHALEM = "Nehalem"  # of 2008: SSE4.2, no AVX


@dataclass
class Row:
    """One line of the table."""

    platform: Platform
    size: int
    library: SharedLibrary
    tag: str
    proven: str
    wheel: Path | None = None


def abi_names() -> list[str]:
    """Every function of the header, from the list that is generated from it."""
    text = (ROOT / "libsrc" / "cmake" / "exports.def").read_text(encoding="utf-8")
    return sorted(text.partition("EXPORTS")[2].split())


def problems(library: SharedLibrary, platform: Platform) -> list[str]:
    """What is wrong with a library that is meant for a platform; empty for nothing."""
    found = []
    if (library.format, library.machine) != (FORMATS[platform.system], MACHINES.get(platform.processor, platform.processor)):
        found.append(f"it is {library.format} for {library.machine}")
    wanted = abi_names()
    if extra := sorted(name for name in set(library.exports) - set(wanted) - LINKERS_OWN[library.format] if library.format != "Mach-O" or not BUILT_IN_TYPES.fullmatch(name)):
        found.append(f"it shows more than the ABI: {extra[:8]}")
    if lacking := sorted(set(wanted) - set(library.exports)):
        found.append(f"it lacks {lacking[:8]}")
    if foreign := [name for name in library.needed if not SYSTEM_LIBRARIES[platform.system].fullmatch(name)]:
        found.append(f"it needs {foreign}, which not every {platform.system} has")
    if library.rpaths:
        found.append(f"it looks for libraries in {library.rpaths}")
    if library.name not in (platform.library, f"@rpath/{platform.library}") and not library.name.startswith(f"{platform.library}."):
        found.append(f"its name is '{library.name}'")
    if library.floor > OLDEST[platform.system]:
        found.append(f"it needs {platform.system} {dotted(library.floor)}, {dotted(OLDEST[platform.system])} is promised")
    if library.format == "Mach-O" and library.machine == "arm64" and not library.is_signed:
        found.append("it is not signed: macOS would not open it")
    return found


def paths_of_this_machine(path: Path) -> list[str]:
    """Which of the places that a build works in a file names: the clone and the cache."""
    data = path.read_bytes()
    return [f"it names {place}, which is a place on this machine" for place in (ROOT, cache_dir()) if str(place).encode() in data]


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def tag_of(library: SharedLibrary) -> str:
    """The widest platform tag that is true of a file: from the versions in it, not from what the compiler was asked for."""
    if library.format == "ELF":
        return f"manylinux_{'_'.join(map(str, max(library.floor, (2, 17))))}_{library.machine}"  # installers know none below 2.17
    if library.format == "Mach-O":
        return f"macosx_{'_'.join(map(str, library.floor))}_{library.machine}"
    return "win_amd64"


def floor_text(library: SharedLibrary) -> str:
    # A PE file's header says what its linker wrote; the C library it needs came with Windows 10.
    return {"ELF": f"glibc {dotted(library.floor)}", "Mach-O": f"macOS {dotted(library.floor)}", "PE": "Windows 10"}[library.format]


# ------------------------------------------------------------------------------------------------------------------------ running


def emulator(platform: Platform) -> list[str] | None:
    """The command that runs a platform's programs here; empty for none needed, None for none there."""
    if platform.name == "linux-x86_64":
        return []
    if platform.name == "linux-aarch64" and (qemu := shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")) and Path("/usr/aarch64-linux-gnu/lib").is_dir():
        return [qemu, "-L", "/usr/aarch64-linux-gnu"]
    if platform.name == "windows-x86_64" and (wine := shutil.which("wine") or shutil.which("wine64")):
        return [wine]
    return None


MISSING = {"linux-aarch64": "not run: no qemu-aarch64-static with libc6-arm64-cross here", "windows-x86_64": "not run: no wine here",
           "macos-arm64": "not run: nothing here runs macOS programs; its file was checked", "macos-x86_64": "not run: nothing here runs macOS programs; its file was checked"}


# Wine: silent, with a home of its own, and without the browser and .NET it would like to fetch.
WINE = {"WINEDEBUG": "-all", "WINEPREFIX": str(ROOT / "build" / "wine"), "WINEDLLOVERRIDES": "mscoree,mshtml=", "DISPLAY": ""}


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=os.environ | WINE | env)


def tell(output: str) -> dict[str, list[str]]:
    """What tests/prove.c printed: a line's first word, and the rest."""
    return {words[0]: words[1:] for line in output.splitlines() if (words := line.split())}


def prove(platform: Platform, folder: Path, here: dict[str, list[str]] | None) -> tuple[str, dict[str, list[str]] | None]:
    """Run the C and C++ tests and a tiny model's first tokens; returns words for the table, and what the model said.

    Parameters
    ----------
    here : dict or None
        What the same program said on this machine's own processor.
    """
    runner = emulator(platform)
    if runner is None:
        return MISSING[platform.name], None
    program = next(path for path in (folder / "tests" / "prove", folder / "prove.exe") if path.exists())
    run([*runner, str(program)])  # alone, for Wine makes its home with the first program, and a second one beside it finds half of that
    tested = run([build_lib.program("ctest") or "ctest", "--test-dir", str(folder), "--output-on-failure", "--parallel", str(os.cpu_count() or 1)])
    passed = re.search(r"(\d+)% tests passed.*out of (\d+)", tested.stdout)
    if tested.returncode or not passed:
        raise BuildError(f"the tests of {platform.name} failed:\n{tested.stdout[-6000:]}{tested.stderr[-2000:]}")
    done = run([*runner, str(program), str(MODEL)])
    said = tell(done.stdout)
    if done.returncode or "tokens" not in said:
        raise BuildError(f"{platform.name} did not decode: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    compiled = set(json.loads(" ".join(said["build"]))["cpu_features"])
    if MACHINES.get(platform.processor, platform.processor) == "x86_64" and compiled != BASELINE:
        raise BuildError(f"{platform.name} was compiled for a processor with {sorted(compiled)}, where x86-64-v3 is meant: {sorted(BASELINE)}")
    words = [{"linux-x86_64": "run here", "linux-aarch64": "run under qemu-user", "windows-x86_64": "run under Wine"}[platform.name] + f": {passed[2]} C and C++ tests, a tiny model decoded"]
    if here is not None:
        if said["tokens"] != here["tokens"]:
            raise BuildError(f"{platform.name} chose other tokens than this machine: {said['tokens']}, {here['tokens']}")
        apart = max(abs(float(a) - float(b)) for a, b in zip(said["logits"], here["logits"], strict=True))
        words.append(f"the same {len(said['tokens'])} greedy tokens as linux-x86_64" + (", the same logits" if apart == 0 else f", logits within {apart:.0e}"))
    if platform.name == "linux-x86_64":
        words.append(refused(program))
    return "; ".join(words), said


def refused(program: Path) -> str:
    """What a processor without the baseline says; anything but the named refusal is a failure."""
    qemu = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
    if qemu is None:
        return "older CPUs not tried: no qemu-x86_64-static here"
    done = run([qemu, "-cpu", NEHALEM, str(program), str(MODEL)])
    if done.returncode != 3 or "refused pyl_model_open" not in done.stdout or "avx2" not in done.stdout:
        raise BuildError(f"a {NEHALEM} CPU should be refused by name; exit status {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return f"refused by name on a {NEHALEM} CPU"


# ------------------------------------------------------------------------------------------------------------------------- wheels


def wheel(platform: Platform, tag: str, out: Path) -> Path:
    """The wheel of a platform, made by the same backend as any other and given the tag its library earned.

    Raises
    ------
    BuildError
        The backend failed, or packed another library than one for this platform.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", scratch, "-C", "cmake.define.PYL_CPU=portable",
                   "-C", f"cmake.define.CMAKE_TOOLCHAIN_FILE={toolchain(platform)}", "-C", f"build-dir={ROOT / 'build' / 'wheel' / platform.name}"]
        done = run(command)
        if done.returncode:
            raise BuildError(f"the wheel of {platform.name} was not built:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        made, = Path(scratch).glob("*.whl")
        return retag(made, tag, out, f"pylloyal/_lib/{platform.folder}/{platform.library}")


def retag(path: Path, tag: str, out: Path, library: str) -> Path:
    """Write a wheel anew under another platform tag: its name, its WHEEL file and its RECORD say so, all else is copied byte by byte."""
    with zipfile.ZipFile(path) as old:
        held = [name for name in old.namelist() if name.endswith((".so", ".dylib", ".dll")) or ".so." in name]
        if held != [library]:
            raise BuildError(f"{path.name} holds {held}, where {library} was to be")
        version = path.name.split("-")[1]
        info = f"pylloyal-{version}.dist-info"
        files = [(item, old.read(item)) for item in old.infolist() if item.filename != f"{info}/RECORD"]
        record = old.getinfo(f"{info}/RECORD")
    out.mkdir(parents=True, exist_ok=True)
    final = out / f"pylloyal-{version}-py3-none-{tag}.whl"
    rows = []
    with zipfile.ZipFile(final, "w", zipfile.ZIP_DEFLATED) as new:
        for item, old_data in files:
            data = old_data
            if item.filename == f"{info}/WHEEL":
                lines = [line for line in data.decode().splitlines() if line and not line.startswith("Tag:")]
                data = ("\n".join([*lines, f"Tag: py3-none-{tag}"]) + "\n").encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{item.filename},sha256={digest},{len(data)}")
            new.writestr(item, data, zipfile.ZIP_DEFLATED)
        new.writestr(record, "\n".join([*rows, f"{info}/RECORD,,"]) + "\n", zipfile.ZIP_DEFLATED)
    return final


# -------------------------------------------------------------------------------------------------------------------------- table


def table(rows: list[Row]) -> str:
    lines = ["| platform | size | exports | needs | oldest system | wheel | how proven |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        shown = len(set(row.library.exports) & set(abi_names()))
        needed = dict.fromkeys(re.sub("^api-ms-win-crt-.*", "the Universal C Runtime (api-ms-win-crt-*.dll)", name) for name in row.library.needed)
        tag = row.tag + (f", {row.wheel.stat().st_size / 2**20:.1f} MiB" if row.wheel else "")
        cells = (row.platform.name, f"{row.size / 2**20:.1f} MiB", str(shown), ", ".join(needed), floor_text(row.library), tag, row.proven)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=["all", *PLATFORMS], default="all")
    parser.add_argument("--no-wheel", action="store_true", help="only the libraries")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    args = parser.parse_args(argv)
    wanted = [p for p in PLATFORMS.values() if "all" in args.names or p.name in args.names]  # linux-x86_64 first: the others are compared with it
    rows: list[Row] = []
    here: dict[str, list[str]] | None = None
    try:
        made = run([sys.executable, str(ROOT / "tools" / "tiny_models.py"), str(MODEL.parent), "--only", MODEL.stem], PYTHONPATH=str(ROOT))
        if made.returncode:
            raise BuildError(f"no tiny model: {made.stderr[-2000:]}")
        for platform in wanted:
            folder = build_lib.build_platform(platform, toolchain(platform), emulator(platform))
            path = ROOT / "pylloyal" / "_lib" / platform.folder / platform.library
            library = read(path)
            if wrong := problems(library, platform) + paths_of_this_machine(path):
                raise BuildError(f"{path}:\n  " + "\n  ".join(wrong))
            tag = tag_of(library)
            proven, said = prove(platform, folder, here)
            here = said if platform.name == "linux-x86_64" else here
            made_wheel = None if args.no_wheel else wheel(platform, tag, args.out)
            rows.append(Row(platform, path.stat().st_size, library, tag, proven, made_wheel))
            print(f"{platform.name}: {proven}", made_wheel or "", flush=True)
    except (BuildError, FetchError) as error:
        print(f"platforms: {error}", file=sys.stderr)
        return 1
    finally:
        if rows:
            print(table(rows), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
