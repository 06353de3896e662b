"""What a prompt is made of: text, tokens, pixels, samples, rows. Plain values; nothing here opens a file or a library."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from .. import errors
from .._ffi import capi
from .._ffi.memory import ids
from .projector import Projector


class Part(Protocol):
    """One part of a prompt, ready for the kernel."""

    def _fields(self) -> dict[str, Any]: ...


@runtime_checkable
class PartSource(Protocol):
    """Whatever can give parts, in order: an image, a clip with its time stamps, rows of an encoder of your own."""

    def parts(self, projector: Projector | None) -> Sequence[Part]:
        """The parts. Asked for once, when the prompt is made."""
        ...


def is_source(item: object) -> TypeGuard[PartSource]:
    """Whether it gives parts when asked. The protocol alone is content with any ``parts``, and a path has some."""
    return isinstance(item, PartSource) and callable(item.parts)


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text; ``special`` says whether control tokens spelled out in it are read as such."""

    text: str
    special: bool = False

    def _fields(self) -> dict[str, Any]:
        raw = self.text.encode()
        return {"kind": capi.PART_TEXT, "text": raw, "n": len(raw), "flags": capi.TOKENIZE_PARSE_SPECIAL if self.special else 0}


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Tokens as they are."""

    tokens: Sequence[int]

    def _fields(self) -> dict[str, Any]:
        tokens = ids(self.tokens)
        return {"kind": capi.PART_TOKENS, "tokens": tokens, "n": tokens.size}


@dataclass(frozen=True, slots=True, eq=False)
class PixelPart:
    """A picture: uint8, shape (height, width, 3). ``is_frame`` marks one of a clip, ``id`` names its content for the cache of rows."""

    pixels: npt.NDArray[np.uint8]
    is_frame: bool = False
    id: str | None = None

    def _fields(self) -> dict[str, Any]:
        if self.pixels.ndim != 3 or self.pixels.shape[2] != 3 or self.pixels.dtype != np.uint8:
            raise errors.InvalidArgumentError(f"pixels of shape {self.pixels.shape} and type {self.pixels.dtype}; they are (height, width, 3) of uint8")
        height, width, _ = self.pixels.shape
        fields = {"kind": capi.PART_IMAGE, "rgb": np.ascontiguousarray(self.pixels), "width": width, "height": height, "is_frame": int(self.is_frame)}
        return fields if self.id is None else {**fields, "id": self.id.encode()}


@dataclass(frozen=True, slots=True)
class PlaceholderPart:
    """A picture of which only the size is known: it can be counted, not decoded."""

    width: int
    height: int
    is_frame: bool = False

    def _fields(self) -> dict[str, Any]:
        if not (0 < self.width < 2**31 and 0 < self.height < 2**31):
            raise errors.InvalidArgumentError(f"a picture of {self.width} x {self.height} pixels")
        return {"kind": capi.PART_IMAGE, "width": self.width, "height": self.height, "is_frame": int(self.is_frame)}


@dataclass(frozen=True, slots=True, eq=False)
class SoundPart:
    """Sound: float32, mono, shape (n,), at the projector's sample rate."""

    samples: npt.NDArray[np.float32]
    id: str | None = None

    def _fields(self) -> dict[str, Any]:
        if self.samples.ndim != 1 or self.samples.dtype != np.float32:
            raise errors.InvalidArgumentError(f"samples of shape {self.samples.shape} and type {self.samples.dtype}; they are (n,) of float32")
        fields = {"kind": capi.PART_AUDIO, "samples": np.ascontiguousarray(self.samples), "n": self.samples.size}
        return fields if self.id is None else {**fields, "id": self.id.encode()}


@dataclass(frozen=True, slots=True, eq=False)
class RowPart:
    """Rows of any encoder: float32, shape (n, width of the model's input).

    Attributes
    ----------
    positions : int32, shape (n,) or (4, n), optional
        Where each row stands, relative to where the part begins; four sections (time, row, column, 0) on M-RoPE models. None: one
        after another.
    n_pos : int, optional
        Positions they take, 1 to n; n by default.
    is_non_causal : bool
        True when the rows see each other: they must fit one dispatch.
    """

    rows: npt.NDArray[np.float32]
    positions: npt.NDArray[np.int32] | None = None
    n_pos: int | None = None
    is_non_causal: bool = False

    def _fields(self) -> dict[str, Any]:
        if self.rows.ndim != 2:
            raise errors.InvalidArgumentError(f"rows of shape {self.rows.shape}; they are (n, width)")
        n, width = self.rows.shape
        fields = {"kind": capi.PART_ROWS, "samples": np.ascontiguousarray(self.rows, np.float32), "n": n, "width": width, "n_pos": n if self.n_pos is None else self.n_pos,
                  "is_non_causal": int(self.is_non_causal)}
        if self.positions is None:
            return fields
        places = np.ascontiguousarray(self.positions, np.int32)
        if places.shape not in ((n,), (4, n)):
            raise errors.InvalidArgumentError(f"positions of shape {places.shape} for {n} rows; they are ({n},) or (4, {n})")
        return {**fields, "tokens": places.reshape(-1), "height": 4 if places.ndim == 2 else 1}
