"""The main job on real input: a long document read once, eight forks questioning it, one dispatch a tick."""
from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pylloyal import Model, Sampling, errors

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "fixtures" / "texts" / "moby_dick_1.txt"
CONTINUATIONS = ["Who tells the story?", "Why does he go to sea?", "What is a whale?", "The city of Manhattoes", "Once upon a time", "def main():", "1, 2, 3,", "In conclusion,"]
STEPS = 12
# On x86-64 no logit depends on how many tokens are read at a time. Elsewhere the engine may multiply several rows by another routine than one: logits (which span some 30)
# may then move, and a token flip where its lead over the second is small. Forks do not add to that.
NEAR_TIE = 1.2


def alone(model: Model, prompts: list[list[int]]) -> list[tuple[int, float]]:
    """Greedy tokens of a context of its own that reads the prompts one dispatch each; with each token its lead over the second."""
    with model.store(n_ctx=512, n_branches=1, n_threads=1) as store:
        root = store.root(sampling=Sampling.greedy())
        for prompt in prompts:
            root.prefill(prompt)
        out = []
        for _ in range(STEPS):
            second, first = np.partition(root.logits(), -2)[-2:]
            token = root.sample()
            out.append((token, float(first - second)))
            root.commit(token)
        return out


def test_eight_forks_say_what_eight_fresh_contexts_say(smollm2: Model) -> None:
    prefix = smollm2.vocab.encode(DOCUMENT.read_text(encoding="utf-8"))[:120]
    tails = [smollm2.vocab.encode("\n\n" + text) for text in CONTINUATIONS]
    with smollm2.store(n_ctx=512, n_branches=9, n_threads=1) as store:
        root = store.root(sampling=Sampling.greedy())
        chunks = root.prefill(prefix)
        forks = root.fork(8)
        chunks += store.prefill(list(zip(forks, tails, strict=True)))
        assert chunks == 2
        together: list[list[int]] = [[] for _ in forks]
        for _ in range(STEPS):
            for row, token in zip(together, store.sample(forks), strict=True):
                row.append(token)
            store.commit(forks, [row[-1] for row in together])
        assert store.pressure().n_dispatches == chunks + STEPS
        assert store.pressure().cells_used == 120 + sum(map(len, tails)) + 8 * STEPS
    for said, tail, text in zip(together, tails, CONTINUATIONS, strict=True):
        assert said == [token for token, _ in alone(smollm2, [prefix, tail])], f"{text!r}: forked, and alone in the same dispatches"
    flipped = []
    for said, tail, text in zip(together, tails, CONTINUATIONS, strict=True):
        for step, ((token, lead), other) in enumerate(zip(alone(smollm2, [prefix + tail]), said, strict=True)):
            if token != other:
                flipped.append((text, step, round(lead, 4)))
                break
    print(f"\nforks against contexts that read all in one dispatch flipped at (text, step, lead): {flipped or 'none'}")
    assert all(lead < NEAR_TIE for _, _, lead in flipped)
    assert len(flipped) <= 3


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="several rows of q4_1 may be another routine's than one")
def test_how_it_is_read_changes_no_bit(smollm2: Model) -> None:
    document = smollm2.vocab.encode(DOCUMENT.read_text(encoding="utf-8"))[:700]
    read = []
    for n_batch, n_threads in ((512, 1), (256, 1), (64, 1), (63, 1), (17, 1), (4, 1), (512, 2)):
        with smollm2.store(n_ctx=1024, n_branches=2, n_batch=n_batch, n_threads=n_threads) as store:
            root = store.root()
            root.prefill(document)
            read.append(root.logits())
    assert len(document) == 700
    assert all(np.array_equal(rows, read[0]) for rows in read[1:])


def test_ask_reads_the_document_once(smollm2_path: Path) -> None:
    questions = CONTINUATIONS[:3]
    done = subprocess.run([sys.executable, "-m", "pylloyal", "ask", str(smollm2_path), "--document", str(DOCUMENT), "--seed", "1", "--max-tokens", "12", "--threads", "2", "--json", *questions],
                          capture_output=True, text=True, check=True)
    truth = json.loads(done.stdout.splitlines()[-1])
    assert truth["prefix_tokens"] > 2000
    assert truth["prefix_tokens"] == truth["prefix_cells"]
    assert truth["branches"] == 3
    assert truth["tick_dispatches"] <= truth["ticks"]
    assert truth["prefill_dispatches"] == -(-truth["prefix_tokens"] // 512) + 1
    assert [a["question"] for a in truth["answers"]] == questions
    assert truth["tokens_generated"] == sum(a["tokens"] for a in truth["answers"])
    assert truth["cells_used"] < truth["prefix_cells"] + 400
    assert all(a["text"] for a in truth["answers"])
    assert set(truth["seconds"]) == {"load", "prefill", "generate"}


def test_the_chat_template_of_the_file(smollm2: Model) -> None:
    chat = smollm2.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert chat.prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.vocab.decode(chat.tokens(), special=True) == chat.prompt
    with pytest.raises(errors.TemplateError, match="tools"):
        smollm2.chat([{"role": "user", "content": "x"}], tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])


def test_forks_sample_apart_and_a_grammar_binds_one(smollm2: Model) -> None:
    with smollm2.store(n_ctx=1024, n_branches=6, n_threads=2) as store:
        root = store.root(sampling=Sampling(seed=3))
        root.prefill(smollm2.chat([{"role": "user", "content": "Is the sea wide? Answer yes or no."}]))
        forks = root.fork(4, seed=10)
        forks[0].set_grammar('root ::= "yes" | "no"')
        done = store.tick(forks, n_steps=16)
        assert smollm2.vocab.decode(done.tokens[0]) in ("yes", "no")
        assert len({tuple(t) for t in done.tokens[1:]}) == 3


BESIDE = """
import sys
sys.path.insert(0, sys.argv[2])
order, model = sys.argv[3], sys.argv[1]

def ours():
    import pylloyal
    m = pylloyal.Model(model)
    s = m.store(n_ctx=512, n_threads=1)
    def ask(prompt):
        with s.root(sampling=pylloyal.Sampling.greedy()) as root:
            root.prefill(m.vocab.encode(prompt, parse_special=True))
            return m.vocab.decode(s.tick([root], n_steps=16).tokens[0])
    return ask

def theirs():
    from cyllama import LLM, GenerationConfig
    llm = LLM(model, config=GenerationConfig(max_tokens=16, temperature=0.0, n_ctx=512, n_gpu_layers=0))
    return lambda prompt: str(llm(prompt))

first, second = (ours(), theirs()) if order == "ours first" else (theirs(), ours())
prompt = "<|im_start|>user\\nWhat is the capital of France?<|im_end|>\\n<|im_start|>assistant\\n"
a, b = first(prompt), second(prompt)
assert a == first(prompt) and b == second(prompt), "an answer changed once the other library had run"
print("ANSWERS", [a, b])
"""


@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_two_different_llama_cpp_in_one_process(smollm2_path: Path, order: str) -> None:
    """A foreign llama.cpp from another wheel, in either order of loading: both right, neither disturbed."""
    done = subprocess.run([sys.executable, "-c", BESIDE, str(smollm2_path), os.environ["PYLLOYAL_FOREIGN"], order], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS"))
    answers = eval(line.removeprefix("ANSWERS "))
    assert answers[0].strip() == answers[1].strip() != ""
