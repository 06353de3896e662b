"""Pictures: the exact pixels of every mode and orientation, and what is refused, by name."""
from __future__ import annotations

import io
import os
import struct
import sys
from pathlib import Path
from typing import Any

import media_fixtures as made
import numpy as np
import numpy.typing as npt
import pytest
from media_hostile import run_mutants

from pylloyal import errors
from pylloyal.kernel.parts import PixelPart
from pylloyal.sources.image import Image, content_id, is_picture

GRAD = made.gradient()
H, W = GRAD.shape[:2]


def grey3(grey: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.stack([grey] * 3, axis=-1)


def laid_on(rgb: npt.NDArray[Any], alpha: npt.NDArray[Any], under: tuple[int, int, int] = (255, 255, 255)) -> npt.NDArray[Any]:
    share = alpha[..., None] / 255
    return np.floor(rgb * share + np.array(under) * (1 - share) + 0.5)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_orientation_is_undone_and_told(kind: str, orientation: int) -> None:
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    stored = made.turned(GRAD, orientation)
    image = Image(made.saved(stored, kind, orientation=orientation, **options))
    assert image.report.orientation == orientation
    assert image.report.stored_size == (stored.shape[1], stored.shape[0])
    assert image.report.size == (W, H)
    off = np.abs(image.pixels.astype(int) - GRAD).max()
    assert off <= (12 if kind == "JPEG" else 0)
    assert not image.report.notes


@pytest.mark.parametrize("orientation", [0, 9, 77])
def test_an_orientation_that_is_none_is_told(orientation: int) -> None:
    image = Image(made.saved(GRAD, "PNG", orientation=orientation))
    assert np.array_equal(image.pixels, GRAD)
    assert image.report.orientation == 1
    assert "none of 1 to 8" in image.report.notes[0]


def png(depth: int, colour: int, values: npt.NDArray[Any], *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of one row whose values are given, packed as PNG packs them."""
    if depth == 16:
        rows = values.astype(">u2").tobytes()
    elif depth == 8:
        rows = values.astype(np.uint8).tobytes()
    else:
        bits = "".join(f"{v:0{depth}b}" for v in values.ravel())
        rows = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    return made.png(values.shape[0], 1, depth, colour, rows, *chunks)


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_grey_of_every_depth_is_scaled(depth: int) -> None:
    top = 2**depth - 1
    values = np.arange(2**depth) if depth <= 8 else np.arange(0, 65536, 97)
    assert np.array_equal(Image(png(depth, 0, values)).pixels[0], grey3(np.floor(values * 255 / top + 0.5)))


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_the_clear_value_of_grey_is_clear_at_every_depth(depth: int) -> None:
    top = 2**depth - 1
    values = np.array([0, top, top // 2, top])
    for key in {0, top, top // 2}:
        image = Image(png(depth, 0, values, (b"tRNS", struct.pack(">H", key))), background="#102030")
        expected = np.where((values == key)[:, None], (16, 32, 48), grey3(np.floor(values * 255 / top + 0.5)))
        assert np.array_equal(image.pixels[0], expected), key
        assert image.report.has_alpha


@pytest.mark.parametrize("depth", [8, 16])
def test_the_clear_colour_of_rgb(depth: int) -> None:
    one = 257 if depth == 16 else 1
    values = np.array([[255, 0, 7], [255, 0, 8], [1, 2, 3]]) * one
    image = Image(png(depth, 2, values, (b"tRNS", struct.pack(">HHH", *(int(v) for v in values[0])))), background="black")
    assert image.pixels[0].tolist() == [[0, 0, 0], [255, 0, 8], [1, 2, 3]]


def test_sixteen_bits_of_colour_keep_their_upper_eight() -> None:
    values = np.arange(0, 65535, 771).reshape(-1, 1) * [1, 1, 1]
    assert np.array_equal(Image(png(16, 2, values)).pixels[0], values >> 8)
    alpha = np.full((len(values), 1), 0xFFFF)
    assert np.array_equal(Image(png(16, 6, np.hstack([values, alpha]))).pixels[0], values >> 8)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_palettes_with_and_without_alpha(depth: int) -> None:
    n = 2**depth
    rng = np.random.default_rng(depth)
    palette, alpha = rng.integers(0, 256, (n, 3)), rng.integers(0, 256, n)
    values = np.arange(n)
    assert np.array_equal(Image(png(depth, 3, values, (b"PLTE", palette.astype(np.uint8).tobytes()))).pixels[0], palette)
    half = (b"tRNS", alpha[: n // 2].astype(np.uint8).tobytes())  # the rest is opaque
    alpha[n // 2 :] = 255
    image = Image(png(depth, 3, values, (b"PLTE", palette.astype(np.uint8).tobytes()), half))
    assert np.array_equal(image.pixels[0], laid_on(palette, alpha))
    one = (b"tRNS", b"\x00")
    alpha[:] = 255
    alpha[0] = 0
    assert np.array_equal(Image(png(depth, 3, values, (b"PLTE", palette.astype(np.uint8).tobytes()), one)).pixels[0], laid_on(palette, alpha))


def test_alpha_is_laid_on_the_background_exactly() -> None:
    rng = np.random.default_rng(1)
    rgba = rng.integers(0, 256, (300, 41, 4), dtype=np.uint8)  # more rows than one strip
    for background, under in (("white", (255, 255, 255)), ("#123456", (0x12, 0x34, 0x56))):
        image = Image(made.saved(rgba, "PNG"), background=background)
        assert np.array_equal(image.pixels, laid_on(rgba[..., :3], rgba[..., 3], under))
        assert (image.report.has_alpha, image.report.background, image.report.mode) == (True, background, "RGBA")
    la = png(8, 4, rgba[0, :, :2])
    assert np.array_equal(Image(la).pixels[0], laid_on(grey3(rgba[0, :, 0]), rgba[0, :, 1]))


def test_pictures_of_every_mode_of_pillow() -> None:
    import PIL.Image

    rgba = PIL.Image.fromarray(np.dstack([GRAD, GRAD[..., 0]]))
    seen = {}
    for mode in ("1", "L", "LA", "P", "PA", "RGB", "RGBX", "RGBA", "RGBa", "La", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16", "I;16B"):
        source = PIL.Image.fromarray(GRAD)
        if mode in ("LA", "PA", "RGBA", "RGBa"):
            picture = rgba.convert(mode)
        elif mode == "La":
            picture = rgba.convert("LA").convert("La")
        elif mode == "LAB":
            import PIL.ImageCms

            picture = PIL.ImageCms.profileToProfile(source, PIL.ImageCms.createProfile("sRGB"), PIL.ImageCms.createProfile("LAB"), outputMode="LAB")
            assert picture is not None
        elif mode.startswith("I;16"):
            picture = PIL.Image.frombytes(mode, (W, H), (GRAD[..., 0].astype(">u2" if mode.endswith("B") else "<u2") * 257).tobytes())
        elif mode == "I":
            picture = PIL.Image.fromarray(GRAD[..., 0].astype(np.int32) * 257)
        else:
            picture = source.convert(mode)
        seen[mode] = Image(picture).pixels.astype(int)
    luma = np.asarray(PIL.Image.fromarray(GRAD).convert("L")).astype(int)
    for mode, exact in (("RGB", GRAD), ("RGBX", GRAD), ("L", grey3(luma)), ("F", grey3(luma)), ("I", grey3(GRAD[..., 0])), ("I;16", grey3(GRAD[..., 0])), ("I;16B", grey3(GRAD[..., 0])),
                        ("CMYK", GRAD), ("RGBA", laid_on(GRAD, GRAD[..., 0])), ("LA", laid_on(grey3(luma), GRAD[..., 0]))):
        assert np.array_equal(seen[mode], exact), mode
    for mode, close, by in (("YCbCr", GRAD, 3), ("HSV", GRAD, 6), ("RGBa", laid_on(GRAD, GRAD[..., 0]), 3), ("La", laid_on(grey3(luma), GRAD[..., 0]), 3)):
        assert np.abs(seen[mode] - close).max() <= by, mode
    assert np.abs(seen["LAB"] - GRAD).mean() <= 3  # its eight bits are coarse where it is dark
    assert set(np.unique(seen["1"])) == {0, 255}


@pytest.mark.parametrize("order", ["<", ">"])
def test_tiff_of_wide_values_in_both_byte_orders(order: str) -> None:
    values = np.array([[0, 257, 32768, 65535], [1, 128, 129, 65407]])
    scaled = grey3(np.floor(values * 255 / 65535 + 0.5))
    assert np.array_equal(Image(made.tiff(order, 4, 2, 16, 1, values.astype(order + "u2").tobytes())).pixels, scaled)
    assert np.array_equal(Image(made.tiff(order, 4, 2, 32, 1, values.astype(order + "i4").tobytes(), 2)).pixels, scaled)
    assert np.array_equal(Image(made.tiff(order, 4, 2, 32, 1, (values / 65535).astype(order + "f4").tobytes(), 3)).pixels, scaled)


@pytest.mark.parametrize("order", ["<", ">"])
def test_tiff_where_zero_is_white(order: str) -> None:
    values = np.array([[0, 257, 32768, 65535]])
    expected = grey3(np.floor((65535 - values) * 255 / 65535 + 0.5))
    try:
        image = Image(made.tiff(order, 4, 1, 16, 0, values.astype(order + "u2").tobytes()))
    except errors.MediaDecodeError:
        assert order == ">"  # Pillow does not know it
        return
    assert np.array_equal(image.pixels, expected)


def test_tiff_of_twelve_bits() -> None:
    raw = made.tiff("<", 2, 1, 12, 1, bytes([0xFF, 0xF8, 0x00]))  # 4095 and 2048
    assert Image(raw).pixels[0, :, 0].tolist() == [255, 128]


def test_lab_tiff_is_what_the_formula_says() -> None:
    lab = np.array([[[255, 0, 0], [0, 0, 0], [128, 0, 0], [136, 80 % 256, 67]]], np.uint8)  # white, black, grey, red
    pixels = Image(made.tiff("<", 4, 1, 8, 8, lab.tobytes(), n_samples=3)).pixels[0].astype(int)
    assert np.abs(pixels[:3] - np.array([[255] * 3, [0] * 3, [120] * 3])).max() <= 3
    assert pixels[3][0] > 240
    assert pixels[3][1:].max() < 40


@pytest.mark.parametrize(("values", "why"), [([-1.0, 5.0], "from -1 to 5"), ([0.0, 300.0], "to 300"), ([float("nan"), 0.0], "not numbers"), ([float("inf"), 0.0], "not numbers")])
def test_floats_without_a_known_scale_are_refused(values: list[float], why: str) -> None:
    with pytest.raises(errors.UnsupportedMediaError, match=why):
        Image(made.tiff("<", 2, 1, 32, 1, np.array(values, "<f4").tobytes(), 3))


def test_cmyk_jpeg_is_read_as_adobe_writes_it() -> None:
    solid = np.empty((16, 16, 3), np.uint8)
    solid[:] = (200, 30, 90)
    image = Image(made.saved(solid, "JPEG", mode="CMYK", quality=95))
    assert image.report.mode == "CMYK"
    assert np.abs(image.pixels.astype(int) - solid).max() <= 4


@pytest.mark.parametrize(("mode", "kind"), [("RGB", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("RGB", "TIFF"), ("RGB", "WEBP")])
def test_a_colour_profile_is_applied_and_named(mode: str, kind: str) -> None:
    solid = np.empty((8, 8, 3), np.uint8)
    solid[:] = (220, 40, 40)
    options = {"lossless": True} if kind == "WEBP" else {}
    image = Image(made.saved(solid, kind, mode=mode, icc_profile=made.swapping_profile(), **options))
    assert image.report.profile
    assert image.pixels[0, 0, 1] > 180  # red and green have changed places
    assert image.pixels[0, 0, 0] < 80
    assert not image.report.notes


def test_a_profile_keeps_a_clear_colour_clear() -> None:
    pixels = np.array([[[255, 0, 0], [0, 0, 255]]], np.uint8)
    image = Image(made.saved(pixels, "PNG", icc_profile=made.swapping_profile(), transparency=(255, 0, 0)))
    assert image.pixels[0, 0].tolist() == [255, 255, 255]
    assert image.report.has_alpha


def test_an_srgb_profile_changes_nothing() -> None:
    import PIL.ImageCms

    raw = PIL.ImageCms.ImageCmsProfile(PIL.ImageCms.createProfile("sRGB")).tobytes()
    image = Image(made.saved(GRAD, "PNG", icc_profile=raw))
    assert np.array_equal(image.pixels, GRAD)
    assert image.report.profile == ""


@pytest.mark.parametrize("raw", [b"nonsense", made.swapping_profile()[:200], b"\0" * 200])
def test_a_broken_profile_is_told_and_the_pixels_stand(raw: bytes) -> None:
    image = Image(made.saved(GRAD, "PNG", icc_profile=raw))
    assert np.array_equal(image.pixels, GRAD)
    assert "profile cannot be used" in image.report.notes[0]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_one_frame_is_taken(kind: str) -> None:
    raw = made.animation(kind, [100] * 5)
    for frame in (0, 3, 4):
        image = Image(raw, frame=frame)
        assert made.number_of(image.pixels) == frame
        assert (image.report.n_frames, image.report.frame) == (5, frame)
    with pytest.raises(errors.MediaDecodeError, match="frame 5 of 5"):
        Image(raw, frame=5)
    assert is_picture(raw, animated=True)
    assert not is_picture(made.picture_seeds()[-1], animated=True)  # an MPO is a pair, not a clip


def test_a_picture_of_the_callers_is_left_as_it_was() -> None:
    import PIL.Image

    with PIL.Image.open(io.BytesIO(made.animation("GIF", [100] * 4))) as picture:
        picture.seek(2)
        assert made.number_of(Image(picture).pixels) == 0
        assert picture.tell() == 2


@pytest.mark.parametrize("size", [(1, 1), (1, 4000), (4000, 1), (3, 2)])
def test_thin_pictures(size: tuple[int, int]) -> None:
    pixels = made.gradient(*size)
    assert np.array_equal(Image(made.saved(pixels, "PNG")).pixels, pixels)


def test_sources_of_every_kind_are_one_picture(tmp_path: Path) -> None:
    import PIL.Image

    raw = made.saved(GRAD, "PNG")
    path = tmp_path / "looks like.mp4"  # told by content
    path.write_bytes(raw)
    file = io.BytesIO(raw)
    file.seek(7)
    with path.open("rb") as opened:
        for source in (path, str(path), os.fsencode(path).decode(), raw, bytearray(raw), memoryview(raw), file, opened, GRAD, np.dstack([GRAD, np.full((H, W), 255, np.uint8)]), PIL.Image.fromarray(GRAD),
                       GRAD[:, ::-1][:, ::-1]):
            image = Image(source)
            assert np.array_equal(image.pixels, GRAD)
            assert content_id(image.pixels) == content_id(GRAD)
        assert not opened.closed
    assert Image(GRAD[..., 0]).pixels.shape == GRAD.shape
    assert content_id(GRAD) != content_id(GRAD.reshape(W, H, 3))
    (part,) = Image(path).parts(None)
    assert isinstance(part, PixelPart)
    assert (part.id, part.is_frame) == (content_id(GRAD), False)
    assert str(path) in repr(Image(path))


@pytest.mark.parametrize("source", [5, None, 1.5, object()])
def test_what_is_no_source_is_refused(source: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        Image(source)


@pytest.mark.parametrize("array", [GRAD.astype(np.float32), np.zeros((3, 3, 2), np.uint8), np.zeros((0, 3), np.uint8), np.zeros(9, np.uint8)])
def test_arrays_of_other_shapes_are_refused(array: npt.NDArray[Any]) -> None:
    with pytest.raises(errors.UnsupportedMediaError, match="an array of shape"):
        Image(array)


def test_a_background_that_is_no_colour() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="background"):
        Image(GRAD, background="nocolour")


@pytest.mark.parametrize(("raw", "kind"), [(made.png(50000, 50000, 8, 2, b""), errors.UnsupportedMediaError), (made.png(9000, 9000, 8, 2, b""), errors.UnsupportedMediaError),
                                           (made.tiff("<", 60000, 60000, 8, 1, b"x"), errors.UnsupportedMediaError), (b"", errors.MediaDecodeError), (b"text", errors.MediaDecodeError),
                                           (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", errors.MediaDecodeError)])
def test_bombs_and_what_is_no_picture_name_the_file(tmp_path: Path, raw: bytes, kind: type[Exception]) -> None:
    path = tmp_path / "odd.png"
    path.write_bytes(raw)
    with pytest.raises(kind) as caught:
        Image(path)  # and no warning: those are errors here
    assert str(path) in str(caught.value)


def test_threads_leave_the_filters_of_warnings_as_they_were() -> None:
    import threading
    import warnings

    raw = made.saved(made.gradient(400, 300), "PNG")
    before = list(warnings.filters)
    failed: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(10):
                Image(raw)
                Image(made.animation("GIF", [40] * 2))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert list(warnings.filters) == before


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.png", "nul\0.png"):
        with pytest.raises(errors.MediaDecodeError):
            Image(path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
def test_truncated_files_name_the_file_and_padded_ones_are_read(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(2)
    raw = made.saved(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8), kind)
    path = tmp_path / "cut"
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(errors.MediaDecodeError) as caught:
        Image(path)
    assert str(path) in str(caught.value)
    assert np.array_equal(Image(raw + b"\0" * 999).pixels, Image(raw).pixels)


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits on a process")
def test_mutated_pictures_fail_by_type_and_name_or_not_at_all() -> None:
    """In a child with a limit on memory and time for each; 5,000 of them with PYLLOYAL_MEDIA_MUTANTS=5000."""
    run_mutants("image", int(os.environ.get("PYLLOYAL_MEDIA_MUTANTS", "600")))
