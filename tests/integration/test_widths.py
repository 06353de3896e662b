"""The same texts in dispatches of several widths: bit for bit the same logits, on every decoder.

With experts too, where a last bit decides which of two that are nearly tied is asked, and the logits are then another network's.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from tiny_models import SPECS

from pylloyal import Model

N_BRANCHES, N_EACH, N_ROUNDS = 32, 16, 2
DECODERS = [name for name, spec in SPECS.items() if spec.is_decoder]


def rows(model: Model, n_batch: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits of the ends of many texts on one prefix, each dispatch this wide."""
    out = []
    with model.store(n_ctx=1024, n_branches=N_BRANCHES + 1, n_batch=n_batch, n_threads=1, flash_attn=True) as store:
        for i in range(N_ROUNDS):
            random = np.random.default_rng(i)
            root = store.root()
            root.prefill(random.integers(0, 256, 300).tolist())
            branches = [root.fork() for _ in range(N_BRANCHES)]
            store.prefill(list(zip(branches, random.integers(0, 256, (N_BRANCHES, N_EACH)).tolist(), strict=True)))
            out += [branch.logits() for branch in (root, *branches)]
            store.prune([*branches, root])
    return np.stack(out)


@pytest.mark.parametrize("name", DECODERS)
def test_how_many_tokens_go_by_at_a_time_changes_no_bit(name: str, tmp_path: Path) -> None:
    with Model(tiny_models.write(tmp_path / "model.gguf", name)) as model:
        narrow = rows(model, 48)
        assert np.isfinite(narrow).all() and len(np.unique(narrow, axis=0)) == len(narrow)
        for n_batch in (63, 64, 150, 512):
            wide = rows(model, n_batch)
            assert np.array_equal(wide, narrow), f"{n_batch}: {np.abs(wide - narrow).max()} apart"
