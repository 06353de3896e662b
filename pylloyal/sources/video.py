"""Clips for a prompt: frames with the moments they were shown at, and notes beside them.

The layout is the one llama.cpp's own video helper uses, which models that merge frames were met with: the word ``Video:``, then
frames; after the first frame at or past the next stamp stands ``[{minutes}m{seconds}s]``. Frames of one stretch without text between them
are merged in pairs by projectors that do so.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .. import errors
from ..kernel.parts import Part, PixelPart, TextPart
from ..kernel.projector import Projector
from .clip import Choice, Decoded, read
from .image import ImageSource, content_id, name_of


@dataclass(frozen=True, slots=True)
class ClipReport:
    """What a clip was, and what of it is fed.

    Attributes
    ----------
    name, container, codec : str
    stored_size, size : (int, int)
        Width and height in the file, and as fed.
    rotation : int
        Degrees counter-clockwise that were applied.
    origin_s : float
        What the clip's own clock says at its first frame; all other times are counted from there.
    length_s : float
        From the first frame to the end of the last, by their own times.
    declared_s : float or None
        What the header says; it may lie.
    n_frames : int
        Frames in the clip.
    asked_s, times_s : tuple of float
        Moments asked for, and the times of the frames that answer them.
    n_beyond : int
        Moments asked for that lie beyond the end.
    n_thinned : int
        Frames left out to keep to ``max_frames``.
    n_missing : int
        Frames that are damaged.
    notes : tuple of str
        What else had to be decided.
    """

    name: str
    container: str
    codec: str
    stored_size: tuple[int, int]
    size: tuple[int, int]
    rotation: int
    origin_s: float
    length_s: float
    declared_s: float | None
    n_frames: int
    asked_s: tuple[float, ...]
    times_s: tuple[float, ...]
    n_beyond: int
    n_thinned: int
    n_missing: int
    notes: tuple[str, ...]


class Video:
    """A clip for a prompt.

    Parameters
    ----------
    source : path, bytes or file object
        Any container FFmpeg knows; GIF, APNG and animated WebP with the times of their own frames.
    fps : float
        Moments a second to look at.
    times : sequence of float, optional
        The moments themselves, in seconds from the first frame, ascending; then ``fps``, ``start`` and ``end`` say nothing.
    start, end : float
        The stretch to look at, in seconds from the first frame.
    max_frames : int or None
        With more, they are thinned out evenly.
    stamp_s : float
        Seconds between time stamps in the text; 0 or below for none.
    notes : iterable of (float, str)
        Text that belongs to a moment (a transcript): it joins the first stamp at or after it; what comes later follows the last frame.
    max_pixels : int
        A frame with more is refused.

    Attributes
    ----------
    frames : list of Decoded
        Pixels, the time of each, and the moment that was asked for.
    report : ClipReport

    Raises
    ------
    MediaDecodeError
        Nothing of it can be decoded; the message names the file and says why. What is merely damaged is skipped and reported.
    UnsupportedMediaError
        No video in it, a codec that is not known, or too many pixels.
    """

    def __init__(self, source: ImageSource, *, fps: float = 2.0, times: Sequence[float] | None = None, start: float = 0.0, end: float | None = None,
                 max_frames: int | None = 64, stamp_s: float = 5.0, notes: Iterable[tuple[float, str]] = (), max_pixels: int = 16_000_000) -> None:
        choice = Choice(fps, None if times is None else tuple(times), start, end, max_frames)
        if math.isnan(stamp_s):
            raise errors.InvalidArgumentError("stamp_s is not a number")
        self.notes = _checked(notes)
        reel = read(source, choice, max_pixels)
        if not reel.frames:
            raise errors.MediaDecodeError(f"{name_of(source)}: none of the moments asked for lies in it; it is {reel.timetable.end:.2f} s long")
        self.frames: list[Decoded] = reel.frames
        self.stamp_s = stamp_s
        height, width = reel.frames[0].pixels.shape[:2]
        self.report = ClipReport(name_of(source), reel.container, reel.codec, reel.stored_size, (width, height), reel.rotation, reel.timetable.origin, reel.timetable.end, reel.declared_s,
                                 len(reel.timetable.times), tuple(f.asked for f in reel.frames), tuple(f.time for f in reel.frames), reel.n_beyond, reel.n_thinned, reel.n_missing,
                                 tuple(reel.notes))

    def __repr__(self) -> str:
        return f"<Video {self.report.name!r} {len(self.frames)} frames of {self.report.length_s:.2f} s>"

    def parts(self, projector: Projector | None) -> Sequence[Part]:  # noqa: ARG002 (a clip is the same for every projector)
        """The clip laid out: text, frames, stamps, notes."""
        out: list[Part] = [TextPart("Video:")]
        left = list(self.notes)
        due = 0.0
        for frame in self.frames:
            out.append(PixelPart(frame.pixels, is_frame=True, id=content_id(frame.pixels)))
            if self.stamp_s > 0 and frame.time >= due:
                due = self.stamp_s * (math.floor(frame.time / self.stamp_s) + 1)
                said = [text for at, text in left if at <= frame.time]
                left = left[len(said) :]
                out.append(TextPart(" ".join([stamp_of(frame.time), *said])))
        if left:
            out.append(TextPart(" ".join(f"{stamp_of(at)} {text}" for at, text in left)))
        return out


def _checked(notes: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    out = []
    for note in notes:
        at, text = note if isinstance(note, Sequence) and len(note) == 2 else (None, None)
        if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at) or not isinstance(text, str):
            raise errors.InvalidArgumentError(f"a note is (seconds, text); {note!r} is not")
        out.append((float(at), text))
    return sorted(out, key=lambda note: note[0])


def stamp_of(seconds: float) -> str:
    """``[1m2.50s]``"""
    minutes = int(round(seconds, 2) // 60)
    return f"[{minutes}m{max(0.0, seconds - 60 * minutes):.2f}s]"
