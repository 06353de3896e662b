"""Embedders on the stub, whose vectors are a hash of a text's tokens: packing, refusals, and being closed."""
from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pylloyal import Embedder, Model, errors, live_objects
from tests.unit.test_kernel import NO_IDS


def texts(n: int, longest: int = 17) -> list[list[int]]:
    return [[int(x) for x in np.random.default_rng([5, i]).integers(0, 250, 1 + i * 7 % longest)] for i in range(n)]


@pytest.fixture
def embedder(stub: Model) -> Iterator[Embedder]:
    with stub.embedder(n_ctx=64) as one:
        yield one


def test_what_it_is_and_has_done(stub: Model, embedder: Embedder) -> None:
    s = embedder.statistics()
    assert (s.n_embd, s.n_ctx, s.pooling, s.n_dispatches, s.n_texts, s.n_tokens) == (8, 64, "mean", 0, 0, 0)
    embedder.embed(texts(10))
    s = embedder.statistics()
    assert (s.n_texts, s.n_tokens) == (10, sum(len(t) for t in texts(10)))
    assert 3 <= s.n_dispatches < 10
    assert repr(embedder).startswith("<Embedder of 'stub:")
    with stub.embedder() as by_default, Model("stub:n_ctx_train=100") as short, short.embedder() as shorter:
        assert (by_default.statistics().n_ctx, shorter.statistics().n_ctx) == (512, 100)


@pytest.mark.parametrize("n", [1, 4, 5, 64, 65, 200])
@pytest.mark.parametrize("n_ctx", [17, 40, 512])
def test_packing_does_not_change_a_vector(stub: Model, n: int, n_ctx: int) -> None:
    with stub.embedder(n_ctx=n_ctx) as embedder:
        packed = embedder.embed(texts(n))
        assert packed.shape == (n, 8)
        assert packed.dtype == np.float32
        assert np.array_equal(packed, np.concatenate([embedder.embed([t]) for t in texts(n)]))
        assert np.array_equal(packed[::-1], embedder.embed(texts(n)[::-1]))
        assert np.array_equal(packed, embedder.embed(iter(texts(n))))
        assert np.array_equal(packed, embedder.embed([np.array(t) for t in texts(n)]))  # type: ignore[misc]


def test_length_one_or_as_it_is(embedder: Embedder) -> None:
    raw, unit = embedder.embed(texts(20), normalize=False), embedder.embed(texts(20))
    lengths = np.linalg.norm(raw, axis=1)
    assert np.allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
    assert np.allclose(unit * lengths[:, None], raw, atol=1e-5)
    assert np.abs(lengths - 1).min() > 0.01


def test_pooling_is_what_was_asked_for(stub: Model) -> None:
    found = {}
    for pooling in ("mean", "cls", "last"):
        with stub.embedder(n_ctx=64, pooling=pooling) as embedder:
            assert embedder.statistics().pooling == pooling
            found[pooling] = embedder.embed(texts(3))
    assert not np.array_equal(found["mean"], found["cls"])
    assert not np.array_equal(found["mean"], found["last"])
    with stub.embedder(n_ctx=64) as embedder:
        assert np.array_equal(embedder.embed(texts(3)), found["mean"])


def test_similarity(embedder: Embedder) -> None:
    a, b = texts(7), texts(4, 9)
    own = embedder.similarity(a)
    assert own.shape == (7, 7)
    assert np.allclose(own, own.T, atol=1e-6)
    assert np.allclose(np.diag(own), 1, atol=1e-6)
    assert (np.abs(own) <= 1 + 1e-6).all()
    other = embedder.similarity(iter(a), iter(b))
    assert other.shape == (7, 4)
    assert np.allclose(other, embedder.embed(a) @ embedder.embed(b).T, atol=1e-6)
    assert embedder.similarity(a, []).shape == (7, 0)
    assert embedder.similarity([]).shape == (0, 0)


def test_nothing_and_text(stub: Model, embedder: Embedder) -> None:
    assert embedder.embed([]).shape == (0, 8)
    assert embedder.statistics().n_dispatches == 0
    words = embedder.embed(["the whale", "<eos>"])
    assert np.array_equal(words, embedder.embed([[256, *b"the whale"], [256, *b"<eos>"]]))  # with a beginning; control tokens inert
    assert np.array_equal(embedder.embed([""]), embedder.embed([[256]]))


@pytest.mark.parametrize(("bad", "index"), [([[1], []], 1), ([[1], [2], [3] * 65], 2), ([[]], 0), ([*texts(70), []], 70), ([*texts(130), [1] * 65, [1]], 130)])
def test_texts_that_cannot_be_taken(embedder: Embedder, bad: list[list[int]], index: int) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        embedder.embed(bad)
    assert (caught.value.index, caught.value.state) == (index, "unchanged")
    if len(bad[index]) > 64:
        assert (caught.value.need, caught.value.have) == (65, 64)
    assert embedder.embed([[1]]).shape == (1, 8)


@pytest.mark.parametrize("bad", [*NO_IDS.values(), [300], [-1], 5, None], ids=[*NO_IDS, "too large", "negative", "a number", "None"])
def test_what_is_no_text(embedder: Embedder, bad: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        embedder.embed([[40], bad, [41]])
    assert (caught.value.index, caught.value.state) == (1, "unchanged")
    assert embedder.statistics().n_dispatches == 0


@pytest.mark.parametrize("options", [{"n_ctx": 0}, {"n_ctx": -1}, {"n_ctx": 4097}, {"n_ctx": 2**31}, {"n_threads": 0}, {"n_threads": 513}, {"pooling": "rank"}, {"pooling": "none"}])
def test_options_out_of_range(stub: Model, options: dict[str, Any]) -> None:
    gc.collect()  # what another test left
    alive = live_objects()
    with pytest.raises(errors.InvalidArgumentError):
        stub.embedder(**options)
    gc.collect()
    assert live_objects() == alive


def test_a_model_without_weights_or_context() -> None:
    with Model("stub:", vocab_only=True) as bare, pytest.raises(errors.UnsupportedOperationError, match="vocab_only"):
        bare.embedder()
    with Model("stub:n_ctx_train=0") as bare:
        with pytest.raises(errors.InvalidArgumentError, match="declares no context"):
            bare.embedder()
        with bare.embedder(n_ctx=5000) as embedder:  # nothing says that it is too much
            assert embedder.statistics().n_ctx == 5000
        with pytest.raises(errors.InvalidArgumentError):
            bare.embedder(n_ctx=65537)


@pytest.mark.parametrize("rc", [1, -1, 2, -3])
def test_when_the_engine_fails(stub: Model, embedder: Embedder, rc: int) -> None:
    want = embedder.embed(texts(90))
    for at in (1, 2, 16, 17, 20):  # in the first group of texts, and in the second
        with Model(f"stub:fail_at={at};fail_rc={rc}") as broken, broken.embedder(n_ctx=64) as failing:
            with pytest.raises(errors.DecodeError) as caught:
                failing.embed(texts(90))
            assert (caught.value.engine_rc, caught.value.state) == (rc, "unchanged")
            assert caught.value.index is not None
            assert 0 <= caught.value.index < 90
            assert failing.statistics().n_dispatches == at
            assert np.array_equal(failing.embed(texts(90)), want)


def test_closed(stub: Model) -> None:
    embedder = stub.embedder(n_ctx=64)
    assert live_objects()["embedders"] == 1
    embedder.close()
    embedder.close()
    assert embedder.is_closed
    assert repr(embedder) == "<Embedder closed>"
    for call in (lambda: embedder.embed([[1]]), lambda: embedder.similarity([[1]]), embedder.statistics):
        with pytest.raises(errors.ClosedError):
            call()
    assert (live_objects()["embedders"], live_objects()["contexts"]) == (0, 0)


def test_closed_with_its_model() -> None:
    model = Model("stub:n_vocab=270")
    embedder = model.embedder()
    assert model.statistics().n_open == 1
    model.close()
    assert embedder.is_closed
    with pytest.raises(errors.ClosedError):
        embedder.embed([[1]])
    with pytest.raises(errors.ClosedError):
        model.embedder()


def test_collected_when_nobody_holds_it(stub: Model) -> None:
    embedder = stub.embedder()
    embedder.embed([[1]])
    del embedder
    gc.collect()
    assert live_objects()["embedders"] == 0


def test_closed_while_another_thread_is_inside(stub: Model) -> None:
    """The call in flight is let finish; what the thread asks for next is refused."""
    embedder = stub.embedder(n_ctx=512)
    caught: list[BaseException] = []
    many, want = texts(64, 100), stub.embedder(n_ctx=512)
    rows: list[Any] = []

    def body() -> None:
        try:
            while True:
                rows.append(embedder.embed(many))
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    while not rows:
        pass
    embedder.close()
    thread.join()
    assert isinstance(caught[0], errors.ClosedError)
    assert all(np.array_equal(row, rows[0]) for row in rows)
    assert np.array_equal(rows[0], want.embed(many))
    want.close()
    assert live_objects()["embedders"] == 0


def test_two_threads_on_one_embedder(stub: Model, embedder: Embedder) -> None:
    """One at a time is inside: the other is refused, never given wrong vectors."""
    want = embedder.embed(texts(60))
    wrong: list[object] = []
    refused = []

    def body() -> None:
        for _ in range(60):
            try:
                if not np.array_equal(embedder.embed(texts(60)), want):
                    wrong.append("vectors")
            except errors.BusyError as error:
                refused.append(error)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=body) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(refused) < 120
    assert np.array_equal(embedder.embed(texts(60)), want)
