"""What pictures and clips are said to take, without an engine: how they are written, how a clip is cut into pairs, what is refused."""
from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from pylloyal import PixelPart, Video
from pylloyal.capacity.eye import KINDS, MERGING, eye_of
from pylloyal.capacity.graph import Graph
from pylloyal.capacity.header import Header
from pylloyal.capacity.layout import layout, rows_of
from pylloyal.capacity.loaded import _OWN
from pylloyal.capacity.media import Clip, MediaDemand, clip_cells, media_cells, media_demand, n_blocks, parse_clip, parse_image, projector_memory
from pylloyal.capacity.preparation import smart_size
from pylloyal.errors import InvalidArgumentError, MediaEncodeError, MetadataError
from pylloyal.sources.clip import Choice, Decoded, Timetable


class Words(dict[str, Any]):
    """A header without a file."""

    tensors: tuple[Any, ...] = ()


def header_of(kind: str, **more: Any) -> Any:
    return Words({"general.architecture": "clip", "clip.has_vision_encoder": True, "clip.projector_type": kind, "clip.vision.image_size": 448, "clip.vision.patch_size": 14,
                  **{f"clip.{key.replace('__', '.')}": value for key, value in more.items()}})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Header:
    return Header(tiny_models.write(tmp_path_factory.mktemp("media") / "mmproj.gguf", "mmproj-tiny-qwen2vl"))


# ----------------------------------------------------------------------------------------------------------------- parsing


def test_pictures_and_clips_are_read() -> None:
    assert parse_image("1024x768") == (1024, 768)
    assert parse_image("1X65536") == (1, 65536)
    assert parse_clip("30s") == Clip(30.0, 2.0, None, None)
    assert parse_clip("30s@2fps") == Clip(30.0, 2.0, None, None)
    assert parse_clip("0.5s@29.97fps:640x360") == Clip(0.5, 29.97, 640, 360)
    assert parse_clip("4s:8x8") == Clip(4.0, 2.0, 8, 8)


@pytest.mark.parametrize("text", ["", "x", "1024", "1024x", "x768", "0x5", "5x0", "-1x5", "1e3x4", "1 x 2", "1x2 ", "1x2\n", "1.5x2", "1x2x3", "\u0661x\u0662", "65537x1", "999999999x999999999", "9" * 5000 + "x1",
                                  "65536x65536", "0x", "\0x1", None, 5, b"1x2", "1\u00d72", "nanxinf"])
def test_what_is_no_picture_is_refused(text: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_image(text)


@pytest.mark.parametrize("text", ["", "30", "s", "30S", "30s@", "30s@2", "30s@fps", "@2fps", "-3s", "0s", "0.0s", "30s@0fps", "30s@-1fps", "30s@1001fps", "1e9s", "infs", "nans@2fps", "30s@2fps:", "30s@2fps:640",
                                  "30s@2fps:0x360", "30s@2fps:640x360x2", "30s @2fps", "30s@2fps\n", "999999999s@1000fps", "3" * 4000 + "s", "30s@2fps:65537x2", "\u0663s", None, 30, b"30s", "1_0s", "1.s", ".5s"])
def test_what_is_no_clip_is_refused(text: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_clip(text)


def test_noise_is_refused_or_read_and_nothing_else() -> None:
    dice = random.Random(7)
    for _ in range(20_000):
        text = "".join(dice.choice("0123456789.xX:@sfp -+e\u0665\0") for _ in range(dice.randrange(16)))
        for parse in (parse_image, parse_clip):
            try:
                made: Any = parse(text)
            except InvalidArgumentError:
                continue
            assert all(n > 0 for n in (made if isinstance(made, tuple) else (made.seconds, made.fps)))


def test_a_refusal_is_short_however_long_the_text() -> None:
    for parse in (parse_image, parse_clip):
        with pytest.raises(InvalidArgumentError) as raised:
            parse("9" * 100_000)
        assert len(str(raised.value)) < 300


# ------------------------------------------------------------------------------------------------------------------- clips


def blocks_of(video: Video, n_merged: int) -> int:
    """Counted from the parts the clip really has, as the engine pairs them."""
    blocks, is_open = 0, False
    for part in video.parts(None):
        if not isinstance(part, PixelPart) or (is_open and n_merged == 2):
            is_open = False
        else:
            blocks, is_open = blocks + 1, True
    return blocks


def film(times: list[tuple[float, float]], stamp_s: float) -> Video:
    """A clip of frames at these times, put together without a file."""
    video = Video.__new__(Video)
    pixels = np.zeros((4, 4, 3), np.uint8)
    video.frames, video.stamp_s, video.notes = [Decoded(pixels, at, asked) for at, asked in times], stamp_s, [(1.0, "a word"), (1e9, "the end")]
    return video


def clip_of(seconds: float, fps: float, max_frames: int | None, stamp_s: float) -> Video:
    """A clip that shows a frame at every moment asked for."""
    n = sum(1 for k in range(int(seconds * fps) + 2) if k / fps < seconds)
    table = Timetable([k / fps for k in range(n)], seconds)
    picks, _, _ = table.pick(Choice(fps=fps, max_frames=max_frames))
    return film([(table.times[frame], asked) for frame, asked in picks], stamp_s)


def test_blocks_are_those_of_the_clip_itself() -> None:
    dice = random.Random(11)
    seen = set()
    cases = [(30.0, 2.0, 64, 5.0), (30.0, 2.0, None, 5.0), (60.0, 2.0, 64, 5.0), (0.1, 2.0, 64, 5.0), (10.0, 1.0, 1, 5.0), (10.0, 3.0, 2, 0.0), (5.0, 2.0, 64, 5.0), (5.01, 2.0, 64, 5.0)]
    cases += [(dice.choice((0.3, 1.0, 2.5, 7.0, 12.34, 61.0)) * dice.randint(1, 4), dice.choice((0.5, 1.0, 2.0, 2.5, 3.0, 24.0, 29.97)), dice.choice((None, 1, 2, 7, 64)), dice.choice((0.0, 1.0, 5.0, 7.5)))
              for _ in range(300)]
    for seconds, fps, max_frames, stamp_s in cases:
        video = clip_of(seconds, fps, max_frames, stamp_s)
        for n_merged in (1, 2):
            found = n_blocks(seconds, fps, n_merged, max_frames=max_frames, stamp_s=stamp_s)
            assert found == blocks_of(video, n_merged), (seconds, fps, max_frames, stamp_s, n_merged)
            seen.add(found)
    assert len(seen) > 40


def test_other_rates_need_at_most_one_block_more_for_each_stretch_between_stamps() -> None:
    n_more = 0
    for rate in (23.976, 25, 29.97, 59.94, 12.5):
        for fps in (0.5, 1, 2, 3, 5):
            for seconds in (3, 7.3, 30, 61.7):
                table = Timetable([k / rate for k in range(int(seconds * rate))], int(seconds * rate) / rate)
                picks, _, _ = table.pick(Choice(fps=fps, max_frames=None))
                more = blocks_of(film([(table.times[frame], asked) for frame, asked in picks], 5.0), 2) - n_blocks(seconds, fps, 2, max_frames=None)
                assert more <= int(seconds / 5) + 1
                n_more += more > 0
    assert n_more  # so it is no bound, and says so


def test_a_clip_is_its_blocks(tiny: Header) -> None:
    one = media_cells(tiny, 64, 48)
    assert one == 4 * 3 + 2
    assert clip_cells(tiny, 30, 2, 64, 48) == one * n_blocks(30, 2, 2) == one * (1 + 5 * 6 - 1 + 1)
    assert clip_cells(tiny, 30, 2, None, None) >= clip_cells(tiny, 30, 2, 4000, 4000)
    assert clip_cells(tiny, 30, 2, None, None, image_min_tokens=1, image_max_tokens=100) == 102 * n_blocks(30, 2, 2)


# ------------------------------------------------------------------------------------------------------------------ headers


@pytest.mark.parametrize("kind", ["deepseekocr", "deepseekocr2", "deepseek4v", "granite4_vision", "something_new"])
def test_kinds_that_cannot_be_said_are_named(kind: str) -> None:
    for ask in (lambda h: media_cells(h, 640, 480), lambda h: clip_cells(h, 3, 2, 640, 480), lambda h: media_demand(h, ["640x480"], [])):
        with pytest.raises(MetadataError, match=kind):
            ask(header_of(kind))
    memory = projector_memory(header_of(kind))  # its weights can be said all the same
    assert (memory.kind, memory.weights_known, memory.encoder_bytes) == (kind, "bound", None)


def test_a_projector_that_only_hears_shows_no_cells() -> None:
    deaf = Words({"general.architecture": "clip", "clip.has_audio_encoder": True, "clip.projector_type": "ultravox"})
    with pytest.raises(MetadataError, match="does not see"):
        media_cells(deaf, 5, 5)  # type: ignore[arg-type]
    assert projector_memory(deaf).kind == "ultravox"  # type: ignore[arg-type]
    with pytest.raises(MetadataError, match="'llama'"):
        media_cells(Words({"general.architecture": "llama"}), 5, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", [
    {"clip.vision.patch_size": 0}, {"clip.vision.patch_size": -3}, {"clip.vision.patch_size": "14"}, {"clip.vision.patch_size": True}, {"clip.vision.patch_size": 1 << 40}, {"clip.vision.image_size": 1 << 30},
    {"clip.vision.image_size": None}, {"clip.vision.spatial_merge_size": 0}, {"clip.vision.spatial_merge_size": 1 << 31}, {"clip.vision.image_grid_pinpoints": [1, 2, 3]},
    {"clip.vision.image_grid_pinpoints": ["a", "b"]}, {"clip.vision.image_grid_pinpoints": [0, 5]}, {"clip.projector_type": 7}, {"general.architecture": None}])
def test_damaged_headers_raise_one_error(damage: dict[str, Any]) -> None:
    header = header_of("qwen2vl_merger")
    header.update(damage)
    header = Words({key: value for key, value in header.items() if value is not None})
    with pytest.raises(MetadataError):
        media_cells(header, 640, 480)  # type: ignore[arg-type]


def test_every_kind_survives_noise_in_its_numbers() -> None:
    dice = random.Random(5)
    keys = ["vision.image_size", "vision.patch_size", "vision.spatial_merge_size", "vision.projector.scale_factor", "vision.image_min_pixels", "vision.image_max_pixels", "vision.preproc_image_size",
            "vision.preproc_min_tiles", "vision.preproc_max_tiles", "minicpmv_version", "minicpmv_query_num"]
    n_counted = 0
    for kind in sorted(KINDS):
        for _ in range(60):
            header = header_of(kind)
            header.update({f"clip.{key}": dice.choice((0, 1, 2, 3, 14, 16, 448, 3136, 602112, -1, 2**31, 2**40, 1.5, "x", None)) for key in dice.sample(keys, 5)})
            header.update({f"clip.vision.image_{end}_pixels": n for end, n in (("min", 3136), ("max", 602112))} if dice.random() < 0.5 else {})
            header = Words({key: value for key, value in header.items() if value is not None})
            try:
                cells = media_cells(header, dice.choice((1, 33, 640, 4000)), dice.choice((1, 31, 480, 3000)))  # type: ignore[arg-type]
            except (MetadataError, MediaEncodeError):
                continue
            n_counted += 1
            assert 0 <= cells < 1 << 31
    assert n_counted > 300


def test_sizes_and_limits_are_checked(tiny: Header) -> None:
    for size in ((0, 1), (1, -1), (True, 1), (1.5, 1), (70_000, 1), (40_000, 40_000)):
        with pytest.raises(InvalidArgumentError):
            media_cells(tiny, *size)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError):
            projector_memory(tiny, [size])  # type: ignore[list-item]
    for limits in ({"image_max_tokens": -1}, {"image_min_tokens": 1 << 20}, {"image_min_tokens": True}):
        with pytest.raises(InvalidArgumentError):
            media_cells(tiny, 64, 64, **limits)
    with pytest.raises(MetadataError):
        media_cells(tiny, 64, 64, image_min_tokens=100, image_max_tokens=50)
    with pytest.raises(InvalidArgumentError):
        clip_cells(tiny, 3, 2, 64, 64, max_frames=0)
    with pytest.raises(InvalidArgumentError):
        media_demand(tiny, [], [], cache_bytes=-1)


def test_too_thin_is_refused_as_the_engine_would() -> None:
    thin = eye_of(header_of("qwen2vl_merger"), image_max_tokens=64)
    with pytest.raises(MediaEncodeError, match="too thin"):
        layout(eye_of(header_of("qwen2vl_merger"), image_min_tokens=60_000, image_max_tokens=60_001), 1, 60_000)
    assert rows_of(thin, layout(thin, 2000, 1).pictures[0]) > 64  # and what is merely thin exceeds the limit, as it does there


def test_single_precision_is_kept() -> None:
    # Double precision would say 1540 and 896. The engine says these (tests/integration/test_capacity_media.py has both sizes).
    assert smart_size(281, 281, 28, longest=1540) == (1568, 1568)
    assert smart_size(1289, 1289, 28, low=6272, high=802816) == (868, 868)


# ------------------------------------------------------------------------------------------------------------------ demand


def test_lines_and_cells(tiny: Header) -> None:
    demand = media_demand(tiny, ["64x48", "100x300"], ["30s@2fps:64x48"], cache_bytes=1 << 20)
    assert [name for name, _, _ in demand.lines] == ["projector weights", "encoder peak", "media cache"]
    assert demand.lines[0] == ("projector weights", tiny.tensor_bytes, "exact")
    assert demand.lines[1][2] == "bound"
    assert demand.lines[2] == ("media cache", 1 << 20, "exact")
    assert demand.cells == (("64x48", media_cells(tiny, 64, 48)), ("100x300", media_cells(tiny, 100, 300)), ("30s@2fps:64x48", clip_cells(tiny, 30, 2, 64, 48)))
    assert media_demand(tiny, [], []).lines[2] == ("media cache", 0, "exact")


def test_memory_grows_with_what_is_asked(tiny: Header) -> None:
    def peak(*sizes: tuple[int, int], **options: Any) -> int:
        found = projector_memory(tiny, sizes, **options).encoder_bytes
        assert found is not None
        return found

    assert peak((64, 64)) < peak((64, 64), (640, 640)) == peak((640, 640)) <= peak()
    assert peak((640, 640)) < peak((640, 640), flash_attn=False)
    assert peak((640, 640), clips=False) <= peak((640, 640))
    assert peak(image_max_tokens=64) < peak()
    whole = media_demand(tiny, ["64x64"], ["3s"]).lines[1][1]  # frames of any size
    assert whole == peak() > media_demand(tiny, ["64x64"], ["3s@2fps:64x64"]).lines[1][1]


def test_an_encoder_of_sound_beside_it_makes_weights_a_bound(tiny: Header, tmp_path: Path) -> None:
    both = Header(tiny.paths[0])
    both._values = {**both._values, "clip.has_audio_encoder": True}
    memory = projector_memory(both)
    shared = sum(-(-t.n_bytes // 32) * 32 for t in both.tensors if t.name.startswith("v.patch_embd"))
    assert (memory.weights_known, memory.weights_bytes) == ("bound", tiny.tensor_bytes + shared)  # that encoder loads those once more


def test_unknown_graphs_say_so() -> None:
    demand: MediaDemand = media_demand(header_of("muse-glimmer"), ["640x480"], [])
    assert demand.lines[1] == ("encoder peak", 0, "unknown")
    assert set(_OWN) <= set(KINDS)
    assert set(KINDS) >= MERGING


# ------------------------------------------------------------------------------------------------------------------- graphs


def test_the_allocator_reuses_what_is_done_with() -> None:
    g = Graph()
    a = g.leaf(8)
    b = g.like("unary", g.make("mul_mat", (8, 1), a))  # in place of the product
    g.expand(g.make("mul_mat", (8, 1), b))
    assert g.buffer_bytes() == 64  # the input's room is free again by then
    g = Graph()
    a = g.leaf(8)
    g.expand(g.like("add", g.make("mul_mat", (8, 1), a), a))
    assert g.buffer_bytes() == 64
    g = Graph()
    a = g.leaf(16)
    half = g.view(a, 8)
    g.expand(g.make("concat", (16, 1), g.like("unary", half), half))  # a view keeps all of it, and nothing is done in its place
    assert g.buffer_bytes() == 64 + 32 + 64
