"""Runner of the benchmark: llama-cpp-python.

    python llama_cpp_python.py [batched]

Without a word it is `Llama` as its users have it: one of them, questions one after another, so that its prefix match finds the document in the cache
from the second question on. `batched` is what can be made of its lower level, for `Llama` itself decodes one sequence at a time: LlamaBatch and
llama_decode with a sequence for each question over one unified cache, and the document's cells shared by llama_memory_seq_cp.
"""
from __future__ import annotations

import sys
import time
from typing import Any

import llama_cpp
import numpy as np
from _serve import serve
from llama_cpp import _internals as internals

Params = dict[str, Any]


def end_tokens(vocab: Any, n_vocab: int) -> list[int]:
    """All tokens that end a generation: they are banned, so that every answer is as long as the others'."""
    return [token for token in range(n_vocab) if llama_cpp.llama_vocab_is_eog(vocab, token)]


class OneByOne:
    """`Llama`, and its prefix cache."""

    def __init__(self) -> None:
        self._llama: Any = None

    def open(self, request: Params) -> Params:
        if self._llama is not None:
            self._llama.close()
        began = time.perf_counter()
        self._llama = llama_cpp.Llama(request["model"], n_ctx=request["n_ctx"], n_batch=request["n_batch"], n_ubatch=request["n_batch"], n_threads=request["n_threads"],
                                      n_threads_batch=request["n_threads"], flash_attn=request["flash_attn"] == "on", swa_full=True, verbose=False)
        ended = end_tokens(llama_cpp.llama_model_get_vocab(self._llama._model.model), self._llama.n_vocab())

        def never_end(_ids: Any, scores: Any) -> Any:
            scores[ended] = -np.inf
            return scores

        self._processors = llama_cpp.LogitsProcessorList([never_end])
        return {"seconds": time.perf_counter() - began}

    def document(self, request: Params) -> Params:
        self._llama.reset()  # or the last run's document is still there
        answers = []
        began = time.perf_counter()
        for question in request["questions"]:
            answer: list[int] = []
            for token in self._llama.generate(request["document"] + question, temp=0.0, logits_processor=self._processors):
                answer.append(int(token))
                if len(answer) == request["n_tokens"]:
                    break
            answers.append(answer)
        return {"seconds": time.perf_counter() - began, "answers": answers}


class Batched:
    """One context, many sequences."""

    def __init__(self) -> None:
        self._model: Any = None
        self._context: Any = None
        self._batch: Any = None

    def open(self, request: Params) -> Params:
        for part in (self._batch, self._context, self._model):
            if part is not None:
                part.close()
        began = time.perf_counter()
        self._model = internals.LlamaModel(path_model=request["model"], params=llama_cpp.llama_model_default_params(), verbose=False)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = request["n_ctx"], request["n_batch"], request["n_batch"], request["n_branches"]
        params.n_threads = params.n_threads_batch = request["n_threads"]
        params.kv_unified = params.swa_full = True
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if request["flash_attn"] == "on" else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = internals.LlamaContext(model=self._model, params=params, verbose=False)
        self._batch = internals.LlamaBatch(n_tokens=request["n_batch"], embd=0, n_seq_max=1, verbose=False)
        self._n_batch, self._n_vocab = request["n_batch"], self._model.n_vocab()
        self._ended = end_tokens(llama_cpp.llama_model_get_vocab(self._model.model), self._n_vocab)
        return {"seconds": time.perf_counter() - began}

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Decode (token, position, sequence, whether its logits are wanted) in one batch."""
        batch = self._batch.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if code := llama_cpp.llama_decode(self._context.ctx, batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def _most_likely(self, row: int) -> int:
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context.ctx, row), (self._n_vocab,))
        logits[self._ended] = -np.inf
        return int(logits.argmax())

    def document(self, request: Params) -> Params:
        text, questions, n_tokens = request["document"], request["questions"], request["n_tokens"]
        memory = llama_cpp.llama_get_memory(self._context.ctx)
        llama_cpp.llama_memory_clear(memory, False)
        began = time.perf_counter()
        for start in range(0, len(text), self._n_batch):
            self._decode([(token, start + i, 0, False) for i, token in enumerate(text[start:start + self._n_batch])])
        for i in range(1, len(questions)):
            llama_cpp.llama_memory_seq_cp(memory, 0, i, -1, -1)
        rows = [(token, len(text) + j, i, j == len(question) - 1) for i, question in enumerate(questions) for j, token in enumerate(question)]
        tokens = [-1] * len(questions)
        for start in range(0, len(rows), self._n_batch):
            part = rows[start:start + self._n_batch]
            self._decode(part)
            for row, (_, _, sequence, wanted) in enumerate(part):
                if wanted:
                    tokens[sequence] = self._most_likely(row)
        answers = [[token] for token in tokens]
        for step in range(1, n_tokens):
            self._decode([(tokens[i], len(text) + len(question) + step - 1, i, True) for i, question in enumerate(questions)])
            tokens = [self._most_likely(i) for i in range(len(questions))]
            for answer, token in zip(answers, tokens, strict=True):
                answer.append(token)
        return {"seconds": time.perf_counter() - began, "answers": answers}


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["batched"]):
        sys.exit(f"no such mode: {sys.argv[1:]}")
    runner: OneByOne | Batched = Batched() if sys.argv[1:] else OneByOne()
    serve("llama-cpp-python batched" if sys.argv[1:] else "llama-cpp-python", {"llama-cpp-python": llama_cpp.__version__, "system": llama_cpp.llama_print_system_info().decode()},
          {"open": runner.open, "document": runner.document})
