"""The memory of every architecture, against the engine's own loader and caches, on random headers."""
from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_memory import Oracle, random_metadata
from headers import write_header

from pylloyal.capacity.architectures import ARCHITECTURES
from pylloyal.capacity.geometry import Geometry, geometry
from pylloyal.capacity.header import Header
from pylloyal.capacity.memory import kept
from pylloyal.capacity.settings import KV_TYPES, Context, Settings, context
from pylloyal.errors import MetadataError

N_HEADERS = 28
UNKNOWN = {name for name, rules in ARCHITECTURES.items() if rules.memory in ("borrowed", "unsupported")}


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    made = Oracle()
    yield made
    made.close()


def test_every_name_the_engine_knows_has_a_row(oracle: Oracle) -> None:
    known = oracle.architectures()
    assert set(known) == set(ARCHITECTURES)
    for name, (is_recurrent, is_hybrid, takes_rollback) in known.items():
        rules = ARCHITECTURES[name]
        assert (rules.recurrent == "all") == is_recurrent, name
        assert (rules.recurrent not in ("", "all") or rules.memory == "compressed") == is_hybrid, name
        assert rules.takes_rollback == takes_rollback, name
    assert {"clip", "gptj", "eagle3", "dflash", "gemma4-assistant"} == UNKNOWN  # rare, and refused


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_what_is_unknown_is_refused_by_name(name: str) -> None:
    with pytest.raises(MetadataError, match=name):
        geometry({"general.architecture": name})


def random_settings(rng: random.Random, one_type: bool, types: tuple[str, ...] = KV_TYPES) -> Settings:
    type_k = rng.choice(types)
    made = Settings(
        n_branches=rng.choice((1, 2, 3, 8, 33)), n_batch=rng.choice((64, 512, 2048)), n_ubatch=rng.choice((0, 32, 512)), type_k=type_k,
        type_v=type_k if one_type or rng.random() < 0.6 else rng.choice(types), swa_full=rng.random() < 0.4, unified=rng.random() < 0.5, n_rs_seq=rng.choice((0, 0, 3)))
    return made if made.has_quantised_v else made.but(flash_attn=rng.random() < 0.6)


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - UNKNOWN))
def test_the_engine_keeps_what_we_say(name: str, oracle: Oracle, tmp_path: Path) -> None:
    rules, path = ARCHITECTURES[name], tmp_path / "header.gguf"
    n_equal = 0
    for i in range(N_HEADERS):
        rng = random.Random(f"{name} {i}")
        metadata, tensors = random_metadata(name, rng)
        write_header(path, metadata, tensors)
        settings = random_settings(rng, rules.has_mla or rules.memory == "compressed", ("f16", "f32", "bf16") if name in ("grok", "plm") else KV_TYPES)
        if name == "plm":
            settings = settings.but(flash_attn=False)
        shape: Geometry | None = None
        try:
            shape = geometry(Header(path))
            made = context(shape, rng.choice((0, 1, 256, 1000, 4096, 5000)), settings)
        except MetadataError:
            made = Context(4096, 4096, 512, 512, 1, 0, 0)  # then the engine must not like it either
        if shape is not None and settings.conflicts(shape):
            continue
        answer = oracle.cells(path, made, settings.but(flash_attn=settings.flash_attn and name != "grok"))
        if shape is None:
            assert "error" in answer or "died" in answer, (i, answer)
            continue
        groups = kept(shape, made, settings)
        assert "total" in answer or answer.get("has_memory") == 0, (i, answer)
        assert (shape.has_memory, sum(group.bytes for group in groups)) == (bool(answer["has_memory"]), answer.get("total", 0)), (i, made, settings, groups)
        if rules.memory != "compressed":  # its compressors are told with its cells there
            assert sum(group.bytes for group in groups if group.is_recurrent) == answer.get("recurrent", 0), (i, made, settings)
        assert (shape.n_layer, shape.n_layer_all, shape.n_swa) == (answer["n_layer"], answer["n_layer_all"], answer["n_swa"] if answer["swa_type"] else 0), i
        assert (shape.is_causal, shape.n_embd_out) == (bool(answer["causal"]), answer["n_embd_out"]), i
        n_equal += 1
    assert n_equal >= N_HEADERS // 3  # headers that were refused prove little


@pytest.mark.parametrize(("ratios", "is_taken"), [((4, 128), True), ((4,), False), ((128,), False), ((0,), False)])
def test_deepseek4_needs_both_ratios(ratios: tuple[int, ...], is_taken: bool) -> None:
    """Its graph divides by what layers of either have."""
    metadata, _ = random_metadata("deepseek4", random.Random(1))
    n = metadata["deepseek4.block_count"]
    assert n >= 2
    shape = geometry(metadata | {"deepseek4.attention.compress_ratios": [ratios[i % len(ratios)] for i in range(n)]})
    assert ("compression ratios" not in Settings().conflicts(shape)) == is_taken
