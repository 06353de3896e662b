"""Memory that is handed to the kernel at every step, made once per store.

A prebuilt ctypes array costs a fraction of a microsecond per call. It is filled by its own slices and by ``struct``, a tick and its lanes as one
row of numbers: between two ticks the weights go through the caches, and what counts then is how little code and memory is touched, not how it
runs when warm. numpy would be hundreds of cache lines.
"""
from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from . import capi
from .memory import ids


def _letters(kind: Any) -> str:
    """A struct's fields in the words of the module ``struct``: its letters are those of ctypes, and P for a pointer."""
    return "".join("P" if issubclass(field, ctypes._Pointer) else field._type_ for _, field in kind._fields_)


def _place(kind: Any, name: str) -> int:
    return [field for field, _ in kind._fields_].index(name)


_TICK, _LANE = _letters(capi.pyl_tick), _letters(capi.pyl_lane)
_TICK_SIZE, _LANE_SIZE = ctypes.sizeof(capi.pyl_tick), ctypes.sizeof(capi.pyl_lane)
_LANES, _LANE_WIDTH = len(_TICK), len(_LANE)  # of a row of numbers: where the lanes begin, and how wide one is
_N_TICKS, _N_DISPATCHES, _OUT_OF_CELLS = (_place(capi.pyl_tick, name) for name in ("n_ticks", "n_dispatches", "out_of_cells"))
_FINISH, _N_TOKENS = (_LANES + _place(capi.pyl_lane, name) for name in ("finish", "n_tokens"))


def _array(array: Any) -> tuple[int, int]:
    """Where a ctypes array is and how long; nowhere for None."""
    return (0, 0) if array is None else (ctypes.addressof(array), len(array))


class StepBuffers:
    """Arrays for up to ``n`` branches: handles, tokens, and the lanes of a tick."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.branches: Any = (ctypes.c_uint64 * n)()
        self.tokens: Any = (ctypes.c_int32 * n)()
        self._memory = ctypes.create_string_buffer(_TICK_SIZE + n * _LANE_SIZE)
        self.tick_ref = ctypes.byref(capi.pyl_tick.from_buffer(self._memory))
        self.lanes = (capi.pyl_lane * n).from_buffer(self._memory, _TICK_SIZE)
        self._layouts: dict[int, struct.Struct] = {}  # of so many lanes
        self._steps = 0
        self.reserve_steps(1)

    def reserve_steps(self, n_steps: int) -> None:
        """Make room for ``n_steps`` tokens a lane."""
        if n_steps > self._steps:
            self.step_tokens = (ctypes.c_int32 * (self.n * n_steps))()
            self._steps = n_steps  # last: whatever interrupts this leaves buffers that fit what they say

    def set_branches(self, handles: list[int]) -> int:
        self.branches[: len(handles)] = handles
        return len(handles)

    def set_tokens(self, tokens: Sequence[int]) -> None:
        """Token ids, or InvalidArgumentError, in the words of :func:`.memory.ids`."""
        try:
            struct.pack_into(f"{len(tokens)}i", self.tokens, 0, *tokens)
        except (struct.error, TypeError):
            self.tokens[: len(tokens)] = ids(tokens).tolist()

    def set_tick(self, n_steps: int, n: int, handles: Iterable[int], limits: Sequence[int] | None, stops: Any, runs: Any, max_run_tokens: int) -> None:
        """A tick that has done nothing yet, and lanes of branches: nothing said, not finished.

        ``stops`` and ``runs`` are ctypes arrays or None, which the caller keeps alive until it is done.
        """
        row = [_TICK_SIZE, n_steps, *_array(stops), 0, 0, 0, max_run_tokens, *_array(runs)]
        if limits is None:
            for handle in handles:
                row += (_LANE_SIZE, 0, handle, 0, 0, 0, 0)
        else:
            for handle, limit in zip(handles, limits, strict=True):
                row += (_LANE_SIZE, 0, handle, limit, 0, 0, 0)
        self._layout(n).pack_into(self._memory, 0, *row)

    def read_tick(self, n: int) -> tuple[int, int, int, Sequence[int], Sequence[int]]:
        """Ticks, dispatches, whether cells ran out; of each of ``n`` lanes how many tokens it has, and why it finished."""
        row = self._layout(n).unpack_from(self._memory)
        return row[_N_TICKS], row[_N_DISPATCHES], row[_OUT_OF_CELLS], row[_N_TOKENS::_LANE_WIDTH], row[_FINISH::_LANE_WIDTH]

    def _layout(self, n: int) -> struct.Struct:
        found = self._layouts.get(n)
        if found is None:
            found = self._layouts[n] = struct.Struct(_TICK + _LANE * n)
        return found
