"""What kills the process below us (20-kernel, section 3): the engine first, which must really die there, then our API, which must not.

docs/engine-hazards.md is the table of all of it.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pylloyal._ffi import capi

if TYPE_CHECKING:
    from conftest import Child, Dies, Raw

LIBSRC = Path(__file__).resolve().parents[2] / "libsrc"

DEATHS = [
    ("batch_over_n_batch", "tiny-llama", "llama_decode", "n_tokens_all <= cparams.n_batch"),
    ("batch_between_n_ctx_and_its_rounding", "tiny-llama", "llama_decode", "n_tokens_all <= cparams.n_batch"),
    ("outputs_over_n_outputs_max", "tiny-llama", "llama_decode", "n_outputs_max <= cparams.n_outputs_max"),
    ("n_outputs_max_under_n_seq_max", "tiny-llama", "llama_init_from_model", "n_outputs_max <= cparams.n_outputs_max"),
    ("n_batch_under_n_seq_max", "tiny-llama", "llama_init_from_model", "n_outputs_max <= cparams.n_outputs_max"),
    ("partial_copy_between_streams", "tiny-llama", "llama_memory_seq_cp", "only supported for full KV buffers"),
    ("copy_to_a_sequence_out_of_range", "tiny-llama", "llama_memory_seq_cp", "seq_id_dst < seq_to_stream.size()"),
    ("copy_to_a_sequence_out_of_range", "tiny-qwen35", "llama_memory_seq_cp", "seq_id_dst < seq_to_stream.size()"),
    ("remove_a_sequence_out_of_range", "tiny-llama", "llama_memory_seq_rm", "seq_id < seq_to_stream.size()"),
    ("remove_a_negative_sequence", "tiny-llama", "llama_memory_seq_rm", "seq_id < seq_to_stream.size()"),
    ("keep_a_sequence_out_of_range", "tiny-llama", "llama_memory_seq_keep", "seq_id < seq_to_stream.size()"),
    ("shift_positions", "tiny-qwen2vl", "llama_memory_seq_add", "seq_add() is only supported for n_pos_per_embd() == 1"),
    ("shift_positions", "tiny-qwen35", "llama_memory_seq_add", "seq_add() is only supported for n_pos_per_embd() == 1"),
    ("divide_positions", "tiny-qwen2vl", "llama_memory_seq_div", "seq_div() is only supported for n_pos_per_embd() == 1"),
    ("end_of_an_incomplete_grammar", "tiny-llama", "llama_sampler_accept", "llama-grammar.cpp:"),
    ("token_the_grammar_forbids", "tiny-llama", "llama_sampler_accept", "Unexpected empty grammar stack after accepting piece: c"),
    ("token_that_wakes_a_grammar_and_breaks_it", "tiny-llama", "llama_sampler_accept", "Unexpected empty grammar stack after accepting piece: the"),
    ("rows_over_n_ubatch_without_causality", "tiny-llama", "llama_decode", "non-causal attention requires n_ubatch >= n_tokens"),
    ("rows_over_n_ubatch_without_causality", "tiny-bert", "llama_decode", "encoder requires n_ubatch >= n_tokens"),
    ("snapshots_as_many_as_are_computed_at_once", "tiny-qwen35", "llama_decode", "n_ubatch > n_keep_tail"),
    ("snapshots_as_many_as_are_computed_at_once", "tiny-lfm2", "llama_decode", "n_ubatch > n_keep_tail"),
]


@pytest.mark.parametrize(("case", "model", "call", "words"), DEATHS, ids=[f"{case}-{model}" for case, model, _, _ in DEATHS])
def test_the_engine_dies(dies: Dies, case: str, model: str, call: str, words: str) -> None:
    assert words in dies(case, model, call)


def test_where_the_engine_no_longer_dies(raw: Raw) -> None:
    """Said to abort, or to be expected to, and measured not to in the pinned engine: it refuses, lies or does nothing instead."""
    for model in ("tiny-llama", "tiny-mamba", "tiny-qwen35"):
        assert raw("decode_a_sequence_out_of_range", model) == {"rc 8": "-1", "rc 256": "-1", "rc -1": "-1"}
    # A copy to the ninth of four sequences lands in an attention cache, and vanishes in a recurrent memory.
    assert [raw("copy_to_a_sequence_that_is_not_there", model)["last position"] for model in ("tiny-llama", "tiny-mamba", "tiny-qwen35")] == ["3", "-1", "-1"]
    # A window of -1 is taken for 0: the penalty is silently off.
    assert raw("negative_penalty_window", "tiny-llama") == {"logit 4": "0.5", "logit -1": "1"}
    # It says that it cannot shift, and shifts.
    assert raw("shift_where_it_cannot", "tiny-gemma3") == {"can shift": "0", "rc": "0"}


# ------------------------------------------------------------------------------------------------------- batches and outputs

EVERYWHERE = pytest.mark.parametrize("model", ["stub:", "tiny-llama", "tiny-mamba", "tiny-qwen2vl"])


@EVERYWHERE
def test_more_tokens_than_n_batch(child: Child, model: str) -> None:
    """A prefill is cut; what cannot be cut (one token a branch) never gets that long."""
    assert child("""
        store = opened(n_batch=8)
        root = store.root()
        assert root.prefill(some(60)) == 8
        assert apart(root.logits(), afresh(some(60))) == 0
        store.commit([root], [9])
        assert apart(root.logits(), afresh(some(60) + [9])) == 0
        error = refused(errors.InvalidArgumentError, lib.pyl_commit_n, store._ptr(), u64_array([root._handle] * 9), i32_array([1] * 9), 9)
        assert (error.index, root.position) == (1, 61)
        lanes = (capi.pyl_lane * 9)(*(new(capi.pyl_lane, branch=root._handle) for _ in range(9)))
        error = refused(errors.InvalidArgumentError, lib.pyl_tick_n, store._ptr(), ref(new(capi.pyl_tick, n_steps=1)), lanes, 9, i32_room(9))
        assert (error.index, root.position) == (1, 61)
        sound(store)
        """, model) == ["sound"]


@EVERYWHERE
def test_a_context_that_is_no_multiple_of_256(child: Child, model: str) -> None:
    """All cells that the store says it has can be used, in dispatches as large as it says; the next one is refused."""
    assert child("""
        for n_ctx in (1, 255, 257, 300, 511):
            with opened(n_ctx=n_ctx, n_batch=512) as store:
                root = store.root()
                cells = store.pressure().cells_remaining
                assert n_ctx <= cells <= n_ctx + 255
                text = some(cells)
                assert root.prefill(text) == 1
                assert apart(root.logits(), afresh(text)) < 0.25  # 0.09 measured: so long a dispatch moves the last bits; another text is 2 or more away
                for call, arguments in ((root.prefill, ([1],)), (root.commit, (1,)), (store.tick, ([root],)), (root.fork().commit, (1,))):
                    error = refused(errors.ContextOverflowError, call, *arguments)
                    assert (error.need, error.have, root.position) == (1, 0, cells)
        store = opened(n_ctx=300, n_batch=512)
        store.root().prefill(some(store.pressure().cells_remaining))
        sound(store)
        """, model) == ["sound"]


@EVERYWHERE
def test_as_many_outputs_as_there_are_branches(child: Child, model: str) -> None:
    """Every branch asks for logits in the same dispatch, and none can ask twice."""
    assert child("""
        store = opened(n_branches=63)
        root = store.root()
        root.prefill(some(20))
        all = [root, *root.fork(62)]
        assert store.prefill([(branch, [i]) for i, branch in enumerate(all)]) == 1
        for i in (0, 31, 62):
            assert apart(all[i].logits(), afresh(some(20) + [i])) == 0
        store.commit(all, [3] * 63)
        store.tick(all)
        error = refused(errors.InvalidArgumentError, store.prefill, [(root, [1]), (all[1], [1]), (root, [2])])
        assert error.index == 2
        sound(store)
        """, model) == ["sound"]


def test_room_for_fewer_outputs_than_branches(child: Child) -> None:
    assert child("""
        def open_raw(**fields):
            params = new(capi.pyl_store_params)
            lib.pyl_store_params_init(ref(params), params.struct_size)
            for name, value in {"n_ctx": 256, "n_threads": 1, **fields}.items():
                setattr(params, name, value)
            lib.pyl_store_open(ref(capi.pyl_store_p()), model._ptr(), ref(params))

        for n_branches, n_batch in ((64, 32), (2, 1), (256, 255)):
            error = refused(errors.InvalidArgumentError, opened, n_branches=n_branches, n_batch=n_batch)
            assert (error.need, error.have) == (n_branches, n_batch)
        for fields in ({"n_branches": 257}, {"n_branches": 2**32 - 1}, {"n_batch": 65537}, {"n_batch": 2**32 - 1}, {"n_ctx": 2**31}, {"n_ctx": 2**32 - 1}, {"n_threads": 513},
                       {"flash_attn": 3}, {"flash_attn": -1}, {"type_k": 9}, {"type_v": -1}, {"type_k": 2**31 - 1}):
            refused(errors.InvalidArgumentError, open_raw, **fields)
        assert live_objects()["contexts"] == 0
        sound(opened(n_branches=256, n_batch=256))
        """) == ["sound"]


def test_rows_are_never_more_than_are_computed_at_once(child: Child) -> None:
    """Without causal attention that kills. A dispatch is one computation (n_batch is n_ubatch) unless asked otherwise, and no call switches causality off."""
    assert child("""
        set_log_level(LogLevel.INFO)
        for options in ({}, {"n_batch": 4}, {"n_ctx": 300, "n_batch": 512}, {"n_batch": 2048, "n_ctx": 1024}, {"deterministic": True}):
            drain_logs()
            opened(**options).close()
            settings = {line.partition("=")[0].split()[-1]: line.partition("=")[2].strip() for line in drain_logs() if "= " in line}
            assert settings["n_batch"] == settings["n_ubatch"] and settings["causal_attn"] == "1" and settings["kv_unified"] == "true" and settings["n_rs_seq"] == "0", settings
            print(settings["n_ctx"], settings["n_batch"], settings["n_outputs_max"])
        model.close()
        """) == ["512 63 4", "512 4 4", "512 512 4", "1024 1024 4", "512 63 4"]


def test_rows_that_see_each_other_fit_what_is_computed_at_once(child: Child, tiny: Callable[[str], str]) -> None:
    """Where a dispatch is computed in parts, pictures of models without causality within them are held to a part."""
    assert child("""
        picture = pylloyal.Image(np.zeros((64, 64, 3), np.uint8))
        with model.projector(PROJECTOR, n_threads=1) as projector:
            prompt = pylloyal.Prompt(projector, [picture, "a"])
            rows = prompt.quote().max_rows
            assert rows > 8
            for n_ubatch in (4, rows - 1):
                store = opened(n_ubatch=n_ubatch)
                root = store.root()
                error = refused(errors.InvalidArgumentError, root.prefill, prompt)
                assert (error.need, error.have, root.position) == (rows, n_ubatch, 0) and "n_ubatch" in str(error)
                store.close()
            store = opened(n_ubatch=rows)
            store.root().prefill(prompt)
            sound(store)
        """.replace("PROJECTOR", repr(tiny("mmproj-tiny-gemma3"))), "tiny-gemma3") == ["sound"]


def test_parts_smaller_than_a_tick_or_larger_than_a_dispatch(child: Child) -> None:
    assert child("""
        for options in ({"n_ubatch": 3}, {"n_ubatch": 64}, {"n_outputs": 3}, {"n_outputs": 64}, {"n_rs_seq": 65}):
            refused(errors.InvalidArgumentError, opened, **options)
        for options in ({"n_ubatch": 8, "n_rs_seq": 7}, {"n_rs_seq": 62}, {"n_ubatch": 4, "n_rs_seq": 64}):  # more snapshots than what is computed at once has room for
            error = refused(errors.InvalidArgumentError, opened, **options)
            assert (error.need, error.have) == (options["n_rs_seq"] + 2, options.get("n_ubatch", 63))
        for options in ({"n_ubatch": 4}, {"n_ubatch": 5, "n_branches": 5}, {"n_outputs": 63}, {"n_ubatch": 4, "n_outputs": 9, "n_rs_seq": 2}, {"n_ubatch": 9, "n_rs_seq": 7}, {"n_rs_seq": 61}):
            with opened(**options) as store:
                root = store.root()
                root.prefill(some(60))
                all = [root, *root.fork(3)]
                store.tick(all)
                store.prefill([(branch, some(5, i)) for i, branch in enumerate(all)])
        sound(opened(n_ubatch=4))
        """, "tiny-qwen35") == ["sound"]


@pytest.mark.parametrize("model", ["tiny-bert", "tiny-qwen3-embed"])
def test_texts_longer_than_are_computed_at_once(child: Child, model: str) -> None:
    """Embeddings are where causality may be off (bert): a text fits a dispatch or is refused, and many are packed into several."""
    assert child("""
        for n_ctx in (1, 8, 100, 128):
            with pylloyal.Embedder(model, n_ctx=n_ctx, n_threads=1) as embedder:
                assert embedder.statistics().n_ctx == n_ctx
                error = refused(errors.InvalidArgumentError, embedder.embed, [[1], some(n_ctx + 1)])
                assert (error.index, error.need, error.have) == (1, n_ctx + 1, n_ctx)
                full = embedder.embed([some(n_ctx, i) for i in range(3)])
                assert embedder.statistics().n_dispatches == 3 and np.isfinite(full).all()
                many = embedder.embed([some(1 + i % n_ctx, i) for i in range(200)])
                alone = embedder.embed([some(1 + 77 % n_ctx, 77)])
                assert (many[77] * alone[0]).sum() > 0.999
                assert np.abs(many[77] - many[78]).max() > 0.01
        refused(errors.InvalidArgumentError, pylloyal.Embedder, model, n_ctx=2**30)
        model.close()
        assert not any(live_objects().values()), live_objects()
        """, model) == []


def test_an_encoder_has_no_store(child: Child) -> None:
    assert child("""
        for flash_attn in (None, True, False):
            refused(errors.UnsupportedOperationError, opened, flash_attn=flash_attn)
        model.close()
        assert not any(live_objects().values()), live_objects()
        """, "tiny-bert") == []


# ------------------------------------------------------------------------------------------------------------------ sequences


def test_no_call_takes_a_sequence_a_position_or_a_range() -> None:
    """Partial copies, shifts and divisions have no door: not in the ABI, not in the seam, not in the engine's file. Causality has one: for the rows of a
    picture, checked to fit one dispatch before anything runs, and put back after it."""
    prototypes = {name: arguments for name, _, arguments, _ in capi.PROTOTYPES}
    assert prototypes["pyl_branch_fork_n"] == [capi.pyl_store_p, capi.c_uint64, capi.POINTER(capi.c_uint64), capi.c_size_t, capi.POINTER(capi.c_uint64), capi.c_uint32]
    assert [name for name in prototypes if re.search(r"seq_|shift|divide|causal|rewind|truncate", name)] == []
    seam = (LIBSRC / "src" / "engine" / "engine.hpp").read_text()
    assert re.search(r"seq_add|seq_div|shift", seam, re.I) is None
    assert "virtual void seq_copy(Seq from, Seq to) = 0;" in seam
    code = "".join(path.read_text() for path in (LIBSRC / "src").rglob("*.cpp"))
    assert re.findall(r"llama_memory_seq_(?:add|div)|kv_unified = false", code) == []
    # Snapshots may be paid for; a rollback to one is a removal of a part, and only whole sequences are removed.
    assert re.findall(r"llama_memory_seq_rm\(([^;]*)\)", code) == ["engine_memory(), seq, -1, -1"]
    assert re.findall(r"llama_set_causal_attn\([^;]*(true|false)\)", code) == ["false", "true"]


@EVERYWHERE
def test_handles_that_name_no_sequence(child: Child, model: str) -> None:
    """Invented, stale, of a slot beyond the last: refused by every call that takes a branch, and nothing has changed."""
    assert child("""
        store = opened()
        root = store.root()
        root.prefill(some(20))
        gone = root.fork()
        gone.prune()
        was, before = root.logits(), store.pressure()
        h = root._handle
        hostile = [0, 1, 2**33, gone._handle, h + 2**32, h - 2**32, h + 3, h + 4, h + 256, h | 0xFFFFFFFF, 0xFFFFFFFF, 2**63, 2**64 - 1, 2**64 - h]
        s, out, room = store._ptr(), u64_room(4), i32_room(4)
        struct = {name: new(getattr(capi, name)) for name in ("pyl_sampling", "pyl_branch_info", "pyl_logits_view", "pyl_distribution")}
        lib.pyl_sampling_init(ref(struct["pyl_sampling"]), struct["pyl_sampling"].struct_size)
        row = (ctypes.c_float * 1)()
        for bad in hostile:
            one = u64_array([bad])
            run = new(capi.pyl_run, branch=bad, tokens=i32_array([1]), n_tokens=1)
            calls = [
                (lib.pyl_branch_set_sampling, s, bad, ref(struct["pyl_sampling"])), (lib.pyl_branch_get_sampling, s, bad, ref(struct["pyl_sampling"])), (lib.pyl_branch_set_grammar, s, bad, None),
                (lib.pyl_branch_set_bias, s, bad, 0, i32_array([1]), row, 1), (lib.pyl_branch_fork_n, s, bad, out, 1, None, 0), (lib.pyl_branch_retain_only, s, bad),
                (lib.pyl_branch_fast_forward, s, bad, h), (lib.pyl_branch_fast_forward, s, h, bad), (lib.pyl_branch_describe, s, bad, ref(struct["pyl_branch_info"])),
                (lib.pyl_prefill_n, s, ref(run), 1, 0, None), (lib.pyl_sample_n, s, one, 1, room), (lib.pyl_commit_n, s, one, i32_array([1]), 1),
                (lib.pyl_tick_n, s, ref(new(capi.pyl_tick)), ref(new(capi.pyl_lane, branch=bad)), 1, room), (lib.pyl_branch_logits, s, bad, ref(struct["pyl_logits_view"])),
                (lib.pyl_branch_set_logits, s, bad, row, 1), (lib.pyl_branch_merge_logits, s, bad, one, 1, 1.0), (lib.pyl_branch_merge_logits, s, h, one, 1, 1.0),
                (lib.pyl_branch_legal_n, s, bad, i32_array([1]), 1, (ctypes.c_uint8 * 1)()), (lib.pyl_branch_distribution, s, bad, ref(struct["pyl_distribution"])),
            ]
            for call in calls:
                refused(errors.StaleHandleError, *call)
            if bad:
                refused(errors.StaleHandleError, lib.pyl_branch_list, s, bad, out, 4, ref(ctypes.c_size_t()))
            lib.pyl_branch_prune_n(s, one, 1)  # what is not there is pruned already
            lib.pyl_branch_prune_subtree(s, bad)
        assert (store.branches(), store.pressure().cells_used, store.pressure().n_dispatches) == ([root], before.cells_used, before.n_dispatches)
        assert apart(root.logits(), was) == 0
        sound(store)
        """, model) == ["sound"]


@EVERYWHERE
def test_more_branches_than_sequences(child: Child, model: str) -> None:
    assert child("""
        store = opened()
        root = store.root()
        root.prefill(some(20))
        for n in (4, 300):
            error = refused(errors.NoLeaseError, root.fork, n)
            assert (error.need, error.have) == (n, 3)
        for n in (2**31 - 1, 2**31, 2**32, 2**40, 2**64 - 1):  # refused before anything is written
            refused(errors.NoLeaseError, lib.pyl_branch_fork_n, store._ptr(), root._handle, u64_room(1), n, None, 0)
            refused(errors.InvalidArgumentError, lib.pyl_branch_fork_n, store._ptr(), root._handle, None, n, None, 0)
        assert root.is_leaf
        root.fork(3)
        refused(errors.NoLeaseError, store.root)
        refused(errors.NoLeaseError, root.fork)
        sound(store)
        """, model) == ["sound"]


@pytest.mark.parametrize("model", ["stub:", "tiny-llama", "tiny-qwen2vl", "tiny-qwen35", "tiny-gemma3"])
def test_a_full_cache_shifts_nothing(child: Child, model: str) -> None:
    """Where others drop the oldest tokens and shift the rest, which kills on M-RoPE: refused, and the branch stands where it stood."""
    assert child("""
        store = opened(n_ctx=256)
        root = store.root()
        root.prefill(some(250))
        root.sampling = Sampling(temperature=0)
        root.steer({token: -float("inf") for token in range(len(model.vocab)) if model.vocab.ends_generation(token)})
        done = store.tick([root], n_steps=20)
        assert (len(done.tokens[0]), done.out_of_cells, root.position) == (6, True, 256)
        was = root.logits()
        for call, arguments in ((store.tick, ([root],)), (root.commit, (1,)), (root.prefill, ([1, 2],))):
            refused(errors.ContextOverflowError, call, *arguments)
        assert root.position == 256 and apart(root.logits(), was) == 0
        assert apart(was, afresh(some(250) + done.tokens[0])) == 0
        sound(store)
        """, model) == ["sound"]


# ------------------------------------------------------------------------------------------------------- grammars and samplers


@pytest.mark.parametrize("model", ["stub:", "tiny-llama", "tiny-gemma3"])
def test_what_a_grammar_does_not_take(child: Child, model: str) -> None:
    """Every token of the vocabulary, at every place of the grammar, ends of generation among them: taken where it is legal and refused elsewhere."""
    assert child("""
        store = opened()
        root = store.root(grammar='root ::= "ab"')
        root.prefill(some(20))
        texts = [model.vocab.piece(token) for token in range(len(model.vocab))]
        ends = [token for token in range(len(model.vocab)) if model.vocab.ends_generation(token)]
        a, b = model.vocab.encode("a")[0], model.vocab.encode("b")[0]
        assert ends
        for said, want in ((b"", {a}), (b"a", {b}), (b"ab", set(ends))):
            was, position = root.logits(), root.position
            legal = {token for token in range(len(model.vocab)) if root.legal([token])[0]}
            assert legal == {t for t in range(len(model.vocab)) if t in ends and said == b"ab" or t not in ends and texts[t] and b"ab".startswith(said + texts[t])} >= want
            for token in set(range(len(model.vocab))) - legal:
                error = refused(errors.GrammarError, root.commit, token)
            assert root.position == position and apart(root.logits(), was) == 0
            # A model that is certain of an end of generation, or of anything else illegal, is not believed.
            certain = np.full(len(model.vocab), -20, np.float32)
            certain[[t for t in range(len(model.vocab)) if t not in legal][:200]] = 30
            other = root.fork()
            other.set_logits(certain)
            assert set(store.sample([other])) <= legal
            other.prune()
            if said != b"ab":
                root.commit({b"": a, b"a": b}[said])
        done = store.tick([root], n_steps=4)
        assert (done.tokens, done.finish) == ([[]], [pylloyal.Finish.END_OF_GENERATION])
        root.commit(ends[0])
        assert root.legal(ends)[0] and not root.legal([a])[0]
        assert live_objects()["grammars"] == 1
        sound(store)
        """, model) == ["sound"]


def test_a_grammar_that_is_all_forbidden(child: Child) -> None:
    """Grammar and bias together leave nothing: a status, not a token."""
    assert child("""
        store = opened()
        root = store.root(grammar='root ::= "ab"')
        root.prefill(some(20))
        root.set_bias({token: -float("inf") for token in range(len(model.vocab)) if model.vocab.piece(token)[:1] == b"a"})
        refused(errors.NothingLegalError, root.sample)
        assert store.tick([root]).finish == [pylloyal.Finish.ILLEGAL]
        assert root.position == 20
        sound(store)
        """) == ["sound"]


@EVERYWHERE
def test_a_penalty_window_below_zero(child: Child, model: str) -> None:
    assert child("""
        store = opened()
        root = store.root(sampling=Sampling(penalty_last_n=8, seed=1))
        root.prefill(some(20))
        before = root.sampling
        for bad in (-1, -2, -64, -2**31, 65537, 2**31 - 1):
            struct = new(capi.pyl_sampling)
            lib.pyl_branch_get_sampling(store._ptr(), root._handle, ref(struct))
            struct.penalty_last_n = bad
            error = refused(errors.InvalidArgumentError, lib.pyl_branch_set_sampling, store._ptr(), root._handle, ref(struct))
            assert "penalty_last_n" in str(error)
            refused(errors.InvalidArgumentError, lib.pyl_branch_create, store._ptr(), ref(u64()), 0, ref(struct), None)
            refused(errors.InvalidArgumentError, store.root, sampling=Sampling(penalty_last_n=bad))
        assert root.sampling == before and store.branches() == [root]
        sound(store)
        """, model) == ["sound"]
