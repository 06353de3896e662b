"""Prompts of text, pictures, sound and rows on the stub engine: the quote is the charge, forks share what was encoded, and every failure says true things."""
from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from pylloyal import Branch, Embeddings, Model, PixelPart, PlaceholderPart, Projector, Prompt, Sampling, SoundPart, Store, TextPart, errors, live_objects
from pylloyal.kernel.parts import RowPart, TokenPart
from tests.unit.test_kernel import NO_IDS

KINDS = ["", "mrope=1", "mrope=1;merge=2", "non_causal=1"]
Logits = np.ndarray[Any, np.dtype[np.float32]]


def picture(width: int, height: int, salt: int = 0, **options: Any) -> PixelPart:
    return PixelPart(np.random.default_rng([width, height, salt]).integers(0, 256, (height, width, 3), np.uint8), **options)


def sound(n: int) -> SoundPart:
    return SoundPart(np.random.default_rng(n).uniform(-1, 1, n).astype(np.float32))


def rows(n: int, width: int = 4) -> Any:
    return np.random.default_rng(n).normal(size=(n, width)).astype(np.float32)


class Eye:
    """A stub model, its projector, and stores of it."""

    def __init__(self, options: str) -> None:
        self.model = Model("stub:" + options)
        self.projector = Projector(self.model, "stub:")

    def store(self, **options: Any) -> Store:
        return self.model.store(**{"n_ctx": 512, "n_branches": min(12, options.get("n_batch", 12)), "n_batch": 32, "n_threads": 1, **options})

    def prompt(self, *items: Any, **options: Any) -> Prompt:
        return Prompt(self.projector, items, **options)

    @property
    def n_encodes(self) -> int:
        return self.projector.statistics().n_encodes

    def close(self) -> None:
        self.projector.close()
        self.model.close()


@contextmanager
def seeing(options: str = "mrope=1") -> Iterator[Eye]:
    eye = Eye(options)
    try:
        yield eye
    finally:
        eye.close()


@pytest.fixture
def eye() -> Iterator[Eye]:
    with seeing() as one:
        yield one


def replay(eye: Eye, *items: Any, **options: Any) -> Logits:
    """Logits after these items in one prompt, in a store of its own."""
    with eye.store(**options) as store, eye.prompt(*items) as prompt:
        root = store.root()
        root.prefill(prompt)
        return root.logits()


def books(branch: Branch) -> tuple[int, int, int]:
    return branch.position, branch.cells_own + branch.cells_inherited, branch.slack


# ------------------------------------------------------------------------------------------------------- the quote is the charge


def every_kind() -> list[Any]:
    return ["some words", [70, 71, 72], picture(20, 30), sound(250), Embeddings(rows(5)), Embeddings(rows(6), positions=np.array([0, 0, 1, 1, 1, 2])), TextPart("<eot>x", special=True), picture(8, 8, is_frame=True)]


@pytest.mark.parametrize("options", KINDS)
def test_a_quote_is_the_charge_for_every_mix_of_parts(options: str) -> None:
    with seeing(options) as eye:
        for n in (1, 2, 3):
            for mix in itertools.permutations(every_kind(), n) if n < 3 else itertools.combinations(every_kind(), 3):
                with eye.store() as store, eye.prompt(*mix) as prompt:
                    quote, before = prompt.quote(), eye.n_encodes
                    segments = prompt.segments()
                    assert eye.n_encodes == before  # nothing is encoded to count it
                    assert (quote.n_segments, quote.n_cells, quote.n_pos) == (len(segments), sum(s["n_cells"] for s in segments), sum(s["n_pos"] for s in segments))
                    assert quote.n_media == sum(s["kind"] == "rows" for s in segments)
                    root = store.root()
                    outcome = store.decode_prompts([(root, prompt)])[0]
                    assert (outcome.error, outcome.n_segments, outcome.n_cells) == (None, quote.n_segments, quote.n_cells)
                    assert books(root) == (quote.n_pos, quote.n_cells, quote.slack)
                    assert store.pressure().cells_used == quote.n_cells
                    assert root.has_logits


def test_counts_follow_from_the_pixels() -> None:
    sizes = [(8, 8), (9, 8), (20, 30), (1, 1), (64, 3), (1, 400), (400, 1)]
    for options in KINDS:
        with seeing(options) as eye:
            for width, height in sizes:
                nx, ny = -(-width // 8), -(-height // 8)
                with eye.prompt(picture(width, height), add_special=False) as prompt:
                    quote = prompt.quote()
                    assert quote.n_cells == nx * ny
                    assert quote.n_pos == (max(nx, ny) if "mrope" in options else nx * ny)
                    assert quote.max_rows == (nx * ny if "non_causal" in options else 0)
                with eye.prompt(PlaceholderPart(width, height), add_special=False) as counted:
                    assert (counted.quote().n_cells, counted.quote().n_pos, counted.quote().is_decodable) == (quote.n_cells, quote.n_pos, False)


def test_positions_are_section_major_and_relative(eye: Eye) -> None:
    with eye.prompt("ab", picture(24, 16), "c", picture(8, 32), add_special=False) as prompt:
        first, second = [s["positions"] for s in prompt.segments() if s["kind"] == "rows"]
    assert first == [*[0] * 6, *[0, 0, 0, 1, 1, 1], *[0, 1, 2, 0, 1, 2], *[0] * 6]  # time, row, column, one more
    assert second == [*[0] * 4, *[0, 1, 2, 3], *[0] * 4, *[0] * 4]


def test_segments_say_which_parts_they_are_of(eye: Eye) -> None:
    with eye.prompt("ab", [70], picture(8, 8), "c", sound(100), Embeddings(rows(2))) as prompt:
        found = [(s["kind"], s["part"], s["n_parts"]) for s in prompt.segments()]
    assert found == [("text", 0, 2), ("rows", 2, 1), ("text", 3, 1), ("rows", 4, 1), ("rows", 5, 1)]


def test_text_of_several_parts_is_one_stretch(eye: Eye) -> None:
    with eye.prompt("ab", [70], "c") as prompt, eye.store() as store:
        assert prompt.segments()[0]["tokens"] == [eye.model.info.bos, 97, 98, 70, 99]
        root = store.root()
        assert root.prefill(prompt) == 1
        alone = store.root()
        alone.prefill([eye.model.info.bos, 97, 98, 70, 99])
        assert np.array_equal(root.logits(), alone.logits())


def test_control_tokens_in_text_are_inert_unless_asked_for(eye: Eye) -> None:
    with eye.prompt("<eot>", picture(8, 8), TextPart("<eot>", special=True), add_special=False) as prompt:
        assert [s.get("tokens") for s in prompt.segments()] == [list(b"<eot>"), None, [eye.model.info.eot]]


# ---------------------------------------------------------------------------------------------------------- slack and the tree


@pytest.mark.parametrize("options", KINDS)
def test_text_after_a_picture_stands_behind_its_positions(options: str) -> None:
    with seeing(options) as eye, eye.store() as store:
        root = store.root()
        with eye.prompt("look: ", picture(24, 16)) as prompt:
            root.prefill(prompt)
            n_pos, slack = prompt.quote().n_pos, prompt.quote().slack
        root.prefill([70, 71])
        root.commit(72)
        assert (root.position, root.slack) == (n_pos + 3, slack)
        assert np.array_equal(root.logits(), replay(eye, "look: ", picture(24, 16), [70, 71, 72]))
        if "mrope" in options:
            assert slack == 3
        # at other places the same tokens are other logits: the equality above means something
        assert not np.array_equal(root.logits(), replay(eye, "look: ", picture(24, 16), [69, 70, 71, 72]))


def test_several_pictures_in_one_prompt_and_in_several() -> None:
    items = ["a", picture(24, 16), "b", picture(8, 40), picture(16, 16), "c"]
    for options in KINDS:
        with seeing(options) as eye, eye.store() as store:
            root = store.root()
            for i, item in enumerate(items):
                with eye.prompt(item, add_special=i == 0) as prompt:
                    root.prefill(prompt)
            assert np.array_equal(root.logits(), replay(eye, *items))
            assert not np.array_equal(root.logits(), replay(eye, "a", picture(24, 16, 1), *items[2:]))


def test_forks_see_the_picture_and_it_is_encoded_once(eye: Eye) -> None:
    with eye.store() as store, eye.prompt("a", picture(40, 24)) as prompt:
        root = store.root()
        root.prefill(prompt)
        used, forks = store.pressure().cells_used, root.fork(6)
        assert store.pressure().cells_used == used
        for i, fork in enumerate(forks):
            assert fork.slack == root.slack == prompt.quote().slack == 10
            fork.prefill([80 + i, 81])
        assert eye.n_encodes == 1
        assert store.pressure().cells_used == used + 12
        logits = [fork.logits() for fork in forks]
    for i, found in enumerate(logits):
        assert np.array_equal(found, replay(eye, "a", picture(40, 24), [80 + i, 81]))


def test_slack_through_the_tree_operations(eye: Eye) -> None:
    with eye.store() as store, eye.prompt("a", picture(24, 16)) as first, eye.prompt(picture(40, 24), "b", add_special=False) as second:
        root = store.root()
        root.prefill(first)
        a, b = root.fork(2)
        a.prefill(second)
        b.prefill([70])
        both = first.quote().slack + second.quote().slack
        assert (root.slack, a.slack, b.slack) == (3, both, 3)
        grandchild = a.fork()
        grandchild.commit(71)
        assert grandchild.slack == both
        b.prune()
        a.fast_forward(grandchild)
        assert books(a) == (first.quote().n_pos + second.quote().n_pos + 1, first.quote().n_cells + second.quote().n_cells + 1, both)
        root.fast_forward(a)
        assert (root.slack, root.cells_own, root.cells_inherited) == (both, first.quote().n_cells + second.quote().n_cells + 1, 0)
        kept = root.fork()
        kept.commit(72)
        kept.retain_only()
        assert (kept.slack, kept.cells_own, kept.cells_inherited) == (both, first.quote().n_cells + second.quote().n_cells + 2, 0)
        assert store.pressure().cells_used == kept.cells_own
        assert np.array_equal(kept.logits(), replay(eye, "a", picture(24, 16), picture(40, 24), "b", [71, 72]))
        kept.reseed_kv([70, 71], [72])
        assert (kept.position, kept.cells_own, kept.slack) == (3, 3, 0)
        alone = store.root()
        alone.prefill([70, 71, 72])
        assert np.array_equal(kept.logits(), alone.logits())
        with eye.prompt(picture(24, 16), add_special=False) as third:
            kept.prefill(third)
        assert kept.slack == 3
        kept.prune()
        alone.prune()
        assert store.pressure().cells_used == 0


def test_a_fork_or_its_parent_goes_on_with_rows(eye: Eye) -> None:
    """Forks borrow until one of the two goes on, and rows are as good a reason as tokens."""
    prompt, words = eye.prompt(RowPart(rows(3)), add_special=False), [70, 71, 72]  # rows alone, no token before them
    with eye.store(n_branches=6) as store:
        def read(*steps: Any) -> Logits:
            with store.root() as fresh:
                for step in steps:
                    fresh.prefill(step)
                return fresh.logits().copy()

        root = store.root()
        root.prefill(words)
        child, other = root.fork(2)
        child.prefill(prompt)  # the child first
        root.prefill(prompt)  # and then the parent, from which one still borrows
        other.prefill([73])
        assert np.array_equal(child.logits(), read(words, prompt))
        assert np.array_equal(root.logits(), read(words, prompt))
        assert np.array_equal(other.logits(), read(words, [73]))


def test_pruning_a_fork_gives_back_a_whole_picture(eye: Eye) -> None:
    with eye.store() as store, eye.prompt(picture(40, 24), "b", add_special=False) as prompt:
        root = store.root()
        root.prefill([70])
        for _ in range(3):
            with root.fork() as fork:
                fork.prefill(prompt)
                assert store.pressure().cells_used == 1 + prompt.quote().n_cells
            assert store.pressure().cells_used == 1
        root.prefill(prompt)
        assert np.array_equal(root.logits(), replay(eye, [70], picture(40, 24), "b", )) is False  # that one begins with a special token
        again = store.root()
        again.prefill([70])
        again.prefill(prompt)
        assert np.array_equal(root.logits(), again.logits())


def test_a_saved_branch_keeps_its_slack(eye: Eye) -> None:
    with eye.store() as store, eye.prompt("a", picture(24, 16), "b") as prompt:
        root = store.root(sampling=Sampling(seed=3))
        root.prefill(prompt)
        saved = root.to_bytes()
        with eye.store() as other:
            back = other.from_bytes(saved)
            assert books(back) == books(root)
            assert other.pressure().cells_used == prompt.quote().n_cells
            for _ in range(4):
                token = root.sample()
                assert back.sample() == token
                root.commit(token)
                back.commit(token)
                assert np.array_equal(root.logits(), back.logits())
            with eye.prompt(picture(8, 40), add_special=False) as more:
                root.prefill(more)
                back.prefill(more)
            assert books(back) == books(root)
            assert np.array_equal(root.logits(), back.logits())


@pytest.mark.parametrize("options", ["", "mrope=1", "mrope=1;merge=2"])
def test_a_picture_cut_at_every_dispatch_size_gives_the_same_logits(options: str) -> None:
    own = Embeddings(rows(9), positions=np.array([0, 0, 0, 1, 1, 2, 2, 2, 4]), n_pos=5) if "mrope" in options else Embeddings(rows(9))
    items = ["ab", picture(40, 24), "c", sound(700), own]
    with seeing(options) as eye:
        whole = replay(eye, *items, n_batch=64)
        for n_batch in range(1, 24):
            with eye.store(n_batch=n_batch) as store, eye.prompt(*items) as prompt:
                root = store.root()
                assert root.prefill(prompt) == sum(-(-s["n_cells"] // n_batch) for s in prompt.segments())
                assert np.array_equal(root.logits(), whole), n_batch


# ------------------------------------------------------------------------------------------------------------ merged frames


def frame(width: int = 16, height: int = 16, salt: int = 0) -> PixelPart:
    return picture(width, height, salt, is_frame=True)


@pytest.mark.parametrize(("items", "pairs"), [
    ([frame(), frame(salt=1)], [2]),
    ([frame(), frame(salt=1), frame(salt=2)], [2, 1]),
    ([frame(), frame(salt=1), frame(salt=2), frame(salt=3)], [2, 2]),
    ([frame(), "x", frame(salt=1)], [1, 1]),
    ([frame(), frame(salt=1), "x", frame(salt=2)], [2, 1]),
    ([frame(), frame(24, 16)], [1, 1]),
    ([frame(16, 24), frame(24, 16), frame(24, 16, 1)], [1, 2]),
    ([frame(), picture(16, 16, 1)], [1, 1]),
    ([picture(16, 16), picture(16, 16, 1)], [1, 1]),
    ([frame(), [70], frame(salt=1)], [1, 1]),
    ([frame(), Embeddings(rows(2)), frame(salt=1)], [1, 1, 1]),
])
def test_what_makes_and_what_breaks_a_pair_of_frames(items: list[Any], pairs: list[int]) -> None:
    with seeing("mrope=1;merge=2") as eye, eye.prompt(*items) as prompt, eye.store() as store:
        assert eye.projector.statistics().n_frames_merged == 2
        assert [s["n_parts"] for s in prompt.segments() if s["kind"] == "rows"] == pairs
        root = store.root()
        root.prefill(prompt)
        assert books(root) == (prompt.quote().n_pos, prompt.quote().n_cells, prompt.quote().slack)
        assert eye.n_encodes == len(pairs) - any(isinstance(item, Embeddings) for item in items)


def test_both_frames_of_a_pair_are_seen() -> None:
    with seeing("mrope=1;merge=2") as eye:
        found = [replay(eye, frame(salt=a), frame(salt=b)) for a, b in ((0, 1), (0, 2), (3, 1), (1, 0))]
        for one, other in itertools.combinations(found, 2):
            assert not np.array_equal(one, other)


# ------------------------------------------------------------------------------------------------- refused before anything runs


def refused(store: Store, items: Sequence[tuple[Branch, Prompt]], kind: type[errors.PylloyalError], eye: Eye, match: str | None = None) -> errors.PylloyalError:
    """The refusal; nothing of the store and nothing of the projector has moved."""
    branches = list(store.branches())
    before, n_encodes, stood = store.pressure(), eye.n_encodes, [books(b) for b in branches]
    with pytest.raises(kind, match=match) as caught:
        store.decode_prompts(items)
    assert (store.pressure(), eye.n_encodes, [books(b) for b in branches]) == (before, n_encodes, stood)
    assert (caught.value.state, caught.value.partial) == ("unchanged", False)
    return caught.value


def test_rows_that_see_each_other_must_fit_one_dispatch() -> None:
    with seeing("non_causal=1") as eye, eye.store(n_batch=11) as store:
        fits, root = eye.prompt("ab", picture(88, 8)), store.root()
        too_many, fine = eye.prompt("ab", picture(96, 8)), store.root()
        error = refused(store, [(fine, fits), (root, too_many)], errors.InvalidArgumentError, eye)
        assert (error.need, error.have, error.index) == (12, 11, 1)
        with pytest.raises(errors.InvalidArgumentError) as caught:
            root.prefill(too_many)
        assert (caught.value.need, caught.value.have) == (12, 11)
        assert root.prefill(fits) == 2  # the words, and all of the picture
        with eye.prompt(Embeddings(rows(12), is_non_causal=True), add_special=False) as own:
            assert own.quote().max_rows == 12
            assert refused(store, [(root, own)], errors.InvalidArgumentError, eye).need == 12
        with eye.prompt(Embeddings(rows(9), positions=[0, 1, 1, 2, 3, 4, 5, 6, 7]), add_special=False) as shared:  # where rows have one position each
            assert shared.quote().max_rows == 9
            root.prefill(shared)
            assert root.slack == 1
        with eye.prompt(Embeddings(rows(12), positions=[0, 1, 1, *range(2, 11)]), add_special=False) as shared:
            assert refused(store, [(root, shared)], errors.InvalidArgumentError, eye).need == 12
        with eye.prompt(Embeddings(rows(40)), sound(2000), add_special=False) as causal:  # only pictures of this projector are blocks
            assert causal.quote().max_rows == 0
            root.prefill(causal)
        fits.close()
        too_many.close()


def test_a_placeholder_is_counted_but_never_decoded(eye: Eye) -> None:
    with eye.store() as store, eye.prompt("a", PlaceholderPart(24, 16)) as counted, eye.prompt("a", picture(24, 16)) as real:
        assert not counted.quote().is_decodable
        assert real.quote().is_decodable
        assert (counted.quote().n_cells, counted.quote().n_pos, counted.segments()) == (real.quote().n_cells, real.quote().n_pos, real.segments())
        a, b = store.root(), store.root()
        assert refused(store, [(a, real), (b, counted)], errors.InvalidArgumentError, eye, "placeholder").index == 1


def test_capacity_is_refused_for_all_items_together(eye: Eye) -> None:
    with eye.prompt("a", picture(40, 24)) as prompt:
        n = prompt.quote().n_cells
        with eye.store(n_ctx=256) as store:
            room = 256
            while room >= 3 * n:
                filler = store.root()
                filler.prefill([70] * min(room - (3 * n - 1), 64))
                room = store.pressure().cells_remaining
            assert room == 3 * n - 1
            branches = [store.root() for _ in range(3)]
            error = refused(store, [(branch, prompt) for branch in branches], errors.ContextOverflowError, eye)
            assert (error.need, error.have) == (3 * n, 3 * n - 1)
            outcomes = store.decode_prompts([(branch, prompt) for branch in branches[:2]])
            assert [o.error for o in outcomes] == [None, None]
            assert store.pressure().cells_remaining == n - 1


def test_wrong_branches_and_prompts_are_refused(eye: Eye) -> None:
    with seeing("mrope=1;n_vocab=301") as other, eye.store() as store, eye.store() as second, eye.prompt("a", picture(8, 8)) as prompt, other.prompt("a", picture(8, 8)) as foreign:
        a, b, gone = store.root(), store.root(), store.root()
        gone.prune()
        assert refused(store, [(a, prompt), (b, prompt), (a, prompt)], errors.InvalidArgumentError, eye).index in (0, 2)
        assert refused(store, [(a, prompt), (gone, prompt)], errors.StaleHandleError, eye).index == 1
        assert refused(store, [(a, prompt), (b, foreign)], errors.ProjectorMismatchError, eye).index == 1
        refused(store, [(a, prompt), (second.root(), prompt)], errors.InvalidArgumentError, eye, "another store")
        with pytest.raises(errors.ProjectorMismatchError):
            a.prefill(foreign)
        assert store.decode_prompts([]) == []
        assert store.decode_prompts([(a, prompt)])[0].error is None


def test_a_projector_belongs_to_one_model(eye: Eye) -> None:
    with seeing("mrope=1;n_vocab=301") as other:
        with pytest.raises(errors.ProjectorMismatchError):
            Prompt(other.projector.model, ["a", picture(8, 8)])  # no projector at all
        with pytest.raises(errors.ProjectorMismatchError, match="no other"):
            Projector(eye.model, "elsewhere.gguf")
        with Prompt(eye.model, ["a", Embeddings(rows(3))]) as prompt, eye.store() as store:  # rows need none
            store.root().prefill(prompt)


def test_use_after_close() -> None:
    before = live_objects()
    with seeing() as eye, eye.store() as store:
        prompt = eye.prompt("a", picture(24, 16))
        root = store.root()
        eye.projector.close()  # prompts made with it live on
        root.prefill(prompt)
        assert root.slack == 3
        with pytest.raises(errors.ClosedError):
            eye.prompt(picture(8, 8))
        with pytest.raises(errors.ClosedError):
            eye.projector.statistics()
        prompt.close()
        prompt.close()
        for call in (prompt.quote, prompt.segments, lambda: root.prefill(prompt), lambda: store.decode_prompts([(root, prompt)])):
            with pytest.raises(errors.ClosedError):
                call()
    after = live_objects()
    assert {k: after[k] - before[k] for k in ("prompts", "projectors", "stores", "contexts", "branches")} == dict.fromkeys(("prompts", "projectors", "stores", "contexts", "branches"), 0)


def test_parts_are_copied_when_the_prompt_is_made(eye: Eye) -> None:
    part, own = picture(24, 16), rows(3)
    with eye.prompt(part, Embeddings(own)) as prompt, eye.store() as store:
        part.pixels[:] = 0
        own[:] = 7
        root = store.root()
        root.prefill(prompt)
        assert np.array_equal(root.logits(), replay(eye, picture(24, 16), Embeddings(rows(3))))


# --------------------------------------------------------------------------------------------------------- failures on the way


@pytest.mark.parametrize("bad", range(8))
def test_one_bad_picture_never_stops_its_siblings(bad: int) -> None:
    with seeing(f"mrope=1;encode_fail_at={bad + 1}") as eye, eye.store() as store:
        prompts = [eye.prompt("a" * i, picture(24, 16, i), "z") for i in range(8)]
        trunk = store.root()
        trunk.prefill([60])
        forks = trunk.fork(8)
        outcomes = store.decode_prompts(list(zip(forks, prompts, strict=True)))
        for i, (fork, prompt, outcome) in enumerate(zip(forks, prompts, outcomes, strict=True)):
            quote = prompt.quote()
            assert not fork.is_poisoned
            if i != bad:
                assert (outcome.error, outcome.n_segments, outcome.n_cells) == (None, quote.n_segments, quote.n_cells)
                assert books(fork) == (1 + quote.n_pos, 1 + quote.n_cells, quote.slack)
                continue
            assert isinstance(outcome.error, errors.MediaError)
            assert (outcome.error.state, outcome.error.partial) == ("advanced", True)
            assert (outcome.n_segments, outcome.n_cells) == (1, 1 + i)
            assert books(fork) == (2 + i, 2 + i, 0)
        assert store.pressure().cells_used == 1 + sum(o.n_cells for o in outcomes)
        rest = eye.prompt(picture(24, 16, bad), "z", add_special=False)
        forks[bad].prefill(rest)  # and it goes on
        good = Prompt(eye.projector, ["a" * bad, picture(24, 16, bad), "z"])
        again = trunk.fork()
        again.prefill(good)
        assert np.array_equal(again.logits(), forks[bad].logits())
        for prompt in (*prompts, rest, good):
            prompt.close()


def test_a_picture_that_cannot_be_encoded_first_leaves_all_as_it_was() -> None:
    with seeing("encode_fail_at=1") as eye, eye.store() as store, eye.prompt(picture(24, 16), "z", add_special=False) as prompt:
        root = store.root()
        root.prefill([60, 61])
        logits = root.logits()
        outcome = store.decode_prompts([(root, prompt)])[0]
        assert isinstance(outcome.error, errors.MediaError)
        assert (outcome.error.state, outcome.error.partial, outcome.n_segments, outcome.n_cells) == ("unchanged", False, 0, 0)
        assert books(root) == (2, 2, 0)
        assert np.array_equal(root.logits(), logits)
        root.prefill(prompt)
        assert root.position == 2 + prompt.quote().n_pos


ITEMS = ["abcde", picture(40, 24), "fg", sound(900)]  # with batches of 4: 2 dispatches, 4, 1, 3
STRETCHES = [(6, 6, [4, 2]), (15, 5, [4, 4, 4, 3]), (2, 2, [2]), (9, 9, [4, 4, 1])]


@pytest.mark.parametrize("rc", [1, -1, 2, -2, -3])
@pytest.mark.parametrize("at", range(1, 11))
def test_an_engine_failure_at_every_dispatch(at: int, rc: int) -> None:
    # What the header promises, counted by hand: text advances by dispatches, a picture or sound lands whole or poisons.
    dispatches = [(i, k) for i, (_, _, sizes) in enumerate(STRETCHES) for k in range(len(sizes))]
    which, within = dispatches[at - 1]
    size = STRETCHES[which][2][within]
    undone = rc in (1, -1)
    for n_rows in (0,) if undone else (0, 1, size):
        with seeing(f"mrope=1;fail_at={at};fail_rc={rc};fail_rows={n_rows}") as eye, eye.store(n_batch=4) as store, eye.prompt(*ITEMS) as prompt:
            assert [(s["n_cells"], s["n_pos"]) for s in prompt.segments()] == [(cells, pos) for cells, pos, _ in STRETCHES]
            root = store.root()
            outcome = store.decode_prompts([(root, prompt)])[0]
            error = outcome.error
            assert error is not None
            landed = sum(cells for cells, _, _ in STRETCHES[:which])
            position = sum(pos for _, pos, _ in STRETCHES[:which])
            inside = sum(STRETCHES[which][2][:within])
            is_text = which in (0, 2)
            poisoned = not undone or (not is_text and within > 0)
            if is_text:
                landed, position = landed + inside, position + inside
            assert (outcome.n_segments, outcome.n_cells) == (which, landed)
            assert error.state == ("poisoned" if poisoned else "advanced" if landed else "unchanged")
            assert error.engine_rc == rc
            assert root.is_poisoned == poisoned
            assert root.position == position
            charged = landed + (0 if is_text else inside) + (0 if undone else size)
            assert root.cells_own == charged == store.pressure().cells_used
            if poisoned:
                with pytest.raises(errors.BranchPoisonedError):
                    store.decode_prompts([(root, prompt)])
            else:
                assert root.slack == landed - position
                assert root.has_logits == (landed > 0 and not (is_text and within > 0))
            root.prune()
            assert store.pressure().cells_used == 0
            again = store.root()
            again.prefill(prompt)
            assert np.array_equal(again.logits(), replay(eye_without_failure(), *ITEMS))


_PLAIN: list[Eye] = []


def eye_without_failure() -> Eye:
    if not _PLAIN:
        _PLAIN.append(Eye("mrope=1"))
    return _PLAIN[0]


@pytest.fixture(scope="module", autouse=True)
def plain_eye() -> Iterator[None]:
    """One that never fails, for replays; closed with the module."""
    eye_without_failure()
    yield
    while _PLAIN:
        _PLAIN.pop().close()


@pytest.mark.parametrize(("rc", "rows_in"), [(1, 0), (-2, 0), (-2, 2)])
def test_a_fork_repairs_a_trunk_that_was_poisoned_inside_a_picture(rc: int, rows_in: int) -> None:
    with seeing(f"mrope=1;fail_at=4;fail_rc={rc};fail_rows={rows_in}") as eye, eye.store(n_batch=4) as store, eye.prompt(picture(40, 24), "z", add_special=False) as prompt:
        root = store.root()
        root.prefill([60, 61])
        child = root.fork()
        assert store.decode_prompts([(root, prompt)])[0].error is not None  # in its third dispatch
        assert root.is_poisoned
        root.fast_forward(child)
        assert (root.is_poisoned, *books(root)) == (False, 2, 2, 0)
        assert store.pressure().cells_used == 2
        root.prefill(prompt)
        assert books(root) == (2 + prompt.quote().n_pos, 2 + prompt.quote().n_cells, prompt.quote().slack)
        fresh = store.root()
        fresh.prefill([60, 61])
        fresh.prefill(prompt)
        assert np.array_equal(root.logits(), fresh.logits())


def test_a_sibling_is_whole_after_a_picture_failed_half_way() -> None:
    with seeing("mrope=1;fail_at=3;fail_rc=-2;fail_rows=1") as eye, eye.store(n_batch=8) as store, eye.prompt(picture(40, 24), "z", add_special=False) as prompt:
        root = store.root()
        root.prefill([60, 61])
        a, b = root.fork(2)
        outcomes = store.decode_prompts([(a, prompt), (b, prompt)])
        assert [o.error is None for o in outcomes] == [False, True]
        assert [x.is_poisoned for x in (root, a, b)] == [False, True, False]
        logits = b.logits()
        a.prune()
        assert store.pressure().cells_used == 2 + prompt.quote().n_cells
        again = root.fork()
        again.prefill(prompt)
        assert np.array_equal(again.logits(), logits)


def test_logits_of_others_outlive_pictures(eye: Eye) -> None:
    with eye.store(n_batch=4) as store, eye.prompt(picture(40, 24), add_special=False) as prompt:
        root = store.root()
        root.prefill([60, 61])
        fork, apart = root.fork(), store.root()
        apart.prefill([70])
        before = [b.logits() for b in (root, fork, apart)]
        third = root.fork()
        third.prefill(prompt)
        for branch, logits in zip((root, fork, apart), before, strict=True):
            assert np.array_equal(branch.logits(), logits)
        seen = third.logits()
        apart.commit(71)
        assert np.array_equal(third.logits(), seen)


def test_a_cancel_from_another_thread_stops_between_stretches() -> None:
    with seeing("mrope=1;spin_us=2000") as eye, eye.store(n_ctx=4096, n_batch=4) as store:
        prompts = [eye.prompt(*[part for k in range(60) for part in ("abcd", picture(24, 16, k))]) for _ in range(2)]
        a, b = store.root(), store.root()
        outcomes: list[Any] = []
        worker = threading.Thread(target=lambda: outcomes.extend(store.decode_prompts([(a, prompts[0]), (b, prompts[1])])))
        worker.start()
        while store.pressure().cells_used < 8:
            pass
        store.cancel()
        worker.join()
        first, second = outcomes
        assert isinstance(first.error, errors.DecodeCancelledError)
        assert isinstance(second.error, errors.DecodeCancelledError)
        assert (first.error.state, second.error.state) == ("advanced", "unchanged")
        assert 8 <= first.n_cells < prompts[0].quote().n_cells
        assert (second.n_segments, second.n_cells) == (0, 0)
        assert not a.is_poisoned
        assert a.cells_own == first.n_cells == store.pressure().cells_used
        assert books(b) == (0, 0, 0)
        with eye.prompt("z") as more:
            b.prefill(more)  # a cancel is spent with the call it stopped
        for prompt in prompts:
            prompt.close()


# ---------------------------------------------------------------------------------------------------------------- own rows


@pytest.mark.parametrize(("part", "match"), [
    (Embeddings(rows(3, 5)), "5 floats"),
    (Embeddings(rows(3, 1)), "1 floats"),
    (Embeddings(np.full((2, 4), np.nan)), "NaN"),
    (Embeddings(np.array([[0, 0, 0, np.inf]])), "infinity"),
    (Embeddings(np.array([[0, 0, 0, 1e300]])), "infinity"),
    (Embeddings(rows(3), positions=[0, 2, 1]), "backwards"),
    (Embeddings(rows(3), positions=[-1, 0, 1]), "outside"),
    (Embeddings(rows(3), positions=[0, 1, 3], n_pos=3), "outside"),
    (Embeddings(rows(3), positions=[0, 1, 9]), "n_pos"),
    (Embeddings(rows(3), n_pos=0), "n_pos"),
    (Embeddings(rows(3), n_pos=-1), "n_pos"),
    (Embeddings(rows(3), n_pos=4), "n_pos"),
    (Embeddings(rows(3), n_pos=2), "one after another"),
    (Embeddings(rows(2), positions=[[0, 0, 0, 0], [0, 0, 2, 0]], n_pos=2), "outside"),
    (Embeddings(rows(2), positions=[[1, 0, 0, 0], [0, 0, 0, 0]], n_pos=2), "backwards"),
    (RowPart(np.empty((0, 4), np.float32)), "rows"),
    (RowPart(np.empty((3, 0), np.float32)), "rows"),
])
def test_rows_that_cannot_be(part: Any, match: str, eye: Eye) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=match) as caught:
        eye.prompt("a", [70], part)
    assert caught.value.index == 2
    with pytest.raises(errors.InvalidArgumentError):
        Prompt(eye.model, [part])


def test_a_wrong_width_names_both(eye: Eye) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        eye.prompt(Embeddings(rows(3, 5)))
    assert (caught.value.need, caught.value.have) == (4, 5)


@pytest.mark.parametrize("arguments", [
    {"rows": np.zeros(4)}, {"rows": np.zeros((1, 2, 3))}, {"rows": np.array([["a"]])}, {"rows": rows(3), "positions": [0, 1]}, {"rows": rows(3), "positions": [[0, 0]] * 3},
    {"rows": rows(3), "positions": [0.0, 1.0, 2.0]}, {"rows": rows(3), "positions": np.zeros((4, 3), int)}, {"rows": rows(2), "positions": np.array([0, 2**32]), "n_pos": 2},
    {"rows": rows(2), "n_pos": 2**32 + 1},
])
def test_embeddings_of_impossible_shape(arguments: dict[str, Any], eye: Eye) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        eye.prompt(Embeddings(**arguments))


def test_rows_stand_where_they_say(eye: Eye) -> None:
    flat, grid = Embeddings(rows(4), positions=[0, 0, 1, 2]), Embeddings(rows(4), positions=[[0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 1, 1, 0]])
    with eye.prompt("ab", flat, grid) as prompt, eye.store() as store:
        one, other = [s for s in prompt.segments() if s["kind"] == "rows"]
        assert (one["n_cells"], one["n_pos"]) == (4, 3)
        assert (other["n_cells"], other["n_pos"], other["positions"]) == (4, 2, [0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0])
        root = store.root()
        root.prefill(prompt)
        assert books(root) == (3 + 3 + 2, 3 + 4 + 4, 3)
        root.prefill([70])
        fork = root.fork()
        fork.commit(71)
        assert np.array_equal(fork.logits(), replay(eye, "ab", flat, grid, [70, 71]))
        for k in range(4):  # every row counts
            changed = rows(4)
            changed[k, 2] += 1
            assert not np.array_equal(replay(eye, "ab", Embeddings(changed, positions=[0, 0, 1, 2]), grid, [70, 71]), fork.logits())


def test_rows_with_one_place_and_with_four_of_the_same_are_alike() -> None:
    places = np.array([0, 0, 1, 2])
    with seeing("mrope=1") as eye:
        assert np.array_equal(replay(eye, Embeddings(rows(4), positions=places)), replay(eye, Embeddings(rows(4), positions=np.stack([places] * 4, 1))))
        assert np.array_equal(replay(eye, Embeddings(rows(4))), replay(eye, Embeddings(rows(4), positions=np.stack([np.arange(4)] * 4, 1))))


def test_four_places_a_row_need_a_model_that_reads_them() -> None:
    with seeing("") as eye:
        with pytest.raises(errors.InvalidArgumentError, match="four") as caught:
            eye.prompt("a", Embeddings(rows(2), positions=[[0, 0, 0, 0], [0, 0, 1, 0]]))
        assert caught.value.index == 1


@pytest.mark.parametrize(("positions", "n_pos"), [([1, 2, 3], 4), ([0, 2, 3], 4), ([0, 1, 2], 4), ([0, 0, 1], 3)])
def test_positions_with_gaps_need_m_rope(positions: list[int], n_pos: int) -> None:
    """Another engine's rule: it decodes nothing that does not begin one behind the last position."""
    own = np.repeat(rows(3), 2, 0)
    part = Embeddings(own, positions=[*positions, *[positions[-1]] * 3], n_pos=n_pos)
    with seeing("") as eye, pytest.raises(errors.InvalidArgumentError, match="gap"):
        eye.prompt(part)
    with seeing("mrope=1") as eye, eye.store() as store, eye.prompt(part) as prompt:
        root = store.root()
        root.prefill(prompt)
        assert root.position == 1 + n_pos


def test_kept_rows_are_as_good_as_encoded_ones() -> None:
    """Rows in any dtype that numpy turns into floats, contiguous or not."""
    with seeing() as eye:
        own = rows(6).astype(np.float16)
        plain = replay(eye, Embeddings(own.astype(np.float32)))
        for other in (own, own.astype(np.float64), np.asfortranarray(own), np.repeat(own, 2, 0)[::2]):
            assert np.array_equal(replay(eye, Embeddings(other)), plain)


# --------------------------------------------------------------------------------------------------------------- bad parts


def test_parts_that_cannot_be(eye: Eye) -> None:
    empty = np.empty((0, 3, 3), np.uint8)
    for items, kind in (
        ([PixelPart(empty)], errors.InvalidArgumentError), ([PixelPart(np.zeros((2, 2), np.uint8))], errors.InvalidArgumentError), ([PixelPart(np.zeros((2, 2, 4), np.uint8))], errors.InvalidArgumentError),
        ([PixelPart(np.zeros((2, 2, 3), np.float32))], errors.InvalidArgumentError),
        ([PlaceholderPart(0, 3)], errors.InvalidArgumentError), ([PlaceholderPart(65537, 3)], errors.InvalidArgumentError), ([PlaceholderPart(65536, 65536)], errors.InvalidArgumentError), ([PlaceholderPart(2**31, 3)], errors.InvalidArgumentError),
        ([SoundPart(np.empty(0, np.float32))], errors.InvalidArgumentError), ([SoundPart(np.zeros((2, 2), np.float32))], errors.InvalidArgumentError),
        ([[300]], errors.InvalidArgumentError), ([[-1]], errors.InvalidArgumentError), ([[2**31]], errors.InvalidArgumentError), ([[0.5]], errors.InvalidArgumentError), ([7], errors.InvalidArgumentError),
        ([None], errors.InvalidArgumentError),
    ):
        with pytest.raises(kind):
            eye.prompt("a", *items)


def test_an_empty_prompt_takes_nothing(eye: Eye) -> None:
    with eye.prompt(add_special=False) as prompt, eye.store() as store:
        assert (prompt.quote().n_segments, prompt.quote().n_cells, prompt.segments()) == (0, 0, [])
        root = store.root()
        assert root.prefill(prompt) == 0
        assert (books(root), root.has_logits) == ((0, 0, 0), False)
    with eye.prompt("", [], "") as special:
        assert special.quote().n_cells == 1  # the model's own


# ------------------------------------------------------------------------------------------------------- one branch, one prompt


def test_a_prompt_that_fails_on_its_only_branch_raises() -> None:
    """Several prompts tell each its own outcome; the one of Branch.prefill raises what it is."""
    with seeing("mrope=1;fail_at=2") as eye, eye.store() as store:
        branch = store.root()
        with pytest.raises(errors.DecodeError) as caught:
            branch.prefill(eye.prompt("hello", picture(24, 16)))
        assert (caught.value.state, caught.value.partial) == ("poisoned", True)
        assert branch.is_poisoned and branch.cells_own == len(eye.model.vocab.encode("hello", add_special=True)) + 6


def test_rows_of_another_shape_are_refused() -> None:
    with seeing() as eye:
        for part in (RowPart(np.zeros(4, np.float32)), RowPart(rows(3), positions=np.arange(2)), RowPart(rows(3), positions=np.zeros((3, 3), np.int32))):
            with pytest.raises(errors.InvalidArgumentError, match="shape"):
                eye.prompt(part)


def test_a_projector_tells_what_it_is() -> None:
    with seeing() as eye:
        assert repr(eye.projector) == "<Projector 'stub:'>"
        eye.projector.close()
        assert repr(eye.projector) == "<Projector 'stub:' closed>"
        for options in ({"n_threads": 0}, {"image_min_tokens": 2**31}, {"image_max_tokens": -1}, {"cache_bytes": -1}):
            with pytest.raises(errors.InvalidArgumentError, match=next(iter(options))):
                eye.model.projector("stub:", **options)


@pytest.mark.parametrize("ids", NO_IDS.values(), ids=NO_IDS)
def test_what_is_no_token_ids_is_no_part_either(eye: Eye, ids: Any) -> None:
    gc.collect()  # what another test left
    alive = live_objects()
    for item in (ids, TokenPart(ids)):
        with pytest.raises(errors.InvalidArgumentError):
            eye.prompt("a", item)
    assert live_objects() == alive
