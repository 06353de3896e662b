"""What is asked of an engine, and what the engine makes of it: every parameter that changes memory, and none besides."""
from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Final

from ..errors import InvalidArgumentError
from .geometry import Geometry
from .header import GGML_TYPES

KV_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
CELL_GRAIN: Final = 256  # the engine rounds contexts and windows up to it
MAX_BRANCHES: Final = 256
_RANGES: Final = {"n_branches": (1, MAX_BRANCHES), "n_batch": (1, 1 << 24), "n_ubatch": (0, 1 << 24), "n_rs_seq": (0, 1 << 16), "n_outputs": (0, 1 << 24), "gpu_layers": (-1, 1 << 16),
                  "n_threads": (0, 1 << 12)}
_ROWS: Final = {label.lower(): (block, n_bytes) for label, block, n_bytes in GGML_TYPES.values()}


def padded(n: int, grain: int = CELL_GRAIN) -> int:
    return -(-n // grain) * grain


def row_bytes(kv_type: str, n: int) -> int:
    """Bytes of n numbers of a KV type."""
    block, n_bytes = _ROWS[kv_type]
    return n // block * n_bytes


@dataclass(frozen=True, slots=True)
class Settings:
    """Parameters of a context. The defaults are those of :meth:`pylloyal.Model.store`.

    Attributes
    ----------
    n_branches : int
        Branches alive at once, each a sequence of the engine; 1 to 256.
    n_batch, n_ubatch : int
        Tokens of a call and of a dispatch; ``n_ubatch`` 0: the same.
    type_k, type_v : str
        One of ``KV_TYPES``.
    swa_full : bool
        Sliding-window layers keep cells for the whole context.
    flash_attn : bool
    unified : bool
        One stream of cells for all sequences. Stores are always unified: forks share cells. False plans for other programs.
    n_rs_seq : int
        Recurrent states kept beside the current one, for rolling back.
    n_outputs : int
        Rows of logits in one dispatch; 0: one a branch.
    gpu_layers : int
        Layers on accelerators; -1: all, with the output layer.
    offload_kqv : bool
        Their cells go with them.
    n_threads : int
        For the CPU, each with scratch of its own; 0: the cores this process may use.
    """

    n_branches: int = 8
    n_batch: int = 512
    n_ubatch: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    swa_full: bool = True
    flash_attn: bool = True
    unified: bool = True
    n_rs_seq: int = 0
    n_outputs: int = 0
    gpu_layers: int = 0
    offload_kqv: bool = True
    n_threads: int = 0

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise InvalidArgumentError(f"{name} is {value!r}; {least:,} to {most:,} can be")
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in KV_TYPES:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)!r}; it can be {', '.join(KV_TYPES)}")
        if self.unified and self.n_batch < self.n_branches:
            raise InvalidArgumentError(f"n_batch is {self.n_batch}, smaller than n_branches, {self.n_branches}: one tick must fit one dispatch")

    def but(self, **changes: Any) -> Settings:
        """The same with changes."""
        return replace(self, **changes)

    @property
    def threads(self) -> int:
        if self.n_threads:
            return self.n_threads
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def conflicts(self, geometry: Geometry) -> str:
        """Why the engine would refuse these for that model; "" when it would not.

        Source: ``llama_init_from_model`` of the pinned engine, the checks a store makes before it, and assertions that end the process.
        """
        if 0 < self.n_outputs < self.n_branches and not geometry.has_encoder:  # with an encoder the engine reserves a row for every token
            return f"n_outputs is {self.n_outputs}, fewer than one for each of {self.n_branches} branches"
        if geometry.architecture == "plm" and self.flash_attn:
            return "plm hands over V in a shape that the pinned engine's flash attention path does not survive"
        if geometry.architecture == "t5" and not self.unified and self.n_branches > 1:
            return "t5 biases attention by distance, which the pinned engine does not survive with a stream of cells for each branch"
        if geometry.architecture == "kimi-linear" and not self.unified and self.n_branches > 1:
            return "kimi-linear's graph is measured for one sequence too, which the pinned engine does not survive with a stream of cells for each branch"
        if geometry.architecture == "deepseek4" and not {"compressed 4", "compressed 128"} <= {group.name for group in geometry.groups}:
            return "a deepseek4 file without layers of both compression ratios, 4 and 128: the engine divides by what the missing ones would have"
        if geometry.is_mla and self.type_k != self.type_v:
            return f"latent attention keeps K alone, so K ({self.type_k}) and V ({self.type_v}) must be of one type"
        if self.has_quantised_v and not self.uses_flash(geometry):
            return f"V of type {self.type_v} needs flash attention" + (", which grok models do not take" if geometry.architecture == "grok" else "")
        for letter, kv_type, heads in (("K", self.type_k, geometry.head_k), ("V", self.type_v, geometry.head_v)):
            block = _ROWS[kv_type][0]
            odd = [size for size in heads if size % block]
            if odd:
                return f"{letter} of type {kv_type} comes in blocks of {block}, which do not divide a head of {odd[0]}"
        block_k, block_v = _ROWS[self.type_k][0], _ROWS[self.type_v][0]
        for group in geometry.groups:
            if any(k % block_k for k in group.k) or any(v % block_v for v in group.v):
                return f"blocks of {max(block_k, block_v)} do not divide a row of {group.name} cells"
        return ""

    @property
    def has_quantised_v(self) -> bool:
        return _ROWS[self.type_v][0] > 1

    def uses_flash(self, geometry: Geometry) -> bool:
        return self.flash_attn and geometry.architecture != "grok"


@dataclass(frozen=True, slots=True)
class Context:
    """A context as the engine creates it.

    Attributes
    ----------
    n_ctx : int
        Cells of all sequences together.
    n_ctx_seq : int
        Most that one sequence can have.
    n_batch, n_ubatch, n_seq_max : int
    kv_cells : int
        Cells of a full-attention layer, all streams together; 0 without one.
    swa_cells : int
        Of a sliding-window layer; 0 without one.
    """

    n_ctx: int
    n_ctx_seq: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    kv_cells: int
    swa_cells: int


def context(geometry: Geometry, n_ctx: int, settings: Settings) -> Context:
    """What the engine makes of a context of so many tokens; 0: the trained one.

    Raises
    ------
    InvalidArgumentError
        No context of that size can be.

    Source: the constructor of ``llama_context``; ``llama_kv_cache_iswa`` for windows.
    """
    wanted = n_ctx or geometry.n_ctx_train
    if not 0 < wanted < 1 << 31:
        raise InvalidArgumentError(f"a context of {wanted:,} tokens cannot be")
    n_batch = min(wanted, settings.n_batch) if geometry.is_causal else settings.n_batch
    n_ubatch = min(n_batch, settings.n_ubatch or settings.n_batch)
    total = padded(wanted)
    if settings.unified:
        per_sequence = total
    else:
        per_sequence = padded(total // settings.n_branches)
        total = per_sequence * settings.n_branches
    made = Context(total, per_sequence, n_batch, n_ubatch, settings.n_branches, 0, 0)
    spans = {group.span for group in geometry.groups if group.tokens_per_cell == 1 and group.layers}
    per_sequence_only = any(group.is_per_sequence for group in geometry.groups)
    streams = settings.n_branches if per_sequence_only or not settings.unified else 1
    return Context(total, per_sequence, n_batch, n_ubatch, settings.n_branches,
                   per_sequence * streams if "context" in spans else 0, window_cells(geometry, made, settings, per_sequence_only) * streams if "window" in spans else 0)


def window_cells(geometry: Geometry, made: Context, settings: Settings, is_per_sequence: bool) -> int:
    """Cells of a sliding-window layer, in each of its streams."""
    if settings.swa_full:
        return made.n_ctx_seq
    sharing = settings.n_branches if settings.unified and not is_per_sequence else 1
    return padded(min(made.n_ctx_seq, geometry.n_swa * sharing + made.n_ubatch))
