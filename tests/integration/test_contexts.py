"""Whole contexts of every architecture the engine opens, real-model sizes among them: what is kept and every size, as it set them."""
from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from coherent import coherent_metadata
from engine_memory import Oracle
from headers import write_header

from pylloyal.capacity.architectures import ARCHITECTURES
from pylloyal.capacity.geometry import geometry
from pylloyal.capacity.header import Header
from pylloyal.capacity.memory import kept
from pylloyal.capacity.settings import KV_TYPES, Settings, context

# What the engine makes no model of from metadata alone. Each is refused by name (test_geometry.py).
NOT_OPENED = {
    "clip": "a projector, and no model",
    "gptj": "a name without a loader",
    "eagle3": "a draft model: its tensors follow the target it was made for",
    "dflash": "a draft model: its tensors follow the target it was made for",
    "gemma4-assistant": "a draft model: it looks at the cells of another context",
}
N_HEADERS, N_SETTINGS = 4, 8


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    made = Oracle()
    yield made
    made.close()


def context_settings(rng: random.Random, one_type: bool) -> Settings:
    """Parameters that a context can have; more than one in three keeps quantised cells."""
    type_k = rng.choice(KV_TYPES) if rng.random() < 0.6 else "f16"
    made = Settings(
        n_branches=rng.choice((1, 1, 2, 3, 8, 17)), n_batch=rng.choice((64, 512, 512, 2048)), n_ubatch=rng.choice((0, 32, 128, 512)), type_k=type_k,
        type_v=type_k if one_type or rng.random() < 0.6 else rng.choice(KV_TYPES), swa_full=rng.random() < 0.4, unified=rng.random() < 0.6, n_rs_seq=rng.choice((0, 0, 0, 2)),
        n_outputs=rng.choice((0, 0, 0, 1, 64)))
    return made if made.has_quantised_v else made.but(flash_attn=rng.random() < 0.6)


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(NOT_OPENED)))
def test_a_context_is_as_planned(name: str, oracle: Oracle, tmp_path: Path) -> None:
    one_type = ARCHITECTURES[name].has_mla or ARCHITECTURES[name].memory == "compressed"
    n_made = 0
    for i in range(N_HEADERS):
        rng = random.Random(f"{name} {i}")
        path = tmp_path / f"{i}.gguf"
        write_header(path, *coherent_metadata(name, rng, "real" if i % 2 else "small"))
        shape = geometry(Header(path))
        n_here = 0
        while n_here < N_SETTINGS:
            settings = context_settings(rng, one_type)
            if settings.conflicts(shape):
                continue
            n_ctx = rng.choice((0, 200, 512, 1000, 4096, 5000, 16384))
            made = context(shape, n_ctx, settings)
            answer = oracle.graph(path, n_ctx, settings)
            case = (i, n_ctx, settings, answer)
            assert "compute" in answer, case
            assert answer["kept"] == sum(group.bytes for group in kept(shape, made, settings)), case
            assert (made.n_ctx, made.n_ctx_seq, made.n_batch, made.n_ubatch) == tuple(answer[key] for key in ("n_ctx", "n_ctx_seq", "n_batch", "n_ubatch")), case
            n_here += 1
        n_made += n_here
    assert n_made == N_HEADERS * N_SETTINGS


def test_every_name_but_the_refused_is_opened() -> None:
    assert set(NOT_OPENED) == {name for name, rules in ARCHITECTURES.items() if rules.memory in ("borrowed", "unsupported")}
