"""The sizes pictures are brought to, and the tiles they are cut into, by each of the engine's ways of preparing them.

Source: mtmd-image.cpp of the pinned engine. What it rounds in single precision is rounded so here.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np

from ..errors import MediaEncodeError, MetadataError
from .eye import Eye, Size

F = np.float32
TILE: Final = 512  # of lfm2
CROP: Final = 504  # of step3vl
_MOST_TILES: Final = 4096


def need_tiles(n: int) -> None:
    if n > _MOST_TILES:
        raise MetadataError(f"the projector would cut a picture into {n:,} tiles")


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


def uhd(eye: Eye, size: Size) -> tuple[Size, list[Size], Size]:
    """Overview, slices and grid, the way of LLaVA-UHD."""
    side = eye.image_size
    if eye.kind == "minicpmv4_6" and eye.merge == 2 and F(size[0]) * F(size[1]) / F(side * side) <= 1:
        return _best_resize(size, side, eye.align, True), [], (0, 0)
    if max(size) <= side:
        return (side, side), [], (0, 0)
    if eye.candidates:
        width, height = _best_resolution(size, eye.candidates)
        need_tiles(-(-width // side) * -(-height // side))
        tiles = [(min(side, width - x), min(side, height - y)) for y in range(0, height, side) for x in range(0, width, side)]
        grid = (width // side, height // side)
        if grid[0] > 0 < grid[1] and len(tiles) != grid[0] * grid[1]:
            raise MetadataError(f"{width} x {height} pixels are no whole tiles of {side}: the engine cannot cut them")
        return (side, side), tiles, grid
    grid = _best_grid(size, side)
    cut = (_divisible(size[0], grid[0]) // grid[0], _divisible(size[1], grid[1]) // grid[1])
    return _best_resize(size, side, eye.align, False), [_best_resize(cut, side, eye.align, True)] * (grid[0] * grid[1]), grid


def idefics3(eye: Eye, size: Size) -> tuple[list[Size], Size]:
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
        need_tiles(grid[0] * grid[1])
        return [(side, side)] * (grid[0] * grid[1]), grid
    width, height = smart_size(*size, side, eye.min_pixels, eye.max_pixels, eye.longest_edge)
    need_tiles((width // side) * (height // side))
    return [(side, side)] * ((width // side) * (height // side)), (width // side, height // side)


def lfm2_grid(width: int, height: int) -> Size:
    ratios = sorted(dict.fromkeys((w, h) for n in range(2, 11) for w in range(1, n + 1) for h in range(1, n + 1) if 2 <= w * h <= 10), key=lambda r: r[0] * r[1])
    shape, best, least = F(width) / F(height), (1, 1), F(np.finfo(F).max)
    for ratio in ratios:
        off = abs(shape - F(ratio[0]) / F(ratio[1]))
        if off < least:
            best, least = ratio, off
        elif off == least and F(width * height) > F(0.5) * F(TILE * TILE * ratio[0] * ratio[1]):
            best = ratio
    return best


def glm5v(eye: Eye, width: int, height: int) -> Size:
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


def muse(eye: Eye, width: int, height: int) -> Size:
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


def youtu(eye: Eye, width: int, height: int) -> Size:
    scale, most = F(1), eye.max_pixels // (eye.patch * eye.patch)
    while True:
        w, h = (max(eye.align, math.ceil(F(side) * scale / F(eye.align)) * eye.align) for side in (width, height))
        if (h // eye.patch) * (w // eye.patch) <= most:
            return w, h
        scale = F(scale - F(0.02))
        if scale <= 0:
            return w, h


def step3(eye: Eye, size: Size) -> Size:
    """The grid of tiles; zeros for the overview alone."""
    width, height = size
    shape = F(width) / F(height)
    if min(size) < 32 and (shape > F(4) or shape < F(1) / F(4)):
        width = height = max(size)
    if max(width, height) > eye.longest_edge:
        scale = F(eye.longest_edge) / F(max(width, height))
        width, height = (max(1, math.floor(F(side) * scale)) for side in (width, height))
    longer, shorter = max(width, height), min(width, height)
    shape = F(longer) / F(shorter)
    if longer <= eye.image_size:
        window = shorter if shape > F(1.5) else 0
    else:
        window = min(shorter, CROP) if shape > F(4) else CROP
    if window == 0:
        return 0, 0

    def count(length: int) -> int:
        ratio = F(length) / F(window)
        if ratio >= 1:
            length = window * (math.floor(ratio) + (ratio - np.floor(ratio) > F(0.2)))
        return 1 if length <= window else math.ceil(F(length - window) / F(window) + F(1))

    return count(width), count(height)
