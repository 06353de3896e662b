"""Runners that work, refuse, die, babble and hang; the product as one; the noise of a machine; and the command that puts them together."""
from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pylloyal.bench import documents, groups, growth, noise, sides, ticks
from pylloyal.bench.contention import hogs
from pylloyal.bench.noise import Noise
from pylloyal.bench.pairs import measure
from pylloyal.bench.product import Product
from pylloyal.bench.questions import Work
from pylloyal.bench.rows import Report, Row
from pylloyal.bench.runner import Runner, RunnerError, RunnerTimeoutError
from pylloyal.bench.setting import PRODUCT, Setting
from pylloyal.bench.starts import timed
from pylloyal.cli import main

HELLO = 'print(\'{"runner": "test", "versions": {"it": 1}}\', flush=True)'
ECHO = HELLO + """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"error": asked["why"]} if asked["op"] == "fail" else {"seen": asked}), flush=True)
"""
posix = pytest.mark.skipif(os.name != "posix", reason="needs signals as POSIX has them")
Script = Callable[[str], list[str]]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(code: str) -> list[str]:
        path = tmp_path / f"runner{len(list(tmp_path.iterdir()))}.py"
        path.write_text(textwrap.dedent(code))
        return [sys.executable, str(path)]

    return write


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# ----------------------------------------------------------------------------------------------------------------- runners


def test_a_runner_answers_and_goes_on_after_what_it_refuses(script: Script) -> None:
    with Runner("test", script(ECHO), env={"COLOUR": "red"}) as runner:
        assert runner.versions == {"it": 1}
        assert runner.ask("work", ids=[1, 2])["seen"] == {"op": "work", "ids": [1, 2]}
        with pytest.raises(RunnerError, match=r"^test, fail: no room$"):
            runner.ask("fail", why="no room")
        assert runner.is_alive
        assert runner.ask("work")["seen"] == {"op": "work"}
    assert not runner.is_alive
    runner.close()
    with pytest.raises(RunnerError, match="test has ended"):
        runner.ask("work")


def test_a_runner_that_dies_is_told_with_its_last_words(script: Script) -> None:
    with Runner("test", script(HELLO + "\nimport sys\ninput()\nprint('first', file=sys.stderr)\nsys.exit('no weights here')")) as runner:
        with pytest.raises(RunnerError, match=r"test ended with status 1; its last words: first \| no weights here"):
            runner.ask("work")
        assert not runner.is_alive


@posix
def test_a_runner_that_is_killed_is_told_by_its_signal(script: Script) -> None:
    code = HELLO + "\nimport os, signal\ninput()\nos.kill(os.getpid(), signal.SIGSEGV)"
    with Runner("test", script(code)) as runner, pytest.raises(RunnerError, match="died of SIGSEGV"):
        runner.ask("work")


@pytest.mark.parametrize("rubbish", ["loading model ...", "[1, 2]", "", "NaN"])
def test_a_runner_that_prints_rubbish_is_ended(script: Script, rubbish: str) -> None:
    code = HELLO + f"\nimport sys\ninput()\nprint({rubbish!r}, flush=True)\nprint('why', file=sys.stderr, flush=True)\ninput()"
    with Runner("test", script(code)) as runner:
        with pytest.raises(RunnerError, match="said what is no answer"):
            runner.ask("work")
        assert not runner.is_alive


@posix
def test_a_runner_that_hangs_is_ended_with_what_it_started(script: Script, tmp_path: Path) -> None:
    held = tmp_path / "held"
    os.mkfifo(held)
    code = HELLO + f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; f = open({str(held)!r}, 'w'); print('ready', flush=True); time.sleep(60); f.write('still here')"], stdout=subprocess.PIPE)
child.stdout.readline()
print("busy with a thought", file=sys.stderr, flush=True)
print('{{}}', flush=True)
time.sleep(60)
"""
    end = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    with Runner("test", script(code)) as runner:
        runner.ask("work")  # its second line: now the child is there
        with pytest.raises(RunnerTimeoutError, match=r"no answer in 0.05 s; its last words: busy with a thought"):
            runner.ask("work", timeout=0.05)
        assert not runner.is_alive
    os.set_blocking(end, True)
    with os.fdopen(end, "rb") as file:
        assert file.read() == b""  # comes to an end when nobody holds the other one


def test_what_is_no_runner_does_not_start(script: Script, tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match="test does not start"):
        Runner("test", [str(tmp_path / "nothing")])
    with pytest.raises(RunnerError, match=r"test began with \{.*\"model\""):
        Runner("test", script("print('{\"model\": 1}')"))
    with pytest.raises(RunnerError, match="said what is no answer"):
        Runner("test", script("print('usage: something')"))
    with pytest.raises(RunnerError, match=r"ended with status 3; its last words: .*no such library"):
        Runner("test", script("import sys\nprint('no such library', file=sys.stderr)\nsys.exit(3)"))
    with pytest.raises(RunnerTimeoutError):
        Runner("test", script("input()"), timeout=0.05)


def test_a_side_that_cannot_be_had_fails_its_own_rows_only(script: Script) -> None:
    setting = Setting("stub:", 1, control=script("import sys; sys.exit('no engine')"), product=script(ECHO))
    with sides.both(setting, n_ctx=256, n_branches=2) as found:
        assert found.ask("product", "work")["seen"]["op"] == "work"
        with pytest.raises(RunnerError, match="no engine"):
            found.ask("control", "work")
    with sides.both(Setting("stub:", 1, product=script(ECHO))) as found:
        assert found.control("path", lambda answer: 1.0, "work") is None


TELLS_ITS_PID = HELLO + "\nimport json, os, sys\nfor line in sys.stdin:\n    print(json.dumps({'pid': os.getpid()}), flush=True)"


def test_both_sides_are_new_processes_when_they_are_opened_again(script: Script) -> None:
    setting = Setting("stub:", 1, control=script(TELLS_ITS_PID), product=script(TELLS_ITS_PID))
    with sides.both(setting, n_ctx=256, n_branches=2) as found:
        before = {found.ask(name, "work")["pid"] for name in ("product", "control")}
        found.open()
        assert all(is_gone(pid) for pid in before)
        after = {found.ask(name, "work")["pid"] for name in ("product", "control")}
    assert len(before | after) == 4
    assert all(is_gone(pid) for pid in after)


def test_a_side_that_cannot_be_opened_again_has_failed(script: Script, tmp_path: Path) -> None:
    once = f"import os, sys\nif os.path.exists({str(tmp_path / 'was')!r}):\n    sys.exit('the ship sailed')\nopen({str(tmp_path / 'was')!r}, 'w').close()\n"
    setting = Setting("stub:", 1, control=script(once + TELLS_ITS_PID), product=script(TELLS_ITS_PID))
    with sides.both(setting, n_ctx=256, n_branches=2) as found:
        beside = [found.control("c", lambda answer: 1.0, "work"), found.product("p", lambda answer: 2.0, "work")]
        measure(beside, 2, n_warm=0, before=found.open)
    assert beside[0] is not None
    assert (str(beside[0].reason).partition("; ")[0], beside[0].figures) == ("control ended with status 1", [])
    assert (beside[1].reason, beside[1].figures) == (None, [2.0, 2.0])  # type: ignore[union-attr]


def test_a_fresh_side_is_a_new_process_every_time(script: Script) -> None:
    setting = Setting("stub:", 1, product=script(TELLS_ITS_PID))
    run = sides.fresh(setting, "product", {"n_ctx": 256, "n_branches": 1}, lambda runner: float(runner.ask("work")["pid"]))
    pids = {int(run()), int(run())}
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids)


def test_whole_processes_that_fail_have_no_time() -> None:
    with pytest.raises(RunnerError, match="ended with status 1: no such file"):
        timed([sys.executable, "-c", "import sys; sys.exit('no such file')"])()
    assert timed([sys.executable, "-c", "pass"])() > 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs to see processes")
def test_hogs_are_there_while_they_should_and_gone_after() -> None:
    before = children()
    with hogs(noise.usable_cores()[:1]):
        spinning = children() - before
        assert len(spinning) == 1
    assert all(is_gone(pid) for pid in spinning)


def children() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                    found.add(int(entry.name))
    return found


# ----------------------------------------------------------------------------------------------------- the product's runner


@pytest.fixture
def product() -> Iterator[Product]:
    product = Product()
    product.open("stub:n_vocab=300", n_ctx=1024, n_branches=9, n_threads=1, n_batch=64)
    yield product
    product.close()


def test_the_product_ticks_as_many_tokens_as_it_is_asked(product: Product) -> None:
    for mode in ("none", "greedy", "sampled"):
        work: dict[str, Any] = {"prefix": [65, 66, 67], "n_branches": 4, "n_steps": 20, "mode": mode, "skip": 2}
        answer = product.ticks(**work)
        assert [len(lane) for lane in answer["tokens"]] == [22] * 4
        assert answer["seconds"] > 0
        assert product.store.pressure().cells_used == 0
        if mode != "none":
            assert product.ticks(**work, at_once=True)["tokens"] == answer["tokens"]
            flags = product.store.model.vocab.flags(sorted({token for lane in answer["tokens"] for token in lane}))
            assert not any(flag.name and "END_OF_GENERATION" in flag.name for flag in flags)


def test_the_product_answers_as_a_fresh_store_would(product: Product) -> None:
    questions = [[70, 71], [72], [73] * 90]
    answers = product.document(document=[65] * 70, questions=questions, n_tokens=12)["answers"]
    assert [len(answer) for answer in answers] == [12] * 3
    for question, answer in zip(questions, answers, strict=True):
        assert product.document(document=[65] * 70, questions=[question], n_tokens=12)["answers"] == [answer]
    assert product.document(document=[65] * 70, questions=questions, n_tokens=1)["answers"] == [answer[:1] for answer in answers]


def test_less_work_than_asked_is_no_figure(product: Product) -> None:
    with pytest.raises(ValueError, match=r"branch 0 has \d+ of 200 tokens: the cells ran out"):
        product.ticks(prefix=[65], n_branches=8, n_steps=200, mode="greedy", at_once=True)
    with pytest.raises(ValueError, match="the cells ran out"):
        product.document(document=[65], questions=[[66]] * 8, n_tokens=200)
    assert product.store.pressure().cells_used == 0  # and the next operation finds an empty store
    assert product.ticks(prefix=[65], n_branches=8, n_steps=2, mode="greedy")["tokens"]


def test_forks_take_no_cells(product: Product) -> None:
    answer = product.forks(prefix=[65] * 100, n=8)
    assert answer["cells"] == 0
    assert set(answer) == {"seconds", "rss_before_kib", "rss_after_kib", "cells"}
    assert set(product.memory()) == {"peak_rss_kib", "rss_kib"}


def test_the_product_as_a_process() -> None:
    with Runner("product", PRODUCT) as runner:
        assert runner.versions["engine"]["name"]
        with pytest.raises(RunnerError, match="nothing is open"):
            runner.ask("ticks", prefix=[1], n_branches=1, n_steps=1, mode="greedy")
        runner.ask("open", model="stub:", n_ctx=256, n_branches=2, n_threads=1)
        for op, arguments, words in (("sing", {}, "no operation is called sing"), ("open", {}, "TypeError"), ("ticks", {"prefix": [1], "n_branches": 1, "n_steps": 1, "mode": "best"}, "no mode is called best"),
                                     ("ticks", {"prefix": [1], "n_branches": 2, "n_steps": 1, "mode": "greedy"}, "NoLeaseError"), ("document", {"document": [1], "questions": [[]], "n_tokens": 1}, "a question is empty")):
            with pytest.raises(RunnerError, match=words):
                runner.ask(op, **arguments)
        assert len(runner.ask("ticks", prefix=[65], n_branches=1, n_steps=3, mode="greedy")["tokens"][0]) == 3
        assert runner.ask("close") == {}


# ------------------------------------------------------------------------------------------------------------------- noise


def cores(*kinds: tuple[float, float]) -> noise.Probe:
    """Two cores whose work took these seconds, twenty times in turn, and had the core for so many of them."""
    return lambda _: [[kinds[i % len(kinds)] for i in range(20)]] * 2


QUIET = cores((0.020, 0.020))


@pytest.mark.parametrize(("probe", "is_quiet", "words"), [
    (QUIET, True, "percentile 1.00"),
    (cores((0.020, 0.020), (0.020, 0.020), (0.030, 0.030)), False, "percentile 1.50"),
    (cores((0.040, 0.020)), False, "waited 50.0% of the time"),  # a steady neighbour: even, and yet half of each core is gone
])
def test_noise_is_uneven_work_or_work_that_waits(probe: noise.Probe, is_quiet: bool, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_jiffies", lambda: None)
    found = noise.measure([0, 1], probe)
    assert (found.is_quiet, found.n, found.steal) == (is_quiet, 40, None)
    assert words in found.describe()
    assert found.to_json()["is_quiet"] is is_quiet


@pytest.mark.parametrize(("stolen", "is_quiet"), [(1, True), (30, False)])
def test_noise_is_time_that_was_stolen(stolen: int, is_quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(100, 5000), (100 + stolen, 5100)])
    monkeypatch.setattr(noise, "_jiffies", lambda: next(readings))
    found = noise.measure([0], QUIET)
    assert (found.steal, found.is_quiet) == (stolen / 100, is_quiet)
    assert f"{stolen}.0% of the cores' time" in found.describe()


def test_the_real_probe_works_on_every_core() -> None:
    times = noise._run(noise.usable_cores())
    assert [len(core) for core in times] == [20] * len(noise.usable_cores())
    assert all(seconds > 0 and used >= 0 for core in times for seconds, used in core)


# --------------------------------------------------------------------------------------------------------------- the whole


@pytest.fixture
def two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    class Good:
        @staticmethod
        def rows(setting: Setting) -> Iterator[Row]:
            yield Row("good", "w", "product", "p", "ms", 1, 1.0, 1.0, 1.0)

    class Bad:
        @staticmethod
        def rows(setting: Setting) -> Iterator[Row]:
            yield Row("bad", "w", "product", "p", "ms", 1, 2.0, 2.0, 2.0)
            raise RuntimeError("half way")

    monkeypatch.setattr(groups, "GROUPS", {"good": "", "bad": ""})
    monkeypatch.setitem(sys.modules, "pylloyal.bench.good", Good)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pylloyal.bench.bad", Bad)  # type: ignore[arg-type]


CALM = Noise(40, 0.02, 1.0, 0.0)
WILD = Noise(40, 0.02, 9.0, 0.0)


def steps(*noises: Noise) -> Callable[[], Noise]:
    rest = list(noises)
    return lambda: rest.pop(0)


def test_a_group_that_raises_is_a_failed_row_after_those_it_gave(two_groups: None) -> None:
    seen: list[Row] = []
    report = groups.measure_all(Setting("stub:", 1), ["bad", "good"], steps(CALM, CALM, CALM, CALM), seen=seen.append)
    assert [(row.group, row.median, row.failed) for row in report.rows] == [("bad", 2.0, None), ("bad", None, "RuntimeError: half way"), ("good", 1.0, None)]
    assert seen == report.rows
    assert report.environment["state"] == "quiet"
    assert report.environment["noise"].keys() == {"bad", "good"}
    assert (report.environment["noise"]["good"]["before"]["spread"], report.environment["noise"]["good"]["after"]["is_quiet"]) == (1.0, True)


@pytest.mark.parametrize(("noises", "when", "n_seen"), [([WILD] * 5, "before", 0), ([CALM, WILD, CALM, WILD], "after", 1), ([CALM, WILD, WILD, CALM], "after", 1)])
def test_a_group_measured_in_noise_is_refused_and_the_others_are_not(two_groups: None, noises: list[Noise], when: str, n_seen: int) -> None:
    seen: list[Row] = []
    kept: list[int] = []
    report = groups.measure_all(Setting("stub:", 1), ["bad", "good"], steps(*noises, CALM, CALM), seen=seen.append, done=lambda so_far: kept.append(len(so_far.rows)))
    refused, good = report.rows
    assert (refused.group, refused.median, groups.was_refused(refused), groups.was_refused(good)) == ("bad", None, True, False)
    assert re.fullmatch(f"too noisy {when} it: the same work took .* 9.00 .*", refused.failed or "")
    assert (good.median, good.state, report.environment["state"]) == (1.0, "quiet", "quiet")
    assert (len(seen), kept) == (2 * n_seen + 1, [1, 2])


def test_noise_that_passes_is_waited_for(two_groups: None) -> None:
    report = groups.measure_all(Setting("stub:", 1), ["good"], steps(WILD, WILD, WILD, WILD, CALM, WILD, CALM, CALM))
    assert [(row.median, row.state) for row in report.rows] == [(1.0, "quiet")]
    assert report.environment["noise"]["good"]["after"]["is_quiet"]


@pytest.mark.parametrize("noises", [[WILD] * 5 + [CALM], [CALM, WILD, WILD, WILD]])
def test_even_if_noisy_every_row_is_marked(two_groups: None, noises: list[Noise]) -> None:
    report = groups.measure_all(Setting("stub:", 1), ["good"], steps(*noises), even_if_noisy=True)
    assert [row.state for row in report.rows] == ["contended"]
    assert report.environment["state"] == "contended"


def test_a_quick_run_holds_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    class Promising:
        @staticmethod
        def rows(setting: Setting) -> Iterator[Row]:
            yield Row("promising", "w", "product", "p", "ms", 1, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, bound=1.0)

    monkeypatch.setitem(sys.modules, "pylloyal.bench.promising", Promising)  # type: ignore[arg-type]
    for is_quick, kept in ((False, False), (True, None)):
        row, = groups.measure_all(Setting("stub:", 1, is_quick=is_quick), ["promising"], steps(CALM, CALM)).rows
        assert (row.ratio, row.is_kept) == (2.0, kept)


def test_ticks_promise_one_thing_beside_the_sampler_and_another_beside_none(script: Script) -> None:
    """The group itself, with runners that answer at once."""
    answering = script(HELLO + "\nimport sys\nfor line in sys.stdin:\n    print('{\"seconds\": 1.0}', flush=True)")
    rows = list(ticks.rows(Setting("stub:", 1, control=answering, product=answering, is_quick=True)))
    promised = {(row.what.split(", ")[1], row.path.split(",")[0]): row.bound for row in rows if row.label == "product"}
    assert set(promised.values()) == {1.0, 1.03}
    assert {what for (what, _), bound in promised.items() if bound == 1.03} == {"beside no sampling"}
    assert {what for (what, _), bound in promised.items() if bound == 1.0} == {"sampled", "greedy"}
    assert all(row.ratio == 1.0 for row in rows if row.label == "product")


@pytest.mark.parametrize("rows", [ticks.rows, growth.rows, partial(documents.rows_of_work, todo=Work([65] * 60, [[67]], 5, "letters"))], ids=["ticks", "growth", "documents"])
def test_every_round_of_these_is_of_new_processes(script: Script, monkeypatch: pytest.MonkeyPatch, rows: Callable[[Setting], Iterable[Row]]) -> None:
    """Its control is asked for nothing twice."""
    answering = script(HELLO + "\nimport json, sys\nfor line in sys.stdin:\n    n = json.loads(line).get('n_tokens', 0)\n    print(json.dumps({'seconds': 1.0, 'n_read': 2, 'answers': [[68] * n]}), flush=True)")
    asked: list[str] = []
    n_asked: list[int] = []
    opens, asks = sides.Sides.open, sides.Sides.ask

    def opened(self: sides.Sides) -> None:
        asked.clear()
        opens(self)

    def ask(self: sides.Sides, name: str, op: str, **arguments: Any) -> dict[str, Any]:
        if name == "control":
            asked.append(json.dumps([op, arguments], sort_keys=True))
            n_asked.append(asked.count(asked[-1]))
        return asks(self, name, op, **arguments)

    monkeypatch.setattr(sides.Sides, "open", opened)
    monkeypatch.setattr(sides.Sides, "ask", ask)
    found = list(rows(Setting("stub:", 1, control=answering, product=answering, is_quick=True)))
    assert {row.failed for row in found if row.label != "peer"} == {None}
    assert max(row.n for row in found if row.label == "control") > 1
    assert set(n_asked) == {1}


def test_every_group_has_a_module_with_rows() -> None:
    for name in groups.GROUPS:
        assert callable(importlib.import_module(f"pylloyal.bench.{name}").rows)


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "measure", lambda: CALM)


@pytest.mark.slow
def test_the_command_measures_and_writes(calm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], script: Script) -> None:
    """On the engine without weights; its product is also put in the control's place, so every row has a ratio."""
    control = " ".join(PRODUCT)
    assert main(["bench", "stub:", "--only", "ticks,growth,forks,memory", "--quick", "--threads", "1", "--control", control, "--json", "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    report = Report.from_lines(out)
    assert report == Report.from_lines((tmp_path / "out" / "rows.jsonl").read_text())
    assert (report.environment["model"], report.environment["n_threads"], report.environment["is_quick"]) == ({"name": "stub:"}, 1, True)
    assert len(err.splitlines()) == len(report.rows)
    assert {row.group for row in report.rows} == {"ticks", "growth", "forks", "memory"}
    assert [row.failed for row in report.rows if row.failed] == []
    ticked = [row for row in report.rows if row.group == "ticks"]
    assert [sum(row.label == label for row in ticked) for label in ("control", "product")] == [9, 12 + 3]
    assert all(row.ratio and row.bound is None for row in ticked if row.label == "product")  # a quick run keeps no promise
    curve = [(row.x, row.label) for row in report.rows if row.group == "growth" and row.x is not None]
    assert curve == [(x, label) for x in (1, 4, 16) for label in ("control", "product")] + [(x, label) for x in (16, 64, 128) for label in ("control", "product")]
    assert "ticks: tick of 32 branches, sampled" in (tmp_path / "out" / "table.txt").read_text()
    assert (tmp_path / "out" / "picture.svg").read_text().startswith("<svg")


def test_the_command_says_which_rows_have_no_control_and_which_failed(calm: None, capsys: pytest.CaptureFixture[str], script: Script) -> None:
    assert main(["bench", "stub:", "--only", "memory", "--quick"]) == 0
    assert "no control to compare with" in capsys.readouterr().out
    broken = " ".join(script("import sys; sys.exit('no engine here')"))
    assert main(["bench", "stub:", "--only", "memory", "--quick", "--control", broken]) == 1
    out = capsys.readouterr().out
    assert "FAILED: RunnerError: control ended with status 1; its last words: no engine here" in out
    assert "1 failed" in out


def test_the_command_refuses_on_a_noisy_machine(two_groups: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(noise, "measure", lambda: WILD)
    out = tmp_path / "out"
    assert main(["bench", "stub:", "--only", "good", "--out", str(out)]) == 3
    said = capsys.readouterr()
    for words in (said.out, said.err, (out / "table.txt").read_text()):
        assert "too noisy before it" in words
        assert "9.00 (limit 1.25)" in words
    assert [row.median for row in Report.from_lines((out / "rows.jsonl").read_text()).rows] == [None]
    assert main(["bench", "stub:", "--only", "bad,good", "--even-if-noisy"]) == 1
    capsys.readouterr()
    assert main(["bench", "stub:", "--only", "good", "--even-if-noisy", "--json"]) == 0
    assert Report.from_lines(capsys.readouterr().out).rows[0].state == "contended"


@pytest.mark.parametrize(("words", "status", "says"), [
    (["--only", "naps"], 2, "no group is called naps; there are ticks"),
    (["--only", ","], 2, "names no group"),
    (["--threads", "0"], 2, "1 or more"),
])
def test_wrong_usage(words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "stub:", *words])
    assert exit_.value.code == status
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "rubbish", '{"a": 1}', '{"a": ""}', '{"a": []}'])
def test_peers_that_are_no_commands_are_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "peers.json").write_text(content)
    assert main(["bench", "stub:", "--peers", str(tmp_path / "peers.json")]) == 1
    assert "peers.json" in capsys.readouterr().err


def test_peers_are_taken_as_text_and_as_words(calm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "peers.json").write_text(json.dumps({"one": "python 'a file.py'", "two": ["python", "b.py"]}))
    assert main(["bench", "stub:", "--only", "micro", "--quick", "--json", "--peers", str(tmp_path / "peers.json")]) == 0
    assert Report.from_lines(capsys.readouterr().out).environment["peers"] == ["one", "two"]


def test_a_model_that_is_not_there_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path / "none.gguf")]) == 1
    assert "none.gguf: No such file" in capsys.readouterr().err


@posix
def test_ctrl_c_ends_what_was_started_and_keeps_what_was_measured(script: Script, tmp_path: Path) -> None:
    """The runner tells its pid and hangs; the command is interrupted there, ends with 130, and the runner is gone. The group before is on disk."""
    import subprocess

    mark = tmp_path / "pid"
    mark.touch()
    control = script(HELLO + f"\nimport os, time\ninput()\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)")
    out_folder = tmp_path / "out"
    words = [sys.executable, "-m", "pylloyal", "bench", "stub:", "--only", "micro,memory", "--quick", "--even-if-noisy", "--control", " ".join(control), "--out", str(out_folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not (pid := int(mark.read_text() or 0)):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert is_gone(pid)
    kept = Report.from_lines((out_folder / "rows.jsonl").read_text()).rows
    assert {row.group for row in kept} == {"micro"}
    assert all(row.median for row in kept)
