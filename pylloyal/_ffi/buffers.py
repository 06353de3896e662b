"""Memory that is handed to the kernel at every step, made once per store.

A prebuilt ctypes array costs a fraction of a microsecond per call; a numpy view of the same memory fills and reads a column of
structs at once, which is what keeps a tick of many branches cheap.
"""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import capi


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
        self.lane_view = view_of(self.lanes, np.dtype(capi.pyl_lane))
        self.lane_view["struct_size"] = ctypes.sizeof(capi.pyl_lane)
        self.tick = capi.pyl_tick(struct_size=ctypes.sizeof(capi.pyl_tick))
        self.tick_ref = ctypes.byref(self.tick)
        self._steps = 0
        self.reserve_steps(1)

    def reserve_steps(self, n_steps: int) -> None:
        """Make room for ``n_steps`` tokens a lane."""
        if n_steps > self._steps:
            tokens = (ctypes.c_int32 * (self.n * n_steps))()
            self.step_tokens, self.step_view = tokens, view_of(tokens, np.dtype(np.int32))
            self._steps = n_steps  # last: whatever interrupts this leaves buffers that fit what they say

    def set_branches(self, handles: Sequence[int]) -> int:
        self.branch_view[: len(handles)] = handles
        return len(handles)
