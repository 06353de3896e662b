"""The planner on headers of its own: what it promises, for any memory, request and setting."""
from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from headers import Tensor, write_header
from hypothesis import given, settings
from hypothesis import strategies as st

from pylloyal import FixedPool, Plan, Policy, errors, plan
from pylloyal.capacity.header import Header
from pylloyal.capacity.search import CAP, shortfall
from pylloyal.capacity.settings import KV_TYPES, padded
from pylloyal.capacity.windows import Advice

MIB, GIB = 1 << 20, 1 << 30


def llama(n_layer: int = 4, **more: Any) -> dict[str, Any]:
    return {"general.architecture": "llama", **{f"llama.{key}": value for key, value in {
        "context_length": 32768, "embedding_length": 256, "block_count": n_layer, "feed_forward_length": 512, "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": 1000, **more}.items()}}


def gemma3() -> dict[str, Any]:
    """The sizes of gemma-3-270m."""
    return {"general.architecture": "gemma3", **{f"gemma3.{key}": value for key, value in {
        "context_length": 32768, "embedding_length": 640, "block_count": 18, "feed_forward_length": 2048, "attention.head_count": 4, "attention.head_count_kv": 1, "attention.key_length": 256,
        "attention.value_length": 256, "attention.sliding_window": 512, "vocab_size": 262144}.items()}}


def hybrid() -> dict[str, Any]:
    return {"general.architecture": "qwen35", **{f"qwen35.{key}": value for key, value in {
        "context_length": 65536, "embedding_length": 256, "block_count": 8, "feed_forward_length": 512, "attention.head_count": 4, "attention.head_count_kv": 2, "ssm.conv_kernel": 4,
        "ssm.inner_size": 256, "ssm.state_size": 64, "ssm.time_step_rank": 4, "ssm.group_count": 2, "vocab_size": 1000}.items()}}


TENSORS: list[Tensor] = [("token_embd.weight", (256, 1000), "f16"), ("output.weight", (256, 1000), "q8_0"),
                         *((f"blk.{i}.ffn_up.weight", (256, 4096), "q8_0") for i in range(4)), *((f"blk.{i}.ffn_down.weight", (4096, 256), "q4_0") for i in range(4))]
WEIGHTS = 256 * 1000 * 2 + 256 * 1000 // 32 * 34 + 4 * (256 * 4096 // 32 * (34 + 18))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[override]
    path = tmp_path_factory.mktemp("plan") / "model.gguf"
    write_header(path, llama(), TENSORS)
    return path


def pool(n: int) -> FixedPool:
    return FixedPool("RAM", n, n)


def device_sums(made: Plan) -> dict[int, int]:
    sums: dict[int, int] = {}
    for line in made.ledger:
        sums[line.device] = sums.get(line.device, 0) + line.bytes
    return sums


# ------------------------------------------------------------------------------------------------------------- what is known


def test_known_figures() -> None:
    for full, mib in ((True, 576), (False, 111)):
        made = plan(gemma3(), context=32768, swa_full=full, branches=1, memory="64GiB")
        assert made.totals["kv_bytes"] == mib * MIB
    smol = llama(30, embedding_length=576, **{"attention.head_count": 9, "attention.head_count_kv": 3})
    for kv, per_token in (("f16", 23_040), ("q8_0", 12_240)):
        made = plan(smol, context=8192, kv=kv, memory="64GiB")
        assert made.totals["kv_bytes"] == per_token * 8192
    assert made.context.kv_cells == 8192


def test_weights_are_the_tensors(model: Path) -> None:
    made = plan(model, memory="8GiB")
    assert made.totals["weights_bytes"] == WEIGHTS
    assert [line.known for line in made.lines if line.kind == "weights"] == ["exact"]
    assert (made.verdict, made.binding, made.why) == ("fits", "", "")
    assert not plan(model, memory="8GiB").notes
    assert "weights" in plan(llama(), memory="8GiB").notes[0]


@pytest.mark.parametrize(("asked", "n_ctx"), [(None, 32768), (1, 256), (1000, 1024), ("4k", 4096), ("8,192", 8192), (32768, 32768)])
def test_the_context_is_the_engines(model: Path, asked: int | str | None, n_ctx: int) -> None:
    made = plan(model, context=asked, memory="8GiB")
    assert (made.context.n_ctx, made.n_ctx, int(made.windows.served.tokens)) == (n_ctx, n_ctx, n_ctx)


def test_more_than_the_model_is_trained_for_is_not_served(model: Path) -> None:
    made = plan(model, context="64k", memory="8GiB")
    assert (made.n_ctx, made.windows.served.bound, made.verdict) == (32768, "MODEL", "fits")
    assert "65,536 tokens were asked for" in made.notes[0]


def test_a_model_trained_for_less_than_a_step_gets_one() -> None:
    made = plan(llama(context_length=100), memory="8GiB")
    assert (made.verdict, made.context.n_ctx, int(made.windows.served.tokens)) == ("fits", 256, 100)


def test_an_eighth_branch_costs_what_it_costs() -> None:
    """Cells are shared; recurrent state and a row of logits are not."""
    seven, eight = (plan(hybrid(), branches=n, context=8192, memory="64GiB") for n in (7, 8))
    assert eight.totals["kv_bytes"] == seven.totals["kv_bytes"]
    assert eight.totals["recurrent_bytes"] * 7 == seven.totals["recurrent_bytes"] * 8 > 0
    assert eight.totals["output_bytes"] - seven.totals["output_bytes"] == 4 * 1000


# ------------------------------------------------------------------------------------------------------------- properties

MEMORY = st.integers(0, 4 * GIB)
REQUEST = st.none() | st.integers(1, 40_000)
SETTINGS = st.fixed_dictionaries({"branches": st.sampled_from([1, 3, 8]), "batch": st.sampled_from([64, 512]), "kv": st.sampled_from(KV_TYPES), "swa_full": st.booleans()})
MODELS = {"llama": llama(), "gemma3": gemma3(), "hybrid": hybrid()}
MODEL = st.sampled_from(sorted(MODELS))
few = settings(max_examples=60, deadline=None)


@few
@given(MODEL, MEMORY, MEMORY, REQUEST, SETTINGS)
def test_more_memory_never_gives_less(name: str, a: int, b: int, request: int | None, how: dict[str, Any]) -> None:
    less, more = (plan(MODELS[name], context=request, memory=pool(n), **how) for n in sorted((a, b)))
    assert less.windows.fits.tokens <= more.windows.fits.tokens
    assert less.windows.served.tokens <= more.windows.served.tokens
    assert less.binding or not more.binding


@few
@given(MODEL, MEMORY, REQUEST, SETTINGS)
def test_what_fits_fits_and_a_step_more_does_not(name: str, memory: int, request: int | None, how: dict[str, Any]) -> None:
    made = plan(MODELS[name], context=request, memory=pool(memory), **how)
    fits = int(made.windows.fits.tokens)
    assert fits == 0 or shortfall(made.demand, made.budgets, fits) == 0
    assert fits >= CAP or shortfall(made.demand, made.budgets, fits + 256) > 0


@few
@given(MODEL, MEMORY, REQUEST, SETTINGS)
def test_windows_are_in_order_and_the_ledger_sums(name: str, memory: int, request: int | None, how: dict[str, Any]) -> None:
    made = plan(MODELS[name], context=request, memory=pool(memory), **how)
    w = made.windows
    assert w.served.tokens <= w.hot.tokens <= w.planned.tokens <= w.ceiling.tokens
    assert w.served.tokens <= w.fits.tokens
    if request:
        assert int(w.served.tokens) <= padded(request)
    assert device_sums(made) == {budget.device: budget.total for budget in made.budgets}
    assert (made.ledger[-1].bytes < 0) == bool(shortfall(made.demand, made.budgets, made.n_ctx))
    assert made.verdict == ("refused" if made.binding else "fits")
    if not made.binding:
        assert made.ledger[-1].bytes >= 0 and made.n_ctx >= min(request or 1, int(w.ceiling.tokens))
    json.dumps(made.to_json())


@few
@given(MODEL, st.integers(0, 2 * MIB), st.integers(1, 1 << 20))
def test_a_request_never_revives_an_impossible_budget(name: str, memory: int, request: int) -> None:
    assert plan(MODELS[name], memory=pool(memory)).windows.fits.tokens == 0
    made = plan(MODELS[name], context=request, memory=pool(memory))
    assert (made.verdict, int(made.windows.served.tokens)) == ("refused", 0)
    with pytest.raises(errors.InsufficientMemoryError) as caught:
        made.require()
    assert caught.value.need is not None and caught.value.have is not None and caught.value.need > caught.value.have
    assert caught.value.largest == 0


@few
@given(MODEL, st.integers(8 * MIB, GIB), st.integers(256, 40_000), SETTINGS)
def test_every_remedy_opens_when_followed(name: str, memory: int, request: int, how: dict[str, Any]) -> None:
    made = plan(MODELS[name], context=request, memory=pool(memory), **how)
    for remedy in made.remedies:
        s = remedy.settings
        again = plan(MODELS[name], context=remedy.n_ctx, branches=s.n_branches, batch=s.n_batch, ubatch=s.n_ubatch, kv_k=s.type_k, kv_v=s.type_v, swa_full=s.swa_full, memory=pool(memory))
        assert (again.verdict, again.n_ctx) == ("fits", remedy.n_ctx), remedy
    costs = [remedy.costs for remedy in made.remedies if remedy.change and remedy.n_ctx >= padded(min(request, 32768))]
    assert not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for a in costs for b in costs)  # none is given up for nothing


# ------------------------------------------------------------------------------------------------------------- advice


def test_advice_is_no_request(model: Path) -> None:
    advice = plan(model, memory="256MiB").windows.served.tokens
    assert isinstance(advice, Advice) and advice == int(advice) and f"{advice:,}" == str(advice)
    with pytest.raises(TypeError, match="no request"):
        plan(model, context=advice, memory="8GiB")  # type: ignore[arg-type]
    assert plan(model, context=int(advice), memory="8GiB").n_ctx == int(advice)  # on purpose it can be


def test_advice_does_not_type_check(tmp_path: Path) -> None:
    code = "from pylloyal import plan\nfound = plan('x')\nplan('x', context=int(found.windows.served.tokens))\nplan('x', context=found.windows.served.tokens)\n"
    (tmp_path / "ratchet.py").write_text(code)
    done = subprocess.run([sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path), str(tmp_path / "ratchet.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ratchet.py:4: error" in done.stdout and done.stdout.count("error:") == 1 and "Advice" in done.stdout


# ------------------------------------------------------------------------------------------------------------- devices, policy


def test_nothing_is_planned_on_memory_nobody_knows(model: Path) -> None:
    made = plan(model, memory=FixedPool("RAM", None, None))
    assert (made.verdict, made.binding, made.windows.fits.bound, int(made.windows.served.tokens)) == ("refused", "UNKNOWN", "UNKNOWN", 0)
    with pytest.raises(errors.UnknownMemoryError):
        made.require()
    assert made.totals["weights_bytes"] == WEIGHTS  # what is certain is still said


def test_layers_go_where_the_engine_puts_them(model: Path) -> None:
    card = FixedPool("CUDA0", 8 * GIB, 6 * GIB)
    made = plan(model, gpu_layers=2, devices=[card], memory="8GiB")
    assert made.demand.placement.layers == (-1, -1, -1, 0)  # the output layer is the second
    assert made.demand.placement.output == 0
    on_card = {line.name: line.bytes for line in made.lines if line.device == 0}
    assert on_card["weights"] == 256 * 1000 // 32 * 34 + 256 * 4096 // 32 * (34 + 18)
    assert on_card["KV cells"] * 4 == made.totals["kv_bytes"]
    assert device_sums(made) == {-1: 8 * GIB, 0: 8 * GIB}
    lines = {line.name: line.bytes for line in made.ledger if line.device == 0}
    assert (lines["used by others"], lines["reserve"]) == (2 * GIB, max(512 * MIB, 8 * GIB // 10))
    stay = plan(model, gpu_layers=2, devices=[card], memory="8GiB", offload_kqv=False)
    assert sum(line.bytes for line in stay.lines if line.device == 0 and line.kind == "kv") == 0
    whole = plan(model, gpu_layers=-1, devices=[card, FixedPool("CUDA1", 8 * GIB, 2 * GIB)], memory="8GiB")
    assert whole.demand.placement.layers == (0, 0, 0, 0) and whole.demand.placement.output == 1  # by what is free: three quarters of five
    with pytest.raises(errors.InvalidArgumentError, match="no accelerator"):
        plan(model, gpu_layers=1, memory="8GiB")


def test_an_accelerator_that_is_full_refuses(model: Path) -> None:
    made = plan(model, gpu_layers=-1, devices=[FixedPool("CUDA0", 8 * GIB, 64 * MIB)], memory="8GiB")
    assert made.verdict == "refused"
    with pytest.raises(errors.InsufficientMemoryError) as caught:
        made.require()
    assert caught.value.have is not None and caught.value.have < 64 * MIB


def test_a_second_context_is_a_second_set_of_everything(model: Path) -> None:
    draft = plan(llama(2), context=4096, memory="1GiB")
    alone, both = (plan(model, context=4096, memory="1GiB", beside=beside) for beside in ((), (draft,)))
    assert both.need == alone.need + draft.need
    assert [line.bytes for line in both.ledger if line.name == "beside: llama"] == [draft.need]
    assert both.totals == alone.totals and both.windows.fits.tokens < alone.windows.fits.tokens


def test_layers_are_a_remedy_too(model: Path) -> None:
    """What a full accelerator cannot take, fewer layers on it can; what is too much for the host, more layers can."""
    card, roomy = FixedPool("CUDA0", 8 * GIB, 48 * MIB), FixedPool("CUDA0", 8 * GIB, 8 * GIB)
    policy = Policy(least_reserve_bytes=0, reserve_percent=0)
    for pool_on, host, layers in ((card, "8GiB", -1), (roomy, "48MiB", 1)):
        made = plan(model, context=32768, gpu_layers=layers, devices=[pool_on], memory=host, policy=policy)
        assert made.verdict == "refused"
        moved = [remedy for remedy in made.remedies if remedy.settings.gpu_layers != layers]
        assert moved
        for remedy in moved:
            s = remedy.settings
            again = plan(model, context=remedy.n_ctx, gpu_layers=s.gpu_layers, devices=[pool_on], memory=host, policy=policy, kv_k=s.type_k, kv_v=s.type_v, batch=s.n_batch, ubatch=s.n_ubatch,
                         branches=s.n_branches)
            assert again.verdict == "fits", remedy


def test_policy_is_in_the_ledger(model: Path) -> None:
    none = plan(model, memory="1GiB", policy=Policy(headroom_percent=0))
    half = plan(model, memory="1GiB", policy=Policy(headroom_percent=50))
    assert [line.bytes for made in (none, half) for line in made.ledger if line.name == "headroom"] == [0, GIB // 2]
    tight = plan(model, memory=pool(plan(model, context=4096).need), policy=Policy(headroom_percent=0), context=4096)
    assert tight.verdict == "fits" and tight.ledger[-1].bytes == 0
    assert plan(model, memory=pool(tight.need - 1), policy=Policy(headroom_percent=0), context=4096).verdict == "refused"
    least = plan(model, memory=pool(tight.need), policy=Policy(headroom_percent=0, least_tokens=4097))
    assert (least.verdict, int(least.windows.served.tokens)) == ("refused", 4096)


@pytest.mark.parametrize(("bad", "error"), [
    ({"context": 0}, errors.InvalidArgumentError), ({"context": -1}, errors.InvalidArgumentError), ({"context": "lots"}, errors.InvalidArgumentError), ({"context": 1.5}, TypeError),
    ({"context": True}, TypeError), ({"context": 1 << 40}, errors.InvalidArgumentError), ({"branches": 0}, errors.InvalidArgumentError), ({"branches": 257}, errors.InvalidArgumentError),
    ({"batch": 4, "branches": 8}, errors.InvalidArgumentError), ({"kv": "q2_k"}, errors.InvalidArgumentError), ({"kv": "q8_0", "flash_attn": False}, errors.InvalidArgumentError),
    ({"memory": "lots"}, errors.InvalidArgumentError), ({"rs_seq": -1}, errors.InvalidArgumentError),
])
def test_bad_parameters_are_told_by_name(model: Path, bad: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        plan(model, **{"memory": "8GiB", **bad})


def test_what_the_engine_would_refuse_is_refused_here() -> None:
    odd = llama(embedding_length=240, **{"attention.head_count": 4, "attention.head_count_kv": 4})
    with pytest.raises(errors.InvalidArgumentError, match="blocks of 32"):
        plan(odd, kv="q8_0", memory="8GiB")


def test_planning_reads_the_header_alone(tmp_path: Path) -> None:
    """A model of 300 GB that is not there: nothing of its weights is touched, and no library is opened."""
    path = tmp_path / "huge.gguf"
    write_header(path, llama(80, embedding_length=8192, **{"attention.head_count": 64, "attention.head_count_kv": 8}),
                 [(f"blk.{i}.ffn_up.weight", (8192, 28672 * 16), "q8_0") for i in range(80)])
    code = ("import sys, pylloyal; p = pylloyal.plan(sys.argv[1], memory='2TiB'); from pylloyal._ffi import load; assert load._library is None;"
            " peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')); print(p.verdict, p.totals['weights_bytes'], peak)")
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    verdict, n_bytes, peak_kib = done.stdout.split()
    assert (verdict, int(n_bytes)) == ("fits", 80 * math.prod((8192, 28672 * 16)) // 32 * 34)
    assert int(peak_kib) < 120_000  # most of it Python and psutil


# ------------------------------------------------------------------------------------------------------------- hostile headers


def test_mutated_headers_plan_or_fail_typed(model: Path, tmp_path: Path) -> None:
    raw = model.read_bytes()
    size = Header(model).file_bytes
    head = raw[:600]
    rng = random.Random(5)
    path = tmp_path / "mutated.gguf"
    done = 0
    for _ in range(300):
        body = bytearray(head)
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(24, len(body))] = rng.randrange(256)
        path.write_bytes(body + raw[len(head) : 4096])
        with path.open("r+b") as file:
            file.truncate(size)
        try:
            made = plan(path, memory="1GiB")
            assert device_sums(made)[-1] == GIB
            done += 1
        except (errors.MetadataError, errors.InvalidArgumentError):
            continue
    assert done > 10
