"""Sound through tiny real projectors that hear: exact counts, mtmd's own bits, forks, files, conversations."""
from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import media_fixtures as made
import numpy as np
import numpy.typing as npt
import pytest
import tiny_models

from pylloyal import Audio, Image, Model, PixelPart, Projector, Prompt, Sampling, SoundPart, Store, errors
from pylloyal.sources.chat import chat

# Thirty rows of Whisper's in one; and every two, on a model of M-RoPE.
EARS = {"ultravox": ("tiny-llama", "mmproj-tiny-ultravox", 50), "qwen2a": ("tiny-qwen2vl", "mmproj-tiny-qwen2a", 750)}
RATE = 16_000
ROOT = Path(__file__).resolve().parents[2]
Logits = np.ndarray[Any, np.dtype[np.float32]]
CHAT = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


class Ear:
    """A tiny model with its projector."""

    def __init__(self, name: str, folder: Path) -> None:
        model, projector, self.n_rows = EARS[name]
        self.name = name
        self.model_path = tiny_models.write(folder / f"{model}.gguf", model, template=CHAT)
        self.projector_path = tiny_models.write(folder / f"{projector}.gguf", projector)
        self.model = Model(self.model_path)
        self.projector = Projector(self.model, self.projector_path, n_threads=1)

    def store(self, **options: Any) -> Store:
        return self.model.store(**{"n_ctx": 4096, "n_branches": 6, "n_batch": 63, "n_threads": 1, **options})

    def prompt(self, *items: Any, **options: Any) -> Prompt:
        return Prompt(self.projector, items, **options)

    @property
    def n_encodes(self) -> int:
        return self.projector.statistics().n_encodes

    def close(self) -> None:
        self.projector.close()
        self.model.close()


@pytest.fixture(scope="module", params=EARS)
def ear(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ear]:
    one = Ear(request.param, tmp_path_factory.mktemp("ears"))
    yield one
    one.close()


def noise(seconds: float, salt: int = 0) -> npt.NDArray[np.float32]:
    n = max(1, round(seconds * RATE))
    return np.random.default_rng([n, salt]).uniform(-0.5, 0.5, n).astype(np.float32)


def sound(seconds: float, salt: int = 0, **options: Any) -> SoundPart:
    return SoundPart(noise(seconds, salt), **options)


def replay(ear: Ear, *items: Any) -> Logits:
    with ear.store() as store, ear.prompt(*items) as prompt, store.root() as root:
        root.prefill(prompt)
        return root.logits()


# Half a minute and less is one stretch. Whisper's own padding makes two of it from 29.99 s on.
@pytest.mark.parametrize(("seconds", "stretches"), [(2 / RATE, 1), (0.01, 1), (1.0, 1), (29.5, 1), (30.0, 2), (61.0, 3)])
def test_a_quote_is_the_charge(ear: Ear, seconds: float, stretches: int) -> None:
    with ear.store() as store, ear.prompt("a", sound(seconds), "b") as prompt, store.root() as root:
        before, quote = ear.projector.statistics(), prompt.quote()
        rows = [s for s in prompt.segments() if s["kind"] == "rows"]
        assert [(s["n_cells"], s["n_pos"], s["non_causal"]) for s in rows] == [(ear.n_rows, ear.n_rows, False)] * stretches
        sections = 4 if before.is_mrope else 1
        assert all(s["positions"] == list(range(ear.n_rows)) * sections for s in rows)
        assert quote.n_media == stretches
        outcome = store.decode_prompts([(root, prompt)])[0]
        assert (outcome.error, outcome.n_segments, outcome.n_cells) == (None, quote.n_segments, quote.n_cells)
        assert (root.position, root.cells_own, root.slack, store.pressure().cells_used) == (quote.n_pos, quote.n_cells, 0, quote.n_cells)
        after = ear.projector.statistics()
        assert (after.n_encodes - before.n_encodes, after.n_prepared - before.n_prepared) == (stretches, 1)
        assert np.isfinite(root.logits()).all()


MIXES: dict[str, list[Any]] = {"text and sound": ["the sea ", 1.5, " is"], "sound first": [2.0, "red"], "two sounds": ["a ", 1.0, "b ", 3.0, " c"],
                               "two at once": ["a", 1.0, 0.5, "b"], "more than a minute": ["the ", 61.0, " sea"], "a click": ["the ", 0.0005, " sea"]}


@pytest.mark.parametrize("mix", MIXES)
def test_logits_are_those_of_mtmds_own_whole_path(ear: Ear, mix: str, tmp_path: Path) -> None:
    program = sorted((ROOT / "build").glob("*/raw_media*"))
    if not program:
        pytest.fail("raw_media is not built; `python3 tools/bootstrap.py lib` builds it (preset native)")
    items: list[Any] = []
    parts: list[str] = []
    for i, item in enumerate(MIXES[mix]):
        if isinstance(item, str):
            items.append(item)
            parts.append(f"t:{item}")
        else:
            items.append(sound(item, i))
            (tmp_path / f"{i}.f32").write_bytes(items[-1].samples.tobytes())
            parts.append(f"a:{tmp_path / f'{i}.f32'}")
    out = tmp_path / "logits"
    done = subprocess.run([program[0], ear.model_path, ear.projector_path, out, "63", *parts], capture_output=True, text=True, timeout=120, check=True)
    with ear.store(flash_attn=True) as store, ear.prompt(*items) as prompt, store.root() as root:
        root.prefill(prompt)
        assert root.position == prompt.quote().n_pos == int(done.stdout)
        assert np.array_equal(root.logits(), np.fromfile(out, np.float32))


def test_forks_share_what_was_heard(ear: Ear) -> None:
    tail = [70, 71, 72, 73]
    with ear.store() as store, ear.prompt("the sea ", sound(1.5), " is") as prompt:
        root = store.root(sampling=Sampling.greedy())
        before = ear.n_encodes
        root.prefill(prompt)
        forks = root.fork(3)
        store.prefill([(fork, [*tail, 80 + i]) for i, fork in enumerate(forks)])
        assert ear.n_encodes == before + 1
        assert store.pressure().cells_used == prompt.quote().n_cells + 15
        logits = [fork.logits() for fork in forks]
        for i, found in enumerate(logits):
            assert np.array_equal(found, replay(ear, "the sea ", sound(1.5), " is", [*tail, 80 + i]))
            assert not np.array_equal(found, replay(ear, "the sea ", sound(1.5, 1), " is", [*tail, 80 + i]))
        root.fast_forward(forks[1])
        assert np.array_equal(root.logits(), logits[1])


def test_text_follows_a_sound_that_came_last(ear: Ear) -> None:
    """Its last row has logits too, which mtmd's own path does not give."""
    words = ear.model.vocab.encode(" is it", add_special=False)
    with ear.store() as store, ear.prompt("red ", sound(0.3)) as prompt:
        root = store.root(sampling=Sampling(seed=3))
        root.prefill(prompt)
        with ear.store() as other:
            back = other.from_bytes(root.to_bytes())
            assert (back.position, back.cells_own) == (root.position, root.cells_own)
            for _ in range(4):
                token = root.sample()
                assert back.sample() == token
                root.commit(token)
                back.commit(token)
                assert np.array_equal(root.logits(), back.logits())
        again = store.root()
        again.prefill(prompt)
        again.prefill(words)
        assert np.array_equal(again.logits(), replay(ear, "red ", sound(0.3), words))


def test_a_file_is_heard_as_its_samples(ear: Ear, tmp_path: Path) -> None:
    """Decoded to the projector's rate; a stretch of it, and a name for its content."""
    path = tmp_path / "sound.odd"
    path.write_bytes(made.tone(1.5, rate=8000))
    audio = Audio(path)
    whole = replay(ear, "hear ", audio, " now")
    assert audio.report is not None
    assert (audio.report.sample_rate, audio.report.n_damaged) == (8000, 0)
    assert audio.report.length_s == pytest.approx(1.5, abs=0.01)
    samples = Audio(path).decode(RATE)
    assert samples.size == pytest.approx(1.5 * RATE, abs=RATE // 100)
    assert np.array_equal(whole, replay(ear, "hear ", SoundPart(samples), " now"))
    assert np.array_equal(replay(ear, "hear ", Audio(path, start=0.5, end=1.0), " now"), replay(ear, "hear ", SoundPart(samples[RATE // 2 : RATE]), " now"))
    assert not np.array_equal(whole, replay(ear, "hear ", Audio(path, end=1.0), " now"))
    with Projector(ear.model, ear.projector_path, n_threads=1, cache_bytes=10_000_000) as kept, ear.store() as store:
        for _ in range(2):
            with Prompt(kept, ["hear ", Audio(path.read_bytes()), " now"]) as prompt, store.root() as root:
                root.prefill(prompt)
                assert np.array_equal(root.logits(), whole)
        told = kept.statistics()
        assert (told.n_encodes, told.n_cache_hits, told.n_prepared) == (1, 1, 1)


def test_a_conversation_with_sound(ear: Ear, tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    path.write_bytes(made.tone(0.5, rate=RATE))
    made_of_path = chat(ear.projector, [{"role": "user", "content": ["what is this? ", {"type": "audio", "audio": path}, " and <|im_end|>?"]}])
    made_of_object = chat(ear.projector, [{"role": "user", "content": ["what is this? ", Audio(path), " and <|im_end|>?"]}])
    with ear.store() as store, made_of_path.prompt() as prompt, made_of_object.prompt() as same, store.root() as a, store.root() as b:
        assert prompt.quote().n_media == 1
        a.prefill(prompt)
        b.prefill(same)
        assert np.array_equal(a.logits(), b.logits())
        texts = [s["tokens"] for s in prompt.segments() if s["kind"] == "text"]
        end = ear.model.vocab.encode("<|im_end|>", parse_special=True, add_special=False)[0]
        assert [end in text for text in texts] == [False, True]
        assert texts[-1].count(end) == 1  # the turn's own, not the user's words


def test_what_it_cannot_hear_is_refused_by_name(ear: Ear, tmp_path: Path) -> None:
    before = ear.projector.statistics()
    assert (before.has_vision, before.has_audio, before.sample_rate) == (False, True, RATE)
    with pytest.raises(errors.MediaError, match="one sample") as caught:  # the engine would abort
        ear.prompt("a", SoundPart(np.zeros(1, np.float32)))
    assert (caught.value.index, caught.value.need, caught.value.have) == (1, 2, 1)
    for wrong in (np.nan, np.inf, -np.inf, 1e30, -70_000.0):  # logits that are no numbers, otherwise
        samples = noise(0.1)
        samples[700] = wrong
        with pytest.raises(errors.MediaError, match="no number, or beyond 65536") as caught:
            ear.prompt("a", SoundPart(samples))
        assert caught.value.index == 1
    path = tmp_path / "loud.wav"
    for wrong in (1e30, np.nan, np.inf):
        loud = noise(0.1)
        loud[700] = wrong
        path.write_bytes(b"RIFF" + struct.pack("<I", 36 + loud.nbytes) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 3, 1, RATE, 4 * RATE, 4, 32) + b"data" + struct.pack("<I", loud.nbytes) + loud.tobytes())
        with pytest.raises(errors.MediaError, match=r"loud\.wav: .*no number, or beyond 65536"):
            ear.prompt(Audio(path))
    with pytest.raises(errors.ProjectorMismatchError, match="does not see") as unseen:
        ear.prompt("a", PixelPart(np.zeros((8, 8, 3), np.uint8)))
    assert unseen.value.index == 1
    picture = tmp_path / "picture.png"
    picture.write_bytes(made.saved(made.gradient(), "PNG"))
    with pytest.raises(errors.ProjectorMismatchError, match="does not see"):
        ear.prompt(Image(picture))
    path = tmp_path / "broken.wav"
    path.write_bytes(made.tone(0.5)[:40])
    with pytest.raises(errors.MediaError, match=r"broken\.wav"):
        ear.prompt(Audio(path))
    assert ear.projector.statistics() == before


def test_sound_and_a_text_model_that_was_not_made_for_it(ear: Ear, tmp_path: Path) -> None:
    with Model(tiny_models.write(tmp_path / "wide.gguf", "tiny-rwkv7")) as wide, pytest.raises(errors.ProjectorMismatchError) as caught:
        Projector(wide, ear.projector_path)
    assert "64" in str(caught.value)
    assert "128" in str(caught.value)
