"""The control and the product do the same work: the same greedy tokens, in the regime where decoding is exact (q8_0 weights, flash attention)."""
from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pylloyal.bench.machine import is_same_engine
from pylloyal.bench.product import Product
from pylloyal.bench.rows import Report
from pylloyal.bench.runner import Runner, RunnerError
from pylloyal.cli import main

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_branches": 9, "n_batch": 63, "n_threads": 1, "flash_attn": "on"}


def some(n: int, salt: int = 0) -> list[int]:
    return [(7 + i * 31 + i * i % 13 + salt * 17) % 250 for i in range(n)]


def control_command() -> list[str]:
    """Not skipped without it: the benchmark would compare nothing."""
    found = sorted((ROOT / "build").glob("*/bench_control*"))
    if not found:
        pytest.fail("bench_control is not built; `python3 tools/bootstrap.py lib` builds it (preset native)")
    return [str(found[0])]


@pytest.fixture(scope="module")
def control(tiny_path: Path) -> Iterator[Runner]:
    with Runner("control", control_command()) as runner:
        runner.ask("open", model=str(tiny_path), **OPTIONS)
        yield runner


@pytest.fixture
def product(tiny_path: Path) -> Iterator[Product]:
    product = Product()
    product.open(str(tiny_path), **OPTIONS)
    yield product
    product.close()


@pytest.mark.parametrize("n_branches", [1, 8])
@pytest.mark.parametrize("mode", ["none", "greedy"])
def test_ticks_are_the_same_tokens(control: Runner, product: Product, n_branches: int, mode: str) -> None:
    work = {"prefix": some(100), "n_branches": n_branches, "n_steps": 20, "mode": mode, "skip": 3}
    theirs = control.ask("ticks", **work)["tokens"]
    assert [len(lane) for lane in theirs] == [23] * n_branches
    assert product.ticks(**work)["tokens"] == theirs
    assert product.ticks(**work, at_once=True)["tokens"] == theirs
    assert control.ask("ticks", **work)["tokens"] == theirs  # what was there before is gone


def test_sampled_ticks_of_the_control_differ_by_branch_and_repeat(control: Runner, product: Product) -> None:
    work = {"prefix": some(50), "n_branches": 4, "n_steps": 12, "mode": "sampled", "skip": 1, "seed": 7}
    for ask in (lambda: control.ask("ticks", **work), lambda: product.ticks(**work)):
        tokens = ask()["tokens"]
        assert len({tuple(lane) for lane in tokens}) == 4
        assert ask()["tokens"] == tokens


def test_answers_to_questions_on_a_document_are_the_same_tokens(control: Runner, product: Product) -> None:
    # Questions of unlike lengths, together more than a dispatch: some end in the middle of one, one is cut in two.
    work = {"document": some(150, 1), "questions": [some(5 + 11 * i, i) for i in range(8)], "n_tokens": 24}
    theirs = control.ask("document", **work)
    assert [len(answer) for answer in theirs["answers"]] == [24] * 8
    assert len({tuple(answer) for answer in theirs["answers"]}) > 1
    ours = product.document(**work)
    assert ours["answers"] == theirs["answers"]
    for answer in (ours, theirs):
        assert 0 <= answer["prefill_s"] <= answer["seconds"]
    one = {**work, "n_tokens": 1}
    assert product.document(**one)["answers"] == control.ask("document", **one)["answers"] == [answer[:1] for answer in theirs["answers"]]


def test_forks_of_both(control: Runner, product: Product) -> None:
    work = {"prefix": some(200), "n": 8}
    assert product.forks(**work)["cells"] == 0
    for answer in (control.ask("forks", **work), product.forks(**work)):
        assert answer["rss_after_kib"] >= answer["rss_before_kib"] - 1024 > 0
    for answer in (control.ask("memory"), product.memory()):
        assert answer["peak_rss_kib"] >= answer["rss_kib"] // 2 > 0


@pytest.mark.parametrize(("work", "words"), [
    ({"op": "ticks", "prefix": [], "n_branches": 1, "n_steps": 1, "mode": "greedy"}, "prefix is empty"),
    ({"op": "ticks", "prefix": [1], "n_branches": 9, "n_steps": 1, "mode": "greedy"}, "more branches"),
    ({"op": "ticks", "prefix": [1], "n_branches": 1, "n_steps": 1, "mode": "best"}, "no mode is called best"),
    ({"op": "ticks", "prefix": some(1020), "n_branches": 8, "n_steps": 9, "mode": "greedy"}, "llama_decode gave 1"),
    ({"op": "document", "document": [1], "questions": [[]], "n_tokens": 1}, "a question is empty"),
    ({"op": "open"}, "model"),
    ({"op": "sing"}, "no operation is called sing"),
])
def test_what_the_control_refuses_it_refuses_in_words_and_goes_on(control: Runner, work: dict[str, Any], words: str) -> None:
    with pytest.raises(RunnerError, match=words):
        control.ask(work["op"], **{key: value for key, value in work.items() if key != "op"})
    assert control.is_alive
    assert control.ask("ticks", prefix=some(10), n_branches=1, n_steps=2, mode="greedy")["tokens"]


def test_a_control_without_its_model_says_so(tmp_path: Path) -> None:
    with Runner("control", control_command()) as runner:
        assert runner.versions["llama.cpp"]
        with pytest.raises(RunnerError, match="does not open"):
            runner.ask("open", model=str(tmp_path / "none.gguf"), **OPTIONS)
        with pytest.raises(RunnerError, match="nothing is open"):
            runner.ask("ticks", prefix=[1], n_branches=1, n_steps=1, mode="greedy")


def test_the_first_token_of_both_is_the_same(tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the group `starts` times from outside: the same text, one token."""
    document = tmp_path / "document.txt"
    document.write_text("the whale and the sea", encoding="utf-8")
    done = subprocess.run([*control_command(), "first", str(tiny_path), str(document), "1"], capture_output=True, check=True)
    assert main(["ask", str(tiny_path), "--document", str(document), "--raw", "--greedy", "--max-tokens", "1", "--threads", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["answers"][0]
    assert answer["tokens"] == 1
    assert done.stdout.decode("utf-8", "replace") == answer["text"] + "\n"
    missing = subprocess.run([*control_command(), "first", str(tiny_path), str(tmp_path / "none"), "1"], capture_output=True, text=True, check=False)
    assert (missing.returncode, missing.stderr.strip().endswith("none cannot be read")) == (1, True)
    wrong = subprocess.run([*control_command(), "second"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1
    assert "usage" in wrong.stderr


@pytest.mark.slow
def test_the_whole_benchmark_runs_on_a_tiny_model_beside_the_control(tiny_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from pylloyal.bench import noise

    monkeypatch.setattr(noise, "measure", lambda: noise.Noise(40, 0.02, 1.0, 0.0))
    groups = "ticks,contention,starts,headers"
    assert main(["bench", str(tiny_path), "--quick", "--only", groups, "--threads", "1", "--control", shlex.join(control_command()), "--json"]) == 0
    report = Report.from_lines(capsys.readouterr().out)
    assert {row.group for row in report.rows} == set(groups.split(","))
    assert is_same_engine(report.environment)
    assert report.environment["control"]["llama.cpp"] == report.environment["engine_commit"]
    assert all(row.ratio for row in report.rows if row.label == "product")
