"""Texts to vectors."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from .. import errors
from .._ffi import capi
from .._ffi.handle import Handle
from .._ffi.load import library
from .._ffi.memory import f32_array, i32_of, known_ids, new, ref, u32_of
from .model import Model

Pooling = Literal["mean", "cls", "last"]
_POOLING: Final = {None: capi.POOLING_MODEL, "mean": capi.POOLING_MEAN, "cls": capi.POOLING_CLS, "last": capi.POOLING_LAST}
_GROUP: Final = 64  # texts in one native call: between two, Ctrl-C is answered


@dataclass(frozen=True, slots=True)
class EmbedderStatistics:
    """What an embedder is, and what it has done since it was opened.

    Attributes
    ----------
    n_embd : int
        Floats in a vector.
    n_ctx : int
        Tokens in the longest text it takes.
    pooling : {"mean", "cls", "last"}
    n_dispatches, n_texts, n_tokens : int
    """

    n_embd: int
    n_ctx: int
    pooling: str
    n_dispatches: int
    n_texts: int
    n_tokens: int


class Embedder(Handle):
    """One vector for each text, from a context of its own: no store and no branch is involved.

    Parameters
    ----------
    model : Model
    n_ctx : int, optional
        Longest text, in tokens, and tokens in one dispatch: a text is never cut. By default the trained context, at most 512.
    pooling : {"mean", "cls", "last"}, optional
        How the rows of a text become one; None takes what the model file says.
    n_threads, flash_attn
        As for :class:`~pylloyal.Store`.

    Raises
    ------
    UnsupportedOperationError
        The model file names no pooling and none was given, or the model is of a kind that gives no vectors.
    InvalidArgumentError
        ``n_ctx`` is beyond the context the model was trained with.
    """

    def __init__(self, model: Model, *, n_ctx: int | None = None, pooling: Pooling | None = None, n_threads: int | None = None, flash_attn: bool | None = None) -> None:
        lib = library()
        if pooling not in _POOLING:
            raise errors.InvalidArgumentError(f"pooling is {pooling!r}; it must be one of mean, cls, last")
        for name, value in (("n_ctx", n_ctx), ("n_threads", n_threads)):
            if value is not None and not 0 < value < 2**31:
                raise errors.InvalidArgumentError(f"{name} is {value}; it must be 1 or more")
        flash = {None: capi.FLASH_ATTN_AUTO, True: capi.FLASH_ATTN_ON, False: capi.FLASH_ATTN_OFF}[flash_attn]
        params = new(capi.pyl_embedder_params, n_ctx=n_ctx or 0, n_threads=n_threads or 0, pooling=_POOLING[pooling], flash_attn=flash)
        pointer, parent = capi.pyl_embedder_p(), model._ptr()
        super().__init__(pointer, lib.pyl_embedder_free, parent=model)
        lib.pyl_embedder_open(ref(pointer), parent, ref(params))
        self.model = model

    def __repr__(self) -> str:
        return "<Embedder closed>" if self.is_closed else f"<Embedder of {self.model.path!r}>"

    def embed(self, texts: Iterable[str | Sequence[int]], *, normalize: bool = True) -> npt.NDArray[np.float32]:
        """One vector for each text, packed into as few dispatches as fit.

        Parameters
        ----------
        texts : iterable of str or sequence of int
            Text is tokenised with the model's own special tokens added, its control tokens inert.
        normalize : bool
            Make each vector's length 1, so that a dot product is a cosine.

        Returns
        -------
        numpy.ndarray, float32, shape (n texts, n_embd)

        Raises
        ------
        InvalidArgumentError
            With the ``index`` of an empty text, of one longer than ``n_ctx``, or of what is neither text nor token ids of the vocabulary.
        """
        vocab, lists = self.model.vocab, []
        for text in texts:
            try:
                lists.append(known_ids(vocab.encode(text, add_special=True) if isinstance(text, str) else text, len(vocab), "text, or a flat sequence of token ids"))
            except errors.InvalidArgumentError as error:
                error.index = len(lists)
                raise
        out = np.empty((len(lists), self.statistics().n_embd), np.float32)
        for first in range(0, len(lists), _GROUP):
            group = lists[first : first + _GROUP]
            tokens, lengths = np.concatenate(group), np.array([len(one) for one in group], np.uint32)
            rows = out[first : first + _GROUP]
            try:
                library().pyl_embed_n(self._ptr(), i32_of(tokens), u32_of(lengths), len(group), int(normalize), f32_array(rows))
            except errors.PylloyalError as error:
                error.index = None if error.index is None else error.index + first
                raise
        return out

    def similarity(self, texts: Iterable[str | Sequence[int]], others: Iterable[str | Sequence[int]] | None = None) -> npt.NDArray[np.float32]:
        """Cosines between texts, shape (n texts, n others); of all with each other when ``others`` is None."""
        a = self.embed(texts)
        return a @ (a if others is None else self.embed(others)).T

    def statistics(self) -> EmbedderStatistics:
        """What it is, and what it has done."""
        info: Any = new(capi.pyl_embedder_info)
        library().pyl_embedder_describe(self._ptr(), ref(info))
        name = next(str(key) for key, value in _POOLING.items() if value == info.pooling)
        return EmbedderStatistics(info.n_embd, info.n_ctx, name, info.n_dispatches, info.n_texts, info.n_tokens)
