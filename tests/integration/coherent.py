"""Headers of which the engine makes a whole model: sizes that agree with each other, small ones and those of real models."""
from __future__ import annotations

import random
from typing import Any, Literal

from engine_memory import _COUNTS, _FLOATS

from pylloyal.capacity.architectures import ARCHITECTURES

Scale = Literal["small", "real"]


def coherent_metadata(architecture: str, rng: random.Random, scale: Scale = "small", n_layer: int = 0) -> tuple[dict[str, Any], list[str]]:
    """Keys of a model that can be opened with no weights; and names of tensors that its loader looks for."""
    rules = ARCHITECTURES[architecture]
    is_real = scale == "real"
    head = rng.choice((64, 80, 96, 128, 256)) if is_real else rng.choice((32, 64, 128))
    n_head = rng.choice((8, 16, 32, 40, 64)) if is_real else rng.choice((2, 4, 8))
    while is_real and not 1024 <= head * n_head <= 8192:
        n_head = rng.choice((8, 16, 32, 64))
    n_embd = head * n_head
    n_layer = n_layer or rng.choice((2, 3, 4, 5))
    n_ff = n_embd * rng.choice((2, 3, 4)) if rng.random() < 0.7 else n_embd // 2 * 7
    n_expert = rng.choice((8, 32, 128)) if is_real else rng.choice((4, 8))
    keys: dict[str, Any] = {
        "context_length": rng.choice((2048, 4096, 131072)), "embedding_length": n_embd, "block_count": n_layer, "feed_forward_length": n_ff, "attention.head_count": n_head,
        "attention.head_count_kv": rng.choice([n for n in (1, 2, 4, 8, n_head) if n_head % n == 0]), "attention.key_length": head, "attention.value_length": head,
        "rope.dimension_count": head, "vocab_size": rng.choice((32000, 49152, 151936, 262144)) if is_real else rng.choice((256, 1000)), "features_length": n_embd,
        **dict.fromkeys(_FLOATS, 1e-05), **_COUNTS,
        "expert_count": n_expert, "expert_used_count": rng.choice((1, 2, 4)), "expert_feed_forward_length": rng.choice((n_embd // 4, n_embd // 2, n_embd)), "expert_weights_norm": rng.random() < 0.7, "expert_weights_scale": rng.choice((1.0, 2.5)),
        "expert_shared_feed_forward_length": n_embd // 2, "expert_chunk_feed_forward_length": n_embd // 4, "expert_group_count": (n_groups := rng.choice((1, 1, 1, 2, 4)) if n_expert >= 8 else 1), "expert_group_used_count": (n_groups + 1) // 2,
        "attention.sliding_window": rng.choice((128, 512, 1024, 4096)) if is_real else rng.choice((16, 100, 512)), "leading_dense_block_count": 1,
        "attention.q_lora_rank": n_embd // 4, "attention.kv_lora_rank": 512 if is_real else 64,
        "attention.indexer.key_length": 128 if is_real else 64, "attention.indexer.head_count": rng.choice((4, 64)) if is_real else 2, "attention.indexer.top_k": 2048 if is_real else 32,
        "ssm.conv_kernel": 4, "ssm.inner_size": 2 * n_embd, "ssm.state_size": rng.choice((16, 128)) if rules.state == "mamba2" else 16, "ssm.time_step_rank": 2 * n_embd // 64, "ssm.group_count": 1,
        "wkv.head_size": 64 if n_embd % 64 == 0 else 32, "shortconv.l_cache": 3, "kda.head_dim": head, "kda.gate_lower_bound": -5.0, "hyper_connection.count": 4,
        "rope.dimension_sections": [head // 8, head // 8, head // 4, 0], "attention.indexer.kpool": 4,
    }
    if rules.has_mla:
        keys.update({"attention.key_length_mla": 192 if is_real else 48, "attention.value_length_mla": 128 if is_real else 32, "rope.dimension_count": 64 if is_real else 16, "attention.head_count_kv": 1})
        keys.update({"attention.key_length": keys["attention.kv_lora_rank"] + keys["rope.dimension_count"], "attention.value_length": keys["attention.kv_lora_rank"]})
    if rules.window is not None and rules.window.every == "listed":
        keys["attention.sliding_window_pattern"] = [i % 2 == 0 for i in range(n_layer)]
    if rules.recurrent.startswith("zero heads"):
        keys["attention.head_count_kv"] = [0 if i % 2 == 0 else keys["attention.head_count_kv"] for i in range(n_layer)]
    _own_sizes(architecture, keys, rng, is_real)
    tensors: list[str] = []
    out = {"general.architecture": architecture, **{(key if key.startswith("xielu.") else f"{architecture}.{key}"): value for key, value in keys.items()}}
    out["tokenizer.ggml.model"] = "none"
    if architecture in _WITH_TOKEN_TYPES:
        out["tokenizer.ggml.token_type_count"] = 2
    return out, tensors


_WITH_TOKEN_TYPES = ("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3")
_ALL_HEADS = ("chameleon", "olmoe", "deepseek2-ocr", "dots1", "t5", "t5encoder", "minicpm3", "plm", "jina-bert-v2", "gptneox", "bloom", "mpt", "phi2")


def _own_sizes(architecture: str, keys: dict[str, Any], rng: random.Random, is_real: bool) -> None:
    """Where one architecture's sizes hang together otherwise."""
    n_embd, n_head, n_layer, head = (keys[key] for key in ("embedding_length", "attention.head_count", "block_count", "attention.key_length"))
    state = ARCHITECTURES[architecture].state
    if architecture in _ALL_HEADS:
        keys["attention.head_count_kv"] = n_head
    if architecture in ("minicpm3", "plm"):
        keys["rope.dimension_count"] = head // 2
    if state == "rwkv":
        keys.update({"attention.gate_lora_rank": 32, "rescale_every_n_layers": 6, "attention.head_count": 0, "attention.head_count_kv": 0})
        keys["feed_forward_length"] = n_embd * 4
        keys["token_shift_count"] = 2
        if architecture in ("rwkv6qwen2", "arwkv7"):
            keys["token_shift_count"] = 1
        if architecture == "rwkv6qwen2":
            keys["attention.head_count"] = n_embd // keys["wkv.head_size"]
            keys["attention.head_count_kv"] = keys["attention.head_count"] // rng.choice((1, 2))
    if architecture in ("qwen3next", "qwen35", "qwen35moe", "qwen4exp"):  # heads of one size for K and V, V heads a multiple of K heads
        size = 128 if is_real else 32
        n_k = max(1, n_embd // size // rng.choice((1, 2)))
        n_v = n_k * rng.choice((1, 2))
        keys.update({"ssm.state_size": size, "ssm.group_count": n_k, "ssm.time_step_rank": n_v, "ssm.inner_size": size * n_v})
    if architecture == "chameleon" and not is_real:
        keys["vocab_size"] = 9000  # logits of the pictures' tokens are cut out
    if architecture == "qwen3tts" and not is_real:
        keys["vocab_size"] = 4000  # not smaller than its codec's
    if architecture in ("qwen3vl", "qwen3vlmoe", "qwen3tts"):
        keys["n_deepstack_layers"] = rng.choice((0, 1, min(3, n_layer - 1))) if architecture != "qwen3tts" else 0
    if architecture in ("granite", "granitemoe"):
        keys["rope.scaling.finetuned"] = rng.random() < 0.7
        if architecture == "granite" and rng.random() < 0.3:
            keys["deepstack_mapping"] = [i % 2 - 1 for i in range(n_layer)]
    if architecture == "mistral3" and rng.random() < 0.4:
        keys["attention.temperature_scale"] = 0.1
    if architecture == "gptneox":
        keys["use_parallel_residual"] = rng.random() < 0.6
    if architecture == "plamo2":
        keys["ssm.group_count"] = 0
    if architecture == "glm5-next":
        keys.update({"rope.dimension_count": 0, "attention.key_length": keys["attention.kv_lora_rank"]})
    if architecture == "minimax-m3":
        keys["attention.indexer.head_count"] = keys["attention.head_count_kv"]
    if architecture == "apertus":
        keys.update({f"xielu.{name}": [1.0] * n_layer for name in ("alpha_n", "alpha_p", "beta", "eps")})
    if architecture in ("deepseek4", "maple"):
        keys["swiglu_clamp_exp"] = [1.0] * n_layer
    if architecture == "deepseek4":
        keys["attention.compress_ratios"] = ([4, 128] + [rng.choice((0, 4, 128)) for _ in range(n_layer)])[:n_layer]
        keys.update({"expert_gating_func": 4, "attention.output_group_count": 2, "attention.head_count_kv": 1, "hash_layer_count": 0, "rope.dimension_count": 64 if is_real else 32})
    if architecture == "dots3note":
        index, rope = keys["attention.indexer.key_length"], keys["rope.dimension_count"]  # its rotation takes windowed cells to be as wide as the indexer's
        keys.update({"attention.kv_lora_rank_swa": index - rope, "attention.key_length_swa": index, "attention.value_length_swa": index - rope, "attention.key_length_mla_swa": keys["attention.key_length_mla"],
                     "attention.value_length_mla_swa": keys["attention.value_length_mla"], "attention.indexer.types": [1] * n_layer})
    if architecture == "hy_v4":
        keys["attention.indexer.types"] = [1, *(rng.randint(0, 1) for _ in range(n_layer - 1))]
    if architecture == "gemma4":
        keys.update({"attention.shared_kv_layers": 0, "attention.key_length_swa": head, "attention.value_length_swa": head, "embedding_length_per_layer_input": rng.choice((0, 256 if is_real else 16))})
    if architecture == "graniteswitch":
        keys.update({"adapters.count": 1, "adapters.lora_rank": 4, "adapters.token_ids_activate": [5], "adapters.token_ids_substitute": [6]})
    if architecture == "nanbeige":
        keys["num_loops"] = rng.randint(1, 3)
    if architecture == "hrm_text":
        per, high, low = rng.randint(1, 2), rng.randint(1, 2), rng.randint(1, 2)
        keys.update({"hrm.layers_per_stack": per, "hrm.h_cycles": high, "hrm.l_cycles": low, "block_count": per * high * (low + 1)})
    if architecture == "gemma3n":
        keys["block_count"] = 21
