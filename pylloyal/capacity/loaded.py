"""Which tensors of a projector's file the engine loads, and what they take.

Source: ``load_tensors`` of the pinned engine's clip.cpp.
"""
from __future__ import annotations

import re
from typing import Final

from .eye import number
from .header import Header

# Names no sense stands in front of: an encoder of sound in the same file loads them once more.
_SHARED: Final = re.compile(r"v\.(class_embd|patch_embd\.(bias|weight|weight\.1)|norm_embd\.(weight|bias)|deepstack\.\d+\.(norm|fc1|fc2)\.(weight|bias))")
_SEEN: Final = re.compile(r"v\.((pre_ln|post_ln)\.(weight|bias)|position_embd\.weight)")
_LAYER: Final = re.compile(r"v\.(?:blk|deepstack)\.(\d+)\.(?:attn_(?:q|k|v|qkv|out)\.(?:weight|bias)|attn_[qk]_norm\.weight|ln[12]\.(?:weight|bias)|ls[12]\.weight|out_scale\.weight|"
                           r"(?:attn|ffn)_post_norm\.weight|ffn_(?:up|gate|down)\.(?:weight|bias)|ffn_(?:gate_inp|gate_exps|up_exps|down_exps)\.weight|exp_probs_b\.weight|attn_sinks|"
                           r"(?:norm|fc1|fc2)\.(?:weight|bias))")
_BOTH: Final = r"\.(weight|bias)"
# kind -> what else it loads; kinds that are not here may leave something out.
_OWN: Final = {kind: re.compile(pattern) for kinds, pattern in (
    ("mlp", rf"mm\.[0-4]{_BOTH}|v\.image_newline"),
    ("qwen2vl_merger qwen2.5vl_merger qwen3vl_merger exaone4_5 mimovl phi4", rf"mm\.[02]{_BOTH}"),
    ("ling3vl", rf"mm\.([02]|input_norm){_BOTH}"),
    ("gemma3", r"mm\.(input_projection|soft_emb_norm)\.weight"),
    ("gemma4v", r"mm\.input_projection\.weight|v\.std_(bias|scale)"),
    ("cogvlm", rf"mm\.(model\.fc|up|gate|down)\.weight|mm\.post_fc_norm{_BOTH}|v\.[be]oi"),
    ("hunyuanvl", rf"mm\.([02]|model\.fc){_BOTH}|mm\.(pre|post)_norm\.weight|mm\.image_(begin|end)|v\.(image_newline|view_seperator)"),
    ("youtuvl", rf"mm\.[02]{_BOTH}|mm\.input_norm\.weight"),
    ("minicpmv4_6", rf"v\.vit_merger\.(ln1|attn_(q|k|v|out)|ds_ln|ds_ffn_up|ds_ffn_down){_BOTH}|mm\.(input_norm|up|down){_BOTH}"),
    ("minimax_m3", rf"mm\.([12]|merger\.fc[12]){_BOTH}"),
    ("muse-glimmer", r"mm\.[012]\.weight"),
    ("idefics3", r"mm\.model\.fc\.weight"),
    ("lfm2 kimivl paddleocr kimik25", rf"mm\.([12]|input_norm){_BOTH}"),
    ("pixtral", rf"mm\.[12]{_BOTH}|v\.token_embd\.img_break|mm\.(input_norm|patch_merger)\.weight"),
    ("lightonocr", rf"mm\.[12]{_BOTH}|mm\.(input_norm|patch_merger)\.weight"),
    ("dots_ocr", rf"mm\.([02]|input_norm){_BOTH}|mm\.post_norm\.weight"),
    ("glm4v glm5v", rf"mm\.model\.fc\.weight|mm\.(up|gate|down|post_norm|patch_merger){_BOTH}"),
    ("internvl", rf"mm\.model\.mlp\.[013]{_BOTH}"),
    ("nemotron_v2_vl", r"mm\.model\.mlp\.[013]\.weight"),
    ("llama4", r"mm\.model\.fc\.weight|mm\.model\.mlp\.[12]\.weight"),
    ("janus_pro", rf"mm\.[01]{_BOTH}"),
    ("resampler", rf"resampler\.(pos_embed_k|query|(proj|kv)\.weight|attn\.(q|k|v|out){_BOTH}|ln_(q|kv|post){_BOTH})"),
) for kind in kinds.split()}


def loaded_bytes(header: Header, seen: str, heard: str) -> tuple[int, bool]:
    """Bytes of what is loaded, and whether that is exact; otherwise no less than it."""
    n_layer = number(header, "clip.vision.block_count", 0, most=1 << 16)
    others = bool(heard) + (header.get("clip.has_gen_audio_encoder") is True)
    own = _OWN.get(seen)
    is_exact = own is not None and not others
    total = 0
    for tensor in header.tensors:
        n_bytes = -(-tensor.n_bytes // 32) * 32
        is_shared = _SHARED.fullmatch(tensor.name) is not None
        layer = _LAYER.fullmatch(tensor.name)
        total += n_bytes * others * is_shared
        if not is_exact or own is None or own.fullmatch(tensor.name) or _SEEN.fullmatch(tensor.name) or (int(layer[1]) < n_layer if layer else is_shared):
            total += n_bytes
    return total, is_exact
