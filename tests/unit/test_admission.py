"""The ledger of a store's cells: what is promised stays promised, and a refusal says who has what."""
from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pylloyal import Admission, Cells, Model, Reservation, errors


def ledger(used: int = 0, *, total: int = 1000, hard: int = 100, soft: int = 300) -> tuple[Admission, list[int]]:
    cells = [used]
    return Admission(total, lambda: cells[0], hard_floor=hard, soft_floor=soft, holders=lambda: [("a", 1), ("b", 7), ("c", 3)]), cells


def test_asking_promises_nothing() -> None:
    made, _ = ledger()
    assert made.can_admit(900) and not made.can_admit(901)
    assert made.cells() == Cells(1000, 0, 0, 1000, "headroom")


def test_a_promise_is_taken_off_what_others_can_have() -> None:
    made, cells = ledger(200)
    with made.admit(500, "the long one") as promised:
        assert made.cells() == Cells(1000, 200, 500, 300, "soft")
        assert made.can_admit(200) and not made.can_admit(201)
        promised.use(120)
        cells[0] += 120
        assert made.cells() == Cells(1000, 320, 380, 300, "soft")
    assert made.cells() == Cells(1000, 320, 0, 680, "headroom")
    promised.release()
    with pytest.raises(errors.ClosedError):
        promised.use(1)


def test_zones() -> None:
    for used, zone in ((0, "headroom"), (699, "headroom"), (700, "soft"), (899, "soft"), (900, "hard"), (1000, "hard")):
        assert ledger(used)[0].cells().zone == zone


def test_a_refusal_has_the_live_numbers_and_changes_nothing() -> None:
    made, _ = ledger(300)
    kept = made.admit(400, "earlier")
    before = made.cells()
    with pytest.raises(errors.ContextOverflowError, match="the new one") as caught:
        made.admit(250, "the new one")
    assert (caught.value.need, caught.value.have, caught.value.reserved) == (250, 200, 400)
    assert caught.value.holders == (("b", 7), ("c", 3), ("a", 1))
    assert made.cells() == before
    with pytest.raises(errors.ContextOverflowError) as caught:
        kept.use(401)
    assert (caught.value.need, caught.value.have, kept.left) == (401, 400, 400)
    for bad in (-1, True, 1.5):
        with pytest.raises(errors.InvalidArgumentError):
            made.admit(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("hard", "soft"), [(-1, 0), (300, 100), (0, 1001)])
def test_floors_that_cannot_be(hard: int, soft: int) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        ledger(hard=hard, soft=soft)


def test_of_two_threads_one_gets_the_last_cells() -> None:
    made, _ = ledger()
    start, got = threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        try:
            got.append(made.admit(400))
        except errors.ContextOverflowError:
            got.append(None)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([one for one in got if one]) == 2 and made.cells().reserved == 800


class Promises(RuleBasedStateMachine):
    """Against plain sums."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.used = ledger()
        self.live: list[Reservation] = []
        self.left: dict[int, int] = {}

    @rule(n=st.integers(0, 1100))
    def admit(self, n: int) -> None:
        room = 1000 - self.used[0] - sum(self.left.values()) - 100
        assert self.made.can_admit(n) == (n <= room)
        if n > room:
            with pytest.raises(errors.ContextOverflowError) as caught:
                self.made.admit(n)
            assert caught.value.have == max(0, room)
            return
        one = self.made.admit(n)
        self.live.append(one)
        self.left[id(one)] = n

    @rule(i=st.integers(0, 20), n=st.integers(0, 300))
    def use(self, i: int, n: int) -> None:
        if not self.live:
            return
        one = self.live[i % len(self.live)]
        if n > self.left[id(one)]:
            with pytest.raises(errors.ContextOverflowError):
                one.use(n)
        else:
            one.use(n)
            self.left[id(one)] -= n
            self.used[0] += n

    @rule(i=st.integers(0, 20))
    def release(self, i: int) -> None:
        if self.live:
            one = self.live.pop(i % len(self.live))
            one.release()
            del self.left[id(one)]

    @rule(n=st.integers(0, 200))
    def prune(self, n: int) -> None:
        self.used[0] = max(0, self.used[0] - n)

    @invariant()
    def sums(self) -> None:
        now = self.made.cells()
        assert (now.used, now.reserved, now.remaining) == (self.used[0], sum(self.left.values()), 1000 - self.used[0] - sum(self.left.values()))
        assert now.remaining >= 100


TestPromises = Promises.TestCase
TestPromises.settings = settings(max_examples=40, deadline=None)


def test_on_a_store(stub: Model) -> None:
    """What is decoded moves from promised to used."""
    with stub.store(n_ctx=512, n_batch=64, n_threads=1) as store:
        made = Admission(512, lambda: store.pressure().cells_used, hard_floor=64, soft_floor=128, holders=lambda: [(repr(b), b.cells_own) for b in store.branches()])
        branch = store.root()
        with made.admit(300, "prompt") as promised:
            promised.use(250)
            branch.prefill([1] * 250)
            assert made.cells() == Cells(512, 250, 50, 212, "headroom")
            with pytest.raises(errors.ContextOverflowError) as caught:
                made.admit(200)
            assert caught.value.holders[0][1] == 250
        store.retain_only(store.root())
        assert made.cells().used == 0
