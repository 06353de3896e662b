"""Count the instructions of fixed pieces of work with callgrind, and hold them against a committed baseline: a slow-down shows on the noisiest machine.

    python tools/instructions.py [--update] [--only NAMES]

What is counted: the kernel's part of ticks, forks and prefills on the stub engine (libsrc/bench/stub_tick.cpp, preset stub: fixed flags, no CPU of its
own), less what the stub engine itself does; and planning a header in Python, as the difference of two runs. Counts belong to a compiler and an
interpreter: the baseline (fixtures/instructions.json) has a set for each, and where there is none the counts are printed and nothing fails. Neither
does anything where there is no valgrind. --update writes this machine's counts into the baseline, to be committed with the change that moved them.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / "fixtures" / "instructions.json"
TOLERANCE = 0.03  # more is refused; less than that below is told, for the baseline could be lower
STUB_TICK = ROOT / "build" / "stub" / "stub_tick"
PLANS = (1, 6)

# Which code the C library takes for copying and for exp depends on the machine's CPU; without these instructions there is but one choice.
STEADY = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX2,-AVX,-ERMS,-FSRM,-BMI2,-RTM,-MOVBE,-LZCNT,-SSE4_2,-SSE4_1,-SSSE3,-FMA,-FMA4", "PYTHONHASHSEED": "0", "LC_ALL": "C"}

PLANNED = """
import sys
sys.path.insert(0, sys.argv[3])
from pylloyal import plan
for _ in range(int(sys.argv[2])):
    plan(sys.argv[1], memory="24GiB", context="8k", branches=8, threads=2).to_json()
"""


class CountError(Exception):
    """Something could not be counted; the message says why."""


# ---------------------------------------------------------------------------------------------------------------------------------------- counting


def callgrind(*command: str, within: str = "", without: tuple[str, ...] = ()) -> int:
    """Instructions that a program executes.

    Parameters
    ----------
    within : str
        Only those of this function and of what it calls.
    without : tuple of str
        Not those of functions whose names have one of these in them, nor of what they call.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        valgrind = ["valgrind", "--tool=callgrind", "--compress-strings=no", "--compress-pos=no", f"--callgrind-out-file={out}", *([f"--toggle-collect={within}"] if within else [])]
        done = subprocess.run([*valgrind, *command], capture_output=True, text=True, check=False, env={**os.environ, **STEADY}, errors="replace")
        said = out.read_text(encoding="utf-8", errors="replace") if out.exists() else ""
    found = re.search(r"^summary: (\d+)$", said, re.M)
    if done.returncode or not found:
        words = "\n  ".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise CountError(f"`{' '.join(command[:3])} ...` gave no count (exit status {done.returncode}):\n  {words}")
    return int(found[1]) - sum(called(said, name) for name in without)


def called(said: str, name: str) -> int:
    """Instructions of all calls from elsewhere into functions with ``name`` in their names, and of what these call."""
    n, caller, callee, is_cost = 0, "", "", False
    for line in said.splitlines():
        if is_cost:  # the line after calls= has what the calls took
            n += int(line.split()[1]) if name in callee and name not in caller else 0
            is_cost = False
        elif line.startswith("fn="):
            caller = line
        elif line.startswith("cfn="):
            callee = line
        elif line.startswith("calls="):
            is_cost = True
    return n


def scenarios(program: Path) -> list[str]:
    """Names of the fixed pieces of work."""
    try:
        return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise CountError(f"{program} does not run ({error}); build it with `python tools/build_lib.py stub --no-install`") from error


def ticks(program: Path, names: list[str]) -> dict[str, int]:
    """Instructions of each piece, less the engine's own: its cells and logits, and its grammar's matching."""
    return {name: callgrind(str(program), name, within="measured", without=("StubContext::", "StubGrammar::")) for name in names}


def plans(header: Path) -> int:
    """Instructions of planning a header once, by what more of them take."""
    once, more = (callgrind(sys.executable, "-c", PLANNED, str(header), str(n), str(ROOT)) for n in PLANS)
    return (more - once) // (PLANS[1] - PLANS[0])


def write_header(path: Path, n_layers: int = 16, n_words: int = 8000) -> None:
    """A model of which there is only the header; its tensors are holes."""
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    shape = {"context_length": 32768, "embedding_length": 1024, "block_count": n_layers, "feed_forward_length": 4096, "attention.head_count": 16, "attention.head_count_kv": 4, "vocab_size": n_words}
    fields = [text("general.architecture") + struct.pack("<I", 8) + text("llama"), *(text(f"llama.{key}") + struct.pack("<II", 4, value) for key, value in shape.items()),
              text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, n_words) + b"".join(text(f"word {i}") for i in range(n_words))]
    tensors: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (1024, n_words)), ("output_norm.weight", (1024,)), ("output.weight", (1024, n_words))]
    block = (("attn_norm", (1024,)), ("attn_q", (1024, 1024)), ("attn_k", (1024, 256)), ("attn_v", (1024, 256)), ("attn_output", (1024, 1024)),
             ("ffn_norm", (1024,)), ("ffn_gate", (1024, 4096)), ("ffn_up", (1024, 4096)), ("ffn_down", (4096, 1024)))
    tensors += [(f"blk.{layer}.{name}.weight", dims) for layer in range(n_layers) for name, dims in block]
    infos, offset = b"", 0
    for name, dims in tensors:  # f16
        infos += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 1, offset)
        offset += -(-2 * math.prod(dims) // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join(fields) + infos
    path.write_bytes(head + b"\0" * (-len(head) % 32))
    os.truncate(path, path.stat().st_size + offset)


def count(only: str = "") -> dict[str, int]:
    """Everything, by name."""
    wanted = [name for name in only.split(",") if name]
    found = ticks(STUB_TICK, [name for name in scenarios(STUB_TICK) if not wanted or name in wanted])
    if not wanted or "plan" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            header = Path(folder) / "header.gguf"
            write_header(header)
            found["plan"] = plans(header)
    if missing := sorted(set(wanted) - set(found)):
        raise CountError(f"nothing is called {', '.join(missing)}")
    return found


# --------------------------------------------------------------------------------------------------------------------------------------- comparing


def keys() -> dict[str, str]:
    """What counts depend on, by kind: of compiled code the compiler, its flags and the C library; of Python the interpreter, as it was compiled."""
    compiler = os.environ.get("CXX", "c++")
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False) if shutil.which(compiler) else None
    words = done.stdout.splitlines()[0] if done and done.stdout else "no compiler"
    libc = " ".join(platform.libc_ver())
    flags = " ".join(filter(None, (os.environ.get("CXXFLAGS"), os.environ.get("LDFLAGS"))))
    return {"native": f"{platform.machine()}, {words}, {libc}{', ' + flags if flags else ''}",
            "python": f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}, {platform.python_compiler()}, {libc}"}


def kind_of(name: str) -> str:
    return "python" if name == "plan" else "native"


def compare(counts: Mapping[str, int], baseline: Mapping[str, Any], of: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Lines for a person, and those of them that are refused.

    Parameters
    ----------
    counts : mapping
        Instructions by name.
    baseline : mapping
        As committed: ``tolerance``, and ``counts`` by kind and key.
    of : mapping
        This machine's key of each kind.
    """
    tolerance = float(baseline.get("tolerance", TOLERANCE))
    lines, refused = [], []
    for name, n in counts.items():
        known = baseline.get("counts", {}).get(kind_of(name), {}).get(of[kind_of(name)])
        if known is None:
            lines.append(f"{name:18} {n:>14,}  no baseline for {of[kind_of(name)]}")
            continue
        if name not in known:
            refused.append(f"{name:18} {n:>14,}  is not in the baseline; add it with --update")
            lines.append(refused[-1])
            continue
        ratio = n / known[name]
        line = f"{name:18} {n:>14,}  {ratio - 1:+7.2%} of {known[name]:,}"
        if ratio > 1 + tolerance:
            line += f"  REFUSED: more than {tolerance:.0%}"
            refused.append(line)
        elif ratio < 1 - tolerance:
            line += "  faster: --update holds it to that"
        lines.append(line)
    return lines, refused


def updated(counts: Mapping[str, int], baseline: Mapping[str, Any], of: Mapping[str, str]) -> dict[str, Any]:
    """The baseline with these counts in the place of this machine's; other machines' stay."""
    sets: dict[str, dict[str, dict[str, int]]] = {kind: {key: dict(known) for key, known in by_key.items()} for kind, by_key in baseline.get("counts", {}).items()}
    for name, n in counts.items():
        sets.setdefault(kind_of(name), {}).setdefault(of[kind_of(name)], {})[name] = n
    return {"tolerance": baseline.get("tolerance", TOLERANCE), "counts": sets}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write this machine's counts into the baseline")
    parser.add_argument("--only", default="", help="comma-separated pieces of work; `plan` is the one in Python")
    args = parser.parse_args(argv)
    if shutil.which("valgrind") is None:
        print("instructions: there is no valgrind, so nothing was counted")
        return 0
    baseline = json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else {}
    try:
        counts = count(args.only)
    except CountError as error:
        print(f"instructions: {error}", file=sys.stderr)
        return 1
    of = keys()
    if args.update:
        baseline = updated(counts, baseline, of)
        BASELINE.write_text(json.dumps(baseline, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    lines, refused = compare(counts, baseline, of)
    print("\n".join(lines))
    if refused:
        print(f"instructions: {len(refused)} of {len(lines)} are refused; if that is meant, `python tools/instructions.py --update` and commit it with the reason", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
