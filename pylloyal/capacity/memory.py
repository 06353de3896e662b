"""Bytes of the cells and states a context has: arithmetic the engine follows exactly."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .geometry import Geometry, Group, States
from .settings import Context, Settings, padded, row_bytes, window_cells

ALIGNMENT: Final = 32  # of tensors in system memory


@dataclass(frozen=True, slots=True)
class Kept:
    """What one group of layers keeps.

    Attributes
    ----------
    name : str
    is_recurrent : bool
    cells : int
        In one layer, all streams together; for states, how many of them.
    layer_bytes : dict of int to int
        By layer.
    """

    name: str
    is_recurrent: bool
    cells: int
    layer_bytes: dict[int, int]

    @property
    def bytes(self) -> int:
        return sum(self.layer_bytes.values())


def kept(geometry: Geometry, made: Context, settings: Settings) -> tuple[Kept, ...]:
    """Everything a context keeps, a group of layers each. Exact.

    Source: ``llama_kv_cache``, ``llama_memory_recurrent`` and their kin in the pinned engine.
    """
    return (*(_cells(geometry, group, made, settings) for group in geometry.groups), *(_states(geometry, states, made, settings) for states in geometry.states))


def _cells(geometry: Geometry, group: Group, made: Context, settings: Settings) -> Kept:
    streams = made.n_seq_max if group.is_per_sequence or not settings.unified else 1
    if group.span == "window":
        cells = window_cells(geometry, made, settings, group.is_per_sequence)
    elif group.tokens_per_cell > 1:
        cells = padded(max(1, -(-made.n_ctx_seq // group.tokens_per_cell)))
    else:
        cells = made.n_ctx_seq
    flash = settings.uses_flash(geometry)
    k_only = group.v_transposed == 0 and not any(group.v)

    def layer(k: int, v: int) -> int:
        n = padded(row_bytes(settings.type_k, k) * cells * streams, ALIGNMENT)
        return n if k_only else n + padded(row_bytes(settings.type_v, v if flash else group.v_transposed) * cells * streams, ALIGNMENT)

    return Kept(group.name, False, cells * streams, {i: layer(k, v) for i, k, v in zip(group.layers, group.k, group.v, strict=True)})


def _states(geometry: Geometry, states: States, made: Context, settings: Settings) -> Kept:
    n = made.n_seq_max * (1 + (settings.n_rs_seq if geometry.takes_rollback else 0))
    one = sum(padded(4 * rows * n, ALIGNMENT) for rows in states.rows)
    extra = dict(states.extra)
    return Kept(states.name, True, n, {i: one + padded(4 * extra.get(i, 0) * n, ALIGNMENT) for i in states.layers})
