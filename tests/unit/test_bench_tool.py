"""tools/bench.py: what it has built and fetched before it measures, and what it does when something cannot be had. Nothing is built, fetched or measured here."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import bench
import build_lib
import pytest


class Runs:
    """Stands in for subprocess.run: tools print a path, or fail; the benchmark ends with a status."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.failing: set[str] = set()
        self.statuses: dict[str, int] = {}

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if "-m" in command:
            return subprocess.CompletedProcess(command, self.statuses.get(Path(command[4]).stem, 0))
        tool, *words = [Path(command[1]).name, *command[2:]]
        if self.failing & {tool, *words}:
            return subprocess.CompletedProcess(command, 1, "")
        return subprocess.CompletedProcess(command, 0, f"/cache/{words[0] if words else 'peers'}.{'gguf' if words else 'json'}\n")

    @property
    def measured(self) -> list[list[str]]:
        return [command[4:] for command in self.commands if "-m" in command]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    (tmp_path / "bench_control").touch()
    runs = Runs()
    monkeypatch.setattr(bench.subprocess, "run", runs)
    monkeypatch.setattr(build_lib, "build", lambda preset: tmp_path)
    return runs


def test_every_model_is_measured_with_the_control_and_the_peers(runs: Runs, tmp_path: Path) -> None:
    assert bench.main(["--out", "out", "--only", "ticks", "--quick"]) == 0
    control = str(tmp_path / "bench_control")
    assert runs.measured == [[f"/cache/{name}.gguf", "--control", control, "--peers", "/cache/peers.json", "--out", str(Path("out") / name), "--only", "ticks", "--quick"]
                             for name in ("smollm2", "gemma-3-270m")]
    assert runs.commands[-1][:4] == [sys.executable, "-m", "pylloyal", "bench"]


def test_a_file_is_measured_as_it_is_and_without_peers_if_so_asked(runs: Runs) -> None:
    assert bench.main(["--models", "a/b.gguf", "--no-peers", "--out", "out"]) == 0
    assert [command[0] for command in runs.measured] == ["a/b.gguf"]
    assert "--peers" not in runs.measured[0]
    assert str(Path("out") / "b") in runs.measured[0]
    assert len(runs.commands) == 1


@pytest.mark.parametrize(("missing", "n_measured"), [("gemma-3-270m", 1), ("peers.py", 2)])
def test_what_cannot_be_had_is_said_and_the_rest_measured(runs: Runs, missing: str, n_measured: int, capsys: pytest.CaptureFixture[str]) -> None:
    runs.failing = {missing}
    assert bench.main([]) == 1
    assert len(runs.measured) == n_measured
    assert f"{missing}" in capsys.readouterr().err


def test_the_status_is_the_highest(runs: Runs) -> None:
    runs.statuses = {"smollm2": 3, "gemma-3-270m": 1}
    assert bench.main([]) == 3


def test_without_a_control_nothing_is_measured(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bench_control").unlink()
    assert bench.main([]) == 1
    assert runs.commands == []
    assert "no bench_control" in capsys.readouterr().err
