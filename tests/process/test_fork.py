"""os.fork(): what the parent made is dead in the child, loudly on use and silently on closing; both go on with their own."""
from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Child

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")]

# Newer Pythons warn about a fork in a process with several threads, which is what some of these tests are about.
THREADED = ("-X", "dev", "-W", "error", "-W", "ignore:This process:DeprecationWarning")

USES = """
def uses(model, store, root, kid, view):
    '''Every way to use them.'''
    properties = [n for kind in type(root).__mro__ for n, v in vars(kind).items() if isinstance(v, property)]
    assert len(properties) > 8, properties
    yield from ((f"Branch.{name}", lambda name=name: getattr(root, name)) for name in properties)
    yield from {
        "Model.metadata": lambda: model.metadata,
        "Model.chat": lambda: model.chat([{"role": "user", "content": "x"}]),
        "Model.store": lambda: model.store(n_ctx=256),
        "Model.with": lambda: model._ptr(),
        "Vocab.encode": lambda: model.vocab.encode("x"),
        "Vocab.decode": lambda: model.vocab.decode([65]),
        "Vocab.piece": lambda: model.vocab.piece(65),
        "Vocab.flags": lambda: model.vocab.flags([65]),
        "Vocab.ends_generation": lambda: model.vocab.ends_generation(65),
        "TextStream.feed": lambda: model.vocab.stream().feed([65]),
        "Store": lambda: Store(model, n_ctx=256),
        "Store.root": lambda: store.root(),
        "Store.branches": lambda: store.branches(),
        "Store.prune": lambda: store.prune([kid]),
        "Store.retain_only": lambda: store.retain_only(root),
        "Store.prefill": lambda: store.prefill([(root, [1, 2])]),
        "Store.prefill text": lambda: store.prefill([(root, "ab")]),
        "Store.sample": lambda: store.sample([root]),
        "Store.commit": lambda: store.commit([root], [65]),
        "Store.tick": lambda: store.tick([root]),
        "Store.tick many": lambda: store.tick([root], n_steps=4),
        "Store.pressure": lambda: store.pressure(),
        "Store.cancel": lambda: store.cancel(),
        "Branch.fork": lambda: root.fork(),
        "Branch.fork many": lambda: root.fork(2, seed=1),
        "Branch.prune": lambda: kid.prune(),
        "Branch.prune_subtree": lambda: root.prune_subtree(),
        "Branch.retain_only": lambda: root.retain_only(),
        "Branch.prefill": lambda: root.prefill([1]),
        "Branch.commit": lambda: root.commit(65),
        "Branch.sample": lambda: root.sample(),
        "Branch.logits": lambda: root.logits(),
        "Branch.logits_view": lambda: root.logits_view(),
        "Branch.sampling=": lambda: setattr(root, "sampling", Sampling()),
        "Branch.set_grammar": lambda: root.set_grammar('root ::= "a"'),
        "Branch.set_grammar none": lambda: root.set_grammar(None),
        "LogitsView.array": lambda: view.array,
        "Model.embedder": lambda: model.embedder(),
        "Store.score": lambda: store.score([[1]], source=root),
        "Store.from_bytes": lambda: store.from_bytes(b"x"),
        "Store.statistics": lambda: store.statistics(),
        "Branch.to_bytes": lambda: root.to_bytes(),
        "Branch.statistics": lambda: root.statistics(),
        "Branch.set_metrics": lambda: root.set_metrics(),
        "Branch.reseed_kv": lambda: kid.reseed_kv([1]),
        "Branch.fast_forward": lambda: root.fast_forward(kid),
        "Branch.merge_logits": lambda: root.merge_logits([kid]),
        "Branch.set_logits": lambda: root.set_logits([0.0] * 300),
        "Branch.set_bias": lambda: root.set_bias({1: 1.0}),
        "Branch.priors": lambda: root.priors(3),
        "Branch.logits_at": lambda: root.logits_at([1]),
        "Branch.legal": lambda: root.is_legal(1),
        "Branch.surprisal": lambda: root.surprisal(1),
    }.items()

def all_dead(*objects):
    for name, use in uses(*objects):
        try:
            value = use()
        except errors.ForkedProcessError as error:
            assert isinstance(error, RuntimeError) and "fork" in str(error), (name, error)
        except Exception as error:
            raise AssertionError(f"{name} raised {error!r} instead of ForkedProcessError") from error
        else:
            raise AssertionError(f"{name} gave {value!r} in the child")
"""

PAIR = """
model = Model(MODEL)
store = model.store(n_ctx=512, n_branches=6)
root = store.root(sampling=Sampling(seed=1))
root.prefill(PROMPT)
kid = root.fork()
view = root.logits_view()
"""


def test_every_use_in_the_child_says_so(child: Child, model: str) -> None:
    script = USES + PAIR + """
before = live_objects()
def body():
    all_dead(model, store, root, kid, view)
    assert "Model" in repr(model) and "Store" in repr(store) and "Branch" in repr(root)
    assert live_objects() == before
wait_for(in_child(body))
assert live_objects() == before
root.commit(66)
kid.commit(66)
assert np.array_equal(root.logits(), kid.logits()) or np.allclose(root.logits(), kid.logits(), atol=0.1)
"""
    child(script, model)


def test_closing_in_the_child_does_nothing(child: Child, model: str) -> None:
    """Neither close(), nor the collector, nor the exit touches a native object, in the child's copy of the memory or the parent's."""
    script = PAIR + """
view_before, expected = view.array.copy(), live_objects()
def by_hand():
    for thing in (store, model, store):
        thing.close()
        assert thing.is_closed
    assert live_objects() == expected
def by_the_collector():
    global model, store, root, kid, view
    ref = weakref.ref(model)
    del model, store, root, kid, view
    gc.collect()
    assert ref() is None
    assert live_objects() == expected
def by_exit():
    pass
for body in (by_hand, by_the_collector, by_exit):
    wait_for(in_child(body))
assert live_objects() == expected
assert np.array_equal(view.array, view_before)
root.commit(65)
assert store.tick([kid], n_steps=2).n_ticks >= 1
store.close()
model.close()
assert live_objects() == NOTHING
"""
    child(script, model)


def test_leaving_with_blocks_in_the_child_is_silent(child: Child, model: str) -> None:
    """The child of a fork inside with blocks ends by SystemExit, and so leaves the blocks: that is closing, not use."""
    script = """
    expected = None
    with Model(MODEL) as model, Store(model, n_ctx=256) as store, store.root() as root:
        root.prefill(PROMPT)
        with root.fork() as kid:
            pid = in_child(lambda: None)
            wait_for(pid)
            assert live_objects()["branches"] == 2
            kid.commit(65)
        root.commit(66)
    assert live_objects() == NOTHING
    """
    child(script, model)


def test_child_opens_and_decodes_its_own(child: Child, model: str) -> None:
    """Also the same model file: what comes out is what the parent gets."""
    script = PAIR + """
expected = view.array.copy()
before = live_objects()
def body():
    with Model(MODEL) as mine, mine.store(n_ctx=256) as own:
        branch = own.root(sampling=Sampling(seed=1))
        branch.prefill(PROMPT)
        assert np.allclose(branch.logits(), expected, atol=1e-3)
        assert own.tick(branch.fork(2, seed=4), n_steps=5).n_ticks >= 1
        raises(errors.ForkedProcessError, lambda: store.prefill([(root, [1])]))
    assert live_objects() == before
    kept.append(Model("stub:").store(n_ctx=256))  # and something that is open at exit
kept = []
wait_for(in_child(body))
assert live_objects() == before
again = store.root()
again.prefill(PROMPT)
assert np.allclose(again.logits(), expected, atol=1e-3)
"""
    child(script, model)


def test_library_first_loaded_in_the_child(child: Child) -> None:
    script = """
    from pylloyal._ffi import load
    assert load._library is None
    def body():
        with Model("stub:") as model, model.store(n_ctx=256) as store, store.root() as root:
            root.prefill(PROMPT)
    wait_for(in_child(body))
    assert load._library is None
    body()
    """
    child(script)


def test_fork_while_another_thread_loads_the_library(child: Child) -> None:
    """The loader's lock is held by a thread that does not exist in the child."""
    script = """
    from pylloyal._ffi import load
    held, done = threading.Event(), threading.Event()
    def loading():
        with load._lock:
            held.set()
            done.wait()
    thread = threading.Thread(target=loading)
    thread.start()
    held.wait()
    pid = in_child(lambda: Model("stub:").store(n_ctx=256).root().prefill(PROMPT))
    done.set()
    thread.join()
    wait_for(pid)
    """
    child(script, flags=THREADED)


def test_grandchildren(child: Child) -> None:
    """Every generation's objects are dead in the next, also when the numbers of handles repeat."""
    script = USES + PAIR + """
def grandchild(mine):
    all_dead(*mine)
    all_dead(model, store, root, kid, view)
    Model("stub:").store(n_ctx=256).root().prefill(PROMPT)
def body():
    m = Model("stub:")
    s = m.store(n_ctx=256)
    r = s.root()
    r.prefill(PROMPT)
    mine = m, s, r, r.fork(), r.logits_view()
    wait_for(in_child(lambda: grandchild(mine), 10))
    r.commit(65)
    all_dead(model, store, root, kid, view)
wait_for(in_child(body))
root.commit(65)
"""
    child(script)


@pytest.mark.parametrize("work", ["store.tick([root], n_steps=150)", "store.prefill([(root, [1] * 8 * 100)])"], ids=["tick", "prefill"])
def test_fork_while_another_thread_decodes(child: Child, work: str) -> None:
    """The decoding thread does not exist in the child; its store is dead there, and not merely busy."""
    script = USES + f"""
MODEL = "stub:spin_us=3000"
model = Model(MODEL)
store = model.store(n_ctx=2048, n_branches=4, n_batch=8)
root = store.root(grammar=ENDLESS)
root.prefill(PROMPT)
kid, view = root.fork(), root.logits_view()
done = []
thread = threading.Thread(target=lambda: done.append({work}))
thread.start()
until(lambda: store.pressure().n_dispatches > 10)
def body():
    all_dead(model, store, root, kid, view)
    store.close()
    model.close()
    with Model("stub:") as mine, mine.store(n_ctx=256) as own, own.root() as branch:
        branch.prefill(PROMPT)
        own.tick([branch], n_steps=3)
pids = [in_child(body) for _ in range(3)]
assert thread.is_alive()
for pid in pids:
    wait_for(pid)
thread.join()
[result] = done
assert root.position == root.cells_own > len(PROMPT)
assert store.pressure().cells_used == root.position
kid.commit(97)
"""
    child(script, flags=THREADED)


def test_fork_on_the_thread_that_is_not_the_main_one(child: Child) -> None:
    script = USES + PAIR + """
def forks():
    wait_for(in_child(lambda: all_dead(model, store, root, kid, view)))
thread = threading.Thread(target=forks)
thread.start()
thread.join()
root.commit(65)
"""
    # in the child the forking thread is the only one, and SystemExit ends a thread in silence: the process then exits with 0
    child(script, flags=THREADED)


HAMMER = """
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include "pylloyal.h"
static volatile int stop; static volatile unsigned long n; static pthread_t threads[2]; static const pyl_store * store;
static void * handles(void * unused) { while (!stop) { pyl_store_epoch(store); n++; } return unused; }
static void * logs(void * unused) { while (!stop) { pyl_text * text; pyl_log_drain(&text, NULL); pyl_text_free(text); n++; } return unused; }
static void * models(void * unused) { while (!stop) { pyl_model * m; pyl_model_open(&m, "stub:n_vocab=400", 16, NULL); pyl_model_free(m); n++; } return unused; }
void hammer_start(int what, const pyl_store * given) {
    store = given, stop = 0, n = 0;
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, what == 0 ? handles : what == 1 ? logs : models, NULL);
}
unsigned long hammer_count(void) { return n; }
void hammer_stop(void) { stop = 1; for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL); }
"""


@pytest.mark.skipif(sys.platform != "linux", reason="builds a helper with cc")
@pytest.mark.parametrize(("what", "name"), [(0, "handles"), (1, "logs"), (2, "models")], ids=["handles", "logs", "models"])
def test_fork_while_other_threads_are_in_the_library(child: Child, what: int, name: str, tmp_path: Path) -> None:
    """A lock that another thread holds at the fork is held for ever in the child, if nobody sees to it.

    Two native threads call, as fast as they can, what may be called from any thread at any time; twenty children each open a model,
    decode, and read the log. A child that hangs is killed by its alarm.
    """
    import pylloyal

    source, helper, library = tmp_path / "hammer.c", tmp_path / "hammer.so", pylloyal.get_library()
    source.write_text(HAMMER, encoding="utf-8")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-O1", "-shared", "-fPIC", "-pthread", "-I", pylloyal.get_include(), "-o", str(helper), str(source),
                    library, f"-Wl,-rpath,{Path(library).parent}"], check=True)
    script = f"""
    model = Model("stub:")
    store = model.store(n_ctx=256)
    hammer = ctypes.CDLL({str(helper)!r})
    hammer.hammer_count.restype = ctypes.c_ulong
    def body():
        with Model("stub:n_vocab=400") as mine, mine.store(n_ctx=256) as own, own.root() as branch:
            branch.prefill([1, 2, 3])
        pylloyal.drain_logs()
    for n in range(20):
        hammer.hammer_start({what}, store._ptr())
        until(lambda: hammer.hammer_count() > 100)
        pid = in_child(body, 5)
        hammer.hammer_stop()
        status = os.waitpid(pid, 0)[1]
        assert not status, f"forked child {{n}} hung in the library ({name}): {{status}}"
    """
    child(script, flags=THREADED)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(child: Child, method: str, model: str) -> None:
    """Workers open their own; what the parent has open stays out of their way, and comes to no harm."""
    script = f"""
    import multiprocessing
    def work(seed):
        with Model(MODEL) as model, model.store(n_ctx=256) as store, store.root(sampling=Sampling(temperature=0)) as root:
            root.prefill(PROMPT)
            return os.getpid(), store.tick([root], n_steps=4).tokens[0], root.position
    if __name__ == "__main__":
        model = Model(MODEL)
        store = model.store(n_ctx=256)
        root = store.root()
        root.prefill(PROMPT)
        expected, before = work(1)[1:], live_objects()
        context = multiprocessing.get_context({method!r})
        with context.Pool(2) as pool:
            results = pool.map(work, range(4), chunksize=1)
            pool.close()
            pool.join()
        assert [result[1:] for result in results] == [expected] * 4, results
        assert os.getpid() not in {{result[0] for result in results}}
        assert live_objects() == before
        root.commit(65)
        if {method!r} == "fork":
            process = context.Process(target=lambda: raises(errors.ForkedProcessError, lambda: root.commit(65)))
            process.start()
            process.join()
            assert process.exitcode == 0
    """
    child(script, model, flags=THREADED)


def test_objects_do_not_travel_between_processes(child: Child) -> None:
    """Handles cannot be pickled: a copy in another process would own what it does not have."""
    script = """
    import pickle
    model, store, root, *_ = everything()
    for thing in (model, store, root):
        raises((TypeError, AttributeError, ValueError, pickle.PicklingError), lambda: pickle.dumps(thing))
    """
    child(script)
