"""Metrics, priors, scores, reading anew and topology, against what numpy and plain decoding say. On any engine."""
from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pylloyal import Finish, Metrics, Model, Sampling, Store, errors, live_objects
from tests.unit.test_kernel import GREEDY, fresh_logits, opened, prompt

INF = float("inf")
Row = np.ndarray[Any, np.dtype[np.float64]]


@pytest.fixture
def store(model: Model) -> Iterator[Store]:
    with opened(model, n_ctx=1024) as one:
        yield one


def is_stub(model: Model) -> bool:
    return str(model.path).startswith("stub:")


def ends_of(model: Model) -> list[int]:
    return [token for token in range(len(model.vocab)) if model.vocab.ends_generation(token)]


# ------------------------------------------------------------------------------------------------- the numbers, in numpy


def softmax(row: Row) -> Row:
    p = np.exp(row - row.max())
    return np.asarray(p / p.sum())


def surprisal_of(p: Row, token: int) -> float:
    return float(-np.log(p[token])) if p[token] > 0 else INF


def entropy_of(p: Row) -> float:
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def sampled_from(logits: Any, s: Sampling, history: list[int], biases: list[dict[int, float]], legal: Any) -> Row:
    """The probabilities tokens are drawn with: the documented order, written down a second time."""
    row = np.array(logits, np.float64)
    for by in biases:
        for token, value in by.items():
            row[token] += value
    if s.penalty_last_n:
        window = history[-s.penalty_last_n :]
        for token in set(window):
            if row[token] > -INF:
                row[token] = row[token] * s.penalty_repeat if row[token] <= 0 else row[token] / s.penalty_repeat
                row[token] -= window.count(token) * s.penalty_frequency + s.penalty_presence
    row[~np.asarray(legal)] = -INF
    kept = [int(t) for t in np.lexsort((np.arange(row.size), -row)) if row[t] > -INF]
    if s.temperature <= 0:
        return np.eye(row.size)[kept[0]]
    kept = kept[: s.top_k] if s.top_k > 0 else kept
    if s.typical_p < 1:
        p = softmax(row[kept])
        strange = np.abs(-np.log(p) - entropy_of(p))
        order = np.argsort(strange, kind="stable")
        n = int(np.searchsorted(np.cumsum(p[order]), s.typical_p)) + 1
        chosen = set(order[:n].tolist())
        kept = [t for i, t in enumerate(kept) if i in chosen]
    if s.top_p < 1:
        n = int(np.searchsorted(np.cumsum(softmax(row[kept])), s.top_p)) + 1
        kept = kept[:n]
    if s.min_p > 0:
        kept = [t for t in kept if row[t] >= row[kept[0]] + math.log(s.min_p)]
    out = np.zeros(row.size)
    out[kept] = softmax(row[kept] / s.temperature)
    return out


PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {}, "greedy": {"temperature": 0.0}, "nothing": PLAIN, "top_k": {**PLAIN, "top_k": 7}, "top_p": {**PLAIN, "top_p": 0.6}, "min_p": {**PLAIN, "min_p": 0.2},
    "typical": {**PLAIN, "typical_p": 0.5}, "cold": {**PLAIN, "temperature": 0.2}, "hot": {**PLAIN, "temperature": 5.0},
    "penalties": {**PLAIN, "penalty_repeat": 1.5, "penalty_frequency": 0.3, "penalty_presence": 0.2, "penalty_last_n": 6},
    "all": {"temperature": 0.9, "top_k": 100, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9, "penalty_repeat": 1.2, "penalty_frequency": 0.1, "penalty_last_n": 64},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("by", ["tick", "commit"])
def test_metrics_are_what_numpy_says(store: Store, setting: str, by: str) -> None:
    sampling = Sampling(**SETTINGS[setting], seed=3)
    branch, beside = store.root(sampling=sampling), store.root(sampling=GREEDY)
    store.prefill([(branch, prompt(9)), (beside, prompt(4))])
    ends = dict.fromkeys(ends_of(store.model), -INF)
    beside.set_bias(ends)
    bias, steer = {**ends, 40: 1.0, 41: -0.5}, {42: 2.0, 43: -INF}
    branch.set_bias(bias)
    branch.steer(steer)
    branch.set_metrics(model=True, sampling=True)
    sums = {"surprisal": 0.0, "entropy": 0.0, "sampling surprisal": 0.0, "sampling entropy": 0.0}
    history: list[int] = []
    n_inside = 0
    everything = np.ones(len(store.model.vocab), bool)
    for step in range(24):
        before = branch.logits().astype(np.float64)
        p, q = softmax(before), sampled_from(before, sampling, history, [bias, steer], everything)
        if by == "tick":
            token = store.tick([beside, branch]).tokens[1][0]
            assert q[token] > 0
        else:  # some that would be drawn, some that could not be
            token = int(np.argsort(-q)[0]) if step % 3 else (43, 7, 200)[step // 3 % 3]
            store.commit([branch, beside], [token, 50])
        history.append(token)
        m = branch.metrics
        assert m.model is not None
        assert m.sampling is not None
        inside = q[token] > 0
        n_inside += inside
        assert (m.n_tokens, m.model.n_tokens, m.sampling.n_tokens) == (step + 1, step + 1, n_inside)
        assert m.model.last_surprisal == pytest.approx(surprisal_of(p, token), rel=1e-6)
        assert m.model.last_entropy == pytest.approx(entropy_of(p), rel=1e-6)
        assert m.sampling.last_surprisal == pytest.approx(surprisal_of(q, token), rel=1e-4, abs=1e-6)
        assert m.sampling.last_entropy == pytest.approx(entropy_of(q), rel=1e-4, abs=1e-6)
        sums["surprisal"] += surprisal_of(p, token)
        sums["entropy"] += entropy_of(p)
        sums["sampling surprisal"] += surprisal_of(q, token) if inside else 0
        sums["sampling entropy"] += entropy_of(q) if inside else 0
        found = {"surprisal": m.model.surprisal, "entropy": m.model.entropy, "sampling surprisal": m.sampling.surprisal, "sampling entropy": m.sampling.entropy}
        assert found == pytest.approx(sums, rel=1e-4, abs=1e-5)
    assert m.model.perplexity == pytest.approx(math.exp(sums["surprisal"] / 24), rel=1e-5)
    assert m.model.mean_entropy == pytest.approx(sums["entropy"] / 24, rel=1e-5)
    assert beside.metrics == Metrics(0, None, None)


def test_metrics_under_a_grammar(model: Model, store: Store) -> None:
    sampling = Sampling(temperature=0.7, top_k=3, seed=1)
    branch = store.root(sampling=sampling, grammar='root ::= "abc"')
    branch.prefill(prompt(5))
    branch.set_metrics(sampling=True)
    for letter in "abc":
        legal = np.array(branch.legal(range(len(model.vocab))))
        before = branch.logits()
        q = sampled_from(before, sampling, [], [], legal)
        done = store.tick([branch])
        token = done.tokens[0][0]
        assert model.vocab.piece(token).decode() == letter or "abc".startswith(model.vocab.piece(token).decode())
        m = branch.metrics
        assert m.sampling is not None
        assert m.model is not None
        assert m.sampling.last_surprisal == pytest.approx(surprisal_of(q, token), abs=1e-6)
        assert m.sampling.last_entropy == pytest.approx(entropy_of(q), abs=1e-6)
        assert m.model.last_surprisal == pytest.approx(surprisal_of(softmax(before.astype(np.float64)), token), rel=1e-6)
    n = branch.metrics.n_tokens
    assert store.tick([branch]).finish == [Finish.END_OF_GENERATION]
    assert branch.metrics.n_tokens == n  # drawn, not decoded


def test_the_perplexity_of_a_text(model: Model, store: Store) -> None:
    """Forced token by token, it is exp of the mean negative log-likelihood that stepping through gives."""
    text = prompt(40, 3)
    root = store.root()
    root.prefill(text[:1])
    root.set_metrics()
    for token in text[1:]:
        root.commit(token)
    nll = []
    stepping = store.root()
    for token, following in itertools.pairwise(text):
        stepping.prefill([token])
        nll.append(stepping.surprisal(following))
        row = stepping.logits().astype(np.float64)
        assert nll[-1] == pytest.approx(surprisal_of(softmax(row), following), rel=1e-6)
    level = root.metrics.model
    assert level is not None
    assert level.n_tokens == 39
    assert level.perplexity == pytest.approx(math.exp(sum(nll) / 39), rel=1e-5 if is_stub(model) else 0.02)
    assert root.metrics.sampling is None


def test_levels_are_chosen_and_chosen_anew(store: Store) -> None:
    branch = store.root(sampling=GREEDY)
    branch.prefill(prompt(4))
    assert branch.metrics == Metrics(0, None, None)
    for model, sampling in ((True, False), (False, True), (True, True), (False, False)):
        branch.set_metrics(model=model, sampling=sampling)
        m = branch.metrics
        assert (m.n_tokens, m.model is not None, m.sampling is not None) == (0, model, sampling)
        assert all(math.isnan(level.perplexity) and math.isnan(level.mean_entropy) for level in (m.model, m.sampling) if level is not None)
        branch.commit(50)
        assert branch.metrics.n_tokens == (model or sampling)


def test_metrics_follow_a_branch_wherever_it_goes(model: Model, store: Store) -> None:
    root = store.root(sampling=Sampling(seed=2))
    root.prefill(prompt(6))
    root.set_bias(dict.fromkeys(ends_of(model), -INF))
    root.set_metrics(sampling=True)
    store.tick([root], n_steps=5)
    kids = root.fork(2, seed=7)
    assert [kid.metrics for kid in kids] == [root.metrics] * 2
    store.tick(kids, n_steps=6)
    assert [kid.metrics.n_tokens for kid in kids] == [11, 11]
    assert root.metrics.n_tokens == 5
    best = min(kids, key=lambda kid: kid.metrics.model.perplexity if kid.metrics.model else INF)
    wanted = best.metrics
    root.fast_forward(best)
    assert root.metrics == wanted
    with opened(model) as other:
        loaded = other.from_bytes(root.to_bytes())
        assert loaded.metrics == wanted
        commit = [50, 51, 52]
        for token in commit:
            loaded.commit(token)
            root.commit(token)
        assert loaded.metrics.n_tokens == root.metrics.n_tokens == 14
        assert loaded.metrics.model is not None
        assert root.metrics.model is not None
        assert loaded.metrics.model.surprisal == pytest.approx(root.metrics.model.surprisal, rel=1e-9 if is_stub(model) else 0.05)


@pytest.mark.parametrize("rc", [1, -1, 2, -2])
def test_what_failed_is_not_measured(rc: int) -> None:
    with Model(f"stub:fail_at=3;fail_rc={rc};fail_rows=1") as broken, opened(broken) as store:
        a, b = store.root(sampling=GREEDY), store.root(sampling=GREEDY)
        store.prefill([(a, prompt(4)), (b, prompt(5))])
        for branch in (a, b):
            branch.set_metrics(sampling=True)
        store.commit([a, b], [50, 51])
        before = [a.metrics, b.metrics]
        with pytest.raises(errors.KernelError):
            store.tick([a, b])
        assert [a.metrics, b.metrics] == before


def test_a_token_that_was_banned_is_a_surprise_without_bounds(store: Store) -> None:
    branch = store.root(sampling=GREEDY)
    branch.prefill(prompt(4))
    branch.set_metrics(sampling=True)
    n = len(store.model.vocab)
    for row in (np.full(n, -INF), np.where(np.arange(n) == 7, -INF, 0.0)):
        branch.set_logits(row)
        branch.commit(7)
        m = branch.metrics
        assert m.model is not None
        assert m.sampling is not None
        assert (m.model.last_surprisal, m.model.perplexity, m.sampling.last_surprisal, m.sampling.n_tokens) == (INF, INF, INF, 0)
    branch.set_metrics()
    branch.set_logits(np.where(np.arange(n) == 7, -1e5, 0.0))
    branch.commit(7)
    assert branch.metrics.model is not None
    assert branch.metrics.model.surprisal > 1e4
    assert branch.metrics.model.perplexity == INF  # too large for a float


# ------------------------------------------------------------------------------------------------ priors, single tokens


def test_priors_are_what_numpy_says(model: Model, store: Store) -> None:
    branch = store.root(sampling=Sampling(temperature=0.1, top_k=1, penalty_repeat=3.0))  # none of which plays a part
    branch.prefill(prompt(6))
    n = len(model.vocab)
    row = branch.logits().astype(np.float64)
    bias, steer = {40: 3.0, 41: -INF, 42: -INF}, {40: 1.0, 43: -INF, 44: 5.0}
    epoch, alive = branch.logits_view(), live_objects()
    for with_bias in (False, True):
        if with_bias:
            branch.set_bias(bias)
            branch.steer(steer)
            for by in (bias, steer):
                for token, value in by.items():
                    row[token] += value
        p = softmax(row)
        order = [int(t) for t in np.lexsort((np.arange(n), -row)) if row[t] > -INF]
        found = branch.priors()
        assert found.tokens.tolist() == order
        assert found.n_legal == len(order) == (n - 3 if with_bias else n)
        assert np.allclose(np.exp(found.log_probs), p[order], atol=1e-6)
        assert math.fsum(np.exp(found.log_probs.astype(np.float64))) == pytest.approx(1.0, abs=1e-5)
        for k in (0, 1, 5, n, n + 100):
            some = branch.priors(k)
            assert (some.tokens.tolist(), some.n_legal) == (order[:k], len(order))
            assert np.array_equal(some.log_probs, found.log_probs[:k])
    assert epoch.array.size == n  # looking decoded nothing and spoilt no view
    assert live_objects() == alive
    with pytest.raises(errors.InvalidArgumentError):
        branch.priors(-1)


def test_priors_and_ties(store: Store) -> None:
    branch = store.root()
    n = len(store.model.vocab)
    branch.set_logits(np.where(np.arange(n) % 3, 1.0, 2.0))
    found = branch.priors()
    assert found.tokens.tolist() == [*range(0, n, 3), *(t for t in range(n) if t % 3)]
    branch.set_bias({9: 3e38, 4: 3e38})
    branch.steer({4: 3e38, 9: 3e38})  # in all beyond what a float holds
    found = branch.priors(3)
    assert found.tokens.tolist()[:2] == [4, 9]
    assert np.exp(found.log_probs).tolist() == pytest.approx([0.5, 0.5, 0.0])


def test_priors_under_a_grammar(model: Model, store: Store) -> None:
    branch = store.root(grammar='root ::= "ab"')
    branch.prefill(prompt(5))
    found = branch.priors()
    legal = [t for t in range(len(model.vocab)) if branch.is_legal(t)]
    assert sorted(found.tokens.tolist()) == legal
    assert found.n_legal == len(legal)
    assert math.fsum(np.exp(found.log_probs.astype(np.float64))) == pytest.approx(1.0, abs=1e-5)
    branch.set_bias(dict.fromkeys(legal, -INF))
    with pytest.raises(errors.NothingLegalError):
        branch.priors()
    with pytest.raises(errors.NoLogitsError):
        store.root().priors()


def test_logits_of_some_tokens(model: Model, store: Store) -> None:
    branch = store.root()
    branch.prefill(prompt(6))
    row, n = branch.logits(), len(model.vocab)
    assert np.array_equal(branch.logits_at([5, n - 1, 0, 5]), row[[5, n - 1, 0, 5]])
    assert np.array_equal(branch.logits_at(np.array([7, 9])), row[[7, 9]])
    assert branch.logits_at([]).shape == (0,)
    for bad, index in (([5, n], 1), ([-1], 0), ([1, 2, 2**31], 2), ([2**32 + 5], 0), ([5, -(2**40)], 1)):
        for call in (branch.logits_at, branch.legal, lambda tokens: store.score([[1]], tokens=tokens), lambda tokens: branch.set_bias(dict.fromkeys(tokens, 1.0)),
                     lambda tokens: branch.commit(tokens[-1]), lambda tokens: store.tick([branch], stop=tokens)):
            with pytest.raises(errors.InvalidArgumentError) as caught:
                call(bad)
            assert call is not branch.logits_at or caught.value.index == index
    with pytest.raises(errors.InvalidArgumentError):
        branch.commit(1.7)  # type: ignore[arg-type]
    assert branch.position == 6
    assert branch.is_legal(5)
    assert branch.surprisal(5) == pytest.approx(surprisal_of(softmax(row.astype(np.float64)), 5), rel=1e-6)


# ------------------------------------------------------------------------------------------------------------------ score


def rows_of(model: Model, texts: list[list[int]]) -> Any:
    return np.array([fresh_logits(model, text) for text in texts])


def close(model: Model, a: Any, b: Any) -> bool:
    """The stub is exact; a real engine sums over cells in the order they lie, and those of pruned forks are taken again."""
    return np.array_equal(a, b) if is_stub(model) else bool(np.abs(a - b).max() < 0.2)


@pytest.mark.parametrize("n_branches", [3, 5, 16])
def test_scores_are_what_stepping_gives(model: Model, n_branches: int) -> None:
    texts = [prompt(1 + i * 7 % 13, i + 1) for i in range(23)]
    with opened(model, n_branches=n_branches) as store:
        source, other = store.root(sampling=Sampling(seed=1)), store.root()
        source.prefill(prompt(20))
        other.prefill(prompt(3, 9))
        source.set_metrics(sampling=True)
        before = [(b.position, b.cells_own, b.children, b.metrics, b.logits().tolist()) for b in store.branches()]
        pressure = store.pressure()
        continued = store.score(texts, source=source)
        fresh = store.score(texts)
        some = store.score(texts, source=source, tokens=[9, 0, 9])
        also = store.score((text for text in texts), source=source, tokens=np.array([9, 0, 9]))  # type: ignore[arg-type]
        assert continued.shape == (23, len(model.vocab))
        assert close(model, continued, rows_of(model, [prompt(20) + text for text in texts]))
        assert close(model, fresh, rows_of(model, texts))
        assert close(model, some, continued[:, [9, 0, 9]])
        assert close(model, also, some)
        assert [(b.position, b.cells_own, b.children, b.metrics, b.logits().tolist()) for b in store.branches()] == before
        after = store.pressure()
        assert (after.cells_used, after.leases_used) == (pressure.cells_used, pressure.leases_used)
        source.commit(50)
        assert close(model, source.logits(), fresh_logits(model, [*prompt(20), 50]))


def test_scores_of_nothing(model: Model, store: Store) -> None:
    source = store.root()
    source.prefill(prompt(5))
    assert store.score([]).shape == (0, len(model.vocab))
    assert store.score([[1], [2]], tokens=[]).shape == (2, 0)
    assert close(model, store.score([[], [7]], source=source), np.array([source.logits(), fresh_logits(model, [*prompt(5), 7])]))
    with pytest.raises(errors.InvalidArgumentError) as caught:
        store.score([[1], []])
    assert caught.value.index == 1
    assert store.pressure().leases_used == 1


def test_scores_of_texts_and_prompts(model: Model, store: Store) -> None:
    texts = ["the sea", "the whale"]
    starts = [model.vocab.encode(text, add_special=True) for text in texts]
    assert close(model, store.score(texts), rows_of(model, starts))
    if model.vocab.adds_bos:  # then even an empty text is a token
        assert close(model, store.score([""]), rows_of(model, [model.vocab.encode("", add_special=True)]))
    else:
        with pytest.raises(errors.InvalidArgumentError):
            store.score([""])
    source = store.root()
    source.prefill("and")
    goes_on = store.score(texts[:2], source=source)  # no second beginning
    assert close(model, goes_on, rows_of(model, [model.vocab.encode("and", add_special=True) + model.vocab.encode(text) for text in texts[:2]]))
    for bad in ([[1.5]], [["a"]], [[[1]]]):
        with pytest.raises((errors.InvalidArgumentError, ValueError)):
            store.score(bad)


def test_scores_that_do_not_fit(model: Model) -> None:
    with opened(model, n_ctx=256, n_branches=4) as store:
        source = store.root()
        source.prefill(prompt(100))
        with pytest.raises(errors.ContextOverflowError) as caught:
            store.score([prompt(5), prompt(157), prompt(3)], source=source)
        assert (caught.value.index, caught.value.need, caught.value.have, caught.value.state) == (1, 157, 156, "unchanged")
        longest = [prompt(156, i) for i in range(3)]
        assert close(model, store.score(longest, source=source, tokens=[5]), rows_of(model, [prompt(100) + text for text in longest])[:, [5]])
        kids = source.fork(3)
        with pytest.raises(errors.NoLeaseError) as full:
            store.score([[1]])
        assert (full.value.need, full.value.have) == (1, 0)
        store.prune(kids)
        assert store.score([[1]]).shape == (1, len(model.vocab))
        other = store.root()
        other.prune()
        with pytest.raises(errors.StaleHandleError):
            store.score([[1]], source=other)


@pytest.mark.parametrize("rc", [1, -1, 2, -2])
def test_the_store_is_the_same_after_a_score_that_failed(rc: int) -> None:
    texts = [prompt(9, i) for i in range(20)]
    with Model("stub:") as sound:
        want = rows_of(sound, [prompt(6) + text for text in texts])
    for at in range(2, 9):
        with Model(f"stub:fail_at={at};fail_rc={rc};fail_rows=2") as broken, opened(broken, n_branches=6) as store:
            source = store.root(grammar='root ::= "abc"')
            source.prefill(prompt(6))
            before = (store.pressure().cells_used, store.branches(), source.logits().tolist(), live_objects()["grammars"])
            with pytest.raises(errors.KernelError) as caught:
                store.score(texts, source=source)
            assert (caught.value.state, caught.value.partial, caught.value.engine_rc) == ("unchanged", False, rc)
            assert (store.pressure().cells_used, store.branches(), source.logits().tolist(), live_objects()["grammars"]) == before
            assert np.array_equal(store.score(texts, source=source), want)


def test_a_score_cancelled_from_another_thread() -> None:
    with Model("stub:spin_us=500") as slow, opened(slow, n_branches=4) as store:
        source = store.root()
        source.prefill(prompt(6))
        before = (store.pressure().cells_used, store.branches(), source.logits().tolist())
        caught: list[BaseException] = []

        def body() -> None:
            try:
                store.score([prompt(40, i) for i in range(5000)], source=source, tokens=[1])
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        start = store.pressure().n_dispatches
        while store.pressure().n_dispatches < start + 5:
            pass
        with pytest.raises(errors.BusyError):
            store.score([[1]])
        while thread.is_alive():
            store.cancel()
        thread.join()
        assert isinstance(caught[0], errors.DecodeCancelledError)
        assert caught[0].state == "unchanged"
        assert (store.pressure().cells_used, store.branches(), source.logits().tolist()) == before
        assert store.score([[1]], source=source, tokens=[1]).shape == (1, 1)


# -------------------------------------------------------------------------------------------------------------- reseed_kv


def test_reading_anew(model: Model) -> None:
    with opened(model, n_ctx=256, n_branches=4) as store:
        branch = store.root(sampling=Sampling(seed=5, penalty_repeat=1.3), grammar='root ::= "abcdef"')
        branch.prefill(prompt(100))
        branch.set_metrics()
        store.tick([branch], n_steps=2)
        other = store.root()
        other.prefill(prompt(100, 2))
        settings, metrics, sampled, last = branch.sampling, branch.metrics, branch._info().n_sampled, branch.last_token
        sinks, tail = prompt(4), prompt(150, 3)
        branch.reseed_kv(sinks, tail)
        assert (branch.position, branch.cells_own, branch.cells_inherited, store.pressure().cells_used) == (154, 154, 0, 254)
        assert close(model, branch.logits(), fresh_logits(model, sinks + tail))
        assert (branch.sampling, branch.metrics, branch._info().n_sampled, branch.last_token) == (settings, metrics, sampled, last)
        branch.reseed_kv(tail[:20])
        rest = store.tick([branch], n_steps=9)
        assert model.vocab.decode(rest.tokens[0]) == "cdef"[-len(model.vocab.decode(rest.tokens[0])) :]
        assert rest.finish == [Finish.END_OF_GENERATION]
        child = other.fork()
        child.reseed_kv(prompt(10, 7))
        assert (child.parent, child.cells_own, child.cells_inherited) == (other, 10, 0)
        assert close(model, child.logits(), fresh_logits(model, prompt(10, 7)))
        assert close(model, other.logits(), fresh_logits(model, prompt(100, 2)))
        with pytest.raises(errors.DivergedError):
            other.fast_forward(child)


def test_reading_anew_is_refused(model: Model, store: Store) -> None:
    root = store.root()
    root.prefill(prompt(30))
    child = root.fork()
    child.prefill(prompt(10, 1))
    before = (root.position, child.position, store.pressure().cells_used, child.logits().tolist())
    n = store.pressure().n_ctx
    for call, kind in ((lambda: root.reseed_kv([1]), errors.BranchHasChildrenError), (lambda: child.reseed_kv([]), errors.InvalidArgumentError),
                       (lambda: child.reseed_kv([1], [len(model.vocab)]), errors.InvalidArgumentError), (lambda: child.reseed_kv([2**40]), errors.InvalidArgumentError),
                       (lambda: child.reseed_kv(prompt(n - 29)), errors.ContextOverflowError)):
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.state == "unchanged"
        assert (root.position, child.position, store.pressure().cells_used, child.logits().tolist()) == before
    assert (caught.value.need, caught.value.have) == (n - 29, n - 30)


@pytest.mark.parametrize(("rc", "state"), [(1, "advanced"), (-1, "advanced"), (2, "poisoned"), (-2, "poisoned")])
def test_reading_anew_when_the_engine_fails(rc: int, state: str) -> None:
    for n in range(3):
        with Model(f"stub:fail_at={2 + n};fail_rc={rc};fail_rows=3") as broken, opened(broken) as store:
            branch = store.root()
            branch.prefill(prompt(20))
            text = prompt(80, 3)
            with pytest.raises(errors.KernelError) as caught:
                branch.reseed_kv(text)
            assert (caught.value.state, caught.value.partial, caught.value.engine_rc) == (state, True, rc)
            assert (branch.position, branch.is_poisoned, branch.has_logits) == (32 * n, state == "poisoned", False)
            if state == "advanced":
                branch.prefill(text[branch.position :])
                with Model("stub:") as sound:
                    assert np.array_equal(branch.logits(), fresh_logits(sound, text))
            branch.prune()
            assert store.pressure().cells_used == 0


# ---------------------------------------------------------------------------------------------------------- deterministic


def test_a_dispatch_for_each_branch(model: Model) -> None:
    with opened(model, deterministic=True) as store:
        assert store.pressure().deterministic
        branches = [store.root(sampling=GREEDY) for _ in range(3)]
        assert store.prefill([(b, prompt(5 + 20 * i, i)) for i, b in enumerate(branches)]) == 1 + 1 + 2
        n = store.pressure().n_dispatches
        store.commit(branches, [50, 51, 52])
        assert store.pressure().n_dispatches == n + 3
        for branch in branches:
            branch.set_bias(dict.fromkeys(ends_of(model), -INF))
        done = store.tick(branches, n_steps=4, max_tokens=[None, 2, None])
        assert (done.n_ticks, done.n_dispatches, [len(t) for t in done.tokens]) == (4, 10, [4, 2, 4])
        for i, branch in enumerate(branches):
            assert close(model, branch.logits(), fresh_logits(model, [*prompt(5 + 20 * i, i), 50 + i, *done.tokens[i]]))
    with opened(model) as store:
        assert not store.pressure().deterministic


@pytest.mark.parametrize("act", ["commit", "tick"])
@pytest.mark.parametrize(("rc", "state"), [(1, "advanced"), (-2, "poisoned")])
def test_the_first_ones_landed(act: str, rc: int, state: str) -> None:
    """The index says how many; those after the one that failed were never tried."""
    with Model(f"stub:fail_at=6;fail_rc={rc}") as broken, opened(broken, deterministic=True) as store:
        branches = [store.root(sampling=Sampling(seed=i)) for i in range(3)]
        for i, branch in enumerate(branches):
            branch.prefill(prompt(4, i))
            branch.set_bias(dict.fromkeys(ends_of(broken), -INF))
        with pytest.raises(errors.KernelError) as caught:
            store.commit(branches, [50, 51, 52]) if act == "commit" else store.tick(branches)
        assert (caught.value.state, caught.value.partial, caught.value.index) == (state, True, 2)
        assert [b.position for b in branches] == [5, 5, 4]
        assert [b.is_poisoned for b in branches] == [False, False, state == "poisoned"]
        assert [b._info().n_sampled for b in branches] == ([1, 1, 0] if act == "tick" and state == "advanced" else [1, 1, 1] if act == "tick" else [0, 0, 0])
        if act == "tick":
            assert [len(t) for t in caught.value.result.tokens] == [1, 1, 0]


# --------------------------------------------------------------------------------------------------------------- topology


def test_a_tree_and_its_shape(store: Store) -> None:
    r"""
    root ─┬─ a ─┬─ c ── e          alone
          │     └─ d
          └─ b
    """
    root, alone = store.root(), store.root()
    root.prefill(prompt(10))
    a, b = root.fork(2)
    a.prefill(prompt(3, 1))
    c, d = a.fork(2)
    c.prefill(prompt(2, 2))
    e = c.fork()
    e.commit(50)
    tree = [root, a, b, c, d, e]
    assert [x.depth for x in (*tree, alone)] == [0, 1, 1, 2, 2, 3, 0]
    assert [x.root for x in (*tree, alone)] == [root] * 6 + [alone]
    assert e.ancestors == [c, a, root]
    assert (root.ancestors, alone.ancestors, alone.descendants, b.descendants) == ([], [], [], [])
    assert root.descendants == [a, b, c, d, e]
    assert a.descendants == [c, d, e]
    assert [x.is_leaf for x in tree] == [False, False, True, False, True, True]
    s = store.statistics()
    assert (s.n_roots, s.n_leaves, s.n_poisoned, s.depth, s.cells_inherited) == (2, 4, 0, 3, 10 * 2 + 13 * 2 + 15)
    assert (s.pressure.cells_used, s.pressure.leases_used) == (10 + 3 + 2 + 1, 7)
    x = e.statistics()
    assert (x.position, x.cells_own, x.cells_inherited, x.n_children, x.depth, x.n_sampled) == (16, 1, 15, 0, 3, 0)
    assert x.metrics == Metrics(0, None, None)

    a.fast_forward(c)  # e moves up to a, beside d
    assert a.children == [d, e]
    assert e.ancestors == [a, root]
    assert (e.depth, e.parent, store.statistics().depth) == (2, a, 2)
    assert root.descendants == [a, b, d, e]
    assert not c.is_alive
    for read in (lambda: c.ancestors, lambda: c.descendants, lambda: c.depth, lambda: c.root, c.statistics):
        with pytest.raises(errors.StaleHandleError):
            read()
    root.fast_forward(a)
    assert (root.children, e.ancestors, e.root) == ([b, d, e], [root], root)
    new = d.fork()  # takes a slot that an older branch had
    assert store.statistics().depth == 2
    assert new.ancestors == [d, root]
    store.retain_only(e)
    assert (e.depth, e.root, e.ancestors, e.descendants) == (0, e, [], [])
    s = store.statistics()
    assert (s.n_roots, s.n_leaves, s.depth, s.cells_inherited) == (1, 1, 0, 0)


def test_a_chain_as_deep_as_a_store_can_be(model: Model) -> None:
    with opened(model, n_branches=40, n_batch=64) as store:
        chain = [store.root()]
        chain[0].prefill(prompt(2))
        while store.pressure().leases_remaining:
            chain.append(chain[-1].fork())
        assert chain[-1].ancestors == chain[-2::-1]
        assert chain[0].descendants == chain[1:]
        assert [b.depth for b in chain] == list(range(40))
        assert store.statistics().depth == 39
        assert chain[-1].root == chain[0]


def test_statistics_of_a_poisoned_branch_and_a_model() -> None:
    with Model("stub:fail_at=2;fail_rc=-2") as broken:
        assert broken.statistics().n_open == 0
        with opened(broken) as store:
            branch = store.root()
            branch.prefill(prompt(3))
            with pytest.raises(errors.DecodeError):
                branch.commit(5)
            assert (store.statistics().n_poisoned, store.statistics().n_roots, branch.statistics().position) == (1, 1, 3)
            with broken.embedder() as embedder:
                assert broken.statistics().n_open == 2
                assert embedder.statistics().n_texts == 0
        assert broken.statistics().n_open == 0


