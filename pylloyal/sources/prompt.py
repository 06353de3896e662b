"""Text and media in one order, laid out once: the same object is quoted and decoded, so the quote is the charge."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from .. import errors
from ..kernel.model import Model
from ..kernel.parts import Part, PartSource, TextPart, TokenPart, is_source
from ..kernel.projector import LaidOut, Projector

Item = str | Part | PartSource | Sequence[int]


class Prompt(LaidOut):
    """A prompt of text, pictures, clips, sound and rows, in any order.

    Parameters
    ----------
    through : Projector or Model
        What encodes the media; a model alone for prompts without any.
    items : iterable
        Text (its control tokens inert; :class:`~pylloyal.TextPart` reads them), lists of token ids, and anything with ``parts``:
        :class:`~pylloyal.Image`, :class:`~pylloyal.Video`, :class:`~pylloyal.Audio`, :class:`~pylloyal.Embeddings`, a source of
        your own.
    add_special : bool
        Begin with the model's own special tokens, as a fresh branch wants it.

    Raises
    ------
    MediaError
        A medium cannot be read or prepared, or there is no projector that takes it.
    """

    def __init__(self, through: Projector | Model, items: Iterable[Item], *, add_special: bool = True) -> None:
        projector, model = (through, through.model) if isinstance(through, Projector) else (None, through)
        self.sources: list[PartSource] = []
        parts: list[Part] = []
        owners: dict[int, PartSource] = {}
        for item in items:
            if isinstance(item, str):
                parts.append(TextPart(item))
            elif is_source(item):
                self.sources.append(item)
                made = item.parts(projector)
                owners.update((i, item) for i in range(len(parts), len(parts) + len(made)))
                parts.extend(made)
            elif hasattr(item, "_fields") and not isinstance(item, tuple):
                parts.append(cast(Part, item))
            elif isinstance(item, Sequence | np.ndarray):
                parts.append(TokenPart(cast(Sequence[int], item)))
            else:
                raise errors.InvalidArgumentError(f"a prompt holds text, token ids and sources of media; {type(item).__name__} is none of them")
        try:
            super().__init__(model, projector, [part._fields() for part in parts], add_special=add_special)
        except errors.MediaError as error:
            name = getattr(getattr(owners.get(-1 if error.index is None else error.index), "report", None), "name", None)
            if name is None:
                raise
            raise type(error)(f"{name}: {error}", error.failure) from error
