"""Ctrl-C in the middle of things: it is raised, the books are true afterwards, and the store works on."""
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Child

pytestmark = pytest.mark.slow

TOOLS = """
def interrupt_when(fact, times=1):
    '''A thread that sends SIGINT once the fact holds.'''
    def body():
        for _ in range(times):
            until(fact)
            os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread

def check_books(store, branch, history):
    '''Its position is the number of its cells and of the history, and its logits are those of the same history elsewhere.'''
    position = branch.position
    assert position == branch.cells_own + branch.cells_inherited == len(history), (position, branch.cells_own, len(history))
    assert store.pressure().cells_used == sum(b.cells_own for b in store.branches())
    branch.commit(77)
    assert branch.position == position + 1
    assert np.array_equal(branch.logits(), fresh_logits(quick, [*history, 77]))

def lasting_seed():
    '''A seed of draws that meet no end of generation within 300 tokens after the prompt.'''
    with quick.store(n_ctx=4096, n_branches=2) as store:
        root = store.root()
        root.prefill(PROMPT)
        for seed in range(1000):
            with root.fork(seed=seed) as kid:
                if len(store.tick([kid], n_steps=300).tokens[0]) == 300:
                    yield seed

quick = Model("stub:n_ctx_train=4096")
slow = Model("stub:spin_us=3000;n_ctx_train=100000")
"""


def test_in_prefill(child: Child) -> None:
    script = TOOLS + """
store = slow.store(n_ctx=8192, n_batch=8)
root, bystander = store.root(), store.root()
bystander.prefill([5, 6, 7])
prompt = [1 + i % 250 for i in range(8000)]
start, seen = store.pressure().n_dispatches, []
thread = interrupt_when(lambda: store.pressure().n_dispatches >= start + 10)
raises(KeyboardInterrupt, lambda: store.prefill([(root, prompt)], progress=lambda landed, total: seen.append(landed)))
thread.join()
position = root.position
assert 0 < position < len(prompt) and position % 8 == 0, position
assert position - 8 <= seen[-1] <= position
check_books(store, root, prompt[:position])
rest = [9, 8, 7, 6] * 10
store.prefill([(root, rest), (bystander, rest)])
check_books(store, root, [*prompt[:position], 77, *rest])
check_books(store, bystander, [5, 6, 7, *rest])
"""
    child(script)


def test_in_prefill_of_many_branches(child: Child) -> None:
    """Some are finished, one is half-way, the others have not begun: each says where it is."""
    script = TOOLS + """
store = slow.store(n_ctx=8192, n_batch=8, n_branches=5)
roots = [store.root() for _ in range(4)]
prompts = [[k * 50 + i % 40 for i in range(101)] for k in range(4)]
thread = interrupt_when(lambda: store.pressure().n_dispatches >= 20)
raises(KeyboardInterrupt, lambda: store.prefill(list(zip(roots, prompts))))
thread.join()
positions = [root.position for root in roots]
assert positions == sorted(positions, reverse=True) and 0 < sum(positions) < 404 and sum(positions) % 8 == 0, positions
assert [root.has_logits for root in roots] == [position == 101 for position in positions]
for root, prompt, position in zip(roots, prompts, positions):
    check_books(store, root, prompt[:position])
"""
    child(script)


def test_in_tick(child: Child) -> None:
    """At the moment it is raised nothing runs any more: the position can be asked for, and stays."""
    script = TOOLS + """
store = slow.store(n_ctx=60000, n_branches=4)
root = store.root()
root.prefill(PROMPT)
seeds = list(itertools.islice(lasting_seed(), 2))
kids = root.fork(2, seed=seeds)
thread = interrupt_when(lambda: store.pressure().n_dispatches >= 10)
try:
    store.tick(kids, n_steps=20_000)
    raise AssertionError("the tick was not interrupted")
except KeyboardInterrupt as error:
    positions, result = [kid.position for kid in kids], error.result
    threads = [t.name for t in threading.enumerate() if t not in (threading.main_thread(), thread)]
    assert not threads, threads
thread.join()
assert all(0 < p - len(PROMPT) < 250 for p in positions), positions
with quick.store(n_ctx=4096, n_branches=4) as other:
    same = other.root()
    same.prefill(PROMPT)
    twins = same.fork(2, seed=seeds)
    drawn = [other.tick([twin], n_steps=p - len(PROMPT)).tokens[0] for twin, p in zip(twins, positions)]
    assert result.tokens == drawn and result.n_ticks == result.n_dispatches == positions[0] - len(PROMPT)
    for kid, twin, tokens, p in zip(kids, twins, drawn, positions):
        assert len(tokens) == p - len(PROMPT)
        assert kid.position == p
        assert np.array_equal(kid.logits(), twin.logits())
        # and the streams stand where the positions say: both go on alike
        assert store.tick([kid], n_steps=5).tokens == other.tick([twin], n_steps=5).tokens
for kid, tokens in zip(kids, drawn):
    assert kid.cells_own + kid.cells_inherited == kid.position
"""
    child(script)


def test_twice_in_tick(child: Child) -> None:
    """An impatient second Ctrl-C, while the first is being answered, changes nothing about the books."""
    script = TOOLS + """
store = slow.store(n_ctx=60000, n_branches=4)
root = store.root(grammar=ENDLESS)
root.prefill(PROMPT)
thread = interrupt_when(lambda: store.pressure().n_dispatches >= 10, times=2)
seen = 0
try:
    try:
        store.tick([root], n_steps=20_000)
    except KeyboardInterrupt:
        seen += 1
        position = root.position
        until(lambda: not thread.is_alive())
except KeyboardInterrupt:
    seen += 1
until(lambda: not thread.is_alive())
assert seen >= 1
position = root.position
assert len(PROMPT) < position < 500
root.commit(97)
assert root.position == root.cells_own == position + 1 == store.pressure().cells_used
"""
    child(script)


def test_at_the_very_start_of_a_tick(child: Child) -> None:
    """A Ctrl-C that comes before the native call has begun is not lost: the tick ends long before it is through."""
    script = TOOLS + """
store = slow.store(n_ctx=90_000, n_branches=4)
root = store.root(grammar=ENDLESS)
root.prefill(PROMPT)
signal.signal(signal.SIGALRM, signal.default_int_handler)
dice = random.Random(1)
for _ in range(100):
    kid = root.fork()
    try:
        signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 6e-4))
        store.tick([kid], n_steps=2000)
        raise AssertionError("the tick was not interrupted")
    except KeyboardInterrupt as error:
        position, result = kid.position, getattr(error, "result", None)  # none when it came before the first line of the call
    assert kid.position == position < len(PROMPT) + 100, ("the interrupt was lost", kid.position, position)
    assert (len(result.tokens[0]) == result.n_ticks == position - len(PROMPT)) if result else position == len(PROMPT), (position, result)
    kid.prune()
"""
    child(script)


@pytest.mark.parametrize("n_steps", [1, 4])
def test_interrupted_before_it_began(child: Child, n_steps: int) -> None:
    """What an interrupted tick hands over is its own, not what the one before had left in the buffers."""
    script = TOOLS + f"""
from pylloyal._ffi.load import library
store = quick.store(n_ctx=1024)
root = store.root(grammar=ENDLESS)
root.prefill(PROMPT)
assert store.tick([root], n_steps={n_steps}).tokens == [[97] * {n_steps}]
real = library().pyl_tick_n
def interrupted(*arguments):
    raise KeyboardInterrupt
library().pyl_tick_n = interrupted
error = raises(KeyboardInterrupt, lambda: store.tick([root], n_steps={n_steps}))
library().pyl_tick_n = real
assert root.position == len(PROMPT) + {n_steps}
result = getattr(error, "result", None)
assert result is None or (result.n_ticks, result.n_dispatches, result.tokens) == (0, 0, [[]]), result
"""
    child(script)


def test_after_room_for_a_tick_could_not_be_had(child: Child) -> None:
    """A failed allocation leaves the buffers as they were, and not smaller than they are said to be: the next tick would write beyond them."""
    script = """
    model = Model("stub:n_ctx_train=8192")
    store = model.store(n_branches=2)
    root = store.root(grammar=ENDLESS)
    root.prefill(PROMPT)
    raises((MemoryError, errors.InvalidArgumentError, OverflowError, ValueError), lambda: store.tick([root], n_steps=2**40))
    assert root.position == len(PROMPT)
    assert len(store._step.step_tokens) == len(store._step.step_view)
    ticks = store.tick([root], n_steps=3000)
    assert ticks.tokens == [[97] * 3000]
    """
    child(script)


WORK = {
    "sample": "store.sample([root])",
    "tick": "store.tick([kid]) if kid.position < 4000 else None",
    "ticks": "store.tick([kid], n_steps=3) if kid.position < 4000 else None",
    "prefill": "kid.prefill([1, 2, 3]) if kid.position < 4000 else None",
    "commit": "root.commit(65) if root.position < 4000 else None",
}


@pytest.mark.parametrize("work", WORK)
def test_at_any_moment(child: Child, work: str) -> None:
    """Hundreds of interrupts at random moments of a busy loop: after each the store is free, for this thread and for others."""
    script = f"""
    model = Model("stub:n_ctx_train=16384")
    store = model.store()
    root = store.root(sampling=Sampling(seed=1))
    root.prefill(PROMPT)
    kid = root.fork()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    dice = random.Random(1)
    for _ in range(300):
        try:
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(2e-5, 4e-4))
            while True:
                {WORK[work]}
        except KeyboardInterrupt as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            kept = error  # with its traceback, as a debugger or a log would keep it
            try:
                store.sample([root])
                assert root.position == root.cells_own and kid.position == kid.cells_own + kid.cells_inherited
                found = []
                thread = threading.Thread(target=lambda: found.append(store.sample([root])))
                thread.start()
                thread.join()
                assert found, "another thread may not come in"
            finally:
                del kept
        if kid.position > 3000:
            kid.prune()
            kid = root.fork()
    """
    child(script)


@pytest.mark.parametrize(("function", "make"), [("pyl_model_open", "Model('stub:')"), ("pyl_store_open", "model.store(n_ctx=256)")], ids=["model", "store"])
def test_while_opening(child: Child, function: str, make: str) -> None:
    """Opening takes seconds with a real model, and Ctrl-C is answered when it returns: what was opened then belongs to nobody, and must be freed."""
    script = f"""
    from pylloyal._ffi.load import library
    model = Model("stub:")
    before = live_objects()
    real = library().{function}
    def opens_and_is_interrupted(*arguments):
        real(*arguments)
        signal.raise_signal(signal.SIGINT)
    library().{function} = opens_and_is_interrupted
    raises(KeyboardInterrupt, lambda: {make})
    library().{function} = real
    gc.collect()
    assert live_objects() == before, (before, live_objects())
    """
    child(script)


def test_while_a_text_is_made(child: Child) -> None:
    script = """
    from pylloyal._ffi.load import library
    pylloyal.system_info()
    real = library().pyl_build_info
    def makes_and_is_interrupted(*arguments):
        real(*arguments)
        signal.raise_signal(signal.SIGINT)
    library().pyl_build_info = makes_and_is_interrupted
    raises(KeyboardInterrupt, pylloyal.system_info)
    assert live_objects() == NOTHING, live_objects()
    """
    child(script)


def test_an_exception_from_the_progress_callback(child: Child) -> None:
    """Whatever the callback raises comes out as it is, and the branch stands at a dispatch boundary."""
    script = TOOLS + """
store = quick.store(n_ctx=1024, n_batch=8)
root = store.root()
class Enough(Exception):
    pass
def progress(landed, total):
    assert total == 100
    if landed >= 40:
        raise Enough
raises(Enough, lambda: store.prefill([(root, list(range(100)))], progress=progress))
assert root.position == 40
check_books(store, root, list(range(40)))
"""
    child(script)


def test_unhandled_interrupt_ends_the_process(child: Child) -> None:
    """As in a script nobody wrote a handler for: one traceback, and death by SIGINT, with everything open."""
    script = TOOLS + """
store = slow.store(n_ctx=60000)
root = store.root(grammar=ENDLESS)
root.prefill(PROMPT)
interrupt_when(lambda: store.pressure().n_dispatches >= 10)
store.tick([root], n_steps=20_000)
"""
    child(script, code=-2, stderr=r"Traceback \(most recent call last\):\n(  [^\n]*\n)+KeyboardInterrupt ?\n")
