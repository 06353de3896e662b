"""What the engine would allocate against what it has: every tiny model, many options, byte for byte."""
from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
import tiny_models
from PIL import Image
from tiny_models import SPECS

import pylloyal
from pylloyal import errors
from pylloyal.kernel.devices import devices
from pylloyal.kernel.dry_run import DryRun, Memory, dry_run, projector_dry_run

DECODERS = [name for name, spec in SPECS.items() if spec.is_decoder]
# Those whose encoder gets a picture as it comes, or always one size: what the others get depends on tiles and limits (test_capacity_media.py).
PROJECTORS = [f"mmproj-tiny-{kind}" for kind in ("qwen2vl", "qwen3vl", "gemma3", "smolvlm")]
OPTIONS: dict[str, dict[str, Any]] = {
    "all_defaults": {},
    "small": {"n_ctx": 1024},
    "no_multiple_of_256": {"n_ctx": 300, "n_branches": 3, "n_batch": 100},
    "windows": {"n_ctx": 4096, "n_branches": 32, "n_batch": 64, "swa_full": False},
    "no_flash": {"n_ctx": 2048, "flash_attn": False},
    "flash": {"n_ctx": 2048, "flash_attn": True, "n_branches": 1},
    "q8_0": {"n_ctx": 2048, "type_k": "q8_0", "type_v": "q8_0"},
    "q4_0_f16": {"n_ctx": 2048, "type_k": "q4_0", "type_v": "f16"},
    "f32_q4_0_windows": {"n_ctx": 2048, "type_k": "f32", "type_v": "q4_0", "swa_full": False},
    "bf16_q5_1": {"n_ctx": 512, "type_k": "bf16", "type_v": "q5_1"},
    "q8_0_no_flash_windows": {"n_ctx": 2048, "flash_attn": False, "type_k": "q8_0", "swa_full": False, "n_branches": 5},
    "ubatch": {"n_ctx": 512, "n_branches": 1, "n_batch": 512, "n_ubatch": 32},
    "ubatch_of_a_tick": {"n_ctx": 1024, "n_ubatch": 8},
    "ubatch_odd": {"n_ctx": 1024, "n_batch": 200, "n_ubatch": 37, "n_branches": 6},
    "most_branches": {"n_ctx": 8192, "n_branches": 256, "n_batch": 256},
    "snapshots": {"n_ctx": 1024, "n_rs_seq": 3, "n_branches": 4},
    "outputs": {"n_ctx": 1024, "n_outputs": 100},
    "no_offload": {"n_ctx": 2048, "offload_kqv": False, "op_offload": False, "n_branches": 2},
    "long": {"n_ctx": 65536, "n_branches": 2, "swa_full": False},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("accounts")

    def path(name: str, quant: str = "q8_0") -> Path:
        made = folder / f"{name}-{quant}.gguf"
        return made if made.exists() else tiny_models.write(made, name, quant=quant)

    return path


def _outcome(run: Callable[[], Memory]) -> Memory | errors.PylloyalError:
    try:
        return run()
    except errors.PylloyalError as error:
        return error


def _real(model: pylloyal.Model, options: dict[str, Any]) -> Memory:
    with model.store(**options) as store:
        return store.memory()


@pytest.mark.parametrize("quant", ["q8_0", "f32"])
@pytest.mark.parametrize("name", DECODERS)
def test_dry_run_is_what_opening_allocates(paths: Callable[..., Path], name: str, quant: str) -> None:
    path = paths(name, quant)
    n_open = 0
    with pylloyal.Model(path, mmap=False) as model:
        for label, options in OPTIONS.items():
            dry, real = _outcome(lambda options=options: dry_run(path, **options)), _outcome(lambda options=options: _real(model, options))  # type: ignore[misc]
            if isinstance(dry, DryRun) and isinstance(real, Memory):
                fields = dataclasses.asdict(dry)
                assert fields.pop("refusal") is None, label
                assert fields == dataclasses.asdict(real), label
                n_open += 1
            elif isinstance(dry, DryRun):  # the engine can be made to take it, a store cannot be right on it, and both say why
                assert dry.refusal == str(real), label
            else:
                assert type(dry) is type(real) and str(dry) == str(real), label
    assert n_open >= len(OPTIONS) - 4  # MLA refuses mixed types, a few models windows: the rest was really compared


@pytest.mark.parametrize("name", DECODERS)
def test_an_account_adds_up(paths: Callable[..., Path], name: str) -> None:
    for options in OPTIONS.values():
        found = _outcome(lambda options=options: dry_run(paths(name), **options))  # type: ignore[misc]
        if isinstance(found, DryRun):
            assert found.kv_bytes == sum(cache.n_bytes for cache in found.caches)
            assert found.context_bytes == found.kv_bytes + found.recurrent_bytes
            for field in ("model_bytes", "context_bytes", "compute_bytes"):
                assert getattr(found, field) == sum(getattr(row, field) for row in found.rows)
            assert found.total_bytes == found.model_bytes + found.context_bytes + found.compute_bytes + found.output_bytes
            assert found.output_bytes == 4 * SPECS[name].n_vocab * found.n_seq_max


def test_cells_and_their_bytes_as_arithmetic_has_them(paths: Callable[..., Path]) -> None:
    """Numbers worked out by hand, so that dry run and store cannot be wrong together."""
    llama = dry_run(paths("tiny-llama"), n_ctx=1024)  # 2 layers, 2 KV heads of 32: K and V are rows of 64
    assert [(c.name, c.cells, c.streams, c.n_bytes) for c in llama.caches] == [("kv", 1024, 1, 1024 * 2 * (64 + 64) * 2)]
    q8_0 = dry_run(paths("tiny-llama"), n_ctx=1024, type_k="q8_0", type_v="q4_0")
    assert q8_0.kv_bytes == 1024 * 2 * (64 // 32 * 34 + 64 // 32 * 18)
    apart = dry_run(paths("tiny-llama"), n_ctx=4096, n_branches=8, kv_unified=False)
    assert apart.n_ctx_seq == 512 and [(c.cells, c.streams) for c in apart.caches] == [(512, 8)]
    assert apart.refusal is not None and "kv_unified" in apart.refusal


def test_windows_take_cells_of_windows(paths: Callable[..., Path]) -> None:
    with pylloyal.Model(paths("tiny-gemma3"), vocab_only=False) as model:
        n_swa = model.info.n_swa
    found = dry_run(paths("tiny-gemma3"), n_ctx=8192, n_branches=4, n_batch=64, swa_full=False)
    assert {c.name: c.cells for c in found.caches} == {"kv": 8192, "swa": -(-(n_swa * 4 + 64) // 256) * 256}
    full = dry_run(paths("tiny-gemma3"), n_ctx=8192, n_branches=4, n_batch=64)
    assert {c.name: c.cells for c in full.caches} == {"kv": 8192, "swa": 8192}
    small = dry_run(paths("tiny-gemma3"), n_ctx=8192, n_branches=4, n_batch=512, n_ubatch=64, swa_full=False)
    assert small.kv_bytes == found.kv_bytes and small.refusal is not None and "n_ubatch" in small.refusal


def test_recurrent_state_goes_by_branches_and_snapshots_alone(paths: Callable[..., Path]) -> None:
    one = dry_run(paths("tiny-qwen35"), n_ctx=1024, n_branches=1)
    assert one.recurrent_bytes > 0
    assert dry_run(paths("tiny-qwen35"), n_ctx=8192, n_branches=1).recurrent_bytes == one.recurrent_bytes
    assert dry_run(paths("tiny-qwen35"), n_ctx=1024, n_branches=7).recurrent_bytes == 7 * one.recurrent_bytes
    assert dry_run(paths("tiny-qwen35"), n_ctx=1024, n_branches=7, n_rs_seq=4).recurrent_bytes == 35 * one.recurrent_bytes
    cannot = dry_run(paths("tiny-mamba"), n_ctx=1024, n_rs_seq=4)  # the engine takes no part of this state back
    assert cannot.n_rs_seq == 0 and cannot.recurrent_bytes == dry_run(paths("tiny-mamba"), n_ctx=1024).recurrent_bytes
    assert not cannot.caches and cannot.kv_bytes == 0


@pytest.mark.parametrize("name", DECODERS)
def test_decoding_takes_no_more(paths: Callable[..., Path], name: str) -> None:
    """What was reserved is enough for every shape of dispatch: prefills together and alone, ticks of all branches and of some."""
    for options in ({}, {"flash_attn": False}, {"n_ubatch": 8}, {"swa_full": False, "n_branches": 4}):
        with pylloyal.Model(paths(name)) as model:
            opened = _outcome(lambda model=model, options=options: _real(model, {"n_ctx": 1024, **options}))  # type: ignore[misc]
            if isinstance(opened, errors.UnsupportedOperationError):
                continue
            with model.store(n_ctx=1024, n_threads=1, **options) as store:
                before = store.memory()
                root = store.root()
                root.prefill(list(range(10, 310)))
                children = root.fork(3)
                store.prefill([(child, list(range(20, 20 + 11 * i))) for i, child in enumerate(children, 1)])
                store.tick(children)
                store.tick([root, *children])
                store.tick(children[:1])
                assert store.memory() == before == opened


def test_a_mapped_model_counts_as_its_mapping(paths: Callable[..., Path]) -> None:
    path = paths("tiny-llama")
    tensors = gguf.GGUFReader(path).tensors
    begin, end = min(t.data_offset for t in tensors), max(t.data_offset + t.n_bytes for t in tensors)
    with pylloyal.Model(path) as model, model.store(n_ctx=512) as store:
        mapped = store.memory()
    loaded = dry_run(path, n_ctx=512)
    assert mapped.model_bytes == end - begin
    assert loaded.model_bytes == sum(-(-t.n_bytes // 32) * 32 for t in tensors)
    assert (mapped.context_bytes, mapped.compute_bytes, mapped.output_bytes) == (loaded.context_bytes, loaded.compute_bytes, loaded.output_bytes)


# ----------------------------------------------------------------------------------------------------------- nothing taken

GROWTH = """
import resource, sys, pylloyal
from pylloyal.kernel.dry_run import dry_run
dry_run({small!r}, n_ctx=256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = dry_run({path!r}, **{options!r})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before << 10, found.total_bytes)
"""


def _growth(small: Path, path: Path, **options: Any) -> tuple[int, int]:
    """Bytes a child grew by for a dry run, and what the run says would be taken. A high-water mark, so what came and went counts too."""
    code = GROWTH.format(small=str(small), path=str(path), options=options)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    grown, told = done.stdout.split()
    return int(grown), int(told)


def _sparse(path: Path, name: str, n_ff: int) -> Path:
    """A model file with the header of a large model and a hole where its weights would be."""
    spec = SPECS[name]
    writer = gguf.GGUFWriter(path, spec.arch)
    if spec.vocab != "none":
        writer.add_block_count(spec.n_layer)
        tiny_models.vocabulary(spec.vocab, spec.n_vocab).write(writer)
    for key, value in spec.keys.items():
        tiny_models._add(writer, f"{spec.arch}.{key}", n_ff if key.endswith("feed_forward_length") else value)
    total = 0
    for tensor, shape in spec.shapes():
        wide = [n_ff if n == 128 and "ffn" in tensor else n for n in shape]
        n_bytes = 4 * int(np.prod(wide))
        writer.add_tensor_info(tensor, wide[::-1], np.dtype(np.float32), n_bytes)
        total += -(-n_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + total)
    return path


def test_weights_are_not_read(paths: Callable[..., Path], tmp_path: Path) -> None:
    path = _sparse(tmp_path / "large.gguf", "tiny-llama", 2**21)
    grown, told = _growth(paths("tiny-llama"), path, n_ctx=256)
    assert told > 3 << 30
    assert grown < 64 << 20


@pytest.mark.parametrize(("name", "options", "at_least"), [
    ("tiny-llama", {"n_ctx": 1 << 20, "type_k": "f32", "type_v": "f32"}, 1 << 30),  # cells, which the engine itself leaves out
    ("tiny-qwen35", {"n_ctx": 256, "n_branches": 256, "n_batch": 256, "n_rs_seq": 64}, 400 << 20),  # state, which it allocates and clears
])
def test_cells_and_state_are_not_allocated(paths: Callable[..., Path], name: str, options: dict[str, Any], at_least: int) -> None:
    grown, told = _growth(paths(name), paths(name), **options)
    assert told > at_least
    assert grown < 96 << 20  # a million cells' books are 48 MiB of it


def test_nothing_is_left_or_said(paths: Callable[..., Path]) -> None:
    pylloyal.drain_logs()
    before = pylloyal.live_objects()
    dry_run(paths("tiny-llama"), n_ctx=1 << 18)  # far beyond the trained context, which the engine warns about
    with pytest.raises(errors.UnsupportedOperationError):
        dry_run(paths("tiny-deepseek2"), type_k="q4_0", type_v="f16")
    projector_dry_run(paths("mmproj-tiny-qwen2vl"))
    assert pylloyal.live_objects() == before
    assert pylloyal.drain_logs() == []


def test_in_many_threads_and_beside_stores(paths: Callable[..., Path]) -> None:
    """Buffers are pretended for the thread that looks, and for no other."""
    expected = dry_run(paths("tiny-qwen35"), n_ctx=2048)
    seen: list[DryRun] = []
    failed: list[BaseException] = []

    def look() -> None:
        try:
            for _ in range(10):
                seen.append(dry_run(paths("tiny-qwen35"), n_ctx=2048))
                devices()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    with pylloyal.Model(paths("tiny-qwen35")) as model:
        with model.store(n_ctx=512, n_threads=1) as store:
            root = store.root()
            root.prefill([5, 6, 7])
            alone = np.array(root.logits())
        for thread in threads:
            thread.start()
        for _ in range(10):
            with model.store(n_ctx=512, n_threads=1) as store:
                root = store.root()
                root.prefill([5, 6, 7])
                assert np.array_equal(root.logits(), alone)
        for thread in threads:
            thread.join()
    assert failed == [] and seen == [expected] * 30


# --------------------------------------------------------------------------------------------------------------- refusals

def test_what_no_context_can_have(paths: Callable[..., Path]) -> None:
    path = paths("tiny-llama")
    bad: list[dict[str, Any]] = [
        {"n_ctx": 0}, {"n_ctx": -1}, {"n_branches": 0}, {"n_branches": 257}, {"n_batch": 65537}, {"n_batch": 4, "n_branches": 8}, {"n_ubatch": 513}, {"n_ubatch": 7, "n_branches": 8},
        {"n_outputs": 7, "n_branches": 8}, {"n_outputs": 513}, {"n_rs_seq": 65}, {"n_rs_seq": -1}, {"type_k": "q9_9"}, {"type_v": "q4_0", "flash_attn": False},
    ]
    with pylloyal.Model(path) as model:
        for options in bad:
            with pytest.raises(errors.InvalidArgumentError) as dry:
                dry_run(path, **options)
            with pytest.raises(errors.InvalidArgumentError) as real:
                model.store(**options)
            assert str(dry.value) == str(real.value), options


def test_more_cells_than_their_books_have_room_for(paths: Callable[..., Path]) -> None:
    free = next(device.free_bytes for device in devices() if device.kind == "cpu")
    n_ctx = 2**31 - 256
    if free is None or free > 48 * n_ctx:
        pytest.skip("this machine has room for the books of two thousand million cells")
    with pylloyal.Model(paths("tiny-llama")) as model:
        for call in (lambda: dry_run(paths("tiny-llama"), n_ctx=n_ctx), lambda: model.store(n_ctx=n_ctx)):
            with pytest.raises(errors.InsufficientMemoryError) as caught:
                call()
            assert caught.value.need == 48 * n_ctx and caught.value.have is not None and caught.value.have < caught.value.need


def test_files_that_are_no_models(paths: Callable[..., Path], tmp_path: Path) -> None:
    whole = paths("tiny-llama").read_bytes()
    (tmp_path / "text.gguf").write_text("no model")
    (tmp_path / "empty.gguf").write_bytes(b"")
    for path, kind in ((tmp_path / "none.gguf", errors.KernelIOError), (tmp_path, errors.KernelIOError), (tmp_path / "text.gguf", errors.FormatError),
                       (tmp_path / "empty.gguf", errors.FormatError), (paths("mmproj-tiny-gemma3"), errors.FormatError)):
        with pytest.raises(kind):
            dry_run(path)
    cut = tmp_path / "cut.gguf"
    for n in sorted({*range(4, 400, 37), *range(400, len(whole), len(whole) // 60), len(whole) - 1}):
        cut.write_bytes(whole[:n])
        with pytest.raises(errors.FormatError):
            dry_run(cut)
    with pytest.raises(errors.InvalidArgumentError):
        dry_run("nul\0byte")
    with pytest.raises(errors.ProjectorMismatchError):
        projector_dry_run(paths("tiny-llama"))
    sees = paths("mmproj-tiny-qwen2vl").read_bytes()
    for n in range(4, len(sees), len(sees) // 60):
        cut.write_bytes(sees[:n])
        with pytest.raises(errors.PylloyalError) as caught:
            projector_dry_run(cut)
        assert isinstance(caught.value, errors.FormatError | errors.ProjectorMismatchError)


def test_a_model_that_is_no_decoder(paths: Callable[..., Path]) -> None:
    found = dry_run(paths("tiny-bert"))
    assert found.context_bytes == 0 and found.refusal is not None
    with pylloyal.Model(paths("tiny-bert")) as model, pytest.raises(errors.UnsupportedOperationError) as caught:
        model.store()
    assert str(caught.value) == found.refusal


# ------------------------------------------------------------------------------------------------------ parts of a dispatch

@pytest.mark.parametrize("name", DECODERS)
def test_parts_of_a_dispatch_give_what_dispatches_give(paths: Callable[..., Path], name: str) -> None:
    """Computing a dispatch in parts, and keeping snapshots nobody asks for, changes no bit."""

    def say(model: pylloyal.Model, **options: Any) -> tuple[list[list[list[int]]], list[Any]]:
        with model.store(n_ctx=2048, n_threads=1, **options) as store:
            root = store.root(sampling=pylloyal.Sampling(temperature=0))
            root.prefill(list(range(5, 205)))
            children = root.fork(4)
            for i, child in enumerate(children):
                child.prefill(list(range(100, 103 + 7 * i)))
            out = [np.array(child.logits()) for child in children]
            tokens = [store.tick([*children, root]).tokens for _ in range(6)]
            late = children[1].fork(1)[0]
            late.prefill([7, 8, 9])
            return tokens, [*out, *(np.array(branch.logits()) for branch in (late, children[1], root))]

    with pylloyal.Model(paths(name)) as model:
        tokens, logits = say(model, n_batch=32)
        for options in ({"n_batch": 512, "n_ubatch": 32}, {"n_batch": 64, "n_ubatch": 32}, {"n_batch": 32, "n_ubatch": 8}, {"n_batch": 32, "n_rs_seq": 3}, {"n_batch": 512, "n_ubatch": 32, "n_rs_seq": 2}):
            found = say(model, **options)
            assert found[0] == tokens, options
            for one, other in zip(found[1], logits, strict=True):
                assert np.array_equal(one, other), options


def test_pressure_tells_the_part(paths: Callable[..., Path]) -> None:
    with pylloyal.Model(paths("tiny-llama")) as model:
        with model.store(n_ctx=512, n_batch=128, n_ubatch=16) as store:
            assert (store.pressure().n_batch, store.pressure().n_ubatch) == (128, 16)
        with model.store(n_ctx=512, n_batch=128) as store:
            assert store.pressure().n_ubatch == 128


def test_parts_would_let_go_of_a_window(paths: Callable[..., Path]) -> None:
    with pylloyal.Model(paths("tiny-gemma3")) as model:
        with pytest.raises(errors.UnsupportedOperationError, match="n_ubatch of n_batch"):
            model.store(n_ctx=8192, n_branches=2, n_batch=128, n_ubatch=64, swa_full=False)
        with model.store(n_ctx=256, n_branches=8, n_batch=256, n_ubatch=64, swa_full=False) as store:  # here windows are as long as the context
            assert store.pressure().n_ubatch == 64


# -------------------------------------------------------------------------------------------------------------- projectors

@pytest.fixture(scope="module")
def sighted(paths: Callable[..., Path]) -> Iterator[Callable[[str], pylloyal.Model]]:
    opened: dict[str, pylloyal.Model] = {}

    def model(projector: str) -> pylloyal.Model:
        text = {"mmproj-tiny-smolvlm": "tiny-llama"}.get(projector, projector.removeprefix("mmproj-"))
        return opened.setdefault(text, pylloyal.Model(paths(text)))

    yield model
    for one in opened.values():
        one.close()


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("name", PROJECTORS)
def test_an_encoder_takes_what_its_dry_run_says(paths: Callable[..., Path], sighted: Callable[[str], pylloyal.Model], name: str, flash_attn: bool) -> None:
    pixels = np.random.default_rng(1)
    fixed = {"mmproj-tiny-gemma3": (128, 128), "mmproj-tiny-smolvlm": (64, 64)}.get(name)  # whatever the picture, this is what the encoder gets
    for size in ((64, 64), (128, 64), (320, 160)):
        with sighted(name).projector(paths(name), flash_attn=flash_attn, n_threads=1) as projector, sighted(name).store(n_ctx=1024, n_threads=1) as store:
            dry = projector_dry_run(paths(name), size=fixed or size, flash_attn=flash_attn)
            bare = projector.statistics()
            assert (bare.weights_bytes, bare.compute_bytes) == (dry.weights_bytes, 0)
            store.root().prefill(pylloyal.Prompt(projector, [pylloyal.Image(pixels.integers(0, 255, (size[1], size[0], 3), np.uint8))]))
            assert projector.statistics().compute_bytes == dry.compute_bytes == sum(encoder.compute_bytes for encoder in dry.encoders)
            assert [(e.width, e.height) for e in dry.encoders] == [fixed or size]
            assert [(row.weights_bytes, row.compute_bytes) for row in dry.rows] == [(dry.weights_bytes, dry.compute_bytes)]


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("name", ["mmproj-tiny-qwen2vl", "mmproj-tiny-qwen3vl"])
def test_frames_that_share_rows_are_encoded_together(paths: Callable[..., Path], sighted: Callable[[str], pylloyal.Model], name: str, flash_attn: bool) -> None:
    frames = [Image.fromarray(np.random.default_rng(i).integers(0, 255, (128, 128, 3), np.uint8)) for i in range(4)]
    clip = io.BytesIO()
    frames[0].save(clip, "GIF", save_all=True, append_images=frames[1:], duration=500)
    with sighted(name).projector(paths(name), flash_attn=flash_attn, n_threads=1) as projector, sighted(name).store(n_ctx=1024, n_threads=1) as store:
        assert projector.statistics().n_frames_merged == 2
        store.root().prefill(pylloyal.Prompt(projector, [pylloyal.Video(clip.getvalue(), fps=2.0, stamp_s=0)]))
        together = projector_dry_run(paths(name), size=(128, 128), n_frames=2, flash_attn=flash_attn)
        assert projector.statistics().compute_bytes == together.compute_bytes >= projector_dry_run(paths(name), size=(128, 128), flash_attn=flash_attn).compute_bytes
    assert projector_dry_run(paths(name), n_frames=2).encoders[0].width == projector_dry_run(paths(name)).encoders[0].width


def test_flash_attention_is_most_of_an_encoder(paths: Callable[..., Path]) -> None:
    path = paths("mmproj-tiny-qwen2vl")
    with_it, without = projector_dry_run(path, flash_attn=True), projector_dry_run(path, flash_attn=False)
    assert without.compute_bytes > 20 * with_it.compute_bytes
    assert projector_dry_run(path) == with_it  # which is what is chosen


def test_a_projector_takes_no_memory_to_look_at(paths: Callable[..., Path]) -> None:
    code = ("import resource\nfrom pylloyal.kernel.dry_run import projector_dry_run\n"
            f"projector_dry_run({str(paths('mmproj-tiny-gemma3'))!r})\nbefore = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            f"found = projector_dry_run({str(paths('mmproj-tiny-qwen2vl'))!r}, flash_attn=False, size=(2048, 2048))\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before << 10, found.compute_bytes)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    grown, told = map(int, done.stdout.split())
    assert told > 16 << 30 and grown < 256 << 20


def test_a_projector_whose_weights_do_not_fit(paths: Callable[..., Path], tmp_path: Path) -> None:
    """The engine asserts that it got room for them; the dry run needs none, and opening is refused."""
    path = _sparse(tmp_path / "large.gguf", "mmproj-tiny-qwen2vl", 2**21)
    code = ("import resource\nimport pylloyal\nfrom pylloyal.kernel.dry_run import projector_dry_run\n"
            f"with pylloyal.Model({str(paths('tiny-qwen2vl'))!r}) as model:\n"
            "    with open('/proc/self/statm') as file:\n"
            "        limit = int(file.read().split()[0]) * resource.getpagesize() + 2**29\n"
            "    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
            f"    print(projector_dry_run({str(path)!r}).weights_bytes)\n"
            f"    try:\n        model.projector({str(path)!r})\n    except pylloyal.errors.InsufficientMemoryError as error:\n        print(error.need)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    weights, need = map(int, done.stdout.split())
    assert weights >= need > 2 << 30 and weights - need < 4096  # less by the padding between tensors


def test_sizes_an_encoder_cannot_take(paths: Callable[..., Path]) -> None:
    for name, size in (("mmproj-tiny-qwen2vl", (30, 32)), ("mmproj-tiny-qwen2vl", (32, 0)), ("mmproj-tiny-qwen2vl", (16400, 32)), ("mmproj-tiny-gemma3", (64, 64)), ("mmproj-tiny-smolvlm", (64, 128)),
                       ("mmproj-tiny-qwen3vl", (-32, 32))):
        with pytest.raises(errors.InvalidArgumentError):
            projector_dry_run(paths(name), size=size)
    for name, n_frames in (("mmproj-tiny-qwen2vl", 3), ("mmproj-tiny-qwen2vl", 0), ("mmproj-tiny-gemma3", 2)):
        with pytest.raises(errors.InvalidArgumentError):
            projector_dry_run(paths(name), n_frames=n_frames)


def test_devices_name_their_backend() -> None:
    found = devices()
    assert found[0].kind == "cpu" and found[0].backend == "CPU" and found[0].name
    assert found[0].free_bytes is not None and found[0].total_bytes is not None and 0 < found[0].free_bytes <= found[0].total_bytes
    with mock.patch("pylloyal.kernel.devices.take_text") as told:
        told.return_value = b"""[{"name":"G0","description":"d","backend":"B","kind":"gpu","total_bytes":0,"free_bytes":0},
            {"name":"G1","description":"d","backend":"B","kind":"gpu","total_bytes":8,"free_bytes":8}, {"name":"G2","description":"d","backend":"B","kind":"igpu","total_bytes":8,"free_bytes":5},
            {"name":"C","description":"d","backend":"CPU","kind":"cpu","total_bytes":8,"free_bytes":8}, {"name":"C","description":"d","backend":"CPU","kind":"cpu","total_bytes":8,"free_bytes":0}]"""
        assert [(d.free_bytes, d.total_bytes) for d in devices()] == [(None, None), (None, 8), (5, 8), (8, 8), (None, 8)]
