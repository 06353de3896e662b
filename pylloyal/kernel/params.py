"""Options as the ABI's structs: one reading of them for opening and for looking only."""
from __future__ import annotations

import os
from typing import Any, Final, Literal

from .. import errors
from .._ffi import capi
from .._ffi.load import library
from .._ffi.memory import new, ref

KVType = Literal["f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
FLASH: Final = {None: capi.FLASH_ATTN_AUTO, True: capi.FLASH_ATTN_ON, False: capi.FLASH_ATTN_OFF}


def path_bytes(path: str | os.PathLike[str]) -> bytes:
    return os.fsencode(os.fspath(path))


def positive(name: str, value: int | None) -> int:
    """The value, 0 for None, which leaves it to the library; InvalidArgumentError for what the library would take for something else."""
    if value is not None and not 0 < value < 2**31:
        raise errors.InvalidArgumentError(f"{name} is {value}; it must be 1 or more")
    return value or 0


def model_params(*, gpu_layers: int, mmap: bool, vocab_only: bool = False) -> Any:
    if not -(2**31) <= gpu_layers < 2**31:
        raise errors.InvalidArgumentError(f"gpu_layers is {gpu_layers}; it must fit 32 bits")
    return new(capi.pyl_model_params, n_gpu_layers=gpu_layers, use_mmap=mmap, vocab_only=vocab_only)


def store_params(*, n_ctx: int | None, n_branches: int, n_batch: int | None, n_ubatch: int | None, n_threads: int | None, flash_attn: bool | None, type_k: str, type_v: str, swa_full: bool,
                 deterministic: bool, n_rs_seq: int, n_outputs: int | None, kv_unified: bool, offload_kqv: bool, op_offload: bool) -> Any:
    params = new(capi.pyl_store_params)
    library().pyl_store_params_init(ref(params), params.struct_size)
    for name, value in (("n_ctx", n_ctx), ("n_branches", n_branches), ("n_batch", n_batch), ("n_ubatch", n_ubatch), ("n_threads", n_threads), ("n_outputs", n_outputs)):
        if value is not None:
            setattr(params, name, positive(name, value))
    if not 0 <= n_rs_seq < 2**31:
        raise errors.InvalidArgumentError(f"n_rs_seq is {n_rs_seq}; it must be 0 or more")
    params.n_rs_seq, params.kv_unified, params.offload_kqv, params.op_offload = n_rs_seq, kv_unified, offload_kqv, op_offload
    params.flash_attn, params.swa_full, params.deterministic = FLASH[flash_attn], swa_full, deterministic
    for name, kind in (("type_k", type_k), ("type_v", type_v)):
        if not hasattr(capi, f"KV_{kind.upper()}"):
            raise errors.InvalidArgumentError(f"{name} is {kind!r}; it must be one of f16, f32, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl")
        setattr(params, name, getattr(capi, f"KV_{kind.upper()}"))
    return params


def projector_params(*, n_threads: int | None, gpu: bool, flash_attn: bool | None, image_min_tokens: int | None, image_max_tokens: int | None, cache_bytes: int) -> Any:
    for name, value in (("n_threads", n_threads), ("image_min_tokens", image_min_tokens), ("image_max_tokens", image_max_tokens)):
        positive(name, value)
    if cache_bytes < 0:
        raise errors.InvalidArgumentError(f"cache_bytes is {cache_bytes}; it must be 0 or more")
    return new(capi.pyl_projector_params, n_threads=n_threads or 0, use_gpu=gpu, flash_attn=FLASH[flash_attn], image_min_tokens=image_min_tokens or 0,
               image_max_tokens=image_max_tokens or 0, cache_bytes=cache_bytes)
