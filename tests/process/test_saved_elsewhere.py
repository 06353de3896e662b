"""A branch saved by one process continues in another, token for token; on the stub and on a tiny real model."""
from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_models

if TYPE_CHECKING:
    from conftest import Child

pytestmark = pytest.mark.slow

SAMPLING = ("Sampling(temperature=1.2, top_k=0, top_p=0.98, min_p=0.001, typical_p=0.99, penalty_repeat=1.15, penalty_frequency=0.1, penalty_presence=0.1, penalty_last_n=400, "
            "seed=2**63 + 12345)")
TOOLS = """
import dataclasses, json
from pathlib import Path
from pylloyal import describe_saved
FILE = Path(os.environ["SAVED"])

def never_ends(branch):
    vocab = branch.store.model.vocab
    branch.set_bias({t: -float("inf") for t in range(len(vocab)) if vocab.ends_generation(t)})

def opened(model, **options):
    return model.store(**{"n_ctx": 2048, "n_branches": 4, "n_batch": 63, "n_threads": 1, **options})

def told(branch, tokens):
    '''What both processes must agree on, to the last bit.'''
    row = branch.logits()
    print(json.dumps({"tokens": tokens, "position": branch.position, "logits": row.tobytes().hex(), "metrics": repr(branch.metrics), "sampling": repr(branch.sampling),
                      "legal": branch.legal(range(len(branch.store.model.vocab))), "n_sampled": branch.statistics().n_sampled}))
"""
LOADS = TOOLS + """
model = Model(MODEL)
with opened(model, n_ctx=1024, n_branches=2, n_batch=31) as store:
    branch = store.load(FILE)
    assert (branch.parent, branch.cells_own) == (None, branch.position), branch.statistics()
    assert describe_saved(FILE)["position"] == branch.position
    told(branch, store.tick([branch], n_steps=N).tokens[0])
"""


@pytest.fixture(params=["stub", "tiny-llama", "tiny-qwen35", "tiny-mamba2"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A model for both processes: attention, a hybrid, a recurrent one, and the stub."""
    return "stub:" if request.param == "stub" else str(tiny_models.write(tmp_path / f"{request.param}.gguf", request.param))


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return str(tiny_models.write(tmp_path / "tiny-llama.gguf"))


def test_after_500_tokens(child: Child, path: str, tmp_path: Path) -> None:
    saves = TOOLS + f"""
model = Model(MODEL)
with opened(model) as store:
    root = store.root(sampling={SAMPLING})
    root.prefill(PROMPT)
    never_ends(root)
    root.set_metrics(model=True, sampling=True)
    assert len(store.tick([root], n_steps=200).tokens[0]) == 200
    branch = root.fork()
    assert len(store.tick([branch], n_steps=300).tokens[0]) == 300
    branch.save(FILE)
    told(branch, store.tick([branch], n_steps=100).tokens[0])
"""
    saved = str(tmp_path / "saved")
    first = json.loads(child(saves, path, SAVED=saved))
    second = json.loads(child(LOADS.replace("N)", "100)"), path, SAVED=saved))
    assert first == second
    assert (len(first["tokens"]), first["position"], first["n_sampled"]) == (100, 640, 600)


JSON = r'''
root   ::= object
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" ( ["\\bfnrt/] | "u" [0-9a-fA-F]{4} ) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
'''


@pytest.mark.parametrize("said", ["", "{", '{"whale', '{"a": [1, 2.5e', '{"a": "caf\\u00', '{"deep": [[[{"b": true, "c": "sea ', '{"cut": "caf', '{"a": 1}'], ids=range(8))
def test_half_way_through_a_json_object(child: Child, tiny: str, tmp_path: Path, said: str) -> None:
    """Also in the middle of an escape, of a number, and (with the first of two bytes of an é) of a character."""
    saves = TOOLS + f"""
model = Model(MODEL)
text = {said!r}
with opened(model) as store:
    branch = store.root(sampling={SAMPLING}, grammar={JSON!r})
    branch.prefill(PROMPT)
    branch.set_metrics(sampling=True)
    tokens = model.vocab.encode(text)
    if "cut" in text:
        tokens = [*tokens, next(t for t in range(len(model.vocab)) if model.vocab.piece(t) == b"\\xc3")]
    for token in tokens:
        branch.commit(token)
    store.tick([branch], n_steps=3)
    branch.save(FILE)
    assert describe_saved(FILE)["has_grammar"]
    told(branch, store.tick([branch], n_steps=120).tokens[0])
"""
    saved = str(tmp_path / "saved")
    first = json.loads(child(saves, tiny, SAVED=saved))
    second = json.loads(child(LOADS.replace("N)", "120)"), tiny, SAVED=saved))
    assert first == second
    assert first["tokens"] or said in ("{", '{"a": 1}')  # the object may be closed already


TRIGGERS = [{"type": "word", "value": "<tool>", "token": -1}, {"type": "pattern", "value": "<tool>", "token": -1}, {"type": "pattern_full", "value": "[\\s\\S]*?(<tool>[\\s\\S]*)", "token": -1},
            {"type": "token", "value": "<|im_start|>", "token": "<|im_start|>"}]


@pytest.mark.parametrize("trigger", TRIGGERS, ids=lambda trigger: str(trigger["type"]))
@pytest.mark.parametrize("where", ["untouched", "before", "in the trigger", "just after", "half-way"])
def test_a_lazy_grammar_before_and_after_its_trigger(child: Child, tiny: str, tmp_path: Path, trigger: dict[str, object], where: str) -> None:
    """What it has read while it slept is part of it: a trigger may be half said when the branch is saved."""
    word = "<|im_start|>" if trigger["type"] == "token" else "<tool>"
    tool = f"""
model = Model(MODEL)
vocab = model.vocab
WORD, TRIGGER = {word!r}, {trigger!r}
if TRIGGER["type"] == "token":
    TRIGGER["token"] = vocab.encode(WORD, parse_special=True)[0]
    start = [TRIGGER["token"]]
    grammar = 'root ::= <[' + str(TRIGGER["token"]) + ']> "(" [a-z]+ ")"'
else:
    start = vocab.encode(WORD)
    grammar = 'root ::= "<tool>" "(" [a-z]+ ")"'
chat = dataclasses.replace(model.chat([{{"role": "user", "content": "x"}}]), grammar=grammar, grammar_lazy=True, triggers=[TRIGGER])
said = vocab.encode("the sea is ")
parts = {{"untouched": [], "before": said, "in the trigger": said + start[: len(start) // 2], "just after": said + start, "half-way": [*said, *start, *vocab.encode("(whale")]}}
whole = parts["half-way"]
"""
    saves = TOOLS + tool + f"""
with opened(model) as store:
    branch = store.root(sampling={SAMPLING})
    branch.prefill(PROMPT)
    branch.set_grammar(chat)
    for token in parts[{where!r}]:
        branch.commit(token)
    branch.save(FILE)
    for token in whole[len(parts[{where!r}]) :]:
        assert branch.is_legal(token), token
        branch.commit(token)
    assert not branch.is_legal(vocab.encode("!")[0]) and branch.is_legal(vocab.encode("x")[0])
    told(branch, store.tick([branch], n_steps=40).tokens[0])
"""
    loads = TOOLS + tool + f"""
with opened(model, n_ctx=1024, n_branches=2) as store:
    branch = store.load(FILE)
    assert branch.is_legal(vocab.encode("!")[0]) == ({where!r} not in ("just after", "half-way"))
    for token in whole[len(parts[{where!r}]) :]:
        assert branch.is_legal(token), token
        branch.commit(token)
    told(branch, store.tick([branch], n_steps=40).tokens[0])
"""
    saved = str(tmp_path / "saved")
    first, second = json.loads(child(saves, tiny, SAVED=saved)), json.loads(child(loads, tiny, SAVED=saved))
    assert first == second
    assert first["tokens"]


def test_a_lazy_grammar_that_never_woke_goes_on_as_it_was(child: Child, tiny: str, tmp_path: Path) -> None:
    """Free ticks in both processes, over text that holds no trigger."""
    tool = TOOLS + """
model = Model(MODEL)
chat = dataclasses.replace(model.chat([{"role": "user", "content": "x"}]), grammar='root ::= "<tool>" [a-z]+', grammar_lazy=True, triggers=[{"type": "word", "value": "<tool>", "token": -1}])
"""
    saves = tool + f"""
with opened(model) as store:
    branch = store.root(sampling={SAMPLING})
    branch.prefill(PROMPT)
    never_ends(branch)
    branch.set_grammar(chat)
    store.tick([branch], n_steps=150)
    branch.save(FILE)
    told(branch, store.tick([branch], n_steps=150).tokens[0])
"""
    saved = str(tmp_path / "saved")
    first = json.loads(child(saves, tiny, SAVED=saved))
    second = json.loads(child(LOADS.replace("N)", "150)"), tiny, SAVED=saved))
    assert first == second


def test_many_processes_load_one_file(child: Child, tiny: str, tmp_path: Path) -> None:
    """And each saves it again, byte for byte the same."""
    saved = str(tmp_path / "saved")
    child(TOOLS + f"""
with opened(Model(MODEL)) as store:
    branch = store.root(sampling={SAMPLING}, grammar='root ::= [a-z ]+')
    branch.prefill(PROMPT)
    store.tick([branch], n_steps=20)
    branch.save(FILE)
""", tiny, SAVED=saved)
    data = Path(saved).read_bytes()
    for _ in range(3):
        child(TOOLS + """
with opened(Model(MODEL), n_ctx=256) as store:
    store.load(FILE).save(FILE)
""", tiny, SAVED=saved)
        assert Path(saved).read_bytes() == data
    assert [x.name for x in tmp_path.iterdir() if x.name.startswith((".", "saved"))] == ["saved"]


def test_where_one_may_not_write(child: Child, tmp_path: Path) -> None:
    """The old file stays, nothing is left beside it. A superuser may write anywhere, so the child is somebody else."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "saved").write_bytes(b"old")
    child("""
import tempfile  # what saves imports it when it has to, and somebody else may not read where it is
from pathlib import Path
folder = Path(os.environ["FOLDER"])
store = Model(MODEL).store(n_ctx=64)
branch = store.root()
branch.prefill([1, 2, 3])
os.chmod(folder, 0o555)
if os.geteuid() == 0:
    os.seteuid(65534)
raises(PermissionError, lambda: branch.save(folder / "saved"))
raises(PermissionError, lambda: branch.save(folder / "new"))
if os.getuid() == 0:
    os.seteuid(0)
os.chmod(folder, 0o755)
assert [x.name for x in folder.iterdir()] == ["saved"] and (folder / "saved").read_bytes() == b"old"
assert store.pressure().cells_used == 3 and branch.save(folder / "saved") > 0
""", FOLDER=str(folder))


def test_killed_while_saving(child: Child, tmp_path: Path) -> None:
    """Killed at the worst moment, what has the name is the old file, whole."""
    saved = str(tmp_path / "saved")
    Path(saved).write_bytes(b"old")
    child("""
store = Model(MODEL).store(n_ctx=64)
branch = store.root()
branch.prefill([1, 2, 3])
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
branch.save(os.environ["SAVED"])
""", code=-9, SAVED=saved)
    assert Path(saved).read_bytes() == b"old"


def test_forked_children_and_saved_bytes(child: Child) -> None:
    """Bytes are bytes: a child of fork() cannot use the parent's branch, and can load what it saved, into a store of its own."""
    child("""
model = Model(MODEL)
store = model.store(n_ctx=64)
branch = store.root(sampling=Sampling(seed=3))
branch.prefill([1, 2, 3])
data = branch.to_bytes()
expected = [store.tick([branch]).tokens[0] for _ in range(5)]
def body():
    raises(errors.ForkedProcessError, branch.to_bytes)
    raises(errors.ForkedProcessError, lambda: store.from_bytes(data))
    assert pylloyal.describe_saved(data)["position"] == 3
    with Model(MODEL) as own, own.store(n_ctx=64) as mine:
        loaded = mine.from_bytes(data)
        assert [mine.tick([loaded]).tokens[0] for _ in range(5)] == expected
wait_for(in_child(body))
""")
