"""The shape of a model's working memory, from the metadata of its file alone.

:func:`geometry` follows the pinned engine step by step: what every loader reads, then what the architecture's own loader decides
(:mod:`.architectures`), then which caches are created for which layers. Its result is a handful of layer groups, each with the widths
of a cell; how many cells there are depends on a context, and is :mod:`.footprint`'s.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import MetadataError
from .architectures import ARCHITECTURES
from .hyperparameters import Hyperparameters

_CSA, _HCA = 4, 128  # tokens that a compressed cell of deepseek4 stands for

Span = Literal["context", "window"]


@dataclass(frozen=True, slots=True)
class Group:
    """Attention layers whose cells have the same life.

    Attributes
    ----------
    name : str
    layers : tuple of int
    k, v : tuple of int
        Numbers in a K and a V row of one cell, a layer each; V 0 when latent attention keeps K alone.
    v_transposed : int
        Numbers in a V row without flash attention: the widest of the model.
    span : {"context", "window"}
        Cells for the whole context, or for the window.
    tokens_per_cell : int
        1, or more where tokens are compressed.
    is_per_sequence : bool
        It has a stream for every sequence even in a unified cache.
    """

    name: str
    layers: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    v_transposed: int
    span: Span = "context"
    tokens_per_cell: int = 1
    is_per_sequence: bool = False


@dataclass(frozen=True, slots=True)
class States:
    """Layers with a state of fixed size for each sequence, in single precision.

    Attributes
    ----------
    name : str
    layers : tuple of int
    rows : tuple of int
        Numbers in each tensor of one layer, for one sequence.
    extra : tuple of (int, int)
        Layers with one tensor more, and the numbers in it.
    """

    name: str
    layers: tuple[int, ...]
    rows: tuple[int, ...]
    extra: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a model keeps for what it has read. Sizes are in numbers, not bytes.

    Attributes
    ----------
    architecture : str
    n_layer : int
        Layers of the trunk.
    n_layer_all : int
        With those of a draft head, and those the engine adds.
    n_ctx_train, n_embd, n_embd_out, n_vocab : int
    n_swa : int
        Tokens of the sliding window; 0 without one.
    is_mla : bool
        Latent attention: K and V must be of one type.
    is_causal : bool
    takes_rollback : bool
    has_encoder : bool
    groups : tuple of Group
    states : tuple of States
    has_memory : bool
        False for encoders and diffusion models: the engine keeps nothing between their calls.
    head_k, head_v : tuple of int
        Head sizes of the trunk's layers, which the blocks of a quantised cache must divide.
    """

    architecture: str
    n_layer: int
    n_layer_all: int
    n_ctx_train: int
    n_embd: int
    n_embd_out: int
    n_vocab: int
    n_swa: int
    is_mla: bool
    is_causal: bool
    takes_rollback: bool
    has_encoder: bool
    groups: tuple[Group, ...]
    states: tuple[States, ...]
    has_memory: bool
    head_k: tuple[int, ...] = field(repr=False)
    head_v: tuple[int, ...] = field(repr=False)

    @property
    def has_window(self) -> bool:
        return any(group.span == "window" and group.layers for group in self.groups)


def geometry(metadata: Mapping[str, Any]) -> Geometry:
    """The shape of the memory of the model with these keys.

    Parameters
    ----------
    metadata : Mapping
        Keys of a GGUF header: a :class:`.Header`, or any mapping, of a log for instance.

    Raises
    ------
    MetadataError
        A key is missing, contradicts another, or the architecture is one whose memory is not known here.

    Source: ``llama_model_base::load_hparams`` and ``llama_model::create_memory`` of the pinned engine.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise MetadataError("general.architecture is missing: this says nothing about a model")
    rules = ARCHITECTURES.get(architecture)
    if rules is None:
        raise MetadataError(f"the architecture {architecture!r} is not known here, so what its memory takes is not either")
    if rules.memory == "unsupported":
        raise MetadataError(f"the engine opens no {architecture} file as a language model" + (": this is a projector" if architecture == "clip" else ""))
    if rules.memory == "borrowed":
        raise MetadataError(f"{architecture} models draft for another model and share its cells: what they take depends on that context")
    return _Caches(Hyperparameters(architecture, rules, metadata)).geometry()


class _Caches:
    """The engine's choice of caches for one model's hyperparameters."""

    def __init__(self, h: Hyperparameters) -> None:
        self.h, self.rules, self.keys, self.architecture, self.metadata = h, h.rules, h.keys, h.architecture, h.metadata
        self.is_mla = h.is_mla

    def _group(self, name: str, where: Callable[[int], bool], **other: Any) -> Group:
        h = self.h
        layers = tuple(i for i in range(h.n_layer_all) if i < h.n_layer_kv and where(i))
        v_max = 0 if self.is_mla else max(h.v(i) for i in range(h.n_layer_all))
        return Group(name, layers, tuple(h.k(i) for i in layers), tuple(0 if self.is_mla else h.v(i) for i in layers), v_max, **other)

    def _indexer_group(self, name: str, where: Callable[[int], bool], width: int, *, k_only: bool) -> Group:
        """The indexer's keys: one head, of its own width, in layers without a window; V, where it has one, as wide as one head."""
        h = self.h
        layers = tuple(i for i in range(h.n_layer_all) if where(i))
        def v(i: int) -> int:
            return 0 if k_only else (h.head_v_swa if h.is_swa[i] else h.head_v)
        k = tuple(h.head_k_swa if h.is_swa[i] else width for i in layers)
        return Group(name, layers, k, tuple(v(i) for i in layers), 0 if k_only else max(v(i) for i in range(h.n_layer_all)))

    def geometry(self) -> Geometry:
        h = self.h
        rules = self.rules
        groups, states = self._compressed() if rules.memory == "compressed" else self._caches()
        n = range(h.n_layer)
        return Geometry(
            self.architecture, h.n_layer, h.n_layer_all, h.n_ctx_train, h.n_embd, self._n_embd_out(), self._n_vocab(), h.n_swa, self.is_mla or rules.memory == "compressed",
            rules.is_causal and self.metadata.get(f"{self.architecture}.attention.causal", True) is not False, rules.takes_rollback, self.architecture in ("t5", "t5encoder"),
            tuple(group for group in groups if group.layers), tuple(state for state in states if state.layers), rules.memory != "none",
            tuple(h.head_k_swa if h.is_swa[i] else h.head_k for i in n), tuple(h.head_v_swa if h.is_swa[i] else h.head_v for i in n))

    def _n_embd_out(self) -> int:
        h = self.h
        if self.architecture in ("deepseek4", "qwen4exp"):
            return self.keys.number("hyper_connection.count") * h.n_embd
        if self.architecture == "wavtokenizer-dec":
            return self.keys.number("embedding_length")
        return self.keys.number("embedding_length_out", 0) or h.n_embd

    def _n_vocab(self) -> int:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if tokens is not None and not isinstance(tokens, (str, int, float)):
            return len(tokens)
        return self.keys.number("vocab_size", 0)

    def _caches(self) -> tuple[list[Group], list[States]]:
        h = self.h
        rules = self.rules
        if rules.memory == "none":
            return [], []
        if rules.recurrent == "all":
            return [], [self._states("recurrent", lambda _: True)]
        states = [self._states("recurrent", lambda i: h.is_recurrent[i])] if rules.recurrent else []
        trunk_only = bool(h.n_nextn and h.n_layer and h.router < 0)
        if rules.recurrent in ("zero heads", "zero heads, all"):
            trunk_only = self.architecture == "glm5-next"

        def has_cells(i: int) -> bool:
            if rules.recurrent == "both":
                return True
            if rules.recurrent == "zero heads and feed-forward":
                return not h.is_recurrent[i] and h.n_ff[i] == 0
            if rules.recurrent == "" and rules.memory == "indexed":
                return i < h.n_layer or self.architecture in ("minimax-m3", "hy_v4")
            return not h.is_recurrent[i] and (i < h.n_layer or not trunk_only)

        groups = [self._group("attention", lambda i: has_cells(i) and not h.is_swa[i]), self._group("window", lambda i: has_cells(i) and h.is_swa[i], span="window")]
        if any(h.is_indexed):
            kpool = 3 if self.keys.number("attention.indexer.kpool", 0) and self.architecture == "glm5-next" else 1
            groups.append(self._indexer_group("indexer", lambda i: h.is_indexed[i], h.indexer * kpool, k_only=self.is_mla or bool(rules.recurrent)))
        return groups, states

    def _compressed(self) -> tuple[list[Group], list[States]]:
        """deepseek4: a window of every token, and beside it, in some layers, one cell for 4 or 128 tokens and an indexer over the former."""
        h = self.h
        ratios = self.keys.array("attention.compress_ratios")
        if ratios is None or len(ratios) < h.n_layer_all:
            raise MetadataError("deepseek4.attention.compress_ratios must have a value for every layer")
        own: dict[str, Any] = {"is_per_sequence": True}
        self.is_mla = True
        # The raw cache's own filter: every layer has the window here, so that its part without one stays empty.
        groups = [self._group("attention", lambda i: not h.is_swa[i], **own), self._group("window", lambda i: h.is_swa[i], span="window", **own)]
        csa = [i for i in range(h.n_layer_all) if ratios[i] == _CSA]
        hca = [i for i in range(h.n_layer_all) if ratios[i] == _HCA]
        for name, layers, ratio in (("compressed 4", csa, _CSA), ("compressed 128", hca, _HCA)):
            groups.append(self._group(name, lambda i, layers=layers: i in layers, tokens_per_cell=ratio, **own))  # type: ignore[misc]
        groups.append(Group("indexer", tuple(csa), (h.indexer,) * len(csa), (0,) * len(csa), 0, tokens_per_cell=_CSA, is_per_sequence=True))
        trunk = [i for i in csa if i < h.n_layer]
        head = h.head_k_swa if h.is_swa[0] else h.head_k
        states = [
            States("compressor 4", tuple(trunk), (2 * head * 2 * _CSA,) * 2),
            States("compressor 128", tuple(i for i in hca if i < h.n_layer), (head * _HCA,) * 2),
            States("indexer's compressor", tuple(trunk), (2 * h.indexer * 2 * _CSA,) * 2),
        ]
        return groups, states

    def _states(self, name: str, where: Callable[[int], bool]) -> States:
        h = self.h
        layers = tuple(i for i in range(h.n_layer) if where(i))
        return States(name, layers, self._state_rows(), self._ple())

    def _state_rows(self) -> tuple[int, int]:
        """Numbers in the convolution's and in the recurrence's state of one layer."""
        h = self.h
        keys, kind = self.keys, self.rules.state
        if kind == "rwkv":
            size = keys.number("wkv.head_size")
            if size:
                return keys.number("token_shift_count", 2) * h.n_embd, h.n_embd * size
        if kind == "shortconv":
            taps = keys.number("shortconv.l_cache")
            if taps:
                return h.n_embd * (taps - 1), 0
        if kind == "kda":
            size, taps = keys.number("kda.head_dim"), keys.number("ssm.conv_kernel")
            if size:
                return 3 * (taps - 1 if taps else 3) * h.n_head[0] * size, size * size * h.n_head[0]
        if kind == "lightning":
            return 0, h.head_k * h.head_k * h.n_head[0]
        if kind in ("mamba", "mamba2"):
            taps, inner, state = keys.number("ssm.conv_kernel"), keys.number("ssm.inner_size"), keys.number("ssm.state_size")
            n_group = keys.number("ssm.group_count") if kind == "mamba2" else 0
            return max(taps - 1, 0) * (inner + 2 * n_group * state), state * inner
        return 0, 0

    def _ple(self) -> tuple[tuple[int, int], ...]:
        """qwen4exp keeps the history of a convolution over n-grams in one recurrent layer."""
        h = self.h
        listed = self.keys.array("ple.layers") if self.architecture == "qwen4exp" else None
        if not listed:
            return ()
        rows = (self.keys.number("ple.conv_kernel") - 1) * self.keys.number("ple.ngram_size") * self.keys.number("hyper_connection.count") * h.n_embd
        return tuple((i, rows) for i in listed)
