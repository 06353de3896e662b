"""deterministic=True: a branch says the same, bit for bit, whatever is decoded beside it.

With f32 weights a batch and its parts differ in the last bits, so these tests can fail: the same calls without it do differ.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from tiny_models import SPECS

from pylloyal import Branch, Model, Sampling, Store, errors

DECODERS = [name for name, spec in SPECS.items() if spec.is_decoder]
RECURRENT = {"tiny-mamba", "tiny-mamba2", "tiny-rwkv7"}
FREELY = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, penalty_repeat=1.1, seed=5)

Trace = tuple[list[int], list[np.ndarray[Any, Any]]]


@pytest.fixture(scope="module", params=DECODERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(tiny_models.write(tmp_path_factory.mktemp("deterministic") / f"{name}.gguf", name, quant="f32")) as one:
        yield one


def some(n: int, *salt: int) -> list[int]:
    return [int(x) for x in np.random.default_rng([n, *salt]).integers(0, 256, n)]


def opened(model: Model, **options: Any) -> Store:
    return model.store(**{"n_ctx": 2048, "n_branches": 8, "n_batch": 63, "n_threads": 1, "flash_attn": True, "deterministic": True, **options})


class Company:
    """Others, who are busy whenever the branch in question is."""

    def __init__(self, store: Store, kind: str) -> None:
        self.store, self.kind = store, kind
        self.others: list[Branch] = []
        if kind in ("before", "all"):  # its cells come to lie behind those of others
            self.others.append(store.root(sampling=FREELY))
            self.others[0].prefill(some(37, 9))

    def prefill(self, me: Branch, text: list[int], step: int) -> None:
        if self.kind == "beside" and not self.others:
            self.others.append(self.store.root(sampling=FREELY))
        self.store.prefill([*((other, some(5 + 7 * i, step, i)) for i, other in enumerate(self.others)), (me, text)])

    def commit(self, me: Branch, token: int) -> None:
        self.store.commit([*self.others, me], [*(3 + i for i in range(len(self.others))), token])

    def tick(self, me: Branch, n: int) -> list[int]:
        return self.store.tick([*self.others, me], n_steps=n).tokens[-1]

    def grow(self, me: Branch) -> None:
        if self.kind in ("forks", "all") and self.store.pressure().leases_remaining >= 2:
            self.others += [me.fork(seed=99), *([self.others[0].fork()] if self.others else [])]


def life(store: Store, kind: str) -> Trace:
    """One branch's prefills, commits and ticks, with whatever company; its tokens and its logits after each."""
    company = Company(store, kind)
    me = store.root(sampling=FREELY)
    vocab = store.model.vocab
    me.set_bias({token: -float("inf") for token in range(len(vocab)) if vocab.ends_generation(token)})
    tokens: list[int] = []
    rows: list[np.ndarray[Any, Any]] = []
    for step in range(3):
        company.prefill(me, some(70 if step == 0 else 9, step), step)
        rows.append(me.logits())
        company.grow(me)
        for k in range(4):
            company.commit(me, 60 + k)
            rows.append(me.logits())
        tokens += company.tick(me, 6)
        rows.append(me.logits())
    assert len(tokens) == 18
    return tokens, rows


def same(a: Trace, b: Trace) -> bool:
    return a[0] == b[0] and all(np.array_equal(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.mark.parametrize("kind", ["beside", "before", "forks", "all"])
def test_company_does_not_matter(model: Model, kind: str) -> None:
    with opened(model) as alone, opened(model) as together:
        assert same(life(alone, "alone"), life(together, kind))


def test_it_could_be_otherwise(model: Model, name: str) -> None:
    """Without it, company moves the last bits on these very calls (and with experts, whole tokens)."""
    with opened(model, deterministic=False) as alone, opened(model, deterministic=False) as together:
        assert not same(life(alone, "alone"), life(together, "all"))


def test_a_fork_says_what_its_twin_says(model: Model) -> None:
    """Siblings with one stream, decoded in one call, stay together."""
    with opened(model) as store:
        root = store.root(sampling=FREELY)
        root.prefill(some(50))
        twins = root.fork(4)
        done = store.tick(twins, n_steps=12)
        assert done.n_dispatches >= 4 * min(len(t) for t in done.tokens)
        assert done.tokens == [done.tokens[0]] * 4
        assert all(np.array_equal(twin.logits(), twins[0].logits()) for twin in twins)


def test_it_needs_flash_attention(model: Model, name: str) -> None:
    """Without it all cells of the cache take part in a sum, masked or not, and a branch's lie where the others let them."""
    if name in RECURRENT:  # no attention, and so no cells to sum over
        with opened(model, flash_attn=False) as alone, opened(model, flash_attn=False) as together:
            assert same(life(alone, "alone"), life(together, "all"))
        return
    with pytest.raises(errors.UnsupportedOperationError, match="deterministic = 1 needs flash attention"):
        opened(model, flash_attn=False)
    with opened(model, flash_attn=None) as store:
        assert store.pressure().flash_attn
        assert store.pressure().deterministic


def first_token_after(prepare: Callable[[Store], Branch], path: Path, **options: Any) -> np.ndarray[Any, Any]:
    with Model(path) as model, opened(model, **options) as store:
        me = prepare(store)
        me.prefill(some(30, 1))
        for k in range(8):
            me.commit(k)
        return me.logits()


def test_where_the_promise_ends(tmp_path: Path) -> None:
    """As the header says: cells taken again lie out of order, and more than twice as many threads as heads (here four) share out cells by
    where they lie. Should this fail because nothing differs any more, the header can promise more."""
    path = tiny_models.write(tmp_path / "x.gguf", quant="f32")

    def alone(store: Store) -> Branch:
        me = store.root()
        me.prefill(some(20))
        return me

    def after_a_prune(store: Store) -> Branch:
        gone = store.root()
        gone.prefill(some(37, 9))
        me = alone(store)
        gone.prune()
        store.root().prefill(some(5, 4))
        return me

    def behind_many(store: Store) -> Branch:
        store.root().prefill(some(230, 9))
        me = alone(store)
        store.root().prefill(some(300, 8))
        return me

    for n_threads in (1, 2, 3, 8):
        assert np.array_equal(first_token_after(alone, path), first_token_after(behind_many, path, n_threads=n_threads))
    assert not np.array_equal(first_token_after(alone, path), first_token_after(after_a_prune, path))
    assert not np.array_equal(first_token_after(alone, path, n_threads=9), first_token_after(behind_many, path, n_threads=9))
