"""What the library is and what it can use."""
from __future__ import annotations

import enum
import json
from typing import Any

from .._ffi import capi
from .._ffi.load import library, library_path, take_text
from .._ffi.memory import new, ref, u64


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
    return {name: getattr(live, name) for name in ("models", "weights", "stores", "contexts", "branches", "grammars", "texts")}
