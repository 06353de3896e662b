"""The tiny vision-language model as two GGUF files, and back.

    python -m tools.tinyvlm.export --out build/tinyvlm

No `output.weight` (the engine ties it to the embeddings), no `use_gelu` key (then the tower's feed-forward is quick GELU), `eot_token_id` written.
"""
from __future__ import annotations

import argparse
import re
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from .tokenizer import CHAT_TEMPLATE, SPECIALS, Tokenizer

Weights = dict[str, npt.NDArray[np.float32]]
FILE_TYPES = {"f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
RENAMED = (  # ours, the file's
    ("tower.layers.", "v.blk."), ("tower.post_ln.", "v.post_ln."), ("tower.mm0.", "mm.0."), ("tower.mm2.", "mm.2."),
    ("tower.patch0.weight", "v.patch_embd.weight"), ("tower.patch1.weight", "v.patch_embd.weight.1"),
)


def files(out: Path, kind: str) -> tuple[Path, Path]:
    return out / f"tinyvlm-{kind}.gguf", out / f"mmproj-tinyvlm-{kind}.gguf"


def _file_name(name: str) -> str:
    for ours, theirs in RENAMED:
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    return name


def _our_name(name: str) -> str:
    for ours, theirs in reversed(RENAMED):  # the longer of the two patch names first
        if name.startswith(theirs):
            return ours + name[len(theirs) :]
    return name


def _put(writer: gguf.GGUFWriter, name: str, x: npt.NDArray[np.float32], kind: str) -> None:
    """Matrices in `kind`, vectors in single precision, convolution kernels at most in half (the engine takes no quantised ones)."""
    x = np.ascontiguousarray(x)
    if x.ndim < 2:
        writer.add_tensor(name, x)
    elif kind == "f16" or x.ndim == 4:
        writer.add_tensor(name, x.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(out: Path, kind: str, weights: Weights, tok: Tokenizer, config: dict[str, object], *, patch: int, merge: int, mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Path, Path]:
    """Both files; `config` as `model.Config`, by name."""
    text_path, tower_path = files(out, kind)

    def number(key: str) -> int:
        value = config[key]
        assert isinstance(value, int)
        return value

    width, heads, tower_width = number("width"), number("heads"), number("tower_width")
    sections, base, epsilon = config["sections"], config["rope_base"], config["tower_epsilon"]
    assert isinstance(sections, tuple)
    assert isinstance(base, float)
    assert isinstance(epsilon, float)
    w = gguf.GGUFWriter(text_path, "qwen2vl")
    w.add_name("tinyvlm")
    w.add_type("model")
    w.add_license("apache-2.0")
    w.add_file_type(FILE_TYPES[kind])
    w.add_block_count(number("layers"))
    w.add_context_length(4096)
    w.add_embedding_length(width)
    w.add_feed_forward_length(number("feed_forward"))
    w.add_vocab_size(number("vocabulary"))
    w.add_head_count(heads)
    w.add_head_count_kv(number("kv_heads"))
    w.add_key_length(width // heads)
    w.add_value_length(width // heads)
    w.add_rope_dimension_count(width // heads)
    w.add_rope_freq_base(base)
    w.add_rope_dimension_sections([*sections, 0])
    w.add_layer_norm_rms_eps(0.0)  # asked for by readers; this engine takes 0 whatever it says
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list([t.encode() for t in tok.tokens])
    kinds = gguf.TokenType
    w.add_token_types([kinds.NORMAL] * tok.n_plain + [kinds.CONTROL] * len(SPECIALS) + [kinds.UNUSED] * (len(tok.tokens) - tok.n_used))
    w.add_token_merges([f"{a} {b}" for a, b in tok.merges])
    w.add_bos_token_id(tok.pad)
    w.add_eos_token_id(tok.end)
    w.add_eot_token_id(tok.end)
    w.add_pad_token_id(tok.pad)
    w.add_add_bos_token(False)
    w.add_chat_template(CHAT_TEMPLATE)
    for name, x in weights.items():
        if not name.startswith("tower."):
            _put(w, name, x, kind)
    _finish(w)

    w = gguf.GGUFWriter(tower_path, "clip")
    w.add_name("tinyvlm")
    w.add_type("mmproj")
    w.add_license("apache-2.0")
    w.add_file_type(FILE_TYPES[kind])
    w.add_clip_has_vision_encoder(True)
    w.add_clip_projector_type("qwen2vl_merger")
    w.add_vision_image_size(64)
    w.add_vision_patch_size(patch)
    w.add_vision_spatial_merge_size(merge)
    w.add_vision_embedding_length(tower_width)
    w.add_vision_feed_forward_length(number("tower_feed_forward"))
    w.add_vision_block_count(number("tower_layers"))
    w.add_vision_head_count(number("tower_heads"))
    w.add_vision_projection_dim(width)
    w.add_vision_attention_layernorm_eps(epsilon)
    w.add_vision_image_mean(list(mean))
    w.add_vision_image_std(list(std))
    for name, x in weights.items():
        if name.startswith("tower."):
            _put(w, _file_name(name), x.reshape(tower_width, 3, patch, patch) if ".patch" in name else x, kind)
    _finish(w)
    return text_path, tower_path


def read(out: Path, kind: str) -> tuple[Weights, Tokenizer]:
    """The weights as the engine sees them (rounded to the files' types), under the names of `model.TinyVLM`, and the tokenizer."""
    weights: Weights = {}
    merges: list[tuple[str, str]] = []
    for path in files(out, kind):
        reader = gguf.GGUFReader(path)
        for tensor in reader.tensors:
            x = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
            weights[_our_name(tensor.name)] = x.reshape(x.shape[0], -1) if x.ndim == 4 else x
        merge_field = reader.get_field("tokenizer.ggml.merges")
        if merge_field is not None:
            pairs = [re.fullmatch(r"(\S+) (\S+)", str(m)) for m in merge_field.contents()]
            merges = [(m[1], m[2]) for m in pairs if m]
    return weights, Tokenizer(merges)


def main() -> None:
    import dataclasses

    import torch

    from .model import MEAN, MERGE, PATCH, STD, Config, numbers_of
    from .prompts import tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/tinyvlm"), help="where train.py left its checkpoint")
    a = parser.parse_args()
    state = torch.load(a.out / "checkpoint.pt", weights_only=True)
    config = {f.name: getattr(Config(), f.name) for f in dataclasses.fields(Config)}
    for kind in FILE_TYPES:
        for path in write(a.out, kind, numbers_of(state["model"]), tokenizer(), config, patch=PATCH, merge=MERGE, mean=MEAN, std=STD):
            print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
