"""Dry runs, accounts and devices where no engine is: shapes, refusals, and that opening and looking read options alike."""
from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import pylloyal
from pylloyal import errors
from pylloyal.kernel.dry_run import dry_run, projector_dry_run


def test_a_store_has_the_shape_its_dry_run_says(stub: pylloyal.Model) -> None:
    options: dict[str, Any]
    for options in ({}, {"n_ctx": 64, "n_branches": 3, "n_batch": 10}, {"n_ctx": 64, "n_batch": 32, "n_ubatch": 16, "n_outputs": 9, "flash_attn": False}):
        dry = dry_run("stub:n_vocab=300", **options)
        with stub.store(**options) as store:
            found = dataclasses.asdict(dry)
            assert found.pop("refusal") is None
            assert found == dataclasses.asdict(store.memory())
            pressure = store.pressure()
            assert (dry.n_ctx, dry.n_batch, dry.n_ubatch, dry.flash_attn) == (pressure.n_ctx, pressure.n_batch, pressure.n_ubatch, pressure.flash_attn)
    assert (dry.n_seq_max, dry.n_ubatch, dry.n_outputs, dry.total_bytes, dry.rows, dry.caches) == (8, 16, 9, 0, (), ())


def test_options_are_refused_alike(stub: pylloyal.Model) -> None:
    bad: list[dict[str, Any]] = [{"n_ctx": 0}, {"n_branches": 300}, {"n_batch": 4}, {"n_ubatch": 4}, {"n_ubatch": 1000}, {"n_outputs": 4}, {"n_outputs": 1000}, {"n_rs_seq": 65}, {"n_rs_seq": 2**31}, {"type_k": "q"}]
    for options in bad:
        with pytest.raises(errors.InvalidArgumentError) as looked:
            dry_run("stub:", **options)
        with pytest.raises(errors.InvalidArgumentError) as opened:
            stub.store(**options)
        assert str(looked.value) == str(opened.value), options


def test_cells_of_their_own_are_for_looking_only() -> None:
    assert dry_run("stub:").refusal is None
    assert "kv_unified" in (dry_run("stub:", kv_unified=False).refusal or "")


def test_paths() -> None:
    for path in ("", "a\0b"):
        with pytest.raises(errors.InvalidArgumentError):
            dry_run(path)
        with pytest.raises(errors.InvalidArgumentError):
            projector_dry_run(path)
    with pytest.raises(errors.FormatError):
        dry_run("stub:n_vocab=1")
    with pytest.raises(errors.ProjectorMismatchError):
        projector_dry_run("stub:other")
    with pytest.raises(errors.InvalidArgumentError):
        dry_run("stub:", gpu_layers=2**31)
    assert projector_dry_run("stub:").rows == ()


def test_an_account_of_a_closed_store(stub: pylloyal.Model) -> None:
    with stub.store(n_ctx=64) as store:
        pass
    with pytest.raises(errors.ClosedError):
        store.memory()


def test_rows_that_see_each_other_fit_a_part() -> None:
    """With parts smaller than a dispatch, what must be computed at once is held to a part."""
    with pylloyal.Model("stub:n_vocab=300;non_causal=1") as model, model.projector("stub:") as projector:
        prompt = pylloyal.Prompt(projector, [pylloyal.Image(np.zeros((64, 64, 3), np.uint8))])
        rows = prompt.quote().max_rows
        assert rows > 1
        with model.store(n_ctx=256, n_branches=1, n_batch=128, n_ubatch=rows - 1) as store:
            root = store.root()
            with pytest.raises(errors.InvalidArgumentError, match="n_ubatch") as caught:
                root.prefill(prompt)
            assert (caught.value.need, caught.value.have, root.position) == (rows, rows - 1, 0)
        with model.store(n_ctx=256, n_branches=1, n_batch=128, n_ubatch=rows) as store:
            store.root().prefill(prompt)

