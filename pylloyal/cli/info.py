"""What the native library is, how it was built, and the devices it can use with their memory."""
from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .interrupts import Interrupts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Print what :func:`pylloyal.system_info` knows."""
    from ..kernel.system import system_info

    info = system_info()
    interrupts.check()
    sys.stdout.write((json.dumps(info, indent=2) if args.json else "\n".join(describe(info))) + "\n")
    return 0


def describe(info: dict[str, Any]) -> list[str]:
    """Lines for a person to read.

    Parameters
    ----------
    info : dict
        As :func:`pylloyal.system_info` gives it.
    """
    engine = info["engine"]
    rows = [("library", info["library"]), ("version", f"{info['version']} (ABI {info['abi_version']})"), ("engine", f"{engine['name']}, commit {engine['commit']}"),
            ("built for", f"{engine['cpu']} CPU, {engine['threads']} threads, {engine['attention']} attention"), ("backends", " ".join(info["backends"]) or "none"),
            ("cpu features", " ".join(info["cpu_features"]) or "none needed")]
    if info["cpu_missing"]:
        rows.append(("cpu lacks", " ".join(info["cpu_missing"]) + ": models cannot be opened on this machine with this library"))
    lines = [f"{name:<14}{value}" for name, value in rows]
    lines.append("devices" if info["devices"] else f"{'devices':<14}none")
    for device in info["devices"]:
        lines.append(f"  {device['name']:<12}{device['kind']}, {device['description'].strip()}, memory {memory(device['kind'], device['total_bytes'], device['free_bytes'])}")
    return lines


def memory(kind: str, total_bytes: int, free_bytes: int) -> str:
    """A device's memory in words.

    What is not known is reported as 0, or (by some engines) as all of it free, or more. For an accelerator neither number can be
    relied on then; for a CPU the total can.
    """
    if total_bytes == 0 or (kind != "cpu" and free_bytes >= total_bytes):
        return "unknown"
    return f"{size(total_bytes)}, free {'unknown' if kind == 'cpu' and free_bytes in (0, total_bytes) else size(free_bytes)}"


def size(n_bytes: int) -> str:
    """Bytes in GiB, or MiB below one."""
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"
