"""A model that comes in parts: joined in order, checked part by part and as a whole, once. No network: the wheels are made here."""
from __future__ import annotations

import hashlib
import re
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import fetch_model  # noqa: E402
from _cache import FetchError, check_sha256  # noqa: E402
from fetch_model import ModelFile, Wheel  # noqa: E402

PARTS = [b"GGUF and the first part, ", b"the second, ", b"the third."]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package index of three wheels and a model made of them; returns what was downloaded."""
    wheels = []
    for i, part in enumerate(PARTS):
        path = tmp_path / f"part{i}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"part{i}/data/model.part0{i}", part)
        wheels.append(Wheel(f"part{i}", "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), f"part{i}/data/model.part0{i}"))
    downloaded: list[str] = []

    def download(package: str, version: str, sha256: str, into: Path, *, source: bool) -> Path:
        assert not source
        assert not list(into.iterdir())  # pip leaves one file in a folder of its own
        downloaded.append(package)
        target = into / f"{package}-{version}-py3-none-any.whl"
        target.write_bytes((tmp_path / target.name).read_bytes())
        check_sha256(target, sha256)
        return target

    monkeypatch.setenv("PYLLOYAL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch_model, "pip_download", download)
    monkeypatch.setitem(fetch_model.MODELS, "parts", ModelFile("model.gguf", tuple(wheels), hashlib.sha256(b"".join(PARTS)).hexdigest(), "none"))
    return downloaded


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock")


def test_parts_are_joined_in_order_and_once(index: list[str], tmp_path: Path) -> None:
    path = fetch_model.fetch("parts")
    assert path.read_bytes() == b"".join(PARTS)
    assert left(tmp_path) == ["model.gguf"]
    assert fetch_model.fetch("parts") == path
    assert index == ["part0", "part1", "part2"]


def test_a_part_that_is_not_the_pinned_one_leaves_nothing(index: list[str], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "part1-1.0-py3-none-any.whl", "a") as archive:
        archive.writestr("more", b"more")
    with pytest.raises(FetchError, match="not the pinned archive"):
        fetch_model.fetch("parts")
    assert left(tmp_path) == []
    assert index == ["part0", "part1"]


def test_parts_in_another_order_are_not_the_model(index: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fetch_model.MODELS["parts"]
    monkeypatch.setitem(fetch_model.MODELS, "parts", ModelFile(model.file, model.wheels[::-1], model.sha256, model.licence))
    with pytest.raises(FetchError, match=model.sha256):
        fetch_model.fetch("parts")
    assert left(tmp_path) == []
    assert len(index) == 3


def test_if_present_fetches_nothing(index: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch_model.main(["parts", "--if-present"]) == 0
    assert capsys.readouterr().out == "\n"
    fetch_model.fetch("parts")
    assert fetch_model.main(["parts", "--if-present"]) == 0
    assert capsys.readouterr().out.strip().endswith("model.gguf")
    assert len(index) == 3


def test_what_is_pinned() -> None:
    assert set(fetch_model.MODELS) == {"smollm2", "gemma-3-270m"}
    for model in fetch_model.MODELS.values():
        assert model.file.endswith(".gguf")
        for digest in (model.sha256, *(wheel.sha256 for wheel in model.wheels)):
            assert re.fullmatch(r"[0-9a-f]{64}", digest)
    gemma = fetch_model.MODELS["gemma-3-270m"].wheels
    assert [wheel.member[-6:] for wheel in gemma] == ["part00", "part01", "part02", "part03"]
    assert len({wheel.sha256 for wheel in gemma}) == 4
