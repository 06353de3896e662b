"""What a picture becomes before it is encoded, and the rows it then gives.

Source: ``init_vision`` and ``add_media`` of the pinned engine's mtmd.cpp, and ``clip_n_output_tokens`` of its clip.cpp.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ..errors import MediaEncodeError
from .eye import KINDS, MOST_SIDE, Eye, Size
from .preparation import CROP, TILE, glm5v, idefics3, lfm2_grid, muse, need_tiles, smart_size, step3, uhd, youtu

_HALVED: Final = frozenset(("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "ling3vl", "exaone4_5", "mimovl", "minimax_m3", "glm4v", "glm5v", "youtuvl", "muse-glimmer"))
_OBLONG: Final = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """A picture as it reaches the encoder.

    Attributes
    ----------
    pictures : tuple of (int, int)
        One, or an overview and tiles.
    n_marks : int
        Tokens around and between them.
    """

    pictures: tuple[Size, ...]
    n_marks: int


def layout(eye: Eye, width: int, height: int) -> Layout:
    """What a picture of this size becomes.

    Raises
    ------
    MediaEncodeError
        The engine would not take it.
    """
    kind, size, known = eye.kind, (width, height), KINDS[eye.kind]
    marks = known.marks
    if known.is_fixed and not (eye.candidates and kind in ("mlp", "ldp", "ldpv2", "cogvlm", "janus_pro", "adapter")):
        return Layout(((eye.image_size, eye.image_size),), marks)
    if known.is_fixed or kind in ("llama4", "internvl"):
        overview, tiles, _ = uhd(eye, size)
        return Layout((overview, *tiles), marks)
    if kind in ("resampler", "minicpmv4_6"):
        overview, tiles, (_, lines) = uhd(eye, size)
        extra = 2 if tiles and kind == "resampler" and eye.legacy_marks else 0
        return Layout((overview, *tiles), 2 + 2 * len(tiles) + max(0, lines - 1) + extra)
    if kind == "idefics3":
        tiles, (_, lines) = idefics3(eye, size)
        return Layout(((eye.image_size, eye.image_size), *tiles), 4 + 2 * len(tiles) + max(0, lines - 1))
    if kind == "step3vl":
        across, lines = step3(eye, size)
        need_tiles(across * lines)
        return Layout(((eye.image_size, eye.image_size), *[(CROP, CROP)] * (across * lines)), 2 + 2 * across * lines + max(0, lines - 1))
    one = {"glm5v": glm5v, "muse-glimmer": muse, "youtuvl": youtu}.get(kind, lambda e, w, h: smart_size(w, h, e.align, e.min_pixels, e.max_pixels, e.longest_edge))(eye, width, height)
    if max(one) > MOST_SIDE:
        raise MediaEncodeError(f"{width} x {height} is too thin: the engine would scale it to {one[0]:,} x {one[1]:,}, and {MOST_SIDE:,} is the most")
    if kind == "lfm2":
        w, h = (max(eye.patch, round(side / eye.align) * eye.align) for side in size)
        if w * h > eye.max_pixels * 2.0:
            grid = lfm2_grid(width, height)
            return Layout((one, *[(TILE, TILE)] * (grid[0] * grid[1])), marks + 1 + grid[0] * grid[1])
    return Layout((one,), marks)


def rows_of(eye: Eye, size: Size) -> int:
    """Rows the encoder gives for one picture as it reaches it; ``clip_n_output_tokens``."""
    kind, m = eye.kind, eye.merge
    x, y = size[0] // eye.patch, size[1] // eye.patch
    if kind == "yasa2":
        return 64
    if kind == "resampler":
        return eye.n_query
    if kind == "gemma3nv":
        return eye.image_size // eye.patch
    if kind in ("ldp", "ldpv2", "adapter"):
        return x * y // 4 + 2 * eye.has_ends
    if kind in _HALVED:
        return (size[0] // (eye.patch * 2)) * (size[1] // (eye.patch * 2))
    if kind == "step3vl":
        return (size[0] // eye.align) * (size[1] // eye.align)
    if kind in ("lfm2", "kimivl", "kimik25"):
        return (-(-size[0] // eye.align)) * (-(-size[1] // eye.align))
    if kind in ("paddleocr", "dots_ocr", "dots3note_v"):
        return -(-(x * y) // (m * m))
    if kind in ("pixtral", "lightonocr"):
        return (y // m) * (x // m) + (y // m - 1 if eye.has_breaks else 0)
    if kind == "hunyuanvl":
        return (x // m + 1) * (y // m) + 2
    return x * y // (m * m) + 2 * eye.has_ends


def most_merged(eye: Eye) -> int:
    """Groups of merged patches in the largest picture that reaches the encoder, if none is more oblong than 64 to 1; 0 for squares of one size."""
    kind, a = eye.kind, eye.align
    if KINDS[kind].is_fixed or kind in ("internvl", "llama4", "idefics3", "step3vl"):
        return 0
    oblong = math.sqrt(_OBLONG) + 1 / math.sqrt(_OBLONG)
    if kind in ("resampler", "minicpmv4_6"):
        side = eye.image_size / a
        return math.floor(side * side + side / 2 * oblong + 0.25)  # both sides are rounded, to the nearest
    if kind == "lightonocr" and not eye.max_pixels:
        return (eye.longest_edge // a + 1) ** 2  # also where it divides: single precision can bring one pixel more
    least, most = -(-eye.min_pixels // (a * a)), (eye.max_pixels + (eye.max_pixels >> 20)) // (a * a)
    # What is enlarged is rounded up. What is made smaller keeps one line, though none would be left.
    return max(most, math.floor(least + oblong * math.sqrt(least) + 1), math.floor(math.sqrt(_OBLONG * (most + 1))))


def largest(eye: Eye) -> tuple[Size, ...]:
    """Pictures as they reach the encoder of which one makes it work hardest: in one line, as high as can be, and the tile."""
    n, a = most_merged(eye), eye.align
    if not n:
        return ((eye.image_size, eye.image_size),)
    across = max(1, n // max(1, math.isqrt(n * _OBLONG)))
    return ((n * a, a), (across * a, n // across * a), *(((TILE, TILE),) if eye.kind == "lfm2" else ()))
