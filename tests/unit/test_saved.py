"""Saved branches: they continue token for token, files are whole or not there, and what does not belong is refused by name."""
from __future__ import annotations

import json
import os
import resource
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pylloyal import Branch, Model, Sampling, Store, describe_saved, errors, live_objects
from tests.unit.test_kernel import GREEDY, opened, prompt

INF = float("inf")
ENDLESS = Sampling(temperature=1.3, top_k=0, top_p=0.98, min_p=0.001, typical_p=0.99, penalty_repeat=1.2, penalty_frequency=0.1, penalty_presence=0.05, penalty_last_n=1500, seed=0xFEDC_BA98_7654_3210)


@pytest.fixture
def store(model: Model) -> Iterator[Store]:
    with opened(model, n_ctx=1024) as one:
        yield one


def never_ends(branch: Branch) -> None:
    vocab = branch.store.model.vocab
    branch.set_bias({token: -INF for token in range(len(vocab)) if vocab.ends_generation(token)})


def spoken(store: Store, n: int = 12, sampling: Sampling = ENDLESS) -> Branch:
    """A branch with a history: prompt, metrics, biases, some draws."""
    branch = store.root(sampling=sampling)
    branch.prefill(prompt(9))
    never_ends(branch)
    branch.steer({66: 1.5, 67: -INF})
    branch.set_metrics(model=True, sampling=True)
    store.tick([branch], n_steps=n)
    return branch


def assert_same(a: Branch, b: Branch) -> None:
    assert (a.position, a.cells_own + a.cells_inherited, a.last_token, a.has_logits) == (b.position, b.cells_own + b.cells_inherited, b.last_token, b.has_logits)
    assert (a.sampling, a.metrics, a._info().n_sampled, a._info().has_grammar) == (b.sampling, b.metrics, b._info().n_sampled, b._info().has_grammar)
    if a.has_logits:
        assert np.array_equal(a.logits(), b.logits())
        tokens = list(range(0, len(a.store.model.vocab), 7))
        assert a.legal(tokens) == b.legal(tokens)


def ticks(branch: Branch, n: int) -> list[int]:
    return branch.store.tick([branch], n_steps=n).tokens[0]


# ------------------------------------------------------------------------------------------------------------- continuing


def test_it_continues_token_for_token(model: Model, store: Store) -> None:
    branch = spoken(store)
    data = branch.to_bytes()
    assert data == branch.to_bytes()  # looking changes nothing
    with opened(model, n_ctx=512, n_branches=3, n_batch=17) as other:
        loaded = other.from_bytes(data)
        assert_same(branch, loaded)
        assert (loaded.parent, loaded.children, loaded.cells_inherited, loaded.root) == (None, [], 0, loaded)
        assert loaded.to_bytes() == data
        assert ticks(branch, 60) == ticks(loaded, 60)
        assert_same(branch, loaded)


@pytest.mark.parametrize("change", [
    {"temperature": 0.5}, {"temperature": 0.0}, {"typical_p": 0.7}, {"min_p": 0.1}, {"top_p": 0.5}, {"top_k": 7}, {"penalty_repeat": 1.8}, {"penalty_last_n": 5}, {"seed": 5},
    {"penalty_frequency": 0.5, "penalty_presence": 0.5, "temperature": 2.0},
], ids=lambda change: next(iter(change)))
def test_settings_that_change_after_the_restore(model: Model, store: Store, change: dict[str, Any]) -> None:
    """The stream and the penalty window are those of the original, whatever is asked of them next."""
    branch = spoken(store, 30)
    with opened(model) as other:
        loaded = other.from_bytes(branch.to_bytes())
        for one in (branch, loaded):
            one.sampling = Sampling(**{**{k: getattr(ENDLESS, k) for k in ENDLESS.__dataclass_fields__}, "seed": None, **change})
        assert branch.sampling == loaded.sampling
        assert ticks(branch, 40) == ticks(loaded, 40)
        assert_same(branch, loaded)


def test_a_window_longer_than_any_buffer(model: Model) -> None:
    """2,100 tokens, a penalty window of 1,500 of them."""
    with opened(model, n_ctx=4096) as store, opened(model, n_ctx=4096) as other:
        branch = store.root(sampling=ENDLESS)
        branch.prefill(prompt(3))
        never_ends(branch)
        assert len(ticks(branch, 2100)) == 2100
        loaded = other.from_bytes(branch.to_bytes())
        assert ticks(branch, 100) == ticks(loaded, 100)


def test_forks_and_their_inheritance(model: Model, store: Store) -> None:
    root = spoken(store)
    child = root.fork(seed=5)
    ticks(child, 4)
    grandchild = child.fork(seed=6)
    ticks(grandchild, 4)
    with opened(model) as other:
        loaded = other.from_bytes(grandchild.to_bytes())
        assert (loaded.cells_own, loaded.cells_inherited, other.pressure().cells_used) == (grandchild.position, 0, grandchild.position)
        # Forks do not carry steering, and what is saved is what the fork has.
        assert ticks(grandchild, 20) == ticks(loaded, 20)
        assert_same(grandchild, loaded)
        twins = loaded.fork(2, seed=[1, 2])
        assert [ticks(twin, 10) for twin in twins] == [ticks(fork, 10) for fork in grandchild.fork(2, seed=[1, 2])]
    alongside = store.from_bytes(grandchild.to_bytes())
    assert alongside.root == alongside
    store.retain_only(alongside)
    assert store.pressure().cells_used == alongside.position


def test_a_grammar_half_way(model: Model, store: Store) -> None:
    branch = store.root(sampling=GREEDY, grammar='root ::= "abcdefgh"')
    branch.prefill(prompt(4))
    assert model.vocab.decode(ticks(branch, 3)) == "abc"
    with opened(model) as other:
        loaded = other.from_bytes(branch.to_bytes())
        assert_same(branch, loaded)
        done = other.tick([loaded], n_steps=20)
        assert model.vocab.decode(done.tokens[0]) == "defgh"
        assert done.finish[0] is not None
        with pytest.raises(errors.GrammarError):
            loaded.commit(model.vocab.encode("x")[0])
        loaded.set_grammar(None)
        assert not other.from_bytes(loaded.to_bytes())._info().has_grammar


@pytest.mark.parametrize("start_pos", [0, 100])
def test_an_empty_branch(model: Model, store: Store, start_pos: int) -> None:
    branch = store.root(sampling=ENDLESS, start_pos=start_pos)
    with opened(model) as other:
        loaded = other.from_bytes(branch.to_bytes())
        assert_same(branch, loaded)
        assert (loaded.position, loaded.has_logits, other.pressure().cells_used) == (start_pos, False, 0)
        for one in (branch, loaded):
            one.prefill(prompt(5))
        assert_same(branch, loaded)


def test_without_logits(model: Model, store: Store) -> None:
    branch = spoken(store)
    full, bare = branch.to_bytes(), branch.to_bytes(logits=False)
    assert len(full) - len(bare) == 4 * len(model.vocab)
    with opened(model) as other:
        loaded = other.from_bytes(bare)
        assert (loaded.position, loaded.has_logits) == (branch.position, False)
        with pytest.raises(errors.NoLogitsError):
            loaded.sample()
        for one in (branch, loaded):
            one.commit(70)
        assert ticks(branch, 20) == ticks(loaded, 20)
    assert describe_saved(bare)["has_logits"] is False
    assert describe_saved(full)["has_logits"] is True


def test_logits_that_the_caller_made(model: Model, store: Store) -> None:
    branch = store.root(sampling=GREEDY)
    row = np.linspace(-1, 1, len(model.vocab), dtype=np.float32)
    row[5:9] = -INF
    branch.set_logits(row)
    assert np.array_equal(store.from_bytes(branch.to_bytes()).logits(), row)


# ------------------------------------------------------------------------------------------------------------------ files


def test_a_file(model: Model, store: Store, tmp_path: Path) -> None:
    branch = spoken(store)
    for path in (tmp_path / "a.pyl", str(tmp_path / "b.pyl"), tmp_path / ("n" * 255)):  # a name as long as names can be
        n = branch.save(path)
        assert n == os.path.getsize(path) == len(branch.to_bytes())
        assert_same(branch, store.load(path))
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.pyl", "b.pyl", "n" * 255]
    assert describe_saved(tmp_path / "a.pyl") == describe_saved(str(tmp_path / "b.pyl")) == describe_saved(branch.to_bytes())


def test_a_file_takes_the_place_of_another(store: Store, tmp_path: Path) -> None:
    branch = spoken(store)
    branch.save(tmp_path / "x")
    ticks(branch, 5)
    branch.save(tmp_path / "x", logits=False)
    loaded = store.load(tmp_path / "x")
    assert (loaded.position, loaded.has_logits) == (branch.position, False)
    assert [x.name for x in tmp_path.iterdir()] == ["x"]


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """Writing beyond it fails, as on a disk that is full (Python ignores the signal that comes with it)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("old", [None, b"what was there before"])
def test_a_disk_that_is_full(store: Store, tmp_path: Path, old: bytes | None) -> None:
    branch = spoken(store)
    path = tmp_path / "x"
    if old is not None:
        path.write_bytes(old)
    for limit in (0, 1, len(branch.to_bytes()) - 1):
        with largest_file(limit), pytest.raises(OSError, match="File too large"):
            branch.save(path)
        assert [x.name for x in tmp_path.iterdir()] == ([] if old is None else ["x"])
        assert old is None or path.read_bytes() == old
    branch.save(path)
    assert_same(branch, store.load(path))


def test_places_where_nothing_can_be_written(store: Store, tmp_path: Path) -> None:
    branch = spoken(store)
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "in it").write_bytes(b"y")
    cases: dict[Path, type[OSError]] = {tmp_path / "no" / "such": FileNotFoundError, tmp_path / "file" / "below": NotADirectoryError, tmp_path / "folder": IsADirectoryError,
                                       tmp_path / ("n" * 256): OSError}
    for path, kind in cases.items():
        with pytest.raises(kind):
            branch.save(path)
    assert sorted(str(x.relative_to(tmp_path)) for x in tmp_path.rglob("*")) == ["file", "folder", "folder/in it"]
    for path, kind in ((tmp_path / "nowhere", FileNotFoundError), (tmp_path, IsADirectoryError)):
        for read in (store.load, describe_saved):
            with pytest.raises(kind):
                read(path)
    assert store.branches() == [branch]


@pytest.mark.parametrize("strike", ["write", "fsync", "replace", "replaced"])
def test_an_interrupt_leaves_the_old_file_or_the_new_one(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strike: str) -> None:
    branch = spoken(store)
    path = tmp_path / "x"
    path.write_bytes(b"old")
    real = {name: getattr(os, name) for name in ("fdopen", "fsync", "replace")}

    def interrupted(name: str, after: bool = False) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if after:
                real[name](*arguments, **options)
            raise KeyboardInterrupt
        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, {"write": "fdopen", "replaced": "replace"}.get(strike, strike), interrupted({"write": "fdopen", "replaced": "replace"}.get(strike, strike), strike == "replaced"))
        with pytest.raises(KeyboardInterrupt):
            branch.save(path)
    assert [x.name for x in tmp_path.iterdir()] == ["x"]
    assert path.read_bytes() == (branch.to_bytes() if strike == "replaced" else b"old")


def test_only_its_owner_reads_a_new_file(store: Store, tmp_path: Path) -> None:
    """A conversation is in it."""
    spoken(store).save(tmp_path / "x")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600


# --------------------------------------------------------------------------------------------------------------- refusals

FNV, PRIME, MASK = 0xCBF29CE484222325, 0x100000001B3, 2**64 - 1
PREFIX = 24  # magic, length, checksum


def checksum(payload: bytes) -> int:
    """The kernel's, in Python: the format is written down twice, so that it cannot change unnoticed."""
    value, whole = FNV, len(payload) // 8 * 8
    for (word,) in struct.iter_unpack("<Q", payload[:whole]):
        value = (value ^ word) * PRIME & MASK
        value ^= value >> 29
    for byte in payload[whole:]:
        value = (value ^ byte) * PRIME & MASK
    return value


def sealed(payload: bytes) -> bytes:
    return b"PYLSAVE2" + struct.pack("<QQ", len(payload) + PREFIX, checksum(payload)) + payload


class Head:
    """Where the fields of a head lie: engine and model are texts, the others have their place behind them."""

    def __init__(self, data: bytes) -> None:
        self.payload = data[PREFIX:]
        (n_engine,) = struct.unpack_from("<Q", self.payload, 0)
        self.engine = self.payload[8 : 8 + n_engine]
        (n_model,) = struct.unpack_from("<Q", self.payload, 8 + n_engine)
        self.at = 16 + n_engine + n_model
        self.model = self.payload[16 + n_engine : self.at]
        self.fields = dict(zip(("fingerprint", "n_vocab", "type_k", "type_v", "flash_attn", "position", "cells", "last_token", "has_logits", "has_grammar", "seed", "draws"),
                               struct.unpack_from(self.FORM, self.payload, self.at), strict=True))

    FORM = "<QiiiiiIiBBQQ"

    def with_(self, **changes: Any) -> bytes:
        engine, model = changes.pop("engine", self.engine), changes.pop("model", self.model)
        rest = self.payload[self.at + struct.calcsize(self.FORM) :]
        texts = b"".join(struct.pack("<Q", len(text)) + text for text in (engine, model))
        return sealed(texts + struct.pack(self.FORM, *{**self.fields, **changes}.values()) + rest)


def test_the_format_is_as_written_down(model: Model, store: Store) -> None:
    branch = spoken(store)
    data = branch.to_bytes()
    assert sealed(data[PREFIX:]) == data
    head = Head(data)
    assert head.with_() == data
    assert head.fields["position"] == head.fields["cells"] == branch.position
    assert (head.fields["seed"], head.fields["draws"], head.fields["last_token"]) == (ENDLESS.seed, 12, branch.last_token)
    told = describe_saved(data)
    assert (told["format"], told["bytes"], told["engine"], told["position"], told["cells"]) == (2, len(data), head.engine.decode(), branch.position, branch.position)
    assert told["model"] == {"name": head.model.decode(), "fingerprint": f"{head.fields['fingerprint']:016x}", "n_vocab": len(model.vocab)}
    assert told["kv"] == {"type_k": "f16", "type_v": "f16", "flash_attn": True}
    assert told["sampling"] == {"seed": ENDLESS.seed, "n_sampled": 12}
    assert told["has_grammar"] is False


def test_a_longer_sampling_than_json_numbers_is_told_exactly(store: Store) -> None:
    data = store.root(sampling=Sampling(seed=2**64 - 1)).to_bytes()
    assert describe_saved(data)["sampling"]["seed"] == 2**64 - 1


@pytest.mark.parametrize(("changes", "said"), [
    ({"engine": b"llama.cpp of another day"}, r"engine llama\.cpp of another day; this store has (stub 1|llama\.cpp \w+)"),
    ({"model": b"another-model.gguf (llama 7B)", "fingerprint": 1}, r"model another-model\.gguf \(llama 7B\); this store has (stub of|tiny-llama\.gguf)"),
    ({"fingerprint": 1}, r"model .*; this store has another file of that name"),
    ({"model": b"bigger", "n_vocab": 32000}, r"model bigger; this store has"),
    ({"type_k": 3}, r"KV types q8_0/f16; this store has f16/f16"),
    ({"type_v": 4}, r"KV types f16/q4_0; this store has f16/f16"),
    ({"type_k": 77}, r"KV types unknown/f16; this store has f16/f16"),
    ({"flash_attn": 2}, r"flash attention off; this store has on"),
])
def test_both_sides_are_named(store: Store, changes: dict[str, Any], said: str) -> None:
    branch = spoken(store)
    before, alive = store.pressure(), live_objects()
    with pytest.raises(errors.UnsupportedOperationError, match=f"saved with {said}") as caught:
        store.from_bytes(Head(branch.to_bytes()).with_(**changes))
    assert caught.value.state == "unchanged"
    assert (store.pressure(), live_objects()) == (before, alive)


def test_a_store_of_another_kind(model: Model, store: Store) -> None:
    data = spoken(store).to_bytes()
    for options, said in (({"type_k": "q8_0"}, "f16/f16; this store has q8_0/f16"), ({"type_v": "q4_0"}, "f16/f16; this store has f16/q4_0"), ({"flash_attn": False}, "on; this store has off")):
        with opened(model, **options) as other:
            with pytest.raises(errors.UnsupportedOperationError, match=said):
                other.from_bytes(data)
            assert other.branches() == []
    with opened(model, deterministic=True, swa_full=False, n_batch=16) as other:  # what does not matter
        assert other.from_bytes(data).position == 21


@pytest.mark.parametrize("changes", [{"position": -1}, {"position": 2**31 - 1}, {"position": 2**24 + 1}, {"last_token": -2}, {"last_token": 10**6}, {"cells": 0}, {"has_logits": 0}])
def test_fields_that_cannot_be(store: Store, changes: dict[str, int]) -> None:
    branch = spoken(store)
    before, alive = store.pressure(), live_objects()
    with pytest.raises(errors.FormatError):
        store.from_bytes(Head(branch.to_bytes()).with_(**changes))
    assert (store.pressure(), live_objects()) == (before, alive)
    assert_same(branch, store.from_bytes(branch.to_bytes()))


def test_words_that_are_not_text(store: Store) -> None:
    """Names out of a damaged-and-sealed or a hostile file are told as far as they can be."""
    head = Head(store.root().to_bytes())
    for name in (b"\xff\xfe\x00broken\n\"", b"x" * 100_000, b""):
        told = describe_saved(head.with_(engine=name, model=name))
        assert told["engine"] == name.decode("utf-8", "replace")
        with pytest.raises(errors.UnsupportedOperationError):
            store.from_bytes(head.with_(engine=name))
    json.dumps(told)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_damage(store: Store, kind: Callable[[bytes], Any]) -> None:
    """Every byte is tried in the kernel's own tests; here a few, through every door."""
    data = spoken(store, 2).to_bytes(logits=False)
    n_branches = len(store.branches())
    steps = range(0, len(data), max(1, len(data) // 97))
    for i in steps:
        flipped = bytearray(data)
        flipped[i] ^= 0x10
        for bad in (bytes(flipped), data[:i], data[i + 1 :], data[:i] + b"\0" + data[i:]):
            for read in (store.from_bytes, describe_saved):
                with pytest.raises(errors.FormatError) as caught:
                    read(kind(bad))
                assert caught.value.state == "unchanged"
    for bad in (b"", b"PYLSAVE2", b"PYLSAVE1" + data[8:], b"GGUF" * 100, data + b"x"):
        with pytest.raises(errors.FormatError):
            store.from_bytes(kind(bad))
    with pytest.raises(errors.FormatError) as caught:
        store.from_bytes(kind(data[:-1]))
    assert (caught.value.need, caught.value.have) == (len(data), len(data) - 1)
    assert len(store.branches()) == n_branches
    assert store.from_bytes(kind(data)).position == 11


def test_no_room(model: Model, store: Store) -> None:
    branch = store.root(sampling=GREEDY)
    branch.prefill(prompt(200))
    data = branch.to_bytes()
    with opened(model, n_ctx=256, n_branches=2) as small:
        first = small.root()
        first.prefill(prompt(57))
        with pytest.raises(errors.ContextOverflowError) as cells:
            small.from_bytes(data)
        assert (cells.value.need, cells.value.have, cells.value.state) == (200, 199, "unchanged")
        second = small.root()
        first.prune()
        third = small.root()
        with pytest.raises(errors.NoLeaseError) as leases:
            small.from_bytes(data)
        assert (leases.value.need, leases.value.have, leases.value.state) == (1, 0, "unchanged")
        assert small.branches() == [second, third]
        third.prune()
        assert_same(branch, small.from_bytes(data))


def test_poisoned_stale_and_closed() -> None:
    with Model("stub:fail_at=2;fail_rc=-2") as broken, opened(broken) as store:
        branch, gone = store.root(), store.root()
        branch.prefill(prompt(4))
        data = branch.to_bytes()
        gone.prune()
        with pytest.raises(errors.DecodeError):
            branch.commit(5)
        for bad, kind in ((branch, errors.BranchPoisonedError), (gone, errors.StaleHandleError)):
            with pytest.raises(kind):
                bad.to_bytes()
        assert store.from_bytes(data).position == 4
    for call in (branch.to_bytes, lambda: store.from_bytes(data)):
        with pytest.raises(errors.ClosedError):
            call()
    assert describe_saved(data)["position"] == 4  # needs no store


def test_a_branch_far_out_needs_a_store_where_it_has_room(model: Model) -> None:
    with opened(model, n_ctx=256) as store, opened(model, n_ctx=2048) as larger:
        data = store.root(start_pos=2**24 - 256).to_bytes()
        assert store.from_bytes(data).position == 2**24 - 256
        with pytest.raises(errors.UnsupportedOperationError, match=str(2**24 - 256)):
            larger.from_bytes(data)
