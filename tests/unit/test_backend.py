"""Wheels whose members were written in another order become the same bytes."""
from __future__ import annotations

import csv
import io
import random
import zipfile
from pathlib import Path

import backend

FILES = {"pylloyal/__init__.py": b"code", "pylloyal/kernel/a.py": b"a" * 5000, "pylloyal-1.dist-info/METADATA": b"Name: pylloyal\n", "pylloyal-1.dist-info/licenses/LICENSE": b"free",
         "pylloyal-1.dist-info/sboms/x.json": b"{}"}


def write(path: Path, names: list[str]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([(name, "sha256=x", len(FILES[name])) for name in names] + [("pylloyal-1.dist-info/RECORD", "", "")])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in [*((name, FILES[name]) for name in names), ("pylloyal-1.dist-info/RECORD", text.getvalue().encode())]:
            info = zipfile.ZipInfo(name, (2020, 1, 2, 3, 4, 6))
            info.external_attr = 0o100644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(info, data)


def test_order_does_not_matter(tmp_path: Path) -> None:
    seen, before = set(), set()
    for seed in range(5):
        names = sorted(FILES)
        random.Random(seed).shuffle(names)
        path = tmp_path / f"{seed}.whl"
        write(path, names)
        before.add(path.read_bytes())
        backend.sort_members(path)
        seen.add(path.read_bytes())
    assert len(before) > 1
    assert len(seen) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{seed}.whl" for seed in range(5)]


def test_nothing_is_lost_and_record_is_last(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    write(path, sorted(FILES, reverse=True))
    backend.sort_members(path)
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        assert {name: wheel.read(name) for name in FILES} == FILES
        assert names[-1] == "pylloyal-1.dist-info/RECORD"
        assert sorted(row[0] for row in csv.reader(wheel.read(names[-1]).decode().splitlines())) == sorted(names)
        assert [name for name in names if ".dist-info/" not in name] == names[:2], "what is installed comes first, as the wheel format advises"
        assert {info.date_time for info in wheel.infolist()} == {(2020, 1, 2, 3, 4, 6)}
        assert {info.external_attr for info in wheel.infolist()} == {0o100644 << 16}
