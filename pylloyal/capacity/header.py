"""GGUF headers: bounded, lazy, and safe to point at anything.

The file is mapped, and only its header is ever touched. Scalars are read as they come; strings and arrays are remembered by place and
read when somebody asks, so a vocabulary of a quarter of a million words costs a walk over their lengths, and no string is built.
"""
from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import MetadataError

# ggml type -> (name, numbers in a block, bytes of a block); tests hold it against the gguf package.
GGML_TYPES: Final[dict[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS, _MAX_NAME, _MAX_DIMS = 1 << 20, 1 << 16, 8

Value = int | float | bool | str


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file.

    Attributes
    ----------
    shape : tuple of int
        As the format has it, innermost first.
    type : str
    n_bytes : int
        Without padding.
    offset : int
        From the start of the tensor data.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    n_bytes: int
    offset: int


class Lazy(Sequence[Value]):
    """An array of a header, read where it lies when it is asked for."""

    def __init__(self, reader: _Reader, kind: int, n: int, at: int) -> None:
        self._reader, self._kind, self._n, self._at = reader, kind, n, at

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        if not -self._n <= index < self._n:
            raise IndexError(index)
        index %= self._n
        if self._kind == _STRING:
            for i, item in enumerate(self):
                if i == index:
                    return item
        code = _SCALARS[self._kind]
        return self._reader.number(code, self._at + index * struct.calcsize("=" + code))

    def __iter__(self) -> Iterator[Value]:
        if self._kind != _STRING:
            values: tuple[Value, ...] = struct.unpack_from(f"{self._reader.order}{self._n}{_SCALARS[self._kind]}", self._reader.data, self._at)
            yield from values
            return
        at = self._at
        for _ in range(self._n):
            text, at = self._reader.text(at)
            yield text


class _Reader:
    """A place in mapped memory; never reads past its end."""

    def __init__(self, data: Any, name: str) -> None:
        self.data, self.name, self.size, self.order, self.at = data, name, len(data), "<", 0

    def fail(self, what: str, at: int | None = None) -> MetadataError:
        return MetadataError(f"{self.name}: {what} (at byte {self.at if at is None else at:,})")

    def number(self, code: str, at: int) -> Any:
        form = self.order + code
        if at + struct.calcsize(form) > self.size:
            raise self.fail("the header ends in the middle of a number", at)
        return struct.unpack_from(form, self.data, at)[0]

    def take(self, code: str) -> Any:
        value = self.number(code, self.at)
        self.at += struct.calcsize(self.order + code)
        return value

    def text(self, at: int, most: int = 1 << 30) -> tuple[str, int]:
        n = self.number("Q", at)
        if n > most or at + 8 + n > self.size:
            raise self.fail(f"a text of {n:,} bytes", at)
        return bytes(self.data[at + 8 : at + 8 + n]).decode("utf-8", "replace"), at + 8 + n

    def take_text(self, most: int) -> str:
        text, self.at = self.text(self.at, most)
        return text

    def skip_texts(self, n: int) -> None:
        unpack, at, size, data = struct.Struct(self.order + "Q").unpack_from, self.at, self.size, self.data
        try:
            for _ in range(n):
                at += 8 + unpack(data, at)[0]
        except (struct.error, OverflowError):  # the latter for places no address can name
            raise self.fail("an array of texts runs past the end") from None
        if at > size:
            raise self.fail("an array of texts runs past the end")
        self.at = at


class Header(Mapping[str, Any]):
    """The header of a GGUF file, or of all files of a split model: a mapping of its metadata, and its tensors.

    Parameters
    ----------
    path : str or os.PathLike
        Of the file, or of the first one of a split model: the others are found by their names.

    Attributes
    ----------
    paths : tuple of Path
    file_bytes : int
        Of all files together.
    tensors : tuple of Tensor
        Of all files.

    Raises
    ------
    MetadataError
        Not GGUF, damaged, or hostile: nothing is trusted, and what is read is bounded by the size of the file.
    OSError
        It cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        first = Path(path)
        self._files = [_File(first)]
        for number, other in enumerate(_siblings(first, self._files[0]), 1):
            file = _File(other)
            if _count(file, "split.no") != number:
                raise MetadataError(f"{other}: file {_count(file, 'split.no') + 1} of a split model under the name of file {number + 1}")
            self._files.append(file)
        self._values = self._files[0].values
        self.paths = tuple(file.path for file in self._files)
        self.file_bytes = sum(file.size for file in self._files)
        self.tensors = tuple(tensor for file in self._files for tensor in file.tensors)
        names = {tensor.name for tensor in self.tensors}
        if len(names) != len(self.tensors):
            raise MetadataError(f"{first}: the same tensor stands twice")
        declared = _count(self._files[0], "split.tensors.count")
        if "split.tensors.count" in self and declared != len(self.tensors):
            raise MetadataError(f"{first}: {len(self.tensors)} tensors in {len(self._files)} files, and the header says {declared}")

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return self._files[0].reader.text(value.at)[0] if isinstance(value, _Text) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    @property
    def header_bytes(self) -> int:
        """Bytes of the first file before its tensors' data."""
        return self._files[0].data_at

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, each padded as the engine pads them."""
        return sum(-(-tensor.n_bytes // 32) * 32 for tensor in self.tensors)

    def digest(self) -> str:
        """A name for everything the headers say."""
        hasher = hashlib.blake2b(digest_size=16)
        for file in self._files:
            hasher.update(memoryview(file.reader.data)[: file.data_at])
        return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class _Text:
    at: int


class _File:
    def __init__(self, path: Path) -> None:
        self.path = path
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would be to wait for its writer
            raise MetadataError(f"{path}: not a file")
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size < 24:
                raise MetadataError(f"{path}: {self.size} bytes are too few for a GGUF file")
            self.reader = reader = _Reader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), str(path))
        if reader.data[:4] != b"GGUF":
            raise MetadataError(f'{path}: not a GGUF file (it does not begin with "GGUF")')
        reader.at = 4
        version = reader.take("I")
        if version & 0xFFFF == 0:
            reader.order, version = ">", struct.unpack(">I", struct.pack("<I", version))[0]
        if version not in (2, 3):
            raise MetadataError(f"{path}: GGUF version {version}; 2 and 3 are known")
        n_tensors, n_values = reader.take("Q"), reader.take("Q")
        if n_tensors > _MAX_ITEMS or n_values > _MAX_ITEMS:
            raise reader.fail(f"{n_tensors:,} tensors and {n_values:,} values cannot be")
        self.values: dict[str, Any] = {}
        for _ in range(n_values):
            key = reader.take_text(_MAX_NAME)
            if key in self.values:
                raise reader.fail(f"the key {key!r} stands twice")
            self.values[key] = self._value(key)
        self.tensors = [self._tensor() for _ in range(n_tensors)]
        alignment = self.values.get("general.alignment", 32)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1 or alignment > 1 << 20 or alignment & (alignment - 1):
            raise reader.fail(f"general.alignment is {alignment!r}")
        self.data_at = -(-reader.at // alignment) * alignment
        for tensor in self.tensors:
            if tensor.offset % alignment or self.data_at + tensor.offset + tensor.n_bytes > self.size:
                raise reader.fail(f"the tensor {tensor.name!r} lies outside the file: {tensor.n_bytes:,} bytes at {self.data_at + tensor.offset:,} of {self.size:,}")

    def _value(self, key: str) -> Any:
        reader = self.reader
        kind = reader.take("I")
        if kind in _SCALARS:
            return reader.take(_SCALARS[kind])
        if kind == _STRING:
            at = reader.at
            reader.skip_texts(1)
            return _Text(at)
        if kind != _ARRAY:
            raise reader.fail(f"the key {key!r} has a value of type {kind}")
        inner, n = reader.take("I"), reader.take("Q")
        if inner != _STRING and inner not in _SCALARS:
            raise reader.fail(f"the key {key!r} has an array of type {inner}")
        width = 8 if inner == _STRING else struct.calcsize("=" + _SCALARS[inner])
        if n > (reader.size - reader.at) // width:
            raise reader.fail(f"the key {key!r} has an array of {n:,}, more than the file could hold")
        out = Lazy(reader, inner, n, reader.at)
        if inner == _STRING:
            reader.skip_texts(n)
        else:
            reader.at += n * width
        return out

    def _tensor(self) -> Tensor:
        reader = self.reader
        name = reader.take_text(_MAX_NAME)
        n_dims = reader.take("I")
        if n_dims > _MAX_DIMS:
            raise reader.fail(f"the tensor {name!r} has {n_dims} dimensions")
        shape = tuple(reader.take("Q") for _ in range(n_dims))
        kind, offset = reader.take("I"), reader.take("Q")
        if kind not in GGML_TYPES:
            raise reader.fail(f"the tensor {name!r} is of type {kind}, which is not known here")
        label, block, block_bytes = GGML_TYPES[kind]
        n = 1
        for size in shape:
            n *= size
        if n == 0 or n >= 1 << 62 or (shape[0] if shape else 1) % block:  # without dimensions it is one number
            raise reader.fail(f"the tensor {name!r} of type {label} has the shape {list(shape)}")
        return Tensor(name, shape, label, n // block * block_bytes, offset)


def _count(file: _File, key: str) -> int:
    value = file.values.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise MetadataError(f"{file.path}: {key} is not a count")
    return value


def _siblings(first: Path, file: _File) -> list[Path]:
    """The other files of a split model."""
    count, number = _count(file, "split.count"), _count(file, "split.no")
    if count <= 1:
        return []
    if count > 10_000:
        raise MetadataError(f"{first}: a model split into {count:,} files")
    found = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", first.name)
    if not found or int(found[3]) != count or int(found[2]) != number + 1:
        raise MetadataError(f"{first}: file {number + 1} of {count} of a split model, but its name does not say so")
    if number != 0:
        raise MetadataError(f"{first}: file {number + 1} of a split model; name the first one, {found[1]}-00001-of-{count:05}.gguf")
    others = [first.with_name(f"{found[1]}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)]
    for other in others:
        if not other.is_file():
            raise MetadataError(f"{first}: split into {count} files, of which {other.name} is missing")
    return others
