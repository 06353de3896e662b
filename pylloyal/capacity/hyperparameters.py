"""What the engine's loader makes of a header, as far as memory needs it: the common keys first, then what the architecture decides."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..errors import MetadataError
from .architectures import Rules

MAX_LAYERS: Final = 512


class Keys:
    """Values of one architecture's keys, with the engine's own strictness."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self.architecture, self.metadata = architecture, metadata

    def raw(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: int | None = None) -> int:
        value = self.raw(key)
        if value is None:
            if default is None:
                raise MetadataError(f"{self.architecture}.{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
            raise MetadataError(f"{self.architecture}.{key} is {_short(value)}, not a count")
        return value

    def array(self, key: str) -> list[int] | None:
        """An array of counts or facts; None when it is not there, or not an array."""
        value = self.raw(key)
        if value is None or isinstance(value, (str, int, float)) or not isinstance(value, Sequence):
            return None
        if len(value) > MAX_LAYERS:
            raise MetadataError(f"{self.architecture}.{key} has {len(value):,} values; {MAX_LAYERS} layers are the most")
        out = list(value)
        if any(not isinstance(item, int) or not -1 << 31 <= item < 1 << 32 for item in out):
            raise MetadataError(f"{self.architecture}.{key} is not an array of counts")
        return [int(item) for item in out]

    def each(self, key: str, n: int, default: list[int]) -> list[int]:
        """A value for each of n layers: an array of exactly n, one for all, or the default."""
        values = self.array(key)
        if values is not None:
            if len(values) != n:
                raise MetadataError(f"{self.architecture}.{key} has {len(values)} values for {n} layers")
            if any(value < 0 for value in values):
                raise MetadataError(f"{self.architecture}.{key} has a negative count")
            return values
        return default if self.raw(key) is None else [self.number(key)] * n


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 40 else text[:37] + "..."


class Hyperparameters:
    """One model's, layer by layer.

    Attributes
    ----------
    n_layer, n_layer_all, n_nextn : int
        Layers of the trunk, of everything, and of a draft head.
    n_head, n_head_kv, n_ff : list of int
    is_swa, is_recurrent, is_indexed : list of bool
    head_k, head_v, head_k_swa, head_v_swa : int
    n_layer_kv : int
        The first layer without cells of its own.
    router : int
        The layer added for a router; -1 without one.
    indexer : int
        Width of an indexer's keys; 0 without one.
    """

    def __init__(self, architecture: str, rules: Rules, metadata: Mapping[str, Any]) -> None:
        self.rules, self.architecture = rules, architecture
        self.keys = keys = Keys(architecture, metadata)
        self.metadata = metadata
        self.n_ctx_train = keys.number("context_length")
        self.n_embd = keys.number("features_length" if architecture == "wavtokenizer-dec" else "embedding_length")
        self.n_layer_all = keys.number("block_count")
        if not 0 < self.n_layer_all <= MAX_LAYERS:
            raise MetadataError(f"{architecture}.block_count is {self.n_layer_all}; 1 to {MAX_LAYERS} can be")
        self.n_nextn = keys.number("nextn_predict_layers", 0)
        if self.n_nextn > self.n_layer_all:
            raise MetadataError(f"{architecture}.nextn_predict_layers is {self.n_nextn} of {self.n_layer_all} layers")
        n = self.n_layer_all
        self.n_ff = keys.each("feed_forward_length", n, [0] * n)
        self.n_head = keys.each("attention.head_count", n, [0] * n)
        self.n_head_kv = keys.each("attention.head_count_kv", n, list(self.n_head))
        self.head_k = self.head_v = 0
        if self.n_head[0]:
            self.head_k = keys.number("attention.key_length", self.n_embd // self.n_head[0])
            self.head_v = keys.number("attention.value_length", self.n_embd // self.n_head[0])
        self.head_k_swa = keys.number("attention.key_length_swa", self.head_k)
        self.head_v_swa = keys.number("attention.value_length_swa", self.head_v)
        self.n_swa, self.is_swa = 0, [False] * n
        self.is_recurrent = [rules.recurrent == "all"] * n
        self.is_indexed = [False] * n
        self.n_layer_kv = n
        self.router = -1
        self.is_mla = False
        self.indexer = 0
        self._own()

    @property
    def n_layer(self) -> int:
        return self.n_layer_all - self.n_nextn

    # ------------------------------------------------------------------------------------------ what the architecture decides

    def _own(self) -> None:
        keys, rules = self.keys, self.rules
        if self.architecture == "plamo2":
            self.head_k, self.head_v = keys.number("attention.key_length", self.head_k), keys.number("attention.value_length", self.head_v)
        if self.architecture in ("glm5-next", "kimi-k3"):
            self.head_v = keys.number("attention.kv_lora_rank")
        if self.architecture == "deepseek4" and self.n_nextn and not self._has_tensor(f"blk.{self.n_layer}.nextn.eh_proj.weight"):
            self.n_nextn = 0
        if rules.has_mla:
            lengths = keys.number("attention.key_length_mla", 0), keys.number("attention.value_length_mla", 0)
            if (lengths[0] == 0) != (lengths[1] == 0):
                raise MetadataError(f"{self.architecture}: one of attention.key_length_mla and attention.value_length_mla, and not the other")
            self.is_mla = lengths[0] != 0
        self._recurrent()
        self._window()
        self._indexer()
        if self.architecture == "gemma3n":
            self.n_layer_kv = 20
        elif rules.shares_cells:
            self.n_layer_kv = self.n_layer_all - keys.number("attention.shared_kv_layers", 0)
        if rules.shares_cells:
            self._sharing()
        if self.architecture == "graniteswitch":
            self._add_router()
        if self.architecture == "nanbeige":
            self._loop()

    def _has_tensor(self, name: str) -> bool:
        return any(tensor.name == name for tensor in getattr(self.metadata, "tensors", ()))

    def _recurrent(self) -> None:
        n, kind = self.n_layer_all, self.rules.recurrent
        if kind == "both":
            self.is_recurrent = [True] * n
        elif kind == "zero heads, all":
            self.is_recurrent = [heads == 0 for heads in self.n_head_kv]
        elif kind == "zero heads":
            self.is_recurrent = [i < self.n_layer and self.n_head_kv[i] == 0 for i in range(n)]
        elif kind == "zero heads and feed-forward":
            self.is_recurrent = [i < self.n_layer and self.n_head_kv[i] == 0 and self.n_ff[i] == 0 for i in range(n)]
        elif kind == "interval":
            listed = self.keys.each("attention.recurrent_layers", n, [])
            every = self.keys.number("full_attention_interval", self.rules.interval)
            if not listed and every == 0:
                raise MetadataError(f"{self.architecture}.full_attention_interval is 0")
            self.is_recurrent = [bool(value) for value in listed] or [i < self.n_layer and (i + 1) % every != 0 for i in range(n)]

    def _window(self) -> None:
        rule = self.rules.window
        if rule is None or (rule.only_at and self.n_layer != rule.only_at):
            return
        key = "attention.sliding_window"
        size = self.keys.number(key, 0 if rule.is_optional or rule.fixed else (rule.default or None))
        if rule.is_optional and size == 0:
            return
        if self.architecture == "llama4" and self.keys.raw(key) is not None and size == 0:
            return
        self.n_swa = rule.fixed or size
        listed = None if rule.is_constant else self.keys.array(key + "_pattern")
        if rule.is_constant:
            self.is_swa = [True] * self.n_layer_all
        elif rule.every == "attention":
            self.is_swa = [i < self.n_layer and not self.is_recurrent[i] for i in range(self.n_layer_all)]
        elif rule.every == "listed" or listed is not None:
            if listed is None:
                raise MetadataError(f"{self.architecture}.{key}_pattern must list the layers that have the window")
            self.is_swa = [bool(value) for value in listed[: self.n_layer_all]] + [False] * (self.n_layer_all - len(listed))
        else:
            self.is_swa = self._pattern(self.keys.number(key + "_pattern", rule.every), rule.dense_first)
        if not any(self.is_swa) and self.rules.memory == "cells" and not self.rules.recurrent:
            raise MetadataError(f"{self.architecture}: a window of {self.n_swa} tokens, and no layer that has it; the engine does not take that")

    def _pattern(self, every: int, dense_first: bool) -> list[bool]:
        def has_window(i: int) -> bool:
            if i >= self.n_layer:
                return False
            return every == 0 or (i % every != 0 if dense_first else i % every < every - 1)

        return [has_window(i) for i in range(self.n_layer_all)]

    def _indexer(self) -> None:
        rules, keys, n = self.rules, self.keys, self.n_layer_all
        if not rules.indexer and rules.memory != "compressed":
            return
        if self.architecture == "hy_v4":
            if keys.number("attention.indexer.top_k", 0) == 0:
                return
            if self.n_nextn:
                raise MetadataError("hy_v4: an indexer and a draft head; the engine does not survive that")
        self.indexer = keys.number("attention.indexer.key_length")
        trunk = [i < self.n_layer for i in range(n)]
        if rules.indexer == "all":
            self.is_indexed = trunk
        elif rules.indexer == "lead":
            first = keys.number("leading_dense_block_count", 0)
            self.is_indexed = [i >= first for i in range(n)]
        elif rules.indexer in ("listed", "attention"):
            full = self._indexer_types()
            if rules.indexer == "attention":
                full = [full[i] and not self.is_recurrent[i] for i in range(self.n_layer)]
            self.is_indexed = [*full, *[False] * self.n_nextn]

    def _indexer_types(self) -> list[bool]:
        """Layers of the trunk whose indexer is their own."""
        n, key = self.n_layer, "attention.indexer.types"
        if self.architecture == "dots3note":
            listed = self.keys.array(key)
            if listed is None:
                raise MetadataError(f"dots3note.{key} must list the layers that have an indexer")
            return ([bool(value) for value in listed] + [False] * n)[:n]
        if self.architecture == "qwen4exp":
            return [True] * n
        default = [0] * n if self.architecture == "hy_v4" else [1] * n
        if self.architecture == "glm-dsa" and self.n_ctx_train >= 1 << 20:  # files of 5.2 that do not list them
            default = [int(i < 2 or (i < 78 and (i - 2) % 4 == 0)) for i in range(n)]
        return [bool(value) for value in self.keys.each(key, n, default)]

    def _sharing(self) -> None:
        """Layers after ``n_layer_kv`` read the cells of the last two before: windowed ones those of the last but one."""
        last, shared = self.n_layer_kv, self.is_swa[self.n_layer_kv : self.n_layer]  # those of a draft head have no place in the trunk's caches
        if last < 2 or (any(shared) and not self.is_swa[last - 2]) or (not all(shared) and self.is_swa[last - 1]):
            raise MetadataError(f"{self.architecture}: of {self.n_layer_all} layers the first {last} have cells, and the last two of these are not a windowed and a full one,"
                                " which the others would share; the engine does not survive that")

    def _add_router(self) -> None:
        """One layer with one head after the last, where the adapters' choice is kept."""
        self.router = n = self.n_layer
        if n >= MAX_LAYERS:
            raise MetadataError(f"graniteswitch.block_count is {n}, with no room for the router's layer")
        for counts, count in ((self.n_head, 1), (self.n_head_kv, 1), (self.n_ff, 0)):
            counts[n:] = [count]
        for facts in (self.is_swa, self.is_recurrent, self.is_indexed):
            facts[n:] = [False]
        self.n_layer_all, self.n_nextn, self.n_layer_kv = n + 1, 1, n + 1

    def _loop(self) -> None:
        """The same layers run several times, each time with cells of their own."""
        loops = self.keys.number("num_loops", 1)
        n = self.n_layer
        if loops < 1 or n * loops > MAX_LAYERS:
            raise MetadataError(f"nanbeige: {loops} loops over {n} layers; {MAX_LAYERS} layers are the most")
        if loops == 1:
            return
        for name in ("n_head", "n_head_kv", "n_ff", "is_swa", "is_recurrent", "is_indexed"):
            setattr(self, name, getattr(self, name)[:n] * loops)
        self.n_layer_all = self.n_layer_kv = n * loops
        self.n_nextn = min(self.n_nextn, self.n_layer_all)

    def k(self, i: int) -> int:
        """Numbers in a K row of layer i."""
        return (self.head_k_swa if self.is_swa[i] else self.head_k) * self.n_head_kv[i]

    def v(self, i: int) -> int:
        return (self.head_v_swa if self.is_swa[i] else self.head_v) * self.n_head_kv[i]
