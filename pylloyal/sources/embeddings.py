"""Rows of an encoder of your own, or rows that were kept."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import errors
from ..kernel.parts import Part, RowPart
from ..kernel.projector import Projector


class Embeddings:
    """Rows that go into the model as they are.

    Parameters
    ----------
    rows : array of float, shape (n, width of the model's input)
    positions : array of int, shape (n,) or (n, 4), optional
        Where each row stands, relative to where they begin: one number, or (time, row, column, 0) on M-RoPE models. None: one after
        another.
    n_pos : int, optional
        Positions they take, 1 to n. By default n, or with ``positions`` one more than the largest.
    is_non_causal : bool
        True when the rows see each other: they must fit one dispatch.

    Raises
    ------
    InvalidArgumentError
        Of a shape they cannot have; the model's width is checked when the prompt is made.
    """

    def __init__(self, rows: npt.ArrayLike, *, positions: npt.ArrayLike | None = None, n_pos: int | None = None, is_non_causal: bool = False) -> None:
        own: npt.NDArray[Any] = np.asarray(rows)
        if own.ndim != 2 or own.dtype.kind not in "fiu":
            raise errors.InvalidArgumentError(f"rows of shape {own.shape} and type {own.dtype}; they are (n, width) numbers")
        places: npt.NDArray[Any] | None = None
        if positions is not None:
            places = np.asarray(positions)
            if places.dtype.kind not in "iu" or places.shape not in ((len(own),), (len(own), 4)):
                raise errors.InvalidArgumentError(f"positions of shape {places.shape} and type {places.dtype} for {len(own)} rows; they are ({len(own)},) or ({len(own)}, 4) whole numbers")
            if places.size and (int(places.min()) < -(2**31) or int(places.max()) >= 2**31 - 1):
                raise errors.InvalidArgumentError("positions are outside what 32 bits hold")
            if n_pos is None and places.size:
                n_pos = int(places.max()) + 1
            places = np.ascontiguousarray(places.T, np.int32)
        if n_pos is not None and not -(2**31) <= n_pos < 2**31:  # ctypes would cut it off in silence
            raise errors.InvalidArgumentError(f"n_pos is {n_pos}; it must be in 1..{len(own)}")
        with np.errstate(over="ignore"):  # what is too large for a float becomes an infinity, which the kernel refuses
            single = np.ascontiguousarray(own, np.float32)
        self._part = RowPart(single, places, n_pos, is_non_causal)

    def parts(self, projector: Projector | None) -> Sequence[Part]:  # noqa: ARG002 (they bypass it)
        """The rows."""
        return [self._part]
