"""``pylloyal media``: what it tells, what it writes, how it ends."""
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import media_fixtures as made
import numpy as np
import pytest

from pylloyal.cli import main

Told = Callable[..., tuple[int, str, str]]


@pytest.fixture
def media(capsys: pytest.CaptureFixture[str]) -> Told:
    """(status, output, errors) of ``pylloyal media ...`` in this process."""

    def run(*words: object) -> tuple[int, str, str]:
        status = main(["media", *map(str, words)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A turned picture with transparency, a clip that begins late, an animation, a pair of pictures in one file; names that lie."""
    rgba = np.dstack([made.gradient(), made.gradient()[..., 0]])
    raws = {"picture": made.saved(made.turned(rgba, 6), "PNG", orientation=6), "clip": made.clip([t + 3000 for t in range(0, 2000, 40)], container="matroska"),
            "animation": made.animation("GIF", [500] * 4), "pair": made.picture_seeds()[-1], "cut": made.saved(made.gradient(200, 200), "JPEG")[:2000], "text": b"only words"}
    out = {}
    for name, raw in raws.items():
        out[name] = tmp_path / f"{name}.odd"
        out[name].write_bytes(raw)
    return out


def test_text_tells_what_would_be_fed(media: Told, files: dict[str, Path]) -> None:
    status, out, err = media(files["picture"], files["clip"], "--fps", "2", "--max-frames", "3")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        str(files["picture"]), "  PNG, mode RGBA, 16x24, orientation 6 applied: 24x16", "  transparency laid on white",
        str(files["clip"]), "  matroska,webm, h264, 160x96", "  50 frames in 2.00 s by their own times; its clock begins at 3.000 s", "  3 frames fed, at 0.00, 1.00, 1.48 s", "  1 frame thinned out"]


def told(out: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(out)["media"]
    return found


def test_json_holds_the_reports(media: Told, files: dict[str, Path]) -> None:
    status, out, _ = media("--json", files["picture"], files["clip"], files["animation"], files["pair"], "--start", "0.5", "--end", "1.6")
    assert status == 0
    picture, clip, animation, pair = told(out)
    assert (picture["kind"], picture["orientation"], picture["stored_size"], picture["size"]) == ("image", 6, [16, 24], [24, 16])
    assert (clip["kind"], clip["times_s"], clip["asked_s"], clip["origin_s"]) == ("video", pytest.approx([0.48, 1.0, 1.48]), [0.5, 1.0, 1.5], 3.0)
    assert (animation["kind"], animation["times_s"]) == ("video", [0.5, 1.0, 1.5])
    assert (pair["kind"], pair["n_frames"], pair["format"]) == ("image", 2, "MPO")


def test_what_it_is_taken_as(media: Told, files: dict[str, Path]) -> None:
    assert told(media("--json", "--as", "image", files["animation"])[1])[0]["kind"] == "image"
    assert told(media("--json", "--as", "video", files["picture"])[1])[0]["kind"] == "video"
    status, out, err = media("--as", "image", files["clip"])
    assert (status, out) == (1, "")
    assert str(files["clip"]) in err


def test_a_sheet_is_a_png_that_opens(media: Told, files: dict[str, Path], tmp_path: Path) -> None:
    import PIL.Image

    sheet = tmp_path / "sheet.of frames"
    status, out, _ = media(files["picture"], files["clip"], "--sheet", sheet)
    assert status == 0
    assert out.endswith(f"contact sheet: {sheet}\n")
    with PIL.Image.open(sheet) as picture:
        assert picture.format == "PNG"
        assert picture.size == (3 * 198 + 6, 2 * 214 + 6)  # five pictures: three and two
        pixels = np.asarray(picture)
    assert (pixels[:200, 200:] != 32).any()
    status, _, err = media(files["picture"], "--sheet", tmp_path / "no folder" / "sheet.png")
    assert status == 1
    assert "no folder" in err


@pytest.mark.parametrize("label", ["W" * 40, "i" * 90, "two\nlines", "\udcff.png", "", "x\0y"])
def test_a_label_keeps_to_its_picture(label: str) -> None:
    from pylloyal.sources.sheet import contact_sheet

    pixels = np.asarray(contact_sheet([(label, made.gradient()), ("", made.gradient())])).astype(int)
    assert pixels.shape == (220, 402, 3)
    written = (pixels[198:] != 32).any(axis=2)
    columns, lines = np.flatnonzero(written.any(axis=0)), np.flatnonzero(written.any(axis=1))
    assert columns.size == 0 if not label else (columns[0] >= 6 and columns[-1] < 6 + 192)
    assert lines.size == 0 if not label else lines[-1] < 16  # one line


def test_notes_are_read_and_wrong_ones_named(media: Told, files: dict[str, Path], tmp_path: Path) -> None:
    notes = tmp_path / "said.json"
    notes.write_text('[[0.5, "hello"]]')
    assert media(files["clip"], "--notes", notes)[0] == 0
    for text in ("words", "[[1]]"):
        notes.write_text(text)
        status, out, err = media(files["clip"], "--notes", notes)
        assert (status, out) == (1, "")
        assert str(notes) in err
    status, _, err = media(files["clip"], "--notes", tmp_path / "absent.srt")
    assert status == 1
    assert "absent.srt" in err


@pytest.mark.parametrize(("name", "why"), [("cut", "truncated"), ("text", ""), ("absent", "no such file")])
def test_errors_name_the_file_and_end_with_one(media: Told, files: dict[str, Path], tmp_path: Path, name: str, why: str) -> None:
    path = files.get(name, tmp_path / "absent.png")
    status, out, err = media(files["picture"], path)
    assert (status, out) == (1, "")
    assert err.startswith(f"pylloyal: {path}: ")
    assert why in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["--fps", "0"], ["--max-frames", "0"], ["--start", "5", "--end", "1"], ["--start", "nan"]])
def test_choices_that_make_no_sense_end_with_one(media: Told, files: dict[str, Path], words: list[str]) -> None:
    status, out, err = media(files["clip"], *words)
    assert (status, out) == (1, "")
    assert "Traceback" not in err


def test_the_demo_names_what_it_lacks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(["demo", "--model", str(tmp_path / "absent.gguf")]) == 1
    assert f"{tmp_path / 'absent.gguf'} is not there" in capsys.readouterr().err
    for module, package in (("PIL", "Pillow"), ("av", "PyAV")):
        with monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.split(".")[0] == module]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, module, None)
            assert main(["demo", "--out", str(tmp_path)]) == 1
            said = capsys.readouterr()
            assert said.out == ""
            assert package in said.err
            assert 'pip install "pylloyal[media]"' in said.err


def test_the_demos_model_is_the_packages_own_or_the_clones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from pylloyal.cli import demo

    clone = Path(__file__).resolve().parents[2] / "fixtures" / "models"
    assert demo.model_path("tinyvlm-f16.gguf") == clone / "tinyvlm-f16.gguf"
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tinyvlm-f16.gguf").touch()
    monkeypatch.setattr(demo, "MODELS", (tmp_path / "models", clone))
    assert demo.model_path("tinyvlm-f16.gguf").parent == tmp_path / "models"
    assert demo.model_path("mmproj-tinyvlm-f16.gguf").parent == clone
    assert demo.model_path("absent.gguf") == tmp_path / "models" / "absent.gguf"


def test_a_projector_needs_its_model(media: Told, files: dict[str, Path]) -> None:
    with pytest.raises(SystemExit) as ended:
        media(files["picture"], "--mmproj", "x")
    assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        media()
    assert ended.value.code == 2
