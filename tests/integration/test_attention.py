"""What we put into the engine's attention, asked through a graph of the engine's: libsrc/tests/test_attention.cpp says what holds."""
from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pylloyal import Model

ROOT = Path(__file__).resolve().parents[2]


def test_attention_is_what_it_is_whoever_is_computed_beside_it() -> None:
    found = [path for path in (ROOT / "build" / "native").glob("test_attention*") if path.is_file()]
    if not found:
        pytest.fail("test_attention is not built; `python3 tools/bootstrap.py lib` builds it (preset native)")
    done = subprocess.run([str(found[0])], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    counted = re.fullmatch(r"test_attention: (\d+) checks, 0 failed\n", done.stdout)
    assert counted and int(counted[1]) > 2000, done.stdout


def test_neither_company_nor_threads_change_a_bit_of_a_long_branch(model: Model) -> None:
    """More than 512 cells, from where on the engine would share one branch's cells out among threads; four heads."""
    text = np.random.default_rng(0).integers(0, 256, 600).tolist()
    read: list[list[np.ndarray]] = []
    for n_threads, n_others in ((1, 0), (2, 0), (3, 0), (8, 0), (1, 7), (2, 7), (3, 7)):
        with model.store(n_ctx=1024, n_branches=9, n_threads=n_threads) as store:
            root = store.root()
            root.prefill(text)
            me, *others = root.fork(1 + n_others)
            rows = [me.logits()]
            for step in range(5):
                store.commit([*others, me], [*(step + i for i in range(n_others)), 7 * step])
                rows.append(me.logits())
            read.append(rows)
    for rows in read[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(read[0], rows, strict=True))
