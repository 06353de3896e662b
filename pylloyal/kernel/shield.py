"""Control tokens that are only spelled out ("<|im_end|>" in a document) go through a chat template as placeholders.

Only the names are replaced: what a template does with the words around them (trimming, looking for a beginning) it still does.
"""
from __future__ import annotations

import os
import re
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import errors
from .._ffi import capi
from .._ffi.load import library
from .._ffi.memory import i32_array, u32_room
from .vocab import TokenFlags, Vocab


class Shield:
    """Puts placeholders for control tokens that are only spelled out, and takes them away from the rendered prompt again."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._mark = f"x{os.urandom(12).hex()}"
        self._words: dict[str, str] = {}
        self._required: set[str] = set()

    def message(self, message: Any, spelled: frozenset[str] | None) -> Any:
        """A message as the template may see it: without these control tokens' names if the model wrote it, without any if a user or tool did."""
        if not isinstance(message, Mapping):
            return message
        if spelled:
            out = {**message, **{key: self._hide(message[key], spelled) for key in ("content", "reasoning_content") if key in message}}
            if calls := message.get("tool_calls"):
                out["tool_calls"] = [{**call, "function": {**call["function"], "arguments": self._hide(call["function"]["arguments"], spelled)}} for call in calls]
            return out
        if message.get("role") not in ("user", "tool"):
            return message
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._hide(content)}
        if not isinstance(content, list):
            return message
        # A name may be cut in two by the parts, and whole again once the template has put them together.
        others = "".join("\n".join(cut(lexicon(self._vocab).control, part["text"])[::2]) for part in content if _has_text(part))
        hide = self._placeholder if self._vocab.spells_control(others) else self._hide
        return {**message, "content": [{**part, "text": hide(part["text"])} if _has_text(part) else part for part in content]}

    def lift(self, prompt: str) -> list[str]:
        """The prompt cut up, the words behind the placeholders at odd places."""
        if not self._words:
            return [prompt]
        pieces = re.split(f"({self._mark}[0-9a-f]{{8}}x)", prompt)
        # The template may leave out what the model once thought, but nothing that was said to the model, and nothing by halves.
        if not self._required <= set(pieces) or any(self._mark in piece.lower() for piece in pieces[::2]):
            raise errors.TemplateError("a message spells out control tokens, and the chat template does not pass its text through unchanged, so they cannot be kept inert")
        return [self._words[piece] if i % 2 else piece for i, piece in enumerate(pieces)]

    def _hide(self, text: str, spelled: frozenset[str] | None = None) -> str:
        if not self._vocab.spells_control(text):
            return text
        pieces = cut(lexicon(self._vocab).control, text, only=spelled)
        if spelled is None and any(map(self._vocab.spells_control, pieces[::2])):  # the tokenizer reads it in another way than we do
            return self._placeholder(text)
        return "".join(self._placeholder(piece, spelled is None) if i % 2 else piece for i, piece in enumerate(pieces))

    def _placeholder(self, text: str, is_required: bool = True) -> str:
        placeholder = f"{self._mark}{len(self._words):08x}x"
        self._words[placeholder] = text
        if is_required:
            self._required.add(placeholder)
        return placeholder


def _has_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


# ------------------------------------------------------------------------------------------------------- texts and tokenizers


@dataclass(frozen=True)
class Lexicon:
    """What has to be known of a vocabulary to take texts apart.

    Attributes
    ----------
    control : re.Pattern
        Any control token's name.
    lead : str
        A character that keeps the tokenizer from putting a space before a text that is encoded after it; "" if it never does.
    """

    control: re.Pattern[str]
    lead: str


_lexicons: weakref.WeakKeyDictionary[Vocab, Lexicon] = weakref.WeakKeyDictionary()


def lexicon(vocab: Vocab) -> Lexicon:
    """Cost: one pass over the vocabulary, the first time."""
    if (known := _lexicons.get(vocab)) is None:
        flags = u32_room(len(vocab))
        library().pyl_token_flags(vocab._model._ptr(), i32_array(range(len(vocab))), len(vocab), flags)
        names = {vocab.piece(token).decode("utf-8", "replace") for token, flag in enumerate(flags) if flag & capi.TOKEN_CONTROL} - {""}
        pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
        pads = vocab.decode_bytes(vocab.encode("x")) != b"x"
        leads = [lead for lead in ("\n", ".", "a") if _starts(vocab.encode(f"{lead}x"), vocab.encode(lead))]
        known = _lexicons[vocab] = Lexicon(re.compile(f"({pattern})"), leads[0] if pads and leads else "")
    return known


def _starts(tokens: Sequence[int], beginning: Sequence[int]) -> bool:
    return tokens[: len(beginning)] == beginning


def cut(pattern: re.Pattern[str], text: str, *, only: frozenset[str] | None = None, keep: frozenset[str] = frozenset()) -> list[str]:
    """A text cut up, the names of control tokens at odd places: all of them, or ``only`` some, or all but those to ``keep``."""
    pieces, out = pattern.split(text), [""]
    for i, piece in enumerate(pieces):
        if i % 2 and piece not in keep and (only is None or piece in only):
            out += [piece, ""]
        else:
            out[-1] += piece
    return out


def spelled_out(vocab: Vocab, tokens: Sequence[int]) -> frozenset[str]:
    """The control tokens whose names tokens make up without being them."""
    names = Counter(lexicon(vocab).control.findall(vocab.decode(tokens, special=True)))
    if not names:
        return frozenset()
    real = Counter(vocab.piece(token).decode("utf-8", "replace") for token, flags in zip(tokens, vocab.flags(tokens), strict=True) if TokenFlags.CONTROL in flags)
    return frozenset(name for name, n in names.items() if n > real[name])


def encode_inside(vocab: Vocab, text: str, *, parse_special: bool) -> list[int]:
    """Tokens of a text that stands after another: some tokenizers put a space before whatever they are given."""
    if lead := lexicon(vocab).lead:
        alone, both = vocab.encode(lead), vocab.encode(lead + text, parse_special=parse_special)
        if _starts(both, alone):
            return both[len(alone) :]
    return vocab.encode(text, parse_special=parse_special)
