"""How a tick's time grows: with the branches while the cache is as full, and with how full it is while the branches are as many."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .pairs import Side, measure, rows_of
from .rows import Row
from .setting import Setting
from .sides import Sides, both

GROUP = "growth"
SLOPE_BOUND = 1.10  # "the same slope"
PATHS = {"control": "llama_decode and the engine's sampler chain", "product": "Store.tick, sampled"}


def rows(setting: Setting) -> Iterator[Row]:
    n_steps, skip = setting.times(12, 2), setting.times(2, 1)
    full = setting.times(2048, 64)
    branches = (1, 4, 16, 32, 64) if not setting.is_quick else (1, 4, 16)
    cells = (256, 1024, 4096) if not setting.is_quick else (16, 64, 128)
    with both(setting, n_ctx=max(full, *cells) + max(branches) * (n_steps + skip + 1), n_branches=max(branches) + 1) as sides:
        def ticks(n_branches: int, n_cells: int) -> dict[str, Any]:
            return {"prefix": setting.tokens[:n_cells], "n_branches": n_branches, "n_steps": n_steps, "skip": skip, "mode": "sampled"}

        n = setting.times(5, 2)
        yield from curve(sides, f"tick by branches, {full:,} cells full", "branch", branches, lambda x: ticks(x, full), n, n_steps)
        yield from curve(sides, "tick of 8 branches by cells full", "cell", cells, lambda x: ticks(8, x), n, n_steps)


def curve(sides: Sides, what: str, step: str, xs: Sequence[int], work: Callable[[int], dict[str, Any]], n: int, n_steps: int) -> Iterator[Row]:
    """A row for each side at each x, and one for how the slopes compare: rounds over all x, so that each gives a slope of its own."""
    def milliseconds(answer: dict[str, Any]) -> float:
        return float(answer["seconds"]) / n_steps * 1e3

    controls = [sides.control(PATHS["control"], milliseconds, "ticks", **work(x)) for x in xs]
    products = [sides.product(PATHS["product"], milliseconds, "ticks", **work(x)) for x in xs]
    measure([side for pair in zip(controls, products, strict=True) for side in pair], n, n_warm=0, before=sides.open)
    for x, control, product in zip(xs, controls, products, strict=True):
        yield from rows_of(GROUP, what, "ms", control, [product], x=x)
    yield from slopes(what, step, xs, controls, products)


def slopes(what: str, step: str, xs: Sequence[float], controls: Sequence[Side | None], products: Sequence[Side]) -> Iterator[Row]:
    """The slopes of the lines through each round's points; the product's over the control's is what was promised to be 1."""
    unit = f"us/{step}"
    ours = Side("product", "least squares through each round", lambda: 0.0, bound=SLOPE_BOUND)
    theirs = None if controls[0] is None else Side("control", "least squares through each round", lambda: 0.0)
    for side, points in ((theirs, controls), (ours, products)):
        if side is None:
            continue
        broken = next((point.reason for point in points if point is not None and point.reason is not None), None)
        if broken is not None:
            side.reason = broken
        else:
            side.figures = [slope(xs, ys) * 1e3 for ys in zip(*(point.figures for point in points if point is not None), strict=True)]
    yield from rows_of(GROUP, f"{what}: slope", unit, theirs, [ours])


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the line of least squares."""
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum((x - x0) ** 2 for x in xs)
