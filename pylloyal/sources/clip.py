"""Frames of a clip and the moments they are shown at, through PyAV; animations through Pillow.

A frame's time is the one its container gives it, never its number divided by a rate. So a clip is read twice: first its packets, for
the timetable of every frame that is really there (headers lie about lengths); then only as much is decoded as the chosen frames need.
"""
from __future__ import annotations

import bisect
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .. import errors
from .image import Image, ImageSource, name_of

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which moments of a clip are wanted; seconds from its first frame."""

    fps: float = 2.0
    times: tuple[float, ...] | None = None
    start: float = 0.0
    end: float | None = None
    max_frames: int | None = 64

    def __post_init__(self) -> None:
        if not 0 < self.fps <= 1000:
            raise errors.InvalidArgumentError(f"fps is {self.fps}; it must be above 0, and 1000 at most")
        if self.max_frames is not None and self.max_frames < 1:
            raise errors.InvalidArgumentError(f"max_frames is {self.max_frames}; it must be 1 or more")
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise errors.InvalidArgumentError(f"start is {self.start} and end is {self.end}; a clip begins at 0, and ends after it starts")
        if self.times is not None and (any(not t >= 0 for t in self.times) or list(self.times) != sorted(self.times)):
            raise errors.InvalidArgumentError("times must be ascending seconds from 0")


@dataclass(slots=True)
class Timetable:
    """When each frame is shown, in seconds from the first, and when the last one ends."""

    times: list[float]
    end: float
    origin: float = 0.0  # what the first frame's own clock says
    keys: list[int] = field(default_factory=list)  # frames that can be decoded without those before them

    def pick(self, choice: Choice) -> tuple[list[tuple[int, float]], int, int]:
        """(frame, moment asked for) in order; how many moments lie beyond the clip; how many were thinned out."""
        end = self.end if choice.end is None else min(choice.end, self.end)
        if choice.times is not None:
            asked = list(choice.times)
        else:
            asked = [choice.start + k / choice.fps for k in range(max(0, int((end - choice.start) * choice.fps - 1e-9) + 1))]
            asked = [t for t in asked if t < end] or ([choice.start] if choice.start < end else [])
        inside = [t for t in asked if t < self.end]
        found: list[tuple[int, float]] = []
        for moment in inside:
            frame = max(0, bisect.bisect_right(self.times, moment + 1e-9) - 1)
            if not found or found[-1][0] != frame:  # never the same picture twice
                found.append((frame, moment))
        thinned = 0
        if choice.max_frames is not None and len(found) > choice.max_frames:
            thinned = len(found) - choice.max_frames
            last, n = len(found) - 1, choice.max_frames
            found = [found[round(i * last / (n - 1)) if n > 1 else 0] for i in range(n)]
        return found, len(asked) - len(inside), thinned


@dataclass(frozen=True, slots=True)
class Decoded:
    """One chosen frame."""

    pixels: Pixels
    time: float
    asked: float


@dataclass(slots=True)
class Reel:
    """What was read of a clip."""

    frames: list[Decoded]
    timetable: Timetable
    n_beyond: int = 0
    n_thinned: int = 0
    n_missing: int = 0
    rotation: int = 0
    container: str = ""
    codec: str = ""
    stored_size: tuple[int, int] = (0, 0)
    declared_s: float | None = None
    notes: list[str] = field(default_factory=list)


def read(source: ImageSource, choice: Choice, max_pixels: int) -> Reel:
    """The frames of ``choice``, from any container FFmpeg knows or any animation Pillow knows."""
    name = name_of(source)
    head = _head(source)
    try:
        if head.startswith((b"GIF8", b"\x89PNG")) or (head.startswith(b"RIFF") and head[8:12] == b"WEBP"):
            return _read_animation(source, choice, max_pixels)
        return _read_video(source, choice, max_pixels)
    except errors.PylloyalError:
        raise
    except FileNotFoundError as error:
        raise errors.MediaDecodeError(f"{name}: no such file") from error
    except Exception as error:  # decoders raise whatever comes out of broken bytes
        raise errors.MediaDecodeError(f"{name}: {type(error).__name__}: {error}") from error


def _head(source: Any) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source[:16])
    try:
        if isinstance(source, str | os.PathLike):
            with open(source, "rb") as file:
                return bytes(file.read(16))
        if hasattr(source, "read") and hasattr(source, "seek"):
            head = bytes(source.read(16))
            source.seek(0)
            return head
    except OSError as error:
        raise errors.MediaDecodeError(f"{name_of(source)}: {error.strerror or error}") from error
    raise errors.InvalidArgumentError(f"a clip is a path, bytes or a file object that can seek; {type(source).__name__} is none of them")


# ---------------------------------------------------------------------------------------------------------------- animations


def _read_animation(source: ImageSource, choice: Choice, max_pixels: int) -> Reel:
    import PIL.Image

    opened = io.BytesIO(source) if isinstance(source, bytes | bytearray | memoryview) else source
    notes = []
    with PIL.Image.open(cast(Any, opened)) as picture:
        n, kind, size = int(getattr(picture, "n_frames", 1)), picture.format or "", picture.size
        if size[0] * size[1] > max_pixels:
            raise errors.UnsupportedMediaError(f"{name_of(source)}: {size[0]} x {size[1]} pixels, more than max_pixels ({max_pixels})")
        times, at = [], 0.0
        for i in range(n):
            picture.seek(i)
            shown = float(picture.info.get("duration", 0)) / 1000
            if shown <= 0.01:  # as every viewer does
                shown = 0.1
                notes = ["frames without a duration are taken as 0.1 s"]
            times.append(at)
            at += shown
    table = Timetable(times, at, 0.0, [0])
    picks, beyond, thinned = table.pick(choice)
    frames = []
    for frame, asked in picks:
        if hasattr(source, "seek"):
            source.seek(0)
        frames.append(Decoded(Image(source, frame=frame, max_pixels=max_pixels).pixels, times[frame], asked))
    return Reel(frames, table, beyond, thinned, container=kind, codec=kind, stored_size=size, declared_s=at, notes=notes)


# -------------------------------------------------------------------------------------------------------------------- videos


def open_container(source: ImageSource) -> Any:
    """A container of FFmpeg's, for reading; only files and bytes, never an address."""
    import av

    opened = io.BytesIO(source) if isinstance(source, bytes | bytearray | memoryview) else os.fspath(source) if isinstance(source, os.PathLike) else source
    if hasattr(opened, "seek"):
        opened.seek(0)
    elif isinstance(opened, str) and not os.path.isfile(opened):  # and nothing that FFmpeg would take for an address
        raise FileNotFoundError(opened)
    return av.open(opened, mode="r", options={"protocol_whitelist": "file,pipe"} if isinstance(opened, str) else {}, metadata_errors="replace")


def _stream(container: Any, name: str, max_pixels: int) -> Any:
    import av

    streams = [s for s in container.streams.video if not int(s.disposition) & int(av.stream.Disposition.attached_pic)]
    if not streams:
        raise errors.UnsupportedMediaError(f"{name}: no video in it")
    stream = streams[0]
    if stream.codec_context is None:
        raise errors.UnsupportedMediaError(f"{name}: its video codec is not known here")
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > max_pixels:
        raise errors.UnsupportedMediaError(f"{name}: {width} x {height} pixels, more than max_pixels ({max_pixels})")
    stream.codec_context.options = {"max_pixels": str(max_pixels)}  # sizes may change on the way
    return stream


def _packets(container: Any, stream: Any, notes: list[str]) -> Iterator[Any]:
    """Packets up to the end, or up to where the container is broken."""
    import av

    try:
        for packet in container.demux(stream):
            if packet.size or packet.pts is not None:
                yield packet
    except av.FFmpegError as error:
        note = f"the file breaks off: {error.strerror or error}"
        if note not in notes:
            notes.append(note)


def _timetable(source: ImageSource, name: str, max_pixels: int, notes: list[str]) -> tuple[Timetable, list[int], dict[str, Any]]:
    """The timetable, each frame's own time stamp, and facts about the stream."""
    with open_container(source) as container:
        stream = _stream(container, name, max_pixels)
        base = float(stream.time_base)
        shown: dict[int, tuple[int, bool]] = {}
        for packet in _packets(container, stream, notes):
            stamp = packet.pts if packet.pts is not None else packet.dts
            if stamp is None or packet.is_discard:
                continue
            shown[stamp] = (packet.duration or 0, bool(packet.is_keyframe))
        if not shown:
            raise errors.MediaDecodeError(f"{name}: {'no frame in it carries a time' if not notes else notes[0]}")
        stamps = sorted(shown)
        gaps = sorted(b - a for a, b in itertools.pairwise(stamps))
        last = shown[stamps[-1]][0] or (gaps[len(gaps) // 2] if gaps else round(0.04 / base))
        facts = {
            "container": container.format.name, "codec": stream.codec_context.name, "stored_size": (stream.codec_context.width, stream.codec_context.height),
            "declared_s": float(stream.duration * stream.time_base) if stream.duration else container.duration / 1e6 if container.duration else None}
        times = [(stamp - stamps[0]) * base for stamp in stamps]
        keys = [i for i, stamp in enumerate(stamps) if shown[stamp][1]]
        return Timetable(times, times[-1] + last * base, stamps[0] * base, keys), stamps, facts


def _read_video(source: ImageSource, choice: Choice, max_pixels: int) -> Reel:
    name, notes = name_of(source), list[str]()
    table, stamps, facts = _timetable(source, name, max_pixels, notes)
    picks, beyond, thinned = table.pick(choice)
    reel = Reel([], table, beyond, thinned, notes=notes, **facts)
    wanted = [stamps[frame] for frame, _ in picks]
    found, size = {}, (0, 0)
    for stamp, pixels, rotation in _decode(source, name, wanted, [stamps[i] for i in table.keys], max_pixels, notes):
        reel.rotation = rotation
        if size not in ((0, 0), pixels.shape[:2]):
            note = "the size of the picture changes within the clip"
            if note not in notes:
                notes.append(note)
        size = (pixels.shape[0], pixels.shape[1])
        found[stamp] = pixels
    for frame, asked in picks:
        if stamps[frame] in found:
            reel.frames.append(Decoded(found[stamps[frame]], table.times[frame], asked))
    reel.n_missing = len(picks) - len(reel.frames)
    if reel.n_missing:
        notes.append(f"{reel.n_missing} of {len(picks)} chosen frames cannot be decoded")
    if picks and not reel.frames:
        raise errors.MediaDecodeError(f"{name}: none of the {len(picks)} chosen frames can be decoded")
    return reel


def _decode(source: ImageSource, name: str, wanted: Sequence[int], keys: Sequence[int], max_pixels: int, notes: list[str]) -> Iterator[tuple[int, Pixels, int]]:
    """The frames with these time stamps, each stretch of them decoded from the key frame before it."""
    import av

    stretches: list[tuple[int | None, list[int]]] = []
    for stamp in wanted:
        before = bisect.bisect_right(keys, stamp) - 1
        key = keys[before] if before > 0 else None  # None: from the beginning
        if not stretches or stretches[-1][0] != key:
            stretches.append((key, []))
        stretches[-1][1].append(stamp)
    broken = 0
    for key, stamps in stretches:
        for start in (key, None):
            with open_container(source) as container:
                stream = _stream(container, name, max_pixels)
                if start is not None:
                    try:
                        container.seek(start, stream=stream, backward=True, any_frame=False)
                    except av.FFmpegError:
                        continue
                is_first, came_late, n_broken = True, False, [0]
                for stamp, frame in _frames(container, stream, notes, n_broken):
                    if is_first and start is not None and stamp > stamps[0]:
                        came_late = True  # the index lied: once more from the beginning
                        break
                    is_first = False
                    if stamp in stamps:
                        yield stamp, *_to_rgb(frame, notes)
                    if stamp >= stamps[-1]:
                        break
                broken += n_broken[0]
            if not came_late:
                break
    if broken:
        notes.append(f"{broken} packets are damaged and were skipped")


def _frames(container: Any, stream: Any, notes: list[str], n_broken: list[int]) -> Iterator[tuple[int, Any]]:
    """(time stamp, frame) in the order they are shown; damaged packets are skipped and counted."""
    import av

    def decoded() -> Iterator[Any]:
        for packet in _packets(container, stream, notes):
            try:
                yield from packet.decode()
            except av.FFmpegError:
                n_broken[0] += 1
        try:
            yield from stream.codec_context.decode(None)
        except (av.FFmpegError, EOFError):
            return

    for frame in decoded():
        stamp = frame.pts if frame.pts is not None else frame.dts
        if stamp is not None:
            yield stamp, frame


def _to_rgb(frame: Any, notes: list[str]) -> tuple[Pixels, int]:
    """A frame in RGB, upright, with square pixels; and the rotation that was applied, in degrees counter-clockwise."""
    if frame.interlaced_frame and "the clip is interlaced" not in notes:
        notes.append("the clip is interlaced")
    pixels: Pixels = frame.to_ndarray(format="rgb24")
    turns = round(frame.rotation / 90) % 4
    if frame.rotation % 90 and "a rotation by other than right angles was rounded" not in notes:
        notes.append("a rotation by other than right angles was rounded")
    return np.ascontiguousarray(np.rot90(pixels, turns)), turns * 90
