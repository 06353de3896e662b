"""Frames of a clip and the moments they are shown at, through PyAV; animations through Pillow.

A frame's time is the one its container gives it, never its number divided by a rate. So a clip is read twice: first its packets, for
the timetable of every frame that is really there (headers lie about lengths); then only as much is decoded as the chosen frames need.
"""
from __future__ import annotations

import bisect
import collections
import io
import itertools
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import errors
from .image import ImageSource, converted, missing, name_of, open_picture, quiet

Pixels = npt.NDArray[np.uint8]
# What FFmpeg may take bytes for. No playlist and no script that names other files or addresses, and no single pictures: those are Pillow's.
CONTAINERS = ("mov", "matroska", "webm", "mpegts", "mpeg", "mpegvideo", "avi", "asf", "flv", "ogg", "mxf", "nut", "ivf", "h264", "hevc", "m4v", "obu", "yuv4mpegpipe", "mjpeg", "dv", "rm",
              "wav", "mp3", "flac", "aac", "aiff", "au", "caf", "w64", "amr", "ac3", "eac3", "ape", "tta", "wv")
_RAW = ("h264", "hevc", "m4v", "mpegvideo", "obu")  # no times at all, only a rate
_WIDEST = 8  # pixels more oblong than this are taken as a mistake


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
        if not 0 <= self.start < math.inf or (self.end is not None and not self.end > self.start):
            raise errors.InvalidArgumentError(f"start is {self.start} and end is {self.end}; a clip begins at 0, and ends after it starts")
        if self.times is not None and (any(not t >= 0 for t in self.times) or list(self.times) != sorted(self.times)):
            raise errors.InvalidArgumentError("times must be ascending seconds from 0")


@dataclass(slots=True)
class Timetable:
    """When each frame is shown, in seconds from the first, and when the last one ends."""

    times: list[float]
    end: float
    origin: float = 0.0  # what the first frame's own clock says
    keys: list[tuple[int, int]] = field(default_factory=list)  # (time stamp, where to seek) of frames that can be decoded without those before them
    is_by_order: bool = False  # the container numbers packets, not frames (AVI, raw streams): the n-th frame shown has the n-th stamp
    step: int = 0  # between the stamps of packets that have none

    def pick(self, choice: Choice) -> tuple[list[tuple[int, float]], int, int]:
        """(frame, moment asked for) in order; how many moments lie beyond the clip; how many were thinned out."""
        found: list[tuple[int, float]] = []
        n_beyond = 0
        if choice.times is not None:
            for moment in choice.times:
                if moment >= self.end:
                    n_beyond += 1
                    continue
                frame = max(0, bisect.bisect_right(self.times, moment + 1e-9) - 1)
                if not found or found[-1][0] != frame:  # never the same picture twice
                    found.append((frame, moment))
        else:  # by frames, not by moments: broken files have frames that last for years
            end = self.end if choice.end is None else min(choice.end, self.end)
            for frame, begins in enumerate(self.times):
                ends = self.times[frame + 1] if frame + 1 < len(self.times) else self.end
                moment = choice.start + max(0, math.ceil((begins - choice.start - 1e-9) * choice.fps)) / choice.fps
                if moment < min(end, ends - (1e-9 if ends != self.end else 0)):
                    found.append((frame, moment))
        thinned = 0
        if choice.max_frames is not None and len(found) > choice.max_frames:
            thinned = len(found) - choice.max_frames
            last, n = len(found) - 1, choice.max_frames
            found = [found[round(i * last / (n - 1)) if n > 1 else 0] for i in range(n)]
        return found, n_beyond, thinned


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
        if head.startswith((b"GIF8", b"\x89PNG")) or (head.startswith(b"RIFF") and head[8:12] == b"WEBP") or head[4:12] in (b"ftypavis", b"ftypavif"):
            return _read_animation(source, choice, max_pixels)
        return _read_video(source, choice, max_pixels)
    except errors.PylloyalError:
        raise
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
            source.seek(0)
            head = bytes(source.read(16))
            source.seek(0)
            return head
    except FileNotFoundError as error:
        raise errors.MediaDecodeError(f"{name_of(source)}: no such file") from error
    except ValueError as error:  # a NUL in the path, a closed file
        raise errors.MediaDecodeError(f"{name_of(source)}: {error}") from error
    except OSError as error:
        raise errors.MediaDecodeError(f"{name_of(source)}: {error.strerror or error}") from error
    raise errors.InvalidArgumentError(f"a clip is a path, bytes or a file object that can seek; {type(source).__name__} is none of them")


# ---------------------------------------------------------------------------------------------------------------- animations


def _read_animation(source: ImageSource, choice: Choice, max_pixels: int) -> Reel:
    name, times, at, notes = name_of(source), list[float](), 0.0, list[str]()
    with quiet:
        with open_picture(source) as picture:
            kind, size = picture.format or "", picture.size
            if size[0] * size[1] > max_pixels:
                raise errors.UnsupportedMediaError(f"{name}: {size[0]} x {size[1]} pixels, more than max_pixels ({max_pixels})")
            n = int(getattr(picture, "n_frames", 1))
            for i in range(n):
                try:
                    picture.seek(i)
                    if kind in ("WEBP", "AVIF"):
                        picture.load()  # only then is the duration known
                except Exception as error:  # decoders raise whatever comes out of broken bytes
                    if i == 0:
                        raise
                    notes.append(f"the animation breaks off at frame {i} of {n}: {type(error).__name__}: {error}")
                    break
                shown = float(picture.info.get("duration", 0)) / 1000
                if not 0.01 < shown < math.inf:  # as every viewer does
                    shown = 0.1
                    if (note := "frames without a duration are taken as 0.1 s") not in notes:
                        notes.append(note)
                times.append(at)
                at += shown
        table = Timetable(times, at)
        picks, beyond, thinned = table.pick(choice)
        frames, n_missing = list[Decoded](), 0
        with open_picture(source) as picture:  # once, in order: each frame is drawn over those before it
            for frame, asked in picks:
                try:
                    frames.append(Decoded(converted(picture, name, frame=frame, max_pixels=max_pixels)[0], times[frame], asked))
                except errors.UnsupportedMediaError:
                    raise
                except Exception as error:  # as above
                    n_missing += 1
                    if not frames and n_missing == len(picks):
                        raise errors.MediaDecodeError(f"{name}: none of the {len(picks)} chosen frames can be decoded; {error}") from error
    if n_missing:
        notes.append(f"{n_missing} of {len(picks)} chosen frames cannot be decoded")
    return Reel(frames, table, beyond, thinned, n_missing, container=kind, codec=kind, stored_size=size, declared_s=at, notes=notes)


# -------------------------------------------------------------------------------------------------------------------- videos


def open_container(source: ImageSource) -> Any:
    """A container of FFmpeg's, for reading; only files and bytes, never an address."""
    try:
        import av
    except ImportError as error:
        raise missing(source, "clips and sound", "PyAV (the package av)", error) from error
    options = {"format_whitelist": ",".join(CONTAINERS)}
    # Titles in no known encoding are no reason to refuse a clip; from PyAV 19 on they are none anyway, and it cannot be told so.
    lenient: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    if isinstance(source, bytes | bytearray | memoryview):
        return av.open(io.BytesIO(source), mode="r", options=options, **lenient)
    if isinstance(source, str | os.PathLike):
        path = os.fsdecode(source)
        if not os.path.isfile(path):
            raise errors.MediaDecodeError(f"{path}: {'not a file' if os.path.exists(path) else 'no such file'}")
        # "file:" so that a colon in the name makes no address of it
        return av.open("file:" + path, mode="r", options={**options, "protocol_whitelist": "file"}, **lenient)
    if not (hasattr(source, "read") and hasattr(source, "seek")):
        raise errors.InvalidArgumentError(f"a clip or a sound is a path, bytes or a file object that can seek; {type(source).__name__} is none of them")
    file: Any = source
    file.seek(0)
    return av.open(_Borrowed(file), mode="r", options=options, **lenient)


class _Borrowed:
    """A file object of the caller's, without the means to close it."""

    def __init__(self, file: Any) -> None:
        self.read, self.seek, self.tell = file.read, file.seek, file.tell


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
            if packet.size:  # an empty one repeats a picture, and would tell the decoder that the clip ends
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
        is_raw = container.format.name in _RAW
        is_by_order = is_raw or (container.format.name == "avi" and stream.codec_context.has_b_frames)  # what FFmpeg makes of their order is a guess
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        rate = rate if 0.01 <= rate <= 1000 else 25.0
        step = max(1, round(1 / (rate * base))) if is_raw else 0
        if is_raw:
            notes.append(f"no times in it; shown at {rate:g} frames a second")
        has_key = False
        shown: dict[int, tuple[int, int | None]] = {}
        for packet in _packets(container, stream, notes):
            stamp = len(shown) * step if is_raw else packet.dts if packet.pts is None or is_by_order else packet.pts
            if packet.is_keyframe and not has_key and not is_by_order:
                has_key = True
                if shown:  # a recording that was joined late
                    notes.append(f"{len(shown)} frames before the first key frame are left out")
                    shown.clear()
            if stamp is None or packet.is_discard:
                continue
            shown[stamp] = (packet.duration or 0, (stamp if packet.dts is None else packet.dts) if packet.is_keyframe else None)
        if not shown:
            raise errors.MediaDecodeError(f"{name}: {'no frame in it carries a time' if not notes else notes[0]}")
        stamps = sorted(shown)
        gaps = sorted(b - a for a, b in itertools.pairwise(stamps))
        last = shown[stamps[-1]][0] or (gaps[len(gaps) // 2] if gaps else round(0.04 / base))
        declared = container.duration / 1e6 if container.duration else None
        if declared is not None and container.format.name.startswith("matroska"):
            declared = max(0.0, declared - stamps[0] * base)  # its header counts from zero, not from the first frame
        facts = {
            "container": container.format.name, "codec": stream.codec_context.name, "stored_size": (stream.codec_context.width, stream.codec_context.height),
            "declared_s": float(stream.duration * stream.time_base) if stream.duration else declared}
        times = [(stamp - stamps[0]) * base for stamp in stamps]
        keys = [(stamp, at) for stamp in stamps if (at := shown[stamp][1]) is not None]
        return Timetable(times, times[-1] + last * base, stamps[0] * base, [] if is_by_order else keys, is_by_order, step), stamps, facts


def _read_video(source: ImageSource, choice: Choice, max_pixels: int) -> Reel:
    name, notes = name_of(source), list[str]()
    table, stamps, facts = _timetable(source, name, max_pixels, notes)
    picks, beyond, thinned = table.pick(choice)
    reel = Reel([], table, beyond, thinned, notes=notes, **facts)
    wanted = [stamps[frame] for frame, _ in picks]
    found, size = {}, (0, 0)
    for stamp, pixels, rotation in _decode(source, name, wanted, table, max_pixels, notes):
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


def _decode(source: ImageSource, name: str, wanted: Sequence[int], table: Timetable, max_pixels: int, notes: list[str]) -> Iterator[tuple[int, Pixels, int]]:
    """The frames with these time stamps, each stretch of them decoded from the key frame before it."""
    import av

    stretches: list[tuple[int | None, list[int]]] = []  # where to seek, None for the beginning; time stamps
    for stamp in wanted:
        before = bisect.bisect_right(table.keys, stamp, key=lambda key: key[0]) - 1
        at = table.keys[before][1] if before > 0 else None
        if not stretches or stretches[-1][0] != at:
            stretches.append((at, []))
        stretches[-1][1].append(stamp)
    n_broken = [0]
    while stretches:
        at, stamps = stretches.pop(0)
        due = set(stamps)
        with open_container(source) as container:
            stream = _stream(container, name, max_pixels)
            try:
                if at is not None:
                    container.seek(at, stream=stream, backward=True, any_frame=False)
                for stamp, frame in _frames(_from_key(_packets(container, stream, notes), None if at is None else stamps[0]), stream, n_broken, table):
                    if stamp in due:
                        due.remove(stamp)
                        yield stamp, *_to_rgb(frame, stream, name, max_pixels, notes)
                    if stamp >= stamps[-1]:
                        break
            except (_Astray, av.FFmpegError) as error:
                if at is None and isinstance(error, av.FFmpegError):
                    raise
                # the index lies: the rest in one go from the beginning
                stretches = [(None, sorted(due.union(*(rest for _, rest in stretches))))]
    if n_broken[0]:
        notes.append(f"{n_broken[0]} packets are damaged")


class _Astray(Exception):
    """A seek went past what was looked for."""


def _from_key(packets: Iterator[Any], first: int | None) -> Iterator[Any]:
    """Packets from a key frame on that is shown no later than ``first``; None: as they are."""
    for packet in packets:
        if first is not None:
            if not packet.is_keyframe:
                continue
            stamp = packet.pts if packet.pts is not None else packet.dts
            if stamp is None or stamp > first:
                raise _Astray
            first = None
        yield packet
    if first is not None:
        raise _Astray


def _frames(packets: Iterator[Any], stream: Any, n_broken: list[int], table: Timetable) -> Iterator[tuple[int, Any]]:
    """(time stamp, frame) in the order they are shown; damaged packets are counted, and skipped where they give nothing."""
    import av

    queue: collections.deque[int] | None = collections.deque() if table.is_by_order else None
    for i, packet in enumerate(packets):
        n_broken[0] += bool(packet.is_corrupt)
        try:
            frames = packet.decode()
        except av.FFmpegError:
            n_broken[0] += not packet.is_corrupt
            continue
        stamp = i * table.step if table.step else packet.dts
        if queue is not None and stamp is not None:
            queue.append(stamp)
        yield from _stamped(frames, queue)
    try:
        frames = stream.codec_context.decode(None)
    except (av.FFmpegError, EOFError):
        return
    yield from _stamped(frames, queue)


def _stamped(frames: Sequence[Any], queue: collections.deque[int] | None) -> Iterator[tuple[int, Any]]:
    for frame in frames:
        if queue is None:
            stamp = frame.pts if frame.pts is not None else frame.dts
        else:
            stamp = queue.popleft() if queue else None
        if stamp is not None:
            yield stamp, frame


def _to_rgb(frame: Any, stream: Any, name: str, max_pixels: int, notes: list[str]) -> tuple[Pixels, int]:
    """A frame in RGB, upright, with square pixels; and the rotation that was applied, in degrees counter-clockwise."""
    import av

    def note(text: str) -> None:
        if text not in notes:
            notes.append(text)

    if frame.interlaced_frame:
        note("the clip is interlaced; its fields are shown as one picture")
    width, height = frame.width, frame.height
    oblong = float(stream.sample_aspect_ratio or 1) or 1.0
    if not 1 / _WIDEST <= oblong <= _WIDEST:
        note(f"pixels {oblong:g} times as wide as high; taken as square")
    elif oblong != 1:  # the longer side grows: no pixel is lost
        width, height = (round(width * oblong), height) if oblong > 1 else (width, round(height / oblong))
    if width * height > max_pixels:
        raise errors.UnsupportedMediaError(f"{name}: a frame of {width} x {height} pixels, more than max_pixels ({max_pixels})")
    if (width, height) != (frame.width, frame.height):
        note(f"pixels {oblong:g} times as wide as high; scaled to square ones")
    pixels: Pixels = frame.to_ndarray(format="rgb24", width=width, height=height, interpolation=av.video.reformatter.Interpolation.BICUBIC)
    if frame.rotation % 90:
        note("a rotation by other than right angles was rounded")
    pixels, is_mirrored = _upright(pixels, frame)
    if is_mirrored:
        note("the clip is mirrored by its header; undone")
    return np.ascontiguousarray(pixels), round(frame.rotation / 90) % 4 * 90


def _upright(pixels: Pixels, frame: Any) -> tuple[Pixels, bool]:
    """As the frame's display matrix has it; and whether that mirrors."""
    data = frame.side_data.get("DISPLAYMATRIX")  # what iterating gives depends on the version of PyAV
    matrix = b"" if data is None else bytes(data)
    if len(matrix) != 36:
        return pixels, False
    a, b, _, c, d = struct.unpack("=5i", matrix[:20])[:5]  # x' = ax + cy, y' = bx + dy
    is_across = abs(b) > abs(a)
    right, down = (c, b) if is_across else (a, d)
    pixels = pixels.swapaxes(0, 1) if is_across else pixels
    return pixels[:: -1 if down < 0 else 1, :: -1 if right < 0 else 1], (a * d - b * c) < 0
