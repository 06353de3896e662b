"""What the tiny vision-language model gets right on samples held out of its training, in torch, from its GGUF files; and what mistakes do to it.

    python -m tools.tinyvlm.evaluate --files fixtures/models --oracle fixtures/models/tinyvlm.json

The weights are read back from the files, rounded as the engine sees them, so torch's greedy answers are what a right run time answers.
"""
from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import scenes
from .export import files, read
from .model import Config, TinyVLM
from .prompts import Encoded, prompt
from .scenes import Scene
from .tokenizer import Tokenizer
from .train import drawn, padded

LONGEST = 8  # tokens of an answer
KEPT = 0.9  # kinds that are right less often are no test
STORED = 20  # samples of each kept kind in the oracle


def load(folder: Path, kind: str) -> tuple[TinyVLM, Tokenizer]:
    weights, tok = read(folder, kind)
    model = TinyVLM(Config())
    missing, unexpected = model.load_state_dict({name: torch.from_numpy(x.copy()) for name, x in weights.items()}, strict=False)
    if unexpected or any(not name.startswith("aux") for name in missing):
        raise SystemExit(f"{files(folder, kind)} do not hold this model: missing {missing}, unexpected {unexpected}")
    return model.eval(), tok


@dataclasses.dataclass
class Said:
    tokens: list[int]
    margin: float  # the smallest distance between the best and the second logit


def greedy(model: TinyVLM, tok: Tokenizer, batch: list[Encoded], see: Callable[[Tensor], Tensor]) -> list[Said]:
    """The greedy answers to prompts whose pictures have one size; the prompts are extended in place. `see` changes the pixels."""
    tokens = model.tower(see(drawn([pair for e in batch for pair in e.pairs])))
    said = [Said([], float("inf")) for _ in batch]
    running = list(range(len(batch)))
    for _ in range(LONGEST):
        ids, _, positions = padded(tok, batch)
        hidden, _ = model(ids, positions, tok.image, tokens)
        for i in list(running):
            (best, second), (token, _) = model.logits(hidden[i, len(batch[i].ids) - 1]).topk(2)
            said[i].margin = min(said[i].margin, float(best - second))
            if token in (tok.end, tok.pad):
                running.remove(i)
                continue
            said[i].tokens.append(int(token))
            e = batch[i]
            e.ids.append(int(token))
            e.labels.append(int(token))
            e.positions.append((e.next_position,) * 3)
            e.next_position += 1
        if not running:
            break
    return said


# --- deliberate mistakes, each on the encoded prompt or the pixels


def swapped_axes(e: Encoded, _: Tokenizer) -> None:
    e.positions = [(t, x, y) for t, y, x in e.positions]


def sequential(e: Encoded, _: Tokenizer) -> None:
    """Every token one position after the one before, as a model without M-RoPE would count."""
    e.positions = [(i, i, i) for i in range(len(e.ids))]
    e.next_position = len(e.ids)


def after_all_tokens(e: Encoded, tok: Tokenizer) -> None:
    """The grids right, the text after a picture at base + number of its tokens."""
    out: list[tuple[int, int, int]] = []
    shift = last = run = 0
    for token, (t, y, x) in zip(e.ids, e.positions, strict=True):
        if token == tok.image:
            run += 1
            last = t
        elif run:
            shift += run - (t - last)
            run = 0
        out.append((t + shift, y + shift, x + shift))
    e.positions = out
    e.next_position += shift


def swapped_pairs(e: Encoded, _: Tokenizer) -> None:
    e.pairs = [(b, a) for a, b in e.pairs]


def bgr(pixels: Tensor) -> Tensor:
    return pixels.flip(-1)


def unmerged(scene: Scene) -> Scene:
    """Every frame of a clip a grid of its own."""
    return dataclasses.replace(scene, clip=False)


@dataclasses.dataclass(frozen=True)
class Mistake:
    edit: Callable[[Encoded, Tokenizer], None] = lambda *_: None
    see: Callable[[Tensor], Tensor] = lambda pixels: pixels
    show: Callable[[Scene], Scene] = lambda scene: scene


NONE = Mistake()
MISTAKES = {
    "none": NONE,
    "x and y swapped": Mistake(edit=swapped_axes),
    "sequential positions": Mistake(edit=sequential),
    "text continues at base + n_tokens": Mistake(edit=after_all_tokens),
    "BGR": Mistake(see=bgr),
    "frames of a pair swapped": Mistake(edit=swapped_pairs),
    "merging off": Mistake(show=unmerged),
}


def measure(model: TinyVLM, tok: Tokenizer, kind: str, count: int, mistake: Mistake = NONE) -> list[dict[str, Any]]:
    """Samples 0 ... count - 1 of a kind: seed, question, answer, and what the model said."""
    by_size: dict[tuple[int, int], list[int]] = {}
    made = [scenes.sample(kind, seed) for seed in range(count)]
    for seed, (scene, _) in enumerate(made):
        by_size.setdefault((scene.pictures[0].width, scene.pictures[0].height), []).append(seed)
    out: dict[int, dict[str, Any]] = {}
    for seeds in by_size.values():
        batch = []
        for seed in seeds:
            scene, question = made[seed]
            e = prompt(tok, mistake.show(scene), question)
            mistake.edit(e, tok)
            batch.append(e)
        with torch.no_grad():
            answers = greedy(model, tok, batch, mistake.see)
        for seed, said in zip(seeds, answers, strict=True):
            scene, question = made[seed]
            out[seed] = {"kind": kind, "seed": seed, "question": question.text, "answer": question.answer, "said": tok.decode(said.tokens), "tokens": said.tokens, "margin": round(said.margin, 3)}
    return [out[seed] for seed in range(count)]


def right(rows: list[dict[str, Any]]) -> float:
    return sum(1 for row in rows if row["said"] == row["answer"]) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, default=Path("fixtures/models"))
    parser.add_argument("--type", default="f16", choices=("f16", "q8_0"))
    parser.add_argument("--count", type=int, default=200, help="samples a kind")
    parser.add_argument("--oracle", type=Path, help="write the samples and the figures here, as JSON")
    parser.add_argument("--training", type=json.loads, default={}, help="facts about the training to keep in the oracle, as JSON")
    parser.add_argument("--mistakes", action="store_true", help="measure what deliberate mistakes do")
    a = parser.parse_args()
    torch.set_num_threads(1)
    model, tok = load(a.files, a.type)
    rows = {kind: measure(model, tok, kind, a.count) for kind in scenes.SUITE}
    accuracy = {kind: round(right(r), 3) for kind, r in rows.items()}
    for kind, figure in accuracy.items():
        print(f"{kind:22s} {figure:.3f}{'' if figure >= KEPT else '   not in the suite'}", flush=True)
    kept = [kind for kind, figure in accuracy.items() if figure >= KEPT]
    mistakes: dict[str, dict[str, float]] = {}
    if a.mistakes:
        for name, mistake in MISTAKES.items():
            mistakes[name] = {kind: round(right(measure(model, tok, kind, a.count, mistake)), 3) for kind in kept}
            print(name, mistakes[name], flush=True)
    if a.oracle:
        samples = [row | scenes.as_json(scenes.sample(kind, row["seed"])[0]) for kind in kept for row in rows[kind][:STORED]]
        oracle = {
            "weights": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files(a.files, a.type)},
            "training": a.training | {"torch": torch.__version__},
            "count": a.count,
            "accuracy": accuracy,
            "suite": kept,
            "mistakes": mistakes,
        }
        head = json.dumps(oracle, indent=1)
        lines = ",\n  ".join(json.dumps(s) for s in samples)
        a.oracle.write_text(f'{head[:-2]},\n "samples": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
