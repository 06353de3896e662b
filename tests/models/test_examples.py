"""The programs of docs/examples, each run as its reader would, with small settings: what they print about themselves has to be true.

Counts are exact wherever they do not hang on what the model says; the rest are statements that hold whatever it says.
"""
from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from pylloyal import Model, Sampling

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
# In dispatches of another size, and when the cells of pruned forks are filled again, SmolLM2-135M in q4_1 moves its logits by up to about 1.2 (docs/testing.md): where a
# token's lead is smaller, greedy texts may part.
NEAR_TIE = 1.2


@pytest.fixture
def run(smollm2_path: Path) -> Any:
    def go(name: str, *arguments: object, model: Path = smollm2_path) -> dict[str, Any]:
        command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), str(model), "--threads", "1", "--json", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["name"] == name
        if found["naive"]:
            assert found["saved"] == {key: found["naive"][key] - found["here"][key] for key in ("cells", "tokens_decoded", "dispatches")}
        return found

    return go


def lags(model: Model, prompt: list[int], said: list[int]) -> tuple[list[float], float]:
    """How far each token lay behind the likeliest one (nats; 0 for a greedy choice), and the log-probability of all, read plainly in a context of its own."""
    with model.store(n_ctx=512, n_branches=1, n_threads=1) as store:
        root = store.root(sampling=Sampling.greedy())
        root.prefill(prompt)
        out, log_prob = [], 0.0
        for token in said:
            best = root.distribution()
            out.append(best.max_logit - float(root.logits_at([token])[0]))
            log_prob -= root.surprisal(token)
            root.commit(token)
        return out, log_prob


def test_best_of_n(run: Any) -> None:
    found = run("best_of_n", "--chars", 150, "-n", 4, "--tokens", 8)
    prompt, ranked, alone = found["prompt_tokens"], found["ranked"], found["ranked_alone"]
    assert [score for score, _, _ in ranked] == sorted(score for score, _, _ in ranked)
    assert len({seed for _, seed, _ in ranked}) == len(ranked) == 2
    assert {seed for _, seed, _ in alone} == {1, 2, 3, 4}
    assert all(score >= 1 for score, _, _ in ranked + alone)
    # The prompt once, then what was said: all four for half of the way, two of them for the rest. Nothing is counted twice, nothing is missing.
    assert prompt + sum(len(said) for _, _, said in ranked) <= found["here"]["tokens_decoded"] <= prompt + 4 * 4 + 2 * 4
    assert found["here"]["dispatches"] <= 1 + 8
    assert found["naive"]["tokens_decoded"] == found["naive"]["cells"] == 4 * prompt + sum(len(said) for _, _, said in alone)
    assert found["saved"]["tokens_decoded"] >= 3 * prompt - 24


def test_beam_search(run: Any, smollm2: Model) -> None:
    found = run("beam_search", "--prompt", "Describe the sea.", "--width", 3, "--tokens", 6)
    greedy, beam = found["greedy"], found["beam"]
    assert beam["score"] >= greedy["score"]
    assert len(beam["tokens"]) == len(greedy["tokens"]) == 6
    assert beam["log_prob"] >= greedy["log_prob"]
    for one in (greedy, beam):
        lag, log_prob = lags(smollm2, found["prompt"], one["tokens"])
        assert one["log_prob"] == pytest.approx(log_prob, abs=0.2 * len(one["tokens"]))
        assert one is beam or max(lag) < NEAR_TIE
    assert found["here"]["dispatches"] == 1 + 6
    assert found["here"]["tokens_decoded"] <= len(found["prompt"]) + 3 * 6
    # A beam that splits costs the naive way at least the prompt again; the first step always splits in three.
    assert found["saved"]["tokens_decoded"] >= 2 * len(found["prompt"])


def test_contrastive(run: Any) -> None:
    found = run("contrastive", "--chars", 240, "--tokens", 8)
    n, mixed = len(found["said"]), len(found["mixed"])
    assert n
    assert found["here"]["dispatches"] == 2 + n
    assert found["naive"]["dispatches"] == 2 * (1 + mixed)
    document, tails = found["document_tokens"], found["tail_tokens"]
    assert found["here"]["tokens_decoded"] == found["here"]["cells"] == document + tails + 2 * n
    assert found["naive"]["tokens_decoded"] == 2 * document + tails + 2 * mixed
    assert found["said"] != found["alone"]


def test_self_consistency(run: Any) -> None:
    found = run("self_consistency", "-n", 3, "--questions", 1, "--tokens", 24)
    [votes], [unneeded], [answer], [alone] = found["votes"], found["unneeded"], found["answers"], found["alone"]
    assert sum(votes.values()) + unneeded <= 3
    assert sum(alone.values()) <= 3
    assert answer == max(votes, key=lambda a: votes[a])
    assert all(re.fullmatch(r"\d+", a) for a in [*votes, *alone])
    assert found["saved"]["tokens_decoded"] > 0
    assert found["saved"]["dispatches"] > 0


def test_speculative(run: Any, smollm2: Model) -> None:
    found = run("speculative", "--chars", 230, "--tokens", 20)
    said, prompt = found["said"], found["prompt"]
    assert found["right"] <= found["guessed"]
    assert found["right"] > 0
    # Every dispatch after the prompt's lands the token that was sure and the guesses that were right.
    assert found["here"]["dispatches"] == 1 + len(said) - found["right"]
    assert found["naive"]["dispatches"] == 1 + 20
    assert found["saved"]["dispatches"] == found["right"] + 20 - len(said)
    assert found["same"] or found["lead"] < NEAR_TIE
    assert max(lags(smollm2, prompt, said)[0]) < NEAR_TIE


def test_json_schema(run: Any) -> None:
    found = run("json_schema", "-n", 2, "--attempts", 1)
    assert found["fitting"] == len(found["answers"]) == 2
    for answer in found["answers"]:
        record = json.loads(answer)
        assert set(record) == {"name", "trade", "age"}
        assert isinstance(record["name"], str)
        assert len(record["name"]) <= 24
        assert record["trade"] in ("sailor", "cook", "smith", "farmer")
        assert type(record["age"]) is int
        assert 1 <= record["age"] <= 99
    assert found["naive_attempts"] == 2
    assert found["naive_fitting"] <= 2
    assert found["here"]["dispatches"] <= 2 + 48


def test_adaptive_temperature(run: Any) -> None:
    found = run("adaptive_temperature", "-n", 2, "--tokens", 10)
    assert found["reproducible"] is True
    assert found["answers"][0] != found["answers"][1]
    # A draw for every token, and one for the end where it came: none is used twice.
    assert all(0 <= draws - len(said) <= 1 for draws, said in zip(found["draws"], found["answers"], strict=True))
    assert all(0 <= least < highest <= 1.5 for least, highest in found["temperatures"])
    assert found["logits_bytes"] % (4 * 49152) == 0
    assert found["here"]["dispatches"] == 1 + max(map(len, found["answers"]))


def test_classify(run: Any) -> None:
    found = run("classify", "-n", 4)
    assert set(found["labels"]) <= {"positive", "negative"}
    assert found["right"] >= 2
    assert found["here"]["dispatches"] == 2
    assert found["naive"]["dispatches"] == 4
    assert found["naive"]["tokens_decoded"] - found["here"]["tokens_decoded"] == 3 * found["instruction_tokens"]
    assert found["moved"] < NEAR_TIE


def test_long_chat(run: Any) -> None:
    found = run("long_chat", "--context", 256, "--turns", 8, "--tokens", 16)
    assert found["n_ctx"] == 256 < found["conversation_tokens"]
    assert found["reseeds"] >= 1
    assert len(found["answers"]) == 8
    assert found["here"]["cells"] <= 256
    # What was said and asked is read once; each time the branch is read anew, at most half of the context with it.
    assert 0 < found["here"]["tokens_decoded"] - found["conversation_tokens"] <= found["reseeds"] * 128
    assert found["saved"]["tokens_decoded"] > 0


def test_resume(run: Any) -> None:
    found = run("resume", "--chars", 200, "--before", 4, "--tokens", 8)
    assert len(found["said"]) == 8
    assert found["resumed"] == found["said"]
    assert found["here"]["tokens_decoded"] == found["here"]["dispatches"] == 8
    assert found["naive"]["tokens_decoded"] == found["position"] + 8
    assert found["again"] == found["said"]
    assert found["saved_bytes"] > 0


def test_exact_where_exactness_is_promised(run: Any, tmp_path: Path) -> None:
    """On a q8_0 model with short dispatches and nothing pruned, forks and separate contexts agree to the last bit, so every count and token does."""
    model = tiny_models.write(tmp_path / "tiny.gguf")
    document = tmp_path / "document.txt"
    document.write_text("the sea and the whale and the ship", encoding="utf-8")
    found = run("contrastive", "--document", document, "--question", "is the sea red", "--tokens", 20, model=model)
    assert found["said"] == found["mixed"] != found["alone"]
    found = run("resume", "--document", document, model=model)
    assert found["resumed"] == found["again"] == found["said"]
    assert run("classify", model=model)["moved"] == 0


def test_what_the_table_lists_is_what_there_is() -> None:
    """Every program is in docs/examples/README.md and tested here, and nothing else is."""
    programs = {path.stem for path in EXAMPLES.glob("*.py")} - {"_work"}
    listed = set(re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.M))
    assert listed == programs
    assert {name.removeprefix("test_") for name in globals() if name.startswith("test_")} >= programs


def test_without_comparing(run: Any, tmp_path: Path) -> None:
    found = run("classify", "-n", 2, "--no-compare", model=tiny_models.write(tmp_path / "tiny.gguf"))
    assert found["naive"] is None
    assert found["saved"] is None
