"""Small pieces of native memory, so that no other package needs ctypes."""
from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .. import errors
from . import capi, load

S = TypeVar("S", bound=ctypes.Structure)

ref = ctypes.byref
MASK64 = 0xFFFF_FFFF_FFFF_FFFF


def new(kind: type[S], /, **fields: Any) -> S:
    """A struct of the ABI with ``struct_size`` set."""
    return kind(struct_size=ctypes.sizeof(kind), **fields)


def size() -> ctypes.c_size_t:
    return ctypes.c_size_t()


def i32() -> ctypes.c_int32:
    return ctypes.c_int32()


def u32() -> ctypes.c_uint32:
    return ctypes.c_uint32()


def u64() -> ctypes.c_uint64:
    return ctypes.c_uint64()


def u64_array(values: Sequence[int]) -> Any:
    return (ctypes.c_uint64 * len(values))(*values)


def u64_room(n: int) -> Any:
    return (ctypes.c_uint64 * n)()


def u32_room(n: int) -> Any:
    return (ctypes.c_uint32 * n)()


def flat(values: Sequence[int] | npt.NDArray[Any], wanted: str = "a flat sequence of token ids") -> npt.NDArray[Any]:
    """A flat sequence of whole numbers, of any width, or InvalidArgumentError that says what was ``wanted``."""
    try:
        array = np.asarray(values)
    except ValueError as lengths:  # lists of several lengths
        raise errors.InvalidArgumentError(f"{wanted} is needed: {lengths}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise errors.InvalidArgumentError(f"{wanted} is needed; this has shape {array.shape} and is of {array.dtype}")
    return array


def known_ids(values: Sequence[int] | npt.NDArray[Any], n_vocab: int, wanted: str) -> npt.NDArray[np.int32]:
    """Ids of a vocabulary's tokens, or InvalidArgumentError."""
    array = flat(values, wanted)
    if array.size and (array.min() < 0 or array.max() >= n_vocab):
        raise errors.InvalidArgumentError(f"a token id is outside the vocabulary of {n_vocab}")
    return np.ascontiguousarray(array, np.int32)


def ids(values: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Token ids for the library to read, or InvalidArgumentError: a number it would have to cut to 32 bits is another token."""
    array = flat(values)
    if array.size and (array.min() < -0x8000_0000 or array.max() > 0x7FFF_FFFF):
        at = int(np.flatnonzero((array < -0x8000_0000) | (array > 0x7FFF_FFFF))[0])
        error = errors.InvalidArgumentError(f"{array[at]} at {at} is no token id")
        error.index = at
        raise error
    return np.ascontiguousarray(array, np.int32)


def i32_array(values: Sequence[int] | npt.NDArray[Any]) -> Any:
    checked = ids(values)
    return (ctypes.c_int32 * checked.size)(*checked.tolist())


def i32_room(n: int) -> Any:
    return (ctypes.c_int32 * n)()


def f32_array(values: Any) -> Any:
    """Floats for the library to read; a float32 array is passed as it lies."""
    if isinstance(values, np.ndarray):
        return values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return (ctypes.c_float * len(values))(*values)


def _as_it_lies(kind: Any) -> Any:
    def of(values: npt.NDArray[Any]) -> Any:
        return values.ctypes.data_as(ctypes.POINTER(kind))

    return of


# Arrays of the matching type, passed without a copy; the caller keeps them alive through the call.
i32_of, u32_of, u8_of = _as_it_lies(ctypes.c_int32), _as_it_lies(ctypes.c_uint32), _as_it_lies(ctypes.c_uint8)


def u8_room(n: int) -> Any:
    return (ctypes.c_uint8 * n)()


def floats(data: Any, n: int, owner: object) -> npt.NDArray[np.float32]:
    """A read-only numpy view of ``n`` floats the library owns; it keeps ``owner`` from being collected, not from being closed."""
    memory = ctypes.cast(data, ctypes.POINTER(ctypes.c_float * n)).contents
    memory.owner = owner  # type: ignore[attr-defined]
    array: npt.NDArray[np.float32] = np.frombuffer(memory, np.float32)  # type: ignore[call-overload]
    array.flags.writeable = False
    return array


class Runs:
    """The runs of one prefill, which goes dispatch by dispatch: keeps the tokens alive and moves on past what landed."""

    def __init__(self, runs: Iterable[tuple[int, npt.NDArray[np.int32]]]) -> None:
        self._kept = [(branch, tokens) for branch, tokens in runs]
        self.n = len(self._kept)
        self.array = (capi.pyl_run * self.n)()
        self.total = sum(len(tokens) for _, tokens in self._kept)
        self.landed = 0
        for run, (branch, tokens) in zip(self.array, self._kept, strict=True):
            run.struct_size, run.branch, run.n_tokens = ctypes.sizeof(capi.pyl_run), branch, len(tokens)
            run.tokens = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))

    @property
    def n_landed(self) -> list[int]:
        """Tokens of each run that the last call landed."""
        return [run.n_landed for run in self.array]

    def advance(self) -> None:
        """Take what the last call landed off the front of each run."""
        for run in self.array:
            if run.n_landed:
                run.tokens = ctypes.cast(ctypes.addressof(run.tokens.contents) + 4 * run.n_landed, ctypes.POINTER(ctypes.c_int32))
                run.n_tokens -= run.n_landed
                self.landed += run.n_landed
                run.n_landed = 0


class Parts:
    """The parts of a prompt as the kernel reads them; keeps alive what they point to."""

    def __init__(self, parts: Sequence[dict[str, Any]]) -> None:
        self.n = len(parts)
        self.array = (capi.pyl_part * self.n)()
        self._kept: list[Any] = []
        for row, fields in zip(self.array, parts, strict=True):
            row.struct_size = ctypes.sizeof(capi.pyl_part)
            for name, value in fields.items():
                setattr(row, name, self._pointer(value))

    def _pointer(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            self._kept.append(value)
            kinds: dict[str, Any] = {"u1": ctypes.c_uint8, "i4": ctypes.c_int32, "f4": ctypes.c_float}
            kind = kinds[value.dtype.str[1:]]
            return value.ctypes.data_as(ctypes.POINTER(kind))
        if isinstance(value, bytes):
            self._kept.append(value)
        return value


class Items:
    """Prompts on their way into branches."""

    _NOT_RUN = 1

    def __init__(self, pairs: Sequence[tuple[int, Any]]) -> None:
        self.n = len(pairs)
        self.array = (capi.pyl_item * self.n)()
        for item, (branch, prompt) in zip(self.array, pairs, strict=True):
            item.struct_size, item.branch, item.prompt, item.code = ctypes.sizeof(capi.pyl_item), branch, prompt, self._NOT_RUN

    @property
    def has_run(self) -> bool:
        return all(item.code != self._NOT_RUN for item in self.array)

    def results(self) -> list[tuple[int, str, int, int, int, int]]:
        """For each: code, message, state, engine's code, segments and cells that landed."""
        text = load.library()
        out = []
        for item in self.array:
            message = ctypes.string_at(text.pyl_text_data(item.message), text.pyl_text_size(item.message)).decode("utf-8", "replace") if item.message else ""
            out.append((item.code, message, item.state, item.engine_rc, item.n_segments_landed, item.n_cells_landed))
        return out

    def free(self) -> None:
        for item in self.array:
            load.library().pyl_text_free(item.message)  # first: what the field gives is a view of it, and empty with it
            item.message = None
