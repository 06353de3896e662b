"""Which contexts fit: the demand grows with the context, so the longest is found by halving."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .budget import Budget
from .footprint import Demand, Line
from .settings import CELL_GRAIN

CAP: Final = (1 << 31) - CELL_GRAIN  # positions of the engine are of 31 bits


def shortfall(demand: Demand, budgets: Sequence[Budget], n_ctx: int) -> int:
    """Bytes that are missing for a context on the device that misses most; 0: it fits."""
    return _missing(demand.lines(n_ctx), budgets)


def fits(demand: Demand, budgets: Sequence[Budget], n_ctx: int) -> bool:
    """Whether a context does; without compute buffers where the rest alone is too much."""
    return not _missing(demand.kept(n_ctx), budgets) and not shortfall(demand, budgets, n_ctx)


def _missing(lines: Sequence[Line], budgets: Sequence[Budget]) -> int:
    on: dict[int, int] = {}
    for line in lines:
        on[line.device] = on.get(line.device, 0) + line.bytes
    return max(0, *(on.get(budget.device, 0) - budget.bytes for budget in budgets))


def largest(demand: Demand, budgets: Sequence[Budget]) -> int:
    """The longest context that fits, in steps of the engine's; 0: none does."""
    if not fits(demand, budgets, CELL_GRAIN):
        return 0
    low, high = 1, CAP // CELL_GRAIN  # low fits; high + 1 is not looked at
    step = 16
    while low < high and fits(demand, budgets, min(low * step, high) * CELL_GRAIN):
        low = min(low * step, high)
    high = min(high, low * step)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(demand, budgets, middle * CELL_GRAIN):
            low = middle
        else:
            high = middle - 1
    return low * CELL_GRAIN
