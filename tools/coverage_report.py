"""One table of what the tests run of the library and of the package, and the lines of the kernel that they do not.

    python tools/coverage_report.py build/coverage

Reads what a build with --coverage left in that folder (gcov's JSON; GCC's own program, nothing to install) and coverage.py's
``python.dat`` beside it, and writes ``report.txt`` there. The session `coverage` runs the tests first. It is a map, not a gate:
a branch that only an exception takes is not counted, and neither is a line the compiler made no code for.
"""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("libsrc/src/core", "libsrc/src/abi", "libsrc/src/engine/stub", "libsrc/src/engine/llama", "pylloyal/kernel", "pylloyal/_ffi")
LISTED = ("libsrc/src/core", "pylloyal/kernel")


class ReportError(Exception):
    """There is nothing to report on; the message says why."""


@dataclass
class File:
    """How often each line ran, and each branch on it was taken."""

    lines: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    branches: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add_branches(self, line: int, counts: list[int]) -> None:
        """The same source line compiled once more (a header in another file, a template for another type): taken there is taken."""
        known = self.branches[line]
        known += [0] * (len(counts) - len(known))
        for i, count in enumerate(counts):
            known[i] += count

    @property
    def missing(self) -> list[int]:
        return sorted(line for line, count in self.lines.items() if count == 0)

    def totals(self) -> tuple[int, int, int, int]:
        """Lines run, lines, branches taken, branches."""
        taken = [count > 0 for counts in self.branches.values() for count in counts]
        return len(self.lines) - len(self.missing), len(self.lines), sum(taken), len(taken)


def gcov_program() -> str:
    """GCOV, else the PATH's; it must be of the compiler that built the folder."""
    if found := os.environ.get("GCOV") or shutil.which("gcov"):
        return found
    raise ReportError("gcov was not found; it comes with GCC (set GCOV to another one)")


def native(folder: Path) -> dict[str, File]:
    """Our C++ sources, by path in the repository; also those of which nothing ever ran."""
    notes = sorted(folder.glob("CMakeFiles/*.dir/**/*.gcno"))
    if not notes:
        raise ReportError(f"{folder} holds no build with --coverage")
    files: dict[str, File] = defaultdict(File)
    for note in notes:
        done = subprocess.run([gcov_program(), "--json-format", "--branch-probabilities", "--stdout", str(note)], cwd=folder, capture_output=True, text=True, check=True)
        for text in done.stdout.splitlines():
            unit = json.loads(text)
            for entry in unit["files"]:
                path = (Path(unit["current_working_directory"]) / entry["file"]).resolve()
                if path.is_relative_to(ROOT / "libsrc" / "src"):
                    add_unit(files[path.relative_to(ROOT).as_posix()], entry["lines"])
    return files


def add_unit(file: File, lines: Iterable[dict[str, Any]]) -> None:
    """One compilation's view of a file."""
    for line in lines:
        file.lines[line["line_number"]] += line["count"]
        if counts := [branch["count"] for branch in line["branches"] if not branch["throw"]]:
            file.add_branches(line["line_number"], counts)


def python(folder: Path) -> dict[str, File]:
    """The package's modules, by path in the repository."""
    data = folder / "python.dat"
    if not data.exists():
        raise ReportError(f"{data} is missing: no Python test ran under coverage.py")
    measured = coverage.Coverage(data_file=str(data), config_file=str(ROOT / "pyproject.toml"))
    measured.load()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "python.json"
        measured.json_report(outfile=str(out))
        report = json.loads(out.read_text(encoding="utf-8"))
    files = {}
    for name, entry in report["files"].items():
        file = File()
        file.lines.update(dict.fromkeys(entry["executed_lines"], 1) | dict.fromkeys(entry["missing_lines"], 0))
        for at, count in (("executed_branches", 1), ("missing_branches", 0)):
            for line, _ in entry[at]:
                file.branches[line].append(count)
        files[Path(name).as_posix()] = file
    return files


def ranges(lines: list[int]) -> str:
    """``1-3, 7``"""
    out: list[list[int]] = []
    for line in lines:
        if out and line == out[-1][1] + 1:
            out[-1][1] = line
        else:
            out.append([line, line])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in out)


def share(part: int, whole: int) -> str:
    return f"{part:5d} of {whole:5d}  {100 * part / whole:5.1f} %" if whole else f"{'none':>23}"


def report(files: dict[str, File]) -> str:
    """The table, then what the listed parts leave out."""
    out = [f"{'':26}{'lines':>23}{'branches':>26}"]
    for part in PARTS:
        inside = {name: file for name, file in files.items() if name.startswith(part + "/")}
        sums = [sum(column) for column in zip(*(file.totals() for file in inside.values()), strict=True)] or [0, 0, 0, 0]
        out.append(f"{part.removeprefix('libsrc/'):26}{share(*sums[:2])}   {share(*sums[2:])}")
    for part in LISTED:
        out += ["", f"lines of {part.removeprefix('libsrc/')} that no test runs"]
        rows = [f"  {name}: {ranges(file.missing)}" for name, file in sorted(files.items()) if name.startswith(part + "/") and file.missing]
        out += rows or ["  none"]
    return "\n".join(out) + "\n"


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(arguments[0]).resolve()
    try:
        text = report(native(folder) | python(folder))
    except ReportError as error:
        print(f"coverage_report: {error}", file=sys.stderr)
        return 1
    (folder / "report.txt").write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
