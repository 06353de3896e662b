"""Model files and vocabularies, with the real engine."""
from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_models

import pylloyal
from pylloyal import Model, Sampling, TokenFlags, errors

TEXTS = ["", "hello", "the whale is blue", "  two  spaces ", "líne\nbreak\ttab", "日本語 ☃ 🐋", "a\0b", "<|im_start|>user", "x" * 5000, "\u202e\ufeff", "ﬁ"]


def test_a_tiny_model_is_the_same_file_every_time(tmp_path: Path) -> None:
    a, b = (tiny_models.write(tmp_path / name).read_bytes() for name in ("a.gguf", "b.gguf"))
    assert a == b
    assert len(a) < 1_500_000


@pytest.mark.parametrize("text", TEXTS)
def test_text_goes_round(tiny: Model, text: str) -> None:
    tokens = tiny.vocab.encode(text)
    assert tiny.vocab.decode(tokens) == text
    assert tiny.vocab.decode_bytes(tokens) == text.encode()


def test_special_text_is_inert_unless_asked(tiny: Model) -> None:
    text = "<|im_start|>user"
    assert not any(TokenFlags.CONTROL in f for f in tiny.vocab.flags(tiny.vocab.encode(text)))
    first, *rest = tiny.vocab.encode(text, parse_special=True)
    assert TokenFlags.CONTROL in tiny.vocab.flags([first])[0]
    assert tiny.vocab.decode([first, *rest]) == "user"
    assert tiny.vocab.decode([first, *rest], special=True) == text
    assert tiny.vocab.piece(first) == b"<|im_start|>"


def test_a_text_of_more_tokens_than_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A space is looked up as U+2581, and spelled in its three bytes by a vocabulary that does not have it."""
    poor = tiny_models.vocabulary("spm", 512)
    poor.tokens[poor.tokens.index("\u2581")] = "<nospace>"
    monkeypatch.setattr(tiny_models, "vocabulary", lambda *_: poor)
    with Model(tiny_models.write(tmp_path / "poor.gguf")) as model:
        tokens = model.vocab.encode("a" + " " * 100 + "b")
        assert len(tokens) == 302
        assert model.vocab.decode_bytes(tokens) == b"a" + "\u2581".encode() * 100 + b"b"


def test_a_stream_gives_text_as_soon_as_it_is_certain(tiny: Model) -> None:
    text = "snow ☃ and 🐋 stop here"
    stream = tiny.vocab.stream()
    pieces = [stream.feed([token]) for token in tiny.vocab.encode(text)]
    assert "".join(pieces) == text == stream.text
    assert all("\ufffd" not in piece for piece in pieces)
    stopped = tiny.vocab.stream(stops=["stop", "stone"])
    out = "".join(stopped.feed([token]) for token in tiny.vocab.encode("a sto, a sto" + "ne wall"))
    assert (out, stopped.stopped_by) == ("a sto, a ", "stone")
    assert stopped.feed(tiny.vocab.encode("more"), final=True) == ""
    cut = tiny.vocab.stream()
    assert cut.feed(tiny.vocab.encode("☃")[:1]) == ""
    assert cut.feed([], final=True) == "\ufffd"
    with pytest.raises(ValueError, match="empty"):
        tiny.vocab.stream(stops=[""])


def test_ids_outside_the_vocabulary(tiny: Model) -> None:
    for call in (tiny.vocab.decode, tiny.vocab.flags):
        with pytest.raises(errors.InvalidArgumentError) as info:
            call([0, 1, len(tiny.vocab)])
        assert info.value.index == 2
    with pytest.raises(errors.FormatError, match="UTF-8"):
        tiny.vocab.encode("\ud800")


def test_facts(tiny: Model, tiny_path: Path) -> None:
    assert (tiny.info.n_layer, tiny.info.n_embd, tiny.info.n_ctx_train, len(tiny.vocab)) == (2, 64, 4096, 512)
    assert tiny.metadata["general.architecture"] == "llama"
    assert tiny.vocab.ends_generation(tiny.vocab.encode("<|im_end|>", parse_special=True)[0])
    with Model(tiny_path, vocab_only=True) as words:
        assert words.vocab.encode("the whale") == tiny.vocab.encode("the whale")
        with pytest.raises(errors.UnsupportedOperationError, match="vocab_only"):
            words.store(n_ctx=256)


def test_files_that_are_no_models(tiny_path: Path, tmp_path: Path) -> None:
    good = tiny_path.read_bytes()
    bad = {"empty": b"", "text": b"hello, this is not a model", "cut": good[: len(good) // 2], "head only": good[:64], "wrong version": good[:4] + b"\x63\0\0\0" + good[8:]}
    for name, content in bad.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(errors.FormatError) as info:
            Model(path)
        assert str(path) in str(info.value), name
    for path, kind in ((tmp_path / "absent.gguf", errors.KernelIOError), (tmp_path, errors.KernelIOError)):
        with pytest.raises(kind) as caught:
            Model(path)
        assert isinstance(caught.value, OSError)
        assert str(path) in str(caught.value)
    with pytest.raises(errors.InvalidArgumentError):
        Model("")


def test_a_replaced_file_is_another_model(tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path / "m.gguf", seed=1)
    with Model(path) as first:
        tiny_models.write(tmp_path / "other.gguf", seed=2, template=None).replace(path)
        before = pylloyal.live_objects()["weights"]
        with Model(path) as second:
            assert pylloyal.live_objects()["weights"] == before + 1
            assert "tokenizer.chat_template" in first.metadata
            assert "tokenizer.chat_template" not in second.metadata


def test_odd_paths(tmp_path: Path) -> None:
    folder = tmp_path / "a folder – ünïcode ☃"
    folder.mkdir()
    with Model(tiny_models.write(folder / "m odel.gguf")) as model, model.store(n_ctx=256) as store:
        store.root().prefill("hello")


@pytest.mark.parametrize("kind", ["f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"])
def test_kv_types(tiny: Model, kind: str) -> None:
    with tiny.store(n_ctx=256, type_k=kind, type_v=kind, n_threads=1) as store:
        root = store.root()
        root.prefill("the whale is blue")
        assert store.pressure().flash_attn


def test_a_sentence_of_grammar_errors_with_places(tiny: Model) -> None:
    cases = {
        'root ::= "a': "unexpected end",
        'root ::= "a" )': "line 1, column 14",
        'root ::= x\nx ::= "a" | y': "line 2, column 13: the rule 'y' is used but not defined",
        "root ::= root \"a\"": "left recursion",
        'root ::= "a"{2,1': "line 1",
        "root = 'a'": "line 1, column 6: expecting ::=",
        "# only a comment": "the grammar is empty",
        "root ::= " + "(" * 5000 + '"a"' + ")" * 5000: "nested parentheses",
        'root ::= "a" \0': "NUL",
        'root ::= "\\q"': "unknown escape",
    }
    with tiny.store(n_ctx=256, n_threads=1) as store:
        root = store.root()
        for text, words in cases.items():
            with pytest.raises(errors.GrammarError) as info:
                root.set_grammar(text)
            assert words in str(info.value), (text[:40], str(info.value))
            assert "line " in str(info.value)


def test_a_grammar_is_obeyed_whatever_the_temperature(tiny: Model) -> None:
    import re

    gbnf = 'root ::= "{" key (", " key)* "}"\nkey ::= [a-z]{1,3} ": " [0-9]+'
    with tiny.store(n_ctx=2048, n_branches=12, n_threads=1) as store:
        root = store.root(grammar=gbnf, sampling=pylloyal.Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=4))
        root.prefill("hello")
        done = store.tick(root.fork(10, seed=0), n_steps=100)
        finished = [tiny.vocab.decode(t) for t, f in zip(done.tokens, done.finish, strict=True) if f is pylloyal.Finish.END_OF_GENERATION]
        texts = [tiny.vocab.decode(t) for t in done.tokens]
        assert len(finished) >= 3, texts
        for text in finished:
            assert re.fullmatch(r"\{[a-z]{1,3}: \d+(, [a-z]{1,3}: \d+)*\}", text), text


def test_logs_are_drained_not_printed(tiny_with: Callable[..., Model], capfd: pytest.CaptureFixture[str]) -> None:
    pylloyal.drain_logs()
    pylloyal.set_log_level(pylloyal.LogLevel.INFO)
    try:
        tiny_with(seed=77)
        lines = pylloyal.drain_logs()
    finally:
        pylloyal.set_log_level(pylloyal.LogLevel.WARNING)
    assert any(line.startswith("INFO ") for line in lines)
    assert pylloyal.drain_logs() == []
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


@pytest.mark.parametrize(("n_ctx", "n_branches"), [(1, 1), (100, 1), (4, 8), (255, 4), (257, 4), (300, 4), (511, 4)])
def test_a_cache_smaller_than_a_batch(tiny: Model, n_ctx: int, n_branches: int) -> None:
    """The engine would abort on a dispatch between the n_ctx that was asked for and the one it rounds up to."""
    with tiny.store(n_ctx=n_ctx, n_branches=n_branches, n_threads=1) as store:
        room = store.pressure().n_ctx
        assert room == -(-n_ctx // 256) * 256
        root = store.root()
        with pytest.raises(errors.ContextOverflowError):
            root.prefill([40] * (room + 1))
        root.prefill([40] * (room - n_branches))
        if n_branches > 1:
            store.commit(root.fork(n_branches - 1), [41] * (n_branches - 1))
        assert store.pressure().cells_remaining == 1


def test_positions_stay_where_floats_tell_them_apart(tiny: Model) -> None:
    with tiny.store(n_ctx=256, n_threads=1) as store:
        for start in (2**24 - 255, 2**31 - 1):
            with pytest.raises(errors.InvalidArgumentError, match="start_pos"):
                store.root(start_pos=start)
        root = store.root(start_pos=2**24 - 256)
        root.prefill([40, 41])
        assert (root.position, root.cells_own) == (2**24 - 254, 2)


def test_tokens_the_file_suppresses_are_never_drawn(tmp_path: Path) -> None:
    """Not by a greedy draw, a random one or a tick, and no bias brings them back; the logits tell the truth about them, and they can still be read."""
    with Model(tiny_models.write(tmp_path / "free.gguf")) as free, free.store(n_branches=1, n_ctx=256, n_threads=1) as store:
        root = store.root()
        root.prefill("the whale")
        logits = root.logits()
    ranks = [int(token) for token in np.argsort(-logits, kind="stable")]
    best, banned = ranks[3], ranks[:3]
    with (Model(tiny_models.write(tmp_path / "strict.gguf", metadata={"tokenizer.ggml.suppress_tokens": [*banned, -1, 10**6]})) as model,
          model.store(n_branches=64, n_ctx=256, n_threads=1) as store):
        root = store.root(sampling=Sampling.greedy())
        root.prefill("the whale")
        assert np.array_equal(root.logits(), logits)
        assert root.sample() == best
        assert root.legal([*banned, best]) == [False, False, False, True]
        told = root.priors()
        assert told.tokens[0] == best and told.n_legal == len(logits) - 3 and not set(banned) & set(told.tokens.tolist())
        for branch, how in zip(root.fork(2), ("bias", "steer"), strict=True):
            (branch.set_bias if how == "bias" else branch.steer)(dict.fromkeys(banned, 100.0))
            assert branch.sample() == best and not any(branch.legal(banned))
            branch.prune()
        kids = root.fork(40, seed=1)
        for kid in kids:
            kid.sampling = Sampling(temperature=0.05, top_k=5, top_p=1.0, min_p=0.0)  # nearly always the first of them
        assert not set(store.sample(kids)) & set(banned)
        store.prune(kids)
        assert store.tick([root]).tokens == [[best]]
        again = store.root()
        again.prefill("the whale")
        again.set_metrics(sampling=True)
        again.commit(banned[0])  # said by somebody else
        measured = again.metrics
        assert measured.model is not None and measured.model.surprisal < math.inf
        assert measured.sampling is not None and measured.sampling.last_surprisal == math.inf
