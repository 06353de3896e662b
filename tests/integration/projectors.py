"""Projectors of real sizes as sparse files, a vocabulary that has all their markers, and mtmd's own answers (libsrc/tests/raw_projector.cpp)."""
from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_models import vocabulary

ROOT = Path(__file__).resolve().parents[2]
Shapes = dict[str, tuple[int, ...]]
MARKERS = ("<|vision_start|>", "<|vision_end|>", "]<]start of image[>[", "]<]end of image[>[", "<|image_start|>", "<|image_end|>", "<image>", "</image>", "<start_of_image>", "<end_of_image>",
           "<fake_token_around_image>", "<global-img>", "[IMG_END]", "<img>", "</img>", "<|media_start|>", "<|media_end|>", "<|media_begin|>", "<|media_end|>", "<|im_start|>", "<|im_end|>", "<|img|>",
           "<|endofimg|>", "<|img_thumbnail|>", "<|begin_of_image|>", "<|end_of_image|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|image>", "<image|>", "<\uff5chy_place\u2581holder\u2581no\u2581100\uff5c>",
           "<\uff5chy_place\u2581holder\u2581no\u2581101\uff5c>", "<vision>", "</vision>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>", "<slice>", "</slice>", *(f"<row_{y}_col_{x}>" for y in range(1, 41) for x in range(1, 41)),
           *(f"<|img_row_{y}_col_{x}|>" for y in range(1, 11) for x in range(1, 11)))


@dataclass
class Made:
    """What a file holds; ``width`` is that of the rows it gives."""

    kind: str
    keys: dict[str, Any]
    shapes: Shapes
    width: int
    more: Shapes = field(default_factory=dict)  # tensors the engine leaves out


def both(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": (shape[-1],)}


def vit(e: int, n_layer: int, ff: int, patch: int, *, positions: int = 0, first: int = 0, gate: bool = False, qkv: bool = False, rms: bool = False, bias: bool = True, twice: bool = False, patch_bias: bool = True,
        pre: bool = False, post: bool = True, scales: bool = False, kv: int = 0) -> Shapes:
    def norm(name: str) -> Shapes:
        return {f"{name}.weight": (e,)} if rms else both(name, e)

    def linear(name: str, *shape: int) -> Shapes:
        return both(name, *shape) if bias else {f"{name}.weight": shape}

    out: Shapes = {"v.patch_embd.weight": (patch, patch, 3, e)}
    out |= {"v.patch_embd.weight.1": (patch, patch, 3, e)} if twice else {}
    out |= {"v.patch_embd.bias": (e,)} if patch_bias else {}
    out |= {"v.position_embd.weight": (e, positions)} if positions else {}
    out |= {"v.class_embd": (e, first)} if first else {}
    out |= (norm("v.pre_ln") if pre else {}) | (norm("v.post_ln") if post else {})
    for i in range(n_layer):
        at = f"v.blk.{i}."
        out |= norm(at + "ln1") | norm(at + "ln2") | linear(at + "attn_out", e, e) | linear(at + "ffn_up", e, ff) | linear(at + "ffn_down", ff, e)
        out |= linear(at + "attn_qkv", e, e + 2 * (kv or e)) if qkv else linear(at + "attn_q", e, e) | linear(at + "attn_k", e, e) | linear(at + "attn_v", e, e)
        out |= linear(at + "ffn_gate", e, ff) if gate else {}
        out |= {at + "ls1.weight": (e,), at + "ls2.weight": (e,)} if scales else {}
    return out


def _made(kind: str, e: int, n_layer: int, ff: int, heads: int, patch: int, image: int, width: int, tail: Shapes, keys: dict[str, Any] | None = None, **how: Any) -> Made:
    vision = {"image_size": image, "patch_size": patch, "embedding_length": e, "feed_forward_length": ff, "block_count": n_layer, "attention.head_count": heads, "projection_dim": width,
              "attention.layer_norm_epsilon": 1e-6, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Made(kind, {**{f"clip.vision.{key}": value for key, value in vision.items()}, **{f"clip.{key}": value for key, value in (keys or {}).items()}}, vit(e, n_layer, ff, patch, **how) | tail, width)


def _pins(side: int, *shapes: tuple[int, int]) -> dict[str, Any]:
    return {"vision.image_grid_pinpoints": [side * n for shape in shapes for n in shape]}


def _qwen3vl(e: int, n_layer: int, ff: int, width: int) -> Made:
    deep: Shapes = {}
    for i in (n_layer // 3, 2 * n_layer // 3, n_layer - 2):
        deep |= both(f"v.deepstack.{i}.norm", 4 * e) | both(f"v.deepstack.{i}.fc1", 4 * e, 4 * e) | both(f"v.deepstack.{i}.fc2", 4 * e, width)
    return _made("qwen3vl_merger", e, n_layer, ff, 16, 16, 768, width * 4, deep | both("mm.0", 4 * e, 4 * e) | both("mm.2", 4 * e, width), {"vision.spatial_merge_size": 2}, positions=48 * 48, qkv=True, twice=True)


def _resampler(version: int, n_query: int) -> Made:
    w = 3584
    tail = {"resampler.query": (w, n_query), "resampler.pos_embed_k": (w, 4900), "resampler.proj.weight": (w, w), "resampler.kv.weight": (1152, w)}
    for name in ("q", "k", "v", "out"):
        tail |= both(f"resampler.attn.{name}", w, w)
    for name in ("q", "kv", "post"):
        tail |= both(f"resampler.ln_{name}", w)
    return _made("resampler", 1152, 27, 4304, 16, 14, 448, w, tail, {"minicpmv_version": version, "minicpmv_query_num": n_query}, positions=4900)


def _minicpm46(merge: int) -> Made:
    tail = both("mm.input_norm", 4608) | both("mm.up", 4608, 4608) | both("mm.down", 4608, 2048)
    if merge == 4:
        tail |= both("v.vit_merger.ln1", 1152) | both("v.vit_merger.ds_ln", 4608) | both("v.vit_merger.ds_ffn_up", 4608, 4304) | both("v.vit_merger.ds_ffn_down", 4304, 1152)
        for name in ("q", "k", "v", "out"):
            tail |= both(f"v.vit_merger.attn_{name}", 1152, 1152)
    return _made("minicpmv4_6", 1152, 27, 4304, 16, 14, 448, 2048, tail, {"vision.projector.scale_factor": merge, "vision.wa_layer_indexes": [6]}, positions=4900)


_PIXELS = {"vision.image_min_pixels": 28 * 28 * 4, "vision.image_max_pixels": 28 * 28 * 1280}
_MLP_12 = both("mm.1", 4608, 4608) | both("mm.2", 4608, 2048)
# name -> the shapes and keys of a model there is, or near enough; graphs of those in GRAPHS are known, of the others only the cells.
PROJECTORS = {
    "qwen2-vl": _made("qwen2vl_merger", 1280, 32, 5120, 16, 14, 560, 3584, both("mm.0", 5120, 5120) | both("mm.2", 5120, 3584), twice=True, patch_bias=False),
    "qwen2.5-vl": _made("qwen2.5vl_merger", 1280, 32, 3420, 16, 14, 560, 3584, both("mm.0", 5120, 5120) | both("mm.2", 5120, 3584), {"vision.n_wa_pattern": 8, "use_silu": True}, twice=True, patch_bias=False, gate=True,
                        rms=True),
    "qwen3-vl": _qwen3vl(1152, 27, 4304, 4096),
    "ling3-vl": _made("ling3vl", 64, 2, 128, 2, 14, 560, 64, both("mm.input_norm", 64) | both("mm.0", 256, 256) | both("mm.2", 256, 64), positions=1600, qkv=True, twice=True),
    "gemma3": _made("gemma3", 1152, 27, 4304, 16, 14, 896, 2560, {"mm.input_projection.weight": (2560, 1152), "mm.soft_emb_norm.weight": (1152,)}, positions=4096),
    "gemma4": _made("gemma4v", 1152, 27, 4304, 16, 16, 768, 2560, {"mm.input_projection.weight": (1152, 2560)}, {"use_gelu": True}, positions=0, gate=True, rms=True, bias=False, patch_bias=False),
    "smolvlm": _made("idefics3", 768, 12, 3072, 12, 16, 512, 960, {"mm.model.fc.weight": (768 * 16, 960)}, {"vision.projector.scale_factor": 4, "vision.preproc_image_size": 2048}, positions=1024),
    "smolvlm-old": _made("idefics3", 768, 2, 3072, 12, 14, 364, 960, {"mm.model.fc.weight": (768 * 4, 960)}, {"vision.projector.scale_factor": 2}, positions=676),
    "lfm2-vl": _made("lfm2", 1152, 27, 4304, 16, 16, 256, 2048, both("mm.input_norm", 4608) | both("mm.1", 4608, 2560) | both("mm.2", 2560, 2048), {"vision.projector.scale_factor": 2}, positions=256),
    "janus-pro": _made("janus_pro", 1024, 24, 4096, 16, 16, 384, 4096, both("mm.0", 1024, 4096) | both("mm.1", 4096, 4096), positions=576),
    "phi4": _made("phi4", 1152, 27, 4304, 16, 16, 384, 5120, both("mm.0", 1152, 5120) | both("mm.2", 5120, 5120), {"vision.image_min_pixels": 256 * 256, "vision.image_max_pixels": 3600 * 256}, positions=576),
    "pixtral": _made("pixtral", 1024, 24, 4096, 16, 16, 1024, 5120, both("mm.1", 1024, 5120) | both("mm.2", 5120, 5120) | {"v.token_embd.img_break": (5120,)}, {"use_silu": True}, gate=True, rms=True, bias=False,
                     patch_bias=False, pre=True, post=False),
    "mistral-small": _made("pixtral", 1024, 24, 4096, 16, 14, 1540, 5120, {"mm.1.weight": (1024, 5120), "mm.2.weight": (5120, 5120), "v.token_embd.img_break": (5120,), "mm.input_norm.weight": (1024,),
                                                                         "mm.patch_merger.weight": (4096, 1024)}, {"vision.spatial_merge_size": 2}, gate=True, rms=True, bias=False, patch_bias=False, pre=True, post=False),
    "lighton-ocr": _made("lightonocr", 1024, 24, 4096, 16, 14, 1540, 1024, {"mm.1.weight": (1024, 1024), "mm.2.weight": (1024, 1024), "mm.input_norm.weight": (1024,), "mm.patch_merger.weight": (4096, 1024)},
                         {"vision.spatial_merge_size": 2}, gate=True, rms=True, bias=False, patch_bias=False, pre=True, post=False),
    "kimi-vl": _made("kimivl", 1152, 27, 4304, 16, 14, 896, 2048, both("mm.input_norm", 1152) | _MLP_12, {"vision.projector.scale_factor": 2}, positions=4096),
    "kimi-k2.5": _made("kimik25", 1152, 27, 4304, 16, 14, 896, 2048, both("mm.input_norm", 1152) | _MLP_12 | {"v.position_embd.weight": (1152, 64, 64)}, {"vision.projector.scale_factor": 2}, qkv=True),
    "paddle-ocr": _made("paddleocr", 1152, 27, 4304, 16, 14, 384, 2048, both("mm.input_norm", 1152) | _MLP_12, _PIXELS, positions=729),
    "dots-ocr": _made("dots_ocr", 1536, 42, 4224, 12, 14, 1176, 1536, both("mm.input_norm", 1536) | both("mm.0", 6144, 6144) | both("mm.2", 6144, 1536) | {"mm.post_norm.weight": (1536,)},
                      {"vision.projector.scale_factor": 2, "use_silu": True, **_PIXELS}, gate=True, rms=True, bias=False, qkv=True, post=False),
    "glm4v": _made("glm4v", 1536, 24, 4096, 12, 14, 336, 4096, {"mm.model.fc.weight": (4096, 4096), "mm.up.weight": (4096, 13696), "mm.gate.weight": (4096, 13696), "mm.down.weight": (13696, 4096),
                                                               "mm.patch_merger.weight": (2, 2, 1536, 4096), "mm.patch_merger.bias": (4096,), "v.norm_embd.weight": (1536,)} | both("mm.post_norm", 4096), {"use_silu": True},
                   positions=576, gate=True, rms=True, bias=False, qkv=True, twice=True),
    "glm5v": _made("glm5v", 64, 2, 128, 2, 14, 336, 64, {"mm.model.fc.weight": (64, 64), "mm.up.weight": (64, 96), "mm.gate.weight": (64, 96), "mm.down.weight": (96, 64), "mm.patch_merger.weight": (2, 2, 64, 64),
                                                        "mm.patch_merger.bias": (64,)} | both("mm.post_norm", 64), {"use_silu": True, "vision.swiglu_clamp": 7.0, **_PIXELS}, gate=True, rms=True, bias=False, qkv=True,
                   twice=True),
    "llava-1.5": _made("mlp", 1024, 23, 4096, 16, 14, 336, 4096, both("mm.0", 1024, 4096) | both("mm.2", 4096, 4096), positions=577, first=1, pre=True, patch_bias=False),
    "llava-1.6": _made("mlp", 1024, 23, 4096, 16, 14, 336, 4096, both("mm.0", 1024, 4096) | both("mm.2", 4096, 4096) | {"v.image_newline": (4096,)}, _pins(336, (1, 2), (2, 1), (2, 2), (3, 1), (1, 3)), positions=577,
                       first=1, pre=True, patch_bias=False),
    "granite-vision": _made("mlp", 1152, 27, 4304, 16, 14, 384, 2048, both("mm.0", 4608, 2048) | both("mm.2", 2048, 2048), {"vision.feature_layer": [3, 7, 15, 26], **_pins(384, *((a, b) for a in range(1, 5) for b in range(1, 5)))},
                            positions=729),
    "internvl": _made("internvl", 1024, 24, 4096, 16, 14, 448, 896, both("mm.model.mlp.0", 4096) | both("mm.model.mlp.1", 4096, 896) | both("mm.model.mlp.3", 896, 896), {"vision.projector.scale_factor": 2},
                      positions=1025, first=1, scales=True, post=False, qkv=True),
    "internvl-6b": _made("internvl", 3200, 45, 12800, 25, 14, 448, 5120, both("mm.model.mlp.0", 12800) | both("mm.model.mlp.1", 12800, 5120) | both("mm.model.mlp.3", 5120, 5120),
                         {"vision.projector.scale_factor": 2, "vision.preproc_max_tiles": 6}, positions=1025, first=1, scales=True, post=False, rms=True),
    "llama4": _made("llama4", 1408, 34, 5632, 16, 14, 336, 5120, {"mm.model.mlp.1.weight": (5632, 4096), "mm.model.mlp.2.weight": (4096, 4096), "mm.model.fc.weight": (4096, 5120), "v.patch_embd.weight": (588, 1408)},
                    {"vision.projector.scale_factor": 2}, positions=577, first=1, pre=True, patch_bias=False),
    "nemotron": _made("nemotron_v2_vl", 1280, 32, 5120, 16, 16, 512, 2688, {"mm.model.mlp.0.weight": (5120,), "mm.model.mlp.1.weight": (5120, 20480), "mm.model.mlp.3.weight": (20480, 2688)},
                      {"vision.projector.scale_factor": 2}, positions=1024, first=10, qkv=True, post=False, patch_bias=False),
    "minicpm-v-2.5": _resampler(2, 96),
    "minicpm-v-2.6": _resampler(3, 64),
    "minicpm-v-4.6": _minicpm46(4),
    "minicpm-v-4.6-4x": _minicpm46(2),
    "exaone4.5": _made("exaone4_5", 2048, 28, 5120, 32, 14, 560, 5120, both("mm.0", 8192, 5120) | both("mm.2", 5120, 5120), {"vision.attention.head_count_kv": 8, "vision.n_wa_pattern": 7, "use_silu": True, **_PIXELS},
                       twice=True, patch_bias=False, gate=True, rms=True, qkv=True, kv=512),
    "hunyuan-vl": _made("hunyuanvl", 1152, 27, 4304, 16, 16, 2048, 1024, both("mm.0", 2, 2, 1152, 2304) | both("mm.2", 1, 1, 2304, 4608) | both("mm.model.fc", 4608, 1024)
                        | {"mm.pre_norm.weight": (1152,), "mm.post_norm.weight": (1024,), "mm.image_begin": (1024,), "mm.image_end": (1024,), "v.image_newline": (4608,)}, positions=128 * 128, post=False),
    "youtu-vl": _made("youtuvl", 64, 2, 128, 2, 16, 256, 64, {"mm.input_norm.weight": (64,)} | both("mm.0", 256, 256) | both("mm.2", 256, 64), {"vision.window_size": 256, "vision.wa_layer_indexes": [0]}, patch_bias=True),
    "step3-vl": _made("step3vl", 64, 2, 128, 2, 14, 728, 64, {"mm.0.weight": (3, 3, 64, 64), "mm.1.weight": (3, 3, 64, 64), "mm.model.fc.weight": (64, 64)}, {"vision.projector.scale_factor": 4}, positions=2704),
    "muse-glimmer": _made("muse-glimmer", 64, 2, 128, 2, 14, 448, 64, {"mm.0.weight": (256, 64), "mm.1.weight": (64, 64), "mm.2.weight": (64, 64)}, positions=1024),
    "minimax-m3": _made("minimax_m3", 64, 2, 128, 2, 14, 448, 64, both("mm.1", 64, 64) | both("mm.2", 64, 64) | both("mm.merger.fc1", 256, 64) | both("mm.merger.fc2", 64, 64)),
    "cogvlm": _made("cogvlm", 64, 2, 128, 2, 14, 224, 64, {"mm.model.fc.weight": (64, 64), "mm.up.weight": (64, 96), "mm.gate.weight": (64, 96), "mm.down.weight": (96, 64), "v.boi": (64,), "v.eoi": (64,)}
                    | both("mm.post_fc_norm", 64), positions=257, first=1, qkv=True),
}
PROJECTORS["youtu-vl"].shapes["v.patch_embd.weight"] = (768, 64)
PROJECTORS["gemma4"].shapes["v.position_embd.weight"] = (1152, 1024, 2)
PROJECTORS["llava-1.5"].more = both("v.blk.23.ln1", 1024) | both("mm.7", 64)


def write(path: Path, made: Made) -> Path:
    """The header, and a hole where the weights would be."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", made.kind)
    for key, value in made.keys.items():
        if key == "clip.minicpmv_version":
            writer.add_int32(key, value)
            continue
        {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)](key, value)
    n_bytes = 0
    for name, shape in {**made.shapes, **made.more}.items():
        is_matrix = len(shape) > 1 and name.endswith((".weight", ".weight.1")) and "position" not in name
        kind = gguf.GGMLQuantizationType.F16 if is_matrix else gguf.GGMLQuantizationType.F32
        size = int(np.prod(shape)) * (2 if is_matrix else 4)
        writer.add_tensor_info(name, list(reversed(shape)), np.dtype(np.float16 if is_matrix else np.float32), size, raw_dtype=kind)
        n_bytes += -(-size // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with open(path, "r+b") as file:
        file.seek(0, 2)
        file.truncate(-(-file.tell() // 32) * 32 + n_bytes)
    return path


# Kinds whose rows stand at (time, row, column): counted another way, and one of them only so.
MROPE = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "ling3vl", "glm4v", "glm5v", "paddleocr", "hunyuanvl", "exaone4_5")


def write_text_model(path: Path, made: Made) -> Path:
    """A vocabulary, and the width the rows must have."""
    arch = "qwen2vl" if made.kind in MROPE else "llama"
    vocab = vocabulary("bpe", 800)
    vocab.add(MARKERS, gguf.TokenType.CONTROL)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("words")
    for key, value in (("block_count", 1), ("context_length", 512), ("embedding_length", made.width), ("feed_forward_length", 64), ("attention.head_count", 1)):
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    if arch != "llama":
        writer.add_array(f"{arch}.rope.dimension_sections", [16, 24, 24, 0])
    vocab.write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


class Oracle:
    """One projector, opened by mtmd without its weights; no answer when an assertion of the engine ends the process."""

    def __init__(self, projector: Path, text: Path | None = None, *, flash: bool = True, least: int = 0, most: int = 0) -> None:
        found = sorted((ROOT / "build").glob("*/raw_projector*"))
        if not found:
            raise FileNotFoundError("raw_projector is not built; `python3 tools/bootstrap.py lib` builds it (preset native)")
        self._command = [str(found[0]), str(projector), str(text or "-"), str(int(flash)), str(least), str(most)]
        self.weights_bytes = self.ask([])[0]["weights"]

    def graphs(self, sizes: Sequence[tuple[int, int]], n_frames: int = 1) -> list[int | None]:
        return [answer.get("bytes") for answer in self.ask([f"graph {w} {h} {n_frames}" for w, h in sizes])[1:]]

    def cells(self, sizes: Sequence[tuple[int, int]], n_frames: int = 1) -> list[dict[str, int]]:
        return self.ask([f"cells {w} {h} {n_frames}" for w, h in sizes])[1:]

    def ask(self, lines: Sequence[str]) -> list[dict[str, Any]]:
        done = subprocess.run(self._command, input="".join(line + "\n" for line in lines), capture_output=True, text=True, check=False, env={**os.environ, "GGML_NO_BACKTRACE": "1"})
        if done.returncode != 0 and len(done.stdout.splitlines()) < 1:
            raise RuntimeError(f"raw_projector: {done.stderr}")
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.endswith("}")]
        if len(answers) <= len(lines):  # it died over the next one: nothing is said of that, and the rest is asked again
            at = max(0, len(answers) - 1)
            answers += [{"died": 1}, *self.ask(lines[at + 1 :])[1:]]
        return answers
