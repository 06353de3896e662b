"""The trained tiny model sees through pylloyal what it sees through the framework it was trained in: held-out pictures, pairs and clips, on a
trunk and on its forks."""
from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pylloyal import Image, Model, PixelPart, Projector, Prompt, Sampling, Store, TextPart, Video
from tools.tinyvlm import scenes

MODELS = Path(__file__).resolve().parents[2] / "fixtures" / "models"
ORACLE = json.loads((MODELS / "tinyvlm.json").read_text(encoding="utf-8"))
SAMPLES = ORACLE["samples"]
GREEDY = Sampling.greedy()


@pytest.fixture(scope="module")
def eyes() -> Iterator[Projector]:
    with Model(MODELS / "tinyvlm-f16.gguf") as model, model.projector(MODELS / "mmproj-tinyvlm-f16.gguf", n_threads=1) as projector:
        yield projector


@pytest.fixture
def store(eyes: Projector) -> Iterator[Store]:
    with eyes.model.store(n_ctx=1024, n_branches=16, n_threads=1) as opened:
        yield opened


def special(text: str) -> TextPart:
    return TextPart(text, special=True)


def before(scene: scenes.Scene) -> list[Any]:
    """The user's turn up to the question."""
    parts: list[Any] = [special("<|im_start|>user\n")]
    for part in scene.parts:
        parts.append(part if isinstance(part, str) else PixelPart(part.draw(), is_frame=scene.clip))
    return parts


def after(question: str) -> list[Any]:
    return [question, special("<|im_end|>\n<|im_start|>assistant\n")]


def ask(store: Store, eyes: Projector, items: list[Any]) -> list[int]:
    with store.root(sampling=GREEDY) as root, Prompt(eyes, items, add_special=False) as prompt:
        quote = prompt.quote()
        used = store.pressure().cells_used
        root.prefill(prompt)
        assert (store.pressure().cells_used - used, root.position, root.slack) == (quote.n_cells, quote.n_pos, quote.slack)
        return store.tick([root], n_steps=8).tokens[0]


def said(store: Store, eyes: Projector, items: list[Any]) -> str:
    return eyes.model.vocab.decode(ask(store, eyes, items))


@pytest.mark.parametrize("kind", ORACLE["suite"])
def test_answers_are_those_of_the_training_framework(store: Store, eyes: Projector, kind: str) -> None:
    """Token for token; and right as often, on the same held-out samples."""
    mine = [s for s in SAMPLES if s["kind"] == kind]
    right = 0
    for sample in mine:
        scene, question = scenes.sample(kind, sample["seed"])
        tokens = ask(store, eyes, [*before(scene), *after(question.text)])
        assert tokens == sample["tokens"], (kind, sample["seed"])
        right += eyes.model.vocab.decode(tokens) == sample["answer"]
    assert right >= 0.9 * len(mine)
    assert right == sum(s["said"] == s["answer"] for s in mine)


@pytest.mark.parametrize("kind", ["colour", "same colour", "direction", "clip where"])
def test_forks_answer_as_the_trunk_and_the_encoder_ran_once(store: Store, eyes: Projector, kind: str) -> None:
    for seed in range(4):
        scene, _ = scenes.sample(kind, seed)
        alone = [ask(store, eyes, [*before(scene), *after(question.text)]) for question in scene.questions]
        with store.root(sampling=GREEDY) as root, Prompt(eyes, before(scene), add_special=False) as prompt:
            runs = eyes.statistics().n_encodes
            root.prefill(prompt)
            quote = prompt.quote()
            assert eyes.statistics().n_encodes - runs == quote.n_media
            forks = root.fork(len(scene.questions))
            with Prompt(eyes, after("x"), add_special=False) as one:
                overhead = one.quote().n_cells
            for fork, question in zip(forks, scene.questions, strict=True):
                with Prompt(eyes, after(question.text), add_special=False) as rest:
                    fork.prefill(rest)
                    assert fork.cells_own == rest.quote().n_cells >= overhead
            assert eyes.statistics().n_encodes - runs == quote.n_media
            assert store.pressure().cells_used == quote.n_cells + sum(fork.cells_own for fork in forks)
            assert all(fork.slack == quote.slack for fork in forks)
            assert store.tick(forks, n_steps=8).tokens == alone


def test_prune_take_over_save_and_load_do_not_blind_it(store: Store, eyes: Projector) -> None:
    scene, _ = scenes.sample("where", 1)
    expected = {q.text: ask(store, eyes, [*before(scene), *after(q.text)]) for q in scene.questions}
    with store.root(sampling=GREEDY) as root, Prompt(eyes, before(scene), add_special=False) as prompt:
        child = root.fork()
        child.prefill(prompt)
        root.fast_forward(child)
        saved = root.to_bytes()
        for text, tokens in expected.items():
            with root.fork() as fork, Prompt(eyes, after(text), add_special=False) as rest:
                fork.prefill(rest)
                assert store.tick([fork], n_steps=8).tokens[0] == tokens
        with store.from_bytes(saved) as loaded:
            assert loaded.slack == root.slack == prompt.quote().slack > 0
            for text, tokens in expected.items():
                with loaded.fork() as fork, Prompt(eyes, after(text), add_special=False) as rest:
                    fork.prefill(rest)
                    assert store.tick([fork], n_steps=8).tokens[0] == tokens


def test_a_rotated_copy_is_seen_upright_and_a_mirrored_one_is_not(store: Store, eyes: Projector) -> None:
    import PIL.Image

    turned = {3: PIL.Image.Transpose.ROTATE_180, 6: PIL.Image.Transpose.ROTATE_90, 8: PIL.Image.Transpose.ROTATE_270}
    mirrored = 0
    for seed in range(12):
        scene, question = scenes.sample("where", seed)
        picture = scene.pictures[0].draw()
        expected = said(store, eyes, [*before(scene), *after(question.text)])
        for orientation, how in turned.items():
            exif = PIL.Image.Exif()
            exif[0x0112] = orientation
            file = io.BytesIO()
            PIL.Image.fromarray(picture).transpose(how).save(file, "PNG", exif=exif)
            image = Image(file.getvalue())
            assert image.report.orientation == orientation
            assert np.array_equal(image.pixels, picture)
            assert said(store, eyes, [special("<|im_start|>user\n"), image, *after(question.text)]) == expected
        if "left" in expected or "right" in expected:
            other = said(store, eyes, [special("<|im_start|>user\n"), PixelPart(picture[:, ::-1]), *after(question.text)])
            mirrored += ("left" in other) == ("right" in expected) and ("right" in other) == ("left" in expected)
    assert mirrored >= 5


def test_a_clip_from_a_file_is_seen_as_its_frames(store: Store, eyes: Projector, tmp_path: Path) -> None:
    """Encoded without loss, found by their own times, merged in pairs: the same tokens as from the pixels."""
    from pylloyal.sources.write import write_clip

    done = 0
    for seed in range(20):
        scene, question = scenes.sample("direction", seed)
        if scene.parts[-1] != "[0m0.00s]" and isinstance(scene.parts[2], str):
            continue  # laid out with other stamps than every five seconds
        if any(isinstance(part, str) and part not in ("Video:", "[0m0.00s]") for part in scene.parts):
            continue
        path, frames = tmp_path / f"{seed}.mkv", [p.draw() for p in scene.pictures]
        write_clip(path, frames)
        video = Video(path, fps=1, stamp_s=5.0 if "[0m0.00s]" in scene.parts else 0.0)
        assert [np.array_equal(a.pixels, b) for a, b in zip(video.frames, frames, strict=True)] == [True] * len(frames)
        assert ask(store, eyes, [special("<|im_start|>user\n"), video, *after(question.text)]) == ask(store, eyes, [*before(scene), *after(question.text)])
        done += 1
    assert done >= 4


def test_the_readmes_picture_program_runs(tmp_path: Path) -> None:
    """The second program of the README, as it stands there, on the demo's picture."""
    import re
    import subprocess
    import sys

    root = MODELS.parents[1]
    from pylloyal.cli import demo
    from pylloyal.sources.write import write_picture

    write_picture(tmp_path / "picture.png", demo.picture_pixels())
    program = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(encoding="utf-8"), re.S)[1]
    code = program.replace('"picture.png"', repr(str(tmp_path / "picture.png")))
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1:] == ["What colour is the shape? blue", "Where is the shape? top right"]


def test_the_demo_is_right_and_says_what_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pylloyal.cli import main

    assert main(["demo", "--json", "--out", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["encoder_runs"] == 1
    assert len(told["answers"]) == 6
    assert all(answer["text"] == answer["expected"] for answer in told["answers"])
    assert (told["cells"], told["slack"], told["clip_encoder_runs"], told["clip_slack"]) == (14, 6, 3, 18)
    for name in ("image", "clip"):
        assert Image(told[name]).report.format == "PNG"
