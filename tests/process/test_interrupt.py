"""Ctrl-C in the middle of things: it is raised, the books are true afterwards, and the store works on."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_models

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


MEDIA = TOOLS + """
from pylloyal import PixelPart, Projector, Prompt
from pylloyal.kernel.parts import TokenPart

def media(n, width, height):
    '''Text of several dispatches and a picture, n times.'''
    dice = np.random.default_rng(1)
    for k in range(n):
        yield TokenPart([1 + (i * 7 + k) % 200 for i in range(20)])
        yield PixelPart(dice.integers(0, 256, (height, width, 3), np.uint8))

def landed(prompt, outcome):
    '''Pictures that are in, and the text behind them: tokens of it that are in, and those that are not. Text may be cut between two dispatches, a picture never.'''
    segments = prompt.segments()
    text, cut = segments[outcome.n_segments], outcome.n_cells - sum(s["n_cells"] for s in segments[:outcome.n_segments])
    if text["kind"] == "rows":  # before a picture
        assert cut == 0, (outcome, text)
        text, cut = segments[outcome.n_segments - 1], segments[outcome.n_segments - 1]["n_cells"]
    positions = sum(s["n_pos"] for s in segments[:segments.index(text)]) + cut
    return sum(s["kind"] == "rows" for s in segments[:outcome.n_segments]), text["tokens"][:cut], text["tokens"][cut:], positions
"""


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("engine", ["stub", "tiny"])
def test_in_prompts_with_pictures(child: Child, tmp_path: Path, engine: str, times: int) -> None:
    """Every picture is in or out, the outcomes say how far each prompt came, nothing is left behind, and the rest can follow."""
    paths = ("stub:mrope=1;spin_us=3000;n_ctx_train=100000", "stub:")
    if engine == "tiny":
        paths = tuple(str(tiny_models.write(tmp_path / f"{name}.gguf", name)) for name in ("tiny-qwen2vl", "mmproj-tiny-qwen2vl"))
    script = MEDIA + f"""
model = Model({paths[0]!r})
projector = Projector(model, {paths[1]!r}, n_threads=1)
options = dict(n_ctx=16384, n_batch=8, n_branches=5, n_threads=1)
items = list(media(120, 48, 32))
store, prompts = model.store(**options), [Prompt(projector, items, add_special=False) for _ in range(2)]
first, second, bystander = store.root(), store.root(), store.root()
bystander.prefill([5, 6, 7])
kept, before, runs = bystander.logits(), live_objects(), projector.statistics().n_encodes
caught = []
thread = interrupt_when(lambda: store.pressure().cells_used >= 100, times={times})
try:
    try:
        store.decode_prompts([(first, prompts[0]), (second, prompts[1])])
    except KeyboardInterrupt as error:
        caught.append(error)
        until(lambda: not thread.is_alive())
except KeyboardInterrupt as error:
    caught.append(error)
while thread.is_alive():
    try:
        thread.join()
    except KeyboardInterrupt:
        pass
one, other = next(error for error in caught if hasattr(error, "result")).result
threads = [t for t in threading.enumerate() if t is not threading.main_thread()]
assert not threads, threads
del caught
gc.collect()
assert live_objects() == before, (before, live_objects())

# what is there is what the outcomes say
assert isinstance(one.error, errors.DecodeCancelledError) and isinstance(other.error, errors.DecodeCancelledError), (one, other)
assert (one.error.state, other.error.state, other.n_segments, other.n_cells) == ("advanced", "unchanged", 0, 0)
n_pictures, there, missing, positions = landed(prompts[0], one)
assert 97 <= one.n_cells < prompts[0].quote().n_cells
assert not first.is_poisoned and not second.is_poisoned
assert (first.cells_own, first.position, first.slack) == (one.n_cells, positions, one.n_cells - positions)
assert (second.cells_own, second.position) == (0, 0)
assert store.pressure().cells_used == one.n_cells + 3
assert np.array_equal(bystander.logits(), kept)
assert n_pictures and 0 <= projector.statistics().n_encodes - runs - n_pictures <= 1

# and the rest can follow, on both: as if nothing had come in between
def prefill(branch, parts):
    with Prompt(projector, parts, add_special=False) as prompt:
        branch.prefill(prompt)
        last = prompt.segments()[-1]
        return len(last["tokens"]) if last["kind"] == "text" else 0

more = items[2 * n_pictures + 2:][:6]
if missing:
    first.prefill(missing)
prefill(first, more)
prefill(second, items[:4])
with model.store(**options) as apart:
    same, other = apart.root(), apart.root()
    n_end = prefill(same, items[:2 * n_pictures])  # with the token that ends a picture, where the projector has one
    same.prefill([*there, *missing][n_end:])
    prefill(same, more)
    prefill(other, items[:4])
    for branch, twin in ((first, same), (second, other)):
        branch.commit(77)
        twin.commit(77)
        assert (branch.position, branch.cells_own) == (twin.position, twin.cells_own)
        assert np.array_equal(branch.logits(), twin.logits())
for prompt in prompts:
    prompt.close()
store.close()
projector.close()
model.close()
quick.close()
slow.close()
assert live_objects() == NOTHING, live_objects()
"""
    child(script)


def test_pictures_interrupted_before_they_began(child: Child) -> None:
    """Then there are no outcomes, and nothing has changed."""
    script = MEDIA + """
from pylloyal._ffi.load import library
projector = Projector(quick, "stub:")
store = quick.store(n_ctx=1024)
root = store.root()
root.prefill(PROMPT)
items = list(media(2, 24, 16))
before = live_objects()
with Prompt(projector, items, add_special=False) as prompt:
    real = library().pyl_decode_prompts_n
    def interrupted(*arguments):
        raise KeyboardInterrupt
    library().pyl_decode_prompts_n = interrupted
    error = raises(KeyboardInterrupt, lambda: root.prefill(prompt))
    library().pyl_decode_prompts_n = real
    assert not hasattr(error, "result")
    assert root.position == root.cells_own == len(PROMPT)
    check_books(store, root, PROMPT)
    root.prefill(prompt)
    assert root.cells_own == len(PROMPT) + 1 + prompt.quote().n_cells
del error
gc.collect()
assert live_objects() == before, (before, live_objects())
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
    assert len(store._step.step_tokens) == store._step.n * store._step._steps
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
