"""Clips: every chosen frame is the right one by the number in its picture, at its own time; and how it is laid out."""
from __future__ import annotations

import io
import os
import random
import struct
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import media_fixtures as made
import numpy as np
import pytest
from media_hostile import run_mutants

from pylloyal import errors
from pylloyal.kernel.parts import PixelPart, TextPart
from pylloyal.sources import clip as clips
from pylloyal.sources.audio import Audio
from pylloyal.sources.clip import Choice, Timetable
from pylloyal.sources.image import Image
from pylloyal.sources.sheet import contact_sheet
from pylloyal.sources.video import Video, stamp_of

CFR = list(range(0, 2000, 40))
VFR = [0, 40, 70, 200, 210, 400, 990, 1000, 1050, 1500, 1540, 1900]
GAPS = [0, 40, 80, 240, 280, 400, 1000, 1040, 1080, 1400]  # AVI fills them with packets of nothing
LATE = [t + 3000 for t in CFR]
# name: (how it is made, its times in ms, what of that the report must say)
CLIPS: dict[str, tuple[Callable[[], bytes], list[int], dict[str, Any]]] = {
    "mp4 cfr": (lambda: made.clip(CFR), CFR, {}),
    "mp4 vfr": (lambda: made.clip(VFR), VFR, {}),
    "mp4 b-frames": (lambda: made.clip(CFR, b_frames=3), CFR, {}),
    "mp4 vfr b-frames": (lambda: made.clip(VFR, b_frames=2, gop=5), VFR, {}),
    "mp4 open gop": (lambda: made.clip(CFR, b_frames=3, gop=10, options={"x264-params": "open-gop=1"}), CFR, {}),
    "mp4 one key frame": (lambda: made.clip(CFR, b_frames=3, gop=250), CFR, {}),
    "mp4 begins late": (lambda: made.clip(LATE, b_frames=2), LATE, {}),
    "mp4 fragments": (lambda: made.clip(CFR, b_frames=2, muxer={"movflags": "frag_keyframe+empty_moov"}), CFR, {}),
    "mp4 lying": (lambda: made.lying(made.clip(CFR, b_frames=2), 5000), CFR, {}),
    "mp4 with sound": (lambda: made.clip(CFR, b_frames=2, sound=True), CFR, {}),
    "mpegts begins late": (lambda: made.clip(LATE, container="mpegts", b_frames=2, ticks=90000), LATE, {}),
    "mpegts vfr": (lambda: made.clip(VFR, container="mpegts", b_frames=1, ticks=90000), VFR, {}),
    "mkv vfr": (lambda: made.clip(VFR, container="matroska", b_frames=2), VFR, {}),
    "mkv begins late": (lambda: made.clip(LATE, container="matroska"), LATE, {"origin_s": 3.0}),
    "mkv lying": (lambda: made.lying(made.clip(CFR, container="matroska"), 777), CFR, {"declared_s": 777.0}),
    "mkv live": (lambda: made.clip(CFR, container="matroska", muxer={"live": "1"}), CFR, {"declared_s": None}),
    "mkv ffv1": (lambda: made.clip(VFR, container="matroska", codec="ffv1"), VFR, {"codec": "ffv1"}),
    "webm vp9": (lambda: made.clip(VFR, container="webm", codec="libvpx-vp9"), VFR, {"codec": "vp9"}),
    "avi mpeg4": (lambda: made.clip(CFR, container="avi", codec="mpeg4", ticks=25), CFR, {"codec": "mpeg4"}),
    "avi b-frames": (lambda: made.clip(CFR, container="avi", b_frames=2, ticks=25), CFR, {}),
    "avi mpeg4 b-frames": (lambda: made.clip(CFR, container="avi", codec="mpeg4", b_frames=2, ticks=25), CFR, {}),
    "avi mjpeg": (lambda: made.clip(CFR, container="avi", codec="mjpeg", pixel="yuvj420p", ticks=25), CFR, {}),
    "avi with gaps": (lambda: made.clip(GAPS, container="avi", codec="mpeg4", ticks=25), GAPS, {}),
    "raw h264": (lambda: made.clip(CFR, container="h264", b_frames=2, ticks=25), CFR, {"container": "h264"}),
    "raw hevc": (lambda: made.clip(CFR, container="hevc", codec="libx265", ticks=25, options={"x265-params": "log-level=none:bframes=2:keyint=10:pools=1:frame-threads=1"}), CFR, {}),
    "raw m4v": (lambda: made.clip(CFR, container="m4v", codec="mpeg4", b_frames=2, ticks=25), CFR, {}),
    "flv": (lambda: made.clip(CFR, container="flv", b_frames=2), CFR, {}),
    "nut": (lambda: made.clip(VFR, container="nut", b_frames=2), VFR, {}),
    "mpeg2": (lambda: made.clip(CFR, container="mpegts", codec="mpeg2video", b_frames=2, ticks=25), CFR, {}),
    "hevc": (lambda: made.clip(CFR, codec="libx265", options={"x265-params": "log-level=none:bframes=2:keyint=10:pools=1:frame-threads=1"}), CFR, {"codec": "hevc"}),
    "ten bits": (lambda: made.clip(CFR, pixel="yuv420p10"), CFR, {}),
    "4:4:4": (lambda: made.clip(CFR, pixel="yuv444p"), CFR, {}),
    "full range": (lambda: made.clip(CFR, pixel="yuvj420p"), CFR, {}),
    "odd size": (lambda: made.clip(CFR, pixel="yuv444p", size=(161, 97)), CFR, {"size": (161, 97)}),
    "gif": (lambda: made.animation("GIF", [40, 30, 130, 200, 90]), [0, 40, 70, 200, 400], {"container": "GIF"}),
    "apng": (lambda: made.animation("PNG", [40, 30, 130, 200, 90]), [0, 40, 70, 200, 400], {"container": "PNG"}),
    "webp": (lambda: made.animation("WEBP", [40, 30, 130, 200, 90]), [0, 40, 70, 200, 400], {"container": "WEBP"}),
}
_made: dict[str, bytes] = {}


def raw_of(name: str) -> bytes:
    if name not in _made:
        _made[name] = CLIPS[name][0]()
    return _made[name]


def at(times_ms: list[int], moment: float) -> int:
    """The frame shown at a moment, computed the slow way."""
    origin = times_ms[0]
    return max(i for i, t in enumerate(times_ms) if (t - origin) / 1000 <= moment + 1e-6)


@pytest.mark.parametrize("name", CLIPS)
def test_every_frame_is_the_right_one_at_its_own_time(name: str) -> None:
    _, times, says = CLIPS[name]
    true = [(t - times[0]) / 1000 for t in times]
    whole = Video(raw_of(name), fps=1000, max_frames=None)
    assert [made.number_of(f.pixels) for f in whole.frames] == list(range(len(times)))
    assert [f.time for f in whole.frames] == pytest.approx(true, abs=2e-3)  # the containers' own ticks are 1 ms, or coarser
    assert whole.report.n_frames == len(times)
    assert whole.report.n_missing == whole.report.n_beyond == whole.report.n_thinned == 0
    assert whole.report.notes == (("no times in it; shown at 25 frames a second",) if name.startswith("raw") else ())
    for field, value in says.items():
        assert getattr(whole.report, field) == pytest.approx(value) if isinstance(value, float) else getattr(whole.report, field) == value
    rng = random.Random(name)
    for _ in range(4):  # any moments, through seeking, give what decoding the whole gives
        moments = sorted(rng.uniform(0, true[-1]) for _ in range(rng.randrange(1, 5)))
        some = Video(raw_of(name), times=moments)
        expected = list(dict.fromkeys(at(times, m) for m in moments))
        assert [made.number_of(f.pixels) for f in some.frames] == expected
        for frame, number in zip(some.frames, expected, strict=True):
            assert np.array_equal(frame.pixels, whole.frames[number].pixels)
            assert frame.time == whole.frames[number].time


@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_a_rotation_is_undone(degrees: int, hflip: bool) -> None:
    def stored(pixels: Any) -> Any:  # the display turns it counter-clockwise, then mirrors it
        return np.rot90(pixels[:, ::-1] if hflip else pixels, -degrees // 90)

    size = (made.HEIGHT, made.WIDTH) if degrees % 180 else (made.WIDTH, made.HEIGHT)
    video = Video(made.clip(CFR[:10], rotation=degrees, hflip=hflip, stored=stored, size=size), fps=25)
    assert [made.number_of(f.pixels) for f in video.frames] == list(range(10))
    assert video.report.size == (made.WIDTH, made.HEIGHT)
    assert video.report.stored_size == size
    if hflip:
        assert "mirrored" in video.report.notes[0]
    else:
        assert video.report.rotation == degrees


@pytest.mark.parametrize(("sar", "size"), [(Fraction(4, 3), (213, 96)), (Fraction(1, 2), (160, 192)), (Fraction(2, 1), (320, 96))])
def test_pixels_that_are_not_square_are_made_so(sar: Fraction, size: tuple[int, int]) -> None:
    video = Video(made.clip(CFR[:5], sar=sar), fps=25)
    assert video.report.size == size
    wide, high = size[0] / made.WIDTH, size[1] / made.HEIGHT
    assert [made.number_of(f.pixels, wide, high) for f in video.frames] == list(range(5))
    assert "scaled to square" in video.report.notes[0]


@pytest.mark.parametrize("full", [1, 2])
@pytest.mark.parametrize("space", [1, 5, 6])
@pytest.mark.parametrize("colour", [(200, 40, 60), (30, 180, 40), (20, 60, 220)])
def test_colours_come_out_as_they_were_whatever_the_matrix(colour: tuple[int, int, int], space: int, full: int) -> None:
    video = Video(made.clip([0, 40], colour=colour, space=(space, full), pixel="yuv444p", options={"crf": "1"}), fps=25)
    got = video.frames[0].pixels[-32:, 40:100].reshape(-1, 3).mean(axis=0)
    assert np.abs(got - colour).max() <= 4


@pytest.mark.parametrize("bits", [8, 10])
@pytest.mark.parametrize("full", [1, 2])
@pytest.mark.parametrize(("space", "kr", "kb"), [(1, 0.2126, 0.0722), (5, 0.299, 0.114), (6, 0.299, 0.114), (9, 0.2627, 0.0593), (2, 0.299, 0.114)])
def test_colours_by_the_formulas_of_the_standards(space: int, kr: float, kb: float, full: int, bits: int) -> None:
    for rgb in ((200, 40, 60), (30, 180, 40), (20, 60, 220), (128, 128, 128), (250, 250, 10)):
        r, g, b = (v / 255 for v in rgb)
        y = kr * r + (1 - kr - kb) * g + kb * b
        cb, cr = (b - y) / (2 - 2 * kb), (r - y) / (2 - 2 * kr)
        yuv = (16 + 219 * y, 128 + 224 * cb, 128 + 224 * cr) if full == 1 else (255 * y, 128 + 255 * cb, 128 + 255 * cr)
        raw = made.solid((round(yuv[0]), round(yuv[1]), round(yuv[2])), space=space, full=full, bits=bits)
        assert np.abs(Video(raw).frames[0].pixels.astype(int) - rgb).max() <= 4, rgb


def test_an_edit_list_says_where_a_clip_begins_and_ends() -> None:
    raw = made.clip(CFR, b_frames=2)
    at_edit, scale = raw.find(b"elst"), struct.unpack_from(">I", raw, raw.find(b"mdhd") + 16)[0]
    late, short = bytearray(raw), bytearray(raw)
    struct.pack_into(">i", late, at_edit + 16, struct.unpack_from(">i", raw, at_edit + 16)[0] + scale // 5)
    struct.pack_into(">I", short, at_edit + 12, 400)
    for edited, numbers in ((late, range(5, 50)), (short, range(10))):
        video = Video(bytes(edited), fps=1000, max_frames=None)
        assert [made.number_of(f.pixels) for f in video.frames] == list(numbers)
        assert [f.time for f in video.frames] == pytest.approx([0.04 * i for i in range(len(numbers))], abs=2e-3)
        assert [made.number_of(f.pixels) for f in Video(bytes(edited), times=[0.3]).frames] == [numbers[7]]
    before = Video(made.clip([t - 80 for t in CFR], b_frames=2), fps=1000, max_frames=None)  # what stands before zero is not shown
    assert [made.number_of(f.pixels) for f in before.frames] == list(range(2, 50))


def test_a_recording_joined_late_begins_at_its_first_key_frame() -> None:
    raw = made.clip(list(range(0, 4000, 40)), container="mpegts", gop=10, ticks=90000)
    video = Video(raw[len(raw) // 3 // 188 * 188 :], fps=1000, max_frames=None)
    numbers = [made.number_of(f.pixels) for f in video.frames]
    assert numbers == list(range(numbers[0], 100))
    assert numbers[0] % 10 == 0
    assert video.frames[0].time == 0
    assert video.report.n_missing == 0
    assert "before the first key frame" in video.report.notes[0]


@pytest.mark.parametrize("how", [{"options": {"x264-params": "tff=1"}}, {"container": "mpegts", "codec": "mpeg2video", "ticks": 25, "options": {"flags": "+ildct+ilme"}}])
def test_interlaced_clips_are_shown_whole_and_told(how: dict[str, Any]) -> None:
    video = Video(made.clip(CFR, **how), fps=25)
    assert [made.number_of(f.pixels) for f in video.frames] == list(range(50))
    assert "interlaced" in video.report.notes[0]


def test_which_moments_are_looked_at() -> None:
    raw = raw_of("mp4 cfr")  # 50 frames of 40 ms
    assert [f.asked for f in Video(raw, fps=2).frames] == [0, 0.5, 1.0, 1.5]
    assert [f.asked for f in Video(raw, fps=4, start=0.5, end=1.25).frames] == [0.5, 0.75, 1.0]
    assert [made.number_of(f.pixels) for f in Video(raw, fps=4, start=0.51).frames] == [12, 19, 25, 31, 37, 44]
    thin = Video(raw, fps=25, max_frames=4)
    assert [made.number_of(f.pixels) for f in thin.frames] == [0, 16, 33, 49]
    assert thin.report.n_thinned == 46
    assert len(Video(raw, fps=25, max_frames=1).frames) == 1
    beyond = Video(raw, times=[0, 0.039, 0.04, 1.999, 2.0, 50])
    assert [made.number_of(f.pixels) for f in beyond.frames] == [0, 1, 49]
    assert beyond.report.n_beyond == 2
    for words in ({"times": [3.0]}, {"start": 9.0}, {"times": []}):
        with pytest.raises(errors.MediaDecodeError, match=r"none of the moments.*2\.00 s long"):
            Video(raw, **words)  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [{"fps": 0}, {"fps": float("nan")}, {"max_frames": 0}, {"start": -1}, {"start": float("nan")}, {"end": 0}, {"end": float("nan")}, {"times": [1, 0]},
                                   {"times": [float("nan")]}, {"times": [-1]}, {"stamp_s": float("nan")}, {"notes": [(1, 2)]}, {"notes": [(float("nan"), "x")]}, {"notes": ["ab"]}])
def test_choices_that_make_no_sense(words: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        Video(raw_of("gif"), **words)


def test_a_choice_of_moments_equals_the_slow_way() -> None:
    rng = random.Random(3)
    for _ in range(300):
        times = sorted({0.0, *(round(rng.uniform(0, 9), 2) for _ in range(rng.randrange(30)))})
        table = Timetable(times, times[-1] + 0.5)
        fps, start = rng.choice((0.3, 1, 2, 7.5, 30)), rng.choice((0.0, 0.7, 3.0))
        end = rng.choice((None, start + 2.05))
        expected: list[tuple[int, float]] = []
        for k in range(400):
            moment = start + k / fps
            if moment >= min(table.end, end or 99):
                break
            frame = max(i for i, t in enumerate(times) if t <= moment + 1e-9)
            if not expected or expected[-1][0] != frame:
                expected.append((frame, moment))
        found, beyond, thinned = table.pick(Choice(fps, None, start, end, None))
        assert [f for f, _ in found] == [f for f, _ in expected]
        assert [m for _, m in found] == pytest.approx([m for _, m in expected])
        assert beyond == thinned == 0


def test_frames_that_last_for_years_cost_nothing() -> None:
    found, _, _ = Timetable([0.0, 1e15], 2e15).pick(Choice(fps=1000))
    assert [frame for frame, _ in found] == [0, 1]


def test_near_the_end_only_the_last_stretch_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    n = [0, 0]
    frames, convert = clips._stamped, clips._to_rgb
    monkeypatch.setattr(clips, "_stamped", lambda got, queue: (n.__setitem__(0, n[0] + len(got)), frames(got, queue))[1])
    monkeypatch.setattr(clips, "_to_rgb", lambda *words: (n.__setitem__(1, n[1] + 1), convert(*words))[1])
    times = list(range(0, 10000, 40))
    for container in ("mp4", "matroska", "mpegts", "avi"):
        raw = made.clip(times, container=container, b_frames=0 if container == "avi" else 2, ticks={"mpegts": 90000, "avi": 25}.get(container, 1000))
        n[:] = 0, 0
        video = Video(raw, times=[9.7, 9.9])
        assert [made.number_of(f.pixels) for f in video.frames] == [242, 247]
        assert n[0] <= 30, container  # of 250; a stretch is 12
        assert n[1] == 2, container  # and only what was chosen is ever kept


def test_an_index_that_lies_costs_a_pass_from_the_beginning() -> None:
    raw = raw_of("mp4 b-frames")
    real, calls = clips._from_key, []

    def astray(packets: Any, first: int | None) -> Any:
        calls.append(first)
        if first is not None:
            raise clips._Astray
        return real(packets, first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clips, "_from_key", astray)
        video = Video(raw, times=[0.1, 0.9, 1.7])
    assert [made.number_of(f.pixels) for f in video.frames] == [2, 22, 42]
    assert len([c for c in calls if c is None]) == 2  # the first stretch, and the rest in one go


@pytest.mark.parametrize("name", ["mp4 b-frames", "mkv vfr", "mpegts vfr", "avi mpeg4", "webm vp9", "mkv ffv1", "gif", "apng", "webp", "mp4 fragments"])
def test_a_clip_cut_anywhere_gives_right_frames_or_a_typed_error(name: str) -> None:
    raw, times = raw_of(name), CLIPS[name][1]
    for cut in {len(raw) * k // 24 for k in range(24)} | {len(raw) - 1}:
        try:
            video = Video(raw[:cut], fps=1000, max_frames=None)
        except errors.MediaError as error:
            said = str(error)
            assert "<bytes>" in said
            continue
        own = [at(times, f.time + 1e-3) for f in video.frames]
        assert own == sorted(set(own))
        right = [made.number_of(f.pixels) == number for f, number in zip(video.frames, own, strict=True)]
        assert all(right[:-3])  # the one the cut goes through may be broken, and the two that are predicted from it


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_damage_in_the_middle_is_skipped_and_reported(container: str) -> None:
    raw = bytearray(made.clip(CFR, container=container, gop=5))
    whole = Video(bytes(raw), fps=1000, max_frames=None)
    middle = len(raw) // 2
    raw[middle : middle + 200] = b"\xff" * 200
    video = Video(bytes(raw), fps=1000, max_frames=None)
    assert video.frames[0].time == 0.0
    assert max(f.time for f in video.frames) > 1.0
    assert len({f.time for f in video.frames}) == len(video.frames)
    assert video.report.notes or video.report.n_frames < len(whole.frames)  # Matroska's reader finds the next whole block by itself
    same = sum(np.array_equal(a.pixels, b.pixels) for b in whole.frames for a in video.frames if a.time == b.time)
    assert same >= 30


def test_a_title_in_no_encoding_is_no_reason_to_refuse() -> None:
    """PyAV decodes titles strictly unless it is told otherwise, and from 19 on it cannot be told."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        container.metadata["title"] = "TITLE"
        stream: Any = container.add_stream("ffv1", rate=5)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode(None))
    raw = file.getvalue()
    assert b"TITLE" in raw
    assert Video(raw.replace(b"TITLE", b"\xff\xfe\xc3(\x80"), fps=1000).report.n_frames == 3


def test_what_holds_no_video() -> None:
    for raw in (made.tone(), made.tone(cover=True)):
        with pytest.raises(errors.UnsupportedMediaError, match="no video in it"):
            Video(raw)


@pytest.mark.parametrize("raw", [b"", b"text", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", b"ffconcat version 1.0\nfile '/etc/hostname'\n", b"\0" * 4096])
def test_what_is_no_clip_names_the_file(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "odd.m3u8"
    path.write_bytes(raw)
    with pytest.raises(errors.MediaDecodeError) as caught:
        Video(path)
    assert str(path) in str(caught.value)


def test_sources_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = raw_of("mp4 vfr")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ("12 %03d.gif" if os.name == "nt" else "http:12:30 %03d.gif")  # neither an address nor a pattern nor a GIF
    path.write_bytes(raw)
    file = io.BytesIO(raw)
    file.seek(5)
    with path.open("rb") as opened:
        for source in (path, str(path), path.name, raw, bytearray(raw), memoryview(raw), file, opened):
            assert [made.number_of(f.pixels) for f in Video(source, times=[0.5]).frames] == [5]
        assert not opened.closed
        assert not file.closed
    for source in (tmp_path, tmp_path / "absent.mp4", "nul\0.mp4", "http://localhost/x.mp4"):
        with pytest.raises(errors.MediaDecodeError):
            Video(source)
    for odd in (5, None, np.zeros((2, 2), np.uint8)):
        with pytest.raises(errors.InvalidArgumentError):
            Video(odd)


def test_without_the_packages_the_error_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, picture = raw_of("mp4 cfr"), made.saved(made.gradient(), "PNG")
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    for read, package in ((lambda: Video(raw), "av"), (lambda: Audio(raw).decode(8000), "av"), (lambda: Image(picture), "pillow")):
        with pytest.raises(errors.UnsupportedMediaError, match=rf"<bytes>: .*\(the package {package}\)"):
            read()


def test_frames_with_too_many_pixels_are_refused() -> None:
    for name in ("mp4 cfr", "gif"):
        with pytest.raises(errors.UnsupportedMediaError, match=r"<bytes>.*max_pixels \(1000\)"):
            Video(raw_of(name), max_pixels=1000)
    with pytest.raises(errors.UnsupportedMediaError, match="<bytes>: a frame of 320 x 96"):
        Video(made.clip(CFR[:2], sar=Fraction(2, 1)), max_pixels=20000)


# ---------------------------------------------------------------------------------------------------------------- the layout


def laid_out(video: Video) -> list[str | int]:
    out: list[str | int] = []
    for part in video.parts(None):
        if isinstance(part, TextPart):
            assert not part.special
            out.append(part.text)
        else:
            assert isinstance(part, PixelPart)
            assert part.is_frame
            out.append(made.number_of(part.pixels))
    return out


def slow(n: int = 21) -> bytes:
    """A frame a second."""
    return made.animation("GIF", [1000] * n)


def test_the_layout_of_a_clip() -> None:
    assert laid_out(Video(slow(12), fps=1)) == ["Video:", 0, "[0m0.00s]", 1, 2, 3, 4, 5, "[0m5.00s]", 6, 7, 8, 9, 10, "[0m10.00s]", 11]
    assert laid_out(Video(slow(4), fps=1, stamp_s=0)) == ["Video:", 0, 1, 2, 3]
    assert laid_out(Video(slow(4), fps=1, stamp_s=-1)) == ["Video:", 0, 1, 2, 3]
    assert laid_out(Video(slow(4), fps=1, stamp_s=2)) == ["Video:", 0, "[0m0.00s]", 1, 2, "[0m2.00s]", 3]
    assert laid_out(Video(slow(3), fps=1, stamp_s=1e-300)) == ["Video:", 0, "[0m0.00s]", 1, "[0m1.00s]", 2, "[0m2.00s]"]
    assert laid_out(Video(slow(3), fps=1, stamp_s=float("inf"))) == ["Video:", 0, "[0m0.00s]", 1, 2]


def test_a_clip_looked_at_from_twelve_seconds_on_is_not_stamped_frame_by_frame() -> None:
    assert laid_out(Video(slow(), times=[12, 13, 14, 15, 16, 20])) == ["Video:", 12, "[0m12.00s]", 13, 14, 15, "[0m15.00s]", 16, 20, "[0m20.00s]"]


def test_notes_join_stamps_that_are_there_anyway() -> None:
    notes = [(30.0, "after"), (6.0, "b"), (0.0, "a"), (5.0, "at five"), (11.0, "c"), (40.0, "far")]
    with_notes, without = Video(slow(12), fps=1, notes=notes), Video(slow(12), fps=1)
    assert laid_out(with_notes) == ["Video:", 0, "[0m0.00s] a", 1, 2, 3, 4, 5, "[0m5.00s] at five", 6, 7, 8, 9, 10, "[0m10.00s] b", 11, "[0m11.00s] c [0m30.00s] after [0m40.00s] far"]
    for stamp_s in (5.0, 0.0, 1.0):
        ids = [[(i, p.id) for i, p in enumerate(Video(slow(12), fps=1, stamp_s=stamp_s, notes=said).parts(None)) if isinstance(p, PixelPart)] for said in (notes, [])]
        assert ids[0] == ids[1]
    assert [p.id for p in without.parts(None) if isinstance(p, PixelPart)] == [p.id for p in with_notes.parts(None) if isinstance(p, PixelPart)]
    assert laid_out(with_notes) == laid_out(with_notes)  # asking twice changes nothing


@pytest.mark.parametrize(("seconds", "text"), [(0, "[0m0.00s]"), (59.994, "[0m59.99s]"), (59.996, "[1m0.00s]"), (62.5, "[1m2.50s]"), (3600, "[60m0.00s]"), (119.999, "[2m0.00s]")])
def test_stamps(seconds: float, text: str) -> None:
    assert stamp_of(seconds) == text


# --------------------------------------------------------------------------------------------------------- sound, and sheets


def test_sound_at_another_rate() -> None:
    for raw in (made.tone(), made.tone(cover=True)):
        audio = Audio(raw)
        samples = audio.decode(16000)
        assert samples.dtype == np.float32
        middle = samples[2000:6000]
        assert np.argmax(np.abs(np.fft.rfft(middle * np.hanning(4000)))) == pytest.approx(110, abs=1)  # 440 Hz in steps of 4
        assert audio.report is not None
        assert audio.report.sample_rate == 8000
    assert len(Audio(made.tone(), start=0.1, end=0.3).decode(16000)) == 3200
    assert len(Audio(made.tone(), end=float("inf")).decode(8000)) == 4000
    with pytest.raises(errors.UnsupportedMediaError, match=r"more than 0\.1 s"):
        Audio(made.tone(), max_s=0.1).decode(8000)
    whole = Audio(made.tone()).decode(16000)
    for start in (0.0, 0.0301, 0.2, 0.4):
        assert np.array_equal(Audio(made.tone(), start=start, end=start + 0.1, max_s=0.1).decode(16000), whole[int(start * 16000) : int((start + 0.1) * 16000)]), "max_s is of the stretch"
    with pytest.raises(errors.UnsupportedMediaError, match=r"more than 0\.1 s"):
        Audio(made.tone(), start=0.2, max_s=0.1).decode(16000)
    with pytest.raises(errors.UnsupportedMediaError, match="no sound"):
        Audio(raw_of("mp4 cfr")).decode(8000)
    with pytest.raises(errors.MediaDecodeError, match="no sound can be decoded"):
        Audio(made.tone(), start=9).decode(8000)
    with pytest.raises(errors.MediaDecodeError, match="absent.wav: no such file"):
        Audio("absent.wav").decode(8000)
    with pytest.raises(errors.MediaDecodeError, match="<bytes>"):
        Audio(b"text").decode(8000)
    with pytest.raises(errors.ProjectorMismatchError):
        Audio(made.tone()).parts(None)
    for words in ({"start": -1}, {"start": float("nan")}, {"end": 0}, {"max_s": float("inf")}, {"max_s": 0}):
        with pytest.raises(errors.InvalidArgumentError):
            Audio(made.tone(), **words)  # type: ignore[arg-type]


def test_a_contact_sheet_holds_every_picture() -> None:
    red = np.zeros((9, 30, 3), np.uint8)
    red[..., 0] = 255
    sheet = np.asarray(contact_sheet([("é" * 90, red), ("two", red[:, :1]), ("three", red.repeat(30, axis=1)), ("four", red), ("five", red)]))
    is_red = (sheet == (255, 0, 0)).all(axis=-1)
    assert is_red[:200].any()
    assert is_red[214:].any()
    with pytest.raises(errors.InvalidArgumentError):
        contact_sheet([])


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits on a process")
def test_mutated_sounds_fail_by_type_and_name_or_not_at_all() -> None:
    run_mutants("sound", int(os.environ.get("PYLLOYAL_MEDIA_MUTANTS", "600")) // 10)


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits on a process")
def test_mutated_clips_fail_by_type_and_name_or_not_at_all() -> None:
    """In a child with a limit on memory and time for each; a tenth of PYLLOYAL_MEDIA_MUTANTS of them."""
    run_mutants("clip", int(os.environ.get("PYLLOYAL_MEDIA_MUTANTS", "800")) // 10)
