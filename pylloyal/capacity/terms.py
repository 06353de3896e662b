"""The compute buffer of architectures whose graphs are not followed tensor by tensor: what can live at once, term by term.

A layer works through stages, and what one stage has computed is gone before the next: attention, the feed-forward part, the recurrence,
and at last the logits. The buffer is at most its inputs, which live throughout, and the largest stage with everything in it counted as
if all of it lived at once. That leaves room for what the allocator loses between tensors; how much is checked against the engine
(``tests/integration/test_compute_bound.py``), and where it was not enough the family says by how much more.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .architectures import ARCHITECTURES
from .geometry import Geometry
from .hyperparameters import Hyperparameters
from .settings import Context, Settings, window_cells

# Tenths of the sum that are said. Stages count everything in them once; what the allocator loses is less than one tenth more.
_USUAL: Final = 11
_TENTHS: Final = {"wavtokenizer-dec": 8, "t5": 13, "t5encoder": 12, "step35": 12, "qwen3tts": 12, "minimax-01": 12, "deepseek4": 14}
# Experts as wide as the feed-forward part, whatever expert_feed_forward_length says.
_WIDE_EXPERTS: Final = frozenset((
    "llama", "llama-embed", "mistral3", "minicpm", "granite", "granitemoe", "granite_swa", "granitehybrid", "arctic", "dbrx", "olmoe", "phimoe", "hunyuan-moe", "minimax-m2", "minimax-01", "jamba",
    "nomic-bert-moe", "grok"))
_STREAMS: Final = ("deepseek4", "glm5-next", "hy_v4", "qwen4exp", "kimi-k3")  # several residual streams, mixed in every layer


class Terms:
    """Sizes of one dispatch, in numbers of four bytes."""

    def __init__(self, shape: Geometry, metadata: Mapping[str, Any], made: Context, settings: Settings, n_seqs: int) -> None:
        self.rules = ARCHITECTURES[shape.architecture]
        self.h = Hyperparameters(shape.architecture, self.rules, metadata)
        self.shape, self.made, self.settings, self.n_seqs = shape, made, settings, n_seqs
        self.n_tokens = -(-min(made.n_ctx, made.n_ubatch) // n_seqs) * n_seqs
        self.flash = settings.uses_flash(shape)
        self.x = self.h.n_embd * self.n_tokens
        spans = {"window": window_cells(shape, made, settings, any(group.is_per_sequence for group in shape.groups)), "context": made.n_ctx_seq}
        used = {group.span for group in shape.groups if group.layers}
        self.spans = [spans[span] for span in sorted(used)] if shape.has_memory else [self.n_tokens] * (1 + bool(self.h.n_swa))
        self.n_kv = max(self.spans, default=0)
        if shape.architecture in ("t5encoder", "llama-embed"):  # their cells are made, and never looked at
            self.spans, self.n_kv = [self.n_tokens], self.n_tokens
        elif shape.has_encoder:  # which attends to the dispatch itself
            self.n_kv = max(self.n_kv, self.n_tokens)
        self.scores = self.n_kv * self.n_tokens  # of one head; with a stream for each sequence its tokens see its own cells alone

    def number(self, key: str) -> int:
        """A count, or the largest of an array of them; 0 when it is not there."""
        values = self.h.keys.array(key)
        return max(values, default=0) if values is not None else self.h.keys.number(key, 0)

    @property
    def residual(self) -> int:
        return self.x * (max(1, self.number("hyper_connection.count")) if self.shape.architecture in _STREAMS else 4 if self.shape.architecture == "gemma3n" else 1)

    def inputs(self) -> int:
        """Rows of embeddings beside tokens, masks and places of cells for each span, positions, rotations."""
        h, t = self.h, self.n_tokens
        spans = self.spans + [self.n_kv] * (self.rules.memory in ("indexed", "compressed"))
        v = 1 if self.flash else max((h.v(i) for i in range(h.n_layer_all)), default=1)
        masks = sum(spans) * t // (2 if self.flash else 1)
        places = len(spans) * (2 * t + 2 * t * max(1, v) + 512 * 128)
        per_layer = 256 if self.shape.architecture == "gemma3n" else self.number("embedding_length_per_layer_input")
        more = (4 if self.shape.architecture == "gemma3n" else 3) * t * per_layer * h.n_layer
        if self.rules.state == "lightning":  # decays from every token of a sequence to every other
            more += max(h.n_head) * ((t // self.n_seqs) ** 2 + 2 * t)
        if self.shape.architecture in ("t5", "t5encoder"):  # distances, and to a decoder all that the encoder may have said
            more += self.scores + (h.n_ctx_train * (h.n_embd + t) if self.shape.architecture == "t5" else 0)
        if self.rules.indexer:  # every layer has a mask of its own for what its indexer kept
            more += h.n_layer * t * min(self.number("attention.indexer.top_k"), self.n_kv + self.number("attention.indexer.kpool"))
        if self.shape.architecture == "kimi-k3" and self.number("attn_res.block_size"):  # which looks back at what every few layers said
            more += 3 * self.x * -(-h.n_layer // self.number("attn_res.block_size"))
        deep = self.number("n_deepstack_layers") + len(self.h.keys.array("deepstack_mapping") or ())
        return self.x * (1 + 2 * deep) + masks + places + 8 * t + more

    def attention(self) -> int:
        h, t = self.h, self.n_tokens
        n_head, n_kv_head = max(h.n_head), max(1, *h.n_head_kv)
        head_k, head_v = max(h.head_k, h.head_k_swa), max(h.head_v, h.head_v_swa)
        q, k, v, out = n_head * head_k * t, n_kv_head * head_k * t, n_kv_head * head_v * t, n_head * head_v * t
        total = 4 * self.x + 3 * q + 2 * k + 2 * v + out
        cells = self.n_kv * (1 if self.settings.unified else self.n_seqs)
        if self.shape.is_mla and self.rules.has_mla:
            rank, rope = max(self.number("attention.kv_lora_rank"), self.number("attention.kv_lora_rank_swa")), self.number("rope.dimension_count")
            absorbed, plain = n_head * (rank + rope) * t, n_head * self.number("attention.key_length_mla") * t
            total = 3 * self.x + 2 * plain + 3 * absorbed + n_head * rank * t + 2 * self.number("attention.q_lora_rank") * t
            k_row, v_row = rank + rope, rank
        else:
            k_row, v_row = n_kv_head * head_k, n_kv_head * head_v
        if not self.flash:
            total += n_head * self.scores
            if self.shape.is_mla:
                total += cells * v_row  # turned round
        elif "f32" in (self.settings.type_k, self.settings.type_v) or not self.shape.has_memory:
            total += cells * (k_row + v_row) // 2  # copies in half precision, which flash attention wants
        if self.rules.indexer or self.rules.memory == "compressed":
            total += 3 * self.scores + self.number("attention.indexer.head_count") * (3 * self.number("attention.indexer.key_length") + 2) * t + 4 * self.number("attention.indexer.top_k") * t
            if self.shape.architecture == "minimax-m3":  # masks, head by head, of what the indexer chose
                total += (1 + 3 * max(n_head, self.number("attention.indexer.head_count"))) * self.n_kv * t // (1 if self.settings.unified else self.n_seqs)
            if self.number("attention.indexer.kpool"):  # keys and gates of all cells that complete a pool
                total += 5 * self.n_kv * self.n_seqs * self.number("attention.indexer.key_length")
        if self.shape.architecture in ("t5", "t5encoder"):
            total += 3 * n_head * self.scores  # distances take flash attention away
            if self.shape.architecture == "t5":
                total += h.n_ctx_train * n_head * (6 * (head_k + head_v) + (0 if self.flash else t))
        return total

    def feed_forward(self) -> int:
        h, t = self.h, self.n_tokens
        n_expert, n_used = self.number("expert_count"), self.number("expert_used_count")
        total = 3 * max(h.n_ff) * t
        if n_expert:
            n_ff = self.number("expert_feed_forward_length") or max(h.n_ff)
            if self.shape.architecture in _WIDE_EXPERTS:
                n_ff = max(n_ff, *h.n_ff)
            shared = max(self.number("expert_shared_feed_forward_length"), n_ff * max(1, self.number("expert_shared_count")))
            routed = max(3 * n_ff * n_used * t, n_ff * n_used * t + (n_used + 1) * self.x) + self.x
            total = max(total, routed + 4 * n_expert * t, 3 * shared * t + self.x)
        return total + 4 * self.x

    def recurrence(self) -> int:
        h, t, kind = self.h, self.n_tokens, self.rules.state
        if not kind:
            return 0
        rows = [states.rows for states in self.shape.states]
        n_r, n_s = max((r[0] for r in rows), default=0), max((r[1] if len(r) > 1 else 0 for r in rows), default=0)
        times = 1 + (self.settings.n_rs_seq if self.shape.takes_rollback else 0)
        kept = self.n_seqs * (n_s + n_r) * (1 + times)
        if kind == "rwkv":
            return kept + 20 * self.x
        if kind == "shortconv":
            return kept + 8 * self.x
        if kind == "kda":
            return kept + 3 * self.x + 10 * max(h.n_head) * self.number("kda.head_dim") * t
        if kind == "lightning":
            per = t // self.n_seqs
            return kept + 10 * self.x + (2 * max(h.n_head) + 2) * per * t + 3 * self.n_seqs * n_s
        inner, groups = self.number("ssm.inner_size"), self.number("ssm.group_count") * self.number("ssm.state_size")
        return kept + 3 * self.x + 7 * inner * t + 8 * groups * t

    def logits(self) -> int:
        if self.shape.architecture == "t5encoder" or (self.rules.memory == "none" and self.shape.architecture not in ("dream", "llada", "llada-moe", "rnd1")):
            return 4 * self.x  # embeddings
        n = self.settings.n_outputs or self.settings.n_branches
        if self.shape.has_encoder or self.shape.architecture == "cogvlm":
            n = self.n_tokens
        n = min(n, self.n_tokens)
        copies = 2 if self.shape.architecture in ("chameleon", "qwen3tts") else 1  # logits cut and put together again
        return n * (copies * self.shape.n_vocab + 2 * self.h.n_embd) + 6 * self.x

    def total(self) -> int:
        """Bytes."""
        stages = max(self.attention(), self.feed_forward(), self.recurrence(), self.logits())
        extra = 0
        if self.shape.architecture in _STREAMS or self.shape.architecture == "gemma3n":
            extra = 4 * self.residual
        return 4 * (self.inputs() + extra + stages) * _TENTHS.get(self.shape.architecture, _USUAL) // 10
