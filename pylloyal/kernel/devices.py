"""The devices the engine can use, and their memory as far as it is known."""
from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from .._ffi.load import library, take_text

DeviceKind = Literal["cpu", "gpu", "igpu", "accel"]


@dataclass(frozen=True, slots=True)
class Device:
    """One device, as the engine tells of it right now.

    Attributes
    ----------
    name, description : str
    kind : {"cpu", "gpu", "igpu", "accel"}
        An "igpu" shares the memory of the CPU.
    backend : str
        The engine's backend that drives it.
    free_bytes, total_bytes : int or None
        None is unknown, never empty: the engine says 0 of 0, or an accelerator all of whose memory is free, which is what backends say
        that do not measure. Of a CPU what can be taken without swapping, under the cgroup's limit too.
    """

    name: str
    description: str
    kind: DeviceKind
    backend: str
    free_bytes: int | None
    total_bytes: int | None


def devices() -> list[Device]:
    """All devices, in the engine's order. Thread-safe; memory is read anew on every call."""
    return [_device(**found) for found in json.loads(take_text(library().pyl_devices))]


def _device(*, name: str, description: str, backend: str, kind: DeviceKind, total_bytes: int, free_bytes: int) -> Device:
    is_measured = free_bytes > 0 and (kind == "cpu" or free_bytes < total_bytes)
    return Device(name, description, kind, backend, free_bytes if is_measured else None, total_bytes or None)
