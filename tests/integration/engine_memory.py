"""The engine's own answer to what a header's memory is (libsrc/tests/raw_memory.cpp), and headers to ask it about."""
from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headers import TYPE_IDS, Tensor

from pylloyal.capacity.architectures import ARCHITECTURES
from pylloyal.capacity.settings import Context, Settings

ROOT = Path(__file__).resolve().parents[2]


class Oracle:
    """Asks; starts another process when an assertion of the engine has ended the last one."""

    def __init__(self) -> None:
        found = sorted((ROOT / "build").glob("*/raw_memory*"))
        if not found:
            raise FileNotFoundError("raw_memory is not built; `python3 tools/bootstrap.py lib` builds it (preset native)")
        self.program, self.process = found[0], None

    def architectures(self) -> dict[str, tuple[bool, bool, bool]]:
        """Every name the engine knows -> (recurrent, hybrid, takes rollback)."""
        lines = subprocess.run([self.program, "architectures"], check=True, capture_output=True, text=True).stdout.splitlines()
        return {name: (a == "1", b == "1", c == "1") for name, a, b, c in (line.split() for line in lines)}

    def cells(self, path: Path, made: Context, settings: Settings) -> dict[str, Any]:
        """What is kept, for a context whose sizes are settled."""
        return self._ask("cells", path, made.n_ctx_seq, made.n_seq_max, made.n_ubatch, *_words(settings))

    def graph(self, path: Path, n_ctx: int, settings: Settings, fused: bool = False) -> dict[str, Any]:
        """A whole context; fused: of a file that has Q, K and V in one tensor."""
        s = settings
        return self._ask("graph", path, n_ctx, s.n_batch, s.n_ubatch or s.n_batch, s.n_branches, *_words(s), s.n_outputs or s.n_branches, int(fused))

    def _ask(self, *words: object) -> dict[str, Any]:
        if self.process is None:
            self.process = subprocess.Popen([self.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "GGML_NO_BACKTRACE": "1"})
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line.startswith("{"):  # it died, and may have said something before
            self.close()
            return {"died": line}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def _words(s: Settings) -> tuple[int, ...]:
    return int(s.unified), int(s.flash_attn), int(s.swa_full), TYPE_IDS[s.type_k], TYPE_IDS[s.type_v], s.n_rs_seq


# What loaders insist on and memory does not depend on.
_FLOATS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.group_norm_epsilon", "attention.clamp_kqv", "logit_scale", "residual_scale", "embedding_scale",
           "attention.scale", "expert_weights_scale", "hyper_connection.epsilon", "rope.scaling.yarn_log_multiplier", "hyper_connection.magnitude", "rope.freq_base_swa", "attention.compress_rope_freq_base", "activation.situ_beta",
           "activation.situ_linear_beta")
_COUNTS: dict[str, Any] = {"expert_feed_forward_length": 64, "expert_shared_count": 1, "expert_shared_feed_forward_length": 64, "expert_gating_func": 2, "expert_chunk_feed_forward_length": 64,
           "experts_per_group": 1, "interleave_moe_layer_step": 1, "moe_every_n_layers": 2, "attention.group_norm_groups": 1, "attention.relative_buckets_count": 32,
           "attention.output_group_count": 1, "attention.output_lora_rank": 8, "hyper_connection.sinkhorn_iterations": 2, "hash_layer_count": 1, "attention.q_lora_rank": 24,
           "attention.decay_lora_rank": 8, "attention.iclr_lora_rank": 8, "attention.value_residual_mix_lora_rank": 8, "time_mix_extra_dim": 8, "time_decay_extra_dim": 8,
           "attention.indexer.head_count": 2, "attention.indexer.top_k": 32, "attention.indexer.block_size": 32, "attention.indexer.local_blocks": 1, "attn_res.block_size": 2,
           "hyper_connection.low_rank": 8, "use_parallel_residual": True, "expert_group_scale": 0.5, "posnet.embedding_length": 8, "posnet.block_count": 1, "convnext.embedding_length": 8, "convnext.block_count": 1}


def random_metadata(architecture: str, rng: random.Random) -> tuple[dict[str, Any], list[Tensor]]:
    """Keys a file of that architecture could have, with everything that decides its memory drawn at random; and tensors that decide it too."""
    rules = ARCHITECTURES[architecture]
    n_layer = rng.choice((1, 2, 3, 4, 5, 6, 8, 12, 27, 62, 64))
    if architecture == "gemma3n":
        n_layer = rng.choice((21, 25, 30, 35))
    head = rng.choice((32, 64, 96, 128, 256))
    n_head = rng.choice((1, 2, 3, 4, 8))
    n_embd = head * n_head if rng.random() < 0.7 else rng.choice((64, 256, 640, 1024))
    keys: dict[str, Any] = {
        "context_length": rng.choice((512, 2048, 4097, 131072, 1 << 20)), "embedding_length": n_embd, "block_count": n_layer, "feed_forward_length": 128, "attention.head_count": n_head,
        "rope.dimension_count": head, "vocab_size": 256, "features_length": 64,
        **dict.fromkeys(_FLOATS, 1e-05), **_COUNTS,
        "expert_weights_norm": True, "attention.sliding_window": rng.choice((0, 16, 128, 1000, 1024, 4096)) or 32,
        "leading_dense_block_count": rng.randint(0, n_layer), "attention.kv_lora_rank": rng.choice((32, 64, 512)), "attention.indexer.key_length": rng.choice((32, 64, 128)) if architecture != "hy_v4" else head + 32,
        "attention.kv_lora_rank_swa": 32, "attention.key_length_mla_swa": 48, "attention.value_length_mla_swa": 32,
        "ssm.conv_kernel": rng.choice((0, 1, 2, 4) if architecture != "qwen4exp" else (1, 4)), "ssm.inner_size": rng.choice((32, 64, 256)), "ssm.state_size": rng.choice((1, 8, 16, 128)), "ssm.time_step_rank": 4,
        "ssm.group_count": rng.choice((1, 2, 4)), "wkv.head_size": rng.choice((16, 32, 64)), "shortconv.l_cache": rng.choice((2, 3, 4)), "kda.head_dim": rng.choice((16, 32, 128)),
        "kda.gate_lower_bound": -5.0, "hyper_connection.count": 4, "rope.dimension_sections": [4, 4, 4, 0], "attention.indexer.kpool": 4,
    }
    if rng.random() < 0.7:
        keys["attention.head_count_kv"] = rng.choice([heads for heads in (1, 2, 3, 4, 8) if n_head % heads == 0])
    if rng.random() < 0.7:
        keys["attention.key_length"] = head
        keys["attention.value_length"] = rng.choice((head, 32, 64, 128))
    if rng.random() < 0.3:
        keys["attention.key_length_swa"], keys["attention.value_length_swa"] = rng.choice((32, 64, 128)), rng.choice((32, 64, 128))
    if rng.random() < 0.3:
        keys["token_shift_count"] = rng.choice((1, 2))
    if rules.has_mla and (architecture not in ("deepseek2", "deepseek32", "glm-dsa", "mistral4") or rng.random() < 0.7):
        keys["attention.key_length_mla"], keys["attention.value_length_mla"] = 48, 32
    if rng.random() < 0.3:
        keys["nextn_predict_layers"] = rng.randint(0, min(2, n_layer - 1))
    n_trunk = n_layer - keys.get("nextn_predict_layers", 0)
    if rng.random() < 0.3:
        keys["attention.indexer.types"] = [1, *(rng.randint(0, 1) for _ in range(n_trunk - 1))]
    if architecture in ("hy_v4", "dots3note"):
        keys["attention.indexer.types"] = [1, *(rng.randint(0, 1) for _ in range(n_trunk - 1))]
        if rng.random() < 0.2:
            keys["attention.indexer.top_k"] = 0 if architecture == "hy_v4" else 32
    _windows(architecture, keys, n_layer, n_trunk, rng)
    if "zero heads" in rules.recurrent or rng.random() < 0.2:
        lists = [rng.choice((0, 1, 2)) if n_head % 2 == 0 else rng.choice((0, 1)) for _ in range(n_layer)]
        keys["attention.head_count_kv"] = lists
        if "feed-forward" in rules.recurrent:
            keys["feed_forward_length"] = [rng.choice((0, 64)) for _ in range(n_layer)]
    if rng.random() < 0.3:
        keys["full_attention_interval"] = rng.randint(1, 5)
    if rng.random() < 0.3:
        keys["attention.recurrent_layers"] = [rng.randint(0, 1) for _ in range(n_layer)]
    tensors: list[Tensor] = []
    _particular(architecture, keys, n_layer, rng, tensors)
    if keys.get("expert_count", 0) == 0:
        keys.pop("expert_used_count", None)
    out = {"general.architecture": architecture, **{(key if key.startswith("xielu.") else f"{architecture}.{key}"): value for key, value in keys.items()}}
    out["tokenizer.ggml.model"] = "none"
    return out, tensors


def _windows(architecture: str, keys: dict[str, Any], n_layer: int, n_trunk: int, rng: random.Random) -> None:
    rule = ARCHITECTURES[architecture].window
    key = "attention.sliding_window_pattern"
    if rule is not None and rule.every == "listed":
        keys[key] = [rng.random() < 0.6 for _ in range(n_layer)]
    elif rng.random() < 0.2:
        keys[key] = [rng.random() < 0.6 for _ in range(rng.choice((n_layer, n_trunk)))]
    elif rng.random() < 0.3:
        keys[key] = rng.choice((0, 2, 3, 5))
    if rule is not None and (rule.is_optional or rule.default or rule.fixed) and rng.random() < 0.4:
        if rng.random() < 0.5:
            keys["attention.sliding_window"] = 0
        else:
            del keys["attention.sliding_window"]


def n_embd_head(keys: Mapping[str, Any]) -> int:
    return int(keys.get("attention.key_length", keys["embedding_length"] // keys["attention.head_count"]))


def _particular(architecture: str, keys: dict[str, Any], n_layer: int, rng: random.Random, tensors: list[Tensor]) -> None:
    """What one loader wants and no other."""
    if architecture == "gemma4":
        keys["attention.shared_kv_layers"] = rng.randint(0, max(0, n_layer - 2))
        keys["attention.key_length_swa"], keys["attention.value_length_swa"], keys["embedding_length_per_layer_input"] = 32, 32, 8
    if architecture == "deepseek4":
        keys["attention.compress_ratios"] = [rng.choice((0, 4, 128)) for _ in range(n_layer)]
        keys["expert_gating_func"] = 4
        keys["swiglu_clamp_exp"] = [1.0] * n_layer
        if keys.get("nextn_predict_layers") and rng.random() < 0.5:
            tensors.append((f"blk.{n_layer - keys['nextn_predict_layers']}.nextn.eh_proj.weight", (32,), "f32"))
    if architecture in ("llama", "deci", "falcon", "llama-embed"):
        keys["rope.dimension_count"] = n_embd_head(keys)
    if architecture == "apertus":
        keys.update({f"xielu.{name}": 1.0 for name in ("alpha_n", "alpha_p", "beta", "eps")})
    if architecture == "maple":
        keys["swiglu_clamp_exp"] = [1.0] * n_layer
    if architecture == "graniteswitch":
        keys.update({"adapters.count": 1, "adapters.lora_rank": 4, "adapters.token_ids_activate": [5], "adapters.token_ids_substitute": [6]})
    if architecture == "nanbeige":
        keys["num_loops"] = rng.randint(1, 3)
    if architecture == "hrm_text":
        per, high, low = rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 2)
        keys.update({"hrm.layers_per_stack": per, "hrm.h_cycles": high, "hrm.l_cycles": low, "hrm_layers_per_stack": per, "hrm_h_cycles": high, "hrm_l_cycles": low, "block_count": per * high * (low + 1)})
        keys.pop("nextn_predict_layers", None)
        for key in [key for key, value in keys.items() if isinstance(value, list) and key != "rope.dimension_sections"]:
            keys[key] = 1
    if architecture == "qwen4exp" and rng.random() < 0.5:
        recurrent = [i for i in range(n_layer) if i % 2 == 0]
        keys["attention.recurrent_layers"] = [int(i in recurrent) for i in range(n_layer)]
        keys.update({"ple.layers": [rng.choice(recurrent)], "ple.ngram_size": 2, "ple.heads_per_ngram": 1, "ple.conv_kernel": rng.choice((2, 3, 4)), "ple.eos_token_id": 0, "ple.layer_multipliers": (3, 5), "ple.head_offsets": (0,), "ple.head_vocab_sizes": (16,), "embedding_length_per_layer_input": 8})
