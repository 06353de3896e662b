"""What pictures and clips take: memory of the projector, and cells of what it makes of them. From its header alone.

A cell count holds the encoder's rows and the tokens the engine puts around and between them, each as the one token that models of this kind
have for it. Not in it is the text of a prompt, and of a clip the word ``Video:``, its time stamps and its notes: those are words, and take
what the model's vocabulary makes of them.
"""
from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import InvalidArgumentError
from .encoders import encoder_bytes, is_even
from .eye import KINDS, MERGING, MOST_SIDE, Eye, Size, eye_of, kind_of
from .header import Header
from .layout import largest, layout, most_merged, rows_of
from .loaded import loaded_bytes

_MOST_PIXELS: Final = 1 << 30
_NUMBER: Final = r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})?)"
_SIZE: Final = re.compile(r"([0-9]{1,9})[xX]([0-9]{1,9})")
_CLIP: Final = re.compile(rf"({_NUMBER})s(?:@({_NUMBER})fps)?(?::([0-9]{{1,9}})[xX]([0-9]{{1,9}}))?")
STAMP_S: Final = 5.0  # the defaults of Video
MAX_FRAMES: Final = 64


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip to be counted; ``width`` and ``height`` None for frames of any size."""

    seconds: float
    fps: float = 2.0
    width: int | None = None
    height: int | None = None


@dataclass(frozen=True, slots=True)
class ProjectorMemory:
    """What a projector takes.

    Attributes
    ----------
    kind : str
        The type of its encoder of pictures; of sound when it has no other.
    weights_bytes : int
        Its tensors as the engine allocates them.
    weights_known : {"exact", "bound"}
        A bound where the file may hold tensors the engine leaves out.
    encoder_bytes : int or None
        Most bytes of the buffer the encoder works in, for the pictures asked about; None when it is not known for this kind.
        It is allocated by the first picture, grows with larger ones, and is kept.
    """

    kind: str
    weights_bytes: int
    weights_known: str
    encoder_bytes: int | None


@dataclass(frozen=True, slots=True)
class MediaDemand:
    """Lines of a ledger, (name, bytes, how it is known: "exact", "bound" or "unknown"), and cells, (what, how many)."""

    lines: tuple[tuple[str, int, str], ...]
    cells: tuple[tuple[str, int], ...]


# ----------------------------------------------------------------------------------------------------------------- parsing


def parse_image(text: str) -> Size:
    """``1024x768``: width and height.

    Raises
    ------
    InvalidArgumentError
    """
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if not found:
        raise InvalidArgumentError(f"a picture is WIDTHxHEIGHT, such as 1024x768; {_shown(text)} is not")
    return _checked(text, found[1], found[2])


def parse_clip(text: str) -> Clip:
    """``30s``, ``30s@2fps`` or ``30s@2fps:640x360``.

    Raises
    ------
    InvalidArgumentError
    """
    found = _CLIP.fullmatch(text) if isinstance(text, str) else None
    if not found:
        raise InvalidArgumentError(f"a clip is SECONDSs, SECONDSs@RATEfps or SECONDSs@RATEfps:WIDTHxHEIGHT, such as 30s@2fps:640x360; {_shown(text)} is not")
    width, height = _checked(text, found[3], found[4]) if found[3] else (None, None)
    clip = Clip(float(found[1]), float(found[2] or 2), width, height)
    _check_clip(clip.seconds, clip.fps)
    return clip


def _shown(text: object) -> str:
    shown = repr(text[:60] if isinstance(text, str | bytes) else text)
    return shown if len(shown) < 200 else shown[:197] + "..."


def _checked(text: object, width: str | int, height: str | int) -> Size:
    size = int(width), int(height)
    if min(size) < 1 or max(size) > MOST_SIDE or size[0] * size[1] > _MOST_PIXELS:
        raise InvalidArgumentError(f"{_shown(text)}: each side is 1 to {MOST_SIDE:,} pixels, and a picture {_MOST_PIXELS:,} at most")
    return size


def _check_size(width: int, height: int) -> None:
    if any(isinstance(side, bool) or not isinstance(side, int) for side in (width, height)):
        raise InvalidArgumentError(f"a picture's size is two whole numbers; {(width, height)!r} is not")
    _checked(f"{width}x{height}", width, height)


def _check_clip(seconds: float, fps: float) -> None:
    if not 0 < fps <= 1000 or not 0 < seconds <= 1e7 or seconds * fps > 1e6:
        raise InvalidArgumentError(f"a clip of {seconds:g} s at {fps:g} fps: both must be above 0, fps at most 1,000, and frames at most a million")


# ------------------------------------------------------------------------------------------------------------------- cells


def _cells(eye: Eye, width: int, height: int) -> int:
    made = layout(eye, width, height)
    return sum(rows_of(eye, size) for size in made.pictures) + made.n_marks


def media_cells(header: Mapping[str, Any], width: int, height: int, *, image_min_tokens: int = 0, image_max_tokens: int = 0) -> int:
    """Cells one picture takes.

    Raises
    ------
    MetadataError
        The projector does not see, or is of a kind whose cells cannot be said from the header; it is named.
    MediaEncodeError
        The engine would not take the picture.
    """
    _check_size(width, height)
    return _cells(eye_of(header, image_min_tokens, image_max_tokens), width, height)


def most_cells(eye: Eye) -> int:
    """Cells no picture of ordinary shape exceeds, and about what a large one takes."""
    if eye.max_pixels and eye.kind not in ("idefics3", "lfm2"):
        return max(rows_of(eye, size) for size in largest(eye)) + layout(eye, eye.align, eye.align).n_marks
    side = max(eye.image_size, eye.longest_edge, 512)
    sizes = {size for a in range(1, 13) for b in range(1, 13 // a + 1) for size in ((a * side, b * side), (b * side, a * side))}
    return max(_cells(eye, *size) for size in sizes | set(eye.candidates))


def n_blocks(seconds: float, fps: float, n_merged: int, *, max_frames: int | None = MAX_FRAMES, stamp_s: float = STAMP_S) -> int:
    """Stretches of rows of a clip as :class:`~pylloyal.Video` lays it out: a stamp after a frame keeps it from being merged with the next.

    Exact when the clip shows a frame at every moment asked for; where it shows them a little earlier, a stretch between stamps can hold one frame more.
    """
    n = math.ceil(seconds * fps)
    while n > 1 and (n - 1) / fps >= seconds:
        n -= 1
    while n / fps < seconds:
        n += 1
    picks = range(n) if max_frames is None or n <= max_frames else [round(i * (n - 1) / (max_frames - 1)) if max_frames > 1 else 0 for i in range(max_frames)]
    if n_merged == 1:
        return len(picks)
    blocks, is_open, due = 0, False, 0.0
    for frame in picks:
        blocks += not is_open
        is_open = not is_open
        if stamp_s > 0 and frame / fps >= due:
            due = stamp_s * (math.floor(frame / fps / stamp_s) + 1)
            is_open = False
    return blocks


def clip_cells(header: Mapping[str, Any], seconds: float, fps: float, width: int | None, height: int | None, *, max_frames: int | None = MAX_FRAMES, stamp_s: float = STAMP_S,
               image_min_tokens: int = 0, image_max_tokens: int = 0) -> int:
    """Cells a clip takes, laid out as by :class:`~pylloyal.Video`; without a size, the most frames of ordinary shape can take.

    Raises
    ------
    MetadataError, MediaEncodeError
        As :func:`media_cells`.
    """
    _check_clip(seconds, fps)
    if max_frames is not None and max_frames < 1:
        raise InvalidArgumentError(f"max_frames is {max_frames}; it must be 1 or more")
    eye = eye_of(header, image_min_tokens, image_max_tokens)
    if width is None or height is None:
        each = most_cells(eye)
    else:
        _check_size(width, height)
        each = _cells(eye, width, height)
    return each * n_blocks(seconds, fps, 2 if eye.kind in MERGING else 1, max_frames=max_frames, stamp_s=stamp_s)


# ------------------------------------------------------------------------------------------------------------------ memory


def projector_memory(header: Header, sizes: Sequence[Size] = (), *, flash_attn: bool = True, clips: bool = True, image_min_tokens: int = 0, image_max_tokens: int = 0) -> ProjectorMemory:
    """What a projector takes for pictures of these sizes; without any, for the largest its header and these limits allow.

    Parameters
    ----------
    sizes : sequence of (int, int)
        Width and height of pictures as they are given.
    flash_attn : bool
        What the engine uses where it can, as on the CPU.
    clips : bool
        Frames of clips come too: some encoders take two at once.

    Raises
    ------
    MetadataError
        No projector, or a damaged one.
    MediaEncodeError
        The engine would not take one of the pictures.
    """
    seen, heard = kind_of(header), kind_of(header, "audio")
    weights, is_exact = loaded_bytes(header, seen, heard)
    known = "exact" if is_exact else "bound"
    if seen not in KINDS:
        return ProjectorMemory(seen or heard, weights, known, None)
    eye = eye_of(header, image_min_tokens, image_max_tokens)
    for size in sizes:
        _check_size(*size)
    tensors = {tensor.name: tensor for tensor in header.tensors}

    def peak(size: Size) -> int | None:
        found = [encoder_bytes(header, tensors, eye, size, flash_attn, n) for n in ((1, 2) if clips and seen in MERGING else (1,))]
        return None if None in found else max(n for n in found if n is not None)

    pictures = {size for asked in sizes for size in layout(eye, *asked).pictures}
    peaks = [peak(size) for size in sorted(pictures or largest(eye))]
    if not pictures and None not in peaks and not (flash_attn and is_even(header, eye)):
        peaks += _smaller(eye, peak)
    return ProjectorMemory(seen, weights, known, None if None in peaks else max(n for n in peaks if n is not None))


def _smaller(eye: Eye, peak: Callable[[Size], int | None]) -> list[int]:
    """Bounds for smaller pictures, where those can take more: the allocator fits some sizes worse than larger ones.

    Between two that are tried a buffer follows one of them, and grows with the square of the picture at most.
    """
    n = most_merged(eye)
    tried = sorted({max(1, n - 1), max(1, n - 3), *(-(-n * part // 100) for part in (98, 96, 93, 90, 87, 84, 80, 76, 72, 68, 64, 60, 55, 50))} - {0, n}, reverse=True) if n else []
    return [(peak((here * eye.align, eye.align)) or 0) * above * above // (here * here) + 1 for above, here in itertools.pairwise([n, *tried])]


def media_demand(header: Header, images: Sequence[str], clips: Sequence[str], *, cache_bytes: int = 0, flash_attn: bool = True, max_frames: int | None = MAX_FRAMES, image_min_tokens: int = 0,
                 image_max_tokens: int = 0) -> MediaDemand:
    """What these pictures and clips add to a plan.

    Parameters
    ----------
    images, clips : sequence of str
        As :func:`parse_image` and :func:`parse_clip` read them.
    cache_bytes : int
        Limit of the cache of encoded rows, as :class:`~pylloyal.Projector` takes it; it keeps none by default.

    Raises
    ------
    InvalidArgumentError, MetadataError, MediaEncodeError
    """
    if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, int) or cache_bytes < 0:
        raise InvalidArgumentError(f"cache_bytes is {cache_bytes!r}; it must be 0 or more")
    pictures, films = [parse_image(text) for text in images], [parse_clip(text) for text in clips]
    limits = {"image_min_tokens": image_min_tokens, "image_max_tokens": image_max_tokens}
    cells = [(text, media_cells(header, *size, **limits)) for text, size in zip(images, pictures, strict=True)]
    cells += [(text, clip_cells(header, clip.seconds, clip.fps, clip.width, clip.height, max_frames=max_frames, image_min_tokens=image_min_tokens, image_max_tokens=image_max_tokens))
              for text, clip in zip(clips, films, strict=True)]
    sized = [(clip.width, clip.height) for clip in films if clip.width is not None and clip.height is not None]
    sizes = [] if len(sized) < len(films) else [*pictures, *sized]
    memory = projector_memory(header, sizes, flash_attn=flash_attn, clips=bool(films) or not sizes, **limits)
    peak = memory.encoder_bytes
    lines = (("projector weights", memory.weights_bytes, memory.weights_known), ("encoder peak", peak or 0, "unknown" if peak is None else "bound"), ("media cache", cache_bytes, "exact"))
    return MediaDemand(lines, tuple(cells))
