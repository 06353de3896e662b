"""Make the environments of the benchmark's peers, and say how each peer is started.

    python tools/peers.py [--only llama-cpp-python,xllamacpp] [--out build/peers/peers.json]

Each peer has an environment of its own under build/peers, from a hash-locked list in requirements/; what has to be compiled is compiled once per
machine and kept in the per-user cache. The file it writes, and prints the path of, is what `pylloyal bench --peers` reads: the name of each runner
(tools/peers/*.py) and its command line. A peer that cannot be had has one that says why and fails, and so it is a failed row there, not a missing one.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cache import FetchError, cache_dir, locked, scratch_beside

ROOT = Path(__file__).resolve().parents[1]
RUNNERS = ROOT / "tools" / "peers"


@dataclass(frozen=True)
class Peer:
    """An environment, and the runners that live in it."""

    lock: str  # in requirements/
    runners: dict[str, tuple[str, ...]]  # name -> file in tools/peers and its arguments
    compiled: str | None = None  # package that comes as source and is compiled here, with the tools that the lock names
    build_env: dict[str, str] = field(default_factory=dict)


PEERS = {
    "llama-cpp-python": Peer("peer-llama-cpp-python.txt", {"llama-cpp-python": ("llama_cpp_python.py",), "llama-cpp-python batched": ("llama_cpp_python.py", "batched")},
                             # As `pip install` compiles it, for this machine; pictures and sound alone are left out.
                             compiled="llama-cpp-python", build_env={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}),
    "xllamacpp": Peer("peer-xllamacpp.txt", {"server": ("xllamacpp_server.py",), "server, one slot": ("xllamacpp_server.py", "one-slot"),
                                            "server, restored slots": ("xllamacpp_server.py", "restored")}),
}


def requirements_of(text: str) -> dict[str, list[str]]:
    """Blocks of a locked list by the package's name: a requirement (one for each marker) with the hashes that follow it."""
    blocks: dict[str, list[str]] = {}
    for block in text.replace("\\\n", " ").splitlines():
        if block.strip() and not block.startswith("#"):
            blocks.setdefault(block.split("==")[0].strip(), []).append(" ".join(block.split()))
    return blocks


def run(*command: str, env: dict[str, str] | None = None) -> str:
    """What a command printed; FetchError with its last words if it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | (env or {}), errors="replace")
    if done.returncode:
        words = "\n  ".join((done.stderr + done.stdout).strip().splitlines()[-12:])
        raise FetchError(f"`{' '.join(command)}` failed with exit status {done.returncode}:\n  {words}")
    return done.stdout


def pip(python: str, *arguments: str, env: dict[str, str] | None = None) -> str:
    return run(python, "-m", "pip", "--disable-pip-version-check", *arguments, env=env)


def cpu() -> str:
    """This machine's CPU: what is compiled here is compiled for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith("flags")), "") or platform.processor()


def key_of(peer: Peer) -> str:
    """Changes with whatever would make another environment, or another wheel."""
    compiler = os.environ.get("CXX", "c++")
    made_with = [run(compiler, "--version").splitlines()[0] if shutil.which(compiler) else "", cpu(), peer.compiled, peer.build_env] if peer.compiled else []
    what = (ROOT / "requirements" / peer.lock).read_bytes() + json.dumps([sys.version, platform.machine(), *made_with]).encode()
    return hashlib.sha256(what).hexdigest()[:16]


def wheel_of(python: Path, peer: Peer, requirement: str, key: str) -> Path:
    """The wheel of a package that is compiled here, out of the cache; minutes the first time."""
    final = cache_dir() / "peers" / f"{peer.compiled}-{key}"
    with locked(final.with_suffix(".lock"), f"the peer {peer.compiled}"):
        if not final.exists():
            print(f"compiling {peer.compiled} (once; minutes)", file=sys.stderr, flush=True)
            with scratch_beside(final) as scratch:
                (scratch / "requirement.txt").write_text(requirement + "\n", encoding="utf-8")
                (scratch / "wheel").mkdir()
                pip(str(python), "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--require-hashes", "-r", str(scratch / "requirement.txt"), "-w", str(scratch / "wheel"),
                    env=peer.build_env | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"})
                os.replace(scratch / "wheel", final)
    return next(final.glob("*.whl"))


def environment(name: str, folder: Path) -> Path:
    """The Python of a peer's environment, made or brought up to date if need be.

    Raises
    ------
    FetchError
        It cannot be had; pip's own last words.
    """
    peer = PEERS[name]
    place, key = folder / name, key_of(peer)
    python, stamp = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python"), place / ".locked"
    if python.exists() and stamp.exists() and stamp.read_text() == key:
        return python
    print(f"preparing {place}", file=sys.stderr, flush=True)
    run(sys.executable, "-m", "venv", "--clear", str(place))
    blocks = requirements_of((ROOT / "requirements" / peer.lock).read_text(encoding="utf-8"))
    own = "\n".join(blocks.pop(peer.compiled)) if peer.compiled else ""
    (place / "requirements.txt").write_text("\n".join(line for lines in blocks.values() for line in lines) + "\n", encoding="utf-8")
    pip(str(python), "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(place / "requirements.txt"))
    if peer.compiled:
        pip(str(python), "install", "--quiet", "--no-deps", str(wheel_of(python, peer, own, key)))
    stamp.write_text(key)
    return python


def missing(reason: str) -> list[str]:
    """A command that gives a reason, and fails."""
    return [sys.executable, "-c", "import sys; sys.exit(sys.argv[1])", " ".join(reason.split())]


def commands(names: list[str], folder: Path) -> dict[str, list[str]]:
    """Command lines of all runners."""
    found: dict[str, list[str]] = {}
    for name in names:
        try:
            python = str(environment(name, folder))
        except (FetchError, OSError) as error:
            print(f"peers: {name}: {error}", file=sys.stderr, flush=True)
            found |= {runner: missing(f"{name} cannot be had: {error}") for runner in PEERS[name].runners}
        else:
            found |= {runner: [python, str(RUNNERS / file), *arguments] for runner, (file, *arguments) in PEERS[name].runners.items()}
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PEERS), help="comma-separated, of: " + ", ".join(PEERS))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "peers" / "peers.json")
    args = parser.parse_args(argv)
    names = args.only.split(",")
    if unknown := sorted(set(names) - set(PEERS)):
        parser.error(f"no such peer: {', '.join(unknown)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(commands(names, ROOT / "build" / "peers"), indent=1) + "\n", encoding="utf-8")
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
