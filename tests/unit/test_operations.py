"""Operations on branches and logits that decode nothing: fast_forward, merging, biases, legality. On any engine."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pylloyal import Finish, Model, Sampling, Store, errors
from tests.unit.test_kernel import GREEDY, fresh_logits, opened, prompt, store  # noqa: F401

INF = float("inf")


# ----------------------------------------------------------------------------------------------------------- fast_forward


def test_fast_forward_takes_over_where_the_child_stands(model: Model, store: Store) -> None:  # noqa: F811
    root = store.root(sampling=Sampling(seed=4))
    root.prefill(prompt(6))
    child, sibling = root.fork(2, seed=9)
    store.prefill([(child, prompt(3, 1)), (sibling, prompt(2, 2))])
    grandchild = child.fork()
    grandchild.commit(50)
    logits, settings, before = child.logits(), child.sampling, store.pressure()
    root.fast_forward(child)
    after = store.pressure()
    assert not child.is_alive
    assert (after.cells_used, after.leases_remaining, after.n_dispatches) == (before.cells_used, before.leases_remaining + 1, before.n_dispatches)
    assert (root.position, root.cells_own, root.cells_inherited, root.parent) == (9, 9, 0, None)
    assert root.children == [sibling, grandchild]
    assert grandchild.parent == root
    assert (grandchild.cells_inherited, sibling.cells_inherited) == (9, 6)
    assert root.sampling == settings
    assert np.array_equal(root.logits(), logits)
    store.commit([root, sibling, grandchild], [60, 61, 62])
    for branch, text in ((root, [*prompt(6), *prompt(3, 1), 60]), (sibling, [*prompt(6), *prompt(2, 2), 61]), (grandchild, [*prompt(6), *prompt(3, 1), 50, 62])):
        assert np.allclose(branch.logits(), fresh_logits(model, text), atol=0.05)
    root.prune_subtree()
    assert store.pressure().cells_used == 0


def test_fast_forward_again_and_again_leaks_nothing(store: Store) -> None:  # noqa: F811
    root = store.root(sampling=GREEDY)
    root.prefill(prompt(4))
    for i in range(60):
        kids = root.fork(3)
        store.commit(kids, [40 + i % 50, 41, 42])
        root.fast_forward(kids[i % 3])
        store.prune(k for k in kids if k.is_alive)
        assert (root.position, store.pressure().cells_used, store.pressure().leases_used) == (5 + i, 5 + i, 1)


def test_fast_forward_refuses_what_diverged(store: Store) -> None:  # noqa: F811
    root, other = store.root(), store.root()
    store.prefill([(root, prompt(4)), (other, prompt(2))])
    child = root.fork()
    below = child.fork()
    child.commit(50)
    for parent, follower in ((root, below), (root, other), (child, root), (root, root)):
        with pytest.raises(errors.DivergedError) as info:
            parent.fast_forward(follower)
        assert info.value.state == "unchanged"
    root.commit(51)
    with pytest.raises(errors.DivergedError, match="decoded since"):
        root.fast_forward(child)
    assert (root.position, child.position, store.pressure().cells_used) == (5, 5, 8)
    assert root.children == [child]


@pytest.mark.parametrize("act", ["commit", "prefill"])
def test_fast_forward_repairs_a_poisoned_parent(act: str) -> None:
    with Model("stub:fail_at=3;fail_rc=-2;fail_rows=1") as broken, opened(broken, n_ctx=64) as store:  # noqa: F811
        root = store.root()
        root.prefill(prompt(4))
        child = root.fork()
        child.commit(50)
        with pytest.raises(errors.DecodeError):
            root.commit(51) if act == "commit" else root.prefill([51, 52])
        assert root.is_poisoned
        root.fast_forward(child)
        assert (root.is_poisoned, root.position, root.cells_own, store.pressure().cells_used) == (False, 5, 5, 5)
        root.commit(53)
        with Model("stub:") as sound:
            assert np.array_equal(root.logits(), fresh_logits(sound, [*prompt(4), 50, 53]))


# ------------------------------------------------------------------------------------------------------------------ logits


def test_merging_adds_and_touches_nothing_else(store: Store) -> None:  # noqa: F811
    root = store.root(sampling=GREEDY)
    root.prefill(prompt(5))
    a, b, c = root.fork(3)
    store.commit([a, b, c], [40, 41, 42])
    rows = [x.logits().astype(np.float64) for x in (a, b, c)]
    before = (store.pressure().n_dispatches, store.pressure().cells_used)
    a.merge_logits([b, c], alpha=-0.5)
    assert np.allclose(a.logits(), rows[0] - 0.5 * (rows[1] + rows[2]), atol=1e-5)
    a.merge_logits([a], alpha=1.0)  # its own expert
    assert np.allclose(a.logits(), 2 * (rows[0] - 0.5 * (rows[1] + rows[2])), atol=1e-5)
    assert np.array_equal(b.logits(), rows[1].astype(np.float32))
    assert before == (store.pressure().n_dispatches, store.pressure().cells_used)
    assert a.sample() == int(np.argmax(a.logits()))


def test_merging_makes_no_infinity(store: Store) -> None:  # noqa: F811
    a, b = store.root(sampling=GREEDY), store.root(sampling=GREEDY)
    store.prefill([(a, [40]), (b, [41])])
    mine, theirs = np.zeros(store.model.info.n_vocab, np.float32), np.ones(store.model.info.n_vocab, np.float32)
    mine[3] = -INF
    theirs[4] = -INF
    for alpha, banned in ((1.0, {3, 4}), (-1.0, {3})):
        a.set_logits(mine)
        b.set_logits(theirs)
        a.merge_logits([b], alpha)
        row = a.logits()
        assert not np.isnan(row).any()
        assert not (row == INF).any()
        assert set(np.flatnonzero(row == -INF).tolist()) == banned
    with pytest.raises(errors.InvalidArgumentError):
        a.merge_logits([b], float("nan"))
    empty = store.root()
    unchanged = a.logits()
    with pytest.raises(errors.NoLogitsError) as info:
        a.merge_logits([b, empty])
    assert info.value.index == 1
    assert np.array_equal(a.logits(), unchanged)


def test_logits_that_were_set(store: Store) -> None:  # noqa: F811
    root = store.root(sampling=GREEDY)
    n = store.model.info.n_vocab
    row = np.linspace(-3, 2, n, dtype=np.float32)[::-1].copy()
    root.set_logits(row)  # even before anything was decoded
    assert (root.has_logits, root.position, root.sample()) == (True, 0, 0)
    for bad in (row[:-1], np.append(row, 0), row.reshape(1, -1), np.where(row == row[5], np.nan, row), np.where(row == row[5], INF, row)):
        with pytest.raises(errors.InvalidArgumentError):
            root.set_logits(bad)
    assert np.array_equal(root.logits(), row)


def test_distribution(store: Store) -> None:  # noqa: F811
    root = store.root()
    root.prefill(prompt(5))
    row = root.logits().astype(np.float64)
    p = np.exp(row - row.max())
    p /= p.sum()
    d = root.distribution()
    assert d.most_likely == int(np.argmax(row))
    assert d.entropy == pytest.approx(float(-(p * np.log(p)).sum()), rel=1e-6)
    assert d.surprisal(row[7]) == pytest.approx(float(-np.log(p[7])), rel=1e-6)
    root.set_logits(np.where(np.arange(row.size) == 9, 0.5, -INF))
    assert root.distribution().entropy == pytest.approx(0.0, abs=1e-12)
    root.set_logits(np.full(row.size, -INF))
    with pytest.raises(errors.NothingLegalError):
        root.distribution()
    with pytest.raises(errors.NothingLegalError):
        root.sample()
    with pytest.raises(errors.NoLogitsError):
        store.root().distribution()


# ------------------------------------------------------------------------------------------------------------------ biases


def test_a_bias_is_carried_by_forks_and_steering_is_not(store: Store) -> None:  # noqa: F811
    root = store.root(sampling=GREEDY)
    root.prefill(prompt(5))
    best, second, third = (int(t) for t in np.argsort(root.logits())[::-1][:3])
    root.set_bias({best: -INF})
    assert root.sample() == second
    root.steer({second: -INF})
    assert root.sample() == third
    child = root.fork()
    assert child.sample() == second
    assert root.legal([best, second, third]) == [False, False, True]
    assert child.legal([best, second, third]) == [False, True, True]
    child.set_bias({third: 1e4})
    assert child.sample() == third
    child.steer({third: -1e5})
    root.fast_forward(child)  # steering moves with it
    assert root.sample() == best
    root.steer(None)
    assert root.sample() == third
    root.set_bias({})
    assert root.sample() == best


def test_biases_that_make_no_sense(store: Store) -> None:  # noqa: F811
    root = store.root(sampling=GREEDY)
    root.prefill(prompt(5))
    best = root.sample()
    root.set_bias({best: -INF})
    second = root.sample()
    for bad in ({0: float("nan")}, {0: INF}, {-1: 1.0}, {store.model.info.n_vocab: 1.0}):
        with pytest.raises(errors.InvalidArgumentError) as info:
            root.set_bias(bad)
        assert info.value.index == 0
    assert root.sample() == second  # the bias in force stays
    with pytest.raises(errors.InvalidArgumentError):
        root.legal([0, store.model.info.n_vocab])


def test_banning_every_end_keeps_a_branch_going(model: Model, store: Store) -> None:  # noqa: F811
    ends = [t for t in range(len(model.vocab)) if model.vocab.ends_generation(t)]
    root = store.root(sampling=Sampling(temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, seed=2))
    root.prefill(prompt(4))
    root.set_bias(dict.fromkeys(ends, -INF))
    done = store.tick(root.fork(4, seed=1), n_steps=60)
    assert done.finish == [None] * 4
    assert not {t for row in done.tokens for t in row} & set(ends)


def test_legality_under_a_grammar(model: Model, store: Store) -> None:  # noqa: F811
    root = store.root(sampling=GREEDY, grammar='root ::= "ab"')
    root.prefill(prompt(4))
    a, b = (model.vocab.encode(letter)[0] for letter in "ab")
    end = next(t for t in range(len(model.vocab)) if model.vocab.ends_generation(t))
    assert root.legal([a, b, end]) == [True, False, False]
    root.commit(a)
    assert root.legal([a, b, end]) == [False, True, False]
    assert root.legal([a, b, end]) == [False, True, False]  # asking changed nothing
    root.steer({b: -INF})
    assert store.tick([root]).finish == [Finish.ILLEGAL]
    root.steer(None)
    assert store.tick([root], n_steps=3).finish == [Finish.END_OF_GENERATION]
    assert root.legal([]) == []


def test_settings_read_and_written_back_keep_the_stream(store: Store) -> None:  # noqa: F811
    """``branch.sampling = replace(branch.sampling, temperature=...)`` at every token must not draw the same number for ever."""
    root = store.root(sampling=Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5))
    root.prefill([1, 2, 3])
    plain, hot = root.fork(2)
    drawn = []
    for i in range(12):
        hot.sampling = replace(hot.sampling, temperature=1.0 if i % 2 else 1.0000001)
        drawn.append(hot.sample())
    assert hot.statistics().n_sampled == 12
    assert drawn == [plain.sample() for _ in range(12)]
    assert len(set(drawn)) > 6
    hot.reseed(5)
    assert hot.statistics().n_sampled == 0
    assert [hot.sample() for _ in range(12)] == drawn
