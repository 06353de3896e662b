"""Make tiny GGUF models of random weights, for tests: real architectures, real tokenizers, no meaning.

    python tools/tiny_models.py FOLDER [--only NAME] [--quant f32]   write models
    python tools/tiny_models.py --check                              compare all of them with fixtures/tiny_models.sha256
    python tools/tiny_models.py --pin                                write that file

Every file is a pure function of its specification and a fixed seed: byte-identical on every run and every machine. Nothing but
the hashes is committed; tests make the files they need into a temporary folder, in milliseconds.
"""
from __future__ import annotations

import argparse
import hashlib
import math
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
from _tiny_specs import SPECS, VocabKind

PINS: Final = Path(__file__).resolve().parents[1] / "fixtures" / "tiny_models.sha256"
QUANTS: Final = ("q8_0", "f32")
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
WORDS = ("the", "and", "whale", "sea", "ship", "red", "blue", "circle", "square", "what", "colour", "is", "yes", "no", "one", "two", "three", "left", "right", "hello")
CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
IMAGE_SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<fake_token_around_image>", "<global-img>", "<image>",
                  *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)))

# ------------------------------------------------------------------------------------------------------------ vocabularies


@dataclass
class Vocabulary:
    """A tokenizer's tables; ``ids`` are the special tokens, by the name their key has."""

    model: str
    pre: str = "default"
    tokens: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    n_token_types: int = 0

    def add(self, tokens: Iterable[str], kind: gguf.TokenType = gguf.TokenType.NORMAL) -> None:
        for token in tokens:
            if token not in self.tokens:
                self.tokens.append(token)
                self.types.append(int(kind))

    def add_words(self, words: Iterable[str], space: str = "") -> None:
        """Words with every piece on the way to them and the merges that lead there; at last each with a space before it."""
        words = tuple(words)
        for word in words:
            for i in range(1, len(word)):
                self._add_merge(word[:i], word[i])
        for word in words if space else ():
            self._add_merge(space, word)

    def _add_merge(self, left: str, right: str) -> None:
        if (merge := f"{left} {right}") not in self.merges:
            self.merges.append(merge)
        self.add([left + right])

    def fill(self, n_vocab: int, pattern: str) -> None:
        missing = n_vocab - len(self.tokens)
        if missing < 0:
            raise ValueError(f"{len(self.tokens)} tokens do not fit a vocabulary of {n_vocab}")
        self.add((pattern.format(i) for i in range(missing)), gguf.TokenType.UNUSED)

    def write(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        if self.model == "llama":
            writer.add_token_scores([-float(i) for i in range(len(self.tokens))])
        writer.add_token_types(self.types)
        if self.merges and self.model != "llama":
            writer.add_token_merges(self.merges)
        for key, token in self.ids.items():
            writer.add_uint32(f"tokenizer.ggml.{key}", self.tokens.index(token))
        for key, value in self.flags.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        if self.n_token_types:
            writer.add_token_type_count(self.n_token_types)


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level BPE vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in table)})
    return table


def _bpe() -> Vocabulary:
    """256 bytes as characters, words, specials: every byte string goes round."""
    characters = byte_characters()
    vocab = Vocabulary("gpt2", "gpt-2", flags={"add_bos_token": False},
                       ids={"bos_token_id": "<|endoftext|>", "eos_token_id": "<|endoftext|>", "eot_token_id": "<|im_end|>", "padding_token_id": "<pad>"})
    vocab.add(characters[b] for b in range(256))
    vocab.add_words(WORDS, characters[ord(" ")])
    vocab.add((*CHATML_SPECIALS, *IMAGE_SPECIALS), gguf.TokenType.CONTROL)
    vocab.add_words([2 * characters[ord("\n")]])  # one piece, for idefics3
    return vocab


def _spm() -> Vocabulary:
    """Gemma's kind: specials first, 256 byte tokens, letters, words with U+2581 for a space; begins with a BOS."""
    vocab = Vocabulary("llama", flags={"add_bos_token": True, "add_space_prefix": False},
                       ids={"bos_token_id": "<bos>", "eos_token_id": "<eos>", "unknown_token_id": "<unk>", "padding_token_id": "<pad>", "eot_token_id": "<end_of_turn>"})
    vocab.add(("<pad>", "<eos>", "<bos>"), gguf.TokenType.CONTROL)
    vocab.add(["<unk>"], gguf.TokenType.UNKNOWN)
    vocab.add(("<start_of_turn>", "<end_of_turn>", *CHATML_SPECIALS, *IMAGE_SPECIALS[3:6]), gguf.TokenType.CONTROL)
    vocab.add((f"<0x{b:02X}>" for b in range(256)), gguf.TokenType.BYTE)
    vocab.add("\u2581abcdefghijklmnopqrstuvwxyz")
    vocab.add_words(WORDS, "\u2581")
    return vocab


def _gemma4() -> Vocabulary:
    """The same tokens, put together by merges."""
    vocab = _spm()
    vocab.model, vocab.pre = "gemma4", "gemma4"
    return vocab


def _wpm() -> Vocabulary:
    """WordPiece: a word's first piece carries U+2581, the others nothing; lower case only."""
    vocab = Vocabulary("bert", n_token_types=2, ids={"bos_token_id": "[CLS]", "eos_token_id": "[SEP]", "unknown_token_id": "[UNK]", "seperator_token_id": "[SEP]", "padding_token_id": "[PAD]",
                                                     "mask_token_id": "[MASK]"})
    vocab.add(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), gguf.TokenType.CONTROL)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    vocab.add("\u2581" + piece for piece in (*letters, *".,:;!?'\"()-", *WORDS))
    vocab.add(letters)
    return vocab


def vocabulary(kind: VocabKind, n_vocab: int) -> Vocabulary:
    vocab = {"bpe": _bpe, "spm": _spm, "gemma4": _gemma4, "wpm": _wpm}[kind]()
    vocab.fill(n_vocab, "[unused{}]" if kind == "wpm" else "<unused{}>")
    return vocab


# ----------------------------------------------------------------------------------------------------------------- weights

_BY_NAME: Final = [(re.compile(pattern), centre, spread) for pattern, centre, spread in (
    (r"ssm_dt\.bias", -2.0, 0.5),                      # a step of about 0.13: the state remembers some ten tokens
    (r"exp_probs_b", 0.0, 0.02),
    (r"\.bias$", 0.0, 0.05),
    (r"norm|mlp\.0\.weight|\.post_ln|\.ln\d|time_mix_ln|ssm_d$|layer_output_scale|rope_freqs|time_mix_k_", 1.0, 0.1),
    (r"ssm_a$", -1.0, 0.25),                           # never positive: the spread ends at 3.5
    (r"time_mix_w0", -1.0, 0.3),
    (r"time_mix_(a0|v0)", 0.0, 0.3),
    (r"_lerp_", 0.5, 0.1),
    (r"time_mix_r_k|attn_sinks", 0.0, 0.3),
)]
# Besides vectors and rows that are no multiple of 32, the engine's own quantiser leaves these alone, or the engine cannot add, norm or convolve them quantised.
_UNQUANTISED: Final = re.compile(r"norm|\.bias$|ffn_gate_inp|position_embd|token_types|per_layer_model_proj|time_mix_[wavg]\d|_lerp_|input_projection")


def weights(name: str, shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float32]:
    """Random weights of a tensor, by its name: norms near one, matrices scaled by their fan-in.

    Sums of four uniform numbers, so near enough to normal and nowhere beyond 3.5 spreads. No library function is in it whose
    last bit may change with the processor or the version of NumPy.
    """
    centre, spread = next(((centre, spread) for pattern, centre, spread in _BY_NAME if pattern.search(name)), (0.0, 1 / math.sqrt(shape[0])))
    raw = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(math.prod(shape)).astype("<u8").view("<u2").reshape(-1, 4)
    z = raw.sum(axis=1, dtype=np.int32) - 2 * 65535
    values = np.float32(centre) + z.astype(np.float32) * np.float32(spread * math.sqrt(3) / 65536)
    return np.asarray(values, np.float32).reshape(tuple(reversed(shape)))


# ------------------------------------------------------------------------------------------------------------------- files


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    kinds[type(value)](key, value)


def write(path: Path, name: str = "tiny-llama", *, quant: str = "q8_0", template: str | None = CHATML, seed: int = 1, metadata: dict[str, str | list[int]] | None = None) -> Path:
    """Write one model.

    Parameters
    ----------
    quant : {"q8_0", "f32"}
        Type of the matrices; vectors, and what the engine wants unquantised, are f32.
    template : str or None
        Chat template; None leaves the key out, and so does a model that is no decoder.
    metadata : dict, optional
        More keys, of strings or lists of integers, written as they are.
    """
    spec = SPECS[name]
    if quant not in QUANTS:
        raise ValueError(f"quant is {quant!r}; it must be one of {', '.join(QUANTS)}")
    writer = gguf.GGUFWriter(path, spec.arch)
    writer.add_type("mmproj" if spec.vocab == "none" else "model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quant == "q8_0" else gguf.LlamaFileType.ALL_F32)
    if spec.vocab != "none":
        writer.add_block_count(spec.n_layer)
    for key, value in spec.keys.items():
        _add(writer, f"{spec.arch}.{key}", value)
    if spec.vocab != "none":
        vocabulary(spec.vocab, spec.n_vocab).write(writer)
    if template is not None and spec.is_decoder:
        writer.add_chat_template(template)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for full, shape in spec.shapes():
        values = weights(full, shape, seed)
        if quant == "q8_0" and len(shape) > 1 and shape[0] % 32 == 0 and not _UNQUANTISED.search(full):
            writer.add_tensor(full, gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(full, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_all(folder: Path, quant: str = "q8_0", names: Iterable[str] = SPECS) -> dict[str, Path]:
    """Write many models into a folder, as ``NAME.gguf``."""
    folder.mkdir(parents=True, exist_ok=True)
    return {name: write(folder / f"{name}.gguf", name, quant=quant) for name in names}


# -------------------------------------------------------------------------------------------------------------------- pins


def hashes() -> dict[str, str]:
    """SHA-256 of every model, under ``QUANT/NAME.gguf``."""
    with tempfile.TemporaryDirectory() as folder:
        return {f"{quant}/{name}.gguf": hashlib.sha256(path.read_bytes()).hexdigest() for quant in QUANTS for name, path in write_all(Path(folder) / quant, quant).items()}


def _makers() -> str:
    """The versions that could change a byte: gguf lays out the file and quantises, NumPy draws the bits."""
    return ", ".join(f"{package} {version(package)}" for package in ("gguf", "numpy"))


def differences() -> list[str]:
    """What is not as pinned, in words; empty when everything is."""
    first, *lines = PINS.read_text(encoding="utf-8").splitlines()
    made_by = first.removeprefix("# made by ")
    pinned = {name: digest for digest, name in (line.split() for line in lines)}
    found = hashes()
    out = [f"{name}: pinned, but no longer made" for name in pinned.keys() - found.keys()]
    out += [f"{name}: made, but not pinned" for name in found.keys() - pinned.keys()]
    out += [f"{name}: other bytes than pinned" for name in pinned.keys() & found.keys() if pinned[name] != found[name]]
    if out and made_by != _makers():
        out.append(f"note: pinned with {made_by}; here are {_makers()}. If the generator did not change, that is why: look at what changed in them, then --pin again")
    elif out:
        out.append("note: same gguf and NumPy as pinned, so the generator or a specification changed; if that was meant, --pin again")
    return sorted(out, key=lambda line: (line.startswith("note"), line))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("folder", type=Path, nargs="?")
    what.add_argument("--pin", action="store_true", help="write the hashes of all models")
    what.add_argument("--check", action="store_true", help="compare all models with the hashes; exit 1 naming differences")
    parser.add_argument("--only", choices=sorted(SPECS))
    parser.add_argument("--quant", choices=QUANTS, default="q8_0")
    args = parser.parse_args(argv)
    if args.pin:
        PINS.write_text(f"# made by {_makers()}\n" + "".join(f"{digest}  {name}\n" for name, digest in hashes().items()), encoding="utf-8")
        return 0
    if args.check:
        found = differences()
        print("\n".join(found), file=sys.stderr) if found else None
        return 1 if found else 0
    for path in write_all(args.folder, args.quant, [args.only] if args.only else SPECS).values():
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
