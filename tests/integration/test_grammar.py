"""Texts against grammars, and what the engine's grammars let through."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pylloyal import Branch, Grammar, GrammarMatch, Model, Sampling, TokenFlags, Trigger, errors


def test_match(stub: Model, tiny: Model) -> None:
    for model in (stub, tiny):
        grammar = Grammar('root ::= "héllo"')
        assert grammar.match(model, "héllo") == GrammarMatch(6, True)
        assert grammar.match(model, "héll") == GrammarMatch(5, False)
        assert grammar.match(model, "") == GrammarMatch(0, False)
        assert grammar.match(model, "hé!lo") == GrammarMatch(3, False)
        assert grammar.match(model, "héllo!") == GrammarMatch(6, False)
        assert Grammar('start ::= "a"', root="start").match(model, "a") == GrammarMatch(1, True)
        with pytest.raises(errors.FormatError):
            grammar.match(model, "\ud800")
        for bad in ("", "root ::= (", 'other ::= "a"'):
            with pytest.raises(errors.GrammarError):
                Grammar(bad).match(model, "a")
    assert Grammar('root ::= "a"?').match(tiny, "") == GrammarMatch(0, True)
    assert Grammar('root ::= "<|im_end|>"').match(tiny, "<|im_end|>") == GrammarMatch(10, True)  # words, not the token
    assert Grammar("root ::= [^\\x01]+").match(tiny, "the whale") == GrammarMatch(9, True)
    assert Grammar('root ::= "the wh"').match(tiny, "the whale") == GrammarMatch(3, False)  # whole tokens
    with Model("stub:") as gone:
        pass
    with pytest.raises(errors.ClosedError):
        grammar.match(gone, "a")


def test_a_vocabulary_that_spells_otherwise(tiny_with: Callable[..., Model]) -> None:
    grammar = Grammar('root ::= "Whale" | " whale" | "whale"')
    prefixed = tiny_with(name="tiny-bert")
    with pytest.raises(errors.UnsupportedOperationError, match="spell"):
        grammar.match(prefixed, "Whale")


def test_a_store_does_not_mind(tiny: Model) -> None:
    with tiny.store(n_ctx=256, n_threads=1) as store:
        root = store.root(grammar='root ::= "a" "b"')
        root.prefill("x")
        a, b = tiny.vocab.encode("ab")
        assert Grammar('root ::= "b"').match(tiny, "b").is_complete
        assert root.legal([a, b]) == [True, False]


def test_what_comes_under_a_grammar_is_utf8(tiny: Model) -> None:
    """The engine puts characters together from bytes without looking whether UTF-8 allows them."""
    token = {tiny.vocab.piece(t): t for t in range(len(tiny.vocab)) if len(tiny.vocab.piece(t)) == 1}
    first = [bytes([b]) for b in (0x41, 0x80, 0xBF, 0xC1, 0xC2, 0xDF, 0xE0, 0xED, 0xF0, 0xF4, 0xF5, 0xFF)]
    after = {b"\xe0": (0x7F, 0x80, 0x9F, 0xA0, 0xBF, 0xC0), b"\xed": (0x80, 0x9F, 0xA0, 0xBF), b"\xf0": (0x80, 0x8F, 0x90, 0xBF), b"\xf4": (0x80, 0x8F, 0x90, 0xBF), b"\xc2": (0x7F, 0x80, 0xBF, 0xC0)}
    allowed = {b"\xe0": (0xA0, 0xBF), b"\xed": (0x80, 0x9F), b"\xf0": (0x90, 0xBF), b"\xf4": (0x80, 0x8F), b"\xc2": (0x80, 0xBF)}
    with tiny.store(n_ctx=256, n_threads=1) as store:
        for gbnf in ("root ::= [^a]+", 'root ::= "\\"" [^"]* "\\""', "root ::= .+", Grammar.from_schema({"type": "string"})):
            root = store.root(grammar=gbnf)
            root.prefill("x")
            if not isinstance(gbnf, str) or '"' in gbnf:
                root.commit(token[b'"'])
            assert [b for b, legal in zip(first, root.legal([token[b] for b in first]), strict=True) if legal] == [b"A", b"\xc2", b"\xdf", b"\xe0", b"\xed", b"\xf0", b"\xf4"]
            for lead, seconds in after.items():
                child = root.fork()
                child.commit(token[lead])
                legal = child.legal([token[bytes([b])] for b in seconds])
                assert tuple(b for b, is_legal in zip(seconds, legal, strict=True) if is_legal) == allowed[lead]
                child.prune()
            root.prune()


def grammar_takes(branch: Branch, token: int) -> bool:
    try:
        branch.commit(token)
    except errors.GrammarError:
        return False
    return True


def test_a_grammar_that_can_be_read_in_too_many_ways(tiny: Model) -> None:
    """Two alternatives that begin alike, inside one another: the ways double with every bracket."""
    either = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 3}]}
    grammar = Grammar.from_schema(either)
    assert grammar.match(tiny, "[[[[[],[]]]]]") == GrammarMatch(13, True)
    with pytest.raises(errors.GrammarError, match="more than 2048 ways") as info:
        grammar.match(tiny, "[" * 60)
    assert info.value.have == 2048
    assert info.value.need is not None
    assert info.value.need > 2048
    bracket, = tiny.vocab.encode("[")
    with tiny.store(n_ctx=256, n_threads=1) as store:
        root = store.root(grammar=grammar, sampling=Sampling(temperature=0))
        root.prefill("x")
        n = next(i for i in range(60) if not grammar_takes(root, bracket))
        assert 8 <= n < 20
        with pytest.raises(errors.GrammarError, match="ways") as info:
            root.commit(bracket)
        assert (info.value.state, root.position, root.is_poisoned) == ("unchanged", 1 + n, False)
        for call in (root.sample, lambda: store.tick([root]), lambda: root.legal([bracket])):
            with pytest.raises(errors.GrammarError, match="ways"):
                call()
        root.set_grammar(None)
        store.tick([root])
        assert root.position == 2 + n


def test_a_lazy_grammar_of_one_s_own(tiny: Model) -> None:
    """Without a chat template: free until a trigger, which belongs to what the grammar reads."""
    a, b, c, colon = (tiny.vocab.encode(text)[0] for text in ("a", "b", "c", ":"))
    ways = {"word": Trigger("word", ":"), "pattern": Trigger("pattern", "a(:)"), "pattern_full": Trigger("pattern_full", "a*(:)"), "token": Trigger("token", colon)}
    with tiny.store(n_ctx=256, n_branches=8, n_threads=1) as store:
        for trigger in ways.values():
            root = store.root(sampling=Sampling.greedy(), grammar=Grammar('start ::= ":" "b" "c"', root="start", triggers=[trigger]))
            root.prefill("x")
            assert root.legal([a, b, c, colon]) == [True, True, True, trigger.type != "pattern"] or trigger.type == "pattern"
            root.commit(a)
            root.commit(colon)
            assert root.legal([a, b, c, colon]) == [False, True, False, False], trigger
            (child,) = root.fork(1)
            loaded = store.from_bytes(root.to_bytes())
            for branch in (child, loaded):
                assert list(store.tick([branch], n_steps=5).tokens[0]) == [b, c]
            store.prune([child, root, loaded])
        for bad in ([], [Trigger("pattern", "(")], [Trigger("token", "x")], [Trigger("wort", "x")]):  # type: ignore[arg-type]
            with pytest.raises((errors.FormatError, errors.GrammarError)):
                store.root(grammar=Grammar('root ::= "a"', triggers=bad))
            assert store.branches() == []
        root = store.root(grammar='root ::= "a"')
        root.prefill("x")
        with pytest.raises(errors.FormatError):
            root.set_grammar(Grammar('root ::= "b"', triggers=[]))
        assert root.legal([a, b]) == [True, False]  # what was in force stays


def test_going_on_past_the_end(tiny: Model) -> None:
    ends = [t for t, flags in enumerate(tiny.vocab.flags(range(len(tiny.vocab)))) if TokenFlags.END_OF_GENERATION in flags]
    assert len(ends) > 1
    row = np.zeros(len(tiny.vocab), np.float32)
    row[ends] = 50
    with tiny.store(n_ctx=256, n_branches=4, n_threads=1) as store:
        root = store.root(sampling=Sampling(temperature=1.0, seed=1))
        root.prefill("x")
        root.set_logits(row)
        assert root.sample() in ends
        root.sampling = Sampling(temperature=1.0, ignore_eog=True)
        assert root.sampling.ignore_eog
        child = root.fork()
        loaded = store.from_bytes(root.to_bytes())
        for branch in (root, child, loaded):
            assert not set(store.sample([branch] * 3)) & set(ends)
            assert branch.sampling.ignore_eog
            assert not any(branch.legal(ends))
        assert len(store.tick([root, child, loaded], n_steps=20).tokens[0]) == 20


def test_forks_without_logits(tiny: Model) -> None:
    with tiny.store(n_ctx=256, n_branches=4, n_threads=1) as store:
        root = store.root(sampling=Sampling.greedy())
        root.prefill("the whale")
        bare, full = root.fork(logits=False), root.fork()
        with pytest.raises(errors.NoLogitsError):
            bare.logits()
        store.prefill([(bare, " is"), (full, " is")])
        assert np.array_equal(bare.logits(), full.logits())
        assert root.logits().size == len(tiny.vocab)
