"""As ../c/consumer.c, with the Python package: python consumer.py MODEL.gguf MMPROJ.gguf"""
from __future__ import annotations

import sys

import numpy as np

import pylloyal
from pylloyal import Sampling, TextPart
from pylloyal.kernel.dry_run import dry_run

N_STEPS = 8
ALLOWED = 64 << 20


def sampling(temperature: float) -> Sampling:
    return Sampling(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)


def show(name: str, ticks: pylloyal.Ticks, i: int = 0) -> None:
    end = ["end"] if ticks.finish[i] is pylloyal.Finish.END_OF_GENERATION else []
    print(" ".join(map(str, [name, *ticks.tokens[i], *end])))


def fork_a_prompt(model: pylloyal.Model, store: pylloyal.Store) -> None:
    root = store.root(sampling=sampling(4.0))
    root.prefill(model.vocab.encode("<|im_start|>user\nWhat colour is the shape?<|im_end|>\n<|im_start|>assistant\n", parse_special=True))
    forks = root.fork(3, seed=[1, 2, 3])
    greedy = root.fork()
    greedy.sampling = sampling(0.0)
    show("greedy", store.tick([greedy], n_steps=N_STEPS))
    said = store.tick(forks, n_steps=N_STEPS)
    for i in range(3):
        show(f"sampled {i + 1}", said, i)
    root.prune_subtree()


def question_a_picture(model: pylloyal.Model, projector: pylloyal.Projector, store: pylloyal.Store) -> None:
    pixels = np.full((48, 48, 3), 245, np.uint8)  # a blue square at the top right, on white
    pixels[2:14, 34:46] = (50, 80, 220)
    with pylloyal.Prompt(projector, [TextPart("<|im_start|>user\n", special=True), pylloyal.Image(pixels)], add_special=False) as prompt:
        quote = prompt.quote()
        print(f"picture {quote.n_cells} cells {quote.n_pos} positions")
        root = store.root(sampling=sampling(0.0))
        root.prefill(prompt)
    forks = root.fork(2)
    words = [model.vocab.encode(f"{question}<|im_end|>\n<|im_start|>assistant\n", parse_special=True) for question in ("What colour is the shape?", "Where is the shape?")]
    for fork, tokens in zip(forks, words, strict=True):
        fork.prefill(tokens)
    said = store.tick(forks, n_steps=N_STEPS)
    for i, name in enumerate(("colour", "where")):
        show(f"{name} '{model.vocab.decode(said.tokens[i])}'", said, i)
    store.prune(forks)  # the picture's cells stay: the root has them


def refuse_a_plan(path: str) -> None:
    need = dry_run(path, n_ctx=1 << 20).context_bytes
    print(f"plan {'refused' if need > ALLOWED else 'taken'}: {need} bytes of cells, {ALLOWED} allowed")


def refuse_a_decode(store: pylloyal.Store) -> None:
    root = store.root(sampling=sampling(0.0))
    before = store.pressure()
    try:
        root.prefill([0] * 600)
    except pylloyal.errors.ContextOverflowError as error:
        print(f"decode refused: code {error.failure.code} state {('unchanged', 'advanced', 'poisoned').index(error.state)} need {error.need} have {error.have}")
        after = store.pressure()
        if after.cells_used != before.cells_used or after.cells_remaining != error.have:
            raise RuntimeError("a refused call has changed something") from error
        return
    raise RuntimeError("600 tokens were not refused")


def main(model_path: str, mmproj_path: str) -> int:
    with pylloyal.Model(model_path) as model, model.projector(mmproj_path, n_threads=1) as projector, model.store(n_ctx=512, n_branches=8, n_threads=1) as store:
        fork_a_prompt(model, store)
        question_a_picture(model, projector, store)
        refuse_a_plan(model_path)
        refuse_a_decode(store)
    left = sum(pylloyal.live_objects().values())
    print(f"left behind: {left}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
