"""What the library is and what it can use."""
from __future__ import annotations

import enum
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from .._ffi import capi
from .._ffi.load import library, library_path, take_text, take_text_at
from .._ffi.memory import new, ref, u8_of, u64


class LogLevel(enum.IntEnum):
    """Lines below the level are not collected."""

    DEBUG = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    NOTHING = 5


def system_info() -> dict[str, Any]:
    """Library path, ABI version, engine and its commit, backends, CPU features and devices with their memory."""
    lib = library()
    info = json.loads(take_text(lib.pyl_build_info))
    return {"library": str(library_path()), **info, "devices": json.loads(take_text(lib.pyl_devices))}


def describe_saved(data: bytes | bytearray | memoryview | str | os.PathLike[str]) -> dict[str, Any]:
    """What a saved branch holds, from its bytes or its file: engine, model and its fingerprint, KV types, position, cells, seed.

    Raises
    ------
    FormatError
        Damaged, or not a saved branch.
    """
    raw = data if isinstance(data, bytes | bytearray | memoryview) else Path(data).read_bytes()
    view = np.frombuffer(raw, np.uint8) if len(raw) else np.empty(0, np.uint8)
    found: dict[str, Any] = json.loads(take_text_at(library().pyl_saved_describe, 2, u8_of(view), view.size))
    return found


def drain_logs() -> list[str]:
    """Log lines collected since the last call, ``"LEVEL text"``, oldest first; a last line says how many were dropped, if any."""
    dropped = u64()
    lines = take_text(library().pyl_log_drain, ref(dropped)).decode("utf-8", "replace").splitlines()
    return [*lines, f"WARNING {dropped.value} older lines were dropped"] if dropped.value else lines


def set_log_level(level: LogLevel) -> None:
    """Collect lines of this level and above; warnings by default."""
    library().pyl_log_level(int(level))


def live_objects() -> dict[str, int]:
    """Number of native objects alive in this process, for leak tests."""
    live = new(capi.pyl_live)
    library().pyl_live_objects(ref(live))
    return {name: getattr(live, name) for name in ("models", "weights", "stores", "contexts", "branches", "grammars", "texts", "embedders", "projectors", "prompts")}
