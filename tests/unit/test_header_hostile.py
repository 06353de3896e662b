"""Thousands of damaged headers, and one of a model of 700 GB: one family of errors, memory bounded by the file, sums that are exact.

``PYLLOYAL_HEADER_MUTANTS=20000`` makes all of them; every mutant is named by its base and number and is the same each time.
"""
from __future__ import annotations

import collections
import functools
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pylloyal.capacity.architectures import ARCHITECTURES
from pylloyal.capacity.geometry import geometry
from pylloyal.capacity.header import GGML_TYPES, Header
from pylloyal.capacity.memory import kept
from pylloyal.capacity.settings import Settings, context
from pylloyal.errors import InvalidArgumentError, MetadataError

N_MUTANTS = int(os.environ.get("PYLLOYAL_HEADER_MUTANTS", "3000"))


# ------------------------------------------------------------------------------------------------------------- files with a map of their fields

@dataclass
class File:
    """A GGUF file being written, and where its fields of each kind are: (place, width)."""

    order: str = "<"
    version: int = 3
    body: bytearray = field(default_factory=bytearray)
    fields: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: collections.defaultdict(list))

    def put(self, kind: str, code: str, value: Any) -> None:
        raw = struct.pack(self.order + code, value)
        self.fields[kind].append((len(self.body), len(raw)))
        self.body += raw

    def text(self, value: str) -> None:
        raw = value.encode()
        self.put("length", "Q", len(raw))
        self.fields["text"].append((len(self.body), len(raw)))
        self.body += raw

    def value(self, item: Any) -> None:
        if isinstance(item, list):
            self.put("type", "I", 9)
            inner = 8 if isinstance(item[0], str) else 7 if isinstance(item[0], bool) else 5
            self.put("type", "I", inner)
            self.put("length", "Q", len(item))
            for one in item:
                if inner == 8:
                    self.text(one)
                else:
                    self.put("value", "B" if inner == 7 else "i", one)
        elif isinstance(item, str):
            self.put("type", "I", 8)
            self.text(item)
        else:
            kind, code = (7, "B") if isinstance(item, bool) else (6, "f") if isinstance(item, float) else (4, "I")
            self.put("type", "I", kind)
            self.put("value", code, item)


Tensors = Sequence[tuple[str, tuple[int, ...], int]]  # name, shape, type


def write_file(metadata: Mapping[str, Any], tensors: Tensors, order: str = "<", version: int = 3) -> tuple[File, int]:
    """The header, and the size of the whole file."""
    file = File(order, version)
    file.body += b"GGUF"
    file.put("value", "I", version)
    file.put("length", "Q", len(tensors))
    file.put("length", "Q", len(metadata))
    for key, item in metadata.items():
        file.text(key)
        file.value(item)
    offset = 0
    for name, shape, kind in tensors:
        file.text(name)
        file.put("length", "I", len(shape))
        for size in shape:
            file.put("length", "Q", size)
        file.put("type", "I", kind)
        file.put("length", "Q", offset)
        offset += -(-n_bytes(shape, kind) // 32) * 32
    return file, -(-len(file.body) // 32) * 32 + offset


def n_bytes(shape: Sequence[int], kind: int) -> int:
    _, block, block_bytes = GGML_TYPES[kind]
    n = 1
    for size in shape:
        n *= size
    assert shape[0] % block == 0
    return n // block * block_bytes


def everything(architecture: str) -> dict[str, Any]:
    """Every key that any architecture's memory depends on, so that each finds its own."""
    n = 6
    keys: dict[str, Any] = {
        "context_length": 4096, "embedding_length": 64, "features_length": 64, "block_count": n, "feed_forward_length": [0, 8, 8, 8, 8, 0], "attention.head_count": 4,
        "attention.head_count_kv": [2, 0, 2, 2, 2, 2], "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 32, "attention.value_length_swa": 32,
        "attention.sliding_window": 512, "attention.sliding_window_pattern": [True, False, True, True, False, True], "attention.causal": True, "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.key_length_mla": 16, "attention.value_length_mla": 16, "attention.kv_lora_rank": 32, "attention.shared_kv_layers": 1, "attention.indexer.key_length": 32,
        "attention.indexer.top_k": 8, "attention.indexer.types": [1, 0, 1, 1, 0, 1], "attention.compress_ratios": [4, 128, 4, 128, 0, 4], "hyper_connection.count": 2,
        "leading_dense_block_count": 1, "full_attention_interval": 3, "ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.group_count": 1, "ssm.time_step_rank": 4,
        "wkv.head_size": 16, "token_shift_count": 2, "shortconv.l_cache": 3, "kda.head_dim": 16, "num_loops": 2, "ple.layers": [1], "ple.conv_kernel": 4, "ple.ngram_size": 3, "nextn_predict_layers": 0,
    }
    return {"general.architecture": architecture, "general.alignment": 32, **{f"{architecture}.{key}": value for key, value in keys.items()},
            "tokenizer.ggml.tokens": [f"token {i}" for i in range(40)], "tokenizer.ggml.scores": [0, 1, 2], "vocab_size": 40}


TENSORS: Tensors = [("token_embd.weight", (64, 40), 1), *((f"blk.{i}.attn_q.weight", (64, 8), 8) for i in range(6)), ("blk.6.nextn.eh_proj.weight", (32,), 0), ("output.weight", (256, 2), 12)]
NAMES = sorted(ARCHITECTURES)


@functools.cache
def base(number: int) -> list[tuple[File, int]]:
    """The files of one base: another architecture each, big-endian ones, version 2, and models split into three."""
    return files_of(everything(NAMES[number % len(NAMES)]), number)


def files_of(metadata: Mapping[str, Any], number: int, rng: random.Random | None = None) -> list[tuple[File, int]]:
    """The files that hold these keys; with ``rng``, one of them may tell something else of the split."""
    if number % 5 == 3:
        parts = [TENSORS[:0], TENSORS[:5], TENSORS[5:]]  # the first has none, as published ones often do
        told: list[dict[str, Any]] = [{"split.no": i, "split.count": 3, "split.tensors.count": len(TENSORS)} for i in range(3)]
        if rng and rng.random() < 0.7:
            told[rng.randrange(3)][rng.choice(list(told[0]))] = nonsense(rng)
        return [write_file({**(metadata if i == 0 else {}), **told[i]}, part) for i, part in enumerate(parts)]
    if number % 7 < 2:  # and an array, of texts or of numbers, is the last thing in the file
        last = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores")[number % 7]
        metadata = {**{key: value for key, value in metadata.items() if key != last}, last: metadata.get(last, 0)}
    return [write_file(metadata, TENSORS if number % 7 >= 2 else [], ">" if number % 5 == 1 else "<", 2 if number % 5 == 2 else 3)]


# ------------------------------------------------------------------------------------------------------------- damage

ODD = (0, 1, 2, 3, 7, 31, 32, 33, 255, 256, 511, 512, 513, 65535, 65536, 1 << 20, (1 << 20) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def overwrite(rng: random.Random, file: File, kind: str, values: Sequence[int]) -> bytearray:
    body = bytearray(file.body)
    for at, width in rng.sample(file.fields[kind], min(len(file.fields[kind]), rng.choice((1, 1, 1, 2, 4)))):
        here = int.from_bytes(body[at : at + width], "little" if file.order == "<" else "big")
        new = rng.choice((*values, here + 1, here - 1, here * 2, len(body), len(body) - at)) % (1 << 8 * width)
        body[at : at + width] = new.to_bytes(width, "little" if file.order == "<" else "big")
    return body


def flip(rng: random.Random, file: File) -> bytearray:
    body = bytearray(file.body)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    return body


def splice(rng: random.Random, file: File) -> bytearray:
    other = base(rng.randrange(len(NAMES)))[0][0].body
    start, at = rng.randrange(len(other)), rng.randrange(len(file.body))
    piece = other[start : start + rng.choice((1, 8, 24, 200, 2000))]
    return bytearray(file.body[:at] + piece + file.body[at + rng.choice((0, len(piece), 8)) :])


def again(rng: random.Random, file: File) -> bytearray:
    """A piece of itself twice, or not at all."""
    start = rng.randrange(len(file.body))
    end = min(len(file.body), start + rng.choice((1, 8, 40, 400)))
    return bytearray(file.body[:start] + file.body[start:end] * rng.choice((0, 2, 3)) + file.body[end:])


def words(rng: random.Random, file: File) -> bytearray:
    """Names of keys, architectures and tensors, changed in place or for another's of the same length."""
    body = bytearray(file.body)
    at, n = rng.choice([place for place in file.fields["text"] if place[1]])
    fits = [body[a : a + m] for a, m in file.fields["text"] if m == n] + [name.encode() for name in NAMES if len(name) == n]
    body[at : at + n] = rng.choice([*fits, rng.randbytes(n), b"\xff" * n, b"\x00" * n])
    return body


DAMAGE: list[Callable[[random.Random, File], bytearray]] = [
    flip, splice, again, words,
    lambda rng, file: file.body[: rng.randrange(len(file.body))],
    lambda rng, file: overwrite(rng, file, "length", ODD),
    lambda rng, file: overwrite(rng, file, "type", (*range(14), 39, 40, 255, (1 << 32) - 1)),
    lambda rng, file: overwrite(rng, file, "value", ODD),
    lambda rng, file: overwrite(rng, file, "value", ODD),
]


def nonsense(rng: random.Random) -> Any:
    n = rng.choice((1, 2, 5, 6, 7, 40, 512, 513, 600))
    return rng.choice((
        rng.choice(ODD) % (1 << 32), rng.choice(ODD) % (1 << 32), 0, 1.5, float("nan"), float("inf"), True, "", "llama", "a text of no use", [rng.choice((0, 1, 4, -1, 2**31 - 1))] * n,
        [rng.randrange(-2, 9) for _ in range(n)], [True, False] * n, ["a"] * n, [-(2**31)] * 6))


def twist(rng: random.Random, metadata: dict[str, Any]) -> dict[str, Any]:
    """A header without a flaw that says nonsense: values of other kinds and sizes, keys that are gone or another architecture's."""
    out = dict(metadata)
    for key in rng.sample(list(out), rng.choice((1, 1, 2, 5))):
        del out[key]
        if rng.random() < 0.85:
            out[key] = nonsense(rng)
    if rng.random() < 0.1:
        out["general.architecture"] = rng.choice((*NAMES, "nonsense", "", "llama\x00"))
    return out


def write_mutant(folder: Path, number: int) -> tuple[Path, int]:
    """Damage one file of a base, what it says, or which files there are. Returns the first file, and the bytes of the headers."""
    rng = random.Random(number)
    which = number // len(NAMES) * 7 + number  # so that every architecture meets every kind of damage and of file
    files = base(which % (5 * len(NAMES)))
    if number % 3 == 0:
        files = files_of(twist(rng, everything(NAMES[which % len(NAMES)])), which, rng)
    bodies = [(bytes(file.body), size) for file, size in files]
    victim = rng.randrange(len(files))
    if number % 3:
        body = rng.choice(DAMAGE)(rng, files[victim][0])
        bodies[victim] = bytes(body), rng.choice((bodies[victim][1], bodies[victim][1], len(body)))
    paths = [folder / "m.gguf"] if len(files) == 1 else [folder / f"m-{i:05}-of-00003.gguf" for i in range(1, 4)]
    kind = rng.randrange(12) if len(files) > 1 else -1
    if kind == 0:
        rng.shuffle(bodies)
    elif kind == 1:
        bodies[2] = bodies[1]
    for path, (whole, size) in zip(paths, bodies, strict=True):
        with open(path, "wb") as out:
            out.write(whole)
            out.truncate(max(size, len(whole)) if size != len(whole) else size)
    if kind == 2:
        paths[rng.randrange(1, 3)].unlink()
    return paths[0], sum(len(whole) for whole, _ in bodies)


# ------------------------------------------------------------------------------------------------------------- what comes of it

def read_all(path: Path) -> str:
    """Open it, look at everything it holds, and ask what its memory is: how far that went."""
    try:
        header = Header(path)
    except MetadataError:
        return "refused"
    for key in header:
        value = header[key]
        if not isinstance(value, int | float | str):
            assert len(list(value)) == len(value)
    assert header.tensor_bytes >= sum(tensor.n_bytes for tensor in header.tensors)
    assert len(header.digest()) == 32
    try:
        shape = geometry(header)
    except MetadataError:
        return "no geometry"
    for settings in (Settings(), Settings(swa_full=False, unified=False, flash_attn=False, n_branches=3, type_k="q8_0")):
        try:
            made = context(shape, 0, settings)
        except InvalidArgumentError:
            return "no context"
        if not settings.conflicts(shape):
            assert all(group.bytes >= 0 for group in kept(shape, made, settings))
    return "whole"


def test_the_bases_are_fine(tmp_path: Path) -> None:
    """Without damage, files open in every order, version and number, and the keys suffice for nearly every architecture."""
    told = collections.Counter()
    for number in range(len(NAMES)):
        files = base(number)
        paths = [tmp_path / f"{number}.gguf"] if len(files) == 1 else [tmp_path / f"{number}-{i:05}-of-00003.gguf" for i in range(1, 4)]
        for path, (file, size) in zip(paths, files, strict=True):
            path.write_bytes(bytes(file.body))
            os.truncate(path, size)
        header = Header(paths[0])
        assert header["general.architecture"] == NAMES[number] and len(header.tensors) in (0, len(TENSORS))
        told[read_all(paths[0])] += 1
    assert told["whole"] > 0.9 * len(NAMES), told


@pytest.mark.slow
def test_mutants(tmp_path: Path) -> None:
    """No mutant raises anything but MetadataError, and none makes the reader take much more memory than its headers have bytes."""
    told = collections.Counter()
    for number in range(N_MUTANTS):
        for old in tmp_path.iterdir():
            old.unlink()
        path, n_header = write_mutant(tmp_path, number)
        try:
            depth, peak = traced(lambda path=path: read_all(path))
            for _ in range(3):  # what another thread has for a moment is counted too; what the reader takes, it takes every time
                if peak >= 16 * n_header + (1 << 15):
                    peak = min(peak, traced(lambda path=path: read_all(path))[1])
        except Exception as error:
            raise AssertionError(f"mutant {number}") from error
        assert peak < 16 * n_header + (1 << 15), f"mutant {number}: {peak:,} bytes for a header of {n_header:,}"
        told[depth] += 1
    assert sum(told.values()) == N_MUTANTS
    assert min(told[depth] for depth in ("refused", "no geometry", "whole")) > N_MUTANTS // 10, told  # damage of every depth


def traced(work: Callable[[], str]) -> tuple[str, int]:
    """What comes of it, and the most bytes that Python had for it."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------------------------- size

@pytest.fixture(scope="module")
def large() -> tuple[File, int]:
    """A vocabulary of 20,000 and 3,000 tensors: a header of half a MB."""
    metadata = {**everything("llama"), "tokenizer.ggml.tokens": [f"t{i}" for i in range(20_000)], "tokenizer.ggml.token_type": [1, 3] * 10_000}
    return write_file(metadata, [(f"blk.{i}", (32,), 0) for i in range(3_000)])


def test_memory_is_for_tensors_and_not_for_words(large: tuple[File, int], tmp_path: Path) -> None:
    file, size = large
    path = tmp_path / "large.gguf"
    path.write_bytes(file.body)
    os.truncate(path, size)
    depth, peak = traced(lambda: str(geometry(Header(path)).n_vocab))
    assert depth == "20000"
    assert peak < 3_000 * 700  # a tensor's name, shape and numbers
    only_words = write_file({**everything("llama"), "tokenizer.ggml.tokens": [f"t{i}" for i in range(20_000)]}, TENSORS)
    path.write_bytes(only_words[0].body)
    os.truncate(path, only_words[1])
    assert traced(lambda: str(geometry(Header(path)).n_vocab))[1] < 1 << 17


def test_damage_to_large_headers(large: tuple[File, int], tmp_path: Path) -> None:
    """Lengths and counts of a file that could hold a lot: what is made stays in proportion to it."""
    path = tmp_path / "damaged.gguf"
    told = collections.Counter()
    for number in range(12):
        rng = random.Random(f"large {number}")
        body = overwrite(rng, large[0], rng.choice(("length", "type", "value")), ODD) if number % 3 else flip(rng, large[0])
        path.write_bytes(body)
        os.truncate(path, max(large[1], len(body)))
        depth, peak = traced(lambda: read_all(path))
        assert peak < 10 * len(body), (number, depth, f"{peak:,} bytes for {len(body):,}")
        told[depth] += 1
    assert len(told) > 1, told


N_FILES = 46


@pytest.mark.slow
def test_a_model_of_700_gb_in_46_files(tmp_path: Path) -> None:
    """A mixture of experts as it is published: everything is summed to the byte, and nothing but headers is read."""
    rng = random.Random(46)
    keys = {"context_length": 131072, "embedding_length": 7168, "block_count": 61, "attention.head_count": 128, "attention.head_count_kv": 1, "attention.key_length": 576, "attention.value_length": 512,
            "attention.key_length_mla": 192, "attention.value_length_mla": 128, "attention.kv_lora_rank": 512, "feed_forward_length": 18432, "expert_count": 256}
    metadata = {"general.architecture": "deepseek2", **{f"deepseek2.{key}": value for key, value in keys.items()}, "tokenizer.ggml.tokens": [f"token {i}" for i in range(129_280)]}
    tensors = [("token_embd.weight", (7168, 129_280), 8), ("output.weight", (7168, 129_280), 8)]
    for i in range(61):
        tensors += [(f"blk.{i}.attn_norm.weight", (7168,), 0), (f"blk.{i}.attn_kv_b.weight", (512, 32768), 8), (f"blk.{i}.attn_output.weight", (16384, 7168), 8)]
        tensors += [(f"blk.{i}.ffn_{name}_exps.weight", shape, rng.choice((8, 8, 8, 14))) for name, shape in (("gate", (7168, 2048, 256)), ("up", (7168, 2048, 256)), ("down", (2048, 7168, 256)))]
    per_file = -(-len(tensors) // N_FILES)
    sizes = []
    for i in range(N_FILES):
        part = tensors[i * per_file : (i + 1) * per_file]
        split = {"split.no": i, "split.count": N_FILES, "split.tensors.count": len(tensors)}
        file, size = write_file({**metadata, **split} if i == 0 else split, part)
        path = tmp_path / f"large-{i + 1:05}-of-{N_FILES:05}.gguf"
        path.write_bytes(file.body)
        try:
            os.truncate(path, size)  # sparse: nothing is written
        except OSError as error:
            pytest.skip(f"this file system takes no sparse file of {size:,} bytes: {error}")
        sizes.append(size)
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) < 16 << 20, "the files are not sparse"
    first = tmp_path / f"large-00001-of-{N_FILES:05}.gguf"

    def read() -> str:
        header = Header(first)
        assert (len(header.paths), len(header.tensors), header.file_bytes) == (N_FILES, len(tensors), sum(sizes))
        exact = [n_bytes(shape, kind) for _, shape, kind in tensors]
        assert [tensor.n_bytes for tensor in header.tensors] == exact
        assert header.tensor_bytes == sum(-(-n // 32) * 32 for n in exact)
        assert 700e9 < sum(exact) < 750e9
        shape = geometry(header)
        assert (shape.n_vocab, shape.is_mla, sum(len(group.layers) for group in shape.groups)) == (129_280, True, 61)
        return "whole"

    assert traced(read)[1] < 2 << 20
    (tmp_path / "large-00007-of-00046.gguf").rename(tmp_path / "kept")
    with pytest.raises(MetadataError, match="large-00007-of-00046.gguf is missing"):
        Header(first)
    (tmp_path / "large-00008-of-00046.gguf").rename(tmp_path / "large-00007-of-00046.gguf")
    (tmp_path / "kept").rename(tmp_path / "large-00008-of-00046.gguf")
    with pytest.raises(MetadataError, match="file 8 of a split model under the name of file 7"):
        Header(first)


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
@pytest.mark.parametrize("value", [2**32 - 1, 1.0, True, "two", [2, 2]], ids=str)
def test_splits_that_cannot_count(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    for number, where in enumerate((path, tmp_path / "m-00002-of-00002.gguf")):
        metadata: dict[str, Any] = {"split.no": number, "split.count": 2, "split.tensors.count": 1}
        if number == 0:
            metadata[key] = value
        file, size = write_file(metadata, [("t", (32,), 0)] if number else [])
        where.write_bytes(file.body)
        os.truncate(where, size)
    with pytest.raises(MetadataError):
        Header(path)


def test_a_tensor_without_dimensions_is_one_number(tmp_path: Path) -> None:
    """As it is to the engine; a quantised one has no block to be in."""
    for kind, n in ((0, 4), (1, 2), (8, None)):
        file = File()
        file.body += struct.pack("<4sIQQ", b"GGUF", 3, 1, 0)
        file.text("scalar")
        file.body += struct.pack("<IIQ", 0, kind, 0) + bytes(64)
        path = tmp_path / f"{kind}.gguf"
        path.write_bytes(file.body)
        if n is None:
            with pytest.raises(MetadataError, match="shape"):
                Header(path)
        else:
            assert [(tensor.shape, tensor.n_bytes) for tensor in Header(path).tensors] == [((), n)]


def test_texts_that_are_longer_than_addresses(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    path.write_bytes(struct.pack("<4sIQQQ1sIIQQQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 8, 2, 2**64 - 1, 1))
    with pytest.raises(MetadataError, match="runs past the end"):
        Header(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A pipe that nobody writes to would be waited for without end, so a process of its own asks."""
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    code = "import sys; from pylloyal.capacity.header import Header\ntry: Header(sys.argv[1])\nexcept Exception as error: print(type(error).__name__, error)"
    for path in (pipe, tmp_path, Path(os.devnull)):
        out = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60, check=True).stdout
        assert out == f"MetadataError {path}: not a file\n"
    with pytest.raises(FileNotFoundError):
        Header(tmp_path / "nowhere.gguf")
