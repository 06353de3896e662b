"""Pictures, through Pillow: told by content, upright, in eight-bit sRGB.

One rule for every kind of file: the orientation is applied; a colour profile is converted to sRGB; transparency is laid on a stated
background; grey of sixteen bits is scaled, not cut; of an animation one frame is taken. What that rule does not cover is refused by
name. What was done is in the report.
"""
from __future__ import annotations

import hashlib
import io
import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from .. import errors
from ..kernel.parts import Part, PixelPart
from ..kernel.projector import Projector

if TYPE_CHECKING:
    import PIL.Image

Pixels = npt.NDArray[np.uint8]
# What is tried. Nothing that starts a program on the bytes (EPS), and nothing whose parts escape the limit on pixels (ICNS).
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "DIB", "ICO", "PPM", "AVIF", "JPEG2000", "TGA", "QOI", "PCX", "SGI", "DDS")
ANIMATED = ("GIF", "PNG", "WEBP", "AVIF")  # more than one picture in any other format is no animation
ImageSource = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | npt.NDArray[Any] | Any  # the last is a PIL image


@dataclass(frozen=True, slots=True)
class ImageReport:
    """What a picture was, and what was done to it.

    Attributes
    ----------
    name : str
        Of the file, or what kind of object it was.
    format : str
        As Pillow calls it; "" for arrays.
    mode : str
        Of its pixels before conversion, as Pillow calls it.
    stored_size, size : (int, int)
        Width and height in the file, and as fed.
    orientation : int
        The EXIF orientation that was applied; 1 for none.
    n_frames, frame : int
        Frames in the file, and the one taken.
    has_alpha : bool
        Transparency was laid on ``background``.
    background : str
    profile : str
        The colour profile that was converted to sRGB; "" for none.
    notes : tuple of str
        What else had to be decided.
    """

    name: str
    format: str
    mode: str
    stored_size: tuple[int, int]
    size: tuple[int, int]
    orientation: int
    n_frames: int
    frame: int
    has_alpha: bool
    background: str
    profile: str
    notes: tuple[str, ...]


class Image:
    """A picture for a prompt.

    Parameters
    ----------
    source : path, bytes, file object, numpy array or PIL image
        Told by its content, never by its name. An array is (height, width), (height, width, 3) or (height, width, 4) of uint8.
    background : str
        What transparency is laid on; any colour Pillow knows.
    frame : int
        Which frame of an animation.
    max_pixels : int
        More than this is refused before anything is decoded.

    Attributes
    ----------
    pixels : numpy.ndarray, uint8, shape (height, width, 3)
    report : ImageReport

    Raises
    ------
    MediaDecodeError
        It cannot be decoded; the message names the file and says why.
    UnsupportedMediaError
        Too many pixels, or pixels of a kind the rule does not cover.
    """

    def __init__(self, source: ImageSource, *, background: str = "white", frame: int = 0, max_pixels: int = 64_000_000) -> None:
        self.pixels, self.report = _decode(source, background, frame, max_pixels)

    def __repr__(self) -> str:
        width, height = self.report.size
        return f"<Image {self.report.name!r} {width}x{height}>"

    def parts(self, projector: Projector | None) -> Sequence[Part]:  # noqa: ARG002 (a picture is the same for every projector)
        """The picture, named by its content."""
        return [PixelPart(self.pixels, id=content_id(self.pixels))]


class _Quiet:
    """No warnings from Pillow (of broken metadata, of sizes): what matters is in the pixels, or raises.

    The filters of warnings are one list for all threads. Whoever comes first changes it and whoever goes last puts it back; threads that
    each saved and restored it would leave it changed.
    """

    def __init__(self) -> None:
        self._lock, self._n = threading.Lock(), 0
        self._saved: warnings.catch_warnings[None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._n += 1
            if self._n == 1:
                self._saved = warnings.catch_warnings()
                self._saved.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\b")

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n -= 1
            if not self._n and self._saved is not None:
                self._saved.__exit__(None, None, None)
                self._saved = None


quiet = _Quiet()


def content_id(pixels: Pixels) -> str:
    """A name for pixels by their content: equal for equal pictures only."""
    digest = hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=20)
    digest.update(str(pixels.shape).encode())
    return digest.hexdigest()


def name_of(source: object) -> str:
    """What to call a source in a message."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source) if isinstance(os.fspath(source), str) else os.fsdecode(source)
    name = getattr(source, "filename", None) or getattr(source, "name", None)
    return str(name) if isinstance(name, str) and name else f"<{type(source).__name__}>"


def missing(source: object, what: str, package: str, error: ImportError) -> errors.UnsupportedMediaError:
    """What to raise where a library that reads or writes media is not there."""
    return errors.UnsupportedMediaError(f"{name_of(source)}: {what} need {package}, and it cannot be imported ({error}); pip install \"pylloyal[media]\" brings it")


def _decode(source: ImageSource, background: str, frame: int, max_pixels: int) -> tuple[Pixels, ImageReport]:
    name = name_of(source)
    try:
        import PIL.Image
        import PIL.ImageColor
    except ImportError as error:
        raise missing(name, "pictures", "Pillow (the package pillow)", error) from error
    try:
        colour = PIL.ImageColor.getrgb(background)[:3]
    except ValueError as error:
        raise errors.InvalidArgumentError(f"background is {background!r}: {error}") from error
    if isinstance(source, np.ndarray):
        source = _from_array(source, name)
    try:
        with quiet:
            if isinstance(source, PIL.Image.Image):
                return _of_pil(source, name, background, colour, frame, max_pixels)
            with open_picture(source) as picture:
                return converted(picture, name, background, colour, frame, max_pixels)
    except errors.PylloyalError:
        raise
    except PIL.Image.DecompressionBombError as error:
        raise errors.UnsupportedMediaError(f"{name}: {error}") from error
    except PIL.UnidentifiedImageError as error:
        raise errors.MediaDecodeError(f"{name}: not a picture of any format that is known here") from error
    except FileNotFoundError as error:
        raise errors.MediaDecodeError(f"{name}: no such file") from error
    except Exception as error:  # decoders raise whatever comes out of broken bytes
        raise errors.MediaDecodeError(f"{name}: {type(error).__name__}: {error}") from error


def open_picture(source: ImageSource) -> PIL.Image.Image:
    """A picture of one of ``FORMATS``, nothing of it decoded yet; raises what Pillow does."""
    import PIL.Image

    if not (isinstance(source, str | os.PathLike | bytes | bytearray | memoryview) or hasattr(source, "read")):
        raise errors.InvalidArgumentError(f"a picture is a path, bytes, a file object, an array or a PIL image; {type(source).__name__} is none of them")
    file = cast(Any, source)
    if hasattr(file, "seek"):
        file.seek(0)
    return PIL.Image.open(io.BytesIO(source) if isinstance(source, bytes | bytearray | memoryview) else file, formats=FORMATS)


def is_picture(source: ImageSource, *, animated: bool = False) -> bool:
    """Whether these bytes begin as a picture does; with ``animated``, as one of several frames in time."""
    try:
        with quiet, open_picture(source) as picture:
            return not animated or (picture.format in ANIMATED and int(getattr(picture, "n_frames", 1)) > 1)
    except errors.PylloyalError:
        raise
    except Exception as error:  # too large is a picture as well
        return not animated and type(error).__name__ == "DecompressionBombError"


def _of_pil(picture: PIL.Image.Image, name: str, background: str, colour: tuple[int, ...], frame: int, max_pixels: int) -> tuple[Pixels, ImageReport]:
    """A picture of the caller's own, left at the frame it stood at."""
    at = picture.tell() if getattr(picture, "n_frames", 1) > 1 else 0
    try:
        return converted(picture, name, background, colour, frame, max_pixels)
    finally:
        if picture.tell() != at:
            picture.seek(at)


def _from_array(array: npt.NDArray[Any], name: str) -> PIL.Image.Image:
    import PIL.Image

    shapes = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype != np.uint8 or not shapes or 0 in array.shape:
        raise errors.UnsupportedMediaError(f"{name}: an array of shape {array.shape} and type {array.dtype}; pictures are (height, width), (height, width, 3) or (height, width, 4) of uint8")
    return PIL.Image.fromarray(np.ascontiguousarray(array))


def converted(picture: PIL.Image.Image, name: str, background: str = "white", colour: tuple[int, ...] = (255, 255, 255), frame: int = 0,
              max_pixels: int = 64_000_000) -> tuple[Pixels, ImageReport]:
    """One frame of an open picture by the rule, and what was done; raises what Pillow does."""
    import PIL.Image
    import PIL.ImageOps

    notes: list[str] = []
    kind, n_frames = picture.format or "", int(getattr(picture, "n_frames", 1))
    if not 0 <= frame < n_frames:
        raise errors.MediaDecodeError(f"{name}: frame {frame} of {n_frames}")
    _check_size(name, picture.size, max_pixels)
    if n_frames > 1:
        picture.seek(frame)
        _check_size(name, picture.size, max_pixels)
    tags, stored = getattr(picture, "tag_v2", None), picture.size
    turned = tags.get(0x0112, 1) if kind == "TIFF" and tags is not None else 1  # Pillow itself turns TIFF upright, and forgets it did
    deep, is_negative = _depth(picture), kind == "TIFF" and tags is not None and tags.get(0x0106) == 0
    picture.load()
    _check_size(name, picture.size, max_pixels)  # icons only tell now
    mode = picture.mode
    if kind != "TIFF":
        stored = picture.size
    elif turned in range(5, 9):
        stored = stored[1], stored[0]
    orientation = 1
    try:
        orientation = int(picture.getexif().get(0x0112, 1))
    except Exception as error:  # broken metadata say nothing about the pixels
        notes.append(f"the orientation cannot be read ({type(error).__name__}: {error}); taken as upright")
    if orientation in range(2, 9):
        kept = dict(picture.info)
        picture = PIL.ImageOps.exif_transpose(picture)
        picture.info.update({key: kept[key] for key in ("icc_profile", "transparency") if key in kept})
    elif orientation == 1 and turned in range(2, 9):
        orientation = int(turned)
    elif orientation != 1:
        notes.append(f"orientation {orientation} is none of 1 to 8; taken as upright")
        orientation = 1
    if mode.startswith("I;16") and (is_negative or deep == "I;12"):  # which Pillow leaves to its caller
        wide = np.asarray(picture).astype(np.uint32)
        wide = (wide * 65535 + 2047) // 4095 if deep == "I;12" else wide
        kept, picture = dict(picture.info), PIL.Image.fromarray((65535 - wide if is_negative else wide).astype(np.uint16))
        picture.info.update(kept)
    _scale_key(picture, deep)
    picture, profile = _to_srgb(picture, notes)
    pixels, has_alpha = _to_rgb(picture, name, colour)
    return pixels, ImageReport(name, kind, mode, stored, (pixels.shape[1], pixels.shape[0]), orientation, n_frames, frame, has_alpha, background, profile, tuple(notes))


def _depth(picture: PIL.Image.Image) -> str:
    """How Pillow will unpack the pixels ("L;4", "RGB;16B"); known before they are loaded."""
    tile = getattr(picture, "tile", None)
    args = tile[0][3] if tile else ""
    return str(args[0] if isinstance(args, tuple) and args else args)


def _scale_key(picture: PIL.Image.Image, depth: str) -> None:
    """Bring a PNG's transparent colour to the depth its pixels were unpacked to; Pillow leaves it as stored."""
    key = picture.info.get("transparency")
    if isinstance(key, int) and depth in ("L;2", "L;4"):
        picture.info["transparency"] = key * (85 if depth == "L;2" else 17)
    elif isinstance(key, tuple) and depth == "RGB;16B":
        picture.info["transparency"] = tuple(part >> 8 for part in key)


def _check_size(name: str, size: tuple[int, int], max_pixels: int) -> None:
    if size[0] * size[1] > max_pixels:
        raise errors.UnsupportedMediaError(f"{name}: {size[0]} x {size[1]} pixels, more than max_pixels ({max_pixels})")
    if 0 in size:
        raise errors.UnsupportedMediaError(f"{name}: {size[0]} x {size[1]} pixels")


def _to_srgb(picture: PIL.Image.Image, notes: list[str]) -> tuple[PIL.Image.Image, str]:
    """The picture in sRGB if it carries a profile of its own colours, and that profile's name."""
    import PIL.Image
    import PIL.ImageCms

    raw = picture.info.get("icc_profile")
    if not raw:
        return picture, ""
    try:
        profile = PIL.ImageCms.ImageCmsProfile(io.BytesIO(raw))
        called = PIL.ImageCms.getProfileDescription(profile).strip() or "unnamed"
        plain, alpha = picture, None
        if picture.mode in ("RGBa", "La"):
            plain = picture.convert({"RGBa": "RGBA", "La": "LA"}[picture.mode])
        if plain.mode in ("P", "PA") or "transparency" in plain.info:
            is_clear = plain.mode == "PA" or "transparency" in plain.info
            plain = plain.convert(("LA" if plain.mode == "L" else "RGBA") if is_clear else "RGB")
        if plain.mode in ("RGBA", "LA"):
            alpha, plain = plain.getchannel("A"), plain.convert(plain.mode[:-1])
        srgb = PIL.ImageCms.createProfile("sRGB")
        if plain.mode == "RGB" and _is_same(profile, srgb):  # whatever it calls itself
            return picture, ""
        converted = PIL.ImageCms.profileToProfile(plain, profile, srgb, outputMode="RGB")
        if converted is None:
            raise PIL.ImageCms.PyCMSError("no conversion")
        if alpha is not None:
            converted.putalpha(alpha)
        return converted, called
    except Exception as error:  # a broken profile, or one for another kind of pixels
        notes.append(f"the colour profile cannot be used ({type(error).__name__}: {error}); its colours are taken as sRGB")
        return picture, ""


def _is_same(profile: Any, srgb: Any) -> bool:
    """Whether a profile moves no colour of a grid by more than rounding does."""
    import PIL.Image
    import PIL.ImageCms

    steps = np.linspace(0, 255, 9).round().astype(np.uint8)
    grid = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(9, 81, 3)
    moved = PIL.ImageCms.profileToProfile(PIL.Image.fromarray(grid), profile, srgb, outputMode="RGB")
    return moved is not None and int(np.abs(np.asarray(moved).astype(int) - grid).max()) <= 2


def _to_rgb(picture: PIL.Image.Image, name: str, colour: tuple[int, ...]) -> tuple[Pixels, bool]:
    import PIL.Image

    mode = picture.mode
    if mode.startswith("I;16") or mode in ("I", "F"):
        grey = _grey(np.asarray(picture), mode, name)
        alpha = _key_alpha(picture, np.asarray(picture))
        return _laid_on(np.stack([grey] * 3, axis=-1), alpha, colour), alpha is not None
    if mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        if mode in ("RGBa", "La"):
            picture = picture.convert({"RGBa": "RGBA", "La": "LA"}[mode])
        rgba = np.asarray(picture.convert("RGBA"))
        return _laid_on(rgba[..., :3], rgba[..., 3], colour), True
    if mode == "LAB":
        import PIL.ImageCms

        lab = PIL.ImageCms.createProfile("LAB")
        converted = PIL.ImageCms.profileToProfile(picture, lab, PIL.ImageCms.createProfile("sRGB"), outputMode="RGB")
        return np.asarray(cast(Any, converted), np.uint8), False
    if mode in ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV"):
        return np.array(picture.convert("RGB"), np.uint8), False
    raise errors.UnsupportedMediaError(f"{name}: pixels of mode {mode!r}")


def _grey(values: npt.NDArray[Any], mode: str, name: str) -> Pixels:
    """Grey of sixteen bits or floats, as eight bits: scaled and rounded."""
    if mode == "F":
        if not np.isfinite(values).all():
            raise errors.UnsupportedMediaError(f"{name}: floating-point pixels that are not numbers")
        low, high = float(values.min()), float(values.max())
        if low < 0 or high > 255:
            raise errors.UnsupportedMediaError(f"{name}: floating-point pixels from {low:g} to {high:g}; 0 to 1 and 0 to 255 are understood")
        rounded: Pixels = np.rint(values * 255 if high <= 1 else values).astype(np.uint8)
        return rounded
    wide = values.astype(np.int64)
    if wide.min() < 0 or wide.max() > 65535:
        raise errors.UnsupportedMediaError(f"{name}: whole-number pixels from {wide.min()} to {wide.max()}; 0 to 65535 are understood")
    scaled: Pixels = ((wide * 255 + 32767) // 65535).astype(np.uint8)
    return scaled


def _key_alpha(picture: PIL.Image.Image, values: npt.NDArray[Any]) -> Pixels | None:
    """The mask of a grey picture in which one value means transparent."""
    key = picture.info.get("transparency")
    return None if not isinstance(key, int) else np.where(values == key, 0, 255).astype(np.uint8)


def _laid_on(rgb: npt.NDArray[Any], alpha: npt.NDArray[Any] | None, colour: tuple[int, ...]) -> Pixels:
    if alpha is None:
        return np.ascontiguousarray(rgb, np.uint8)
    mixed = np.empty(rgb.shape, np.uint8)
    under = np.asarray(colour, np.uint32)
    for y in range(0, len(rgb), 256):  # in strips: the sums are four times as wide as the pixels
        share = alpha[y : y + 256].astype(np.uint32)[..., None]
        mixed[y : y + 256] = (rgb[y : y + 256].astype(np.uint32) * share + under * (255 - share) + 127) // 255
    return mixed
