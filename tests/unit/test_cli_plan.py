"""`pylloyal plan`: what it prints, for people and for programs, and how it ends. Without a native library, as on a machine that has none."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from headers import write_header
from test_plan import TENSORS, gemma3, llama

from pylloyal.cli.plan import bar


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cli") / "tiny.gguf"
    write_header(made, llama(), TENSORS)
    return made


def run(*words: str | Path) -> tuple[int, str, str]:
    env = {**os.environ, "PYLLOYAL_LIBRARY": "/nowhere/at/all.so"}
    done = subprocess.run([sys.executable, "-m", "pylloyal", "plan", *map(str, words)], capture_output=True, text=True, env=env, check=False)
    return done.returncode, done.stdout, done.stderr


def test_it_fits(path: Path) -> None:
    status, out, err = run(path, "--memory", "1GiB", "--context", "8k")
    assert (status, err) == (0, "")
    assert "fits: a context of 8,192 tokens" in out and "RAM, 1.00 GiB" in out
    for name in ("ceiling", "requested", "fits", "served", "hot", "planned", "weights", "KV cells", "compute", "headroom", "left over"):
        assert name in out
    assert "flash attention on\n" in out and "flash attention off\n" in run(path, "--no-flash-attn")[1]


def test_it_is_refused_with_what_would_help(path: Path) -> None:
    status, out, _ = run(path, "--memory", "48MiB", "--context", "32k")
    assert status == 2
    assert "refused:" in out and "what would help:" in out and "KV" in out.split("what would help:")[1]


@pytest.mark.parametrize("words", [["--nope"], ["--context", "lots"], ["--kv", "q3"], ["--memory", "24G"], ["--device", "CUDA0"], ["--branches", "many"], ["--gpu-layers", "3"], ["--branches", "0"]])
def test_errors_are_1(path: Path, words: list[str]) -> None:
    status, out, err = run(path, *words)
    assert (status, out) == (1, "") and err


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    for name in ("x.gguf", "y.gguf"):
        status, out, err = run(tmp_path / name)
        assert (status, out) == (1, "") and name in err


def read(*words: str | Path) -> dict[str, Any]:
    status, out, err = run(*words, "--json")
    assert status in (0, 2), err
    made: dict[str, Any] = json.loads(out)
    return made


def test_json_has_the_keys_others_rely_on(path: Path) -> None:
    made = read(path, "--memory", "1GiB", "--context", "1000", "--branches", "2")
    assert made["schema"] == 1 and made["verdict"] == "fits"
    assert list(made["windows"]) == ["ceiling", "requested", "fits", "served", "hot", "planned"]
    for window in made["windows"].values():
        assert list(window) == ["tokens", "bound", "counterfactual"]
    assert (made["windows"]["requested"]["tokens"], made["windows"]["served"]["tokens"]) == (1000, 1024)
    assert all(set(line) == {"name", "device", "bytes", "known"} and line["known"] in ("exact", "measured", "bound") for line in made["ledger"])
    assert sum(line["bytes"] for line in made["ledger"]) == 1 << 30
    assert set(made["totals"]) == {"kv_bytes", "recurrent_bytes", "compute_bytes", "output_bytes", "weights_bytes", "projector_bytes"}
    assert made["totals"]["kv_bytes"] == 1024 * 4 * 2 * 128 * 2
    assert made["context"] == {"n_ctx": 1024, "n_ctx_seq": 1024, "n_batch": 512, "n_ubatch": 512, "n_seq_max": 2, "kv_cells": 1024, "swa_cells": 0}
    assert read(path, "--memory", "1GiB")["windows"]["requested"]["tokens"] is None


def test_every_flag_reaches_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "gemma.gguf"
    write_header(path, gemma3(), [("token_embd.weight", (640, 262144), "q8_0")])
    made = read(path, "--memory", "8GiB", "--context", "8192", "--branches", "3", "--batch", "256", "--ubatch", "64", "--kv-k", "q8_0", "--kv-v", "f16", "--no-swa-full", "--no-unified",
                "--rs-seq", "2", "--outputs", "5", "--gpu-layers", "1", "--device", "X=1GiB/2GiB", "--no-offload-kqv", "--threads", "2")
    assert made["settings"] == {"n_branches": 3, "n_batch": 256, "n_ubatch": 64, "type_k": "q8_0", "type_v": "f16", "swa_full": False, "flash_attn": True, "unified": False, "n_rs_seq": 2,
                                "n_outputs": 5, "gpu_layers": 1, "offload_kqv": False, "n_threads": 2}
    assert made["context"] == {"n_ctx": 8448, "n_ctx_seq": 2816, "n_batch": 256, "n_ubatch": 64, "n_seq_max": 3, "kv_cells": 8448, "swa_cells": 3 * 768}
    assert [device["name"] for device in made["devices"]] == ["RAM", "X"] and made["layers"]["output"] == "X"
    assert read(path, "--memory", "8GiB", "--kv", "q4_0")["settings"]["type_v"] == "q4_0"
    assert read(path, "--memory", "8GiB", "--no-flash-attn")["settings"]["flash_attn"] is False


def test_table_and_picture(path: Path, tmp_path: Path) -> None:
    from PIL import Image

    picture = tmp_path / "plan.png"
    status, out, _ = run(path, "--memory", "100MiB", "--table", "--picture", picture)
    assert status == 0 and "fits at most" in out
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("f16 ", "q8_0 ", "q4_0 ")) and line.strip()[-1].isdigit()]
    assert [row[0] for row in rows] == ["f16", "q8_0", "q4_0"]
    most = [int(row[-1].replace(",", "")) for row in rows]
    assert most == sorted(most) and len(set(most)) == 3
    with Image.open(picture) as drawn:
        assert drawn.size[0] > 600 and len(drawn.getcolors(1 << 20) or []) > 5
    table = read(path, "--memory", "20MiB", "--table")["table"]
    assert [row["kv"] for row in table] == ["f16", "q8_0", "q4_0"]
    for row in table:
        assert [cell["fits"] for cell in row["contexts"]] == [cell["context"] <= row["largest"] for cell in row["contexts"]]


def test_verify_needs_the_library(path: Path) -> None:
    status, _, err = run(path, "--memory", "1GiB", "--verify")
    assert status == 1 and "/nowhere/at/all.so" in err


@pytest.mark.parametrize("parts", [[1, 1, 1], [0, 0, 100], [50, 50, 0], [500, 2, 3], [0, 0, 0]])
def test_bars_are_whole(parts: list[int]) -> None:
    assert len(bar(parts, 100)) == 60
