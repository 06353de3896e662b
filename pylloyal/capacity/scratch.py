"""The CPU's scratch: one buffer beside the compute buffer, made at the first decode and as large as the hungriest operation wants.

An operation wants a copy of what it multiplies in the type of its weights, and something for every thread. Source:
``ggml_graph_plan`` and the work sizes of its repacked and tiled products. A header does not tell the types of weights, so half precision
is taken, the widest copy there is; single precision needs none.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .geometry import Geometry
from .settings import Context, Settings
from .terms import Terms

_TILE: Final = 64  # queries and cells of a tile of flash attention
_TILED: Final = 512 << 10  # a thread's own, of tiled products
_LINE: Final = 64


def work_bound(geometry: Geometry, metadata: Mapping[str, Any], made: Context, settings: Settings, n_threads: int) -> int:
    """Bytes that the CPU's scratch never exceeds.

    Parameters
    ----------
    n_threads : int
        The larger of those for prompts and for single tokens.
    """
    return max(_of(Terms(geometry, metadata, made, settings, n), n_threads) for n in {1, settings.n_branches})


def _of(terms: Terms, n_threads: int) -> int:
    h, t = terms.h, terms.n_tokens
    n_head, head = max(h.n_head), max(h.head_k, h.head_v, h.head_k_swa, h.head_v_swa, terms.number("attention.kv_lora_rank") + terms.number("rope.dimension_count"))
    n_expert, n_used = terms.number("expert_count"), terms.number("expert_used_count")
    n_ff = max(*h.n_ff, terms.number("expert_feed_forward_length"), terms.number("expert_shared_feed_forward_length"), terms.number("expert_feed_forward_length") * terms.number("expert_shared_count"))
    wide = max(4 * h.n_embd, 2 * n_ff, n_head * head, terms.number("expert_feed_forward_length") * n_used, max(h.n_ff) * n_used if n_expert else 0, 3 * terms.number("ssm.inner_size"))
    products = wide * t
    if terms.shape.has_encoder:
        products = max(products, h.n_ctx_train * max(h.n_embd, n_head * head, n_head * t), 2 * n_head * terms.scores)
    if not terms.flash:
        products = max(products, n_head * terms.scores * (2 if terms.rules.memory == "compressed" else 1))
    chosen = (n_expert * (8 * n_used * t + _LINE + 8) + 4 * _LINE) if n_expert else 0
    each = 4 * (max(terms.n_kv, terms.n_kv * (h.n_swa > 0), wide, h.n_ctx_train if terms.shape.has_encoder else 0) + head * head)
    flash = max(4 * (4 * _TILE * head + 2 * _TILE * _TILE), 4 * (n_head * (2 + head) + 3 * head)) if terms.flash else 0
    return 2 * products + chosen + n_threads * (max(each, flash, _TILED) + _LINE) + 4 * _LINE
