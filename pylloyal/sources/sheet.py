"""A contact sheet: frames side by side with their times, to look at what a model is shown."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .. import errors

if TYPE_CHECKING:
    import PIL.Image
    import PIL.ImageDraw

_CELL, _GAP, _LABEL = 192, 6, 16


def contact_sheet(pictures: Sequence[tuple[str, npt.NDArray[np.uint8]]]) -> PIL.Image.Image:
    """Pictures of any size, each with a line of text under it, in rows from left to right.

    Parameters
    ----------
    pictures : sequence of (str, uint8 array of shape (height, width, 3))
    """
    import PIL.Image
    import PIL.ImageDraw

    if not pictures:
        raise errors.InvalidArgumentError("a contact sheet of no pictures")
    columns = min(len(pictures), max(1, math.ceil(math.sqrt(len(pictures) * 1.5))))
    rows = math.ceil(len(pictures) / columns)
    step_x, step_y = _CELL + _GAP, _CELL + _LABEL + _GAP
    sheet = PIL.Image.new("RGB", (columns * step_x + _GAP, rows * step_y + _GAP), (32, 32, 32))
    pen = PIL.ImageDraw.Draw(sheet)
    for i, (label, pixels) in enumerate(pictures):
        x, y = _GAP + i % columns * step_x, _GAP + i // columns * step_y
        picture = PIL.Image.fromarray(pixels)
        scale = min(_CELL / picture.width, _CELL / picture.height)
        size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        picture = picture.resize(size, PIL.Image.Resampling.NEAREST if scale > 1 else PIL.Image.Resampling.LANCZOS)
        sheet.paste(picture, (x + (_CELL - size[0]) // 2, y + (_CELL - size[1]) // 2))
        pen.text((x, y + _CELL + 2), _fitted(pen, label), fill=(230, 230, 230))
    return sheet


def _fitted(pen: PIL.ImageDraw.ImageDraw, label: str) -> str:
    """As much of one line as fits under a picture."""
    label = "".join(c if c.isprintable() else "?" for c in label)
    if pen.textlength(label) <= _CELL:
        return label
    while label and pen.textlength(label + "…") > _CELL:
        label = label[:-1]
    return label + "…"
