"""What `tools/build_lib.py` says of a compilation that takes minutes."""
from __future__ import annotations

import os
from pathlib import Path

from build_lib import engine_progress


def test_only_a_build_s_own_compilation_is_its_progress(tmp_path: Path) -> None:
    log, another = tmp_path / "cache" / "own.log", tmp_path / "cache" / "another.log"
    log.parent.mkdir()
    another.write_text("[7/9] Building C object ggml.c.o\n", encoding="utf-8")
    assert engine_progress(tmp_path, 0) == "", "it waits for another build, or compiles nothing"
    (tmp_path / "engine-log").write_text(str(log), encoding="utf-8")
    assert engine_progress(tmp_path, 0) == "", "it has only begun"
    log.write_text("-- Configuring done\n" + "[1/9] Building CXX object llama.cpp.o\n" * 200 + "[2/9] Building C object ggml.c.o\nwarning: [[nodiscard]]\n", encoding="utf-8")
    assert engine_progress(tmp_path, 0) == "[2/9]"
    os.utime(tmp_path / "engine-log", (1000, 1000))
    assert engine_progress(tmp_path, 2000) == "", "what is left of an earlier run"
