"""What the tiny vision-language model looks at: pictures of coloured shapes, pairs of pictures and clips, with questions whose answer is known.

Needs numpy, and Pillow only where a picture asks for JPEG artefacts. Every picture is a function of a seed, through `random` and `integers`
alone (the two methods whose streams numpy keeps), so tests redraw what was held out of training.

The split is strict: a (colour, shape, cell) combination that is held out occurs in no training picture, no frame and no scene of several shapes.
"""
from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Split = Literal["train", "held-out"]
T = TypeVar("T")

COLOURS: dict[str, tuple[tuple[int, int, int], ...]] = {  # three anchors each; a shape's colour is a mixture of them
    "red": ((255, 0, 0), (220, 40, 40), (190, 20, 30)),
    "green": ((0, 255, 0), (0, 128, 0), (40, 170, 60)),
    "blue": ((0, 0, 255), (50, 80, 220), (30, 60, 170)),
    "yellow": ((255, 255, 0), (235, 215, 50), (250, 230, 20)),
    "purple": ((128, 0, 128), (150, 60, 190), (170, 30, 210)),
    "orange": ((255, 165, 0), (240, 130, 30), (255, 140, 0)),
}
BACKGROUNDS = {"white": (236, 255), "black": (0, 18), "grey": (110, 150)}
SHAPES = ("circle", "square", "triangle")
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
NUMBERS = ("zero", "one", "two", "three")
ORDINALS = ("first", "second")
NAMES = tuple(COLOURS)
CELL = 16  # pixels a token, in both directions: every picture is a multiple of it, so mtmd has nothing to resize
SIZES = ((48, 48), (48, 48), (48, 48), (64, 64), (64, 48), (48, 64))  # width, height


def pick(r: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(r.integers(len(options)))]


def held_out(colour: str, shape: str, cell: int) -> bool:
    """27 of the 162 combinations: for every shape and cell one colour is never trained on."""
    return (NAMES.index(colour) + 2 * SHAPES.index(shape) + cell) % 6 == 0


@dataclass(frozen=True)
class Shape:
    colour: str
    shape: str
    rgb: tuple[float, float, float]
    x: float  # pixels, centre
    y: float
    radius: float


@dataclass(frozen=True)
class Picture:
    width: int
    height: int
    background: str
    rgb: tuple[float, float, float]
    shapes: tuple[Shape, ...]
    noise: int = 0  # each channel moves by up to this much
    seed: int = 0  # of the noise
    jpeg: int = 0  # quality, 0 for none; in training only

    def cell_of(self, shape: Shape) -> int:
        """Which of the nine cells holds the centre of `shape`."""
        return min(2, int(shape.y * 3 / self.height)) * 3 + min(2, int(shape.x * 3 / self.width))

    def _masks(self) -> list[npt.NDArray[np.bool_]]:
        y, x = np.ogrid[: self.height, : self.width]
        masks = []
        for s in self.shapes:
            dx, dy = x + 0.5 - s.x, y + 0.5 - s.y
            if s.shape == "circle":
                masks.append(dx * dx + dy * dy <= s.radius * s.radius)
            elif s.shape == "square":
                masks.append((abs(dx) <= s.radius * 0.88) & (abs(dy) <= s.radius * 0.88))
            else:
                masks.append((dy >= -s.radius) & (dy <= s.radius * 0.75) & (abs(dx) <= (dy + s.radius) * 0.62))
        return masks

    def draw(self) -> Pixels:
        """RGB, [height, width, 3]."""
        image = np.empty((self.height, self.width, 3), np.float64)
        image[:] = self.rgb
        for s, mask in zip(self.shapes, self._masks(), strict=True):
            image[mask] = s.rgb
        if self.noise:
            image += np.random.default_rng(self.seed).integers(-self.noise, self.noise + 1, image.shape)
        pixels = np.clip(image + 0.5, 0, 255).astype(np.uint8)
        if self.jpeg:
            from PIL import Image

            data = io.BytesIO()
            Image.fromarray(pixels).save(data, "JPEG", quality=self.jpeg)
            pixels = np.asarray(Image.open(data).convert("RGB"))
        return pixels

    def labels(self) -> npt.NDArray[np.int64]:
        """What each token (16 x 16 pixels, raster order) holds: 1 + colour * 3 + shape, 19 + background, or -100 where that is not clear."""
        canvas = np.zeros((self.height, self.width), np.int64)
        for s, mask in zip(self.shapes, self._masks(), strict=True):
            canvas[mask] = 1 + NAMES.index(s.colour) * 3 + SHAPES.index(s.shape)
        tokens = canvas.reshape(self.height // CELL, CELL, self.width // CELL, CELL).transpose(0, 2, 1, 3).reshape(-1, CELL * CELL)
        counts = (tokens[:, :, None] == np.arange(1, 19)).sum(1)
        clear = counts.max(1) >= 0.08 * CELL * CELL
        empty = 19 + tuple(BACKGROUNDS).index(self.background)
        return np.where(clear, 1 + counts.argmax(1), np.where(counts.any(1), -100, empty))


@dataclass(frozen=True)
class Question:
    kind: str
    text: str
    answer: str


@dataclass(frozen=True)
class Scene:
    """Text and pictures in the order in which a prompt holds them, and what may be asked about them.

    In a clip adjacent pictures (no text between them) are fused in pairs, as the engine does.
    """

    parts: tuple[str | Picture, ...]
    clip: bool
    questions: tuple[Question, ...]

    @property
    def pictures(self) -> list[Picture]:
        return [p for p in self.parts if isinstance(p, Picture)]

    def media(self) -> list[str | tuple[Picture, Picture]]:
        """The parts as the tower gets them: text, or the two frames of one grid of tokens (twice the same for a still)."""
        out: list[str | tuple[Picture, Picture]] = []
        i = 0
        while i < len(self.parts):
            part = self.parts[i]
            following = self.parts[i + 1] if i + 1 < len(self.parts) else None
            if isinstance(part, str):
                out.append(part)
            elif self.clip and isinstance(following, Picture):
                out.append((part, following))
                i += 1
            else:
                out.append((part, part))
            i += 1
        return out


# --- drawing at random


def _rgb(r: np.random.Generator, colour: str) -> tuple[float, float, float]:
    weights = r.random(3) ** 2 + 1e-3
    mixed = weights @ np.array(COLOURS[colour], np.float64) / weights.sum() + (r.random(3) * 16 - 8)
    red, green, blue = np.clip(mixed, 0, 255).tolist()
    return red, green, blue


def _empty(r: np.random.Generator, size: tuple[int, int]) -> Picture:
    background = pick(r, tuple(BACKGROUNDS))
    low, high = BACKGROUNDS[background]
    grey = low + (high - low) * float(r.random())
    return Picture(*size, background, (grey, grey, grey), (), noise=pick(r, (0, 0, 4, 10)), seed=int(r.integers(1 << 31)))


def _place(r: np.random.Generator, picture: Picture, combination: tuple[str, str, int], jitter: float, radii: tuple[float, float]) -> Shape:
    colour, shape, cell = combination
    x = (cell % 3 + 0.5 + (r.random() * 2 - 1) * jitter) * picture.width / 3
    y = (cell // 3 + 0.5 + (r.random() * 2 - 1) * jitter) * picture.height / 3
    radius = min(picture.width, picture.height) / 3 * (radii[0] + (radii[1] - radii[0]) * r.random())
    return Shape(colour, shape, _rgb(r, colour), float(x), float(y), float(radius))


def _allowed(split: Split, colour: str, shape: str, cell: int) -> bool:
    return held_out(colour, shape, cell) == (split == "held-out")


def _draw_combination(r: np.random.Generator, split: Split, *, colours: Sequence[str] = NAMES, shapes: Sequence[str] = SHAPES, cells: Sequence[int] = range(9)) -> tuple[str, str, int]:
    while True:
        colour, shape, cell = pick(r, colours), pick(r, shapes), pick(r, cells)
        if _allowed(split, colour, shape, cell):
            return colour, shape, cell


def _of_one(picture: Picture) -> tuple[Question, ...]:
    shape = picture.shapes[0]
    return (
        Question("colour", "What colour is the shape?", shape.colour),
        Question("shape", "What shape is it?", shape.shape),
        Question("where", "Where is the shape?", PLACES[picture.cell_of(shape)]),
        Question("count", "How many shapes?", "one"),
        Question("background", "What colour is the background?", picture.background),
    )


def one(r: np.random.Generator, split: Split, size: tuple[int, int], colour: str | None = None) -> Scene:
    """One shape in one picture."""
    picture = _empty(r, size)
    combination = _draw_combination(r, split, colours=(colour,) if colour else NAMES)
    picture = replace(picture, shapes=(_place(r, picture, combination, 0.16, (0.36, 0.62)),))
    return Scene((picture,), False, _of_one(picture))


def several(r: np.random.Generator, split: Split, size: tuple[int, int]) -> Scene:
    """Two or three shapes of different colours, shapes and cells."""
    count = pick(r, (2, 2, 3))
    while True:
        drawn = [_draw_combination(r, split) for _ in range(count)]
        if all(len(set(column)) == count for column in zip(*drawn, strict=True)):
            break
    picture = _empty(r, size)
    picture = replace(picture, shapes=tuple(_place(r, picture, combination, 0.08, (0.36, 0.46)) for combination in drawn))
    questions = [Question("count", "How many shapes?", NUMBERS[count]), Question("background", "What colour is the background?", picture.background)]
    for colour, shape, cell in drawn:
        questions.append(Question("colour of", f"What colour is the {shape}?", colour))
        questions.append(Question("shape of", f"What shape is {colour}?", shape))
        questions.append(Question("where of", f"Where is the {colour} shape?", PLACES[cell]))
    return Scene((picture,), False, tuple(questions))


def two(r: np.random.Generator, split: Split, size: tuple[int, int]) -> Scene:
    """Two pictures of one shape each; in half of them the colours are the same (not the shades)."""
    first = one(r, split, size).pictures[0]
    colour = first.shapes[0].colour
    if r.random() < 0.5:
        second = one(r, split, size, colour).pictures[0]
    else:
        second = one(r, split, size, pick(r, [n for n in NAMES if n != colour])).pictures[0]
    questions = [Question("same colour", "Same colour?", "yes" if second.shapes[0].colour == colour else "no")]
    for ordinal, picture in zip(ORDINALS, (first, second), strict=True):
        questions.append(Question("colour of nth", f"What colour is the shape in the {ordinal} image?", picture.shapes[0].colour))
        questions.append(Question("shape of nth", f"What shape is in the {ordinal} image?", picture.shapes[0].shape))
    return Scene((first, second), False, tuple(questions))


# --- clips, laid out as the engine's own video helper does


def stamp(seconds: float) -> str:
    """The text that follows a frame: `[{minutes}m{seconds}s]`."""
    return f"[{int(seconds // 60)}m{seconds % 60:.2f}s]"


def laid_out(frames: Sequence[Picture], fps: float, interval: float) -> tuple[str | Picture, ...]:
    """`Video:`, then the frames, each whose time reaches the next stamp followed by that stamp; `interval` 0 for no stamps."""
    parts: list[str | Picture] = ["Video:"]
    due = 0.0
    for i, frame in enumerate(frames):
        parts.append(frame)
        if interval and i / fps >= due:
            parts.append(stamp(i / fps))
            due += interval
    return tuple(parts)


CLIP_LAYOUTS = (  # frames a second, seconds between stamps, numbers of frames
    (1.0, 0.0, (2, 2, 4, 6)),
    (2.0, 0.0, (2, 4)),
    (1.0, 5.0, (3, 5)),
    (2.0, 5.0, (3, 5, 7)),
    (1.0, 1.0, (2, 3, 4)),
    (2.0, 1.0, (3, 5)),
)


def moving(r: np.random.Generator, split: Split, size: tuple[int, int]) -> Scene:
    """A shape crosses the picture. Held out: at least one of its frames shows a combination that is."""
    fps, interval, counts = pick(r, CLIP_LAYOUTS)
    count = pick(r, counts)
    while True:
        direction, colour, shape = pick(r, tuple(DIRECTIONS)), pick(r, NAMES), pick(r, SHAPES)
        across, ground = 0.2 + 0.6 * float(r.random()), _empty(r, size)
        start = _place(r, ground, (colour, shape, 4), 0.0, (0.36, 0.5))
        frames = []
        for i in range(count):
            along = 0.2 + 0.6 * i / (count - 1)
            if direction in ("left", "up"):
                along = 1 - along
            x, y = (along, across) if direction in ("left", "right") else (across, along)
            frames.append(replace(ground, seed=ground.seed + i, shapes=(replace(start, x=x * ground.width, y=y * ground.height),)))
        if any(held_out(colour, shape, f.cell_of(f.shapes[0])) for f in frames) == (split == "held-out"):
            break
    questions = (
        Question("direction", "Which way does it move?", direction),
        Question("colour", "What colour is the shape?", colour),
        Question("shape", "What shape is it?", shape),
    )
    return Scene(laid_out(frames, fps, interval), True, questions)


def moving_in_one_pair(r: np.random.Generator, split: Split, size: tuple[int, int]) -> Scene:
    """The two frames of one pair: the answer turns round if they are exchanged."""
    while True:
        scene = moving(r, split, size)
        if len(scene.parts) == 3 and len(scene.pictures) == 2:
            return scene


def turning(r: np.random.Generator, split: Split, size: tuple[int, int]) -> Scene:
    """A shape that stays where it is and turns from one colour to another. Held out: one of the two combinations is."""
    fps, interval, counts = pick(r, CLIP_LAYOUTS)
    count = pick(r, counts)
    while True:
        before, after, shape, cell = pick(r, NAMES), pick(r, NAMES), pick(r, SHAPES), int(r.integers(9))
        if before != after and (held_out(before, shape, cell) or held_out(after, shape, cell)) == (split == "held-out"):
            break
    ground = _empty(r, size)
    first = _place(r, ground, (before, shape, cell), 0.16, (0.36, 0.6))
    last = replace(first, colour=after, rgb=_rgb(r, after))
    cut = int(r.integers(1, count))
    frames = [replace(ground, seed=ground.seed + i, shapes=(first if i < cut else last,)) for i in range(count)]
    questions = (
        Question("first colour", "What colour is it at first?", before),
        Question("last colour", "What colour is it at the end?", after),
        Question("shape", "What shape is it?", shape),
        Question("where", "Where is the shape?", PLACES[cell]),
    )
    return Scene(laid_out(frames, fps, interval), True, questions)


# --- moving the axes (training)
# The coordinates that the tokens of a picture get in the TEXT model are flipped or transposed, and the answers about place and direction with
# them; picture and token order stay. So these answers can be learnt from the M-RoPE positions alone, and a run time that gets them wrong errs.


def turned(y: int, x: int, height: int, width: int, turn: int) -> tuple[int, int]:
    """`turn`: bit 0 flips x, bit 1 flips y, bit 2 exchanges the two; the coordinates after it."""
    if turn & 1:
        x = width - 1 - x
    if turn & 2:
        y = height - 1 - y
    return (x, y) if turn & 4 else (y, x)


def turned_answer(question: Question, turn: int) -> str:
    if question.kind.startswith("where"):
        cell = PLACES.index(question.answer)
        y, x = turned(cell // 3, cell % 3, 3, 3, turn)
        return PLACES[y * 3 + x]
    if question.kind == "direction":
        y, x = DIRECTIONS[question.answer]
        moved = turned(y + 1, x + 1, 3, 3, turn)
        return next(name for name, (a, b) in DIRECTIONS.items() if (a + 1, b + 1) == moved)
    return question.answer


# --- held-out samples, one question each

SUITE: dict[str, tuple[Callable[[np.random.Generator, Split, tuple[int, int]], Scene], str]] = {
    "colour": (one, "colour"),
    "shape": (one, "shape"),
    "where": (one, "where"),
    "count one": (one, "count"),
    "count": (several, "count"),
    "background": (one, "background"),
    "colour of": (several, "colour of"),
    "shape of": (several, "shape of"),
    "where of": (several, "where of"),
    "same colour": (two, "same colour"),
    "colour of nth": (two, "colour of nth"),
    "shape of nth": (two, "shape of nth"),
    "direction": (moving, "direction"),
    "clip colour": (moving, "colour"),
    "clip shape": (moving, "shape"),
    "first colour": (turning, "first colour"),
    "last colour": (turning, "last colour"),
    "clip where": (turning, "where"),
    "direction in one pair": (moving_in_one_pair, "direction"),
}


def sample(kind: str, seed: int) -> tuple[Scene, Question]:
    """The held-out sample `seed` of a kind of `SUITE`: what is shown and the one question asked about it."""
    make, asked = SUITE[kind]
    r = np.random.default_rng([tuple(SUITE).index(kind), seed])
    scene = make(r, "held-out", pick(r, SIZES) if make in (one, several) else SIZES[0])
    return scene, pick(r, [q for q in scene.questions if q.kind == asked])


def as_json(scene: Scene) -> dict[str, Any]:
    """What to check a redrawn scene by: its texts, the sizes of its pictures, and a digest of all pixels."""
    import hashlib

    digest = hashlib.sha256()
    for picture in scene.pictures:
        digest.update(picture.draw().tobytes())
    parts = [p if isinstance(p, str) else [p.width, p.height] for p in scene.parts]
    return {"parts": parts, "clip": scene.clip, "pixels": digest.hexdigest()[:16]}
