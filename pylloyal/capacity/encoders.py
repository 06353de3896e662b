"""What the graph of an encoder takes, for each kind of projector whose graph is written down here."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .encoder import Encoder
from .encoders_dynamic import GRAPHS as DYNAMIC
from .encoders_square import GRAPHS as SQUARE
from .eye import MERGING, Eye
from .header import Tensor

GRAPHS: Final = {**DYNAMIC, **SQUARE}


def encoder_bytes(header: Mapping[str, Any], tensors: Mapping[str, Tensor], eye: Eye, size: tuple[int, int], flash: bool, n_frames: int = 1) -> int | None:
    """Bytes of the buffer the graph takes for a picture as it reaches the encoder; None when the graph of this kind is not written down here."""
    build = GRAPHS.get(eye.kind)
    if build is None or size[0] < eye.patch or size[1] < eye.patch:
        return None
    encoder = Encoder(header, tensors, eye, size, n_frames if eye.kind in MERGING else 1, flash)
    encoder.g.expand(build(encoder))
    return encoder.g.buffer_bytes()


def is_even(header: Mapping[str, Any], eye: Eye) -> bool:
    """With flash attention, every tensor of the graph grows as the picture does: then the buffer does too."""
    return eye.kind not in ("resampler", "minicpmv4_6", "youtuvl") and not header.get("clip.vision.n_wa_pattern")
