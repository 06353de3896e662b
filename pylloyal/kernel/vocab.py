"""Text to tokens and back."""
from __future__ import annotations

import codecs
import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .._ffi import capi
from .._ffi.load import library, take_text_at
from .._ffi.memory import i32_array, i32_room, ref, size, u32_room

if TYPE_CHECKING:
    from .model import Model


class TokenFlags(enum.IntFlag):
    """What kind of token an id is."""

    END_OF_GENERATION = capi.TOKEN_EOG
    CONTROL = capi.TOKEN_CONTROL
    BYTE = capi.TOKEN_BYTE
    UNUSED = capi.TOKEN_UNUSED
    UNKNOWN = capi.TOKEN_UNKNOWN
    USER_DEFINED = capi.TOKEN_USER


class Vocab:
    """The vocabulary of a model.

    Attributes
    ----------
    bos, eos, eot, nl : int or None
        Ids of the special tokens, None where the model has none.
    adds_bos : bool
        True when the model wants its beginning-of-sequence token first.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        info = model.info
        self.size = info.n_vocab
        self.bos, self.eos, self.eot, self.nl = (t if t >= 0 else None for t in (info.bos, info.eos, info.eot, info.nl))
        self.adds_bos = bool(info.add_bos)

    def __len__(self) -> int:
        return int(self.size)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Tokens of a text.

        Parameters
        ----------
        add_special : bool
            Add the model's BOS / EOS where it wants them: for the start of a conversation.
        parse_special : bool
            Read text such as ``<|im_end|>`` as the control token. Off by default, so that a user's words stay words; on for a
            rendered chat prompt.

        Raises
        ------
        UnsupportedOperationError
            The model file carries no vocabulary.
        FormatError
            The text holds lone surrogates.
        """
        raw = text.encode("utf-8", "surrogatepass")
        flags = capi.TOKENIZE_ADD_SPECIAL * add_special | capi.TOKENIZE_PARSE_SPECIAL * parse_special
        room = len(raw) + 8  # a token is at least a byte of text, but for the special ones around it
        n = size()
        while True:
            tokens = i32_room(room)
            lib, pointer = library(), self._model._ptr()
            try:
                lib.pyl_tokenize(pointer, raw, len(raw), flags, tokens, room, ref(n))
            except ValueError:
                if n.value <= room:
                    raise
                room = n.value
                continue
            return list(tokens[: n.value])

    def decode_bytes(self, tokens: Iterable[int], *, special: bool = False) -> bytes:
        """The bytes of tokens, exactly; they may end in mid-character.

        Parameters
        ----------
        special : bool
            Show control tokens as their text; off, they are left out.
        """
        ids = tokens if isinstance(tokens, Sequence) else list(tokens)
        return take_text_at(library().pyl_detokenize, 4, self._model._ptr(), i32_array(ids), len(ids), capi.DETOKENIZE_SPECIAL * special)

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD. For text as it comes, see :meth:`stream`."""
        return self.decode_bytes(tokens, special=special).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """The bytes of one token, control tokens included."""
        return self.decode_bytes([token], special=True)

    def flags(self, tokens: Sequence[int]) -> list[TokenFlags]:
        """Kind of each token."""
        out = u32_room(len(tokens))
        library().pyl_token_flags(self._model._ptr(), i32_array(tokens), len(tokens), out)
        return [TokenFlags(f) for f in out]

    def spells_control(self, text: str) -> bool:
        """True when the text, read with ``parse_special``, would hold control tokens."""
        return any(TokenFlags.CONTROL in f for f in self.flags(self.encode(text, parse_special=True)))

    def ends_generation(self, token: int) -> bool:
        return TokenFlags.END_OF_GENERATION in self.flags([token])[0]

    def stream(self, stops: Sequence[str] = ()) -> TextStream:
        """A decoder that takes tokens as they come and gives text as soon as it is certain."""
        return TextStream(self, stops)


class TextStream:
    """Tokens in, text out: holds back half characters, and whatever may be the beginning of a stop string.

    Attributes
    ----------
    text : str
        All text given out so far.
    stopped_by : str or None
        The stop string that was met; it is not part of the text, and nothing comes after it.
    """

    def __init__(self, vocab: Vocab, stops: Sequence[str] = ()) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self._vocab, self._stops = vocab, tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.text = ""
        self.stopped_by: str | None = None

    def feed(self, tokens: Iterable[int], *, final: bool = False) -> str:
        """Text that became certain with these tokens; with ``final`` everything that is left."""
        if self.stopped_by is not None:
            return ""
        self._held += self._decoder.decode(self._vocab.decode_bytes(tokens), final)
        found = min(((at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped_by = found[1]
            sure = found[0]
        elif final:
            sure = len(self._held)
        else:
            sure = len(self._held) - self._maybe_stop()
        out, self._held = self._held[:sure], "" if found else self._held[sure:]
        self.text += out
        return out

    def _maybe_stop(self) -> int:
        """Length of the longest end of the held text that could grow into a stop string."""
        return max((n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0)
