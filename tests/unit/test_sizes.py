"""Sizes are read and written to the byte."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pylloyal.capacity.sizes import format_bytes, parse_bytes
from pylloyal.errors import InvalidArgumentError


@pytest.mark.parametrize(("text", "n"), [
    ("24GiB", 24 << 30), ("24 gib", 24 << 30), (" 1.5 GiB ", 3 << 29), ("1.5GB", 1_500_000_000), ("0", 0), ("4096", 4096), ("4096 B", 4096), ("0.1KB", 100),
    ("7TiB", 7 << 40), ("2kib", 2048), ("8796093022207.999023437500 MiB", (1 << 63) - 1024), ("1PB", 10**15), ("0.5B", None), ("0.1KiB", None), ("24G", None), ("12m", None),
    ("", None), ("GiB", None), ("-1GiB", None), ("1e9", None), ("1_000", None), ("inf", None), ("1..5GB", None), ("1,5GB", None), ("5 apples", None), ("8EiB", None), ("9" * 30, None), ("٣GiB", None),
])
def test_sizes_are_exact_or_refused(text: str, n: int | None) -> None:
    if n is None:
        with pytest.raises(InvalidArgumentError):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == n


def test_what_can_be_read_two_ways_says_both() -> None:
    with pytest.raises(InvalidArgumentError, match=r"GiB is 1,073,741,824 bytes, GB is 1,000,000,000"):
        parse_bytes("24G")


@pytest.mark.parametrize(("n", "text"), [
    (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536 << 20, "1.50 GiB"), ((1 << 20) - 1, "1.00 MiB"), ((1 << 20) - 6, "1023.99 KiB"), (576 << 20, "576.00 MiB"), (-(3 << 29), "-1.50 GiB"),
    ((1 << 53) + 1, "8.00 PiB"), (5000 << 60, "5000.00 EiB"),
])
def test_sizes_are_written_rounded(n: int, text: str) -> None:
    assert format_bytes(n) == text


@given(st.integers(0, (1 << 62) - 1))
def test_what_is_written_is_the_nearest(n: int) -> None:
    number, unit = format_bytes(n).split()
    assert float(number) < 1024
    size = parse_bytes(f"1{unit}")
    assert abs(n * 100 - int(number.replace(".", "")) * size * (1 if "." in number else 100)) <= size // 2
