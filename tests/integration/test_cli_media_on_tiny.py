"""``pylloyal media --model --mmproj``: cells as they are charged, for every kind of projector, and a sheet of what is fed."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import media_fixtures as made
import numpy as np
import PIL.Image
import pytest
import tiny_models
from photographs import FOLDER

from pylloyal import Image, Model, Projector, Prompt, Video
from pylloyal.cli import main

PAIRS = {"qwen2vl": ("tiny-qwen2vl", "mmproj-tiny-qwen2vl"), "qwen3vl": ("tiny-qwen3vl", "mmproj-tiny-qwen3vl"), "gemma3": ("tiny-gemma3", "mmproj-tiny-gemma3"),
         "smolvlm": ("tiny-llama", "mmproj-tiny-smolvlm"), "internvl": ("tiny-llama", "mmproj-tiny-internvl"), "qwen35": ("tiny-qwen35", "mmproj-tiny-qwen2vl")}
Told = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media")
    (path / "clip.odd").write_bytes(made.clip(range(0, 4000, 40), container="matroska"))
    (path / "thin.png").write_bytes(made.saved(made.gradient(2000, 8), "PNG"))
    (path / "animation.odd").write_bytes(made.animation("GIF", [500] * 4))
    return path


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Path, Path]:
    model, projector = (tiny_models.write(folder / f"{name}.gguf", name) for name in PAIRS[request.param])
    return request.param, model, projector


@pytest.fixture
def media(capsys: pytest.CaptureFixture[str]) -> Told:
    def run(*words: object) -> tuple[int, str, str]:
        status = main(["media", *map(str, words)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_cells_are_those_that_are_charged(media: Told, folder: Path, pair: tuple[str, Path, Path], tmp_path: Path) -> None:
    kind, model_path, projector_path = pair
    files = [FOLDER / "cat.jpg", folder / "clip.odd", folder / "animation.odd", FOLDER / "rocket.jpg"]
    words = [*files, "--model", model_path, "--mmproj", projector_path, "--max-frames", "5"]
    status, out, err = media("--json", *words, "--sheet", tmp_path / "sheet")
    assert (status, err) == (0, "")
    told: list[dict[str, Any]] = json.loads(out)["media"]
    sources = [Image(files[0]), Video(files[1], max_frames=5), Video(files[2], max_frames=5), Image(files[3])]
    with Model(model_path) as model, Projector(model, projector_path, n_threads=1) as projector, model.store(n_ctx=4096, n_threads=1) as store:
        fuses = projector.statistics().n_frames_merged == 2
        for one, source in zip(told, sources, strict=True):
            with Prompt(projector, [source], add_special=False) as prompt, store.root() as root:
                root.prefill(prompt)
                assert (one["cells"], one["positions"], one["slack"]) == (root.cells_own, root.position, root.slack)
                assert one["rows_blocks"] == prompt.quote().n_media
            n_frames = len(one["times_s"]) if one["kind"] == "video" else 0
            # five frames of the clip, four of the animation: the first stands alone before its stamp
            assert one["pairs"] == ((n_frames - 1) // 2 if fuses and n_frames else 0)
    assert [one["kind"] for one in told] == ["image", "video", "video", "image"]
    if kind in ("qwen2vl", "qwen3vl", "qwen35"):
        assert told[0]["slack"] > 0
    # the same in words
    status, out, err = media(*words)
    assert (status, err) == (0, "")
    lines = [line for line in out.splitlines() if "cell" in line]
    assert len(lines) == 4
    for line, one in zip(lines, told, strict=True):
        assert line.startswith(f"  {one['cells']} cells, {one['positions']} positions (slack {one['slack']}), {one['rows_blocks']} block")
        assert ("fused" in line) == (one["pairs"] > 0)


def test_a_medium_it_cannot_take_is_named(media: Told, folder: Path, pair: tuple[str, Path, Path]) -> None:
    kind, model, projector = pair
    status, out, err = media(FOLDER / "cat.jpg", folder / "thin.png", "--model", model, "--mmproj", projector)
    if kind == "smolvlm":  # too thin for its tiles
        assert (status, out) == (1, "")
        assert err.startswith(f"pylloyal: {folder / 'thin.png'}: ")
        assert err.count("\n") == 1
    else:
        assert (status, err) == (0, "")


def test_the_sheet_shows_what_is_fed_in_order(media: Told, folder: Path, tmp_path: Path) -> None:
    """Every frame of a clip carries its number: read back from the sheet, they are those of the report."""
    status, out, _ = media("--json", FOLDER / "cat.jpg", folder / "clip.odd", "--fps", "2", "--max-frames", "6", "--sheet", tmp_path / "sheet.png")
    assert status == 0
    cat, clip = json.loads(out)["media"]
    assert len(clip["times_s"]) == 6
    with PIL.Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (4 * 198 + 6, 2 * 214 + 6)  # seven pictures in rows of four
        cells = [sheet.crop((6 + i % 4 * 198, 6 + i // 4 * 214, 198 + i % 4 * 198, 198 + i // 4 * 214)) for i in range(8)]
    shown = [made.number_of(np.asarray(cell.crop((0, 38, 192, 154)).resize((made.WIDTH, made.HEIGHT)))) for cell in cells[1:7]]  # 160 x 96 is shown as 192 x 115
    assert shown == [round(time * 25) for time in clip["times_s"]]
    assert cat["size"] == [301, 200]
    assert np.ptp(np.asarray(cells[0].convert("L"))[40:150].astype(int)) > 100
    assert (np.asarray(cells[7]) == 32).all()


def test_a_projector_of_another_model_ends_with_one(media: Told, folder: Path) -> None:
    model, projector = (tiny_models.write(folder / f"{name}.gguf", name) for name in ("tiny-llama", "mmproj-tiny-qwen3vl"))
    for path, named in ((projector, ("64", "192")), (folder / "absent.gguf", ("absent.gguf",))):
        status, out, err = media(FOLDER / "cat.jpg", "--model", model, "--mmproj", path)
        assert (status, out) == (1, "")
        assert "Traceback" not in err
        assert all(word in err for word in named)
