"""Ctrl-C in what runs long beside the branches: scores, reading anew, embeddings. The store is true afterwards and works on."""
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_interrupt import TOOLS

if TYPE_CHECKING:
    from conftest import Child

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("times", [1, 3])
def test_in_score(child: Child, times: int) -> None:
    script = TOOLS + f"""
store = slow.store(n_ctx=1024, n_branches=5, n_batch=8)
source, other = store.root(sampling=Sampling(seed=1), grammar='root ::= "abc"'), store.root()
store.prefill([(source, PROMPT), (other, [5, 6, 7])])
before = (store.branches(), [b.logits().tolist() for b in store.branches()], store.pressure().cells_used, live_objects())
prompts = [[1 + (i * 7 + k) % 250 for k in range(20)] for i in range(3000)]
start, seen = store.pressure().n_dispatches, 0
thread = interrupt_when(lambda: store.pressure().n_dispatches >= start + 10, times={times})
try:
    try:
        store.score(prompts, source=source, tokens=[1, 2])
    except KeyboardInterrupt:
        seen += 1
        until(lambda: not thread.is_alive())
except KeyboardInterrupt:
    seen += 1
assert seen
while thread.is_alive():
    try:
        thread.join()
    except KeyboardInterrupt:
        pass
threads = [t for t in threading.enumerate() if t is not threading.main_thread()]
assert not threads, threads
assert (store.branches(), [b.logits().tolist() for b in store.branches()], store.pressure().cells_used, live_objects()) == before
rows = store.score(prompts[:9], source=source)
for row, prompt in zip(rows, prompts):
    assert np.array_equal(row, fresh_logits(quick, [*PROMPT, *prompt]))
check_books(store, other, [5, 6, 7])
"""
    child(script)


def test_in_reading_anew(child: Child) -> None:
    """The old cells are gone; the position tells how many of the new ones are in, and the rest can follow."""
    script = TOOLS + """
store = slow.store(n_ctx=8192, n_branches=3, n_batch=8)
branch, other = store.root(sampling=Sampling(seed=1)), store.root()
store.prefill([(branch, PROMPT), (other, [5, 6, 7])])
branch.set_metrics()
store.tick([branch])
sampled, metrics = branch.statistics().n_sampled, branch.metrics
text = [1 + i % 250 for i in range(8000)]
start = store.pressure().n_dispatches
thread = interrupt_when(lambda: store.pressure().n_dispatches >= start + 10)
raises(KeyboardInterrupt, lambda: branch.reseed_kv(text[:4], text[4:]))
thread.join()
position = branch.position
assert 0 < position < 8000 and position % 8 == 0, position
assert (branch.is_poisoned, branch.has_logits, branch.statistics().n_sampled, branch.metrics) == (False, False, sampled, metrics)
check_books(store, branch, text[:position])
check_books(store, other, [5, 6, 7])
branch.reseed_kv(text[:4], text[-50:])
check_books(store, branch, [*text[:4], *text[-50:]])
"""
    child(script)


def test_reading_anew_cancelled_by_another_thread(child: Child) -> None:
    script = TOOLS + """
store = slow.store(n_ctx=8192, n_branches=3, n_batch=8)
branch = store.root()
branch.prefill(PROMPT)
text = [1 + i % 250 for i in range(8000)]
start, caught = store.pressure().n_dispatches, []
def body():
    try:
        branch.reseed_kv(text)
    except BaseException as error:
        caught.append(error)
thread = threading.Thread(target=body)
thread.start()
until(lambda: store.pressure().n_dispatches >= start + 5)
raises(errors.BusyError, lambda: branch.position)
while thread.is_alive():
    store.cancel()
thread.join()
error = caught[0]
assert isinstance(error, errors.DecodeCancelledError) and error.state == "advanced" and error.partial, repr(error)
check_books(store, branch, text[:branch.position])
"""
    child(script)


def test_in_embeddings(child: Child) -> None:
    """Answered between two groups of texts; the embedder works on."""
    script = TOOLS + """
model = Model("stub:")
embedder = model.embedder(n_ctx=64)
texts = [[1 + (i * 7 + k) % 250 for k in range(20)] for i in range(400)]
want = embedder.embed(texts[:5])
thread = interrupt_when(lambda: embedder.statistics().n_texts >= 70)
def forever():
    while True:
        embedder.embed(texts)
raises(KeyboardInterrupt, forever)
thread.join()
assert np.array_equal(embedder.embed(texts[:5]), want)
embedder.close()
raises(errors.ClosedError, lambda: embedder.embed(texts[:1]))
"""
    child(script)
