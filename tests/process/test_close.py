"""Closing and cancelling from another thread while one is inside."""
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Child

pytestmark = pytest.mark.slow

SETUP = """
model = Model("stub:spin_us=2000;n_ctx_train=100000")
store = model.store(n_batch=8, n_branches=4)
root = store.root(grammar=ENDLESS)
root.prefill(PROMPT)
start = store.pressure().n_dispatches
out = []
def work():
    try:
        out.append({work})
    except BaseException as error:
        out.append(error)
"""
TICK, PREFILL = "store.tick([root], n_steps=20_000)", "store.prefill([(root, [1] * 50_000)])"


@pytest.mark.parametrize("work", [TICK, PREFILL], ids=["tick", "prefill"])
@pytest.mark.parametrize("thing", ["store", "model"])
def test_close_while_another_thread_decodes(child: Child, work: str, thing: str) -> None:
    """close() cuts the call off at a dispatch boundary and waits for it; the thread gets an exception, not freed memory."""
    script = SETUP.replace("{work}", work) + f"""
thread = threading.Thread(target=work)
thread.start()
until(lambda: store.pressure().n_dispatches > start + 5)
{thing}.close()
live = live_objects()
assert (live["stores"], live["contexts"], live["branches"]) == (0, 0, 0), live
thread.join()
[error] = out
assert isinstance(error, (errors.ClosedError, errors.DecodeCancelledError)), repr(error)
if "tick" in {work!r}:
    assert isinstance(error, errors.DecodeCancelledError) and error.state == "advanced" and error.partial
    assert error.result.n_ticks == len(error.result.tokens[0]) >= 1
raises(errors.ClosedError, lambda: root.position)
raises(errors.ClosedError, lambda: store.tick([root]))
raises(errors.ClosedError, store.root)
raises(errors.ClosedError, store.pressure)
assert not root.is_alive and store.is_closed
{thing}.close()
model.close()
assert live_objects() == NOTHING
"""
    child(script)


@pytest.mark.parametrize("work", [TICK, PREFILL], ids=["tick", "prefill"])
def test_close_from_another_thread_while_the_main_one_decodes(child: Child, work: str) -> None:
    script = SETUP.replace("{work}", work) + """
def close():
    until(lambda: store.pressure().n_dispatches > start + 5)
    store.close()
thread = threading.Thread(target=close)
thread.start()
work()
thread.join()
[error] = out
assert isinstance(error, (errors.ClosedError, errors.DecodeCancelledError)), repr(error)
live = live_objects()
assert (live["stores"], live["contexts"], live["branches"], live["models"]) == (0, 0, 0, 1), live
"""
    child(script)


def test_close_from_the_progress_callback(child: Child) -> None:
    script = SETUP.replace("{work}", "store.prefill([(root, [1] * 800)], progress=lambda landed, total: store.close())") + """
work()
assert isinstance(out[0], errors.ClosedError), repr(out[0])
assert live_objects()["stores"] == 0
"""
    child(script)


def test_many_threads_close_at_once(child: Child) -> None:
    """It is freed once, whoever comes first; nobody gets an error."""
    script = """
    for _ in range(20):
        model, store, *_ = everything()
        barrier, failed = threading.Barrier(8), []
        def close(thing):
            barrier.wait()
            try:
                thing.close()
            except BaseException as error:
                failed.append(error)
        threads = [threading.Thread(target=close, args=(thing,)) for thing in (model, store) * 4]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not failed, failed
        del _
        assert live_objects() == NOTHING, live_objects()
    """
    child(script)


@pytest.mark.parametrize("work", [TICK, PREFILL], ids=["tick", "prefill"])
@pytest.mark.parametrize("where", ["main", "other"])
def test_cancel(child: Child, work: str, where: str) -> None:
    """From another thread, into either: whole dispatches landed, the branch is sound, and the next call is not cancelled."""
    script = SETUP.replace("{work}", work) + f"""
def cancel():
    until(lambda: store.pressure().n_dispatches > start + 5)
    store.cancel()
first, second = (work, cancel) if {where!r} == "main" else (cancel, work)
thread = threading.Thread(target=second)
thread.start()
first()
thread.join()
[error] = out
assert isinstance(error, errors.DecodeCancelledError), repr(error)
assert error.state == "advanced"
position = root.position
assert len(PROMPT) < position < 60_000 and root.cells_own == position == store.pressure().cells_used
if "tick" in {work!r}:
    assert error.result.n_ticks == len(error.result.tokens[0]) == position - len(PROMPT)
    assert np.array_equal(root.logits(), fresh_logits(model, PROMPT + error.result.tokens[0]))
assert not root.is_poisoned
root.commit(97)
assert store.prefill([(root, [1] * 24)]) == 3
"""
    child(script)


def test_a_second_thread_is_refused_and_changes_nothing(child: Child) -> None:
    """The first is inside until it is told to leave, however long the second takes."""
    script = SETUP.replace("{work}", TICK) + """
kid = root.fork()
thread = threading.Thread(target=work)
thread.start()
until(lambda: store.pressure().n_dispatches > start + 3)
for call in (lambda: store.tick([kid]), lambda: kid.commit(97), lambda: kid.prefill([1]), lambda: kid.sample(), lambda: kid.position,
             lambda: root.fork(), lambda: kid.prune(), store.root, store.branches):
    raises(errors.BusyError, call)
assert thread.is_alive() and not out
store.cancel()
thread.join()
[error] = out
assert isinstance(error, errors.DecodeCancelledError), repr(error)
ticks = error.result
assert ticks.n_ticks >= 3 and root.position == len(PROMPT) + len(ticks.tokens[0]) and kid.position == len(PROMPT)
assert len(store.branches()) == 2
kid.commit(97)
"""
    child(script)


@pytest.mark.parametrize(("rc", "kind", "state"), [(1, "NoCellsError", "advanced"), (-1, "InternalKernelError", "advanced"), (-2, "DecodeError", "poisoned")])
def test_a_later_dispatch_of_a_prefill_fails(child: Child, rc: int, kind: str, state: str) -> None:
    """One prefill is many native calls: what it says of the state counts those before the one that failed."""
    script = f"""
    model = Model("stub:fail_at=3;fail_rc={rc}")
    store = model.store(n_ctx=256, n_batch=8)
    root = store.root()
    error = raises(errors.{kind}, lambda: root.prefill(PROMPT))
    assert root.position == 16
    assert (error.state, error.partial, error.engine_rc) == ({state!r}, True, {rc}), (error.state, error.partial, error.engine_rc)
    """
    child(script)
