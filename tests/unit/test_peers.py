"""The peers' environments and runners, as far as they can be seen without a network: fakes stand in for what would be fetched."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pylloyal.bench.documents import BOUNDS, CONTEXTS, PATHS
from pylloyal.bench.runner import Runner, RunnerError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import peers  # noqa: E402
from _cache import FetchError  # noqa: E402


def test_the_benchmark_knows_every_runner_and_every_promise_has_one() -> None:
    runners = {name for peer in peers.PEERS.values() for name in peer.runners}
    assert runners == set(PATHS) - {CONTEXTS}
    assert set(BOUNDS) <= set(PATHS)
    for peer in peers.PEERS.values():
        assert all((ROOT / "tools" / "peers" / file).is_file() for file, *_ in peer.runners.values())


def test_runners_import_nothing_of_ours() -> None:
    for path in (ROOT / "tools" / "peers").glob("*.py"):
        assert not re.search(r"^\s*(?:import|from) pylloyal", path.read_text(encoding="utf-8"), re.M), path.name


@pytest.mark.parametrize("name", sorted(peers.PEERS))
def test_every_requirement_is_locked_by_hash(name: str) -> None:
    text = (ROOT / "requirements" / peers.PEERS[name].lock).read_text(encoding="utf-8")
    blocks = peers.requirements_of(text)
    assert name in blocks
    for lines in blocks.values():
        for line in lines:
            assert re.match(r"[a-z0-9.-]+==\S+ ", line), line
            assert " --hash=sha256:" in line
    assert "://" not in text
    assert sum(line.count("--hash") for lines in blocks.values() for line in lines) == text.count("--hash")


def test_requirements_are_told_apart() -> None:
    text = "# made by hand\na==1 \\\n    --hash=sha256:00 \\\n    --hash=sha256:01\nb==2 ; python_version < '3' \\\n    --hash=sha256:02\nb==3 ; python_version >= '3' \\\n    --hash=sha256:03\n"
    assert peers.requirements_of(text) == {"a": ["a==1 --hash=sha256:00 --hash=sha256:01"],
                                           "b": ["b==2 ; python_version < '3' --hash=sha256:02", "b==3 ; python_version >= '3' --hash=sha256:03"]}


def test_a_peer_that_cannot_be_had_says_why_when_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def environment(name: str, folder: Path) -> Path:
        if name == "llama-cpp-python":
            raise FetchError("pip failed:\n  no network\n  at all")
        return folder / name / "python"

    monkeypatch.setattr(peers, "environment", environment)
    out = tmp_path / "out" / "peers.json"
    assert peers.main(["--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    found = json.loads(out.read_text())
    assert set(found) == set(PATHS) - {CONTEXTS}
    assert found["server, one slot"] == [str(ROOT / "build" / "peers" / "xllamacpp" / "python"), str(ROOT / "tools" / "peers" / "xllamacpp_server.py"), "one-slot"]
    with pytest.raises(RunnerError, match="llama-cpp-python cannot be had: pip failed: no network at all"):
        Runner("llama-cpp-python", found["llama-cpp-python"])


def test_an_unknown_peer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["--only", "vllm"])
    assert "no such peer: vllm" in capsys.readouterr().err


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []
    lock = ["one"]

    def run(*command: str, env: dict[str, str] | None = None) -> str:
        ran.append(command)
        if command[1:3] == ("-m", "venv"):
            (Path(command[-1]) / "bin").mkdir(parents=True, exist_ok=True)
            (Path(command[-1]) / "bin" / "python").touch()
        if "wheel" in command:
            Path(command[-1], "fake-1-py3-none-any.whl").touch()
        return ""

    monkeypatch.setenv("PYLLOYAL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(peers, "run", run)
    monkeypatch.setattr(peers, "key_of", lambda _peer: lock[0])
    monkeypatch.setattr(peers.os, "name", "posix")

    def made() -> list[str]:
        ran.clear()
        peers.environment("llama-cpp-python", tmp_path)
        return [next(word for word in command if word in ("venv", "install", "wheel")) for command in ran]

    assert made() == ["venv", "install", "wheel", "install"]
    assert all("--require-hashes" in command for command in ran[1:3])
    # What is compiled is left to the step that compiles it, with the tools that were installed before it.
    assert "llama-cpp-python" not in peers.requirements_of((tmp_path / "llama-cpp-python" / "requirements.txt").read_text())
    assert "scikit-build-core" in (tmp_path / "llama-cpp-python" / "requirements.txt").read_text()
    assert made() == []
    (tmp_path / "llama-cpp-python" / ".locked").unlink()  # as in another clone: the wheel is there already
    assert made() == ["venv", "install", "install"]
    lock[0] = "two"
    assert made() == ["venv", "install", "wheel", "install"]


def test_what_was_compiled_is_for_every_clone_and_for_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "run", lambda *_command, **_more: "c++ 1")
    peer = peers.PEERS["llama-cpp-python"]
    key = peers.key_of(peer)
    monkeypatch.setattr(peers.sys, "executable", "another clone's")
    assert peers.key_of(peer) == key
    monkeypatch.setattr(peers, "cpu", lambda: "another machine's")
    other = peers.key_of(peer)
    assert other != key
    monkeypatch.setattr(peers, "run", lambda *_command, **_more: "c++ 2")
    assert peers.key_of(peer) not in (key, other)


# ------------------------------------------------------------------------------------------------------------------------------------- the runners

SERVER = """
import http.server, json, os, threading, types
__version__ = "fake"
llama_flash_attn_type = types.SimpleNamespace(LLAMA_FLASH_ATTN_TYPE_ENABLED=1, LLAMA_FLASH_ATTN_TYPE_DISABLED=0)
def get_system_info(): return "CPU : FAKE = 1"
class CommonParams:
    def __init__(self):
        self.model, self.cpuparams, self.cpuparams_batch = types.SimpleNamespace(), types.SimpleNamespace(), types.SimpleNamespace()
class Server:
    def __init__(self, params):
        self.slots = [[] for _ in range(params.n_parallel)]
        # Nothing is answered before as many ask as are to ask at once: one after another would wait for ever.
        self.together = None
        outer, saved = self, {}
        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_): pass
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code, answer = 200, {}
                if self.path == "/completion":
                    slot, prompt = body["id_slot"], body["prompt"]
                    held = outer.slots[slot]
                    n = 0
                    while n < min(len(held), len(prompt) - 1) and held[n] == prompt[n]: n += 1
                    outer.slots[slot] = prompt
                    assert body["n_predict"] == 0 or (body["ignore_eos"] and body["temperature"] == 0 and body["return_tokens"])
                    if body["n_predict"] and params.n_parallel > 1:
                        outer.barrier.wait(timeout=60)
                    if prompt[-1] == 13: code, answer = 500, {"error": "unlucky"}
                    else: answer = {"tokens": [sum(prompt) % 100 + i for i in range(body["n_predict"])], "timings": {"prompt_n": len(prompt) - n}}
                elif "save" in self.path: saved["state"] = outer.slots[int(self.path.split("/")[2].split("?")[0])]
                else: outer.slots[int(self.path.split("/")[2].split("?")[0])] = saved["state"]
                data = json.dumps(answer).encode()
                self.send_response(code); self.send_header("Content-Length", str(len(data))); self.end_headers(); self.wfile.write(data)
        self.barrier = threading.Barrier(params.n_parallel)
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{self.http.server_address[1]}"
        print("a server writes where it likes", flush=True)
"""


@pytest.mark.parametrize(("mode", "name", "n_read"), [
    ("slots", "server", 3 * 22),  # all of it in every slot
    ("one-slot", "server, one slot", 22 + 2 + 2),  # the document once
    ("restored", "server, restored slots", 20 + 2 * 3),  # the document once, and the questions
])
def test_the_server_is_asked_as_its_mode_says(mode: str, name: str, n_read: int, tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.py").write_text(SERVER, encoding="utf-8")
    command = [sys.executable, str(ROOT / "tools" / "peers" / "xllamacpp_server.py"), mode]
    document, questions = list(range(20)), [[50 + i, 60] for i in range(3)]
    with Runner(name, command, env={"PYTHONPATH": str(tmp_path)}) as runner:
        assert runner.versions == {"xllamacpp": "fake", "system": "CPU : FAKE = 1"}
        runner.ask("open", model="a model", n_ctx=512, n_branches=4, n_batch=512, n_threads=1, flash_attn="on")
        for _ in range(2):  # each run has a server of its own: nothing is remembered
            answer = runner.ask("document", document=document, questions=questions, n_tokens=4, timeout=120)
            assert answer["answers"] == [[sum(document + question) % 100 + i for i in range(4)] for question in questions]
            assert answer["n_read"] == n_read
            assert answer["seconds"] > 0
        with pytest.raises(RunnerError, match="500.*unlucky"):
            runner.ask("document", document=document, questions=[[5, 13]], n_tokens=4, timeout=120)
        with pytest.raises(RunnerError, match="cannot do ticks"):
            runner.ask("ticks")
        assert runner.ask("memory")["peak_rss_kib"] > 0
        assert runner.is_alive


def test_a_mode_there_is_not(tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.py").write_text(SERVER, encoding="utf-8")
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "peers" / "xllamacpp_server.py"), "best"], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (done.returncode, "no such mode: best" in done.stderr) == (1, True)


# An engine whose logits are a sum over what a sequence can see: enough to tell whether rows, positions and sequences are the right ones.
LLAMA = """
import ctypes, types
import numpy as np
__version__ = "fake"
N_VOCAB, EOG = 50, 7
LLAMA_FLASH_ATTN_TYPE_ENABLED, LLAMA_FLASH_ATTN_TYPE_DISABLED = 1, 0
def logits_of(tokens):
    out = np.array([(sum((i + 1) * token for i, token in enumerate(tokens)) * (word + 3)) % 97 for word in range(N_VOCAB)], np.float32)
    out[EOG] = 1000  # an answer would end at once
    return out
class LogitsProcessorList(list):
    pass
class Llama:
    def __init__(self, path, **options):
        assert options["flash_attn"] and options["swa_full"]
        self._model = types.SimpleNamespace(model=None)
        self.was_reset = False
    def n_vocab(self): return N_VOCAB
    def reset(self): self.was_reset = True
    def close(self): pass
    def generate(self, tokens, temp, logits_processor):
        assert temp == 0 and self.was_reset
        tokens = list(tokens)
        while True:
            logits = logits_of(tokens)
            for processor in logits_processor:
                logits[:] = processor(tokens, logits)
            tokens.append(int(logits.argmax()))
            yield tokens[-1]
def llama_model_get_vocab(model): return None
def llama_vocab_is_eog(vocab, token): return token == EOG
def llama_print_system_info(): return b"CPU : FAKE = 1"
def llama_model_default_params(): return types.SimpleNamespace()
def llama_context_default_params(): return types.SimpleNamespace()
def llama_get_memory(context): return context
def llama_memory_clear(context, data): context.sequences.clear()
def llama_memory_seq_cp(context, source, target, first, last): context.sequences[target] = dict(context.sequences[source])
def llama_decode(context, batch):
    assert 0 < batch.n_tokens <= context.n_batch
    context.rows = {}
    for i in range(batch.n_tokens):
        sequence = context.sequences.setdefault(batch.seq_id[i][0], {})
        assert batch.pos[i] == len(sequence) and batch.n_seq_id[i] == 1
        sequence[batch.pos[i]] = batch.token[i]
        if batch.logits[i]:
            context.rows[i] = (ctypes.c_float * N_VOCAB)(*logits_of(sequence.values()))
    return 0
def llama_get_logits_ith(context, row): return ctypes.cast(context.rows[row], ctypes.POINTER(ctypes.c_float))
"""
INTERNALS = """
import types
class LlamaModel:
    def __init__(self, **_): self.model = None
    def n_vocab(self): return 50
    def close(self): pass
class LlamaContext:
    def __init__(self, model, params, verbose):
        assert params.kv_unified and params.swa_full and params.n_seq_max >= 3
        self.ctx = types.SimpleNamespace(sequences={}, rows={}, n_batch=params.n_batch)
    def close(self): pass
class LlamaBatch:
    def __init__(self, n_tokens, embd, n_seq_max, verbose):
        self.batch = types.SimpleNamespace(n_tokens=0, token=[0] * n_tokens, pos=[0] * n_tokens, n_seq_id=[0] * n_tokens, logits=[0] * n_tokens, seq_id=[[0] for _ in range(n_tokens)])
    def close(self): pass
"""


def expected(prompt: list[int], n_tokens: int) -> list[int]:
    """What the fake engine's most likely tokens are, the one that ends left out."""
    tokens = list(prompt)
    for _ in range(n_tokens):
        seen = sum((i + 1) * token for i, token in enumerate(tokens))
        scores = [(seen * (word + 3)) % 97 if word != 7 else -1 for word in range(50)]
        tokens.append(scores.index(max(scores)))
    return tokens[len(prompt):]


@pytest.mark.parametrize("mode", [[], ["batched"]])
def test_llama_cpp_python_answers_every_question_in_full(mode: list[str], tmp_path: Path) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(LLAMA, encoding="utf-8")
    (tmp_path / "llama_cpp" / "_internals.py").write_text(INTERNALS, encoding="utf-8")
    document, questions = [(i * 11) % 50 for i in range(21)], [[1, 2, 3, 4, 5], [6], [9, 8, 10, 11, 12, 13, 14, 15, 16]]
    with Runner("llama-cpp-python", [sys.executable, str(ROOT / "tools" / "peers" / "llama_cpp_python.py"), *mode], env={"PYTHONPATH": str(tmp_path)}) as runner:
        assert runner.versions == {"llama-cpp-python": "fake", "system": "CPU : FAKE = 1"}
        for n_batch in (8, 512):  # parts that end within the document and within a question, and all at once
            runner.ask("open", model="a model", n_ctx=512, n_branches=4, n_batch=n_batch, n_threads=1, flash_attn="on")
            for n_tokens in (6, 1):
                answer = runner.ask("document", document=document, questions=questions, n_tokens=n_tokens)
                assert answer["answers"] == [expected(document + question, n_tokens) for question in questions]
                assert answer["seconds"] > 0
