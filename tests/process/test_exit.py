"""The interpreter ends, in every way it can, with native objects open or at work; and the collector takes them in any order."""
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Child

pytestmark = pytest.mark.slow

TRACEBACK = r"Traceback \(most recent call last\):\n(  [^\n]*\n)+RuntimeError: on purpose\n"  # one, and nothing after it


# ------------------------------------------------------------------------------------------------------------------- exit


def test_exit_with_everything_open(child: Child, model: str) -> None:
    assert child("kept = everything(); print(live_objects()['contexts'])", model) == "2\n"


ALLOCATORS = {"debug": {"PYTHONMALLOC": "debug"}, "perturbed": {"PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "165", "MALLOC_CHECK_": "3"}}


@pytest.mark.parametrize("env", ALLOCATORS.values(), ids=ALLOCATORS)
def test_exit_under_an_allocator_that_looks_closely(child: Child, env: dict[str, str]) -> None:
    """Freed memory is overwritten: whoever reads or frees it again is found out."""
    script = """
    kept = everything()
    more = everything()
    del more
    gc.collect()
    first = everything()
    first[0].close()
    assert live_objects()["stores"] == 2
    """
    child(script, flags=("-W", "error"), **env)


def test_nothing_is_left_after_closing_everything(child: Child, model: str) -> None:
    script = """
    kept = everything()
    busy = live_objects()
    assert busy["stores"] == busy["contexts"] == 2 and busy["models"] == busy["weights"] == 1 and busy["branches"] == 5 and busy["grammars"] == 1, busy
    kept[0].close()
    assert all(thing.is_closed for thing in kept if isinstance(thing, (Model, Store)))
    assert live_objects() == NOTHING, live_objects()
    """
    child(script, model)


def test_sys_exit_inside_with_blocks(child: Child, model: str) -> None:
    script = """
    def left():
        assert live_objects() == NOTHING, live_objects()
        print("left")
    with Model(MODEL) as model, Store(model, n_ctx=256) as store, store.root() as root:
        root.prefill(PROMPT)
        with root.fork() as kid:
            kid.commit(65)
            atexit.register(left)
            sys.exit(3)
    """
    assert child(script, model, code=3) == "left\n"


def test_os_exit(child: Child, model: str) -> None:
    child("kept = everything(); os._exit(4)", model, code=4)


def test_os_exit_while_another_thread_decodes(child: Child) -> None:
    script = """
    model = Model("stub:spin_us=3000")
    store = model.store()
    root = store.root(grammar=ENDLESS)
    root.prefill(PROMPT)
    threading.Thread(target=lambda: store.tick([root], n_steps=4000)).start()
    until(lambda: store.pressure().n_dispatches > 3)
    os._exit(5)
    """
    child(script, code=5)


def test_unhandled_exception_with_objects_open(child: Child, model: str) -> None:
    child("kept = everything()\nraise RuntimeError('on purpose')", model, code=1, stderr=TRACEBACK)


def test_unhandled_exception_in_with_blocks(child: Child, model: str) -> None:
    script = """
    with Model(MODEL) as model, Store(model, n_ctx=256) as store, store.root() as root:
        root.prefill(PROMPT)
        raise RuntimeError('on purpose')
    """
    child(script, model, code=1, stderr=TRACEBACK)


WORK = {
    "tick": "store.tick([root], n_steps={steps})",
    "prefill": "store.prefill([(root, [1] * {steps} * 8)])",
    "loop of ticks": "[store.tick([root]) for _ in range({steps})]",
    "loop of commits": "[store.commit([root], [97]) for _ in range({steps})]",
}


@pytest.mark.parametrize("work", WORK)
def test_exit_while_a_daemon_thread_decodes(child: Child, work: str) -> None:
    """The work would take minutes: it is cut off, its memory is given back while the thread still stands there, and nobody complains."""
    script = f"""
    model = Model("stub:spin_us=3000;n_ctx_train=1000000")
    store = model.store(n_batch=8)
    root = store.root(grammar=ENDLESS)
    root.prefill(PROMPT)
    threading.Thread(target=lambda: {WORK[work].format(steps=30_000)}, daemon=True).start()
    until(lambda: store.pressure().n_dispatches > 10)
    print("leaving")
    """
    assert child(script) == "leaving\n"


@pytest.mark.parametrize("work", WORK)
def test_exit_while_a_thread_decodes(child: Child, work: str) -> None:
    """The interpreter waits for a thread that is no daemon; its work is not cut off."""
    script = f"""
    model = Model("stub:spin_us=2000;n_ctx_train=4096")
    store = model.store(n_batch=8)
    root = store.root(grammar=ENDLESS)
    root.prefill(PROMPT)
    def body():
        {WORK[work].format(steps=60)}
        print("done", store.pressure().n_dispatches >= 60)
    threading.Thread(target=body).start()
    until(lambda: store.pressure().n_dispatches > 10)
    print("leaving")
    """
    assert child(script) == "leaving\ndone True\n"


def test_exit_while_daemon_threads_decode_in_stores_of_one_model(child: Child, model: str) -> None:
    script = """
    model = Model(MODEL)
    stores = [model.store(n_ctx=512, n_branches=2, n_threads=1) for _ in range(3)]
    def body(store):
        while True:
            with store.root() as root:
                root.prefill(PROMPT)
                store.tick([root], n_steps=20)
    for store in stores:
        threading.Thread(target=body, args=(store,), daemon=True).start()
    until(lambda: all(store.pressure().n_dispatches > 10 for store in stores))
    """
    child(script, model)


def test_atexit_hooks_before_and_after_ours(child: Child) -> None:
    """A hook made after the import runs before the teardown and can use everything; one made before finds it all closed."""
    before = """
    import atexit
    def early():
        assert store.is_closed and model.is_closed
        raises(errors.ClosedError, store.root)
        raises(errors.ClosedError, lambda: model.vocab.encode("x"))
        store.close()
        assert live_objects() == NOTHING, live_objects()
        print("early")
    atexit.register(early)
    """
    script = """
    model = Model(MODEL)
    store = model.store(n_ctx=256)
    def late():
        root = store.root()
        root.prefill(PROMPT)
        print("late", store.tick([root], n_steps=2).n_ticks)
    atexit.register(late)
    """
    assert child(script, before=before) == "late 2\nearly\n"


def test_a_user_s_del_at_shutdown(child: Child) -> None:
    """A __del__ that closes, and one that uses, run when globals are torn down: after the teardown, and to no harm."""
    script = """
    class Owner:
        def __init__(self):
            self.model = Model("stub:")
            self.store = self.model.store(n_ctx=256)
            self.root = self.store.root()
            self.closed = errors.ClosedError
        def __del__(self):
            try:
                self.root.commit(65)
            except self.closed:
                self.store.close()
                self.model.close()
                os.write(1, b"quiet\\n")
    owner = Owner()
    owner.me = owner
    sys.keep = owner
    """
    assert child(script) in ("quiet\n", "")


# -------------------------------------------------------------------------------------------------------------- collection


def test_collected_in_any_order(child: Child) -> None:
    """The names go one by one, in every order; with the last one everything native is gone."""
    script = """
    names = ("model", "store", "branch", "view")
    for order in itertools.permutations(names):
        model = Model("stub:")
        store = model.store(n_ctx=256)
        branch = store.root()
        branch.prefill([1, 2, 3])
        view = branch.logits_view()
        there = dict(model=model, store=store, branch=branch, view=view)
        del model, store, branch, view
        for name in order:
            del there[name]
            gc.collect()
            held = {"store", "branch", "view"} & there.keys()
            live = live_objects()
            assert live["stores"] == live["contexts"] == bool(held), (order, name, live)
            assert live["weights"] == bool(there), (order, name, live)
        assert live_objects() == NOTHING, (order, live_objects())
    """
    child(script)


def test_model_deleted_before_its_store(child: Child, model: str) -> None:
    """A store keeps its model: it works on, and takes it along at the end."""
    script = """
    model = Model(MODEL)
    expected = fresh_logits(model, PROMPT)
    store = model.store(n_ctx=256)
    del model
    gc.collect()
    root = store.root()
    root.prefill(PROMPT)
    assert np.allclose(root.logits(), expected, atol=1e-3)
    assert live_objects()["models"] == 1
    del root, store
    gc.collect()
    assert live_objects() == NOTHING, live_objects()
    """
    child(script, model)


def test_reference_cycles_are_collected(child: Child) -> None:
    script = """
    gc.disable()
    for shape in range(6):
        model, store, root, kids, grammar, other, view, _, text = everything()  # without the array: numpy's are no business of the collector
        cycle = [model, store, root, kids, grammar, other, view, text]
        if shape & 1:
            cycle.append(cycle)
        if shape & 2:
            model.friend, store.friend, other.friend = store, other, model
        if shape & 4:
            view.friend, text.friend, store.back = store, view, cycle
        refs = [weakref.ref(model), weakref.ref(store)]
        del model, store, root, kids, grammar, other, view, _, text, cycle
        gc.collect()
        assert [ref() for ref in refs] == [None, None]
        assert live_objects() == NOTHING, (shape, live_objects())
    """
    child(script)


def test_collected_by_another_thread_while_stores_are_at_work(child: Child) -> None:
    """Finalizers run on whatever thread collects; stores that are in use are none of their business."""
    script = """
    model = Model("stub:spin_us=200")
    stop, wrong = threading.Event(), []
    def work():
        store = model.store(n_ctx=256)
        while not stop.is_set():
            with store.root(sampling=Sampling(seed=1)) as root:
                root.prefill([1, 2, 3])
                wrong.extend(x for x in [store.tick([root], n_steps=5).n_ticks] if not 1 <= x <= 5)
    threads = [threading.Thread(target=work) for _ in range(2)]
    [t.start() for t in threads]
    for _ in range(60):
        store = model.store(n_ctx=256)
        store.me = store
        store.root().prefill([1])
        del store
        gc.collect()
    stop.set()
    [t.join() for t in threads]
    del threads
    gc.collect()
    assert not wrong
    live = live_objects()
    assert (live["stores"], live["branches"], live["models"]) == (0, 0, 1), live
    """
    child(script)


def test_an_array_of_logits_keeps_the_memory_it_shows(child: Child) -> None:
    """Nothing was decoded, pruned or closed: the array must stay readable when it is all that is left of the store."""
    script = """
    model = Model("stub:n_vocab=100000")
    store = model.store(n_ctx=256)
    root = store.root()
    root.prefill(PROMPT)
    array, copy = root.logits_view().array, root.logits()
    there = weakref.ref(store)
    del model, store, root
    gc.collect()
    assert there() is not None, "the array shows memory that was given back"
    assert np.array_equal(array, copy)
    """
    child(script, flags=("-W", "error"), MALLOC_PERTURB_="165")


def test_a_failed_construction_leaves_nothing(child: Child) -> None:
    """A half-made object has nothing to free, and its going is silent."""
    script = """
    model = Model("stub:")
    for call in (lambda: Model("nowhere.gguf"), lambda: Model("stub:nonsense=1"), lambda: Model("stub:", vocab="x"),
                 lambda: model.store(n_ctx=0), lambda: model.store(n_branches=10_000), lambda: model.store(type_k="q9"),
                 lambda: Store(None), lambda: model.store().root(grammar="not a grammar"), lambda: model.store(n_batch=1)):
        raises(Exception, call)
    gc.collect()
    assert live_objects() == NOTHING | {"models": 1, "weights": 1}, live_objects()
    """
    child(script)
