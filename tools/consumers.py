"""The install tree, and the programs in other languages that use it: built, run, and held to the same words.

    python tools/consumers.py [c] [cpp] [node] [rust] [python]      none named: all

Installs the sdk of build/native, moves it (nothing in it may know where it was made), looks at what the libraries show, and builds
libsrc/examples against it through each way in: pkg-config, `pylloyal config`, find_package, shared and static. All must print what the
Python package prints: the same tokens for the same seeds, the same refusals, nothing left behind. C and C++ also run under
AddressSanitizer, which looks for leaks when they end. A model that is not there must be a failure with the library's own words.
Nothing is fetched but koffi, by npm, for Node.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gen_capi
from _cache import sha256_of
from build_lib import program
from check_sbom import problems

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "libsrc" / "examples"
WORK = ROOT / "build" / "consumers"
SDK = WORK / "sdk"
FILES = tuple(str(ROOT / "fixtures" / "models" / name) for name in ("tinyvlm-f16.gguf", "mmproj-tinyvlm-f16.gguf"))
STRICT = ("-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-pedantic-errors", "-Werror", "-g")
SANITISED = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")

LEAKS = {"ASAN_OPTIONS": "detect_leaks=1"}

# A program with functions of the engine's names: its own, as it may have linked another llama.cpp.
CLASH = """
#include <pylloyal.h>
#include <stdio.h>
int ggml_init(void) { return 7; }
int llama_backend_init(void) { return 8; }
int main(void) {
    pyl_model * model = 0;
    const int32_t code = pyl_model_open(&model, FILE_NAME, sizeof FILE_NAME - 1, 0);
    if (code) return fprintf(stderr, "%s\\n", pyl_error_last()->message), 1;
    return pyl_model_free(model) == PYL_OK && ggml_init() + llama_backend_init() == 15 ? 0 : 1;
}
"""


class Failed(Exception):
    """A check that did not hold; the message says which."""


def run(command: Sequence[str | Path], expect: int = 0, *, cwd: Path | None = None, env: dict[str, str] | None = None) -> tuple[str, str]:
    """Output and errors of a program that must end with the status ``expect``."""
    clean = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "PKG_CONFIG_PATH")}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env={**clean, **(env or {})}, capture_output=True, text=True, check=False)
    if done.returncode != expect:
        raise Failed(f"`{shlex.join(map(str, command))[:300]}` ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout, done.stderr


def tool(name: str) -> str:
    found = program(name)
    if found is None:
        raise Failed(f"{name} is not on this machine")
    return found


def same(name: str, said: str, expected: str) -> None:
    if said != expected:
        raise Failed(f"{name} said\n{said}\nand Python\n{expected}")
    print(f"   {name}: the same", flush=True)


def install() -> None:
    """The sdk of build/native, in a place it was not made for."""
    shutil.rmtree(WORK / "made", ignore_errors=True)
    shutil.rmtree(SDK, ignore_errors=True)
    run([tool("cmake"), "--install", ROOT / "build" / "native", "--prefix", WORK / "made", "--component", "sdk"])
    (WORK / "made").rename(SDK)


def check_tree() -> None:
    """What is in the tree, what the libraries show, and under which name programs will look for them."""
    header = gen_capi.parse(gen_capi.HEADER.read_text(encoding="utf-8"))
    abi = {function.name for function in header.functions}
    version = dict(header.constants)["PYL_ABI_VERSION"]
    expected = {"include/pylloyal.h", "include/pylloyal.hpp", "lib/libpylloyal.a", "lib/libpylloyal.so", f"lib/libpylloyal.so.{version}", "lib/pkgconfig/pylloyal.pc",
                *(f"lib/cmake/pylloyal/pylloyal{name}.cmake" for name in ("Config", "ConfigVersion", "Targets", "Targets-release")),
                *(f"share/doc/pylloyal/{name}" for name in ("LICENSE", "THIRD_PARTY_NOTICES.txt", "pylloyal.cdx.json"))}
    there = {path.relative_to(SDK).as_posix() for path in SDK.rglob("*") if not path.is_dir()}
    if there != expected:
        raise Failed(f"the tree has {sorted(there - expected)} too many and lacks {sorted(expected - there)}")
    if f"[libpylloyal.so.{version}]" not in next(line for line in run(["readelf", "-d", SDK / "lib" / "libpylloyal.so"])[0].splitlines() if "SONAME" in line):
        raise Failed("the SONAME does not bear the ABI's number")
    for file, flags in (("libpylloyal.so", ["-D", "--defined-only"]), ("libpylloyal.a", ["-g", "--defined-only"])):
        shown = {line.split()[-1] for line in run(["nm", *flags, SDK / "lib" / file])[0].splitlines() if len(line.split()) == 3}
        if shown != abi:
            raise Failed(f"{file} shows {sorted(shown - abi)[:10]} too many and lacks {sorted(abi - shown)[:10]}")
    check_sbom(SDK / "lib" / f"libpylloyal.so.{version}", SDK / "lib" / "libpylloyal.a")
    for path in SDK.rglob("*"):
        if path.suffix in (".pc", ".cmake", ".json") and str(ROOT) in path.read_text(encoding="utf-8"):
            raise Failed(f"{path} knows where it was made")
    print(f"   tree: {len(there)} files, {len(abi)} names, SONAME libpylloyal.so.{version}", flush=True)


def check_sbom(shared: Path, static: Path) -> None:
    """The tree's SBOM is valid CycloneDX, of these libraries and the engine in them, and knows nothing of Python packages."""
    document = json.loads((SDK / "share" / "doc" / "pylloyal" / "pylloyal.cdx.json").read_text(encoding="utf-8"))
    if found := problems(document):
        raise Failed(f"the SBOM is not valid: {found}")
    parts = {entry["name"]: entry for entry in document["components"]}
    for name, path in (("libpylloyal", shared), ("libpylloyal (static)", static)):
        if parts[name]["hashes"] != [{"alg": "SHA-256", "content": sha256_of(path)}]:
            raise Failed(f"the SBOM is of another {path.name}")
    if "llama.cpp" not in parts or any(entry.get("purl", "").startswith("pkg:pypi/") for entry in document["components"]):
        raise Failed(f"the SBOM names {sorted(parts)}")


def config(*words: str) -> list[str]:
    return shlex.split(run([sys.executable, "-m", "pylloyal", "config", *words], env={"PYTHONPATH": str(ROOT)})[0])


def pkg_config(*words: str) -> list[str]:
    return shlex.split(run([tool("pkg-config"), *words, "pylloyal"], env={"PKG_CONFIG_PATH": str(SDK / "lib" / "pkgconfig")})[0])


def fails_in_words(name: str, command: Sequence[str | Path], env: dict[str, str] | None = None) -> None:
    said, errors = run([*command, "no-such-model.gguf", FILES[1]], 1, env=env)
    if said or "no-such-model.gguf" not in errors or "-11" not in errors:
        raise Failed(f"{name}, without a model, said\n{said}\n{errors}")


def python() -> str:
    return run([sys.executable, EXAMPLES / "python" / "consumer.py", *FILES], env={"PYTHONPATH": str(ROOT)})[0]


def with_cmake(folder: Path) -> None:
    """The examples' own project, for which it is enough that find_package finds the tree."""
    if not (folder / "CMakeCache.txt").exists():
        shutil.rmtree(folder, ignore_errors=True)
    run([tool("cmake"), "-S", EXAMPLES, "-B", folder, f"-DCMAKE_PREFIX_PATH={SDK}", "-DCMAKE_BUILD_TYPE=Release"])
    run([tool("cmake"), "--build", folder])


def native(language: str, compiler: str, source: Path, standard: str, expected: str) -> None:
    rpath = f"-Wl,-rpath,{SDK / 'lib'}"
    ways = {
        "pkg-config": [*pkg_config("--cflags", "--libs"), rpath],
        "pkg-config --static": ["-static", *pkg_config("--static", "--cflags", "--libs")],
        "pylloyal config --prefix": config("--cflags", "--libs", "--prefix", str(SDK)),
        "pylloyal config --static": config("--cflags", "--libs", "--static", "--prefix", str(SDK)),
        "pylloyal config": config("--cflags", "--libs"),
    }
    binary = WORK / f"{language}-consumer"
    for way, words in ways.items():
        run([tool(compiler), standard, *STRICT, source, *words, "-o", binary])
        linked = "libpylloyal.so" in run(["readelf", "-d", binary])[0]
        if linked == ("static" in way):
            raise Failed(f"{language} through {way} is {'' if linked else 'not '}linked with the shared library")
        same(f"{language}, {way}", run([binary, *FILES])[0], expected)
    fails_in_words(language, [binary])
    run([tool(compiler), standard, *STRICT, *SANITISED, source, *ways["pkg-config"], "-o", binary])
    same(f"{language}, sanitised", run([binary, *FILES], env=LEAKS)[0], expected)
    fails_in_words(language, [binary], LEAKS)
    with_cmake(WORK / "cmake")
    for variant in ("", "_static"):
        same(f"{language}, find_package{variant.replace('_', ', ')}", run([WORK / "cmake" / f"consumer_{language}{variant}", *FILES])[0], expected)


def c(expected: str) -> None:
    native("c", "cc", EXAMPLES / "c" / "consumer.c", "-std=c99", expected)
    clash = WORK / "clash.c"
    clash.write_text(CLASH, encoding="utf-8")
    run([tool("cc"), f'-DFILE_NAME="{FILES[0]}"', clash, *config("--cflags", "--libs", "--static", "--prefix", str(SDK)), "-o", WORK / "clash"])
    run([WORK / "clash"])
    print("   c, static, beside functions of the engine's names: both keep their own", flush=True)


def cpp(expected: str) -> None:
    native("cpp", "c++", EXAMPLES / "cpp" / "consumer.cpp", "-std=c++17", expected)


def node(expected: str) -> None:
    folder = WORK / "node"
    folder.mkdir(exist_ok=True)
    for name in ("package.json", "package-lock.json", ".npmrc", "pylloyal.js", "consumer.js"):
        shutil.copy(EXAMPLES / "node" / name, folder / name)
    # No install script: koffi brings its binaries.
    run([tool("npm"), "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"], cwd=folder)
    command: list[str | Path] = [tool("node"), folder / "consumer.js", SDK / "lib" / "libpylloyal.so"]
    same("node", run([*command, *FILES])[0], expected)
    fails_in_words("node", command)


def rust(expected: str) -> None:
    env = {"PYLLOYAL_LIBS": " ".join(config("--libs", "--prefix", str(SDK))), "CARGO_TARGET_DIR": str(WORK / "rust")}
    run([tool("cargo"), "build", "--offline", "--locked", "--manifest-path", EXAMPLES / "rust" / "Cargo.toml"], env=env)
    binary = WORK / "rust" / "debug" / "consumer"
    same("rust", run([binary, *FILES])[0], expected)
    fails_in_words("rust", [binary])


CONSUMERS: dict[str, Callable[[str], None]] = {"c": c, "cpp": cpp, "node": node, "rust": rust}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="language", help="c, cpp, node, rust, python")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - {*CONSUMERS, "python"}:
        parser.error(f"no consumer in {', '.join(sorted(unknown))}")
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        install()
        check_tree()
        expected = python()
        if not re.search(r"^colour 'blue' .*\n^where 'top right' ", expected, re.M) or not expected.endswith("left behind: 0\n"):
            raise Failed(f"the Python consumer said\n{expected}")
        print(expected, end="")
        for name in args.names or CONSUMERS:
            if name != "python":
                CONSUMERS[name](expected)
    except Failed as error:
        print(f"consumers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
