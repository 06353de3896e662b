"""Build the portable wheel and use it as a stranger would: an empty environment, outside the clone.

    python tools/check_wheel.py [--out FOLDER]
"""
from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 8_000_000

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


def environment() -> dict[str, str]:
    """Nothing of the clone may help: no PYTHONPATH, no library by name."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYLLOYAL_LIBRARY")}


def run(*command: str, cwd: str | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        sys.exit(f"check_wheel: `{' '.join(command)[:200]}` failed")
    return done.stdout


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        run(sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", scratch, "-C", "cmake.define.PYL_CPU=portable")
        wheel, = Path(scratch).glob("*.whl")
        if not wheel.name.startswith("pylloyal-") or "-py3-none-" not in wheel.name or wheel.name.endswith("-any.whl"):
            sys.exit(f"check_wheel: {wheel.name} is not named py3-none-<platform>")
        names = zipfile.ZipFile(wheel).namelist()
        libraries = [n for n in names if n.endswith((".so", ".dylib", ".dll"))]
        holds = {"one library": len(libraries) == 1, "the licence": any(n.endswith("licenses/LICENSE") for n in names),
                 "the notices": any(n.endswith("THIRD_PARTY_NOTICES.txt") for n in names), "the headers": {"pylloyal/include/pylloyal.h", "pylloyal/include/pylloyal.hpp"} <= set(names),
                 "the demo's model, once": sorted(n for n in names if n.endswith(".gguf")) == ["pylloyal/models/mmproj-tinyvlm-f16.gguf", "pylloyal/models/tinyvlm-f16.gguf"]}
        for what, there in holds.items():
            if not there:
                sys.exit(f"check_wheel: the wheel lacks {what}; it holds {names}")
        run(sys.executable, "-m", "venv", f"{scratch}/env")
        python = str(Path(scratch) / "env" / ("Scripts" if os.name == "nt" else "bin") / "python")
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--only-binary", ":all:", "-r", str(locked(Path(scratch), "numpy", "psutil")))
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", str(wheel))
        used = json.loads(run(python, "-W", "error", "-c", USE, cwd=scratch).splitlines()[-1])
        info = json.loads(run(str(Path(python).with_name("pylloyal")), "info", "--json", cwd=scratch))
        if not used["library"].startswith(str(Path(scratch).resolve())) or info["engine"]["cpu"] != "portable" or not (Path(used["include"]) / "pylloyal.h").exists():
            sys.exit(f"check_wheel: the installed package is not self-contained: {used} {info}")
        check_demo(python, Path(scratch))
        check_plan(python, Path(scratch))
        check_config(python, Path(scratch))
        # An editable install finds what CMake put elsewhere, although the clone has folders of the same names.
        clone = Path(scratch) / "clone"
        run("git", "clone", "--quiet", str(ROOT), str(clone))
        for name in (Path("_lib") / Path(libraries[0]).parent.name, Path("include")):
            (clone / "pylloyal" / name).mkdir(parents=True)
        run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--prefix", f"{scratch}/editable", "-e", str(clone),
            "-C", "cmake.define.PYL_CPU=portable")
        where, = {path.parent for path in (Path(scratch) / "editable").rglob("_editable_skbc_pylloyal.py")}
        script = f"import site; site.addsitedir({str(where)!r})\n{USE}"
        editable = json.loads(run(sys.executable, "-c", script, cwd=scratch).splitlines()[-1])
        if not editable["library"].startswith(str(where)):
            sys.exit(f"check_wheel: the editable install does not find its library: {editable}")
        if wheel.stat().st_size > MOST_BYTES:
            sys.exit(f"check_wheel: the wheel has {wheel.stat().st_size:,} bytes; {MOST_BYTES:,} are meant to be enough")
        args.out.mkdir(exist_ok=True)
        (args.out / wheel.name).write_bytes(wheel.read_bytes())
        size = zipfile.ZipFile(wheel).getinfo(libraries[0]).file_size
        print(f"{args.out.name}/{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MB, installed and used in an empty environment; library {size / 2**20:.1f} MB")
    return 0


def check_demo(python: str, folder: Path) -> None:
    """`pylloyal demo` without the clone: first without what reads pictures, which it must name; then with it, and then it must see."""
    command = (str(Path(python).with_name("pylloyal")), "demo", "--json", "--out", str(folder / "demo"))
    plain = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if plain.returncode != 1 or plain.stdout or "pylloyal[media]" not in plain.stderr or plain.stderr.count("\n") != 1:
        sys.exit(f"check_wheel: without Pillow the demo should say how to get it, and says: {plain}")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--only-binary", ":all:", "-r", str(locked(folder, "pillow", "av")))
    told = json.loads(run(*command, cwd=str(folder)))
    if told["encoder_runs"] != 1 or len(told["answers"]) != 6 or any(answer["text"] != answer["expected"] for answer in told["answers"]):
        sys.exit(f"check_wheel: the demo of the installed package is wrong: {told}")


def check_config(python: str, folder: Path) -> None:
    """A C program is built against the installed package with the words it gives, and runs without being told where the library is."""
    compiler = shutil.which("cc")
    if compiler is None:
        print("check_wheel: no C compiler here; `pylloyal config` was not tried")
        return
    command = str(Path(python).with_name("pylloyal"))
    words = shlex.split(run(command, "config", "--cflags", "--libs", cwd=str(folder)))
    models = Path(run(command, "config", "--prefix", cwd=str(folder)).strip()) / "models"
    run(compiler, str(ROOT / "libsrc" / "examples" / "c" / "consumer.c"), *words, "-o", str(folder / "consumer"))
    said = run(str(folder / "consumer"), str(models / "tinyvlm-f16.gguf"), str(models / "mmproj-tinyvlm-f16.gguf"), cwd=str(folder))
    if "where 'top right'" not in said or not said.endswith("left behind: 0\n"):
        sys.exit(f"check_wheel: the program of the installed package says {said!r}")


def check_plan(python: str, folder: Path) -> None:
    """A plan of the model that comes with the wheel, made without the library, opens with it."""
    code = """
import importlib.resources, json, pylloyal
from pylloyal._ffi import load
model = importlib.resources.files("pylloyal") / "models" / "tinyvlm-f16.gguf"
made = pylloyal.plan(model, memory="1GiB")
assert load._library is None and made.verdict == "fits"
with pylloyal.open(model, context=1024, memory="1GiB") as store:
    print(json.dumps([store.plan.totals["kv_bytes"], store.actual.kv_bytes, len(store.differences)]))
"""
    planned, actual, differences = json.loads(run(python, "-W", "error", "-c", code, cwd=str(folder)).splitlines()[-1])
    if planned != actual or differences:
        sys.exit(f"check_wheel: the plan of the installed package is wrong: {planned}, {actual}")


def locked(folder: Path, *packages: str) -> Path:
    """The lock's lines for these packages alone: what a user of the wheel gets, hash-checked."""
    text = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
    blocks = [block for block in text.replace("\\\n", "\0").splitlines() if block.startswith(tuple(f"{package}==" for package in packages))]
    path = folder / f"{packages[0]}.txt"
    path.write_text("\n".join(blocks).replace("\0", "\\\n") + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
