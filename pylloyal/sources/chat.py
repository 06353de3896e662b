"""Conversations with pictures, clips and sound in them, through the model's own chat template.

The template sees a placeholder where a medium stands, as the engine's own server does it; the rendered prompt is cut there again, and the
media are laid out between the tokens. So content parts come in any order, a placeholder in a user's words is only words, and what the
template refuses is refused in its own words.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import errors
from ..kernel.chat import ChatPrompt, Message
from ..kernel.parts import PartSource, is_source
from ..kernel.projector import Projector
from .audio import Audio
from .image import Image
from .prompt import Prompt
from .video import Video

_KINDS: dict[str, type[Image] | type[Video] | type[Audio]] = {"image": Image, "video": Video, "audio": Audio}


@dataclass(frozen=True)
class MediaChat:
    """A rendered conversation with media.

    Attributes
    ----------
    chat : ChatPrompt
        What the template made of it: grammar, stops and the parser for the answer.
    atoms : list of int or PartSource
        The prompt in order: tokens, and the media between them.
    """

    chat: ChatPrompt
    atoms: list[int | PartSource]
    _projector: Projector

    def prompt(self, start: int = 0, end: int | None = None) -> Prompt:
        """Some of the atoms laid out, all by default; for a branch that holds those before them."""
        items: list[list[int] | PartSource] = []
        for atom in self.atoms[start:end]:
            if not isinstance(atom, int):
                items.append(atom)
            elif items and isinstance(items[-1], list):
                items[-1].append(atom)
            else:
                items.append([atom])
        return Prompt(self._projector, items, add_special=False)


def chat(projector: Projector, messages: Sequence[Message], **options: Any) -> MediaChat:
    """Render a conversation whose messages may hold media.

    Parameters
    ----------
    messages : sequence of dict
        As for :meth:`Model.chat`; a content may be a list of text, sources of media (:class:`Image`, :class:`Video`, :class:`Audio`,
        anything with ``parts``), and ``{"type": "text" | "image" | "video" | "audio", ...}`` with the text or source under the
        key of that name.
    **options
        Of :meth:`Model.chat`.

    Raises
    ------
    TemplateError
        In the template's own words, or because it left a medium out or showed it twice.
    FormatError
        A content part is of no known form.
    """
    mark = f"[media {os.urandom(12).hex()} "
    media: list[PartSource] = []

    def part_of(part: Any) -> Any:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        if isinstance(part, Mapping) and part.get("type") in _KINDS:
            kind = str(part["type"])
            if kind not in part:
                raise errors.FormatError(f"a content part of type {kind!r} has its source under the key {kind!r}")
            source = part[kind]
            part = source if is_source(source) else _KINDS[kind](source)
        if is_source(part):
            media.append(part)
            return {"type": "media_marker", "text": f"{mark}{len(media) - 1}]"}
        return part

    plain = [{**message, "content": [part_of(part) for part in message["content"]]} if isinstance(message.get("content"), list | tuple) else message for message in messages]
    model = projector.model
    rendered = model.chat(plain, **options)
    found = re.findall(re.escape(mark) + r"(\d+)]", rendered.prompt)
    if found != [str(i) for i in range(len(media))]:
        raise errors.TemplateError(f"the conversation has {len(media)} media, and the chat template shows {len(found)} of them" + (", in another order" if sorted(found) != found else ""))
    atoms = rendered._atoms(re.compile(re.escape(mark) + r"(\d+)]"), media)
    return MediaChat(rendered, atoms, projector)
