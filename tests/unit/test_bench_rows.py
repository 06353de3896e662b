"""What the benchmark makes of figures: pairs, rows, reports, the table and the picture. Nothing here measures time."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pylloyal.bench.growth import slope, slopes
from pylloyal.bench.pairs import Side, compare, measure, quartiles, rows_of
from pylloyal.bench.picture import picture, shortened
from pylloyal.bench.rows import Report, Row, failed
from pylloyal.bench.table import number, progress, table

ENVIRONMENT: dict[str, Any] = {
    "cpu": "a CPU", "cpu_features": ["avx2", "fma"], "usable_cores": 2, "n_threads": 2, "system": "a system", "python": "3.11", "pylloyal": "0.1", "engine_commit": "0123456789abcdef",
    "preset": "native", "threads": "blocking", "attention": "shared", "model": {"name": "m.gguf", "architecture": "llama", "bytes": 1234, "header_sha256": "ab" * 32}, "flash_attn": "on", "is_quick": False,
    "control": None, "peers": [], "state": "quiet",
    "noise": {"ticks": {"before": {"spread": 1.05, "waited": 0.004, "steal": None}, "after": {"spread": 1.06, "waited": 0.001, "steal": 0.001}}},
}
ROWS = [
    Row("ticks", "tick", "control", "raw", "ms", 3, 10.0, 9.0, 11.0),
    Row("ticks", "tick", "product", "Store.tick <&>", "ms", 3, 9.5, 9.0, 10.0, 0.95, 0.9, 1.04, bound=1.0),
    Row("ticks", "tick", "product", "slow", "ms", 3, 20.0, 19.0, 21.0, 2.0, 1.9, 2.1, bound=1.0, note="why"),
    failed("ticks", "tick", "peer", "other", ValueError("it broke"), note="n 1"),
    Row("growth", "curve", "control", "raw", "ms", 2, 1.0, 1.0, 1.0, x=1.0),
    Row("growth", "curve", "product", "ours", "ms", 2, 1.5, 1.0, 2.0, x=1.0),
    Row("growth", "curve", "control", "raw", "ms", 2, 4.0, 4.0, 4.0, x=64.0),
    Row("growth", "curve", "product", "ours", "ms", 2, 3.0, 3.0, 3.0, x=64.0),
    Row("forks", "grown", "product", "fork", "MiB", 1, 0.25, 0.25, 0.25, bound=1.0, bound_on="median"),
]


def one_after_another(*figures: float | Exception) -> Callable[[], float]:
    rest = list(figures)

    def run() -> float:
        figure = rest.pop(0)
        if isinstance(figure, Exception):
            raise figure
        return figure

    return run


# ------------------------------------------------------------------------------------------------------------------- pairs


def test_quartiles() -> None:
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([5.0, 1.0, 4.0, 2.0]) == (1.75, 3.0, 4.25)


def test_the_ratio_is_the_median_of_ratios_not_the_ratio_of_medians() -> None:
    # A machine that slows down three times in the middle slows both sides; neighbours still tell.
    control = Side("control", "a", one_after_another(10.0, 30.0, 10.0))
    product = Side("product", "b", one_after_another(11.0, 33.0, 33.0), bound=1.1)
    first, second = compare("g", "w", "ms", control, [product], 3, n_warm=0)
    assert (first.label, first.n, first.median, first.ratio) == ("control", 3, 10.0, None)
    assert (second.median, second.ratio) == (33.0, pytest.approx(1.1))
    assert (second.ratio_low, second.ratio_high) == (pytest.approx(1.1), pytest.approx(2.2))


def test_several_sides_are_measured_in_turns_every_other_time_the_last_one_first() -> None:
    order: list[str] = []
    sides = [Side("product", name, lambda name=name: (order.append(name), float(len(order)))[1]) for name in "abc"]  # type: ignore[misc]
    measure([sides[0], None, *sides[1:]], 3, n_warm=1, before=lambda: order.append("-"))
    assert "".join(order) == "-abc-cba-abc-cba"
    assert [side.figures for side in sides] == [[8.0, 10.0, 16.0], [7.0, 11.0, 15.0], [6.0, 12.0, 14.0]]


def test_ratios_are_of_neighbours_and_a_warm_up_counts_for_nothing() -> None:
    control, product = Side("control", "a", one_after_another(100.0, 1.0, 2.0, 4.0)), Side("product", "b", one_after_another(900.0, 2.0, 2.0, 2.0))
    first, second = compare("g", "w", "ms", control, [product], 3)
    assert (control.figures, product.figures) == ([1.0, 2.0, 4.0], [2.0, 2.0, 2.0])
    assert (first.median, second.median, second.ratio, second.ratio_low, second.ratio_high) == (2.0, 2.0, 1.0, 0.75, 1.5)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_run_that_fails_once_is_a_failed_row_and_never_a_figure(at: int) -> None:
    figures: list[float | Exception] = [1.0, 2.0, 3.0, 4.0]
    figures[at] = RuntimeError("the ship sank")
    broken = Side("product", "b", one_after_another(*figures), bound=1.0)
    rows = list(compare("g", "w", "ms", Side("control", "a", one_after_another(1.0, 1.0, 1.0, 1.0)), [broken, Side("product", "c", one_after_another(2.0, 2.0, 2.0, 2.0))], 3))
    assert [row.failed for row in rows] == [None, "RuntimeError: the ship sank", None]
    assert (rows[1].median, rows[1].low, rows[1].high, rows[1].ratio, rows[1].n, rows[1].is_kept) == (None, None, None, None, 0, None)
    assert (rows[2].ratio, rows[2].n) == (2.0, 3)


def test_without_a_control_or_with_a_broken_one_there_are_figures_and_no_ratios() -> None:
    def product() -> Side:
        return Side("product", "b", one_after_another(5.0, 5.0), bound=1.0, note="mine")

    alone, = compare("g", "w", "ms", None, [product()], 1)
    assert (alone.median, alone.ratio, alone.is_kept, alone.note) == (5.0, None, None, "mine; no control to compare with")
    control, beside = compare("g", "w", "ms", Side("control", "a", one_after_another(OSError("gone"))), [product()], 1)
    assert (control.failed, beside.median, beside.ratio, beside.note) == ("OSError: gone", 5.0, None, "mine; the control failed")
    _, beside = compare("g", "w", "ms", Side("control", "a", one_after_another(1.0, 0.0)), [product()], 1)
    assert (beside.ratio, beside.note) == (None, "mine; the control has 0 or less: no ratio")
    micro, = compare("g", "w", "ms", None, [Side("micro", "m", one_after_another(1.0, 2.0))], 1)
    assert (micro.median, micro.note) == (2.0, "")  # it never had one


def test_a_side_that_was_not_measured_is_failed() -> None:
    assert [row.failed for row in rows_of("g", "w", "ms", None, [Side("product", "b", lambda: 1.0)])] == ["was not measured"]


# -------------------------------------------------------------------------------------------------------------------- rows


def test_a_row_has_figures_or_a_reason_and_never_both() -> None:
    with pytest.raises(ValueError, match="neither a figure nor a reason"):
        Row("g", "w", "product", "p")
    for figures in ({"median": 1.0}, {"ratio": 1.0}, {"n": 1}):
        with pytest.raises(ValueError, match="a failed row with figures"):
            Row("g", "w", "product", "p", failed="it did", **figures)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no label"):
        Row("g", "w", "ours", "p", median=1.0)  # type: ignore[arg-type]


def test_promises_are_held_against_what_they_are_about() -> None:
    row = Row("g", "w", "product", "p", "ms", 1, 5.0, 5.0, 5.0, 0.9, 0.9, 0.9)
    assert row.is_kept is None
    assert replace(row, bound=0.9).is_kept is True
    assert replace(row, bound=0.89).is_kept is False
    assert replace(row, bound=0.9, bound_on="median").is_kept is False
    assert replace(row, bound=5.0, bound_on="median").is_kept is True
    assert replace(row, bound=1.0, ratio=None).is_kept is None


def test_a_reason_is_never_empty() -> None:
    assert failed("g", "w", "peer", "p", "").failed == "no reason given"
    assert failed("g", "w", "peer", "p", KeyError("op")).failed == "KeyError: 'op'"


def test_reports_go_to_json_lines_and_back() -> None:
    report = Report(ENVIRONMENT, ROWS)
    lines = report.to_lines()
    assert len(lines.splitlines()) == 1 + len(ROWS)
    assert set(json.loads(lines.splitlines()[0])) == {"environment"}
    again = Report.from_lines(lines)
    assert again == report
    assert Report.from_lines(iter(lines.splitlines())) == report


@pytest.mark.parametrize("text", ["", "{}", '{"environment": {}, "more": 1}', "[]", '{"environment": {}}\n{"what": "w", "colour": 1}', '{"environment": {}}\n{"what": "w", "median": 1.0}', '{"environment": {}}\n[1]', "rubbish"])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 json's own, too
        Report.from_lines(text)


def test_a_figure_that_is_no_number_is_not_written() -> None:
    with pytest.raises(ValueError):  # noqa: PT011 json's own
        Report({}, [Row("g", "w", "product", "p", "ms", 1, float("nan"), 1.0, 1.0)]).to_lines()


# ------------------------------------------------------------------------------------------------------------------ slopes


def test_slope_is_that_of_the_least_squares() -> None:
    assert slope([1, 2, 3], [5.0, 7.0, 9.0]) == pytest.approx(2.0)
    assert slope([0, 1], [3.0, 3.0]) == 0.0


def points(label: Any, *figures: list[float]) -> list[Side]:
    return [Side(label, "p", lambda: 0.0, figures=values) for values in figures]


def test_slopes_are_compared_round_by_round() -> None:
    # Two rounds; the product's line is twice as steep in the first and as steep in the second.
    control, product = slopes("curve", "branch", [1, 3], points("control", [1.0, 1.0], [2.0, 3.0]), points("product", [1.0, 1.0], [3.0, 3.0]))
    assert (control.what, control.unit, control.median) == ("curve: slope", "us/branch", pytest.approx(750.0))
    assert (product.ratio, product.ratio_low, product.ratio_high, product.n) == (pytest.approx(1.5), pytest.approx(1.25), pytest.approx(1.75), 2)
    assert product.is_kept is False


def test_a_point_that_failed_leaves_no_slope() -> None:
    ours = points("product", [1.0], [2.0])
    ours[1].reason = RuntimeError("no room")
    control, product = slopes("curve", "cell", [1, 2], points("control", [1.0], [2.0]), ours)
    assert (control.failed, product.failed) == (None, "RuntimeError: no room")
    alone, = slopes("curve", "cell", [1, 2], [None, None], points("product", [1.0], [2.0]))
    assert (alone.median, alone.ratio) == (1000.0, None)


# ------------------------------------------------------------------------------------------------------- table and picture


def test_table() -> None:
    lines = table(Report(ENVIRONMENT, ROWS)).splitlines()
    assert lines[0].startswith("m.gguf (llama, 1,234 bytes, header sha256 abababab")
    assert "2 threads on 2 usable cores" in lines[1]
    assert "the machine was quiet" in lines
    assert "noise before and after each group, the worst of 2: spread 1.06, waited 0.4%, 0.1% stolen" in lines
    block = lines.index("ticks: tick")
    assert lines[block + 1 : block + 5] == [
        "  control  10.0 ms [9.00..11.0]  raw, n 3",
        "  product  9.50 ms [9.00..10.0]  ratio 0.950 [0.900..1.040]  promised 1: kept  Store.tick <&>, n 3",
        "  product  20.0 ms [19.0..21.0]  ratio 2.000 [1.900..2.100]  promised 1: NOT KEPT  slow, n 3  (why)",
        "  peer     other: FAILED: ValueError: it broke (n 1)",
    ]
    assert "      64  product  3.00 ms [3.00..3.00]  ours, n 2" in lines
    assert "  product  0.25 MiB  promised 1: kept  fork, n 1" in lines
    assert lines[-1] == "9 rows; of 3 promises 2 kept; 1 failed"


def test_contended_and_quick_runs_say_so() -> None:
    text = table(Report({**ENVIRONMENT, "state": "contended", "is_quick": True, "model": {"name": "stub:"}}, [replace(ROWS[2], state="contended")]))
    assert "the machine was contended, and this was a quick run: its figures mean nothing" in text
    assert "(why; contended)" in text
    assert text.startswith("stub:\n")


def test_progress_tells_no_figure() -> None:
    assert progress(ROWS[0]) == "ticks: tick: control, raw: measured"
    assert progress(ROWS[3]) == "ticks: tick: peer, other: FAILED: ValueError: it broke"
    assert progress(ROWS[6]) == "growth: curve at 64: control, raw: measured"


def test_a_control_that_is_another_engine_is_said() -> None:
    same = {"llama.cpp": ENVIRONMENT["engine_commit"], "cpu": "native", "threads": "blocking", "attention": "shared"}
    for control, is_said in ((None, False), (same, False), ({"of": "something that does not say"}, False), ({**same, "llama.cpp": "fedcba"}, True), ({**same, "cpu": "portable"}, True), ({**same, "attention": "stock"}, True)):
        assert ("THE CONTROL IS ANOTHER ENGINE" in table(Report({**ENVIRONMENT, "control": control}, ROWS))) is is_said


@pytest.mark.parametrize(("value", "words"), [(0.0, "0"), (1234.5, "1,234"), (99.95, "100.0"), (12.34, "12.3"), (0.5, "0.50"), (0.0123, "0.012"), (-4.2, "-4.20")])
def test_numbers_have_three_digits_that_mean_something(value: float, words: str) -> None:
    assert number(value) == words


def test_picture_is_svg_with_every_row_in_it() -> None:
    drawn = picture(Report(ENVIRONMENT, ROWS))
    root = ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    words = [element.text or "" for element in root.iter(f"{space}text")]
    assert "tick: Store.tick <&>" in words
    assert "0.950 kept" in words
    assert "2.000 NOT KEPT" in words
    assert any(word.startswith("failed: ValueError: it broke") for word in words)
    assert len(list(root.iter(f"{space}circle"))) == 2  # a dot for each ratio
    assert len(list(root.iter(f"{space}polyline"))) == 2  # a curve for each label
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        for key, most in (("x", width), ("cx", width), ("x1", width), ("x2", width), ("y", height), ("cy", height), ("y1", height), ("y2", height)):
            assert 0 <= float(element.attrib.get(key, 0)) <= most, element.attrib


def test_picture_of_ratios_that_have_no_logarithm_and_of_nothing() -> None:
    odd = replace(ROWS[1], ratio=-0.5, ratio_low=-2.0, ratio_high=0.0)
    ElementTree.fromstring(picture(Report(ENVIRONMENT, [odd])))
    ElementTree.fromstring(picture(Report(ENVIRONMENT, [])))
    assert shortened("abcdef", 4) == "abc…"


def test_the_report_of_a_promise_about_another_figure_does_not_say_kept_beside_the_ratio() -> None:
    row = replace(ROWS[1], bound=100.0, bound_on="median")
    assert "0.950" in (drawn := picture(Report(ENVIRONMENT, [row])))
    assert "kept" not in drawn.lower()


def test_nothing_of_this_machine_s_paths_is_reported(tmp_path: Path) -> None:
    from pylloyal.bench.headers import write_vocabulary
    from pylloyal.bench.machine import environment
    from pylloyal.bench.setting import PRODUCT, Setting

    path = tmp_path / "words.gguf"
    write_vocabulary(path, 50)
    facts = environment(Setting(str(path), 2, control=PRODUCT, peers={"other": ["/somewhere/python"]}))
    written = json.dumps(facts)
    assert str(tmp_path) not in written
    assert "somewhere" not in written
    assert facts["model"]["name"] == "words.gguf"
    assert facts["model"]["architecture"] == "llama"
    assert len(facts["model"]["header_sha256"]) == 64
    assert (facts["peers"], facts["n_threads"]) == (["other"], 2)
    assert facts["control"]["pylloyal"] == facts["pylloyal"]
    assert "error" in environment(Setting(str(path), 2, control=["false"]))["control"]
    assert environment(Setting(str(path), 2))["control"] is None
