"""What the engine allocates for a store or a projector, and what it would: its own account, in bytes."""
from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from .. import errors
from .._ffi.load import library, take_text_at
from .._ffi.memory import ref
from .params import KVType, model_params, path_bytes, projector_params, store_params


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Buffers of one type on one device.

    Attributes
    ----------
    device, buffer : str
        The engine's names.
    is_host : bool
        True when it lies in the machine's own memory.
    model_bytes, context_bytes, compute_bytes : int
        Weights; cells and recurrent state; intermediate results.
    """

    device: str
    buffer: str
    is_host: bool
    model_bytes: int
    context_bytes: int
    compute_bytes: int


@dataclass(frozen=True, slots=True)
class Cache:
    """One attention cache.

    Attributes
    ----------
    name : str
        "kv" for the layers that see everything, "swa" for those with a window, "index" for an indexer's keys, others as the engine's source names them.
    cells, streams : int
        Cells of a stream; streams are 1 where branches share cells.
    n_bytes : int
    """

    name: str
    cells: int
    streams: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What the engine has allocated for a store.

    Attributes
    ----------
    n_ctx, n_ctx_seq : int
        Cells, and cells one branch can have.
    n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs : int
        As the engine has set them.
    flash_attn, kv_unified : bool
    model_bytes, context_bytes, compute_bytes : int
        Sums over the rows.
    kv_bytes, recurrent_bytes : int
        The parts of ``context_bytes``: cells, and state that is the same for any context.
    output_bytes : int
        The buffer logits are given in: host memory, in none of the rows.
    caches : tuple of Cache
        Their bytes are ``kv_bytes``.
    rows : tuple of MemoryRow
    """

    n_ctx: int
    n_ctx_seq: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_rs_seq: int
    n_outputs: int
    flash_attn: bool
    kv_unified: bool
    model_bytes: int
    context_bytes: int
    compute_bytes: int
    kv_bytes: int
    recurrent_bytes: int
    output_bytes: int
    caches: tuple[Cache, ...]
    rows: tuple[MemoryRow, ...]

    @property
    def total_bytes(self) -> int:
        """Everything in the account: rows and output buffer."""
        return self.model_bytes + self.context_bytes + self.compute_bytes + self.output_bytes


@dataclass(frozen=True, slots=True)
class DryRun(Memory):
    """What the engine would allocate.

    Attributes
    ----------
    refusal : str or None
        Why :class:`~pylloyal.Store` would refuse these options although the engine takes them; None when it would not.
    """

    refusal: str | None


@dataclass(frozen=True, slots=True)
class Encoder:
    """One encoder of a projector, and the size it was measured with.

    Attributes
    ----------
    kind : {"vision", "audio"}
    width, height : int
        Pixels; of sound frames and bins.
    compute_bytes : int
        The peak of its graph.
    """

    kind: str
    width: int
    height: int
    compute_bytes: int


@dataclass(frozen=True, slots=True)
class ProjectorRow:
    """A projector's buffers on one device."""

    device: str
    weights_bytes: int
    compute_bytes: int


@dataclass(frozen=True, slots=True)
class ProjectorMemory:
    """What a projector would take.

    Attributes
    ----------
    weights_bytes, compute_bytes : int
        Weights, and the peak of the encoder's graph (of two encoders the sum: both buffers are there at the same time).
    encoders : tuple of Encoder
    rows : tuple of ProjectorRow
    """

    weights_bytes: int
    compute_bytes: int
    encoders: tuple[Encoder, ...]
    rows: tuple[ProjectorRow, ...]


def read_memory(text: bytes) -> Memory:
    """The account of an open store, from the library's JSON."""
    return Memory(**_shaped(json.loads(text)))


def _shaped(found: dict[str, Any]) -> dict[str, Any]:
    caches = tuple(Cache(row["name"], row["cells"], row["streams"], row["bytes"]) for row in found.pop("caches"))
    rows = tuple(MemoryRow(**row) for row in found.pop("rows"))
    return {**found, "caches": caches, "rows": rows}


def dry_run(path: str | os.PathLike[str], *, gpu_layers: int = 0, n_ctx: int | None = None, n_branches: int = 8, n_batch: int | None = None, n_ubatch: int | None = None,
            flash_attn: bool | None = None, type_k: KVType = "f16", type_v: KVType = "f16", swa_full: bool = True, deterministic: bool = False, n_rs_seq: int = 0,
            n_outputs: int | None = None, kv_unified: bool = True, offload_kqv: bool = True, op_offload: bool = True) -> DryRun:
    """What opening a model and a store on it would allocate. The engine lays everything out and allocates none of it; no weights are read.

    Parameters
    ----------
    path : str or os.PathLike
        A GGUF file. Weights count as not mapped.
    gpu_layers
        As for :class:`~pylloyal.Model`.
    n_ctx, n_branches, n_batch, n_ubatch, flash_attn, type_k, type_v, swa_full, deterministic, n_rs_seq, n_outputs, offload_kqv, op_offload
        As for :class:`~pylloyal.Store`.
    kv_unified : bool
        False: cells of its own for each branch, which no store has.

    Raises
    ------
    KernelIOError, FormatError
        The file cannot be read, or is no model the engine can load.
    InvalidArgumentError, UnsupportedOperationError
        Options that no context can have, or this model's cannot.
    InsufficientMemoryError
        Not even the engine's books of so many cells would fit.
    """
    model = model_params(gpu_layers=gpu_layers, mmap=True)
    store = store_params(n_ctx=n_ctx, n_branches=n_branches, n_batch=n_batch, n_ubatch=n_ubatch, n_threads=None, flash_attn=flash_attn, type_k=type_k, type_v=type_v, swa_full=swa_full,
                         deterministic=deterministic, n_rs_seq=n_rs_seq, n_outputs=n_outputs, kv_unified=kv_unified, offload_kqv=offload_kqv, op_offload=op_offload)
    raw = path_bytes(path)
    return DryRun(**_shaped(json.loads(take_text_at(library().pyl_dry_run, 0, raw, len(raw), ref(model), ref(store)))))


def projector_dry_run(path: str | os.PathLike[str], *, size: tuple[int, int] | None = None, n_frames: int = 1, gpu: bool = False, flash_attn: bool | None = None,
                      image_min_tokens: int | None = None, image_max_tokens: int | None = None) -> ProjectorMemory:
    """What a projector would take, without opening it: nothing is allocated, no weights are read, no model is needed.

    Parameters
    ----------
    path : str or os.PathLike
        A projector file ("mmproj").
    size : (int, int), optional
        Width and height of a picture as it reaches the encoder. By default what the engine measures with, which for encoders of dynamic
        resolution is not the largest they take.
    n_frames : int
        Pictures encoded together: 2 for a clip whose frames share rows two by two, which takes more than one.
    gpu, flash_attn, image_min_tokens, image_max_tokens
        As for :class:`~pylloyal.Projector`.

    Raises
    ------
    KernelIOError, FormatError, ProjectorMismatchError
        The file cannot be read, or is no projector the engine can load.
    InvalidArgumentError
        A size or number of frames the encoder cannot take.
    """
    params = projector_params(n_threads=None, gpu=gpu, flash_attn=flash_attn, image_min_tokens=image_min_tokens, image_max_tokens=image_max_tokens, cache_bytes=0)
    width, height = size or (0, 0)
    if size and not (0 < width < 2**31 and 0 < height < 2**31):
        raise errors.InvalidArgumentError(f"size is {size}; both numbers must be 1 or more")
    if not 0 < n_frames < 2**31:
        raise errors.InvalidArgumentError(f"n_frames is {n_frames}; it must be 1 or more")
    raw = path_bytes(path)
    found = json.loads(take_text_at(library().pyl_projector_dry_run, 0, raw, len(raw), ref(params), width, height, n_frames))
    return ProjectorMemory(found["weights_bytes"], found["compute_bytes"], tuple(Encoder(**row) for row in found["encoders"]), tuple(ProjectorRow(**row) for row in found["rows"]))
