"""Scenes as ChatML conversations: token ids, M-RoPE positions and the pictures that stand in the slots."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .scenes import BACKGROUNDS, CELL, COLOURS, DIRECTIONS, NUMBERS, ORDINALS, PLACES, SHAPES, Picture, Question, Scene, pick, turned, turned_answer
from .tokenizer import SIZE, SPECIALS, Tokenizer, learn_merges

SYSTEM = "You are a helpful assistant."
IGNORED = -100  # a label that no loss counts


def _corpus() -> list[str]:
    answers = [*COLOURS, *BACKGROUNDS, *SHAPES, *PLACES, *DIRECTIONS, *NUMBERS, *ORDINALS, "yes", "no"]
    questions = [
        "What colour is the shape?", "What shape is it?", "Where is the shape?", "How many shapes?", "What colour is the background?", "Same colour?",
        "What colour is the shape in the first image?", "What shape is in the second image?", "Which way does it move?",
        "What colour is it at first?", "What colour is it at the end?", "Where is the red shape?", "What shape is red?",
    ]
    frame = [SYSTEM, "Video:", "system\n", "user\n", "assistant\n", "a picture of shapes on a white background", "the clip shows one shape", "Look at the images, please."]
    return [*answers, *(" " + a for a in answers), *questions, *frame] * 2


def tokenizer() -> Tokenizer:
    return Tokenizer(learn_merges(_corpus(), SIZE - 256 - len(SPECIALS)))


@dataclass
class Encoded:
    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)  # t, y, x
    pairs: list[tuple[Picture, Picture]] = field(default_factory=list)
    answers: list[tuple[str, int, int]] = field(default_factory=list)  # kind, first and last + 1 of its tokens
    next_position: int = 0

    def text(self, tok: Tokenizer, text: str, kind: str | None = None) -> None:
        """`kind` where this text is an answer to be learnt."""
        ids = tok.encode(text)
        if kind is not None:
            self.answers.append((kind, len(self.ids), len(self.ids) + len(ids)))
        self.ids += ids
        self.labels += ids if kind is not None else [IGNORED] * len(ids)
        self.positions += [(p, p, p) for p in range(self.next_position, self.next_position + len(ids))]
        self.next_position += len(ids)

    def picture(self, tok: Tokenizer, pair: tuple[Picture, Picture], turn: int = 0) -> None:
        """One grid of tokens between its marks; what follows it continues after the longer side."""
        self.text(tok, "<|vision_start|>")
        rows, columns = pair[0].height // CELL, pair[0].width // CELL
        base = self.next_position
        for y in range(rows):
            for x in range(columns):
                at = turned(y, x, rows, columns, turn)
                self.positions.append((base, base + at[0], base + at[1]))
        self.ids += [tok.image] * (rows * columns)
        self.labels += [IGNORED] * (rows * columns)
        self.pairs.append(pair)
        self.next_position = base + max(rows, columns)
        self.text(tok, "<|vision_end|>")


def prompt(tok: Tokenizer, scene: Scene, question: Question) -> Encoded:
    """What the run time is given: one user turn of the scene and the question, and the head of the answer."""
    e = Encoded()
    e.text(tok, "<|im_start|>user\n")
    for part in scene.media():
        if isinstance(part, str):
            e.text(tok, part)
        else:
            e.picture(tok, part)
    e.text(tok, question.text)
    e.text(tok, "<|im_end|>\n")
    e.text(tok, "<|im_start|>assistant\n")
    return e


def _words(pair: tuple[Picture, Picture]) -> str:
    """A pair of frames as words, for training the text model alone."""
    told = [", ".join([*(f"{s.colour} {s.shape} {PLACES[p.cell_of(s)]}" for s in p.shapes), p.background]) for p in pair]
    return told[0] if told[0] == told[1] else "; ".join(told)


WEIGHTS = {
    "where": 2.5, "colour": 1.5, "shape": 2.0, "count": 1.2, "background": 0.4, "colour of": 0.5, "shape of": 0.5, "where of": 0.7,
    "same colour": 2.5, "colour of nth": 0.8, "shape of nth": 0.5, "direction": 4.0, "first colour": 1.5, "last colour": 1.5,
}


def _choose(r: np.random.Generator, questions: Sequence[Question], count: int) -> list[Question]:
    weights = np.array([WEIGHTS[q.kind] for q in questions])
    return [questions[i] for i in r.choice(len(questions), min(count, len(questions)), replace=False, p=weights / weights.sum())]


def conversation(r: np.random.Generator, tok: Tokenizer, scene: Scene, *, words: bool = False) -> Encoded:
    """A training sample: one to four questions about the scene, in turns; in six of ten the axes are moved. `words`: no picture, only its words."""
    turns = [0 if words or r.random() < 0.4 else int(r.integers(1, 8)) for _ in scene.pictures]
    if scene.clip:
        turns = turns[:1] * len(turns)
    quality = int(r.integers(45, 95)) if r.random() < 0.12 else 0
    gap = pick(r, ("", "", "\n"))
    before = r.random() < 0.04  # the question stands before what it asks about
    e = Encoded()
    if r.random() < 0.25:
        e.text(tok, f"<|im_start|>system\n{SYSTEM}<|im_end|>\n")
    for number, question in enumerate(_choose(r, scene.questions, int(r.integers(1, 5)))):
        e.text(tok, "<|im_start|>user\n")
        if number == 0:
            if before:
                e.text(tok, question.text)
            shown = 0
            for part in scene.media():
                if isinstance(part, str):
                    e.text(tok, part)
                elif words:
                    e.text(tok, f"<|vision_start|>{_words(part)}<|vision_end|>")
                else:
                    pair = (replace(part[0], jpeg=quality), replace(part[1], jpeg=quality)) if quality else part
                    e.picture(tok, pair, turns[shown])
                shown += 1 if not isinstance(part, str) else 0
                if gap and not scene.clip:
                    e.text(tok, gap)
        if number or not before:
            e.text(tok, question.text)
        e.text(tok, "<|im_end|>\n")
        e.text(tok, "<|im_start|>assistant\n")
        e.text(tok, turned_answer(question, turns[0]) + "<|im_end|>", question.kind)
        e.text(tok, "\n")
    return e
