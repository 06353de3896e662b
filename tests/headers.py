"""GGUF files of nothing but a header: their tensors are holes."""
from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pylloyal.capacity.header import GGML_TYPES

TYPE_IDS = {label.lower(): number for number, (label, _, _) in GGML_TYPES.items()}
Tensor = tuple[str, tuple[int, ...], str]


def write_header(path: Path, metadata: Mapping[str, Any], tensors: Sequence[Tensor | str] = ()) -> None:
    """Write one, with small tensors where there is but a name. Numbers become u32, f32 and bool; lists of numbers i32, f32 and bool, a tuple u64."""
    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    def value(item: Any) -> bytes:
        if isinstance(item, bool):
            return struct.pack("<IB", 7, item)
        if isinstance(item, int):
            return struct.pack("<II", 4, item)
        if isinstance(item, float):
            return struct.pack("<If", 6, item)
        if isinstance(item, str):
            return struct.pack("<I", 8) + text(item)
        if isinstance(item, tuple):
            return struct.pack(f"<IIQ{len(item)}Q", 9, 10, len(item), *item)
        if item and isinstance(item[0], str):
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(text, item))
        if item and isinstance(item[0], bool):
            return struct.pack(f"<IIQ{len(item)}B", 9, 7, len(item), *item)
        if item and isinstance(item[0], float):
            return struct.pack(f"<IIQ{len(item)}f", 9, 6, len(item), *item)
        return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)

    body = b"".join(text(key) + value(item) for key, item in metadata.items())
    infos, offset = b"", 0
    for name, shape, kind in ((one, (8,), "f32") if isinstance(one, str) else one for one in tensors):
        number = TYPE_IDS[kind]
        _, block, n_bytes = GGML_TYPES[number]
        infos += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset)
        offset += -(-(math.prod(shape) // block * n_bytes) // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + body + infos
    path.write_bytes(head + b"\0" * (-len(head) % 32))
    os.truncate(path, path.stat().st_size + offset)
