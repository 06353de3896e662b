"""Byte-level BPE with the `qwen2` pre-tokeniser, trained on the words of the scenes; equal to the engine's own on this model's GGUF."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SIZE = 640
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The engine's LLAMA_VOCAB_PRE_TYPE_QWEN2, with \p{L} and \p{N} spelt as the standard library knows them.
_WORDS = re.compile(
    r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|(?:[^\r\n\w]|_)?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIALS = re.compile("(" + "|".join(re.escape(s) for s in SPECIALS) + ")")


def _byte_letters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b if b in printable else next(spare)) for b in range(256)]


LETTERS = _byte_letters()
_BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}


def _letters(word: str) -> list[str]:
    return [LETTERS[b] for b in word.encode()]


def _merged(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    i = 0
    while i < len(pieces):
        if tuple(pieces[i : i + 2]) == pair:
            out.append(pieces[i] + pieces[i + 1])
            i += 2
        else:
            out.append(pieces[i])
            i += 1
    return out


def learn_merges(lines: Iterable[str], limit: int) -> list[tuple[str, str]]:
    """The merges that occur most, the earlier in code-point order where two occur as often."""
    words: Counter[str] = Counter()
    for line in lines:
        for part in _SPECIALS.split(line):
            if part not in SPECIALS:
                words.update(_WORDS.findall(part))
    pieces = {word: _letters(word) for word in words}
    merges: list[tuple[str, str]] = []
    while len(merges) < limit:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, split in pieces.items():
            for pair in pairwise(split):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        pieces = {word: _merged(split, best) for word, split in pieces.items()}
    return merges


class Tokenizer:
    """256 bytes, one token a merge, the specials, `[unusedN]` up to `SIZE`."""

    def __init__(self, merges: Sequence[tuple[str, str]]) -> None:
        self.merges = [(a, b) for a, b in merges]
        self._rank = {pair: i for i, pair in enumerate(self.merges)}
        self.tokens = [*LETTERS, *(a + b for a, b in self.merges)]
        self.n_plain = len(self.tokens)
        self.tokens += SPECIALS
        self.n_used = len(self.tokens)
        self.tokens += [f"[unused{i}]" for i in range(self.n_used, SIZE)]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.tokens) != SIZE or len(self.ids) != SIZE:
            raise ValueError("the vocabulary is too large, or holds a token twice")
        self.end = self.ids["<|im_end|>"]
        self.pad = self.ids["<|endoftext|>"]
        self.image = self.ids["<|image_pad|>"]
        self._words: dict[str, list[int]] = {}

    def _encode_word(self, word: str) -> list[int]:
        if word not in self._words:
            pieces = _letters(word)
            while True:
                known = [p for p in pairwise(pieces) if p in self._rank]
                if not known:
                    break
                pieces = _merged(pieces, min(known, key=self._rank.__getitem__))
            self._words[word] = [self.ids[p] for p in pieces]
        return self._words[word]

    def encode(self, text: str) -> list[int]:
        out: list[int] = []
        for part in _SPECIALS.split(text):
            if part in SPECIALS:
                out.append(self.ids[part])
            else:
                for word in _WORDS.findall(part):
                    out += self._encode_word(word)
        return out

    def decode(self, ids: Iterable[int]) -> str:
        data = bytearray()
        for i in ids:
            token = self.tokens[i]
            data += bytes(_BYTES[c] for c in token) if i < self.n_plain else token.encode()
        return data.decode("utf-8", "replace")
