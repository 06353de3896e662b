"""An encoder of pictures and sound, and prompts laid out through it."""
from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._ffi import capi
from .._ffi.handle import Handle
from .._ffi.load import library, take_text_at
from .._ffi.memory import Parts, new, ref
from .model import Model
from .params import path_bytes, projector_params


@dataclass(frozen=True, slots=True)
class ProjectorStatistics:
    """What a projector is, and what it has done since it was opened.

    Attributes
    ----------
    has_vision, has_audio : bool
    sample_rate : int
        Of the sound it takes, in Hz; 0 when it takes none.
    n_embd : int
        Floats in a row.
    is_mrope : bool
        Rows stand at (time, row, column), and a picture takes fewer positions than cells.
    is_non_causal : bool
        A picture's rows see each other, so they must fit one dispatch.
    n_frames_merged : int
        Frames of a clip that share one set of rows: 1 or 2.
    n_encodes, n_cache_hits : int
        Encoder runs, of which several pictures of one shape share one where the encoder can, and stretches of rows that came from the cache instead.
    cache_bytes : int
        Rows in the cache now.
    encode_s : float
        Seconds in the encoder.
    n_prepared : int
        Pictures and sounds that were scaled and cut for the encoder: once for all tiles of one.
    weights_bytes, compute_bytes : int
        Its weights, and the buffers of its graphs now: none before the first picture or sound, and growing with larger ones.
    """

    has_vision: bool
    has_audio: bool
    sample_rate: int
    n_embd: int
    is_mrope: bool
    is_non_causal: bool
    n_frames_merged: int
    n_encodes: int
    n_cache_hits: int
    cache_bytes: int
    encode_s: float
    n_prepared: int
    weights_bytes: int
    compute_bytes: int


class Projector(Handle):
    """A projector file ("mmproj"), opened for one model.

    Parameters
    ----------
    model : Model
    path : str or os.PathLike
        A GGUF file; its metadata are checked against the model before anything is loaded.
    n_threads, flash_attn
        As for :class:`~pylloyal.Store`.
    gpu : bool
        Encode on an accelerator, where there is one.
    image_min_tokens, image_max_tokens : int, optional
        Bounds on the rows of a picture, to which encoders of dynamic resolution scale it. One that would take more than ``image_max_tokens`` all
        the same, because it is very thin or the encoder has one size only, raises :class:`~pylloyal.errors.MediaError` when a prompt is made of
        it, with ``need`` and ``have``. The view of the whole that tiling projectors add is not counted.
    cache_bytes : int
        Most bytes of encoded rows to keep for pictures that come again. Forks need none of it: they share the cells.

    Raises
    ------
    ProjectorMismatchError
        Made for a model of another width; both numbers are named, and where each comes from.
    KernelIOError, FormatError
        The file cannot be read, or is no projector the engine can load.
    """

    def __init__(self, model: Model, path: str | os.PathLike[str], *, n_threads: int | None = None, gpu: bool = False, flash_attn: bool | None = None,
                 image_min_tokens: int | None = None, image_max_tokens: int | None = None, cache_bytes: int = 0) -> None:
        lib = library()
        params = projector_params(n_threads=n_threads, gpu=gpu, flash_attn=flash_attn, image_min_tokens=image_min_tokens, image_max_tokens=image_max_tokens, cache_bytes=cache_bytes)
        self.path = os.fspath(path)
        raw = path_bytes(self.path)
        pointer, parent = capi.pyl_projector_p(), model._ptr()
        super().__init__(pointer, lib.pyl_projector_free, parent=model)
        lib.pyl_projector_open(ref(pointer), parent, raw, len(raw), ref(params))
        self.model = model

    def __repr__(self) -> str:
        return f"<Projector {self.path!r}{' closed' if self.is_closed else ''}>"

    def statistics(self) -> ProjectorStatistics:
        """What it is, and what it has done."""
        i = new(capi.pyl_projector_info)
        library().pyl_projector_describe(self._ptr(), ref(i))
        return ProjectorStatistics(bool(i.has_vision), bool(i.has_audio), i.sample_rate, i.n_embd, bool(i.is_mrope), bool(i.is_non_causal), i.n_frames_merged, i.n_encodes,
                                   i.n_cache_hits, i.cache_bytes, i.encode_s, i.n_prepared, i.weights_bytes, i.compute_bytes)


@dataclass(frozen=True, slots=True)
class Quote:
    """What a prompt takes: exact, and what decoding it will be charged.

    Attributes
    ----------
    n_segments : int
        Stretches of text or rows.
    n_cells : int
        Cells it will take.
    n_pos : int
        How far it will move a branch.
    n_media : int
        Stretches of rows.
    max_rows : int
        Rows of the longest stretch that has to fit one dispatch; 0 for none.
    is_decodable : bool
        False when a part is a placeholder.
    """

    n_segments: int
    n_cells: int
    n_pos: int
    n_media: int
    max_rows: int
    is_decodable: bool

    @property
    def slack(self) -> int:
        """Cells less positions."""
        return self.n_cells - self.n_pos


class LaidOut(Handle):
    """Text and media in order, laid out: the kernel's side of a :class:`~pylloyal.Prompt`.

    Parameters
    ----------
    model : Model
    projector : Projector or None
    parts : sequence of dict
        The fields of a ``pyl_part`` each, pointers given as bytes, numpy arrays or text.
    add_special : bool
        Begin with the model's own special tokens.
    """

    def __init__(self, model: Model, projector: Projector | None, parts: Sequence[dict[str, Any]], *, add_special: bool) -> None:
        lib = library()
        made = Parts(parts)
        pointer, parent = capi.pyl_prompt_p(), model._ptr()
        super().__init__(pointer, lib.pyl_prompt_free, parent=model)
        lib.pyl_prompt_make(ref(pointer), parent, projector._ptr() if projector else None, made.array, made.n, capi.TOKENIZE_ADD_SPECIAL if add_special else 0)

    def quote(self) -> Quote:
        q = new(capi.pyl_quote)
        library().pyl_prompt_quote(self._ptr(), ref(q))
        return Quote(q.n_segments, q.n_cells, q.n_pos, q.n_media, q.max_rows, bool(q.is_decodable))

    def segments(self) -> list[dict[str, Any]]:
        """Its stretches in order, as the kernel tells them."""
        found: list[dict[str, Any]] = json.loads(take_text_at(library().pyl_prompt_segments, 1, self._ptr()))
        return found
