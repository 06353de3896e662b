"""Saved branches on real engines: of every architecture, next to others, in stores of another shape."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from tiny_models import SPECS

from pylloyal import Branch, Model, Sampling, Store, errors
from tests.unit.test_saved import *  # noqa: F403

DECODERS = [name for name, spec in SPECS.items() if spec.is_decoder]
WINDOWED = {"tiny-gemma3", "tiny-gemma4", "tiny-gpt-oss", "tiny-cohere2"}
LOOSELY = Sampling(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, penalty_repeat=1.2, seed=5)
TOLERANCE = {"tiny-gemma3": 0.01, "tiny-gemma4": 0.05}  # with f32 weights and cache; see test_tiny_models.py


@pytest.fixture(scope="module", params=DECODERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def exact(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(tiny_models.write(tmp_path_factory.mktemp("saved") / f"{name}.gguf", name)) as model:
        yield model


def some(n: int, *salt: int) -> list[int]:
    return [int(x) for x in np.random.default_rng([n, *salt]).integers(0, 256, n)]


def opened(model: Model, **options: Any) -> Store:
    return model.store(**{"n_ctx": 1024, "n_branches": 6, "n_batch": 63, "n_threads": 1, **options})


@contextmanager
def precisely(model: Model, **options: Any) -> Iterator[Store]:
    with opened(model, flash_attn=False, type_k="f32", type_v="f32", **options) as store:
        yield store


def ticks(branch: Branch, n: int) -> list[int]:
    return branch.store.tick([branch], n_steps=n).tokens[0]


def grown(store: Store) -> Branch:
    """A fork, far past a window of 32, with draws behind it."""
    root = store.root(sampling=LOOSELY)
    root.prefill(some(90))
    fork = root.fork()
    fork.prefill(some(30, 1))
    vocab = store.model.vocab
    fork.set_bias({token: -float("inf") for token in range(len(vocab)) if vocab.ends_generation(token)})
    ticks(fork, 5)
    return fork


def test_saved_loaded_and_continued_bit_for_bit(exact: Model, name: str) -> None:
    """Into an empty store, a store of another shape, and beside the original; forks of what was loaded too."""
    with opened(exact) as store, opened(exact, n_ctx=512, n_branches=3) as other, opened(exact, n_branches=4, n_batch=32) as shifted:
        fork = grown(store)
        data, logits = fork.to_bytes(), fork.logits()
        shifted.root().prefill(some(7, 8))  # so that the cells come to lie elsewhere
        loaded = [each.from_bytes(data) for each in (other, shifted, store)]
        assert all(np.array_equal(branch.logits(), logits) for branch in loaded)
        assert all((branch.position, branch.cells_own) == (125, 125) for branch in loaded)
        twins = [branch.fork() for branch in loaded]
        spoken = ticks(fork, 40)
        for branch in loaded:
            assert ticks(branch, 40) == spoken
            assert np.array_equal(branch.logits(), fork.logits())
        for twin in twins:
            assert ticks(twin, 40) == spoken
            assert np.array_equal(twin.logits(), fork.logits())


KINDS = [(name, here, there) for name in DECODERS for here in (True, False) for there in (True, False) if name in WINDOWED or (here and there)]


@pytest.mark.parametrize(("name", "swa_full", "swa_full_there"), KINDS, ids=[f"{name}-{here}-{there}" for name, here, there in KINDS])
def test_windows_full_or_not_on_either_side(tmp_path: Path, name: str, swa_full: bool, swa_full_there: bool) -> None:
    """Bytes hold what can still be seen, so they fit both kinds of store. With windows cells lie in another order afterwards, and the
    last bits with them: everything is said over again, in f32."""
    tolerance = TOLERANCE.get(name, 1e-4)
    with Model(tiny_models.write(tmp_path / "x.gguf", name, quant="f32")) as precise, precisely(precise, swa_full=swa_full) as store, \
            precisely(precise, swa_full=swa_full_there, n_branches=3, n_ctx=768) as other:
        fork = grown(store)
        for k in range(200):  # round and round the smaller cache
            fork.commit(k)
        data, logits = fork.to_bytes(), fork.logits()
        beside = other.root()
        beside.prefill(some(70, 8))
        loaded = other.from_bytes(data)
        assert np.array_equal(loaded.logits(), logits)
        assert loaded._info().n_sampled == fork._info().n_sampled == 5
        twin = loaded.fork()
        for k in range(100):
            other.commit([loaded, beside, twin], [2 * k, k, 255 - k])
            fork.commit(2 * k)
        assert float(np.abs(loaded.logits() - fork.logits()).max()) < tolerance
        fork_of_original = store.from_bytes(data)
        for k in range(100):
            fork_of_original.commit(255 - k)
        assert float(np.abs(twin.logits() - fork_of_original.logits()).max()) < tolerance
        rest = other.pressure()
        assert rest.cells_used == loaded.cells_own + twin.cells_own + beside.cells_own == 325 + 100 + 100 + 170
        other.retain_only(twin)
        assert other.pressure().cells_used == 425


def test_again_and_again(exact: Model) -> None:
    """Saved and loaded a hundred times nothing is lost, and nothing stays behind."""
    with opened(exact, n_branches=2) as store:
        branch = grown_alone(store)
        reference = store.from_bytes(branch.to_bytes())
        spoken = ticks(reference, 30)
        reference.prune()
        for _ in range(50):
            data = branch.to_bytes()
            branch.prune()
            assert store.pressure().cells_used == 0
            branch = store.from_bytes(data)
        assert ticks(branch, 30) == spoken


def grown_alone(store: Store) -> Branch:
    branch = store.root(sampling=LOOSELY)
    branch.prefill(some(60))
    vocab = store.model.vocab
    branch.set_bias({token: -float("inf") for token in range(len(vocab)) if vocab.ends_generation(token)})
    return branch


def test_another_model_of_the_same_shape_is_another(exact: Model, name: str, tmp_path: Path) -> None:
    """The same architecture and name with other weights, another byte of metadata, another weight; each refused, both sides named.

    The kernel reads the beginning of a file and a page here and there: one weight between two pages is not noticed in a large file."""
    path = tmp_path / f"{name}.gguf"
    with opened(exact) as store:
        branch = store.root()
        branch.prefill(some(5))
        data = branch.to_bytes()
    tiny_models.write(path, name)
    with Model(path) as same, opened(same) as store:  # another file of the same bytes is the same model
        assert store.from_bytes(data).position == 5
    original = path.read_bytes()
    for at in (None, original.index(name.encode()), len(original) // 65 * 40 + 1234):
        if at is None:
            tiny_models.write(path, name, seed=2)
        else:
            path.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
        with Model(path) as other, opened(other) as store:
            with pytest.raises(errors.UnsupportedOperationError, match=rf"model {name}\.gguf .*; this store has another file of that name"):
                store.from_bytes(data)
            assert store.branches() == []
    moved = tmp_path / "renamed.gguf"
    tiny_models.write(moved, name, seed=2)
    with Model(moved) as other, opened(other) as store, pytest.raises(errors.UnsupportedOperationError, match=rf"model {name}\.gguf .*; this store has renamed\.gguf"):
        store.from_bytes(data)


def test_another_architecture(tmp_path: Path) -> None:
    paths = [tiny_models.write(tmp_path / f"{name}.gguf", name) for name in ("tiny-llama", "tiny-mamba")]
    with Model(paths[0]) as llama, Model(paths[1]) as mamba, opened(llama) as a, opened(mamba) as b:
        for source, target in ((a, b), (b, a)):
            branch = source.root()
            branch.prefill(some(5))
            with pytest.raises(errors.UnsupportedOperationError, match="model tiny-.*; this store has tiny-"):
                target.from_bytes(branch.to_bytes())


@pytest.mark.parametrize("kv", ["f32", "q8_0", "q4_0"])
def test_other_types_of_cache(tmp_path: Path, kv: Any) -> None:
    with Model(tiny_models.write(tmp_path / "x.gguf")) as model, opened(model, type_k=kv, type_v=kv) as store, opened(model, type_k=kv, type_v=kv, n_ctx=512) as other:
        fork = grown(store)
        loaded = other.from_bytes(fork.to_bytes())
        assert ticks(loaded, 30) == ticks(fork, 30)
        assert np.array_equal(loaded.logits(), fork.logits())


def test_bytes_of_cells_that_the_engine_does_not_take(exact: Model, name: str) -> None:
    """Whole bytes around cells that are cut, foreign or garbled: an error, an empty sequence, and a store that goes on."""
    with opened(exact) as store:
        branch = store.root()
        branch.prefill(some(20))
        data = branch.to_bytes(logits=False)
        payload = data[PREFIX:]  # noqa: F405
        head = Head(data)  # noqa: F405
        # No history, no bias, no grammar and no logits: nothing but numbers between the head and the engine's bytes.
        at = head.at + struct.calcsize(head.FORM) + 4 + 7 * 4 + 2 * 4 + 1 + 3 * 8 + 4 + 2 * 8 + 8 * 8 + 8  # noqa: F405
        front, cells = payload[:at], payload[at + 8 :]
        assert int.from_bytes(payload[at : at + 8], "little") == len(cells)
        before = store.pressure()
        for bad in (cells[:-1], cells[: len(cells) // 2], cells[:13], cells + b"x", b"\0" * len(cells), cells[4:], b"\xff" * 4 + cells[4:]):
            with pytest.raises(errors.KernelError) as caught:
                store.from_bytes(sealed(front + np.uint64(len(bad)).tobytes() + bad))  # noqa: F405
            assert caught.value.state == "unchanged"
            after = store.pressure()
            assert (after.cells_used, after.leases_used) == (before.cells_used, before.leases_used)
        loaded = store.from_bytes(data)
        for one in (branch, loaded):
            one.commit(7)
        assert np.array_equal(branch.logits(), loaded.logits())
        fresh = store.root()
        fresh.prefill(some(20))
        fresh.commit(7)
        assert float(np.abs(fresh.logits() - branch.logits()).max()) < 1.0

