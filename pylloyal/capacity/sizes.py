"""Sizes as people write them, to the byte: no floating point anywhere."""
from __future__ import annotations

import re
from typing import Final

from ..errors import InvalidArgumentError

_UNITS: Final[dict[str, int]] = {"b": 1, **{letter + "ib": 1 << 10 * n for n, letter in enumerate("kmgtpe", 1)}, **{letter + "b": 1000**n for n, letter in enumerate("kmgtpe", 1)}}
_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_MOST: Final = 1 << 63  # what any interface of an operating system can say


def parse_bytes(text: str) -> int:
    """Bytes of a size: "24GiB", "1.5 GB", "4096".

    Raises
    ------
    InvalidArgumentError
        Not a size, not a whole number of bytes, or a unit that is said both ways ("24G").
    """
    found = re.fullmatch(r"(\d{1,20})(?:\.(\d{1,20}))?\s*([a-z]*)", text.strip(), re.ASCII | re.IGNORECASE)
    if not found:
        raise InvalidArgumentError(f'{text[:40]!r} is not a size; "24GiB" is one')
    whole, part, unit = found[1], found[2] or "", found[3].lower() or "b"
    if unit not in _UNITS:
        if unit in ("k", "m", "g", "t", "p", "e"):
            raise InvalidArgumentError(f"{text.strip()!r} can be read two ways: {unit.upper()}iB is {_UNITS[unit + 'ib']:,} bytes, {unit.upper()}B is {_UNITS[unit + 'b']:,}")
        raise InvalidArgumentError(f"{text[:40]!r} is in {found[3][:20]!r}, which is no unit of bytes; B, KiB, MiB, GiB, TiB, KB, MB, GB and TB are")
    scale: int = 10 ** len(part)
    n, rest = divmod(int(whole + part) * _UNITS[unit], scale)
    if rest:
        raise InvalidArgumentError(f"{text.strip()!r} is not a whole number of bytes")
    if n >= _MOST:
        raise InvalidArgumentError(f"{text.strip()!r} is more than memory can be")
    return n


def format_bytes(n_bytes: int) -> str:
    """A size to read, rounded to the nearest hundredth of its unit: "1.50 GiB", "512 B"."""
    sign, n, power = ("-" if n_bytes < 0 else ""), abs(n_bytes), 0
    while power < len(_BINARY) - 1 and (n >> 10 * power if power == 0 else _hundredths(n, power) // 100) >= 1024:
        power += 1
    if power == 0:
        return f"{sign}{n} B"
    hundredths = _hundredths(n, power)
    return f"{sign}{hundredths // 100}.{hundredths % 100:02} {_BINARY[power]}"


def _hundredths(n: int, power: int) -> int:
    unit = 1 << 10 * power
    return (n * 100 + unit // 2) // unit
