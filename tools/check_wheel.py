"""Build the portable wheel twice, and use it as a stranger would: in empty environments, outside the clone, without a network.

    python tools/check_wheel.py [--out FOLDER]
    python tools/check_wheel.py --from-sdist      install the source archive with nothing but pip and the package index, use it, uninstall it

The two wheels are built in different folders, one from the clone's files and one from the source archive made of them, and must be the same
bytes (docs/supply-chain.md). Every Python from 3.11 on that this machine has gets an environment of its own.
"""
from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cache import cache_dir
from check_sbom import problems
from llama_source import read_pin

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 8_000_000
OLDEST, NEWEST = 11, 15  # minor versions of Python that are looked for
PORTABLE = ("-C", "cmake.define.PYL_CPU=portable")

USE = """
import json, pylloyal
with pylloyal.Model("stub:") as model, model.store(n_ctx=64) as store:
    root = store.root(sampling=pylloyal.Sampling.greedy())
    root.prefill("hello")
    kids = root.fork(3)
    done = store.tick(kids, n_steps=4)
    assert len({tuple(t) for t in done.tokens}) == 1, done
    assert store.pressure().cells_used == 6 + sum(map(len, done.tokens)), store.pressure()
print(json.dumps({"include": pylloyal.get_include(), "library": pylloyal.get_library(), "version": pylloyal.__version__}))
"""

PLAN = """
import importlib.resources, json, pylloyal
from pylloyal._ffi import load
model = importlib.resources.files("pylloyal") / "models" / "tinyvlm-f16.gguf"
made = pylloyal.plan(model, memory="1GiB")
assert load._library is None and made.verdict == "fits"
with pylloyal.open(model, context=1024, memory="1GiB") as store:
    print(json.dumps([store.plan.totals["kv_bytes"], store.actual.kv_bytes, len(store.differences)]))
"""


def fail(message: str) -> NoReturn:
    sys.exit(f"check_wheel: {message}")


def environment(**more: str) -> dict[str, str]:
    """Nothing of the clone may help: no PYTHONPATH, no library by name."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYLLOYAL_LIBRARY", "SOURCE_DATE_EPOCH")} | more


def run(*command: str, cwd: Path | None = None, umask: int = -1, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env or environment(), umask=umask, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        fail(f"`{' '.join(command)[:200]}` failed")
    return done.stdout


def pip(python: str, *arguments: str) -> str:
    return run(python, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", *arguments[1:])


@functools.cache
def no_network() -> tuple[str, ...]:
    """What a command is put behind to have no network, as far as this machine lets us take it away."""
    for words in (("unshare", "-n"), ("unshare", "-rn")):
        if shutil.which(words[0]) and subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0:
            return words
    return ()


@functools.cache
def interpreters() -> dict[str, str]:
    """The Pythons of this machine that a wheel must work on: version -> program. PATH first, then what pyenv installed."""
    found = {".".join(map(str, sys.version_info[:2])): sys.executable}
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for name in (f"3.{minor}" for minor in range(OLDEST, NEWEST + 1)):
        for program in (shutil.which(f"python{name}"), *sorted(map(str, versions.glob(f"{name}.*/bin/python{name}")), reverse=True)):
            if program and name not in found:
                asked = subprocess.run([program, "-c", "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=False)
                if asked.returncode == 0 and asked.stdout.strip() == name:
                    found[name] = program
    return found


def copy_tree(folder: Path) -> Path:
    """The files of this clone that git has or would take, in another folder; all of them where there is no git."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        return Path(shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns("build", "dist", ".venv", ".nox")))
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def build_wheel(source: Path, scratch: Path, **how: int) -> Path:
    """The portable wheel of a folder or a source archive, built by pip in ``scratch``."""
    (scratch / "tmp").mkdir(parents=True)
    run(sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", str(source), "--no-deps", "--no-build-isolation", "-w", str(scratch / "out"), *PORTABLE,
        cwd=scratch, env=environment(TMPDIR=str(scratch / "tmp"), TZ="Asia/Kathmandu" if how else "UTC"), **how)
    wheel, = (scratch / "out").glob("*.whl")
    return wheel


def build_sdist(tree: Path, out: Path) -> Path:
    out.mkdir()
    run(sys.executable, "-c", f"import sys; sys.path.insert(0, 'tools'); import backend; backend.build_sdist({str(out)!r})", cwd=tree)
    sdist, = out.glob("*.tar.gz")
    return sdist


def check_same(first: Path, second: Path) -> None:
    """Two wheels are the same bytes; otherwise say in which members they differ."""
    if first.name == second.name and first.read_bytes() == second.read_bytes():
        return
    a, b = ({info.filename: (zipfile.ZipFile(wheel).read(info), info.date_time, info.external_attr) for info in zipfile.ZipFile(wheel).infolist()} for wheel in (first, second))
    fail(f"{first.name} and {second.name} were built from the same files and differ: {sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)) or 'in the order of their members'}")


def check_contents(wheel: Path, strangers: list[Path]) -> str:
    """What must be in a wheel is, and no path of this machine; returns the library's member."""
    if not wheel.name.startswith("pylloyal-") or "-py3-none-" not in wheel.name or wheel.name.endswith("-any.whl"):
        fail(f"{wheel.name} is not named py3-none-<platform>")
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    libraries = [n for n in names if n.endswith((".so", ".dylib", ".dll"))]
    holds = {"one library": len(libraries) == 1, "the licence": any(n.endswith("licenses/LICENSE") for n in names),
             "the notices": any(n.endswith("THIRD_PARTY_NOTICES.txt") for n in names), "the headers": {"pylloyal/include/pylloyal.h", "pylloyal/include/pylloyal.hpp"} <= set(names),
             "the SBOM, where PEP 770 has it": len([n for n in names if re.fullmatch(r"pylloyal-[^/]+\.dist-info/sboms/pylloyal\.cdx\.json", n)]) == 1,
             "the demo's model, once": sorted(n for n in names if n.endswith(".gguf")) == ["pylloyal/models/mmproj-tinyvlm-f16.gguf", "pylloyal/models/tinyvlm-f16.gguf"]}
    for what, there in holds.items():
        if not there:
            fail(f"the wheel lacks {what}; it holds {names}")
    words = [str(path).encode() for path in strangers]
    if named := [(name, word.decode()) for name in names for word in words if word in archive.read(name)]:
        fail(f"paths of this machine are in the wheel: {named}")
    if wheel.stat().st_size > MOST_BYTES:
        fail(f"the wheel has {wheel.stat().st_size:,} bytes; {MOST_BYTES:,} are meant to be enough")
    return libraries[0]


def check_sbom(wheel: Path, library: str) -> None:
    """The SBOM is valid CycloneDX, of this library, of the pinned engine, and names what METADATA asks for."""
    archive, pin = zipfile.ZipFile(wheel), read_pin()
    name, = (n for n in archive.namelist() if n.endswith(".cdx.json"))
    document = json.loads(archive.read(name))
    if found := problems(document):
        fail(f"the SBOM is not valid: {found}")
    if not problems({**document, "components": [{"type": "library"}]}):
        fail("the validation of SBOMs lets everything through")
    parts = {entry["name"]: entry for entry in document["components"]}
    hashes = [{"alg": "SHA-256", "content": hashlib.sha256(archive.read(library)).hexdigest()}]
    if parts["libpylloyal"]["hashes"] != hashes:
        fail("the SBOM is of another library")
    if "LLAMA_CPP_DIR" not in os.environ and (parts["llama.cpp"]["version"] != pin["commit"] or parts["llama.cpp"]["externalReferences"][0]["hashes"][0]["content"] != pin["sha256"]):
        fail(f"the SBOM does not name the pinned engine: {parts['llama.cpp']}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {re.split(r"[^\w.-]", requirement)[0] for requirement in (*project["dependencies"], *project["optional-dependencies"]["media"])}
    if missing := asked - parts.keys():
        fail(f"the SBOM lacks {missing}")
    for model in (n for n in archive.namelist() if n.endswith(".gguf")):
        if parts[Path(model).name]["hashes"][0]["content"] != hashlib.sha256(archive.read(model)).hexdigest():
            fail(f"the SBOM has another {model}")


def listing(folder: Path) -> set[str]:
    """Everything below an environment, but what Python itself leaves when it imports."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if "pylloyal" in path.as_posix()[len(str(folder)):] or (path.suffix != ".pyc" and path.name != "__pycache__")}


def make_environment(program: str, folder: Path) -> str:
    """An empty environment with what the wheel asks for, hash-checked; returns its Python."""
    run(program, "-m", "venv", str(folder))
    python = str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")
    pip(python, "install", "--require-hashes", "--only-binary", ":all:", "-r", str(locked(folder, "numpy", "psutil")))
    return python


def use(python: str, folder: Path, *, first: bool) -> None:
    """Import, fork on the stub, plan, open, and question a picture and a clip: without a network, outside the clone."""
    offline = no_network()
    used = json.loads(run(*offline, python, "-W", "error", "-c", USE, cwd=folder).splitlines()[-1])
    command = str(Path(python).with_name("pylloyal"))
    info = json.loads(run(*offline, command, "info", "--json", cwd=folder))
    if not used["library"].startswith(str(folder.resolve())) or info["engine"]["cpu"] != "portable" or not (Path(used["include"]) / "pylloyal.h").exists():
        fail(f"the installed package is not self-contained: {used} {info}")
    planned, actual, differences = json.loads(run(*offline, python, "-W", "error", "-c", PLAN, cwd=folder).splitlines()[-1])
    if planned != actual or differences:
        fail(f"the plan of the installed package is wrong: {planned}, {actual}")
    demo = (*offline, command, "demo", "--json", "--out", str(folder / "demo"))
    if first:
        check_config(command, folder)
        plain = subprocess.run(demo, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
        if plain.returncode != 1 or plain.stdout or "pylloyal[media]" not in plain.stderr or plain.stderr.count("\n") != 1:
            fail(f"without Pillow the demo should say how to get it, and says: {plain}")
    pip(python, "install", "--require-hashes", "--only-binary", ":all:", "-r", str(locked(folder, "pillow", "av")))
    told = json.loads(run(*demo, cwd=folder))
    if told["encoder_runs"] != 1 or len(told["answers"]) != 6 or any(answer["text"] != answer["expected"] for answer in told["answers"]):
        fail(f"the demo of the installed package is wrong: {told}")


def check_config(command: str, folder: Path) -> None:
    """A C program is built against the installed package with the words it gives, and runs without being told where the library is."""
    compiler = shutil.which("cc")
    if compiler is None:
        print("check_wheel: no C compiler here; `pylloyal config` was not tried")
        return
    words = shlex.split(run(command, "config", "--cflags", "--libs", cwd=folder))
    models = Path(run(command, "config", "--prefix", cwd=folder).strip()) / "models"
    with tempfile.TemporaryDirectory() as name:
        program = str(Path(name) / "consumer")
        run(compiler, str(ROOT / "libsrc" / "examples" / "c" / "consumer.c"), *words, "-o", program)
        said = run(program, str(models / "tinyvlm-f16.gguf"), str(models / "mmproj-tinyvlm-f16.gguf"), cwd=folder)
    if "where 'top right'" not in said or not said.endswith("left behind: 0\n"):
        fail(f"the program of the installed package says {said!r}")


def check_uninstalled(python: str, folder: Path, before: set[str]) -> None:
    """After `pip uninstall` the environment holds what it held before the wheel (and what the demo needed and drew)."""
    pip(python, "uninstall", "--yes", "pillow", "av", "pylloyal")
    shutil.rmtree(folder / "demo")
    if left := sorted(listing(folder) - before - {"pillow.txt"}):
        fail(f"uninstalling leaves {left}")
    if gone := sorted(before - listing(folder)):
        fail(f"uninstalling takes away {gone}")


def check_editable(tree: Path, scratch: Path, library: str) -> None:
    """An editable install finds what CMake put elsewhere, although the clone has folders of the same names."""
    for name in (Path("_lib") / Path(library).parent.name, Path("include")):
        (tree / "pylloyal" / name).mkdir(parents=True)
    # Without llama.cpp, which has nothing to do with where things are, it is built in seconds.
    pip(sys.executable, "install", "--no-deps", "--no-build-isolation", "--prefix", str(scratch / "editable"), "-e", str(tree), "-C", "cmake.define.PYL_ENGINE=stub")
    where, = {path.parent for path in (scratch / "editable").rglob("_editable_skbc_pylloyal.py")}
    script = f"import site; site.addsitedir({str(where)!r})\n{USE}"
    editable = json.loads(run(sys.executable, "-c", script, cwd=scratch).splitlines()[-1])
    if not editable["library"].startswith(str(where)):
        fail(f"the editable install does not find its library: {editable}")


def check_twice(scratch: Path, out: Path) -> None:
    """The wheel, from the clone and from the source archive; then used by every Python there is."""
    tree = copy_tree(scratch / "a clone")
    other = Path(shutil.copytree(tree, scratch / "other"))
    wheel = build_wheel(tree, scratch / "first")
    library = check_contents(wheel, [scratch.resolve(), ROOT, cache_dir(), Path.home()])
    check_sbom(wheel, library)
    sdist = build_sdist(tree, scratch / "sdist")
    if sdist.read_bytes() != build_sdist(other, scratch / "sdist-again").read_bytes():
        fail("two source archives of the same files differ")
    check_same(wheel, build_wheel(sdist, scratch / "second" / "in" / "another folder", umask=0o077))
    print(f"{wheel.name}: the same {wheel.stat().st_size:,} bytes from the clone and from {sdist.name}", flush=True)
    for version, program in interpreters().items():
        folder = scratch / f"python{version}"
        python = make_environment(program, folder)
        before = listing(folder)
        pip(python, "install", "--no-deps", str(wheel))
        use(python, folder, first=program == sys.executable)
        check_uninstalled(python, folder, before)
    print(f"installed, used {'without a network' if no_network() else '(the network could not be taken away)'} and uninstalled on Python {', '.join(sorted(interpreters()))}", flush=True)
    check_editable(other, scratch, library)
    out.mkdir(exist_ok=True)
    shutil.copyfile(wheel, out / wheel.name)
    size = zipfile.ZipFile(wheel).getinfo(library).file_size
    print(f"{out.name}/{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MB; library {size / 2**20:.1f} MB")


def check_from_sdist(scratch: Path) -> None:
    """`pip install` of the source archive, with build isolation: the package index is all there is. The engine's archive is fetched anew; its
    compiled archives, which are keyed by its hash, are those of this machine's cache."""
    sdist = build_sdist(copy_tree(scratch / "clone"), scratch / "sdist")
    (scratch / "cache").mkdir()
    engine = cache_dir() / "engine"
    engine.mkdir(parents=True, exist_ok=True)
    (scratch / "cache" / "engine").symlink_to(engine, target_is_directory=True)
    folder = scratch / "env"
    python = make_environment(sys.executable, folder)
    before = listing(folder)
    fetching = environment(PYLLOYAL_CACHE_DIR=str(scratch / "cache"))
    for name in ("LLAMA_CPP_DIR", "LLAMA_CPP_ARCHIVE"):
        fetching.pop(name, None)
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(sdist), *PORTABLE, cwd=scratch, env=fetching)
    if not list((scratch / "cache" / "source").glob("*/CMakeLists.txt")):
        fail("the engine's source was not fetched")
    use(python, folder, first=True)
    check_uninstalled(python, folder, before)
    with tarfile.open(sdist) as archive:
        print(f"{sdist.name}: {sdist.stat().st_size / 2**20:.1f} MB, {len(archive.getnames())} files; built from the package index alone, used and uninstalled")


def locked(folder: Path, *packages: str) -> Path:
    """The lock's lines for these packages alone: what a user of the wheel gets, hash-checked."""
    text = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
    blocks = [block for block in text.replace("\\\n", "\0").splitlines() if block.startswith(tuple(f"{package}==" for package in packages))]
    path = folder / f"{packages[0]}.txt"
    path.write_text("\n".join(blocks).replace("\0", "\\\n") + "\n", encoding="utf-8")
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--from-sdist", action="store_true")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        if args.from_sdist:
            check_from_sdist(Path(name).resolve())
        else:
            check_twice(Path(name).resolve(), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
