"""Instruction counts are held against a baseline: what is refused, what is told, and what is another machine's. Nothing is counted here."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import instructions  # noqa: E402

from pylloyal import plan  # noqa: E402

OF = {"native": "x86_64, c++ 1", "python": "x86_64, CPython 3"}
BASELINE: dict[str, Any] = {"tolerance": 0.03, "counts": {"native": {OF["native"]: {"tick": 1000, "fork": 200}}, "python": {OF["python"]: {"plan": 5000}}}}


@pytest.mark.parametrize(("counts", "refused"), [
    ({"tick": 1000, "fork": 200, "plan": 5000}, []),
    ({"tick": 1030, "plan": 5150}, []),  # the tolerance itself
    ({"tick": 1031, "fork": 200}, ["tick"]),
    ({"tick": 2000, "fork": 400, "plan": 10000}, ["tick", "fork", "plan"]),  # the same work twice
    ({"tick": 10, "plan": 1}, []),
])
def test_more_instructions_than_the_tolerance_are_refused(counts: dict[str, int], refused: list[str]) -> None:
    lines, bad = instructions.compare(counts, BASELINE, OF)
    assert [line.split()[0] for line in bad] == refused
    assert all("REFUSED" in line for line in bad)
    assert [line.split()[0] for line in lines] == list(counts)
    assert set(bad) <= set(lines)


def test_fewer_instructions_are_told_so_that_the_baseline_can_follow() -> None:
    line, = instructions.compare({"tick": 900}, BASELINE, OF)[0]
    assert "faster" in line
    assert "-10.00%" in line


def test_another_compiler_or_interpreter_reports_and_fails_nothing() -> None:
    lines, bad = instructions.compare({"tick": 9000, "plan": 90000}, BASELINE, {"native": "x86_64, c++ 2", "python": "x86_64, CPython 4"})
    assert not bad
    assert all("no baseline for" in line for line in lines)
    # Each has its own key: another compiler does not excuse Python's count.
    _, bad = instructions.compare({"tick": 9000, "plan": 90000}, BASELINE, {**OF, "native": "x86_64, c++ 2"})
    assert [line.split()[0] for line in bad] == ["plan"]


def test_work_that_is_not_in_this_machines_baseline_is_refused() -> None:
    _, bad = instructions.compare({"tick": 1000, "new": 1}, BASELINE, OF)
    assert [line.split()[0] for line in bad] == ["new"]
    assert "--update" in bad[0]


def test_an_update_replaces_this_machines_counts_and_leaves_others() -> None:
    other = {**OF, "native": "arm64, c++ 3"}
    once = instructions.updated({"tick": 7, "plan": 8}, BASELINE, other)
    assert once["counts"]["native"] == {**BASELINE["counts"]["native"], other["native"]: {"tick": 7}}
    assert once["counts"]["python"][OF["python"]] == {"plan": 8}
    assert BASELINE["counts"]["python"][OF["python"]] == {"plan": 5000}
    assert instructions.compare({"tick": 7, "plan": 8}, once, other)[1] == []
    assert instructions.updated({"plan": 1}, {}, OF) == {"tolerance": instructions.TOLERANCE, "counts": {"python": {OF["python"]: {"plan": 1}}}}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The command line with counts of our own, and its baseline."""
    path = tmp_path / "instructions.json"
    path.write_text(json.dumps(BASELINE))
    monkeypatch.setattr(instructions, "BASELINE", path)
    monkeypatch.setattr(instructions, "keys", lambda: OF)
    monkeypatch.setattr(instructions.shutil, "which", lambda name: f"/bin/{name}")
    return path


def test_the_command_fails_on_a_slow_down_and_not_after_an_update(bench: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(instructions, "count", lambda _only: {"tick": 2000, "plan": 5000})
    assert instructions.main([]) == 1
    assert "1 of 2 are refused" in capsys.readouterr().err
    assert json.loads(bench.read_text()) == BASELINE
    assert instructions.main(["--update"]) == 0
    assert json.loads(bench.read_text())["counts"]["native"][OF["native"]] == {"tick": 2000, "fork": 200}
    assert instructions.main([]) == 0


def test_without_valgrind_nothing_is_counted_and_nothing_fails(bench: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(instructions.shutil, "which", lambda _name: None)
    monkeypatch.setattr(instructions, "count", lambda _only: pytest.fail("counted"))
    assert instructions.main(["--update"]) == 0
    assert "no valgrind" in capsys.readouterr().out
    assert json.loads(bench.read_text()) == BASELINE


# As callgrind writes it: main calls the kernel, that calls the engine twice, and the engine calls itself and the C library.
SAID = """# callgrind format
events: Ir
summary: 1000

fn=main
0 10
cfn=pyl::Store::tick()
calls=1 0
0 990

fn=pyl::Store::tick()
0 100
cob=/lib/libc.so.6
cfi=???
cfn=memcpy
calls=3 0
0 40
cfn=pyl::(anonymous namespace)::StubContext::decode(pyl::Batch const&)
calls=2 0
0 800
0 50

fn=pyl::(anonymous namespace)::StubContext::decode(pyl::Batch const&)
0 200
cfn=pyl::(anonymous namespace)::StubContext::fill(int)
calls=2 0
0 500
cfn=memcpy
calls=2 0
0 100

totals: 1000
"""


def test_what_the_engine_does_is_not_counted() -> None:
    assert instructions.called(SAID, "StubContext::") == 800
    assert instructions.called(SAID, "memcpy") == 140
    assert instructions.called(SAID, "StubGrammar::") == 0


@pytest.mark.parametrize(("said", "code", "n"), [(SAID, 0, 200), (SAID, 1, None), ("no count", 0, None)])
def test_what_callgrind_says(said: str, code: int, n: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        assert command[-2:] == ["program", "tick"]
        assert "--toggle-collect=measured" in command
        assert more["env"]["PYTHONHASHSEED"] == "0"
        Path(next(word for word in command if word.startswith("--callgrind-out-file=")).partition("=")[2]).write_text(said)
        return subprocess.CompletedProcess(command, code, "", "its last words")

    monkeypatch.setattr(instructions.subprocess, "run", run)

    def count() -> int:
        return instructions.callgrind("program", "tick", within="measured", without=("StubContext::", "StubGrammar::"))

    if n is None:
        with pytest.raises(instructions.CountError, match="its last words"):
            count()
    else:
        assert count() == n


def test_a_plan_is_counted_by_what_more_of_them_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "callgrind", lambda *command, **_more: 1_000_000 + 700 * int(command[-2]))
    assert instructions.plans(Path("header")) == 700


def test_the_header_that_is_planned_can_be_planned(tmp_path: Path) -> None:
    instructions.write_header(tmp_path / "header.gguf")
    made = plan(tmp_path / "header.gguf", memory="24GiB", context="8k", branches=8, threads=2)
    assert made.windows.served.tokens == 8192
    # It is the one that the counted program plans.
    done = subprocess.run([sys.executable, "-c", instructions.PLANNED, str(tmp_path / "header.gguf"), "1", str(ROOT)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_committed_baseline_has_a_set_for_every_piece_of_work() -> None:
    baseline = json.loads(instructions.BASELINE.read_text(encoding="utf-8"))
    assert 0 < baseline["tolerance"] <= 0.05
    assert set(baseline["counts"]) == {"native", "python"}
    source = (ROOT / "libsrc" / "bench" / "stub_tick.cpp").read_text(encoding="utf-8")
    for counts in baseline["counts"]["native"].values():
        assert all(f'{{"{name}", ' in source for name in counts)
        assert len(counts) == source.count('    {"')
        assert all(n > 1000 for n in counts.values())
