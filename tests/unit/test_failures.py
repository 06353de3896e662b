"""The failure rule: after every engine failure a branch is unchanged, advanced or poisoned, and says so."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pylloyal import Model, Sampling, Store, errors

PROMPT = list(range(40, 60))


def failing(at: int, rc: int, rows: int = 0) -> Store:
    """A store whose ``at``-th decode fails with ``rc`` after ``rows`` rows landed."""
    return Model(f"stub:fail_at={at};fail_rc={rc};fail_rows={rows}").store(n_ctx=128, n_branches=6, n_batch=8)


@pytest.mark.parametrize(("rc", "kind"), [(1, errors.NoCellsError), (-1, errors.InternalKernelError)])
@pytest.mark.parametrize("act", ["prefill", "commit", "tick"])
def test_undone_by_the_engine_means_unchanged(rc: int, kind: type[errors.KernelError], act: str) -> None:
    with failing(2, rc) as store:
        root = store.root(sampling=Sampling(seed=1))
        root.prefill(PROMPT[:4])
        logits, info = root.logits(), root._info()
        calls: dict[str, Callable[[], object]] = {"prefill": lambda: root.prefill([70]), "commit": lambda: root.commit(70), "tick": lambda: store.tick([root])}
        with pytest.raises(kind) as caught:
            calls[act]()
        assert (caught.value.state, caught.value.engine_rc, caught.value.partial) == ("unchanged", rc, False)
        assert (root.position, root.cells_own, root.is_poisoned, root._info().n_sampled) == (4, 4, False, info.n_sampled)
        assert np.array_equal(root.logits(), logits)
        calls[act]()  # and it goes on
        assert root.position == 5


def test_a_long_prefill_keeps_what_landed() -> None:
    with failing(3, 1) as store:
        root = store.root()
        with pytest.raises(errors.NoCellsError) as caught:
            root.prefill(PROMPT)
        assert (root.position, root.is_poisoned) == (16, False)
        assert caught.value.state in ("advanced", "unchanged")  # of the last dispatch; the position tells the rest
        root.prefill(PROMPT[16:])
        with Model("stub:") as model, model.store(n_ctx=128) as fresh:
            alone = fresh.root()
            alone.prefill(PROMPT)
            assert np.array_equal(root.logits(), alone.logits())


@pytest.mark.parametrize("rc", [2, -2, -3])
@pytest.mark.parametrize("act", ["prefill", "commit", "tick"])
def test_a_failure_half_way_poisons_exactly_that_dispatch(rc: int, act: str) -> None:
    with failing(2, rc, rows=1) as store:
        root = store.root(sampling=Sampling.greedy())
        root.prefill(PROMPT[:4])
        a, b, apart = root.fork(3)
        calls: dict[str, Callable[[], object]] = {
            "prefill": lambda: store.prefill([(a, [70]), (b, [71])]), "commit": lambda: store.commit([a, b], [70, 71]), "tick": lambda: store.tick([a, b])}
        with pytest.raises(errors.DecodeError) as caught:
            calls[act]()
        assert (caught.value.state, caught.value.engine_rc) == ("poisoned", rc)
        assert [x.is_poisoned for x in (root, a, b, apart)] == [False, True, True, False]
        assert store.pressure().cells_used == 6  # what may have landed stays charged until it is pruned
        for call in (lambda: a.prefill([72]), lambda: a.commit(72), a.sample, a.logits, a.fork, lambda: a.set_grammar(None), lambda: store.tick([apart, a]), a.retain_only):
            with pytest.raises(errors.BranchPoisonedError) as refused:
                call()
            assert refused.value.state == "unchanged"
        apart.commit(73)  # a sibling outside the dispatch is fine
        a.prune()
        b.prune_subtree()
        assert store.pressure().cells_used == 5
        again = root.fork()
        again.commit(70)
        with Model("stub:") as model, model.store(n_ctx=128) as fresh:
            alone = fresh.root()
            alone.prefill([*PROMPT[:4], 70])
            assert np.array_equal(again.logits(), alone.logits())


def test_a_later_tick_that_fails_hands_over_the_ticks_before() -> None:
    with failing(4, -2) as store:
        root = store.root(sampling=Sampling.greedy())
        root.prefill(PROMPT[:4])
        a, b = root.fork(2)
        with pytest.raises(errors.DecodeError) as caught:
            store.tick([a, b], n_steps=6)
        assert (caught.value.state, caught.value.partial) == ("poisoned", True)
        assert [len(t) for t in caught.value.result.tokens] == [2, 2]
        assert (a.position, a.is_poisoned, root.is_poisoned) == (6, True, False)


def test_an_unknown_failure_code_is_still_a_typed_error() -> None:
    with failing(1, -77) as store, pytest.raises(errors.DecodeError, match="-77") as caught:
        store.root().prefill([40])
    assert caught.value.engine_rc == -77
