"""Measure what this library costs on this machine and model, beside a program that uses the engine directly (--control) and beside other
packages (--peers), in turns. Ratios mean something, absolute times are of this machine on this day; docs/benchmark.md tells what each row is.

Exit status: 0 measured, 1 a row failed or there was an error, 3 a group was refused, for the machine was too noisy to tell, and nothing else failed.
"""
from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .. import errors
from .commands import UsageError
from .interrupts import Interrupts
from .terminal import DIM, Terminal

if TYPE_CHECKING:
    from ..bench.rows import Report

NOISY = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF file")
    parser.add_argument("--only", metavar="GROUPS", help="comma-separated: ticks, forks, memory, ... (default: all; an unknown one is told what there is)")
    parser.add_argument("--control", metavar="PROGRAM", help="the raw engine's runner (bench_control of the build); without it there are no ratios to the engine")
    parser.add_argument("--peers", metavar="FILE", help="JSON object: a peer's name to its runner's command line, text or a list of words")
    parser.add_argument("--threads", metavar="N", type=int, help="for every side (default: the cores this process may use)")
    parser.add_argument("--quick", action="store_true", help="little work, few repetitions: shows that it runs, and its figures mean nothing")
    parser.add_argument("--even-if-noisy", action="store_true", help="report although the machine is too noisy, and mark every row")
    parser.add_argument("--json", action="store_true", help="print JSON lines: what it was measured on, then a row each")
    parser.add_argument("--out", metavar="FOLDER", help="write rows.jsonl, table.txt and picture.svg there, anew after each group")


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Measure, and tell."""
    from ..bench import noise
    from ..bench.groups import GROUPS, measure_all, was_refused
    from ..bench.setting import Setting
    from ..bench.table import progress

    names = list(GROUPS) if args.only is None else [name for name in args.only.split(",") if name]
    if unknown := [name for name in names if name not in GROUPS]:
        raise UsageError(f"--only: no group is called {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    if not names:
        raise UsageError("--only names no group")
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads {args.threads}: 1 or more")
    if not args.model.startswith("stub:"):
        Path(args.model).open("rb").close()  # said at once, not by every row
    setting = Setting(args.model, args.threads or noise.usable_threads(), shlex.split(args.control) if args.control else None, _peers(args.peers), args.quick)
    err = Terminal(sys.stderr)
    out = None if args.out is None else Path(args.out)
    with interrupts.at_once():
        report = measure_all(setting, names, noise.measure, even_if_noisy=args.even_if_noisy, seen=lambda row: err.write(err.paint(progress(row), DIM) + "\n"),
                             done=lambda report: None if out is None else _write(report, out))
    if args.json:
        sys.stdout.write(report.to_lines())
    else:
        from ..bench.table import table

        Terminal(sys.stdout).write(table(report))
    refused = [row for row in report.rows if was_refused(row)]
    for row in refused:
        err.write(f"pylloyal: {row.group}: {row.failed}\nNothing of it is reported; with --even-if-noisy it would be, every row marked as contended.\n")
    if any(row.failed is not None for row in report.rows if row not in refused):
        return 1
    return NOISY if refused else 0


def _peers(path: str | None) -> dict[str, list[str]]:
    if path is None:
        return {}
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise ValueError("no JSON object")
        commands = {name: shlex.split(command) if isinstance(command, str) else [str(word) for word in command] for name, command in given.items()}
    except (ValueError, TypeError) as error:
        raise errors.PylloyalError(f"{path}: {error}") from error
    if empty := [name for name, command in commands.items() if not command]:
        raise errors.PylloyalError(f"{path}: no command for {', '.join(empty)}")
    return commands


def _write(report: Report, folder: Path) -> None:
    from ..bench.picture import picture
    from ..bench.table import table

    folder.mkdir(parents=True, exist_ok=True)
    for name, words in (("rows.jsonl", report.to_lines()), ("table.txt", table(report)), ("picture.svg", picture(report))):
        unfinished = folder / f"{name}.new"
        unfinished.write_text(words, encoding="utf-8")
        unfinished.replace(folder / name)  # at once: a run that is stopped here leaves what was
