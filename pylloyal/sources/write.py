"""Pictures and clips to files, without loss."""
from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .image import missing


def write_picture(path: str | os.PathLike[str], pixels: npt.NDArray[np.uint8]) -> None:
    """Pixels of shape (height, width, 3) as PNG."""
    try:
        import PIL.Image
    except ImportError as error:
        raise missing(path, "pictures", "Pillow (the package pillow)", error) from error
    PIL.Image.fromarray(pixels).save(Path(path), "PNG")


def write_clip(path: str | os.PathLike[str], frames: Sequence[npt.NDArray[np.uint8]]) -> None:
    """Frames of one shape, one a second, as FFV1 in whatever container the name says."""
    try:
        import av
    except ImportError as error:
        raise missing(path, "clips and sound", "PyAV (the package av)", error) from error
    with av.open(os.fspath(path), "w") as container:
        stream = container.add_stream("ffv1", rate=1)
        stream.height, stream.width, _ = frames[0].shape
        stream.pix_fmt = "bgr0"
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="bgr0")
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
