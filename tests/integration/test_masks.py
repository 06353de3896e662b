"""What a grammar allows, as it is remembered and shared, against the engine's own masking of the whole vocabulary."""
from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import pylloyal
from pylloyal import Grammar, Sampling

ROOT = Path(__file__).resolve().parents[2]


def test_masks_are_the_engines(tiny_path: Path) -> None:
    """The program of libsrc/tests/raw_grammar.cpp follows random texts of many grammars, into the middle of characters too."""
    found = sorted((ROOT / "build").glob("*/raw_grammar*"))
    if not found:
        pytest.fail("raw_grammar is not built; `python3 tools/bootstrap.py lib` builds it (preset native)")
    done = subprocess.run([str(found[0]), str(tiny_path), "30"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    seen = {name: int(n) for name, n in map(str.split, done.stdout.splitlines())}
    assert seen["wrong"] == 0 and seen["states"] > 3000 and seen["inside"] > 500


GBNF = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-z]+ | "\\"" [^"]* "\\""'


def follow(store: pylloyal.Store, branch: pylloyal.Branch, n: int) -> list[int]:
    return [token for _ in range(n) for token in store.tick([branch]).tokens[0]]


def test_branches_under_one_grammar_are_where_each_has_read_to(tiny: pylloyal.Model) -> None:
    """Grammars of equal text are one in the kernel, and forks share their place until they read on."""
    with tiny.store(n_ctx=512, n_threads=1) as alone:
        want = []
        for seed in range(4):
            root = alone.root(sampling=Sampling(seed=seed), grammar=GBNF)
            root.prefill("x")
            want.append(follow(alone, root, 20))
            root.prune()
    with tiny.store(n_ctx=512, n_threads=1) as store, tiny.store(n_ctx=512, n_threads=1) as other:
        roots = [store.root(sampling=Sampling(seed=seed), grammar=GBNF) for seed in range(3)] + [other.root(sampling=Sampling(seed=3), grammar=Grammar(GBNF))]
        for root in roots:
            root.prefill("x")
        got: list[list[int]] = [[] for _ in roots]
        for _ in range(20):
            for tokens, root in zip(got, roots, strict=True):
                tokens += root.store.tick([root]).tokens[0]
        assert got == want
        # A fork that reads on leaves where the others are alone.
        opened = store.root(grammar=GBNF)
        opened.prefill("x")
        bracket, quote, a, comma = (tiny.vocab.encode(text)[0] for text in ("[", '"', "a", ","))
        opened.commit(bracket)
        quoted, word = opened.fork(), opened.fork()
        quoted.commit(quote)
        word.commit(a)
        assert [branch.legal([quote, a, comma]) for branch in (opened, quoted, word)] == [[True, True, False], [True, True, True], [False, True, True]]
