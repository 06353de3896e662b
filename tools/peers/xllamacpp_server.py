"""Runner of the benchmark: llama.cpp's server, inside the xllamacpp wheel, in this process and asked over HTTP on the loopback.

    python xllamacpp_server.py [slots | one-slot | restored]

slots     a slot for each question over one unified cache, all questions asked at the same time, prompt caching on.
one-slot  one slot; questions one after another, so that its prompt cache holds the document from the second question on.
restored  as slots, but the document is read in one slot, saved to a file and restored into all others before the questions are asked: what a
          determined user can make of the server's own means. Each slot then has its own copy of the document's cells.

A server is started anew for each run and not timed, for a prompt cache that remembers the last run would be measured otherwise.
"""
from __future__ import annotations

import gc
import http.client
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp
from _serve import serve

Params = dict[str, Any]
opened: Params = {}


def start(mode: str, n_slots: int, n_cells: int, folder: str) -> Any:
    """A server at its best settings for this machine."""
    params = xllamacpp.CommonParams()
    params.model.path = opened["model"]
    params.n_parallel = n_slots
    params.n_ctx = n_cells
    params.kv_unified = True
    params.cache_prompt = True
    params.cont_batching = True
    params.swa_full = True  # a window's cells are gone when the next question comes, and the document would be read again
    params.ctx_shift = False
    params.fit_params = False  # it would open the model once more to guess what fits
    params.warmup = True
    params.n_gpu_layers = 0
    params.verbosity = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED if opened.get("flash_attn", "on") == "on" else xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_batch, params.n_ubatch = 2048, 512  # its defaults
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = opened["n_threads"]
    params.n_threads_http = max(2, n_slots) + 2
    params.timeout_read = params.timeout_write = 7200
    if mode == "restored":
        params.cache_idle_slots = False  # it would empty the slots that were just restored
        params.slot_save_path = folder + "/"
    return xllamacpp.Server(params)


def post(server: Any, path: str, body: Params) -> Params:
    """The server's answer, by its own API: the one that looks like another company's tells no token ids."""
    connection = http.client.HTTPConnection(server.listening_address.removeprefix("http://"))
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: Params = json.loads(response.read())
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"the server said {response.status} to {path}: {answer}")
    return answer


def ask(server: Any, prompt: list[int], n_tokens: int, slot: int) -> tuple[list[int], int]:
    """What the server answers to token ids, as token ids: exactly n_tokens of the most likely; and how many tokens of the prompt it had to read."""
    answer = post(server, "/completion", {"prompt": prompt, "n_predict": n_tokens, "temperature": 0.0, "top_k": 1, "samplers": ["top_k"], "ignore_eos": True, "cache_prompt": True,
                                          "return_tokens": True, "id_slot": slot, "stream": False})
    tokens = [int(token) for token in answer["tokens"]]
    if len(tokens) != n_tokens:
        raise RuntimeError(f"{len(tokens)} tokens came where {n_tokens} were asked for")
    return tokens, int(answer["timings"]["prompt_n"])


def read_once(server: Any, text: list[int], n_slots: int) -> int:
    """The document's cells in every slot, decoded in the first alone; how many tokens were read."""
    answer = post(server, "/completion", {"prompt": text, "n_predict": 0, "cache_prompt": True, "id_slot": 0, "stream": False})
    post(server, "/slots/0?action=save", {"filename": "document"})
    for slot in range(1, n_slots):
        post(server, f"/slots/{slot}?action=restore", {"filename": "document"})
    return int(answer["timings"]["prompt_n"])


def asked(server: Any, mode: str, text: list[int], questions: list[list[int]], n_tokens: int) -> tuple[list[tuple[list[int], int]], int]:
    """The answers as ask gives them, and how many tokens were read besides."""
    prompts = [text + question for question in questions]
    if mode == "one-slot":
        return [ask(server, prompt, n_tokens, 0) for prompt in prompts], 0
    n_read = read_once(server, text, len(prompts)) if mode == "restored" else 0
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda i: ask(server, prompts[i], n_tokens, i), range(len(prompts)))), n_read


def document(mode: str, request: Params) -> Params:
    text, questions, n_tokens = request["document"], request["questions"], request["n_tokens"]
    n_slots = 1 if mode == "one-slot" else len(questions)
    longest = len(text) + max(len(question) for question in questions) + n_tokens + 8
    with tempfile.TemporaryDirectory() as folder:
        server = start(mode, n_slots, n_slots * (-(-longest // 256) * 256), folder)
        try:
            began = time.perf_counter()
            answers, n_read = asked(server, mode, text, questions, n_tokens)
            return {"seconds": time.perf_counter() - began, "answers": [tokens for tokens, _ in answers], "n_read": n_read + sum(read for _, read in answers)}
        finally:
            del server  # ends it
            gc.collect()


def open_(request: Params) -> Params:
    """Remembered: how many slots a server needs is known only when the questions are."""
    opened.clear()
    opened.update(request)
    return {"seconds": 0.0}


if __name__ == "__main__":
    MODE = sys.argv[1] if len(sys.argv) > 1 else "slots"
    if MODE not in ("slots", "one-slot", "restored"):
        sys.exit(f"no such mode: {MODE}")
    NAMES = {"slots": "server", "one-slot": "server, one slot", "restored": "server, restored slots"}
    serve(NAMES[MODE], {"xllamacpp": xllamacpp.__version__, "system": xllamacpp.get_system_info()},
          {"open": open_, "document": lambda request: document(MODE, request)})
