"""What a store and its branches promise, on any engine: the stub here, tiny real models in tests/integration."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from pylloyal import Branch, Finish, Grammar, Model, Sampling, Store, errors

GREEDY = Sampling.greedy()


@contextmanager
def opened(model: Model, **options: Any) -> Iterator[Store]:
    with model.store(**{"n_ctx": 512, "n_branches": 16, "n_batch": 32, "n_threads": 1, **options}) as store:
        yield store


@pytest.fixture
def store(model: Model) -> Iterator[Store]:
    with opened(model) as one:
        yield one


def prompt(n: int, salt: int = 0) -> list[int]:
    """n ordinary tokens, different for every salt."""
    return [int(x) for x in np.random.default_rng([n, salt]).integers(33, 120, n)]


def fresh_logits(model: Model, tokens: list[int]) -> np.ndarray[Any, Any]:
    with opened(model) as alone:
        root = alone.root()
        root.prefill(tokens)
        return root.logits()


# ------------------------------------------------------------------------------------------------------------- exactness


def test_branches_decoded_together_give_what_they_give_alone(model: Model, store: Store) -> None:
    root = store.root()
    root.prefill(prompt(20))
    forks = root.fork(5)
    tails = [prompt(1 + 3 * i, i + 1) for i in range(5)]
    store.prefill(list(zip(forks, tails, strict=True)))
    store.commit(forks, [40 + i for i in range(5)])
    for i, fork in enumerate(forks):
        assert np.array_equal(fork.logits(), fresh_logits(model, [*prompt(20), *tails[i], 40 + i])), f"fork {i}"


@pytest.mark.parametrize("n_batch", [16, 17, 31, 63])
def test_a_prefill_cut_anywhere_gives_the_same_logits(model: Model, n_batch: int) -> None:
    whole = fresh_logits(model, prompt(60))
    with opened(model, n_batch=n_batch) as cut:
        root = cut.root()
        assert root.prefill(prompt(60)) == -(-60 // n_batch)
        assert np.array_equal(root.logits(), whole)


def test_pruning_a_sibling_changes_nothing(model: Model, store: Store) -> None:
    root = store.root()
    root.prefill(prompt(8))
    kept, gone = root.fork(2)
    store.prefill([(kept, prompt(3, 1)), (gone, prompt(4, 2))])
    gone.prune()
    kept.commit(50)
    assert np.array_equal(kept.logits(), fresh_logits(model, [*prompt(8), *prompt(3, 1), 50]))


def test_logits_outlive_other_branches_decodes(model: Model, store: Store) -> None:
    a, b = store.root(), store.root()
    a.prefill(prompt(5))
    before = a.logits()
    for token in (60, 61, 62):
        b.prefill([token])
    assert np.array_equal(a.logits(), before)
    assert np.array_equal(before, fresh_logits(model, prompt(5)))
    twin = a.fork()
    b.prefill([63])
    assert np.array_equal(twin.logits(), before)


# ----------------------------------------------------------------------------------------------------------------- books


def test_a_shared_cell_counts_once(store: Store) -> None:
    root = store.root()
    root.prefill(prompt(30))
    forks = root.fork(8)
    assert store.pressure().cells_used == 30
    store.prefill([(fork, prompt(2, i)) for i, fork in enumerate(forks)])
    assert store.pressure().cells_used == 30 + 16
    assert [(f.cells_own, f.cells_inherited, f.position) for f in forks] == [(2, 30, 32)] * 8
    store.prune(forks)
    p = store.pressure()
    assert (p.cells_used, p.cells_remaining, p.leases_used) == (30, p.n_ctx - 30, 1)
    root.prune()
    assert store.pressure().cells_used == 0


def test_topology(store: Store) -> None:
    root = store.root()
    root.prefill(prompt(2))
    a, b = root.fork(2)
    c = a.fork()
    assert root.parent is None
    assert (a.parent, c.parent) == (root, a)
    assert root.children == [a, b]
    assert (root.is_leaf, c.is_leaf) == (False, True)
    assert store.branches() == [root, a, b, c]
    with pytest.raises(errors.BranchHasChildrenError) as info:
        store.prune([b, a])
    assert (info.value.index, info.value.state) == (1, "unchanged")
    assert store.branches() == [root, a, b, c]
    store.prune([a, c])  # together with its child a parent may go
    assert store.branches() == [root, b]
    root.prune_subtree()
    assert store.branches() == []


def test_retain_only_keeps_one_line_and_its_logits(model: Model, store: Store) -> None:
    root = store.root()
    root.prefill(prompt(6))
    kept, other = root.fork(2)
    store.prefill([(kept, prompt(3, 1)), (other, prompt(9, 2))])
    below = kept.fork()
    below.prefill(prompt(2, 3))
    logits = kept.logits()
    store.retain_only(kept)
    assert store.branches() == [kept]
    assert not any(branch.is_alive for branch in (root, other, below))
    assert (kept.cells_own, kept.cells_inherited, kept.parent, store.pressure().cells_used) == (9, 0, None, 9)
    assert np.array_equal(kept.logits(), logits)
    kept.commit(70)
    assert np.allclose(kept.logits(), fresh_logits(model, [*prompt(6), *prompt(3, 1), 70]), atol=1e-2)


def test_a_stale_handle_never_comes_to_mean_another_branch(store: Store) -> None:
    stale = []
    for _ in range(200):
        branch = store.root()
        branch.prune()
        branch.prune()  # again: nothing
        stale.append(branch)
    alive = store.root()
    assert len({b._handle for b in [*stale, alive]}) == 201
    for branch in stale:
        with pytest.raises(errors.StaleHandleError) as info:
            branch.prefill([40])
        assert info.value.state == "unchanged"
    assert store.branches() == [alive]


# -------------------------------------------------------------------------------------------------------------- refusals


def test_leases_are_refused_all_or_nothing(store: Store) -> None:
    root = store.root()
    root.prefill(prompt(2))
    with pytest.raises(errors.NoLeaseError) as info:
        root.fork(16)
    assert (info.value.need, info.value.have, info.value.binding) == (16, 15, "leases")
    assert store.branches() == [root]
    assert len(root.fork(15)) == 15
    with pytest.raises(errors.NoLeaseError):
        store.root()


def test_what_does_not_fit_is_refused_before_anything_runs(model: Model) -> None:
    with opened(model, n_ctx=256, n_branches=4) as store:
        total = store.pressure().n_ctx
        root = store.root(sampling=Sampling(seed=5))
        root.prefill(prompt(total - 2))
        a, b, c = root.fork(3)
        dispatches, logits, drawn = store.pressure().n_dispatches, root.logits(), a._info().n_sampled
        for call in (lambda: a.prefill(prompt(3)), lambda: store.commit([a, b, c], [40, 41, 42]), lambda: store.tick([a, b, c]), lambda: store.prefill([(a, [40, 41]), (b, [42])])):
            with pytest.raises(errors.ContextOverflowError) as info:
                call()
            assert (info.value.need, info.value.have, info.value.state) == (3, 2, "unchanged")
        assert store.pressure().n_dispatches == dispatches
        assert store.pressure().cells_used == total - 2
        assert [x.position for x in (a, b, c)] == [total - 2] * 3
        assert a._info().n_sampled == drawn
        assert np.array_equal(root.logits(), logits)
        # a long tick stops where the cells end, with everything it did
        done = store.tick([a], n_steps=10)
        assert (done.out_of_cells, done.n_ticks, len(done.tokens[0]), done.finish) == (True, 2, 2, [None])
        assert store.pressure().cells_remaining == 0


def test_bad_arguments_change_nothing(model: Model, store: Store) -> None:
    root = store.root()
    root.prefill(prompt(3))
    a, b = root.fork(2)
    n = len(model.vocab)
    before = (store.pressure().n_dispatches, store.pressure().cells_used)
    calls = {
        "twice in a prefill": lambda: store.prefill([(a, [40]), (a, [41])]),
        "twice in a commit": lambda: store.commit([a, a], [40, 41]),
        "twice in a tick": lambda: store.tick([a, b, a]),
        "token too large": lambda: a.prefill([n]),
        "token negative": lambda: a.commit(-1),
        "commit too large": lambda: a.commit(n),
        "lengths differ": lambda: store.commit([a, b], [40]),
        "stop token": lambda: store.tick([a], stop=[n]),
        "no steps": lambda: store.tick([a], n_steps=0),
        "no tokens": lambda: store.tick([a], max_tokens=0),
        "more tokens than are counted": lambda: store.tick([a], max_tokens=2**32),
        "limits for others": lambda: store.tick([a, b], max_tokens=[1]),
        "too many seeds": lambda: a.fork(2, seed=[1, 2, 3]),
        "negative fork": lambda: a.fork(-1),
        "negative start": lambda: store.root(start_pos=-1),
        "nan": lambda: setattr(a, "sampling", Sampling(temperature=float("nan"))),
        "top_p": lambda: setattr(a, "sampling", Sampling(top_p=0.0)),
        "window": lambda: setattr(a, "sampling", Sampling(penalty_last_n=-1)),
    }
    for what, call in calls.items():
        with pytest.raises(errors.InvalidArgumentError) as info:
            call()
        assert info.value.state == "unchanged", what
        assert before == (store.pressure().n_dispatches, store.pressure().cells_used), what
    with opened(model) as other:
        foreign = other.root()
        for call in (lambda: store.prefill([(foreign, [40])]), lambda: store.tick([foreign]), lambda: store.prune([foreign]), lambda: store.retain_only(foreign)):
            with pytest.raises(errors.InvalidArgumentError, match="another store"):
                call()
    for option in ({"n_ctx": 0}, {"n_ctx": -1}, {"n_branches": 257}, {"n_batch": 4, "n_branches": 8}, {"type_k": "q7_1"}, {"type_v": "q8_0", "flash_attn": False}, {"n_threads": 100000}):
        with pytest.raises(errors.InvalidArgumentError):
            model.store(**{"n_ctx": 256, **option})  # type: ignore[arg-type]


# Two of them, which are no token ids.
NO_IDS: dict[str, Any] = {
    "wider than 32 bits": [40, 2**32 + 41], "wider than 64": [40, 2**80], "below": [40, -(2**31) - 1], "parts": [40, 1.5], "words": [40, "A"], "nothing": [40, None], "bytes": [b"A", b"B"],
    "columns": [[40], [41]], "an array of columns": np.array([[40], [41]]), "two rows": np.array([[40, 41], [42, 43]]), "rows of two lengths": [[40], [41, 42]], "arrays": [np.array([40]), np.array([41])],
    "an array of parts": np.array([40.0, 1.5]), "a mask": np.array([True, False]), "times": np.array([40, 41], "timedelta64[s]"),
}
TAKES_IDS: dict[str, Callable[[Store, Branch, Branch, Any], object]] = {
    "prefill": lambda store, a, b, ids: a.prefill(ids), "prefill of several": lambda store, a, b, ids: store.prefill([(a, [40]), (b, ids)]),
    "commit": lambda store, a, b, ids: store.commit([a, b], ids), "stop": lambda store, a, b, ids: store.tick([a, b], stop=ids),
    "runs": lambda store, a, b, ids: store.tick([a], runs=[(b, ids)]), "score": lambda store, a, b, ids: store.score([[40], ids], source=a),
    "logits of": lambda store, a, b, ids: store.score([[40]], source=a, tokens=ids), "logits_at": lambda store, a, b, ids: a.logits_at(ids), "legal": lambda store, a, b, ids: a.legal(ids),
    "decode": lambda store, a, b, ids: store.model.vocab.decode(ids), "flags": lambda store, a, b, ids: store.model.vocab.flags(ids),
}


@pytest.mark.parametrize("call", TAKES_IDS.values(), ids=TAKES_IDS)
@pytest.mark.parametrize("ids", NO_IDS.values(), ids=NO_IDS)
def test_what_is_no_token_ids_is_refused_wherever_they_are_taken(store: Store, call: Callable[[Store, Branch, Branch, Any], object], ids: Any) -> None:
    root = store.root(sampling=Sampling(seed=1))
    root.prefill(prompt(3))
    a, b = root.fork(2)
    before = (store.pressure().n_dispatches, store.pressure().cells_used, store.pressure().leases_used, a._info().n_sampled, a.position, b.position)
    with pytest.raises(errors.InvalidArgumentError) as info:
        call(store, a, b, ids)
    assert info.value.state == "unchanged"
    assert before == (store.pressure().n_dispatches, store.pressure().cells_used, store.pressure().leases_used, a._info().n_sampled, a.position, b.position)


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.uint64), lambda ids: np.repeat(np.array(ids, np.int32), 2)[::2], lambda ids: [np.int16(i) for i in ids]])
def test_token_ids_are_numbers_of_any_kind(store: Store, kind: Callable[[list[int]], Any]) -> None:
    ids = kind([40, 41])
    a, b = branches = [store.root(sampling=GREEDY) for _ in range(2)]
    store.prefill([(a, ids), (b, ids)])
    store.commit(branches, ids)
    for branch in branches:
        branch.set_bias({40: 1e6})
    assert store.tick(branches, n_steps=2, max_tokens=np.int64(1)).tokens == [[40], [40]]  # type: ignore[arg-type]
    assert store.tick(branches, n_steps=2, stop=ids).finish == [Finish.STOP] * 2
    assert (a.position, b.position) == (4, 4)
    assert np.array_equal(a.logits_at(ids), a.logits_at([40, 41]))
    assert store.model.vocab.decode(ids) == store.model.vocab.decode([40, 41])


def test_nothing_to_sample_from(store: Store) -> None:
    empty, full = store.root(sampling=Sampling(seed=1)), store.root(sampling=Sampling(seed=1))
    full.prefill(prompt(2))
    drawn = full._info().n_sampled
    for call in (empty.sample, empty.logits, lambda: store.tick([full, empty]), lambda: store.sample([full, empty])):
        with pytest.raises(errors.NoLogitsError):
            call()
    assert full._info().n_sampled == drawn


def test_empty_calls(store: Store) -> None:
    root = store.root()
    assert root.prefill([]) == 0
    assert store.prefill([]) == 0
    store.commit([], [])
    assert store.sample([]) == []
    assert store.tick([]).tokens == []
    assert root.fork(0) == []
    assert (root.position, root.has_logits, store.pressure().n_dispatches) == (0, False, 0)


# -------------------------------------------------------------------------------------------------------------- sampling


def test_forks_without_a_seed_continue_alike_and_with_one_apart(store: Store) -> None:
    root = store.root(sampling=Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=7))
    root.prefill(prompt(4))
    alike, apart = root.fork(3), root.fork(3, seed=100)
    assert [b.sampling.seed for b in apart] == [100, 101, 102]
    done = store.tick([*alike, *apart], n_steps=12)
    assert done.tokens[0] == done.tokens[1] == done.tokens[2]
    assert len({tuple(t) for t in done.tokens[3:]}) == 3


def test_the_same_seed_draws_the_same_and_reports_itself(store: Store) -> None:
    texts = []
    for seed in (11, 11, 12, None):
        root = store.root(sampling=Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed))
        root.prefill(prompt(4))
        used = root.sampling.seed
        texts.append(tuple(store.tick([root], n_steps=12).tokens[0]))
        root.prune()
        again = store.root(sampling=Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=used))
        again.prefill(prompt(4))
        assert tuple(store.tick([again], n_steps=12).tokens[0]) == texts[-1]
        again.prune()
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_changing_the_temperature_keeps_the_stream(store: Store) -> None:
    """A temperature that follows the text must not replay one draw for ever."""
    wide = Sampling(temperature=50.0, top_k=0, top_p=1.0, min_p=0.0)
    root = store.root(sampling=Sampling(temperature=50.0, top_k=0, top_p=1.0, min_p=0.0, seed=3))
    root.prefill(prompt(4))
    drawn = []
    for i in range(24):
        root.sampling = Sampling(temperature=50.0 + i, top_k=0, top_p=1.0, min_p=0.0)
        drawn.append(root.sample())
    assert root._info().n_sampled == 24
    assert len(set(drawn)) > 12
    assert root.sampling.seed == 3
    root.sampling = wide
    root.sampling = wide
    assert root._info().n_sampled == 24  # equal settings are a no-op


def test_penalties_see_what_was_decoded_and_survive_fork_and_swap(store: Store) -> None:
    strong = Sampling(temperature=0.0, penalty_presence=1000.0, penalty_last_n=64)
    root = store.root(sampling=strong)
    root.prefill(prompt(4))
    first = store.tick([root], n_steps=8).tokens[0]
    assert len(set(first)) == 8  # a penalised token never comes again
    child = root.fork()
    child.sampling = Sampling(temperature=0.0, penalty_presence=999.0, penalty_last_n=64)
    second = store.tick([child], n_steps=8).tokens[0]
    assert len(set(first) | set(second)) == 16
    free = root.fork()
    free.sampling = GREEDY
    assert free.sample() == int(np.argmax(free.logits()))


def test_greedy_is_the_most_likely_token(store: Store) -> None:
    root = store.root(sampling=GREEDY)
    root.prefill(prompt(7))
    assert root.sample() == int(np.argmax(root.logits()))
    assert root.position == 7  # drawing decodes nothing


# --------------------------------------------------------------------------------------------------------------- grammar


def test_a_grammar_of_one_letter(model: Model, store: Store) -> None:
    root = store.root(sampling=Sampling(temperature=1.0, seed=1), grammar='root ::= "x"')
    root.prefill(prompt(4))
    done = store.tick([root], n_steps=5)
    assert model.vocab.decode(done.tokens[0]) == "x"
    assert done.finish == [Finish.END_OF_GENERATION]


def test_forks_carry_the_grammar_where_it_stands(model: Model, store: Store) -> None:
    root = store.root(sampling=GREEDY, grammar='root ::= "abc"')
    root.prefill(prompt(4))
    first = store.tick([root]).tokens[0]
    texts = [first + rest for rest in store.tick(root.fork(3), n_steps=6).tokens]
    assert [model.vocab.decode(t) for t in texts] == ["abc"] * 3
    assert model.vocab.decode(first + store.tick([root], n_steps=6).tokens[0]) == "abc"


def test_a_grammar_that_does_not_parse_leaves_the_old_one_in_force(model: Model, store: Store) -> None:
    root = store.root(sampling=GREEDY, grammar='root ::= "x"')
    root.prefill(prompt(4))
    for bad in ("root ::= (", "", "nonsense", Grammar('root ::= "a"', root="other")):
        with pytest.raises(errors.GrammarError, match=r"line \d+, column \d+"):
            root.set_grammar(bad)
    assert model.vocab.decode(store.tick([root], n_steps=5).tokens[0]) == "x"
    with pytest.raises(errors.GrammarError):
        store.root(grammar="root ::= (")
    assert store.branches() == [root]


def test_an_illegal_token_is_refused_before_it_is_decoded(model: Model, store: Store) -> None:
    free, bound = store.root(), store.root(grammar='root ::= "x"')
    store.prefill([(free, prompt(3)), (bound, prompt(3, 1))])
    y, = model.vocab.encode("y")
    eog = next(t for t in range(len(model.vocab)) if model.vocab.ends_generation(t))
    for token in (y, eog):
        with pytest.raises(errors.GrammarError) as info:
            store.commit([free, bound], [y, token])
        assert (info.value.index, info.value.state) == (1, "unchanged")
    assert (free.position, bound.position) == (3, 3)
    bound.set_grammar(None)
    store.commit([free, bound], [y, y])
    assert (free.position, bound.position) == (4, 4)


# ------------------------------------------------------------------------------------------------------------------ tick


def test_many_steps_are_the_same_as_many_ticks(store: Store) -> None:
    root = store.root(sampling=Sampling(temperature=1.0, seed=9))
    root.prefill(prompt(5))
    one, many = root.fork(4, seed=1), root.fork(4, seed=1)
    single: list[list[int]] = [[] for _ in one]
    for _ in range(10):
        done = store.tick(one)
        assert done.n_dispatches <= 1
        for row, tokens in zip(single, done.tokens, strict=True):
            row += tokens
    assert store.tick(many, n_steps=10).tokens == single or len(single[0]) < 10


def test_lanes_end_for_their_own_reasons(store: Store) -> None:
    root = store.root(sampling=GREEDY)
    root.prefill(prompt(6))
    text = store.tick([root.fork()], n_steps=6).tokens[0]
    stop_at = next(i for i in range(1, 6) if text[i] not in text[:i])
    stopped, counted, going = root.fork(3)
    before = store.pressure().n_dispatches
    done = store.tick([stopped, counted, going], n_steps=6, max_tokens=[None, 1, None], stop=[text[stop_at]])
    assert done.tokens == [text[:stop_at], text[:1], text[:stop_at]]
    assert done.finish == [Finish.STOP, Finish.LENGTH, Finish.STOP]
    assert (done.n_ticks, done.n_dispatches) == (stop_at + 1, stop_at)
    assert store.pressure().n_dispatches == before + stop_at
    assert [b.position for b in (stopped, counted, going)] == [6 + stop_at, 7, 6 + stop_at]
    assert stopped.last_token == text[stop_at - 1]


def test_a_branch_is_a_context(store: Store) -> None:
    with store.root() as root:
        root.prefill(prompt(3))
        root.fork(2)
    assert store.branches() == []


# --------------------------------------------------------------------------------------------------- views and lifetimes


def test_a_logits_view_raises_rather_than_lies(store: Store) -> None:
    root, other = store.root(), store.root()
    root.prefill(prompt(3))
    view = root.logits_view()
    assert np.array_equal(view.array, root.logits())
    with pytest.raises(ValueError, match="read-only"):
        view.array[0] = 1.0
    other.prefill([40])
    with pytest.raises(errors.StaleHandleError):
        _ = view.array


def test_closing_a_parent_closes_its_children_first() -> None:
    model = Model("stub:n_vocab=301")
    store = model.store(n_ctx=64)
    root = store.root()
    root.prefill([40])
    model.close()
    model.close()
    assert store.is_closed
    assert not root.is_alive
    for call in (store.pressure, store.root, lambda: root.prefill([41]), lambda: root.position, lambda: model.vocab.encode("a"), lambda: model.store(n_ctx=64), store.cancel):
        with pytest.raises(errors.ClosedError):
            call()


def test_two_stores_share_the_weights(model: Model) -> None:
    import pylloyal

    before = pylloyal.live_objects()["weights"]
    with Model(model.path) as twin, opened(twin) as a, opened(model) as b:
        assert pylloyal.live_objects()["weights"] == before
        ra, rb = a.root(), b.root()
        ra.prefill(prompt(4))
        rb.prefill(prompt(4))
        assert np.array_equal(ra.logits(), rb.logits())


def test_one_thread_at_a_time(model: Model) -> None:
    """A store is refused to a second thread, and the first one's work is untouched."""
    slow = Model("stub:spin_us=2000") if model.path.startswith("stub:") else model
    with opened(slow, n_batch=16) as store:
        root, idle = store.root(), store.root()
        inside, results = threading.Event(), []

        def work() -> None:
            results.append(store.prefill([(root, prompt(400))], progress=lambda *_: inside.set()))

        thread = threading.Thread(target=work)
        thread.start()
        assert inside.wait(30)
        seen: set[str] = set()
        while thread.is_alive():
            for call in (lambda: store.prefill([(idle, [40])]), lambda: store.tick([idle]), idle.fork):
                try:
                    call()
                except (errors.BusyError, errors.NoLogitsError, errors.NoLeaseError) as error:
                    seen.add(type(error).__name__)
        thread.join()
        assert "BusyError" in seen
        assert results == [25]
        assert np.array_equal(root.logits(), fresh_logits(slow, prompt(400)))


def test_a_cancelled_prefill_keeps_whole_dispatches(model: Model) -> None:
    with opened(model, n_ctx=2048, n_batch=16) as store:
        root = store.root()
        begun, asked = threading.Event(), threading.Event()
        caught: list[errors.DecodeCancelledError] = []

        def progress(landed: int, _total: int) -> None:
            if landed == 48:
                begun.set()
                assert asked.wait(30)

        def work() -> None:
            try:
                store.prefill([(root, prompt(1000))], progress=progress)
            except errors.DecodeCancelledError as error:
                caught.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(30)
        store.cancel()
        asked.set()
        thread.join()
        assert (caught[0].state, caught[0].partial) == ("advanced", True)
        assert root.position == store.pressure().cells_used == 48
        assert not root.is_poisoned
        assert not root.has_logits
        root.prefill(prompt(1000)[48:80])  # and on it goes
        assert np.array_equal(root.logits(), fresh_logits(model, prompt(1000)[:80]))


def test_a_cancelled_tick_hands_over_what_it_did(model: Model) -> None:
    slow = Model("stub:spin_us=1000") if model.path.startswith("stub:") else model
    with opened(slow, n_ctx=4096) as store:
        root = store.root(sampling=GREEDY, grammar=f'root ::= "{"abc" * 1000}"')
        root.prefill(prompt(5))
        caught: list[errors.DecodeCancelledError] = []

        def work() -> None:
            try:
                store.tick([root], n_steps=3000)
            except errors.DecodeCancelledError as error:
                caught.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        while store.pressure().n_dispatches < 4:  # polled while the other thread is inside
            pass
        while thread.is_alive():
            store.cancel()
        thread.join()
        assert caught[0].state == "advanced"
        taken = caught[0].result.tokens[0]
        assert len(taken) == root.position - 5 == store.pressure().cells_used - 5
        assert slow.vocab.decode(taken) == ("abc" * 1000)[: len(taken)]
        assert len(store.tick([root], n_steps=3).tokens[0]) == 3


def test_statistics_add_up(store: Store) -> None:
    root = store.root(sampling=GREEDY)
    n = root.prefill(prompt(40))
    done = store.tick(root.fork(3), n_steps=4)
    p = store.pressure()
    assert p.n_dispatches == n + done.n_dispatches
    assert p.n_tokens_decoded == 40 + sum(map(len, done.tokens)) == p.cells_used
    assert p.n_tokens_sampled >= sum(map(len, done.tokens))
    assert p.decode_s > 0


def test_branches_compare_by_what_they_name(store: Store) -> None:
    a, b = store.root(), store.root()
    assert a == store.branches()[0] != b
    assert len({a, store.branches()[0], b}) == 2
    assert a != "a branch"
    assert isinstance(a, Branch)
