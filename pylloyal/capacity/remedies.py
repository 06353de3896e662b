"""Changes that would make a context fit: real settings, tried out, the short list of those nobody would do better without."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from .budget import Budget
from .footprint import Demand
from .search import fits, largest
from .settings import CELL_GRAIN, Settings, padded

MOST: Final = 5
_SMALLER_KV: Final = ("f32", "f16", "q8_0", "q4_0")


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change.

    Attributes
    ----------
    settings : Settings
        With it.
    n_ctx : int
        The context to ask for with these.
    change : str
        What differs, in words.
    costs : tuple of int
        Steps given up of: KV precision, cells beyond a sliding window, dispatch size, branches, and the layers' places.
    """

    settings: Settings
    n_ctx: int
    change: str
    costs: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.change} ({self.n_ctx:,} tokens)" if self.change else f"a context of {self.n_ctx:,} tokens"

    def to_json(self) -> dict[str, Any]:
        s = self.settings
        return {"change": self.change or f"context {self.n_ctx}", "n_ctx": self.n_ctx, "settings": {name: getattr(s, name) for name in s.__slots__}}


def find_remedies(demand: Demand, budgets: Sequence[Budget], wanted: int, ceiling: int) -> tuple[Remedy, ...]:
    """What gives the context wanted, least given up first; where nothing does, what gives most."""
    goal = max(CELL_GRAIN, min(padded(wanted), max(ceiling // CELL_GRAIN * CELL_GRAIN, CELL_GRAIN)))
    if not all(budget.is_known for budget in budgets) or fits(demand, budgets, goal):
        return ()
    reaching: list[Remedy] = []
    best: list[Remedy] = []
    for settings, costs in _choices(demand, len(budgets) - 1):
        changed = _changed(demand, settings, budgets)
        if any(_dominates(found.costs, costs) for found in reaching):
            continue
        if fits(changed, budgets, goal):
            reaching.append(Remedy(settings, goal, _words(demand.settings, settings), costs))
    own = largest(demand, budgets)
    if own:
        best.append(Remedy(demand.settings, min(own, goal), "", (0, 0, 0, 0, 0)))
    if not reaching:
        smallest, costs = list(_choices(demand, len(budgets) - 1))[-1]
        changed = _changed(demand, smallest, budgets)
        most = largest(changed, budgets)
        if most > own:
            best.append(Remedy(smallest, min(most, goal), _words(demand.settings, smallest), costs))
    return (*reaching[: MOST - 1], *best)


def _changed(demand: Demand, settings: Settings, budgets: Sequence[Budget]) -> Demand:
    if settings.gpu_layers == demand.settings.gpu_layers:
        return demand.but(settings)
    return Demand.of(demand.geometry, demand.metadata, settings, [budget.free or 0 for budget in budgets[1:]], demand.extras, demand.measure, shares_weights=demand.shares_weights)


def _choices(demand: Demand, n_devices: int) -> Iterator[tuple[Settings, tuple[int, ...]]]:
    """Settings that take less, by how much is given up."""
    s = demand.settings
    at = _SMALLER_KV.index(s.type_k) if s.type_k in _SMALLER_KV else len(_SMALLER_KV)
    kinds = [(s.type_k, s.type_v), *((kind, kind) for kind in _SMALLER_KV[at + 1 :])] if demand.geometry.groups else [(s.type_k, s.type_v)]
    windows = [s.swa_full, False] if s.swa_full and demand.geometry.has_window else [s.swa_full]
    size = s.n_ubatch or s.n_batch
    dispatches = [size, *(n for n in (128, 32) if n < size)]
    branches = [s.n_branches, *sorted({n for n in (s.n_branches // 2, s.n_branches // 4, 1) if 0 < n < s.n_branches}, reverse=True)]
    most = demand.geometry.n_layer_all + 1
    on = most if s.gpu_layers < 0 else s.gpu_layers
    places = [s.gpu_layers, *([-1] if on < most else []), *sorted({on * part // 4 for part in (3, 2, 1, 0)} - {on}, reverse=True)] if n_devices else [s.gpu_layers]
    rows = []
    for (i, kind), (j, full), (k, n_ubatch), (m, n_branches), (p, layers) in product(enumerate(kinds), enumerate(windows), enumerate(dispatches), enumerate(branches), enumerate(places)):
        n_batch = max(n_ubatch, n_branches) if not s.n_ubatch else s.n_batch
        changed = s.but(type_k=kind[0], type_v=kind[1], swa_full=full, n_batch=n_batch, n_ubatch=0 if not s.n_ubatch else n_ubatch, n_branches=n_branches, gpu_layers=layers)
        if i + j + k + m + p and not changed.conflicts(demand.geometry):
            rows.append((changed, (i, j, k, m, p)))
    yield from sorted(rows, key=lambda row: (sum(row[1]), row[1]))


def _dominates(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x <= y for x, y in zip(a, b, strict=True))


def _words(old: Settings, new: Settings) -> str:
    parts = []
    if (new.type_k, new.type_v) != (old.type_k, old.type_v):
        parts.append(f"{new.type_k} KV")
    if new.swa_full != old.swa_full:
        parts.append("swa_full off")
    if new.n_batch != old.n_batch or new.n_ubatch != old.n_ubatch:
        parts.append(f"dispatches of {new.n_ubatch or new.n_batch}")
    if new.n_branches != old.n_branches:
        parts.append(f"{new.n_branches} branches" if new.n_branches > 1 else "1 branch")
    if new.gpu_layers != old.gpu_layers:
        parts.append("all layers on accelerators" if new.gpu_layers < 0 else f"{new.gpu_layers} layers on accelerators")
    return " and ".join(parts)
