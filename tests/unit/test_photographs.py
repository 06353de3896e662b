"""Real pictures: what the files are, that each is credited, and what they become before a model sees them."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from photographs import FOLDER, PHOTOGRAPHS

from pylloyal import Image
from pylloyal.cli import main

NAMES = sorted(PHOTOGRAPHS)


def test_every_photograph_is_small_and_credited() -> None:
    credits = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in FOLDER.iterdir()) == [f"{name}.jpg" for name in NAMES]
    for name, photograph in PHOTOGRAPHS.items():
        assert (FOLDER / f"{name}.jpg").stat().st_size <= 100_000
        line, = (line for line in credits.splitlines() if f"`photographs/{name}.jpg`" in line)
        assert f"{photograph.size[0]} x {photograph.size[1]}" in line
        assert "CC0" in line or "public domain" in line
        assert photograph.member in credits


@pytest.mark.parametrize("name", NAMES)
def test_a_photograph_is_upright_and_in_its_colours(name: str) -> None:
    photograph, path = PHOTOGRAPHS[name], FOLDER / f"{name}.jpg"
    image = Image(path)
    assert (image.report.size, image.report.orientation, image.report.format) == (photograph.size, photograph.orientation, "JPEG")
    with PIL.Image.open(path) as file:
        stored = np.asarray(file.convert("RGB"))
    assert image.report.stored_size == (stored.shape[1], stored.shape[0])
    # 6: the first row of the file is the right side, its first column the top
    assert np.array_equal(image.pixels, stored if photograph.orientation == 1 else stored.swapaxes(0, 1)[:, ::-1])
    assert image.pixels.std() > 20
    is_grey = (image.pixels[..., 0] == image.pixels[..., 1]).all()
    assert is_grey == (image.report.mode == "L") == (name == "camera")
    assert np.array_equal(Image(path.read_bytes()).pixels, image.pixels)


def test_what_is_in_them_is_where_it_belongs() -> None:
    """Of the kind a wrong turn or swapped channels would break."""
    coffee, cat, rocket, camera = (Image(FOLDER / f"{name}.jpg").pixels.astype(int) for name in ("coffee", "cat", "rocket", "camera"))
    red = (coffee[..., 0] - coffee[..., 2] > 90) & (coffee[..., 1] < 80)
    assert red[60:170, 40:200].mean() > 3 * red[:40].mean()  # the saucer, not the table
    assert rocket[:60, :, 2].mean() > rocket[:60, :, 0].mean() + 20  # blue sky above
    assert rocket[-30:, :, 0].mean() > rocket[-30:, :, 2].mean() + 20  # lit ground below
    assert cat[:, :150].mean(axis=(0, 1))[0] > cat[:, :150].mean(axis=(0, 1))[2] + 40  # ginger, on the left
    assert camera[100:, :60].mean() < 60 < camera[:60, 120:].mean()  # the coat, the sky


def test_the_command_line_tells_and_draws_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    paths = [str(FOLDER / f"{name}.jpg") for name in NAMES]
    assert main(["media", "--json", *paths, "--sheet", str(sheet)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sheet"] == str(sheet)
    assert [(one["kind"], tuple(one["size"]), one["orientation"]) for one in told["media"]] == [("image", PHOTOGRAPHS[name].size, PHOTOGRAPHS[name].orientation) for name in NAMES]
    # The sheet shows each in its place, scaled to 192 pixels at most: the longer side is filled, and the colours are those of the picture.
    with PIL.Image.open(sheet) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    for i, path in enumerate(paths):
        shown = Image(path).pixels
        x, y = 6 + i % 3 * 198, 6 + i // 3 * 214
        scale = 192 / max(shown.shape[:2])
        width, height = round(shown.shape[1] * scale), round(shown.shape[0] * scale)
        left, top = x + (192 - width) // 2, y + (192 - height) // 2
        found = pixels[top : top + height, left : left + width]
        wanted = np.asarray(PIL.Image.fromarray(shown).resize((width, height), PIL.Image.Resampling.LANCZOS)).astype(int)
        assert np.array_equal(found, wanted), path
        border = pixels[y : y + 192, x : x + 192].copy()
        border[top - y : top - y + height, left - x : left - x + width] = 32
        assert (border == 32).all(), path
