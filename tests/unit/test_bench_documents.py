"""The group `documents` on the stub engine, with peers that are made here: who is promised what, whose answers differ, and what becomes of a peer that fails."""
from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pylloyal.bench import documents
from pylloyal.bench.answers import NEAR_TIE, difference, differences, first_differences, not_near, summary
from pylloyal.bench.contexts import Contexts
from pylloyal.bench.product import Product
from pylloyal.bench.questions import QUESTIONS, Work, asked, work
from pylloyal.bench.rows import Row
from pylloyal.bench.setting import PRODUCT, Setting

MODEL = "stub:n_vocab=400"
WORK = Work([(i * 7) % 250 for i in range(60)], [[65, 66, 67], [70], [80, 81]], 5, "numbers")
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_branches": 4, "n_batch": 64, "n_threads": 1}

# A peer that asks the product, and then changes what it says.
PEER = """
import json, sys
from pylloyal.bench.product import Product
product = Product()
print(json.dumps({"runner": "peer", "versions": {"peer": "1.0", "system": "CPU : AVX = 1 | AVX512 = 0 | OPENMP = 1 | "}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    op = request.pop("op")
    answer = getattr(product, op)(**request)
    if op == "document" and request["n_tokens"] == 5:
        CHANGE
    print(json.dumps(answer), flush=True)
"""


def peer(change: str) -> list[str]:
    """Its command; `change` is a statement on `answer`, run when it is asked what counts, not to warm up."""
    return [sys.executable, "-c", PEER.replace("CHANGE", change)]


def setting(peers: dict[str, Sequence[str]] | None = None, control: Sequence[str] | None = PRODUCT) -> Setting:
    return Setting(MODEL, 1, control, peers or {}, is_quick=True)


def rows(given: Setting) -> list[Row]:
    """Of two questions."""
    return list(documents.rows_of_work(given, WORK.first(2)))


def answers() -> list[list[int]]:
    product = Product()
    try:
        product.open(MODEL, **OPTIONS)
        found = product.document(WORK.document, WORK.questions, WORK.n_tokens)["answers"]
        assert isinstance(found, list)
        return found
    finally:
        product.close()


def test_promises_are_those_of_the_issue() -> None:
    for n in (8, 32):
        assert documents.bound("server", n) == 0.2
        assert documents.bound("llama-cpp-python", n) == documents.bound(documents.CONTEXTS, n) == 0.25
    assert documents.bound("server, one slot", 8) == 0.75
    assert documents.bound("server, one slot", 32) == 0.55
    assert documents.bound("somebody else's", 8) is None


def test_rows_of_all_sides() -> None:
    found = rows(setting({"server": peer("pass")}))
    assert [(row.label, row.path.split(",")[0]) for row in found] == [
        ("control", "llama_decode and llama_memory_seq_cp"), ("product", "forks of one store"), ("control", "llama_decode"),
        ("peer", "llama-server in xllamacpp"), ("product", "forks of one store"), ("peer", "llama-server in xllamacpp"),
        ("peer", "this package"), ("product", "forks of one store"), ("peer", "this package")]
    assert not [row for row in found if row.failed]
    assert all(row.ratio for row in found if row.label == "product")
    equal = [row for row in found if row.unit == "answers"]
    assert [row.note.split(";")[0] for row in equal] == ["2 of 2 the same"] * 3
    assert all(row.is_kept for row in equal)
    assert next(row.note for row in found if row.path.startswith("llama-server")) == "peer 1.0; AVX OPENMP"
    assert all(row.bound is None for row in found if row.label == "product")  # a quick run is promised nothing


def test_a_full_run_holds_promises_against_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    given = setting({"server": peer("pass"), "other": peer("pass")}, None)
    given.is_quick = False
    monkeypatch.setattr(Setting, "n", 1)
    found = [row for row in documents.rows_of_work(given, WORK.first(2)) if row.label == "product"]
    assert [(row.note.rsplit(" to ")[-1], row.bound, row.n) for row in found[1:]] == [("server", 0.2, 1), ("other", None, 3), ("N contexts", 0.25, 1)]


def test_both_numbers_of_questions_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(documents, "rows_of_work", lambda _setting, todo: seen.append((len(todo.document), len(todo.questions), todo.n_tokens)) or iter(()))
    given = setting()
    list(documents.rows(given))
    given.is_quick = False
    list(documents.rows(given))
    assert seen == [(200, 2, 6), (200, 4, 6), (2000, 8, 48), (2000, 32, 48)]


@pytest.mark.parametrize(("command", "words"), [
    ([sys.executable, "-c", "import sys; sys.exit('no network here')"], "no network here"),
    (["no-such-program"], "does not start"),
    (peer("sys.exit('gone')"), "gone"),
    (peer("answer = {'error': 'no cells'}"), "no cells"),
    (peer("answer['answers'][1] = answer['answers'][1][:-1]"), "answers of [5, 4] tokens"),
    (peer("answer['answers'].pop()"), "answers of [5] tokens"),
    (peer("answer = {'seconds': 1.0}"), "KeyError: 'answers'"),
])
def test_a_peer_that_fails_is_a_failed_row_and_the_others_go_on(command: list[str], words: str) -> None:
    found = rows(setting({"server": command}, None))
    bad = [row for row in found if row.failed]
    assert [(row.label, row.path) for row in bad] == [("peer", documents.PATHS["server"])]
    assert words in str(bad[0].failed)
    assert not [row for row in found if row.unit == "answers" and "server" in row.what]
    good = [row for row in found if row.what.endswith(": N contexts")]
    assert [row.label for row in good] == ["peer", "product"]


def test_without_a_product_there_is_one_failed_row() -> None:
    given = setting()
    given.product = [sys.executable, "-c", "import sys; sys.exit('no library')"]
    row, = rows(given)
    assert (row.label, "no library" in str(row.failed)) == ("product", True)


def test_a_control_that_fails_leaves_the_product_without_a_ratio() -> None:
    found = rows(setting(control=[sys.executable, "-c", "import sys; sys.exit('no control')"]))
    assert [(row.label, bool(row.failed)) for row in found[:2]] == [("control", True), ("product", False)]
    assert found[1].ratio is None


@pytest.mark.parametrize(("token", "n_bad", "kind"), [(10, 1, "NOT a near tie"), (50, 0, "near tie")])  # 7.6 and 0.04 below the most likely token there
def test_an_answer_that_differs_counts_unless_it_is_a_near_tie(token: int, n_bad: int, kind: str) -> None:
    found = rows(setting({"server": peer(f"answer['answers'][1][2] = {token}")}, None))
    row, = [row for row in found if row.unit == "answers" and "server" in row.what]
    assert row.note.startswith(f"1 of 2 the same; question 2 from token 3 ({kind}: ")
    assert (row.median, row.bound, row.is_kept) == (n_bad, 0, not n_bad)


def test_where_answers_differ_first() -> None:
    assert first_differences([[1, 2, 3], [4, 5], [6]], [[1, 2, 3], [4, 6], [7]]) == {1: 1, 2: 0}
    assert first_differences([[1, 2]], [[1, 2, 3]]) == {0: 2}
    with pytest.raises(ValueError, match="longer"):
        first_differences([[1]], [[1], [2]])
    with pytest.raises(ValueError, match="different lengths"):
        differences(MODEL, 1, WORK, [[1, 2]], [[1, 2, 3]])


def test_a_difference_is_judged_by_the_logits_there() -> None:
    logits = np.array([0.0, 4.0, 3.5, -np.inf], np.float32)
    tie = difference(4, 7, 1, 2, logits)
    assert (tie.margin, tie.gap, tie.is_near_tie) == (0.5, 0.5, True)
    far = difference(4, 7, 1, 0, logits)
    assert (far.margin, far.gap, far.is_near_tie) == (0.5, 4.0, False)
    assert difference(0, 0, 2, 0, logits).gap == 4.0  # neither is the first
    assert not difference(0, 0, 1, 3, logits).is_near_tie  # banned
    assert NEAR_TIE < 4
    assert not_near([tie, far]) == 1
    assert summary(8, [tie, far]) == ("6 of 8 the same; question 5 from token 8 (near tie: the two most likely are 0.5 apart); "
                                      "question 5 from token 8 (NOT a near tie: the two most likely are 0.5 apart, one that was chosen is 4 from the first)")


def test_margins_are_those_of_a_fresh_reading() -> None:
    ours = answers()
    theirs = [[token if step < 3 else 255 for step, token in enumerate(answer)] for answer in ours]
    found = differences(MODEL, 1, WORK, ours, theirs)
    assert [(one.question, one.step) for one in found] == [(question, 3) for question in range(3)]
    for one in found:
        # Ours was the most likely token there: the one margin there can be is from it to the second.
        assert one.gap >= one.margin >= 0


def test_separate_contexts_say_what_forks_say() -> None:
    contexts = Contexts()
    try:
        contexts.open(MODEL, **OPTIONS)
        for n_tokens in (5, 1):
            assert contexts.document(WORK.document, WORK.questions, n_tokens)["answers"] == [answer[:n_tokens] for answer in answers()]
        with pytest.raises(ValueError, match="empty"):
            contexts.document(WORK.document, [[]], 2)
    finally:
        contexts.close()
    with pytest.raises(ValueError, match="nothing is open"):
        Contexts().document(WORK.document, WORK.questions, 2)


def test_the_document_is_the_chapter_or_says_that_it_is_not(tmp_path: Path) -> None:
    chapter = tmp_path / "chapter.txt"
    chapter.write_text("Call me Ishmael. " * 30, encoding="utf-8")
    given = setting()
    found = work(given, 100, 6, chapter)
    assert found.document == [256, *("Call me Ishmael. " * 30).encode()[:99]]  # it begins as the model wants a text to begin
    assert "Moby-Dick" in found.source
    assert [bytes(question).decode() for question in found.questions] == asked(QUESTIONS)
    for absent in (tmp_path / "none.txt", chapter):
        other = work(given, 2000, 6, absent)
        assert len(other.document) == 2000
        assert "repeats itself" in other.source
    assert (found.n_cells, found.first(1).n_cells) == (100 + sum(map(len, found.questions)) + 32 * 6, 100 + len(found.questions[0]) + 6)


def test_questions_are_32_and_no_two_alike() -> None:
    assert len(QUESTIONS) == len(set(QUESTIONS)) == 32
    assert json.dumps(QUESTIONS).isascii()
