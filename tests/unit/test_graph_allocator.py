"""The allocator's rules, one by one; that it is the engine's is tests/integration/test_compute_bound.py's."""
from __future__ import annotations

from pylloyal.capacity.allocator import Graph, Node


def op(n: int, *sources: Node, inplace: bool = False, layout: object = "a") -> Node:
    return Node(n, layout, sources, inplace)


def size(*ends: Node) -> int:
    graph = Graph()
    for end in ends:
        graph.expand(end)
    return graph.size()


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    assert size(op(1)) == 32
    assert size(op(33)) == 64


def test_what_nobody_reads_any_more_makes_room() -> None:
    first = op(64)
    second = op(64, first, layout="b")
    assert size(op(64, second, layout="c")) == 128  # the third where the first was


def test_inputs_live_from_the_start() -> None:
    late = op(256)  # made when it is read, it would go where the others were: 320
    assert size(op(64, op(64, op(64, op(64))), late)) == 64 + 256 + 64


def test_an_operation_in_place_takes_nothing() -> None:
    assert size(op(64, op(64), inplace=True)) == 64
    assert size(op(64, op(64), inplace=True, layout="b")) == 128  # of another layout
    shared = op(64)
    assert size(op(64, op(64, shared, inplace=True), shared)) == 192  # somebody else still reads it


def test_nothing_is_written_over_through_a_view() -> None:
    base = op(64)
    view = Node(0, "a", (base,), base=base)
    assert size(op(64, view, inplace=True)) == 128


def test_a_view_keeps_what_it_looks_at() -> None:
    base = op(64)
    view = Node(0, "v", (base,), base=base)
    first = op(64, base, layout="b")
    assert size(op(64, op(64, first, layout="c"), view)) == 192
    base = op(64)
    assert size(op(64, op(64, op(64, base, layout="b"), layout="c"))) == 128


def test_outputs_stay() -> None:
    first = op(64)
    second = op(64, first, layout="b")
    second.is_output = True
    assert size(op(64, op(64, second, layout="c"), layout="d")) == 192


def test_the_best_hole_is_taken_and_the_rest_is_lost() -> None:
    """Two holes of 96 and 64 bytes: 64 go into the second, and 96 into the first."""
    wide, between, narrow, last = op(96), op(32), op(64), op(32)
    keep = op(32, wide, narrow, layout="k")  # after it wide and narrow are free
    small = op(64, keep, layout="s")
    assert size(wide, between, narrow, last, keep, small, op(96, small, keep, between, last, layout="w")) == 96 + 32 + 64 + 32 + 32
