"""Train the tiny vision-language model, from nothing to two GGUF files, on the CPU.

    python -m tools.tinyvlm.train --out build/tinyvlm

Three stages: the text model alone, on words where the pictures would be; the tower alone, on what every token shows in either frame of a pair;
both together, on answers. Data are a function of seed and step, so a run that was stopped goes on from its last checkpoint as if it had not been.
"""
from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning OpenMP threads cost several times the run on shared cores

import argparse
import ctypes
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import scenes
from .model import GRID, Config, TinyVLM
from .prompts import IGNORED, Encoded, conversation, tokenizer
from .scenes import Picture, Scene
from .tokenizer import Tokenizer

STEPS = {"text": 300, "tower": 700, "joint": 900}
TOWER_RATE = 0.2  # of the others' in the joint stage: at the full rate it loses what it learnt alone
LATE = 1 / 3  # of the joint stage, after which batches are smaller
POOL = 8  # batches of like lengths are cut from this many batches of samples


def keep_freed_memory() -> None:
    """glibc gives large blocks back at once and takes them anew, page fault by page fault: several times the run time. Elsewhere nothing is done."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass


# --- data


def image_scene(r: np.random.Generator, size: tuple[int, int]) -> Scene:
    return scenes.one(r, "train", size) if r.random() < 0.65 else scenes.several(r, "train", size)


def clip_scene(r: np.random.Generator, size: tuple[int, int]) -> Scene:
    return scenes.moving(r, "train", size) if r.random() < 0.62 else scenes.turning(r, "train", size)


def two_scene(r: np.random.Generator, size: tuple[int, int]) -> Scene:
    return scenes.two(r, "train", size)


def any_scene(r: np.random.Generator, size: tuple[int, int]) -> Scene:
    return scenes.pick(r, (image_scene, two_scene, clip_scene))(r, size)


MakeScene = Callable[[np.random.Generator, tuple[int, int]], Scene]


class Batches:
    """Batches of one picture size and of like lengths; batch `i` depends on seed, name and `i` alone."""

    def __init__(self, tok: Tokenizer, seed: int, name: str, make: MakeScene, n: int, *, words: bool = False, sizes: tuple[tuple[int, int], ...] = scenes.SIZES) -> None:
        self.tok, self.seed, self.name, self.make, self.n, self.words, self.sizes = tok, seed, name, make, n, words, sizes
        self.pool: list[list[Encoded]] = []
        self.index = -1

    def __call__(self, step: int) -> list[Encoded]:
        if step // POOL != self.index:
            self.index = step // POOL
            r = np.random.default_rng([self.seed, *self.name.encode(), self.index])
            size = scenes.pick(r, self.sizes)
            made = [conversation(r, self.tok, self.make(r, size), words=self.words) for _ in range(self.n * POOL)]
            made.sort(key=lambda e: len(e.ids))
            self.pool = [made[i * self.n : (i + 1) * self.n] for i in r.permutation(POOL)]
        return self.pool[step % POOL]


def drawn(pairs: list[tuple[Picture, Picture]]) -> Tensor:
    """[n, 2, height, width, 3], bytes."""
    first = [a.draw() for a, _ in pairs]
    second = [one if a is b else b.draw() for one, (a, b) in zip(first, pairs, strict=True)]
    return torch.from_numpy(np.stack([np.stack(first), np.stack(second)], 1))


def shown(pairs: list[tuple[Picture, Picture]]) -> tuple[Tensor, Tensor]:
    """What each token shows in the first and in the second frame."""
    first = [a.labels() for a, _ in pairs]
    second = [one if a is b else b.labels() for one, (a, b) in zip(first, pairs, strict=True)]
    return torch.from_numpy(np.stack(first)), torch.from_numpy(np.stack(second))


def padded(tok: Tokenizer, batch: list[Encoded]) -> tuple[Tensor, Tensor, Tensor]:
    """ids, labels [n, length], positions [3, n, length]."""
    shape = (len(batch), max(len(e.ids) for e in batch))
    ids, labels, positions = np.full(shape, tok.pad), np.full(shape, IGNORED), np.zeros((3, *shape), np.int64)
    for i, e in enumerate(batch):
        ids[i, : len(e.ids)] = e.ids
        labels[i, : len(e.ids)] = e.labels
        positions[:, i, : len(e.ids)] = np.array(e.positions).T
    return torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(positions)


# --- losses


def object_loss(model: TinyVLM, tokens: Tensor, pairs: list[tuple[Picture, Picture]]) -> tuple[Tensor, float]:
    """Cross-entropy of what the tokens show, and the part of the tokens with an object in them that is right."""
    loss, right = torch.zeros(()), []
    for head, label in zip(model.aux_object, shown(pairs), strict=True):
        said = head(tokens).flatten(0, 1)
        flat = label.flatten()
        loss = loss + F.cross_entropy(said, flat, ignore_index=IGNORED)
        there = (flat > 0) & (flat < 19)
        right.append((said.argmax(-1) == flat)[there].float().mean().item())
    return loss, sum(right) / 2


def answer_loss(model: TinyVLM, tok: Tokenizer, batch: list[Encoded], auxiliary: float) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy of the answers; with pictures also that of the two auxiliary heads."""
    ids, labels, positions = padded(tok, batch)
    pairs = [pair for e in batch for pair in e.pairs]
    tokens = model.tower(drawn(pairs)) if pairs else None
    hidden, middle = model(ids, positions, tok.image, tokens)
    asked = labels[:, 1:] != IGNORED
    said, truth = model.logits(hidden[:, :-1][asked]), labels[:, 1:][asked]
    loss = F.cross_entropy(said, truth)
    note = {"loss": loss.item(), "right": (said.argmax(-1) == truth).float().mean().item()}
    if tokens is not None:
        slots = ids == tok.image
        objects, note["objects"] = object_loss(model, tokens, pairs)
        place = (positions[1] - positions[0]) * GRID + positions[2] - positions[0]
        loss = loss + auxiliary * (0.5 * objects + F.cross_entropy(model.aux_place(middle[slots]), place[slots]))
    return loss, note


# --- optimisers


class Optimiser:
    """Muon for the matrices inside, AdamW for embeddings, heads, patches, norms and biases."""

    def __init__(self, model: TinyVLM, wanted: Callable[[str], bool], rate: float, muon_rate: float, tower_rate: float) -> None:
        groups: dict[tuple[bool, float, float], list[torch.nn.Parameter]] = {}
        for name, p in model.named_parameters():
            if wanted(name):
                matrix = p.ndim == 2 and muon_rate > 0 and not name.startswith(("token_embd", "aux")) and ".patch" not in name
                key = (matrix, tower_rate if name.startswith("tower") else 1.0, 0.05 if p.ndim == 2 else 0.0)
                groups.setdefault(key, []).append(p)
        muon = [{"params": ps, "lr": muon_rate * part, "weight_decay": decay} for (matrix, part, decay), ps in groups.items() if matrix]
        adam = [{"params": ps, "lr": rate * part, "weight_decay": decay} for (matrix, part, decay), ps in groups.items() if not matrix]
        self.parameters = [p for ps in groups.values() for p in ps]
        self.inner: list[torch.optim.Optimizer] = [torch.optim.AdamW(adam, betas=(0.9, 0.98), fused=True)]
        if muon:
            self.inner.append(torch.optim.Muon(muon, momentum=0.95, nesterov=True))
        self.rates = [[g["lr"] for g in o.param_groups] for o in self.inner]

    def step(self, part: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for inner, rates in zip(self.inner, self.rates, strict=True):
            for group, rate in zip(inner.param_groups, rates, strict=True):
                group["lr"] = rate * part
            inner.step()
            inner.zero_grad(set_to_none=True)


def schedule(step: int, steps: int) -> float:
    """A short warm-up, then half a cosine down to three hundredths."""
    return min(1.0, (step + 1) / 60) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * step / steps)))


# --- the run


class Run:
    def __init__(self, out: Path, seed: int, steps: dict[str, int], threads: int) -> None:
        keep_freed_memory()
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self.out, self.seed, self.steps = out, seed, steps
        self.tok = tokenizer()
        self.model = TinyVLM(Config())
        self.stage, self.step, self.seconds = "text", 0, 0.0
        self.saved: list[dict[str, object]] | None = None
        self.averages: dict[str, float] = {}
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / "checkpoint.pt"
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            if state["seed"] != seed or state["steps"] != steps:
                raise SystemExit(f"{self.path} is of another run (seed {state['seed']}, steps {state['steps']}); choose another --out or remove it")
            self.model.load_state_dict(state["model"])
            self.stage, self.step, self.seconds, self.saved = state["stage"], state["step"], state["seconds"], state["optimisers"]
            print(f"going on from {self.stage} step {self.step}", flush=True)

    def save(self, optimiser: Optimiser | None) -> None:
        state = {
            "model": self.model.state_dict(), "stage": self.stage, "step": self.step, "seconds": self.seconds, "seed": self.seed, "steps": self.steps,
            "optimisers": [o.state_dict() for o in optimiser.inner] if optimiser else None,
        }
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    def note(self, prefix: str, values: dict[str, float]) -> None:
        for key, value in values.items():
            name = f"{prefix} {key}"
            self.averages[name] = self.averages.get(name, value) * 0.95 + value * 0.05

    def train(self, stage: str, optimiser: Optimiser, one_step: Callable[[int], Tensor]) -> None:
        if self.stage != stage:
            return
        if self.saved:
            for inner, state in zip(optimiser.inner, self.saved, strict=True):
                inner.load_state_dict(state)
            self.saved = None
        self.averages = {}
        last = saved = time.monotonic()
        while self.step < self.steps[stage]:
            with torch.autocast("cpu", torch.bfloat16):  # half of the time; the weights themselves stay in single precision
                loss = one_step(self.step)
            loss.backward()
            optimiser.step(schedule(self.step, self.steps[stage]))
            self.step += 1
            now = time.monotonic()
            self.seconds += now - last
            last = now
            if self.step % 50 == 0:
                print(f"{stage} {self.step}/{self.steps[stage]} {self.seconds:.0f} s cpu {time.process_time():.0f} s  " + "  ".join(f"{k} {v:.3f}" for k, v in self.averages.items()), flush=True)
            if now - saved > 60:
                self.save(optimiser)
                saved = now
        following = list(self.steps)[list(self.steps).index(stage) + 1 :]
        self.stage, self.step = (following or ["done"])[0], 0
        self.save(None)

    def text(self) -> None:
        batches = Batches(self.tok, self.seed, "text", any_scene, 48, words=True, sizes=scenes.SIZES[:1])

        def one_step(step: int) -> Tensor:
            loss, note = answer_loss(self.model, self.tok, batches(step), 0.0)
            self.note("text", note)
            return loss

        self.train("text", Optimiser(self.model, lambda n: not n.startswith(("tower", "aux")), 2e-3, 0.02, 1.0), one_step)

    def tower(self) -> None:
        def one_step(step: int) -> Tensor:
            r = np.random.default_rng([self.seed, *b"tower", step])
            size = scenes.pick(r, scenes.SIZES)
            pairs = []
            for _ in range(96):
                if r.random() < 0.5:
                    picture = image_scene(r, size).pictures[0]
                    pairs.append((picture, picture))
                else:
                    frames = clip_scene(r, size).pictures
                    i = int(r.integers(1, len(frames)))
                    pairs.append((frames[i - 1], frames[i]))
            loss, right = object_loss(self.model, self.model.tower(drawn(pairs)), pairs)
            self.note("tower", {"loss": loss.item(), "right": right})
            return loss

        self.train("tower", Optimiser(self.model, lambda n: n.startswith(("tower", "aux_object")), 2e-3, 0.02, 1.0), one_step)

    def joint(self) -> None:
        small = scenes.SIZES[:1]
        # Batches, their weight, and the part of the stage in which they are seen: pictures first, then pairs and clips, and smaller batches once the rate falls.
        plan = [
            ("image", Batches(self.tok, self.seed, "image", image_scene, 48), 1.0, 0.0, LATE),
            ("image", Batches(self.tok, self.seed, "late image", image_scene, 32), 1.0, LATE, 1.0),
            ("two", Batches(self.tok, self.seed, "two", two_scene, 16, sizes=small), 0.7, 0.16, LATE),
            ("two", Batches(self.tok, self.seed, "late two", two_scene, 12, sizes=small), 0.7, LATE, 1.0),
            ("clip", Batches(self.tok, self.seed, "clip", clip_scene, 16, sizes=small), 1.0, 0.25, LATE),
            ("clip", Batches(self.tok, self.seed, "late clip", clip_scene, 12, sizes=small), 1.0, LATE, 1.0),
            ("text", Batches(self.tok, self.seed, "words", any_scene, 8, words=True, sizes=small), 0.4, 0.0, LATE),
        ]

        def one_step(step: int) -> Tensor:
            total = torch.zeros(())
            for name, batches, weight, since, until in plan:
                if since <= step / self.steps["joint"] < until:
                    loss, note = answer_loss(self.model, self.tok, batches(step), 0.6)
                    total = total + weight * loss
                    self.note(name, note)
            return total

        self.train("joint", Optimiser(self.model, lambda _: True, 1.2e-3, 0.02, TOWER_RATE), one_step)

    def all(self) -> None:
        print("parameters", sum(p.numel() for n, p in self.model.named_parameters() if not n.startswith("aux")), "tokens used", self.tok.n_used, flush=True)
        self.text()
        self.tower()
        self.joint()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/tinyvlm"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=json.loads, default=STEPS, help="JSON, as %(default)s")
    a = parser.parse_args()
    Run(a.out, a.seed, a.steps, a.threads).all()


if __name__ == "__main__":
    main()
