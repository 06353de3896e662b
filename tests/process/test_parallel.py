"""Threads in Python: stores side by side, one store that is busy, cancel, and models that come and go.

The stub engine and a tiny real model. No time decides anything: what has to be hit in the middle is held there, or repeated until
it was.
"""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_models

import pylloyal

if TYPE_CHECKING:
    from conftest import Child

pytestmark = pytest.mark.slow

TOOLS = """
def together(n, body):
    '''body(0..n-1) on a thread each, all let go at the same moment; what they gave back, or the first exception.'''
    barrier, out = threading.Barrier(n), [None] * n
    def work(i):
        barrier.wait()
        try:
            out[i] = body(i)
        except BaseException as error:
            out[i] = error
    threads = [threading.Thread(target=work, args=(i,)) for i in range(n)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for result in out:
        if isinstance(result, BaseException):
            raise result
    return out

def text(n, of=1):
    return [(of * 131 + i * i * 7 + i * 29) % 251 for i in range(n)]

def conversation(model, seed):
    '''Some of everything on a store of its own, and all that it showed.'''
    with model.store(n_ctx=512, n_branches=6, n_batch=16, n_threads=1) as store:
        root = store.root(sampling=Sampling(seed=seed))
        root.prefill(text(50, seed))
        kids = root.fork(3, seed=seed)
        seen = [store.tick(kids, n_steps=4).tokens, store.tick(kids).tokens, store.sample(kids)]
        kids[0].prune()
        grandchild = kids[1].fork()
        store.commit([grandchild, kids[2]], [65, 66])
        kids[1].fast_forward(grandchild)
        seen += [kid.logits().tobytes() for kid in kids[1:]]
        kids[2].retain_only()
        kids[2].prefill(text(20, seed + 1))
        return [*seen, store.tick(kids[2:], n_steps=5).tokens, kids[2].logits().tobytes(), kids[2].position]
"""


@pytest.fixture(params=["stub", "tiny"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "stub":
        return "stub:"
    if pylloyal.system_info()["engine"]["name"] == "stub":
        pytest.skip("this library was built without llama.cpp")
    return str(tiny_models.write(tmp_path / "tiny.gguf"))


def test_stores_side_by_side(child: Child, model: str) -> None:
    """Stores of one model on threads of their own draw and see what they do one after another."""
    script = TOOLS + """
model = Model(MODEL)
alone = [conversation(model, seed) for seed in range(8)]
assert len({str(seen) for seen in alone}) == 8
parallel = together(4, lambda t: [conversation(model, seed) for seed in (2 * t, 2 * t + 1)])
assert [seen for pair in parallel for seen in pair] == alone
model.close()
assert live_objects() == NOTHING, live_objects()
"""
    child(script, model)


def test_models_come_and_go(child: Child, model: str) -> None:
    """Each thread opens the same file for itself and closes it again: weights are shared while anyone uses them, and then gone."""
    script = TOOLS + """
def body(t):
    out = []
    for seed in range(5):
        with Model(MODEL) as model:
            assert live_objects()["weights"] == 1
            assert model.vocab.decode(model.vocab.encode("whale")) == "whale"
            out.append(conversation(model, seed))
    return out
with Model(MODEL) as held:  # so that it is always one
    results = together(4, body)
    assert all(result == results[0] for result in results)
assert live_objects() == NOTHING, live_objects()
def brief(t):
    for _ in range(10):
        Model(MODEL).store(n_ctx=256, n_branches=1, n_threads=1).root().prefill(text(4))
together(4, brief)
gc.collect()
assert live_objects() == NOTHING, live_objects()
"""
    child(script, model)


def test_a_busy_store(child: Child, model: str) -> None:
    """While one thread is inside, whatever another asks of that store is BusyError and changes nothing; pressure() and another store answer."""
    script = TOOLS + """
model = Model(MODEL)
store, other = (model.store(n_ctx=512, n_branches=5, n_batch=8, n_threads=1) for _ in range(2))
root = store.root(sampling=Sampling(seed=3))
root.prefill(text(12))
kid, busy = root.fork(), store.root()
before = store.pressure(), root.logits().tobytes(), kid.logits().tobytes(), root.sampling
inside, go_on, progress = threading.Event(), threading.Event(), []
def hold(landed, total):
    progress.append(landed)
    assert busy.position == landed  # the thread that is inside may ask
    inside.set()
    assert go_on.wait(30)
thread = threading.Thread(target=lambda: store.prefill([(busy, text(24, 2))], progress=hold))
thread.start()
assert inside.wait(30)
calls = {
    "root": store.root, "fork": kid.fork, "prune": kid.prune, "prune_subtree": root.prune_subtree, "retain_only": kid.retain_only, "fast_forward": lambda: root.fast_forward(kid),
    "prefill": lambda: kid.prefill([1, 2]), "commit": lambda: kid.commit(65), "sample": kid.sample, "tick": lambda: store.tick([kid]), "ticks": lambda: store.tick([kid], n_steps=3),
    "position": lambda: kid.position, "branches": store.branches, "logits": kid.logits, "set_logits": lambda: kid.set_logits([0.0] * len(model.vocab)),
    "merge_logits": lambda: kid.merge_logits([root]), "legal": lambda: kid.legal([65]), "distribution": kid.distribution, "set_bias": lambda: kid.set_bias({65: 1.0}),
    "steer": lambda: kid.steer({65: 1.0}), "sampling": lambda: kid.sampling, "set_sampling": lambda: setattr(kid, "sampling", Sampling(seed=9)),
    "set_grammar": lambda: kid.set_grammar('root ::= "x"'),
}
for name, call in calls.items():
    error = raises(errors.BusyError, call)
    assert name and "another thread" in str(error)
assert store.pressure().cells_used == before[0].cells_used + 8 and len(progress) == 1
fine = other.root()
fine.prefill(text(12))
go_on.set()
thread.join()
assert progress == [8, 16, 24] and busy.position == 24
after = store.pressure(), root.logits().tobytes(), kid.logits().tobytes(), root.sampling
assert after[1:] == before[1:] and kid.sampling == root.sampling and kid.position == 12 and kid.legal([65]) == [True]
assert (after[0].leases_used, after[0].cells_used, after[0].n_tokens_sampled) == (3, 12 + 24, 0)
"""
    child(script, model)


@pytest.mark.parametrize("work", ["prefill", "tick"])
def test_cancel(child: Child, model: str, work: str) -> None:
    """From two threads at once into one that is inside: whole dispatches landed, what the branch sees is what landed, and it goes on."""
    script = TOOLS + f"""
work = {work!r}
model = Model(MODEL if MODEL != "stub:" else "stub:spin_us=300")
store = model.store(n_ctx=2048, n_branches=3, n_batch=3, n_threads=1)
endless = 'root ::= "a" root' if MODEL != "stub:" else ENDLESS
root = store.root(grammar=endless)
root.prefill(text(9))
tokens, cancelled = text(1200, 2), []
def caller():
    while not cancelled:
        kid = root.fork()
        try:
            kid.prefill(tokens) if work == "prefill" else store.tick([kid], n_steps=1200)
            kid.prune()  # it was through before anybody cancelled: again
        except errors.DecodeCancelledError as error:
            cancelled.append((kid, error))
start = store.pressure().n_dispatches
thread = threading.Thread(target=caller)
thread.start()
until(lambda: store.pressure().n_dispatches >= start + 3)
def cancel(t):
    while thread.is_alive():
        store.cancel()
        time.sleep(0)
together(2, cancel)
thread.join()
[(kid, error)] = cancelled
landed = kid.position - 9
assert kid.cells_own == landed < 1200 and kid.cells_inherited == 9 and not kid.is_poisoned
assert (error.state, error.partial) == (("advanced", True) if landed else ("unchanged", False)), (error.state, error.partial, landed)
if work == "prefill":
    assert landed % 3 == 0
    path = tokens[:landed]
else:
    path = error.result.tokens[0]
    assert len(path) == error.result.n_ticks == error.result.n_dispatches == landed and error.result.finish == [None]
kid.commit(97)
with model.store(n_ctx=2048, n_branches=1, n_batch=3, n_threads=1) as other:
    fresh = other.root()
    fresh.prefill([*text(9), *path, 97])
    assert np.array_equal(fresh.logits(), kid.logits())
store.cancel()  # for nobody
assert store.tick([kid], n_steps=3).n_ticks == 3
"""
    child(script, model)


def test_errors_are_the_threads_own(child: Child, model: str) -> None:
    """Each thread fails in a way of its own, over and over, and always gets its own numbers."""
    script = TOOLS + """
model = Model(MODEL)
def body(t):
    with model.store(n_ctx=256 * (t + 1), n_branches=t + 1, n_threads=1) as store:
        root = store.root()
        n_ctx = store.pressure().n_ctx
        for _ in range(40):
            error = raises(errors.NoLeaseError, lambda: root.fork(9))
            assert (error.need, error.have) == (9, t), (error.need, error.have, t)
            error = raises(errors.ContextOverflowError, lambda: root.prefill([1] * (n_ctx + 1 + t)))
            assert (error.need, error.have) == (n_ctx + 1 + t, n_ctx)
            error = raises(errors.InvalidArgumentError, lambda: model.vocab.decode([65] * t + [-7 - t]))
            assert str(-7 - t) in str(error), error
together(4, body)
"""
    child(script, model)


def test_polling(child: Child, model: str) -> None:
    """pressure(), live_objects() and the log may be asked for at any time, from anywhere; the numbers add up and only grow."""
    script = TOOLS + """
model = Model(MODEL)
store = model.store(n_ctx=1024, n_branches=4, n_batch=4, n_threads=1)
root, over, polled = store.root(), threading.Event(), [0, 0]
pylloyal.drain_logs()  # a library for a device that is not here says so
def poll(t):
    last = store.pressure()
    try:
        while not over.is_set():
            now = store.pressure()
            assert now.cells_used + now.cells_remaining == now.n_ctx and now.leases_used + now.leases_remaining == 4
            assert now.n_dispatches >= last.n_dispatches and now.n_tokens_decoded >= last.n_tokens_decoded and now.decode_s >= last.decode_s
            assert live_objects()["stores"] == 1 and pylloyal.drain_logs() == []
            last = now
            polled[t] += 1
    finally:
        over.set()
def work(t):
    try:
        n, drawn = 0, 0
        while (min(polled) < 20 or n < 20) and not over.is_set():
            kid = root.fork() if n else root
            kid.prefill(text(16, n))
            drawn += len(store.tick([kid], n_steps=4).tokens[0])
            if n:
                kid.prune()
            n += 1
        return n, drawn
    finally:
        over.set()
n, drawn = together(3, lambda t: poll(t) if t < 2 else work(t))[2]
end = store.pressure()
assert end.n_tokens_decoded == 16 * n + drawn and end.leases_used == 1 and end.cells_used == root.position
"""
    child(script, model)
