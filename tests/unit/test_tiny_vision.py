"""The scenes of the tiny vision-language model and its committed files, without torch: a split that holds, samples that redraw, one vocabulary."""
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tools.tinyvlm import scenes
from tools.tinyvlm.export import read
from tools.tinyvlm.prompts import conversation, prompt, tokenizer

MODELS = Path(__file__).resolve().parents[2] / "fixtures" / "models"
ORACLE = json.loads((MODELS / "tinyvlm.json").read_text(encoding="utf-8"))


def combinations(scene):
    return [(s.colour, s.shape, p.cell_of(s)) for p in scene.pictures for s in p.shapes]


@pytest.mark.parametrize("make", [scenes.one, scenes.several, scenes.two, scenes.moving, scenes.turning], ids=lambda f: f.__name__)
def test_no_training_picture_shows_a_held_out_combination_and_every_held_out_scene_does(make):
    r = np.random.default_rng(3)
    for _ in range(150):
        size = scenes.pick(r, scenes.SIZES)
        assert not any(scenes.held_out(*c) for c in combinations(make(r, "train", size)))
        held = [scenes.held_out(*c) for c in combinations(make(r, "held-out", size))]
        assert any(held) if make in (scenes.moving, scenes.turning) else all(held)


def test_every_stored_sample_is_redrawn_to_the_pixel_and_asks_what_was_asked():
    assert len(ORACLE["samples"]) >= 150
    for sample in ORACLE["samples"]:
        scene, question = scenes.sample(sample["kind"], sample["seed"])
        assert (question.text, question.answer) == (sample["question"], sample["answer"])
        assert {key: sample[key] for key in ("parts", "clip", "pixels")} == scenes.as_json(scene)
        assert all(p.width % scenes.CELL == 0 and p.height % scenes.CELL == 0 for p in scene.pictures)


def test_the_weights_are_those_the_figures_are_of():
    for name, digest in ORACLE["weights"].items():
        assert hashlib.sha256((MODELS / name).read_bytes()).hexdigest() == digest


def test_the_suite_is_what_is_right_nine_times_of_ten():
    assert ORACLE["suite"] == [kind for kind, figure in ORACLE["accuracy"].items() if figure >= 0.9]
    assert {s["kind"] for s in ORACLE["samples"]} == set(ORACLE["suite"])


def test_the_file_holds_the_vocabulary_the_model_was_trained_with():
    tok, (weights, stored) = tokenizer(), read(MODELS, "f16")
    assert stored.tokens == tok.tokens
    assert sum(x.size for x in weights.values()) < 1_700_000
    for sample in ORACLE["samples"]:
        assert tok.decode(sample["tokens"]) == sample["said"]
        assert tok.encode(sample["said"]) == sample["tokens"]


def test_every_answer_is_one_text_for_both_directions_of_the_tokenizer():
    tok = tokenizer()
    for text in ["<|im_start|>user\nWhere is it?<|im_end|>\n", "[0m1.50s]", "  two  spaces\n\n", "déjà vu 猫 🦊", "it's 12"]:
        assert tok.decode(tok.encode(text)) == text


def test_positions_of_a_grid_are_rows_and_columns_and_the_text_goes_on_after_the_longer_side():
    tok = tokenizer()
    scene, question = scenes.sample("where", next(i for i in range(100) if scenes.sample("where", i)[0].pictures[0].height == 64 != scenes.sample("where", i)[0].pictures[0].width))
    e = prompt(tok, scene, question)
    start = e.ids.index(tok.image)
    grid = e.positions[start : start + 12]
    assert grid == [(start, start + y, start + x) for y in range(4) for x in range(3)]
    assert e.positions[start + 12] == (start + 4,) * 3


def test_moved_axes_move_the_answers_with_them():
    place = scenes.Question("where", "", "top left")
    assert [scenes.turned_answer(place, turn) for turn in (0, 1, 2, 3, 4)] == ["top left", "top right", "bottom left", "bottom right", "top left"]
    way = scenes.Question("direction", "", "left")
    assert [scenes.turned_answer(way, turn) for turn in (0, 1, 2, 4, 5)] == ["left", "right", "left", "up", "down"]


def test_labels_name_what_a_token_shows():
    ground = scenes.Picture(48, 48, "black", (0, 0, 0), (scenes.Shape("red", "square", (255, 0, 0), 8, 8, 7),))
    assert ground.labels().tolist() == [1 + scenes.NAMES.index("red") * 3 + 1, *[20] * 8]


def test_conversations_are_a_function_of_the_seed():
    tok = tokenizer()

    def ids(seed):
        r = np.random.default_rng(seed)
        return [conversation(r, tok, scenes.moving(r, "train", (48, 48))).ids for _ in range(5)]

    assert ids(1) == ids(1) != ids(2)
