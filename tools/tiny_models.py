"""Make tiny GGUF models of random weights, for tests: real architectures, real tokenizer, no meaning.

    python tools/tiny_models.py FOLDER [--only NAME]

Every file is a pure function of its specification and a fixed seed: byte-identical on every run. Nothing here is committed;
tests make the files they need into a temporary folder, in milliseconds.
"""
from __future__ import annotations

import argparse
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
WORDS = ("the", "and", "whale", "sea", "ship", "red", "blue", "circle", "square", "what", "colour", "is", "yes", "no", "one", "two", "three", "left", "right", "hello")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")


@dataclass(frozen=True)
class Spec:
    """An architecture, small: its keys (prefixed with the architecture's name) and tensors (shapes in ggml order).

    ``blk.*`` stands for every block; a name ending in ``!`` gets no ``.weight``.
    """

    arch: str
    n_layer: int
    keys: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    n_vocab: int = 512
    extra: dict[str, Any] = field(default_factory=dict)


SPECS = {
    "tiny-llama": Spec(
        "llama", 2,
        {"context_length": 4096, "embedding_length": 64, "vocab_size": 512, "feed_forward_length": 128, "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
         "attention.value_length": 32, "rope.dimension_count": 32, "rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-6},
        {"token_embd": (64, 512), "output_norm": (64,), "output": (64, 512), "blk.*.attn_norm": (64,), "blk.*.attn_q": (64, 128), "blk.*.attn_k": (64, 64), "blk.*.attn_v": (64, 64),
         "blk.*.attn_output": (128, 64), "blk.*.ffn_norm": (64,), "blk.*.ffn_gate": (64, 128), "blk.*.ffn_up": (64, 128), "blk.*.ffn_down": (128, 64)}),
}


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level BPE vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in table)})
    return table


def vocabulary(n_vocab: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types, and merges: 256 bytes, a few words with every piece on the way to them, specials, padding."""
    characters = byte_characters()
    tokens, merges = [characters[b] for b in range(256)], []
    for word in (form for w in WORDS for form in (w, " " + w)):
        pieces = [characters[b] for b in word.encode()]
        while len(pieces) > 1:
            merge = f"{pieces[0]} {pieces[1]}"
            if merge not in merges:
                merges.append(merge)
            pieces[:2] = [pieces[0] + pieces[1]]
            if pieces[0] not in tokens:
                tokens.append(pieces[0])
    types = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(SPECIALS)
    tokens += SPECIALS
    types += [gguf.TokenType.UNUSED] * (n_vocab - len(tokens))
    tokens += [f"<unused{i}>" for i in range(n_vocab - len(tokens))]
    if len(tokens) != n_vocab:
        raise ValueError(f"{len(tokens)} tokens do not fit a vocabulary of {n_vocab}")
    return tokens, [int(t) for t in types], merges


def weights(name: str, shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float32]:
    """Random weights of a tensor, by its name: norms near one, matrices scaled by their fan-in."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal(tuple(reversed(shape)), dtype=np.float32)
    if "norm" in name:
        return (1 + 0.1 * values).astype(np.float32)
    return np.asarray(values / np.sqrt(shape[0]), np.float32)


def write(path: Path, name: str = "tiny-llama", *, quant: str = "q8_0", template: str | None = CHATML, seed: int = 1, metadata: dict[str, str] | None = None) -> Path:
    """Write one model.

    Parameters
    ----------
    quant : {"q8_0", "f32"}
        Type of the matrices; vectors are f32.
    template : str or None
        Chat template; None leaves the key out.
    metadata : dict, optional
        More string keys, written as they are.
    """
    spec = SPECS[name]
    writer = gguf.GGUFWriter(path, spec.arch)
    writer.add_name(name)
    writer.add_block_count(spec.n_layer)
    for key, value in spec.keys.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{spec.arch}.{key}", value)
    tokens, types, merges = vocabulary(spec.n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eot_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)
    for key, text in (metadata or {}).items():
        writer.add_string(key, text)
    for pattern, shape in spec.tensors.items():
        for block in range(spec.n_layer) if "*" in pattern else (0,):
            full = pattern.replace("*", str(block))
            full = full[:-1] if full.endswith("!") else full + ".weight"
            values = weights(full, shape, seed)
            if quant == "q8_0" and len(shape) > 1:
                writer.add_tensor(full, gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(full, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=sorted(SPECS))
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in [args.only] if args.only else SPECS:
        print(write(args.folder / f"{name}.gguf", name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
