"""What the header of a projector is said to take, against mtmd itself: cells of pictures and clips, weights, and the encoder's buffer.

``-s`` prints a line for each projector: its weights, the bound for the largest picture, and how far over the largest that was tried it is.
"""
from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from projectors import PROJECTORS, Made, Oracle, both, write, write_text_model

import pylloyal
from pylloyal import Model, PixelPart, PlaceholderPart, Projector, Prompt, Video, errors
from pylloyal.capacity.encoders import GRAPHS, encoder_bytes
from pylloyal.capacity.eye import KINDS, MERGING, eye_of
from pylloyal.capacity.header import Header
from pylloyal.capacity.layout import largest, layout
from pylloyal.capacity.loaded import _OWN
from pylloyal.capacity.media import clip_cells, media_cells, media_demand, projector_memory
from pylloyal.kernel.parts import Part, TextPart
from pylloyal.sources.clip import Decoded

ROOT = Path(__file__).resolve().parents[2]
# Thin, tiny and huge; at, below and above patches, tiles and limits; two that single precision rounds its own way (281, 1289).
SIZES = [(1, 1), (8, 8), (16, 16), (17, 33), (28, 28), (29, 27), (37, 41), (64, 48), (100, 300), (300, 100), (128, 128), (129, 127), (257, 255), (281, 281), (336, 336), (337, 336), (364, 364), (448, 448), (449, 448), (511, 513),
         (512, 512), (640, 480), (724, 724), (725, 724), (896, 896), (1024, 768), (768, 1024), (1289, 1289), (1536, 512), (1540, 1540), (1920, 1080), (800, 2000), (2000, 600), (1792, 1792), (1793, 1792), (4000, 3000), (6000, 6000),
         (8000, 4500), (50, 1000), (1000, 31), (10, 2000), (2500, 7), (1, 999), (500, 3), (32, 1024), (1024, 33)]
TINY = {"qwen2vl": ("tiny-qwen2vl", "mmproj-tiny-qwen2vl"), "qwen3vl": ("tiny-qwen3vl", "mmproj-tiny-qwen3vl"), "gemma3": ("tiny-gemma3", "mmproj-tiny-gemma3"), "smolvlm": ("tiny-llama", "mmproj-tiny-smolvlm"),
        "qwen35": ("tiny-qwen35", "mmproj-tiny-qwen2vl"), "trained": ("", "")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("projectors")


@pytest.fixture(params=sorted(PROJECTORS))
def real(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Made, Path]:
    return request.param, PROJECTORS[request.param], write(tmp_path / "mmproj.gguf", PROJECTORS[request.param])


def said(header: Header, width: int, height: int, **limits: int) -> int | None:
    try:
        return media_cells(header, width, height, **limits)
    except errors.MediaEncodeError:
        return None


# -------------------------------------------------------------------------------------------------------------- real sizes


def test_cells_of_every_kind(real: tuple[str, Made, Path], tmp_path: Path) -> None:
    _, made, path = real
    oracle, header = Oracle(path, write_text_model(tmp_path / "words.gguf", made)), Header(path)
    dice = random.Random(made.kind)
    sizes = SIZES + [(dice.randint(1, 3000), dice.randint(1, 3000)) for _ in range(60)]
    for size, answer in zip(sizes, oracle.cells(sizes), strict=True):
        assert said(header, *size) == (answer["rows"] + answer["text"] if not answer["rc"] else None), size
    for frames, merged in ((1, 1), (2, 2 if made.kind in MERGING else 1), (3, 2 if made.kind in MERGING else 1)):
        (answer,) = oracle.cells([(640, 480)], frames)
        assert answer["rows"] + answer["text"] == media_cells(header, 640, 480) * -(-frames // merged)


def test_weights_of_every_kind(real: tuple[str, Made, Path]) -> None:
    name, made, path = real
    memory, oracle = projector_memory(Header(path)), Oracle(path)
    assert memory.kind == made.kind
    assert memory.weights_bytes == oracle.weights_bytes if made.kind in _OWN else memory.weights_bytes >= oracle.weights_bytes
    assert memory.weights_known == ("exact" if made.kind in _OWN else "bound")
    if name == "llava-1.5":
        assert memory.weights_bytes < Header(path).tensor_bytes  # a layer and a tensor the engine leaves out


@pytest.mark.parametrize("flash", [True, False])
def test_the_buffer_of_every_graph_is_the_engines(real: tuple[str, Made, Path], flash: bool) -> None:
    name, made, path = real
    header = Header(path)
    eye = eye_of(header)
    if made.kind not in GRAPHS:
        assert projector_memory(header).encoder_bytes is None
        return
    tensors = {tensor.name: tensor for tensor in header.tensors}
    asked = [size for size in SIZES if max(size) <= 64 * min(size)]
    ordinary = sorted({size for width, height in asked for size in layout(eye, width, height).pictures})
    thin = layout(eye, 1, 999).pictures[-1:] if made.kind != "idefics3" else ()
    sizes = [*random.Random(name).sample(ordinary, min(9, len(ordinary))), max(ordinary, key=lambda size: size[0] * size[1]), *thin, *largest(eye)]
    oracle, most = Oracle(path, flash=flash), 0
    for n_frames in (1, 2) if made.kind in MERGING else (1,):
        for size, engine in zip(sizes, oracle.graphs(sizes, n_frames), strict=True):
            assert engine is not None, f"mtmd died over {size}"
            assert encoder_bytes(header, tensors, eye, size, flash, n_frames) == engine, (size, n_frames)
            most = max(most, engine if size in ordinary else 0)
    start = time.perf_counter()
    bound = projector_memory(header, flash_attn=flash)
    seconds = time.perf_counter() - start
    assert bound.encoder_bytes is not None
    assert most <= bound.encoder_bytes
    print(f"\n{name:16} {made.kind:17} {'flash' if flash else 'plain'}  weights {bound.weights_bytes / 2**20:8.1f} MiB  bound {bound.encoder_bytes / 2**20:10.2f} MiB  over {bound.encoder_bytes / most - 1:6.1%}"
          f"  {len(sizes)} sizes equal  {seconds * 1000:.0f} ms")


@pytest.mark.parametrize(("name", "least", "most"), [("qwen2.5-vl", 64, 256), ("qwen2.5-vl", 1000, 1001), ("smolvlm", 0, 400), ("lighton-ocr", 600, 700), ("lfm2-vl", 32, 100), ("pixtral", 3, 5), ("hunyuan-vl", 10, 300),
                                                     ("glm5v", 5, 60), ("paddle-ocr", 5, 60), ("kimi-k2.5", 4, 900), ("gemma4", 40, 70)])
def test_bounds_that_are_asked_for(name: str, least: int, most: int, tmp_path: Path) -> None:
    made = PROJECTORS[name]
    path = write(tmp_path / "mmproj.gguf", made)
    oracle, header = Oracle(path, write_text_model(tmp_path / "words.gguf", made), least=least, most=most), Header(path)
    peak = projector_memory(header, image_min_tokens=least, image_max_tokens=most).encoder_bytes
    assert peak is not None
    for i, (size, answer) in enumerate(zip(SIZES, oracle.cells(SIZES), strict=True)):
        assert said(header, *size, image_min_tokens=least, image_max_tokens=most) == answer["rows"] + answer["text"], size
        if i % 5 == 0 and max(size) <= 64 * min(size):
            assert (projector_memory(header, [size], image_min_tokens=least, image_max_tokens=most).encoder_bytes or 0) <= peak, size


@pytest.mark.parametrize("name", sorted(name for name, made in PROJECTORS.items() if made.kind in GRAPHS))
def test_no_picture_of_ordinary_shape_exceeds_the_bound(name: str, tmp_path: Path) -> None:
    """Limits, shapes and sizes at random; the graphs are the engine's (above), so the engine need not be asked again."""
    header = Header(write(tmp_path / "mmproj.gguf", PROJECTORS[name]))
    tensors = {tensor.name: tensor for tensor in header.tensors}
    dice = random.Random(name)
    n_tried = 0
    for most in (0, dice.randint(4, 300), dice.randint(100, 5000)):
        limits = {"image_max_tokens": most, "image_min_tokens": dice.choice((0, 1, dice.randint(1, most))) if most else 0}
        try:
            eye = eye_of(header, **limits)
        except errors.MetadataError:  # more than the file's own limit
            continue
        for flash in (True, False):
            bound = projector_memory(header, flash_attn=flash, clips=False, **limits).encoder_bytes
            assert bound is not None
            for _ in range(2):
                side, oblong = dice.choice((200, 1000, 6000)), 60 ** dice.uniform(-1, 1)
                for size in layout(eye, max(1, round(side * oblong**0.5)), max(1, round(side / oblong**0.5))).pictures[:2]:
                    n_tried += 1
                    assert (encoder_bytes(header, tensors, eye, size, flash) or 0) <= bound, (limits, size, flash)
    assert n_tried >= 4


# ------------------------------------------------------------------------------------------------------------- tiny models


class Pair:
    """A tiny model, its projector, and the projector's header."""

    def __init__(self, name: str, folder: Path) -> None:
        model, projector = TINY[name]
        trained = ROOT / "fixtures" / "models"
        self.model_path = tiny_models.write(folder / f"{model}.gguf", model) if model else trained / "tinyvlm-f16.gguf"
        self.path = tiny_models.write(folder / f"{projector}.gguf", projector) if model else trained / "mmproj-tinyvlm-f16.gguf"
        self.model = Model(self.model_path)
        self.header = Header(self.path)

    def quote(self, projector: Projector, *parts: Part) -> int:
        """Cells of these parts, without those of their text."""
        with Prompt(projector, parts, add_special=False) as prompt:
            return prompt.quote().n_cells - sum(len(self.model.vocab.encode(part.text)) for part in parts if isinstance(part, TextPart))


@pytest.fixture(scope="module", params=sorted(TINY))
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pair]:
    made = Pair(request.param, folder)
    yield made
    made.model.close()


def test_cells_are_quoted_cells(pair: Pair) -> None:
    with pair.model.projector(pair.path, n_threads=1) as projector:
        for width, height in SIZES:
            if media := said(pair.header, width, height):
                assert media == pair.quote(projector, PlaceholderPart(width, height)), (width, height)
            is_small = width * height < 100_000
            if is_small:  # with pixels: what cannot be prepared is refused by both
                pixels = PixelPart(np.zeros((height, width, 3), np.uint8))
                if media is None:
                    with pytest.raises(errors.MediaEncodeError):
                        pair.quote(projector, pixels)
                else:
                    assert media == pair.quote(projector, pixels), (width, height)


def test_cells_of_clips_are_quoted_cells(pair: Pair) -> None:
    with pair.model.projector(pair.path, n_threads=1) as projector:
        for seconds, fps, width, height, stamp_s in ((3.0, 2.0, 64, 48, 5.0), (12.0, 2.0, 64, 48, 5.0), (30.0, 2.0, 96, 64, 5.0), (10.0, 3.0, 33, 65, 0.0), (5.0, 1.0, 130, 40, 2.0), (0.2, 2.0, 64, 64, 5.0)):
            video = Video.__new__(Video)
            times = [k / fps for k in range(200) if k / fps < seconds]
            video.frames, video.stamp_s, video.notes = [Decoded(np.full((height, width, 3), k % 255, np.uint8), t, t) for k, t in enumerate(times)], stamp_s, []
            assert clip_cells(pair.header, seconds, fps, width, height, stamp_s=stamp_s) == pair.quote(projector, *video.parts(projector)), (seconds, fps)


def test_the_command_counts_the_same(pair: Pair, tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "picture.png"
    Image.new("RGB", (97, 61), "red").save(path)
    told = subprocess.run([sys.executable, "-m", "pylloyal", "media", str(path), "--model", str(pair.model_path), "--mmproj", str(pair.path), "--json"], capture_output=True, text=True, check=True).stdout
    assert f'"cells": {media_cells(pair.header, 97, 61)},' in told


def test_the_buffers_of_tiny_projectors_are_the_engines(pair: Pair) -> None:
    eye = eye_of(pair.header)
    tensors = {tensor.name: tensor for tensor in pair.header.tensors}
    sizes = sorted({size for width, height in SIZES for size in layout(eye, width, height).pictures} if said(pair.header, 1, 999) else {(eye.image_size, eye.image_size)})
    for flash in (True, False):
        oracle = Oracle(pair.path, flash=flash)
        assert oracle.weights_bytes == projector_memory(pair.header).weights_bytes
        for n_frames in (1, 2) if eye.kind in MERGING else (1,):
            assert [encoder_bytes(pair.header, tensors, eye, size, flash, n_frames) for size in sizes] == oracle.graphs(sizes, n_frames)


def test_memory_is_what_the_process_then_holds() -> None:
    """A picture is really encoded, and the process grows by the buffer, and not much besides: the decoder's own, touched for the first time."""
    program = f"""
import sys
import numpy as np
import pylloyal
from pylloyal import Prompt, PixelPart
def held():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
model = pylloyal.Model({str(ROOT / 'fixtures/models/tinyvlm-f16.gguf')!r})
projector = model.projector({str(ROOT / 'fixtures/models/mmproj-tinyvlm-f16.gguf')!r}, n_threads=1, flash_attn=False)
store = model.store(n_ctx=4096, n_branches=1, n_batch=2048, n_threads=1)
pixels = np.zeros((448, 448, 3), np.uint8)
branch = store.root()
before = held()
branch.prefill(Prompt(projector, [PixelPart(pixels)]))
print(held() - before)
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux tells what a process holds")
    header = Header(ROOT / "fixtures/models/mmproj-tinyvlm-f16.gguf")
    plan = projector_memory(header, [(448, 448)], flash_attn=False, clips=False).encoder_bytes
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert plan is not None
    grown = int(done.stdout)
    assert plan * 0.9 < grown < plan + 64 * 2**20, f"planned {plan / 2**20:.1f} MiB, grown by {grown / 2**20:.1f} MiB"


# ---------------------------------------------------------------------------------------------------------------- the rest


def test_every_kind_is_tried() -> None:
    tried = {made.kind for made in PROJECTORS.values()}
    assert set(GRAPHS) <= tried
    assert {"mimovl", "dots3note_v", "gemma3nv", "gemma4uv", "yasa2", "ldp", "ldpv2", "adapter"} == set(KINDS) - tried  # followed from the source alone


def test_damaged_projectors_raise_one_family_and_stay_quick(tmp_path: Path) -> None:
    """Keys and shapes at random, one or several at a time: no crash, no hang, and whatever is said is a number."""
    dice = random.Random(3)
    n_said = 0
    for name in sorted(PROJECTORS):
        made = PROJECTORS[name]
        header = Header(write(tmp_path / "mmproj.gguf", made))
        keys, tensors = dict(header), header.tensors
        for _ in range(12):
            broken: Any = Header.__new__(Header)
            broken._values = dict(keys)
            for key in dice.sample(sorted(keys), dice.choice((0, 1, 3))):
                broken._values[key] = dice.choice((0, 1, 2, 7, 64, 1 << 20, 1 << 31, -1, True, 0.5, float("nan"), "", "mlp", [], [1, 2], [0] * 8, [1 << 16, 1 << 16]))
            broken.tensors = tuple(replace(t, shape=tuple(dice.choice((1, 2, 3, n, n * 7, 1 << 40)) for n in t.shape) or (1,)) if dice.random() < 0.01 else t for t in tensors if dice.random() > 0.002)
            start = time.process_time()
            try:
                demand = media_demand(broken, ["640x480", "3000x40"], ["3s@2fps", "2s:64x48"])
            except (errors.MetadataError, errors.MediaEncodeError):
                continue
            finally:
                assert time.process_time() - start < 5
            n_said += 1
            assert all(isinstance(n, int) and n >= 0 for _, n, *_ in (*demand.lines, *demand.cells))
    assert n_said > 60


def test_tensors_that_are_left_out_cost_nothing(tmp_path: Path) -> None:
    made = PROJECTORS["qwen2-vl"]
    more: dict[str, Any] = {**both("v.blk.32.ln1", 1280), **both("mm.1", 64), "v.image_newline": (512,), "rope.freqs": (64,), "v.blk.3.unheard_of.weight": (100,), "a.blk.0.ln1.weight": (64,)}
    path = write(tmp_path / "mmproj.gguf", Made(made.kind, made.keys, made.shapes, made.width, more))
    memory = projector_memory(Header(path))
    assert (memory.weights_bytes, memory.weights_known) == (Oracle(path).weights_bytes, "exact")
    assert memory.weights_bytes < Header(path).tensor_bytes


def test_a_plan_takes_no_library(tmp_path: Path) -> None:
    path = write(tmp_path / "mmproj.gguf", PROJECTORS["qwen2.5-vl"])
    program = ("import sys; from pylloyal.capacity.header import Header; from pylloyal.capacity.media import media_demand; "
               f"print(media_demand(Header({str(path)!r}), ['1024x768'], ['30s@2fps:640x360'])); assert not {{'PIL', 'av'}} & set(sys.modules)")
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PATH": "", "PYTHONPATH": str(ROOT), "PYLLOYAL_LIBRARY": "/nowhere"}).stdout
    assert told.strip() == repr(media_demand(Header(path), ["1024x768"], ["30s@2fps:640x360"]))
    assert pylloyal.__file__
