"""Measure what the documentation claims: the library, the raw engine on the same archives and the peers, on real models, in turns.

    python tools/bench.py [--models smollm2,gemma-3-270m] [--no-peers] [--out build/bench] [what `pylloyal bench` takes ...]

Builds the library and the control (preset native), makes the peers' environments, fetches the models, and runs `pylloyal bench` on each; rows, a
table and a picture are in OUT/MODEL, anew after each group. What cannot be had is said, and the rest is measured. Nothing else should be running.

Exit status: that of `pylloyal bench`, the highest of all models; 1 too when a model or the peers could not be had.
"""
from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build_lib

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("smollm2", "gemma-3-270m")


def path_from(tool: str, *words: str) -> str | None:
    """The path that a tool of this folder prints; None, and its words on standard error, when it fails."""
    done = subprocess.run([sys.executable, str(ROOT / "tools" / tool), *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"bench: {tool} {' '.join(words)} failed", file=sys.stderr, flush=True)
        return None
    return done.stdout.strip()


def control_of(folder: Path) -> Path:
    """The control in a build folder.

    Raises
    ------
    build_lib.BuildError
        It is not there.
    """
    found = sorted(folder.glob("bench_control*"))
    if not found:
        raise build_lib.BuildError(f"no bench_control in {folder}")
    return found[0]


def command(model: str, name: str, control: Path, peers: str | None, out: Path, rest: Sequence[str]) -> list[str]:
    """`pylloyal bench` for one model."""
    return [sys.executable, "-m", "pylloyal", "bench", model, "--control", str(control), *(["--peers", peers] if peers else []), "--out", str(out / name), *rest]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated names of tools/fetch_model.py, or paths of GGUF files")
    parser.add_argument("--no-peers", action="store_true", help="the raw engine alone")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench")
    args, rest = parser.parse_known_args(argv)
    try:
        control = control_of(build_lib.build("native"))
    except build_lib.BuildError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    peers = None if args.no_peers else path_from("peers.py")
    statuses = [0 if peers or args.no_peers else 1]
    for name in args.models.split(","):
        model = name if name.endswith(".gguf") else path_from("fetch_model.py", name)
        if model is None:
            statuses.append(1)
            continue
        print(f"\nbench: {name}", file=sys.stderr, flush=True)
        statuses.append(subprocess.run(command(model, Path(name).stem, control, peers, args.out, rest), check=False, cwd=ROOT).returncode)
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
