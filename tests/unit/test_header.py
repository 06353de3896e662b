"""The reader of GGUF headers: what it says is what the gguf package says, and no damage gets past it or costs more than the file."""
from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import pytest
import tiny_models

from pylloyal.capacity.header import GGML_TYPES, Header
from pylloyal.errors import MetadataError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_models.write_all(tmp_path_factory.mktemp("headers"), "q8_0")


def test_types_are_those_of_the_format() -> None:
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        assert GGML_TYPES[int(kind)][1:] == tuple(sizes), kind


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-granitehybrid", "mmproj-tiny-qwen3vl"])
def test_says_what_the_gguf_package_says(files: dict[str, Path], name: str) -> None:
    header, other = Header(files[name]), gguf.GGUFReader(files[name])
    assert set(header) == {key for key in other.fields if not key.startswith("GGUF.")}
    for key in header:
        value = header[key]
        assert (list(value) if not isinstance(value, str | int | float | bool) else value) == other.fields[key].contents()
    assert [(t.name, t.shape, t.n_bytes) for t in header.tensors] == [(t.name, tuple(int(x) for x in t.shape), int(t.n_bytes)) for t in other.tensors]
    assert header.file_bytes == files[name].stat().st_size
    assert header.digest() == Header(files[name]).digest() != Header(files["tiny-mamba"]).digest()


def test_arrays_are_read_where_they_lie(files: dict[str, Path]) -> None:
    tokens = Header(files["tiny-llama"])["tokenizer.ggml.tokens"]
    assert (len(tokens), tokens[3], tokens[-1], tokens[1:3]) == (512, list(tokens)[3], list(tokens)[511], list(tokens)[1:3])
    with pytest.raises(IndexError):
        tokens[512]


def test_every_truncation_and_many_damages_are_told(files: dict[str, Path], tmp_path: Path) -> None:
    whole = files["tiny-llama"].read_bytes()
    path = tmp_path / "broken.gguf"
    for n in (*range(0, 200, 7), *range(200, 20_000, 977), len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(MetadataError, match="broken"):
            Header(path)
    for at in range(0, 400, 3):
        path.write_bytes(whole[:at] + b"\xff\xff\xff\xff" + whole[at + 4 :])
        with contextlib.suppress(MetadataError):  # some damage is not to be seen; none raises anything else
            Header(path)


@pytest.mark.parametrize(("body", "word"), [
    (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**40), "cannot be"),
    (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
    (struct.pack("<4sIQQ", b"GGML", 3, 0, 0), "not a GGUF"),
    (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**62), "text of"),
    (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 4, 2**60), "more than the file"),
    (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 9, 1), "type 9"),
    (struct.pack("<4sIQQQ1sIIQ1sII", b"GGUF", 3, 0, 2, 1, b"a", 4, 1, 1, b"a", 4, 1), "twice"),
])
def test_hostile_headers(tmp_path: Path, body: bytes, word: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(body)
    with pytest.raises(MetadataError, match=word):
        Header(path)


def test_big_endian_headers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    path.write_bytes(struct.pack(">4sIQQQ1sII", b"GGUF", 3, 0, 1, 1, b"a", 4, 77))
    assert dict(Header(path)) == {"a": 77}
