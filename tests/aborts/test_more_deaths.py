"""Deaths and lies that are on no list: found by reading the engine and by trying."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_models

if TYPE_CHECKING:
    from conftest import Child

LAZY = """
        import json
        def waits_for(branch, grammar, pattern, kind="pattern"):
            spec = json.dumps({"grammar": grammar, "grammar_lazy": True, "triggers": [{"type": kind, "value": pattern, "token": -1}]}).encode()
            branch._call(lib.pyl_branch_set_grammar, ref(new(capi.pyl_grammar, kind=capi.GRAMMAR_CHAT, text=spec, n_text=len(spec))))
"""


def test_a_token_that_wakes_a_grammar_and_breaks_it(child: Child) -> None:
    """The engine calls it legal, because the grammar still sleeps, and throws once it is in the cache: that would poison every branch of the dispatch."""
    assert child(LAZY + """
        store = opened()
        root, other = store.root(), store.root()
        store.prefill([(root, some(20)), (other, some(20))])
        waits_for(root, 'root ::= "tz"', "t")
        the, t, z, a = (model.vocab.encode(text)[0] for text in ("the", "t", "z", "a"))
        assert root.legal([the, t, a]) == [False, True, True]
        error = refused(errors.GrammarError, store.commit, [other, root], [the, the])
        assert (error.index, root.position, other.position, root.is_poisoned, other.is_poisoned) == (1, 20, 20, False, False)
        certain = np.full(len(model.vocab), -30, np.float32)
        certain[the], certain[t] = 30, 20
        root.set_logits(certain)
        assert store.sample([root]) == [t]
        assert store.tick([other, root]).tokens[1] == [t]
        assert root.legal([z, a]) == [True, False]
        sound(store)
        """) == ["sound"]


def test_a_grammar_that_waits_for_long(child: Child) -> None:
    """Its trigger's expression is matched against all that was said: 47,000 characters here, more than the engine's matcher has stack for."""
    assert child(LAZY + """
        store = opened(n_ctx=4096)
        root = store.root()
        root.prefill(some(20))
        waits_for(root, 'root ::= "<tool>" [a-z]*', r"[\\s\\S]*?(<tool>)[\\s\\S]*", "pattern_full")
        long, = model.vocab.encode("<image_soft_token>", parse_special=True)
        for _ in range(2600):
            root.commit(long)
        for token in model.vocab.encode("<tool>"):
            root.commit(token)
        assert root.legal(model.vocab.encode("aA")) == [True, False]
        sound(store)
        """) == ["sound"]


def test_more_threads_than_the_system_gives(child: Child) -> None:
    assert child("""
        import resource
        opened().close()
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (now + 2**29, limits[1]))  # room for some of the stacks
        for make in (lambda: opened(n_threads=512), lambda: pylloyal.Embedder(model, n_ctx=64, n_threads=512, pooling="mean")):
            error = refused(errors.InsufficientMemoryError, make)
            assert "thread" in str(error)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        sound(opened())
        """) == ["sound"]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Writes tiny-llama with other keys and tensors."""

    def write(tensors: dict[str, str] | None = None, **keys: object) -> str:
        spec = tiny_models.SPECS["tiny-llama"]
        text = spec.tensors
        for old, new in (tensors or {}).items():
            text = text.replace(old, new)
        monkeypatch.setitem(tiny_models.SPECS, "odd", replace(spec, keys={**spec.keys, **{key.replace("__", "."): value for key, value in keys.items()}}, tensors=text))
        return str(tiny_models.write(tmp_path / "odd.gguf", "odd"))

    return write


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_blocks_of_a_quantised_cache_that_do_not_fit_a_head(child: Child, written: object, heads_kv: int) -> None:
    """Heads of 80, as in phi-2, and blocks of 32: without flash attention the engine aborts with one head, and computes NaN with two."""
    heads = 2
    path = written({"attn_q[64,128]": f"attn_q[64,{80 * heads}]", "attn_k[64,64]": f"attn_k[64,{80 * heads_kv}]", "attn_v[64,64]": f"attn_v[64,{80 * heads_kv}]",  # type: ignore[operator]
                    "attn_output[128,64]": f"attn_output[{80 * heads},64]"},
                   attention__head_count=heads, attention__head_count_kv=heads_kv, attention__key_length=80, attention__value_length=80, rope__dimension_count=80)
    assert child("""
        plain = afresh(some(40))
        for kind in ("q8_0", "q4_0", "q5_1", "iq4_nl"):
            for flash_attn in (None, False, True):
                error = refused(errors.UnsupportedOperationError, opened, type_k=kind, flash_attn=flash_attn)
                assert "80" in str(error) and kind in str(error), error
        for kind in ("f32", "bf16"):
            assert apart(afresh(some(40), type_k=kind), plain) < 0.25
        sound(opened())
        """, path) == ["sound"]


def test_a_model_that_looks_ahead(child: Child, written: object) -> None:
    """A decoder whose file says that it is not causal: cut into dispatches its text would get other logits (1.3 apart) than in one."""
    assert child("""
        error = refused(errors.UnsupportedOperationError, opened)
        assert "causal" in str(error)
        model.close()
        assert not any(live_objects().values()), live_objects()
        """, written(attention__causal=False)) == []  # type: ignore[operator]


DEEP = {
    "parentheses": '"{{ " + "(" * n + "1" + ")" * n + " }}"', "lists": '"{{ " + "[" * n + "1" + "]" * n + " }}"', "blocks": '"{% if true %}" * n + "x" + "{% endif %}" * n', "negations": '"{{ " + "not " * n + "1 }}"',
    "members": '"{{ a" + ".b" * n + " }}"', "sums": '"{{ 1" + "+1" * n + " }}"',
}


@pytest.mark.parametrize("what", DEEP)
def test_a_template_that_goes_too_deep(child: Child, what: str) -> None:
    """Templates come with model files from anywhere; the engine's parser and interpreter recurse without a limit, until the stack ends."""
    assert child(f"""
        n = 200_000
        refused(errors.TemplateError, model.chat, [{{"role": "user", "content": "hi"}}], template={DEEP[what]})
        sound(opened())
        """) == ["sound"]


@pytest.mark.parametrize("where", ['{"messages": X}', '{"messages": [{"role": "user", "content": "x"}], "template_kwargs": {"a": X}}'])
def test_a_request_that_goes_too_deep(child: Child, where: str) -> None:
    assert child(f"""
        raw = {where!r}.replace("X", "[" * 2_000_000 + "]" * 2_000_000).encode()
        refused(errors.FormatError, lib.pyl_chat_render, model._ptr(), raw, len(raw), ref(capi.pyl_text_p()))
        sound(opened())
        """) == ["sound"]


def test_no_memory_for_what_an_encoder_computes(child: Child, tiny: Callable[[str], str]) -> None:
    """The engine's encoder takes no notice that a buffer was refused, in this encode or in the next. The picture is refused, and all goes on."""
    assert child("""
        import resource
        store = opened(n_ctx=8192, n_batch=512, n_ubatch=512)
        with model.projector(PROJECTOR, flash_attn=False, n_threads=1) as projector:
            large, small = (pylloyal.Prompt(projector, [pylloyal.Image(np.zeros((side, side, 3), np.uint8))]) for side in (768, 64))
            with open("/proc/self/statm") as file:
                limit = int(file.read().split()[0]) * resource.getpagesize() + 2**28
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            for prompt in (large, small, large, large, small):  # the first encode of an encoder, and later ones
                root = store.root()
                if prompt is large:
                    error = refused(errors.InsufficientMemoryError, root.prefill, prompt, state="advanced")  # by the token before the picture
                    need = int(str(error).partition("graph takes ")[2].partition(" ")[0])
                    assert need > 2**29 and projector.statistics().compute_bytes == 0
                else:
                    root.prefill(prompt)
                    assert projector.statistics().compute_bytes > 0
                root.prune()
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
            root = store.root()
            root.prefill(large)
            assert root.position == large.quote().n_pos and projector.statistics().compute_bytes == need
        sound(opened())
        """.replace("PROJECTOR", repr(tiny("mmproj-tiny-qwen2vl"))), "tiny-qwen2vl") == ["sound"]
