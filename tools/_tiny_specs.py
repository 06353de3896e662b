"""What each tiny model is made of: keys and tensors of one real architecture, at the smallest size the engine takes.

Tensors are written as text, separated by spaces: ``name[ne0,ne1,...]``, shapes in ggml's order. ``*`` stands for every block, or
for those after an ``@``; ``.weight`` is added to a name unless it ends in ``!`` or carries a suffix of its own. A head has 32
dimensions wherever the architecture lets us choose, so that quantised KV types work. Sizes not free to choose: rwkv's head of 64
(the engine reads out of bounds below), ``ssm.inner_size`` of twice the width, a projector's ``feed_forward_length`` other than
its width.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

VocabKind = Literal["bpe", "spm", "gemma4", "wpm", "none"]


@dataclass(frozen=True)
class Spec:
    """An architecture, small.

    Attributes
    ----------
    keys : dict
        Prefixed with the architecture's name when written.
    vocab : {"bpe", "spm", "gemma4", "wpm", "none"}
        Kind of tokenizer; "none" for a projector.
    is_decoder : bool
        True when a store can be opened on it.
    """

    arch: str
    n_layer: int
    keys: dict[str, Any]
    tensors: str
    vocab: VocabKind = "bpe"
    n_vocab: int = 512
    is_decoder: bool = True

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor's full name and shape, block by block where it has blocks."""
        for entry in self.tensors.split():
            parts = re.fullmatch(r"([\w.*]+)(!?)\[([\d,]+)\](?:@([\d,]+))?", entry)
            if not parts:
                raise ValueError(f"cannot read the tensor {entry!r}")
            name, exact, shape, blocks = parts.groups()
            if not exact and not re.search(r"\.(weight|bias|scale)\b", name):
                name += ".weight"
            for block in (blocks.split(",") if blocks else range(self.n_layer)) if "*" in name else ("",):
                yield name.replace("*", str(block)), tuple(int(n) for n in shape.split(","))


def _decoder(heads: int | list[int] = 2, heads_kv: int | list[int] = 1, *, n_ff: int | list[int] = 128, base: float = 10000.0, head_dim: int = 32, n_ctx: int = 4096) -> dict[str, Any]:
    """The keys nearly every decoder has."""
    return {"context_length": n_ctx, "embedding_length": 64, "vocab_size": 512, "feed_forward_length": n_ff, "attention.head_count": heads, "attention.head_count_kv": heads_kv,
            "attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim, "rope.freq_base": base, "attention.layer_norm_rms_epsilon": 1e-6}


def _attn(heads: int = 2, heads_kv: int = 1, *, at: str = "", normed: bool = False, biased: bool = False, q: int = 1, head_dim: int = 32) -> str:
    """Attention tensors: ``q`` times the usual width of Q where it carries a gate."""
    wide, narrow = head_dim * heads, head_dim * heads_kv
    out = [f"attn_q[64,{q * wide}]", f"attn_k[64,{narrow}]", f"attn_v[64,{narrow}]", f"attn_output[{wide},64]"]
    out += [f"attn_q_norm[{head_dim}]", f"attn_k_norm[{head_dim}]"] if normed else []
    out += [f"attn_q.bias[{wide}]", f"attn_k.bias[{narrow}]", f"attn_v.bias[{narrow}]"] if biased else []
    return _blocks(at, *out)


def _blocks(at: str, *names: str) -> str:
    return " ".join(f"blk.*.{name}{'@' + at if at else ''}" for name in names)


def _moe(at: str = "", *, shared: bool = True) -> str:
    """Four experts of width 32, and a shared one."""
    own = ["ffn_gate_inp[64,4]", "ffn_gate_exps[64,32,4]", "ffn_up_exps[64,32,4]", "ffn_down_exps[32,64,4]"]
    return _blocks(at, *own, *(["ffn_gate_shexp[64,32]", "ffn_up_shexp[64,32]", "ffn_down_shexp[32,64]"] if shared else []))


def _mamba2(at: str = "") -> str:
    return _blocks(at, "ssm_in[64,292]", "ssm_conv1d[4,160]", "ssm_conv1d.bias[160]", "ssm_dt.bias[4]", "ssm_a![1,4]", "ssm_d![1,4]", "ssm_norm[128,1]", "ssm_out[128,64]")


def _delta_net(at: str, *gates: str) -> str:
    """Gated delta net, the linear attention of qwen3next and qwen35."""
    return _blocks(at, "attn_qkv[64,128]", "attn_gate[64,64]", "ssm_conv1d[4,128]", "ssm_dt.bias[2]", "ssm_a![2]", *gates, "ssm_norm[32]", "ssm_out[64,64]")


def _vit(*, qkv: bool = False) -> str:
    """The vision transformer all projectors that see share, with 8 x 8 patches."""
    attn = ["attn_qkv[64,192]", "attn_qkv.bias[192]"] if qkv else [f"attn_{x}{shape}" for x in "qkv" for shape in ("[64,64]", ".bias[64]")]
    ffn = ["attn_out[64,64]", "attn_out.bias[64]", "ffn_up[64,128]", "ffn_up.bias[128]", "ffn_down[128,64]", "ffn_down.bias[64]"]
    blocks = " ".join(f"v.blk.*.{name}" for name in ["ln1[64]", "ln1.bias[64]", "ln2[64]", "ln2.bias[64]", *attn, *ffn])
    return f"v.patch_embd[8,8,3,64] {blocks} v.post_ln[64] v.post_ln.bias[64]"


def _clip(kind: str, *, n_layer: int = 2, image_size: int = 128, **more: Any) -> dict[str, Any]:
    size = {"image_size": image_size, "patch_size": 8, "embedding_length": 64, "feed_forward_length": 128, "block_count": n_layer, "attention.head_count": 2, "projection_dim": 64}
    vision = {**size, "attention.layer_norm_epsilon": 1e-6, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], **{key.replace("__", "."): value for key, value in more.items()}}
    return {"has_vision_encoder": True, "projector_type": kind, "use_gelu": True, **{f"vision.{key}": value for key, value in vision.items()}}


def _whisper() -> str:
    """Whisper's encoder, which the projectors that hear share, 32 wide: half a minute of sound in 80 bands is 1500 rows inside."""
    attn = ["attn_q[32,32]", "attn_q.bias[32]", "attn_k[32,32]", "attn_v[32,32]", "attn_v.bias[32]"]  # keys have no bias, and must have none
    ffn = ["attn_out[32,32]", "attn_out.bias[32]", "ffn_up[32,64]", "ffn_up.bias[64]", "ffn_down[64,32]", "ffn_down.bias[32]"]
    blocks = " ".join(f"a.blk.*.{name}" for name in ["ln1[32]", "ln1.bias[32]", "ln2[32]", "ln2.bias[32]", *attn, *ffn])
    return f"a.conv1d.1[3,80,32] a.conv1d.1.bias[1,32] a.conv1d.2[3,32,32] a.conv1d.2.bias[1,32] a.position_embd[32,1500] {blocks} a.post_ln[32] a.post_ln.bias[32]"


def _ear(kind: str, **more: Any) -> dict[str, Any]:
    size = {"embedding_length": 32, "feed_forward_length": 64, "block_count": 2, "attention.head_count": 1, "projection_dim": 64, "num_mel_bins": 80, "attention.layer_norm_epsilon": 1e-5}
    return {"has_audio_encoder": True, "projector_type": kind, **{f"audio.{key.replace('__', '.')}": value for key, value in {**size, **more}.items()}}


_IN = "token_embd[64,512] output_norm[64]"
_IN_OUT = f"{_IN} output[64,512]"
_FFN = "blk.*.ffn_gate[64,128] blk.*.ffn_up[64,128] blk.*.ffn_down[128,64]"
_NORMS = "blk.*.attn_norm[64] blk.*.ffn_norm[64]"
_POST = "blk.*.attn_norm[64] blk.*.post_attention_norm[64]"
_SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 4}
_SSM2 = {**_SSM, "ssm.group_count": 1}
_DELTA = {"rope.dimension_count": 16, "full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 1, "ssm.time_step_rank": 2, "ssm.inner_size": 64}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_MAMBA = {"context_length": 4096, "embedding_length": 64, "vocab_size": 512, "feed_forward_length": 0, "attention.layer_norm_rms_epsilon": 1e-6, "attention.head_count": 0}

SPECS = {
    # ----------------------------------------------------------------------------------------------- attention everywhere
    "tiny-llama": Spec("llama", 2, _decoder(4, 2), f"{_IN_OUT} {_NORMS} {_attn(4, 2)} {_FFN}"),
    "tiny-qwen2vl": Spec("qwen2vl", 2, {**_decoder(base=1e6), "rope.dimension_sections": [4, 6, 6, 0]}, f"{_IN_OUT} {_NORMS} {_attn(biased=True)} {_FFN}"),
    "tiny-qwen3vl": Spec("qwen3vl", 3, {**_decoder(4, 2, base=1e6), "rope.dimension_sections": [6, 5, 5, 0], "n_deepstack_layers": 2}, f"{_IN_OUT} {_NORMS} {_attn(4, 2, normed=True)} {_FFN}"),
    "tiny-deepseek2": Spec(
        "deepseek2", 3,
        {**_decoder(4, 1), "attention.key_length": 96, "attention.value_length": 64, "attention.key_length_mla": 64, "attention.value_length_mla": 32, "attention.q_lora_rank": 32,
         "attention.kv_lora_rank": 64, "leading_dense_block_count": 1, **_EXPERTS, "expert_shared_count": 1, "expert_weights_scale": 1.0, "expert_weights_norm": True, "expert_gating_func": 2},
        f"{_IN_OUT} {_NORMS} blk.*.attn_q_a_norm[32] blk.*.attn_kv_a_norm[64] blk.*.attn_q_a[64,32] blk.*.attn_q_b[32,256] blk.*.attn_kv_a_mqa[64,96] blk.*.attn_k_b[32,64,4] "
        f"blk.*.attn_v_b[64,32,4] blk.*.attn_output[128,64] {_blocks('0', 'ffn_gate[64,128]', 'ffn_up[64,128]', 'ffn_down[128,64]')} {_blocks('1,2', 'exp_probs_b.bias[4]')} {_moe('1,2')}"),
    "tiny-qwen3-embed": Spec("qwen3", 2, {**_decoder(4, 2, base=1e6), "pooling_type": 3}, f"{_IN} {_NORMS} {_attn(4, 2, normed=True)} {_FFN}"),

    # ----------------------------------------------------------------------------- sliding windows, chunks, shared KV layers
    "tiny-gemma3": Spec(
        "gemma3", 4, {**_decoder(base=1e6), "attention.sliding_window": 32, "attention.sliding_window_pattern": 2, "rope.freq_base_swa": 10000.0},
        f"{_IN_OUT} {_NORMS} blk.*.post_attention_norm[64] blk.*.post_ffw_norm[64] {_attn(normed=True)} {_FFN}", vocab="spm"),
    "tiny-gemma4": Spec(  # layers 2 and 3 have no KV of their own: they read that of 0 (window, heads of 32) and 1 (full, heads of 64)
        "gemma4", 4,
        {**_decoder(base=1e6, head_dim=64), "attention.sliding_window": 32, "attention.sliding_window_pattern": [True, False, True, False], "attention.shared_kv_layers": 2,
         "attention.key_length_swa": 32, "attention.value_length_swa": 32, "rope.dimension_count_swa": 32, "rope.freq_base_swa": 10000.0, "embedding_length_per_layer_input": 32,
         "final_logit_softcapping": 30.0},
        f"{_IN} {_NORMS} blk.*.post_attention_norm[64] blk.*.post_ffw_norm[64] blk.*.post_norm[64] blk.*.layer_output_scale[1] rope_freqs[32] per_layer_token_embd[128,512] "
        f"per_layer_model_proj[64,128] per_layer_proj_norm[32] blk.*.inp_gate[64,32] blk.*.proj[32,64] blk.*.attn_q_norm[32]@0,2 blk.*.attn_q_norm[64]@1,3 blk.*.attn_k_norm[32]@0 "
        f"blk.*.attn_k_norm[64]@1 blk.*.attn_q[64,64]@0,2 blk.*.attn_q[64,128]@1,3 blk.*.attn_k[64,32]@0 blk.*.attn_v[64,32]@0 blk.*.attn_k[64,64]@1 blk.*.attn_v[64,64]@1 "
        f"blk.*.attn_output[64,64]@0,2 blk.*.attn_output[128,64]@1,3 {_FFN}", vocab="gemma4"),
    "tiny-llama4": Spec(  # chunks of 8192, fixed in the engine, in layers 0 to 2; layer 3 sees everything and has no rope; experts in 1 and 3
        "llama4", 4, {**_decoder(n_ctx=16384), "interleave_moe_layer_step": 2, **_EXPERTS, "expert_used_count": 1},
        f"{_IN_OUT} {_NORMS} {_attn()} {_blocks('0,2', 'ffn_gate[64,128]', 'ffn_up[64,128]', 'ffn_down[128,64]')} {_moe('1,3')}"),
    "tiny-cohere2": Spec(  # window in layers 0 to 2, none (and no rope) in 3; one norm a block, attention and feed-forward side by side
        "cohere2", 4, {**_decoder(), "attention.sliding_window": 32, "attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.5}, f"{_IN} blk.*.attn_norm[64] {_attn()} {_FFN}"),
    "tiny-gpt-oss": Spec(
        "gpt-oss", 4, {**_decoder(4, 2, n_ff=32, base=150000.0), "attention.sliding_window": 32, **_EXPERTS},
        f"{_IN_OUT} {_POST} {_attn(4, 2, biased=True)} blk.*.attn_output.bias[64] blk.*.attn_sinks[4] {_moe(shared=False)} blk.*.ffn_gate_inp.bias[4] blk.*.ffn_gate_exps.bias[32,4] "
        "blk.*.ffn_up_exps.bias[32,4] blk.*.ffn_down_exps.bias[64,4]"),

    # ------------------------------------------------------------------------------------------- attention and a running state
    "tiny-qwen35": Spec(
        "qwen35", 4, {**_decoder(base=1e7), **_DELTA, "rope.dimension_sections": [3, 3, 2, 0]},
        f"{_IN_OUT} {_POST} {_delta_net('0,2', 'ssm_beta[64,2]', 'ssm_alpha[64,2]')} {_attn(at='1,3', normed=True, q=2)} {_FFN}"),
    "tiny-qwen3next": Spec(
        "qwen3next", 4, {**_decoder(base=1e7, n_ff=96), **_DELTA, **_EXPERTS, "expert_shared_feed_forward_length": 32},
        f"{_IN_OUT} {_POST} {_delta_net('0,2', 'ssm_ba[64,4]')} {_attn(at='1,3', normed=True, q=2)} {_moe()} blk.*.ffn_gate_inp_shexp[64]"),
    "tiny-falcon-h1": Spec("falcon-h1", 2, {**_decoder(), **_SSM2}, f"{_IN_OUT} blk.*.attn_norm[64] {_mamba2()} {_attn()} blk.*.ffn_norm![64] {_FFN}"),
    "tiny-granitehybrid": Spec(
        "granitehybrid", 4, {**_decoder(2, [0, 1, 0, 1]), **_SSM2, "embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0, "attention.scale": 0.176777},
        f"{_IN_OUT} {_NORMS} {_mamba2('0,2')} {_attn(at='1,3')} {_FFN}"),
    "tiny-nemotron-h": Spec(
        "nemotron_h", 4, {**_decoder(2, [0, 1, 0, 0], n_ff=[0, 0, 128, 0]), **_SSM2, "attention.layer_norm_epsilon": 1e-5},
        f"{_IN_OUT} blk.*.attn_norm[64] {_mamba2('0,3')} {_attn(at='1')} blk.*.ffn_up[64,128]@2 blk.*.ffn_down[128,64]@2"),
    "tiny-lfm2": Spec(
        "lfm2", 4, {**_decoder(2, [0, 1, 0, 1]), "shortconv.l_cache": 3},
        f"token_embd[64,512] token_embd_norm[64] output[64,512] {_NORMS} {_blocks('0,2', 'shortconv.conv[3,64]', 'shortconv.in_proj[64,192]', 'shortconv.out_proj[64,64]')} "
        f"{_attn(at='1,3', normed=True)} {_FFN}"),

    # -------------------------------------------------------------------------------------------------- a running state alone
    "tiny-mamba": Spec(
        "mamba", 2, {**_MAMBA, **_SSM},
        f"{_IN_OUT} {_blocks('', 'attn_norm[64]', 'ssm_in[64,256]', 'ssm_conv1d[4,128]', 'ssm_conv1d.bias[128]', 'ssm_x[128,36]', 'ssm_dt[4,128]', 'ssm_dt.bias[128]', 'ssm_a![16,128]')} "
        "blk.*.ssm_d![128] blk.*.ssm_out[128,64]"),
    "tiny-mamba2": Spec("mamba2", 2, {**_MAMBA, **_SSM2}, f"{_IN_OUT} blk.*.attn_norm[64] {_mamba2()}"),
    "tiny-rwkv7": Spec(
        "rwkv7", 2,
        {**_MAMBA, "embedding_length": 128, "feed_forward_length": 128, "attention.layer_norm_epsilon": 1e-5, "wkv.head_size": 64, "attention.decay_lora_rank": 16, "attention.iclr_lora_rank": 16,
         "attention.value_residual_mix_lora_rank": 16, "attention.gate_lora_rank": 16},
        "token_embd[128,512] output_norm[128] output[128,512] output_norm.bias[128] token_embd_norm[128] token_embd_norm.bias[128] "
        + _blocks("", *(f"{name}[128]" for name in ("attn_norm", "attn_norm.bias", "attn_norm_2", "attn_norm_2.bias", "time_mix_ln", "time_mix_ln.bias")),
                  *(f"time_mix_{name}[128]" for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k")), *(f"time_mix_{name}1[128,16]" for name in "wavg"),
                  *(f"time_mix_{name}2[16,128]" for name in "wavg"), *(f"time_mix_{name}[128,128]" for name in ("key", "value", "receptance", "output")), "time_mix_lerp_fused[128,1,1,6]",
                  "channel_mix_lerp_k[128,1,1]", "channel_mix_key[128,128]", "channel_mix_value[128,128]")),

    # ------------------------------------------------------------------------------------------------------ no decoder at all
    "tiny-bert": Spec(
        "bert", 2,
        {"context_length": 128, "embedding_length": 64, "vocab_size": 256, "feed_forward_length": 128, "attention.head_count": 2, "attention.causal": False, "pooling_type": 1,
         "attention.layer_norm_epsilon": 1e-12},
        f"token_embd[64,256] token_types[64,2] position_embd[64,128] token_embd_norm[64] token_embd_norm.bias[64] {_attn(2, 2, biased=True)} "
        + _blocks("", *(f"{name}[64]" for norm in ("attn_output_norm", "layer_output_norm") for name in (norm, norm + ".bias")), "attn_output.bias[64]", "ffn_up[64,128]", "ffn_up.bias[128]",
                  "ffn_down[128,64]", "ffn_down.bias[64]"), vocab="wpm", n_vocab=256, is_decoder=False),

    # ----------------------------------------------------------------------------------------------- projectors, for pictures
    "mmproj-tiny-qwen2vl": Spec(
        "clip", 2, _clip("qwen2vl_merger"), f"{_vit()} v.patch_embd.weight.1[8,8,3,64] mm.0[256,256] mm.0.bias[256] mm.2[256,64] mm.2.bias[64]", vocab="none", is_decoder=False),
    "mmproj-tiny-qwen3vl": Spec(
        "clip", 3, _clip("qwen3vl_merger", n_layer=3, spatial_merge_size=2),
        f"{_vit(qkv=True)} v.patch_embd.weight.1[8,8,3,64] v.patch_embd.bias[64] v.position_embd[64,256] "
        + " ".join(f"v.deepstack.*.{name}@0,1" for name in ("norm[256]", "norm.bias[256]", "fc1[256,128]", "fc1.bias[128]", "fc2[128,64]", "fc2.bias[64]"))
        + " mm.0[256,256] mm.0.bias[256] mm.2[256,64] mm.2.bias[64]", vocab="none", is_decoder=False),
    "mmproj-tiny-gemma3": Spec(
        "clip", 2, _clip("gemma3", projector__scale_factor=4), f"{_vit()} v.patch_embd.bias[64] v.position_embd[64,256] mm.soft_emb_norm[64] mm.input_projection[64,64]", vocab="none",
        is_decoder=False),
    "mmproj-tiny-smolvlm": Spec(
        "clip", 2, _clip("idefics3", image_size=64, projector__scale_factor=2, preproc_image_size=128), f"{_vit()} v.patch_embd.bias[64] v.position_embd[64,64] mm.model.fc[256,64]", vocab="none",
        is_decoder=False),
    "mmproj-tiny-internvl": Spec(  # tiles, and the one kind here whose encoder takes several pictures in one run
        "clip", 2, _clip("internvl", image_size=64, projector__scale_factor=2),
        f"{_vit()} v.patch_embd.bias[64] v.class_embd![64] v.position_embd[64,65] mm.model.mlp.0[256] mm.model.mlp.0.bias[256] mm.model.mlp.1[256,64] mm.model.mlp.1.bias[64] mm.model.mlp.3[64,64] "
        "mm.model.mlp.3.bias[64]", vocab="none", is_decoder=False),

    "mmproj-tiny-gemma4v": Spec(  # several pictures in one run, and of any shape; 70 rows or more unless it is told otherwise
        "clip", 2, _clip("gemma4v", projector__scale_factor=2),
        "v.patch_embd[8,8,3,64] v.position_embd[64,512,2] mm.input_projection[64,64] "
        + " ".join(f"v.blk.*.{name}" for name in ("ln1[64]", "ln2[64]", "attn_q[64,64]", "attn_k[64,64]", "attn_v[64,64]", "attn_out[64,64]", "attn_q_norm[32]", "attn_k_norm[32]",
                                                  "ffn_gate[64,128]", "ffn_up[64,128]", "ffn_down[128,64]")), vocab="none", is_decoder=False),

    # ------------------------------------------------------------------------------------------------- projectors, for sound
    "mmproj-tiny-ultravox": Spec(  # thirty rows of Whisper's in one: half a minute is 50
        "clip", 2, _ear("ultravox", projector__stack_factor=30), f"{_whisper()} mm.a.norm_pre[960] mm.a.mlp.1[960,64] mm.a.norm_mid[32] mm.a.mlp.2[32,64]", vocab="none", is_decoder=False),
    "mmproj-tiny-qwen2a": Spec(  # every two: half a minute is 750
        "clip", 2, _ear("qwen2a"), f"{_whisper()} mm.a.fc[32,64] mm.a.fc.bias[64]", vocab="none", is_decoder=False),
}
