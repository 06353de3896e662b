"""Stores that keep only a window of cells for sliding-window layers (20-kernel, section 4, items 3 and 4).

The engine itself refuses every decode there once shared cells fill the window's cache, and takes rewinds past the window for good
(test_silently_wrong.py). Windows are of 32 tokens; the cache is of 512 cells, the next multiple of 256 above 8 windows and a dispatch.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Child

# Matrices, cache and attention in f32. Largest differences measured: 2e-6, and 5e-4 with gemma's GELU, which is looked up in a table; another text is 1.7 or more away.
CLOSE = {"tiny-gemma3": 0.01, "tiny-gemma4": 0.01, "tiny-cohere2": 1e-4, "tiny-gpt-oss": 1e-4}
MODELS = pytest.mark.parametrize("model", list(CLOSE))
GEMMAS = pytest.mark.parametrize("model", ["tiny-gemma3", "tiny-gemma4"])


@MODELS
def test_forks_of_a_long_trunk(child: Child, model: str) -> None:
    """A trunk longer than the window's cache, forked into every lease, and all of them read far past it."""
    assert child(f"""
        CLOSE = {CLOSE[model]}
        """ + """
        store = opened(n_ctx=1536, n_branches=8, swa_full=False)
        assert not store.pressure().swa_full
        trunk = store.root()
        trunk.prefill(some(600))
        all = [trunk, *trunk.fork(7)]
        texts = [some(600) + some(50, i) for i in range(8)]
        for at in range(600, 650):
            if at % 5:
                store.commit(all, [text[at] for text in texts])
            else:  # alone, and in another order
                for branch, text in list(zip(all, texts))[::-1]:
                    branch.commit(text[at])
            if at in (600, 632, 649):
                for branch, text in list(zip(all, texts))[:: 1 if at == 649 else 4]:
                    assert apart(branch.logits(), afresh(text[: at + 1], n_ctx=1024)) <= CLOSE, (at, apart(branch.logits(), afresh(text[: at + 1], n_ctx=1024)))
        assert min(apart(a.logits(), b.logits()) for i, a in enumerate(all) for b in all[:i]) > 1.0
        sound(store)
        """, f"{model}/f32") == ["sound"]


@GEMMAS
def test_marks_left_behind(child: Child, model: str) -> None:
    """Where others would rewind: marks far behind the window keep their own windows while the trunk goes on, through prunes and other tenants."""
    assert child(f"""
        CLOSE = {CLOSE[model]}
        """ + """
        text = some(1200)
        store = opened(n_ctx=3072, n_branches=8, swa_full=False)
        trunk = store.root()
        marks = {}
        for at, end in ((0, 20), (20, 100), (100, 300), (300, 800), (800, 1200)):
            if at:
                marks[at] = trunk.fork()
            trunk.prefill(text[at:end])
        others = store.root()
        others.prefill(some(600, 5))
        for branch in others.fork(2):
            branch.prefill(some(80, 6))
        store.prune(others.children)
        for at, mark in marks.items():
            assert (mark.position, mark.cells_own) == (at, 0)
            again = mark.fork()
            again.prefill(some(50, at))
            assert apart(again.logits(), afresh(text[:at] + some(50, at), n_ctx=3072)) <= CLOSE, (at, apart(again.logits(), afresh(text[:at] + some(50, at), n_ctx=3072)))
            mark.fast_forward(again)
            mark.commit(9)
            assert apart(mark.logits(), afresh(text[:at] + some(50, at) + [9], n_ctx=3072)) <= CLOSE
        trunk.commit(9)
        assert apart(trunk.logits(), afresh(text + [9], n_ctx=3072)) <= CLOSE
        store.retain_only(marks[100])
        marks[100].prefill(some(600, 7))
        assert apart(marks[100].logits(), afresh(text[:100] + some(50, 100) + [9] + some(600, 7), n_ctx=3072)) <= CLOSE
        sound(store)
        """, f"{model}/f32") == ["sound"]


@GEMMAS
def test_no_cell_to_spare(child: Child, model: str) -> None:
    """Eight windows of different texts and one dispatch of 256 rows are 512 cells: all there is. What lies before the windows is shared by pairs."""
    assert child(f"""
        CLOSE = {CLOSE[model]}
        """ + """
        store = opened(n_ctx=3072, n_branches=8, n_batch=256, swa_full=False)
        branches, texts = [], []
        for i in range(4):
            trunk = store.root()
            trunk.prefill(some(200, i))
            branches += [trunk, trunk.fork()]
            texts += [some(200, i), some(200, i)]
        for k in range(32):
            tokens = some(8, k + 9)
            store.commit(branches, tokens)
            texts = [[*text, token] for text, token in zip(texts, tokens)]
        for i in (0, 7, 3):
            assert branches[i].prefill(some(256, 20 + i)) == 1
            texts[i] = texts[i] + some(256, 20 + i)
        for branch, text in zip(branches, texts):
            assert apart(branch.logits(), afresh(text, n_ctx=1024)) <= CLOSE, apart(branch.logits(), afresh(text, n_ctx=1024))
        store.commit(branches, [9] * 8)
        assert apart(branches[7].logits(), afresh(texts[7] + [9], n_ctx=1024)) <= CLOSE
        assert store.pressure().cells_used == 4 * 200 + 8 * 33 + 3 * 256
        sound(store)
        """, f"{model}/f32") == ["sound"]


@GEMMAS
def test_saved_past_the_window(child: Child, model: str) -> None:
    """Its bytes hold the window alone, and load into stores of either kind."""
    assert child(f"""
        CLOSE = {CLOSE[model]}
        """ + """
        stores = {full: opened(n_ctx=2048, n_branches=8, swa_full=full) for full in (False, True)}
        data = {}
        for full, store in stores.items():
            trunk = store.root()
            trunk.prefill(some(600))
            all = trunk.fork(6)
            store.commit(all, some(6, 1))
            data[full] = [branch.to_bytes() for branch in all]
            all[0].prune()
        for full, store in stores.items():
            for saved in data.values():
                back = store.from_bytes(saved[3])
                assert back.position == 601
                back.prefill(some(60, 2))
                assert apart(back.logits(), afresh(some(600) + [some(6, 1)[3]] + some(60, 2), n_ctx=1024)) <= CLOSE
                back.prune()
        stores[True].close()
        sound(stores[False])
        """, f"{model}/f32") == ["sound"]
