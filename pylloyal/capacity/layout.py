"""What a picture becomes before it is encoded, and the rows it then gives.

Source: mtmd-image.cpp of the pinned engine, and ``init_vision`` and ``add_media`` of its mtmd.cpp. What they round in single precision is rounded so here.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..errors import MediaEncodeError, MetadataError
from .eye import KINDS, MOST_SIDE, Eye, Size

F = np.float32
_HALVED: Final = frozenset(("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "ling3vl", "exaone4_5", "mimovl", "minimax_m3", "glm4v", "glm5v", "youtuvl", "muse-glimmer"))
_OBLONG: Final = 64
_TILE: Final = 512  # of lfm2
_MOST_TILES: Final = 4096


def _need_tiles(n: int) -> None:
    if n > _MOST_TILES:
        raise MetadataError(f"the projector would cut a picture into {n:,} tiles")




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


def _round(x: np.float32) -> int:
    """Halves away from zero, as C++ has it."""
    return math.floor(abs(float(x)) + 0.5)


def smart_size(width: int, height: int, align: int, low: int = 0, high: int = 0, longest: int = 0) -> Size:
    """The engine's ``calc_size_preserved_ratio``."""
    def up(x: np.float32) -> int:
        return math.ceil(x / F(align)) * align

    def down(x: np.float32) -> int:
        return math.floor(x / F(align)) * align

    if longest:
        scale = min(F(longest) / F(width), F(longest) / F(height))
        w, h = up(F(width) * scale), up(F(height) * scale)
    else:
        w, h = (max(align, _round(F(side) / F(align)) * align) for side in (width, height))
    if high and h * w > high:
        beta = np.sqrt(F(height) * F(width) / F(high))
        w, h = max(align, down(F(width) / beta)), max(align, down(F(height) / beta))
    elif low and h * w < low:
        beta = np.sqrt(F(low) / (F(height) * F(width)))
        w, h = up(F(width) * beta), up(F(height) * beta)
    return w, h


def _divisible(length: int, n: int) -> int:
    return max(_round(F(length) / F(n)) * n, n)


def _best_resize(size: Size, scale: int, patch: int, upscale: bool) -> Size:
    width, height = size
    if width * height > scale * scale or upscale:
        ratio = F(width) / F(height)
        height = int(F(scale) / np.sqrt(ratio))
        width = int(F(height) * ratio)
    return _divisible(width, patch), _divisible(height, patch)


def _best_resolution(size: Size, candidates: Iterable[Size]) -> Size:
    best, least_waste, most = (0, 0), (1 << 31) - 1, 0
    for width, height in candidates:
        scale = min(F(width) / F(size[0]), F(height) / F(size[1]))
        useful = min(int(F(size[0]) * scale) * int(F(size[1]) * scale), size[0] * size[1])
        waste = width * height - useful
        if useful > most or (useful == most and waste < least_waste):
            best, least_waste, most = (width, height), waste, useful
    return best


def _best_grid(size: Size, square: int) -> Size:
    log_ratio = F(math.log(F(size[0]) / F(size[1])))
    multiple = int(min(math.ceil(F(size[0]) * F(size[1]) / F(square * square)), 9))
    best, least = (1, 1), F(np.inf)
    for n in (multiple - 1, multiple, multiple + 1):
        for m in range(1, n + 1) if n != 1 and n <= 9 else ():
            if n % m == 0:
                error = F(abs(float(log_ratio) - math.log(m / (n // m))))
                if error < least:
                    best, least = (m, n // m), error
    return best


def _uhd(eye: Eye, size: Size) -> tuple[Size, list[Size], Size]:
    """Overview, slices and grid, the way of LLaVA-UHD."""
    side = eye.image_size
    if eye.kind == "minicpmv4_6" and eye.merge == 2 and F(size[0]) * F(size[1]) / F(side * side) <= 1:
        return _best_resize(size, side, eye.align, True), [], (0, 0)
    if max(size) <= side:
        return (side, side), [], (0, 0)
    if eye.candidates:
        width, height = _best_resolution(size, eye.candidates)
        _need_tiles(-(-width // side) * -(-height // side))
        tiles = [(min(side, width - x), min(side, height - y)) for y in range(0, height, side) for x in range(0, width, side)]
        grid = (width // side, height // side)
        if grid[0] > 0 < grid[1] and len(tiles) != grid[0] * grid[1]:
            raise MetadataError(f"{width} x {height} pixels are no whole tiles of {side}: the engine cannot cut them")
        return (side, side), tiles, grid
    grid = _best_grid(size, side)
    cut = (_divisible(size[0], grid[0]) // grid[0], _divisible(size[1], grid[1]) // grid[1])
    return _best_resize(size, side, eye.align, False), [_best_resize(cut, side, eye.align, True)] * (grid[0] * grid[1]), grid


def _idefics3(eye: Eye, size: Size) -> tuple[list[Size], Size]:
    side = eye.image_size
    if eye.longest_edge and not eye.min_pixels and not eye.max_pixels:
        ratio = size[0] / size[1]
        if size[0] >= size[1]:
            short = int(eye.longest_edge / ratio)
            width, height = eye.longest_edge, short + short % 2
        else:
            short = int(eye.longest_edge * ratio)
            width, height = short + short % 2, eye.longest_edge
        if min(width, height) == 0:
            raise MediaEncodeError(f"{size[0]} x {size[1]} is too thin for this projector: nothing is left of it at {eye.longest_edge}")
        grid = (-(-width // side), -(-height // side))
        _need_tiles(grid[0] * grid[1])
        return [(side, side)] * (grid[0] * grid[1]), grid
    width, height = smart_size(*size, side, eye.min_pixels, eye.max_pixels, eye.longest_edge)
    _need_tiles((width // side) * (height // side))
    return [(side, side)] * ((width // side) * (height // side)), (width // side, height // side)


def _lfm2_grid(width: int, height: int) -> Size:
    ratios = sorted(dict.fromkeys((w, h) for n in range(2, 11) for w in range(1, n + 1) for h in range(1, n + 1) if 2 <= w * h <= 10), key=lambda r: r[0] * r[1])
    shape, best, least = F(width) / F(height), (1, 1), F(np.finfo(F).max)
    for ratio in ratios:
        off = abs(shape - F(ratio[0]) / F(ratio[1]))
        if off < least:
            best, least = ratio, off
        elif off == least and F(width * height) > F(0.5) * F(_TILE * _TILE * ratio[0] * ratio[1]):
            best = ratio
    return best


def _glm5v(eye: Eye, width: int, height: int) -> Size:
    def up(n: int) -> int:
        return -(-n // eye.align) * eye.align

    w, h = up(width), up(height)
    if h * w < eye.min_pixels:
        scale = math.sqrt(eye.min_pixels / (height * width))
        w, h = up(max(1, math.ceil(width * scale))), up(max(1, math.ceil(height * scale)))
    if h * w > eye.max_pixels:
        low, high, w, h = 1, height, eye.align, eye.align
        while low <= high:
            middle = (low + high) // 2
            a, b = up(max(1, width * middle // height)), up(middle)
            if a * b <= eye.max_pixels:
                w, h, low = a, b, middle + 1
            else:
                high = middle - 1
    return w, h


def _muse(eye: Eye, width: int, height: int) -> Size:
    most = eye.max_pixels // (eye.align * eye.align)
    high, wide = height / eye.align, width / eye.align
    ratio = wide / high
    if high * wide > most:
        high = math.sqrt(most / ratio)
        wide = high * ratio
    best, off = (-1, -1), 0.0
    for h in (math.floor(high), math.ceil(high)):
        for w in (math.floor(wide), math.ceil(wide)):
            if h < 1 or w < 1 or h * w > most:
                continue
            d = abs(h / w - height / width)
            if best[0] < 0 or d < off or (d == off and h * w > best[0] * best[1]):
                best, off = (h, w), d
    if best[0] < 0:
        best = (max(1, math.floor(high + 0.5)), max(1, math.floor(wide + 0.5)))
    return best[1] * eye.align, best[0] * eye.align


def _youtu(eye: Eye, width: int, height: int) -> Size:
    scale, most = F(1), eye.max_pixels // (eye.patch * eye.patch)
    while True:
        w, h = (max(eye.align, math.ceil(F(side) * scale / F(eye.align)) * eye.align) for side in (width, height))
        if (h // eye.patch) * (w // eye.patch) <= most:
            return w, h
        scale = F(scale - F(0.02))
        if scale <= 0:
            return w, h


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
        overview, tiles, _ = _uhd(eye, size)
        return Layout((overview, *tiles), marks)
    if kind in ("resampler", "minicpmv4_6"):
        overview, tiles, (_, lines) = _uhd(eye, size)
        extra = 2 if tiles and kind == "resampler" and eye.legacy_marks else 0
        return Layout((overview, *tiles), 2 + 2 * len(tiles) + max(0, lines - 1) + extra)
    if kind == "idefics3":
        tiles, (_, lines) = _idefics3(eye, size)
        return Layout(((eye.image_size, eye.image_size), *tiles), 4 + 2 * len(tiles) + max(0, lines - 1))
    one = {"glm5v": _glm5v, "muse-glimmer": _muse, "youtuvl": _youtu}.get(kind, lambda e, w, h: smart_size(w, h, e.align, e.min_pixels, e.max_pixels, e.longest_edge))(eye, width, height)
    if max(one) > MOST_SIDE:
        raise MediaEncodeError(f"{width} x {height} is too thin: the engine would scale it to {one[0]:,} x {one[1]:,}, and {MOST_SIDE:,} is the most")
    if kind == "lfm2":
        w, h = (max(eye.patch, round(side / eye.align) * eye.align) for side in size)
        if w * h > eye.max_pixels * 2.0:
            grid = _lfm2_grid(width, height)
            return Layout((one, *[(_TILE, _TILE)] * (grid[0] * grid[1])), marks + 1 + grid[0] * grid[1])
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
    if KINDS[kind].is_fixed or kind in ("internvl", "llama4", "idefics3"):
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
    return ((n * a, a), (across * a, n // across * a), *(((_TILE, _TILE),) if eye.kind == "lfm2" else ()))
