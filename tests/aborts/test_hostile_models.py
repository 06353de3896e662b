"""Model files that lie. The engine asserts what a file must be, and an assertion ends the process: here every one is a typed error, and
the process goes on."""
from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from _tiny_specs import SPECS
from headers import write_header

import pylloyal
from pylloyal import errors
from pylloyal.capacity.header import _SCALARS, _Reader

LLAMA: dict[str, Any] = {
    "general.architecture": "llama", "llama.context_length": 512, "llama.embedding_length": 64, "llama.block_count": 2, "llama.feed_forward_length": 128, "llama.attention.head_count": 4,
    "llama.rope.dimension_count": 16, "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "none", "llama.vocab_size": 32}
# What to put in, and the assertion it trips (src/llama-model.cpp, load_hparams).
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"llama.block_count": 0}, "n_layer_all > 0"),
    "too many layers": ({"llama.block_count": 5000}, "n_layer_all <= LLAMA_MAX_LAYERS"),
    "more draft layers than layers": ({"llama.nextn_predict_layers": 9}, "n_layer_nextn <="),
    "too many experts": ({"llama.expert_count": 5000, "llama.expert_used_count": 2}, "n_expert <="),
    "more experts used than there are": ({"llama.expert_count": 2, "llama.expert_used_count": 4}, "n_expert_used_max <="),
    "experts nobody uses": ({"llama.expert_count": 2}, "n_expert_used_max > 0"),
    "experts in odd groups": ({"llama.expert_count": 4, "llama.expert_used_count": 2, "llama.expert_group_count": 3}, "n_expert_groups"),
    "a way to scale positions that is none": ({"llama.rope.scaling.type": "nonsense"}, "rope_scaling_type_train"),
}


@pytest.mark.parametrize("name", LIES)
def test_what_the_loader_asserts_is_an_error(name: str, tmp_path: Path) -> None:
    values, words = LIES[name]
    write_header(tmp_path / "lies.gguf", LLAMA | values)
    before = pylloyal.live_objects()
    with pytest.raises(errors.FormatError) as caught:
        pylloyal.Model(tmp_path / "lies.gguf")
    assert words in str(caught.value) and str(tmp_path / "lies.gguf") in str(caught.value)
    assert pylloyal.live_objects() == before


def test_what_the_caches_assert_is_an_error(tmp_path: Path) -> None:
    """Layers that share the cells of one that has none: the file loads, and no store can be opened on it."""
    path = tiny_models.write(tmp_path / "gemma4.gguf", "tiny-gemma4")
    raw = bytearray(path.read_bytes())
    at = raw.index(b"gemma4.attention.shared_kv_layers") + len(b"gemma4.attention.shared_kv_layers") + 4
    assert struct.unpack_from("<I", raw, at) == (2,)
    struct.pack_into("<I", raw, at, 3)
    path.write_bytes(raw)
    with pylloyal.Model(path) as model:
        before = pylloyal.live_objects()
        for _ in range(2):
            with pytest.raises(errors.UnsupportedOperationError, match="n_layer_kv_from_start"):
                model.store(n_ctx=256, n_threads=1)
        assert pylloyal.live_objects() == before


def test_what_is_divided_by_is_not_zero(tmp_path: Path) -> None:
    """That would be a signal, not an assertion."""
    path = tiny_models.write(tmp_path / "qwen35.gguf", "tiny-qwen35")
    raw = bytearray(path.read_bytes())
    at = next(at for key, _, at in scalars(raw) if key == "qwen35.full_attention_interval")
    struct.pack_into("<I", raw, at, 0)
    path.write_bytes(raw)
    with pytest.raises(errors.FormatError, match=r"qwen35\.full_attention_interval is 0"):
        pylloyal.Model(path)


def scalars(raw: bytes | bytearray) -> list[tuple[str, str, int]]:
    """(key, struct code, place) of every number in a header."""
    reader = _Reader(raw, "memory")
    reader.at = 8
    _, n_values = reader.take("Q"), reader.take("Q")
    out = []
    for _ in range(n_values):
        key, kind = reader.take_text(1 << 16), reader.take("I")
        if kind in _SCALARS:
            out.append((key, _SCALARS[kind], reader.at))
            reader.take(_SCALARS[kind])
        elif kind == 8:
            reader.skip_texts(1)
        else:
            inner, n = reader.take("I"), reader.take("Q")
            if inner == 8:
                reader.skip_texts(n)
            else:
                out += [(key, _SCALARS[inner], reader.at + i * struct.calcsize("=" + _SCALARS[inner])) for i in range(n)]
                reader.at += n * struct.calcsize("=" + _SCALARS[inner])
    return out


CHILD = """
import json, sys, pylloyal
from collections import Counter
told = Counter()
for line in sys.stdin:
    path = line.strip()
    print(path, file=sys.stderr, flush=True)
    try:
        with pylloyal.Model(path) as model:
            model.store(n_ctx=256, n_batch=32, n_branches=2, n_threads=1).close()
            told["opened"] += 1
    except pylloyal.PylloyalError as error:
        told[type(error).__name__] += 1
assert not any(pylloyal.live_objects()[kind] for kind in ("stores", "contexts", "weights")), pylloyal.live_objects()
print(json.dumps(told))
"""
N = int(os.environ.get("PYLLOYAL_HOSTILE_MODELS", "20"))


@pytest.mark.parametrize("name", [name for name in SPECS if not name.startswith("mmproj")])
def test_files_with_a_number_changed_open_or_are_refused(name: str, tmp_path: Path) -> None:
    """One to three numbers of the metadata replaced; nothing dies, in one process for all of them."""
    raw = tiny_models.write(tmp_path / "sound.gguf", name).read_bytes()
    places = [place for place in scalars(raw) if not place[0].startswith(("general.", "tokenizer."))]
    rng = random.Random(name)
    files = []
    for i in range(N):
        body = bytearray(raw)
        for key, code, at in rng.sample(places, rng.randint(1, min(3, len(places)))):
            del key
            old = struct.unpack_from("<" + code, raw, at)[0]
            if code in "fd":
                value = rng.choice((0.0, -1.0, 1e30, float("nan"), float("inf"), old * 2))
            elif code == "?":
                value = not old
            else:
                limit = (1 << 8 * struct.calcsize(code)) - 1
                value = rng.choice((0, 1, 2, 3, 5, 7, 255, 4096, old + 1, max(0, old - 1), old * 2, old // 2, 1 << 20)) & (limit if code.isupper() else limit >> 1)
            struct.pack_into("<" + code, body, at, value)
        files.append(tmp_path / f"{i}.gguf")
        files[-1].write_bytes(body)
    done = subprocess.run([sys.executable, "-c", CHILD], input="\n".join(map(str, files)), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr.splitlines()[-3:])
    told = json.loads(done.stdout.splitlines()[-1])
    assert sum(told.values()) == N
    assert set(told) <= {"opened", "FormatError", "UnsupportedOperationError", "InsufficientMemoryError", "InvalidArgumentError"}, told
