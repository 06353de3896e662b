"""Photographs go the whole way through the trained tiny model: to the bit what mtmd makes of them, whatever it may say about them."""
from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from photographs import FOLDER, PHOTOGRAPHS

from pylloyal import Image, Model, PlaceholderPart, Projector, Prompt, Sampling
from pylloyal.sources.chat import chat

ROOT = Path(__file__).resolve().parents[2]
MODEL, MMPROJ = (ROOT / "fixtures" / "models" / name for name in ("tinyvlm-f16.gguf", "mmproj-tinyvlm-f16.gguf"))
Logits = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def eyes() -> Iterator[Projector]:
    with Model(MODEL) as model, model.projector(MMPROJ, n_threads=1) as projector:
        yield projector


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.jpg"


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_a_photograph_is_to_the_bit_what_mtmd_makes_of_it(eyes: Projector, name: str, tmp_path: Path) -> None:
    """The cat and the rocket are scaled by the engine: unlike the training pictures their sides are no multiples of 16."""
    program = sorted((ROOT / "build").glob("*/raw_media*"))
    if not program:
        pytest.fail("raw_media is not built; `python3 tools/bootstrap.py lib` builds it (preset native)")
    image = Image(path_of(name))
    (tmp_path / "rgb").write_bytes(image.pixels.tobytes())
    width, height = image.report.size
    done = subprocess.run([program[0], MODEL, MMPROJ, tmp_path / "logits", "63", "t:look: ", f"i:{width}:{height}:{tmp_path / 'rgb'}", "t: what is it?"], capture_output=True, text=True, timeout=120, check=True)
    with eyes.model.store(n_ctx=1024, n_batch=63, n_threads=1, flash_attn=True) as store, Prompt(eyes, ["look: ", image, " what is it?"]) as prompt, store.root() as root:
        root.prefill(prompt)
        quote = prompt.quote()
        assert (root.position, root.cells_own, root.slack) == (quote.n_pos, quote.n_cells, quote.slack)
        assert root.position == int(done.stdout)
        assert np.array_equal(root.logits(), np.fromfile(tmp_path / "logits", np.float32))
        with Prompt(eyes, ["look: ", PlaceholderPart(width, height), " what is it?"]) as counted:
            assert (counted.quote().n_cells, counted.quote().n_pos) == (quote.n_cells, quote.n_pos)


def test_questions_fork_a_photograph(eyes: Projector) -> None:
    """One encoder run for each; a fork answers as one who read it all alone; another picture is another answer's ground."""
    questions = ["What colour is the shape?", "Where is the shape?", "What shape is it?"]
    seen: dict[str, Logits] = {}
    with eyes.model.store(n_ctx=4096, n_branches=8, n_threads=1) as store:
        for name in PHOTOGRAPHS:
            image = Image(path_of(name))
            prompts = [chat(eyes, [{"role": "user", "content": [image, question]}]) for question in questions]
            n = prompts[0].atoms.index(image) + 1
            runs = eyes.statistics().n_encodes
            with store.root(sampling=Sampling.greedy()) as root, prompts[0].prompt(0, n) as shared:
                root.prefill(shared)
                seen[name] = root.logits()
                assert eyes.statistics().n_encodes == runs + 1
                forks = root.fork(len(questions))
                store.prefill([(fork, [atom for atom in prompt.atoms[n:] if isinstance(atom, int)]) for fork, prompt in zip(forks, prompts, strict=True)])
                answers = store.tick(forks, n_steps=8).tokens
                assert store.pressure().cells_used == shared.quote().n_cells + sum(fork.cells_own for fork in forks)
                assert eyes.statistics().n_encodes == runs + 1
            for prompt, answer in zip(prompts, answers, strict=True):
                with store.root(sampling=Sampling.greedy()) as alone, prompt.prompt() as whole:
                    alone.prefill(whole)
                    assert store.tick([alone], n_steps=8).tokens[0] == answer
    for i, a in enumerate(seen.values()):
        assert not any(np.array_equal(a, b) for b in list(seen.values())[i + 1 :])


def test_the_turned_file_is_seen_as_its_upright_copy(eyes: Projector) -> None:
    turned = Image(path_of("cat"))
    assert turned.report.orientation == 6
    upright, as_stored = io.BytesIO(), io.BytesIO()
    PIL.Image.fromarray(turned.pixels).save(upright, "PNG")
    with PIL.Image.open(path_of("cat")) as file:  # what one gets who does not look at the orientation
        PIL.Image.fromarray(np.asarray(file.convert("RGB"))).save(as_stored, "PNG")
    found = []
    with eyes.model.store(n_ctx=1024, n_threads=1) as store:
        for image in (turned, Image(upright.getvalue()), Image(as_stored.getvalue())):
            with store.root() as root, Prompt(eyes, [image]) as prompt:
                root.prefill(prompt)
                found.append((prompt.segments(), root.logits()))
    (segments, logits), (same_segments, same_logits), (other_segments, other_logits) = found
    assert segments == same_segments
    assert np.array_equal(logits, same_logits)
    assert segments != other_segments  # rows and columns change places
    assert not np.array_equal(logits, other_logits)
