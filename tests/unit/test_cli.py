"""The command line, on the stub engine: what it prints, what it counts, how it ends."""
from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pylloyal import errors
from pylloyal.cli import main
from pylloyal.cli.display import Layout, Lines
from pylloyal.cli.info import memory
from pylloyal.cli.terminal import HIDE_CURSOR, SHOW_CURSOR, Terminal, Wrapped, clean, cut, fit, width, wrap
from pylloyal.kernel.chat import ChatPrompt
from pylloyal.kernel.model import Model
from pylloyal.kernel.system import live_objects

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"prefix_tokens", "prefix_cells", "branches", "prefill_dispatches", "tick_dispatches", "ticks", "cells_used", "tokens_generated", "seconds", "answers", "seed", "model"}
Ask = Callable[..., dict[str, Any]]
posix = pytest.mark.skipif(os.name != "posix", reason="needs signals and terminals as POSIX has them")


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """``pylloyal ask stub: --raw --json ...`` in this process, parsed."""

    def run(*words: str, model: str = "stub:", raw: bool = True, status: int = 0) -> dict[str, Any]:
        assert main(["ask", "--json", *["--raw"] * raw, model, *words]) == status
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        found: dict[str, Any] = json.loads(out)
        assert found.keys() >= KEYS
        return found

    return run


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text("The tower is 41 metres high. " * 60, "utf-8")
    return path


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT as a terminal would leave it, also where the tests run in the background; children inherit it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def started(*words: str, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The program as a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    with subprocess.Popen([sys.executable, "-m", "pylloyal", *words], env=env, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(fd: int, wanted: bytes, seconds: float = 20.0) -> bytes:
    """What can be read from ``fd`` until it holds ``wanted``, or ends."""
    seen, deadline = b"", time.monotonic() + seconds
    while wanted not in seen or not wanted:
        assert select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0], f"{wanted!r} never came: {seen!r}"
        try:
            chunk = os.read(fd, 65536)
        except OSError:  # how Linux says that nobody is at the other end of a terminal
            break
        if not chunk:
            break
        seen += chunk
    return seen


@contextlib.contextmanager
def terminal(columns: int, lines: int) -> Iterator[tuple[int, int]]:
    """The two ends of a pseudo-terminal of that size."""
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (lines, columns))
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        with contextlib.suppress(OSError):
            os.close(theirs)


# ---------------------------------------------------------------------------------------------------------------- info


def test_info_json_has_the_keys_other_programs_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert Path(info["library"]).is_file()
    assert isinstance(info["abi_version"], int)
    assert info["engine"]["commit"]
    assert info["backends"]
    for device in info["devices"]:
        assert device.keys() >= {"name", "kind", "total_bytes", "free_bytes"}


def test_info_is_for_people_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["library", "version", "engine", "built"]
    assert any(line.startswith("devices") for line in lines)


@pytest.mark.parametrize(("kind", "total", "free", "words"), [
    ("gpu", 0, 0, "unknown"), ("gpu", 2**33, 2**33, "unknown"), ("gpu", 2**33, 2**64 - 2**30, "unknown"), ("gpu", 2**33, 2**32, "8.0 GiB, free 4.0 GiB"), ("gpu", 2**33, 0, "8.0 GiB, free 0 MiB"),
    ("cpu", 2**33, 2**33, "8.0 GiB, free unknown"), ("cpu", 0, 0, "unknown")])
def test_memory_says_unknown_rather_than_a_wrong_number(kind: str, total: int, free: int, words: str) -> None:
    assert memory(kind, total, free) == words


# ----------------------------------------------------------------------------------------------------------------- ask


def test_questions_share_a_prefix_that_is_decoded_once(ask: Ask, document: Path) -> None:
    found = ask("who?", "what?", "where?", "--document", str(document), "--max-tokens", "5", "--seed", "1")
    n_prefix, rests = 1 + len(document.read_bytes()) + len("\n\nwh"), len("o?\n") + len("at?\n") + len("ere?\n")
    assert (found["prefix_tokens"], found["prefix_cells"], found["question_tokens"], found["branches"]) == (n_prefix, n_prefix, rests, 3)
    assert found["prefill_dispatches"] == math.ceil(n_prefix / found["n_batch"]) + math.ceil(rests / found["n_batch"]) == 5
    assert found["ticks"] == found["tick_dispatches"] + 1 == 5  # the last token is drawn, and nothing is decoded after it
    assert found["cells_used"] == n_prefix + rests + 12
    assert found["tokens_generated"] == 15
    assert [(a["question"], a["tokens"], a["finish"]) for a in found["answers"]] == [("who?", 5, "length"), ("what?", 5, "length"), ("where?", 5, "length")]
    assert found["separate_prefix_tokens"] == 3 * n_prefix
    assert found["n_ctx"] % 256 == 0
    assert found["seconds"].keys() == {"load", "prefill", "generate"}


def test_branches_are_samples_of_one_question(ask: Ask) -> None:
    found = ask("why?", "--branches", "4", "--max-tokens", "6", "--seed", "10")
    assert (found["prefix_tokens"], found["question_tokens"], found["prefill_dispatches"], found["ticks"]) == (6, 0, 1, 6)
    assert [a["seed"] for a in found["answers"]] == [10, 11, 12, 13]
    assert len({a["text"] for a in found["answers"]}) == 4
    alone = ask("why?", "--max-tokens", "6", "--seed", "12")["answers"][0]
    assert alone["text"] == found["answers"][2]["text"]


def test_a_fixed_seed_gives_the_same_answers(ask: Ask) -> None:
    first, second = (ask("a", "b", "--seed", "5", "--max-tokens", "20") for _ in range(2))
    assert first["answers"] == second["answers"]
    assert first["seed"] == 5
    drawn = ask("a", "b", "--max-tokens", "20")
    assert ask("a", "b", "--max-tokens", "20", "--seed", str(drawn["seed"]))["answers"] == drawn["answers"]


@pytest.mark.parametrize("questions", [("a", "a\nb"), ("a", "a"), ("same start, x", "same start, y")])
def test_an_answer_is_what_it_would_be_alone(ask: Ask, questions: tuple[str, ...]) -> None:
    together = ask(*questions, "--greedy", "--max-tokens", "8")["answers"]
    assert [a["text"] for a in together] == [ask(question, "--greedy", "--max-tokens", "8")["answers"][0]["text"] for question in questions]


def test_a_last_tick_in_which_all_end_is_no_dispatch(ask: Ask) -> None:
    found = next(found for seed in range(50) if (found := ask("a", "--seed", str(seed), "--max-tokens", "500"))["answers"][0]["finish"] == "end_of_generation")
    assert found["ticks"] == found["tick_dispatches"] + 1 == found["tokens_generated"] + 1


def test_the_last_token_is_drawn_like_any_other_and_costs_no_dispatch(ask: Ask) -> None:
    whole = next(found for seed in range(50) if (found := ask("a", "--seed", str(seed), "--max-tokens", "500"))["answers"][0]["finish"] == "end_of_generation")
    answer, seed = whole["answers"][0], str(whole["seed"])
    for n in (1, answer["tokens"] // 2, answer["tokens"]):
        cut = ask("a", "--seed", seed, "--max-tokens", str(n))
        assert (cut["answers"][0]["tokens"], cut["answers"][0]["finish"], cut["ticks"], cut["tick_dispatches"]) == (n, "length", n, n - 1)
        assert answer["text"].startswith(cut["answers"][0]["text"].rstrip("\ufffd"))
    just = ask("a", "--seed", seed, "--max-tokens", str(answer["tokens"] + 1))  # what is drawn last ends it
    assert just["answers"] == whole["answers"]
    assert just["tick_dispatches"] == answer["tokens"]


def test_a_document_is_enough(ask: Ask, document: Path) -> None:
    found = ask("--document", str(document), "--max-tokens", "2", "--branches", "2")
    assert found["prefix_tokens"] == 1 + len(document.read_bytes())
    assert [a["question"] for a in found["answers"]] == [None, None]


def test_questions_may_stand_between_options(ask: Ask) -> None:
    assert [a["question"] for a in ask("one", "--seed", "1", "two", "--max-tokens", "3", "--", "-three")["answers"]] == ["one", "two", "-three"]


def test_the_template_gives_prompts_stops_and_notes(ask: Ask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stops: list[str] = []

    def chat(model: Model, messages: list[dict[str, str]]) -> ChatPrompt:
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<bot>"
        return ChatPrompt(text, "<bot>", True, "", "", False, [], list(stops), [], {}, {}, ["merged a message"], model, [text])

    monkeypatch.setattr(Model, "chat", chat)
    words = ("one?", "two?", "--system", "S", "--greedy", "--max-tokens", "30")
    free = ask(*words, raw=False)
    assert (free["prefix_tokens"], free["question_tokens"]) == (len("<system>S<user>") + 1, 2 * len("one?<bot>"))
    full = free["answers"][0]["text"]
    stops.append(full[10:12])
    stopped = ask(*words, raw=False)["answers"][0]
    assert stopped["finish"] == "stop"
    assert stopped["text"] == full[: full.find(stops[0])]
    assert stopped["tokens"] < 30
    assert main(["ask", "stub:", *words]) == 0
    assert "pylloyal: note: merged a message\n" in capsys.readouterr().err


def test_piped_answers_are_numbered_lines_and_the_numbers_go_to_stderr(capsys: pytest.CaptureFixture[str], ask: Ask) -> None:
    words = ("a", "b", "--seed", "3", "--max-tokens", "40")
    answers = ask(*words)["answers"]
    assert main(["ask", "stub:", *words, "--raw"]) == 0
    out, err = capsys.readouterr()
    for i, answer in enumerate(answers, 1):
        own = [line for line in out.split("\n") if line.startswith(f"[{i}]")]
        assert own == [f"[{i}] {line}".rstrip(" ") for line in answer["text"].split("\n")]
    assert "\x1b" not in err
    assert err.startswith("read ")
    assert "(computed: " in err


def test_lines_appear_when_they_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(Terminal(sys.stderr), Terminal(sys.stdout), 3)
    lines.add(0, "half")
    assert capsys.readouterr().out == ""
    lines.add(1, "one\ntwo\nth")
    lines.add(0, " whole\n")
    lines.finish(0)
    lines.finish(2)
    assert capsys.readouterr().out == "[2] one\n[2] two\n[1] half whole\n[3]\n"
    lines.close()
    assert capsys.readouterr().out == "[2] th\n"


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("words", [
    [], ["nonsense"], ["ask"], ["ask", "stub:"], ["ask", "stub:", ""], ["ask", "stub:", "a", "b", "--branches", "2"], ["ask", "stub:", "a", "--branches", "0"],
    ["ask", "stub:", "a", "--branches", "256"], ["ask", "stub:", "a", "--max-tokens", "0"], ["ask", "stub:", "a", "--seed", "-1"], ["ask", "stub:", "a", "--temperature", "nan"],
    ["ask", "stub:", "a", "--greedy", "--temperature", "1"], ["ask", "stub:", "a", "--raw", "--system", "S"], ["ask", "stub:", "a\udcff"], ["info", "--what"]])
def test_wrong_usage_is_status_2_with_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert err.startswith("usage: pylloyal")


@pytest.mark.parametrize(("words", "said"), [
    (["stub:", "a"], "the stub model has no chat template; pass --raw"), (["missing.gguf", "a", "--raw"], "missing.gguf"), (["stub:no=1", "a", "--raw"], "no=1"),
    (["stub:", "a", "--raw", "--document", "missing.txt"], "missing.txt: No such file"), (["stub:", "a", "--raw", "--document", "latin.txt"], "latin.txt is not UTF-8 text"),
    (["stub:", "--raw", "--document", "empty.txt"], "empty.txt is empty"),
    (["stub:", "abc", "--raw", "--max-tokens", "4093"], "4,098; the model was trained for 4,096"),
    (["stub:", "a", "b", "--raw", "--max-tokens", "50", "--context", "100"], "105 cells are needed (1 shared + 4 of questions + 2 x 50 of answers), --context allows 100"),
    (["stub:fail_at=3;fail_rc=-2;fail_rows=0", "a", "--raw"], "the engine failed")])
def test_failures_are_one_line_and_status_1(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes(b"caf\xe9 au lait")
    Path("empty.txt").touch()
    assert main(["ask", *words, "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("pylloyal: ")
    assert said in err


def test_a_refusal_carries_its_numbers() -> None:
    from pylloyal.cli.generation import admit

    assert admit(100, [5, 7], 50, None, 4096) == 256
    assert admit(100, [5, 7], 50, 212, 4096) == 212
    for context, n_ctx_train, need, have in [(211, 4096, 212, 211), (None, 156, 157, 156)]:
        with pytest.raises(errors.ContextOverflowError) as refused:
            admit(100, [5, 7], 50, context, n_ctx_train)
        assert (refused.value.need, refused.value.have) == (need, have)


@posix
def test_a_reader_that_leaves_is_no_error() -> None:
    with started("ask", "stub:spin_us=2000", *map(str, range(20)), "--raw", "--max-tokens", "200", "--seed", "1") as process:
        assert process.stdout
        assert process.stderr
        read_until(process.stdout.fileno(), b"\n")
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(20) == 141
        assert b"Traceback" not in err
        assert b"Exception" not in err


# -------------------------------------------------------------------------------------------------------------- Ctrl-C


@posix
@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_interrupted_while_generating(document: Path) -> None:
    with started("ask", "stub:spin_us=20000", *map(str, range(9)), "--document", str(document), "--raw", "--json", "--max-tokens", "200", "--seed", "1") as process:
        assert process.stderr
        assert process.stdout
        err = read_until(process.stderr.fileno(), b"dispatches\n")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"Traceback" not in err + rest
    found = json.loads(out.splitlines()[-1])
    assert "cancelled" in {a["finish"] for a in found["answers"]}
    assert found["cells_used"] == found["prefix_tokens"] + found["question_tokens"] + found["tokens_generated"]


@posix
@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_interrupted_while_reading(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 51200, "utf-8")
    with terminal(80, 24) as (ours, theirs), \
         started("ask", "stub:spin_us=20000;n_ctx_train=100000", "a", "b", "--document", str(tmp_path / "long.txt"), "--raw", "--json", stderr=theirs) as process:
        os.close(theirs)
        err = read_until(ours, b"reading 1,024 / ")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        err += read_until(ours, b"")
    assert process.returncode == 130
    assert b"Traceback" not in err
    found = json.loads(out)
    assert {a["finish"] for a in found["answers"]} == {"cancelled"}
    assert found["tokens_generated"] == 0
    assert 0 < found["prefix_tokens"] == found["prefix_cells"] == found["cells_used"] == 512 * found["prefill_dispatches"] < 51200


@posix
@pytest.mark.usefixtures("ctrl_c")
def test_interrupted_while_waiting_for_the_document(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with started("ask", "stub:", "a", "--document", str(tmp_path / "fifo"), "--raw") as process, open(tmp_path / "fifo", "wb"):  # returns when the other end is open
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out == b""
    assert err == b"cancelled\n"


@pytest.mark.usefixtures("ctrl_c")
def test_interrupted_while_loading(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str) -> Model:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return Model(path)

    monkeypatch.setattr("pylloyal.cli.generation.Model", load)
    before = live_objects()
    found = ask("a", "--branches", "2", status=130)
    assert found["prefix_tokens"] == found["cells_used"] == 0
    assert [(a["text"], a["finish"]) for a in found["answers"]] == [("", "cancelled")] * 2
    assert live_objects() == before


@pytest.mark.usefixtures("ctrl_c", "capsys")
def test_the_signal_is_given_back() -> None:
    assert main(["info"]) == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ------------------------------------------------------------------------------------------------------------ terminal


@posix
@pytest.mark.slow
@pytest.mark.parametrize(("size", "is_grid"), [((120, 30), True), ((25, 30), False)])
def test_on_a_terminal_answers_stand_side_by_side_and_then_in_full(ask: Ask, size: tuple[int, int], is_grid: bool) -> None:
    words = ("who?", "what?", "where?", "--seed", "4", "--max-tokens", "120")
    answers = ask(*words)["answers"]
    with terminal(*size) as (ours, theirs), started("ask", "stub:spin_us=1000", *words, "--raw", stdout=theirs) as process:
        os.close(theirs)
        shown = read_until(ours, b"").decode().replace("\r\n", "\n")
        assert process.wait(20) == 0
    assert ("\x1b[" in shown) == is_grid
    assert shown.count(HIDE_CURSOR) == shown.count(SHOW_CURSOR)
    if is_grid:
        assert " │ " in shown
        assert shown.rfind(SHOW_CURSOR) > shown.rfind(HIDE_CURSOR) > 0
        shown = shown[shown.rfind(SHOW_CURSOR):]
        assert all(clean(a["text"]).strip("\n") in shown for a in answers)
        assert [shown.index(f"[{i}] {a['question']}") for i, a in enumerate(answers, 1)] == sorted(shown.index(f"[{i}]") for i in (1, 2, 3))


@posix
def test_no_color_leaves_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal(100, 30) as (ours, theirs), started("ask", "stub:", "a", "b", "--raw", "--seed", "1", "--max-tokens", "9", stdout=theirs) as process:
        os.close(theirs)
        shown = read_until(ours, b"")
        assert process.wait(20) == 0
    assert b"\x1b[K" in shown
    assert b"\x1b[0m" not in shown


def test_text_is_measured_and_wrapped_in_columns_of_a_terminal() -> None:
    assert (width("abc"), width("日本"), width("e\u0301")) == (3, 4, 1)
    assert cut("日本語", 5) == 2
    assert fit("abcdef", 4) == "abc…"
    assert fit("日本語", 4) == "日… "
    assert fit("a", 3) == "a  "
    assert clean("a\x1b[31mb\tc\r\n\u202ed") == "a\ufffd[31mb    c\n\ufffdd"
    text = "one two  three fourteenletters\n\nfive 日本語日本語 six"
    assert [line.rstrip() for line in wrap(text, 9)] == ["one two", "three", "fourteenl", "etters", "", "five", "日本語日", "本語 six"]
    for n in (1, 2, 5):
        grown = Wrapped(9)
        for at in range(0, len(text), n):
            grown.add(text[at: at + n])
        assert [line.rstrip() for line in grown.lines] == [line.rstrip() for line in wrap(text, 9)]


def test_a_grid_fits_the_terminal_or_is_not_used() -> None:
    assert Layout.of(1, (20, 24)) is None
    assert Layout.of(40, (80, 24)) is None
    for n in range(1, 12):
        for size in [(80, 24), (120, 40), (200, 60), (37, 50)]:
            if grid := Layout.of(n, size):
                bands = math.ceil(n / grid.per_row)
                assert grid.per_row * grid.columns + 3 * (grid.per_row - 1) < size[0]
                assert bands * (grid.rows + 1) + 1 < size[1]


# ---------------------------------------------------------------------------------------------------------------- help


def test_help_imports_neither_numpy_nor_the_library() -> None:
    code = "import sys; from pylloyal.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nprint([m for m in sys.modules if m in ('numpy', 'ctypes', 'pylloyal._ffi')])"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: pylloyal")
    assert "ask" in done.stdout
    assert done.stdout.endswith("[]\n")
    traced = subprocess.run([sys.executable, "-X", "importtime", "-m", "pylloyal", "ask", "--help"], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    assert "numpy" not in traced.stderr
    assert "_ffi" not in traced.stderr
