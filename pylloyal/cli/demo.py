"""One picture and one clip, each encoded once and questioned by many forks, with a model of 1.6 million parameters that can really see
coloured shapes. Everything it needs is in the package; nothing is fetched.
"""
from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import errors
from .interrupts import Interrupts
from .terminal import Terminal, plural

if TYPE_CHECKING:
    from ..kernel.parts import PartSource
    from ..kernel.projector import Projector

PACKAGE = Path(__file__).resolve().parents[1]
MODELS = (PACKAGE / "models", PACKAGE.parent / "fixtures" / "models")  # of a wheel, of a clone
PICTURE = [("What colour is the shape?", "blue"), ("What shape is it?", "square"), ("Where is the shape?", "top right"), ("What colour is the background?", "white")]
CLIP = [("Which way does it move?", "right"), ("What colour is the shape?", "green")]


def model_path(name: str) -> Path:
    """Where a file of the demo's model is, or would be in a wheel."""
    return next((path for folder in MODELS if (path := folder / name).is_file()), MODELS[0] / name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", type=Path, default=model_path("tinyvlm-f16.gguf"), help="the text model (default: the one that comes with pylloyal)")
    parser.add_argument("--mmproj", metavar="P", type=Path, default=model_path("mmproj-tinyvlm-f16.gguf"), help="its projector")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where the picture, the clip and its contact sheet are written (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Draw, encode once, ask, and hold the answers to the truth."""
    from ..kernel.model import Model
    from ..sources.image import Image
    from ..sources.sheet import contact_sheet
    from ..sources.video import Video
    from ..sources.write import write_clip, write_picture

    for path in (args.model, args.mmproj):
        if not path.is_file():
            raise errors.KernelIOError(f"{path} is not there; the demo's model comes with the wheel, and is in fixtures/models of the repository: name it with --model and --mmproj")
    folder = args.out or Path(tempfile.mkdtemp(prefix="pylloyal-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    image_path, clip_path, sheet_path = folder / "picture.png", folder / "clip.mkv", folder / "clip.png"
    write_picture(image_path, picture_pixels())
    write_clip(clip_path, clip_frames())
    picture, clip = Image(image_path), Video(clip_path, fps=1, stamp_s=0)
    write_picture(sheet_path, np.asarray(contact_sheet([(f"{frame.time:.2f} s", frame.pixels) for frame in clip.frames])))
    interrupts.check()
    with Model(args.model) as model, model.projector(args.mmproj, n_threads=1) as projector:
        first = _question(projector, picture, PICTURE)
        interrupts.check()
        second = _question(projector, clip, CLIP)
    told = {
        "encoder_runs": first["encoder_runs"], "image": str(image_path), "clip": str(sheet_path), "clip_file": str(clip_path), "clip_encoder_runs": second["encoder_runs"],
        "answers": first["answers"] + second["answers"], "cells": first["cells"], "slack": first["slack"], "clip_cells": second["cells"], "clip_slack": second["slack"],
    }
    right = all(answer["text"] == answer["expected"] for answer in told["answers"])
    if args.json:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        _print(told, first, second)
    return 0 if right else 1


def _question(projector: Projector, source: PartSource, questions: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """All questions about one medium: encoded and decoded once, a fork for each."""
    from ..kernel.sampling import Sampling
    from ..sources.chat import chat

    prompts = [chat(projector, [{"role": "user", "content": [source, question]}]) for question, _ in questions]
    n = next(i for i, atoms in enumerate(zip(*(p.atoms for p in prompts), strict=False)) if len({id(a) if not isinstance(a, int) else a for a in atoms}) > 1)
    before = projector.statistics().n_encodes
    with projector.model.store(n_ctx=1024, n_branches=len(questions) + 1, n_threads=1) as store, store.root(sampling=Sampling.greedy()) as root, prompts[0].prompt(0, n) as shared:
        root.prefill(shared)
        cells = store.pressure().cells_used
        forks = root.fork(len(questions))
        store.prefill([(fork, [atom for atom in prompt.atoms[n:] if isinstance(atom, int)]) for fork, prompt in zip(forks, prompts, strict=True)])
        rows = store.tick(forks, n_steps=8).tokens
        return {
            "encoder_runs": projector.statistics().n_encodes - before, "blocks": shared.quote().n_media, "cells": cells, "slack": root.slack, "used": store.pressure().cells_used,
            "answers": [{"question": question, "text": projector.model.vocab.decode(tokens), "expected": expected} for (question, expected), tokens in zip(questions, rows, strict=True)],
        }


def _print(told: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    out = Terminal(sys.stdout)
    lines = []
    for title, path, part in (("picture", told["image"], first), ("clip", told["clip"], second)):
        lines.append(f"{title}: {path}")
        lines.append(f"  encoded in {plural(part['encoder_runs'], 'run')}, {part['cells']} cells shared by {len(part['answers'])} forks (slack {part['slack']}), {part['used']} cells in all")
        for answer in part["answers"]:
            lines.append(f"  {answer['question']:<34}{answer['text']:<12}{'' if answer['text'] == answer['expected'] else 'WRONG: '}{answer['expected']}")
    out.write("\n".join(lines) + "\n")


def _canvas() -> npt.NDArray[np.uint8]:
    return np.full((48, 48, 3), 245, np.uint8)


def picture_pixels() -> npt.NDArray[np.uint8]:
    """A blue square at the top right, on white."""
    pixels = _canvas()
    pixels[2:14, 34:46] = (50, 80, 220)
    return pixels


def clip_frames() -> list[npt.NDArray[np.uint8]]:
    """Six frames of a green disc that crosses from left to right."""
    y, x = np.ogrid[:48, :48]
    frames = [_canvas() for _ in range(6)]
    for i, pixels in enumerate(frames):
        pixels[(x + 0.5 - 48 * (0.2 + 0.12 * i)) ** 2 + (y + 0.5 - 24) ** 2 <= 7**2] = (0, 128, 0)
    return frames
