"""Memory that is handed to the kernel at every step, made once per store.

A prebuilt ctypes array costs a fraction of a microsecond per call. Lanes are written and read as one row of numbers: between two
ticks the weights go through the caches, and what counts then is how little code and memory is touched, not how it runs when warm.
"""
from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import capi

_FIELDS: Any = capi.pyl_lane._fields_
_LANE = "".join(kind._type_ for _, kind in _FIELDS)  # the letters of ctypes are those of struct
_LANE_SIZE, _LANE_WIDTH = ctypes.sizeof(capi.pyl_lane), len(_LANE)
_FINISH, _N_TOKENS = ([name for name, _ in _FIELDS].index(wanted) for wanted in ("finish", "n_tokens"))


def view_of(array: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A numpy view of a ctypes array's memory."""
    return np.frombuffer(array, dtype)


class StepBuffers:
    """Arrays for up to ``n`` branches: handles, tokens, and the lanes of a tick."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.branches = (ctypes.c_uint64 * n)()
        self.branch_view = view_of(self.branches, np.dtype(np.uint64))
        self.tokens = (ctypes.c_int32 * n)()
        self.token_view = view_of(self.tokens, np.dtype(np.int32))
        self.lanes = (capi.pyl_lane * n)()
        self._layouts: dict[int, struct.Struct] = {}  # of so many lanes
        self.tick = capi.pyl_tick(struct_size=ctypes.sizeof(capi.pyl_tick))
        self.tick_ref = ctypes.byref(self.tick)
        self._steps = 0
        self.reserve_steps(1)

    def reserve_steps(self, n_steps: int) -> None:
        """Make room for ``n_steps`` tokens a lane."""
        if n_steps > self._steps:
            self.step_tokens = (ctypes.c_int32 * (self.n * n_steps))()
            self._steps = n_steps  # last: whatever interrupts this leaves buffers that fit what they say

    def set_branches(self, handles: Sequence[int]) -> int:
        self.branch_view[: len(handles)] = handles
        return len(handles)

    def set_lanes(self, handles: Sequence[int], limits: Sequence[int]) -> None:
        """Lanes of branches before a tick: nothing said, not finished."""
        row: list[int] = []
        for handle, limit in zip(handles, limits, strict=True):
            row += (_LANE_SIZE, 0, handle, limit, 0, 0, 0)
        self._layout(len(handles)).pack_into(self.lanes, 0, *row)

    def read_lanes(self, n: int) -> tuple[Sequence[int], Sequence[int]]:
        """Of each lane how many tokens it has, and why it finished."""
        row = self._layout(n).unpack_from(self.lanes)
        return row[_N_TOKENS::_LANE_WIDTH], row[_FINISH::_LANE_WIDTH]

    def _layout(self, n: int) -> struct.Struct:
        found = self._layouts.get(n)
        if found is None:
            found = self._layouts[n] = struct.Struct(_LANE * n)
        return found
