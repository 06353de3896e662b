"""Plans against the engine, and the door that holds to them: every tiny model, many settings, refusals that leave nothing behind."""
from __future__ import annotations

import dataclasses
import gc
import random
import subprocess
import sys
import warnings
from pathlib import Path

import psutil
import pytest
import tiny_models
from _tiny_specs import SPECS

import pylloyal
from pylloyal import FixedPool, Plan, Policy, errors
from pylloyal.capacity.settings import KV_TYPES
from pylloyal.kernel.system import system_info
from pylloyal.opening import Difference, ask_engine, compare

MIB = 1 << 20
MODELS = [name for name in SPECS if not name.startswith("mmproj")]
N_SETTINGS = 28


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_models.write_all(tmp_path_factory.mktemp("opening"), names=MODELS)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine said is remembered for these tests alone."""
    monkeypatch.setenv("PYLLOYAL_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "dry-runs"))


def random_plan(path: Path, seed: str) -> Plan | None:
    rng = random.Random(seed)
    kv = rng.choice(KV_TYPES)
    ways = {"branches": rng.choice((1, 2, 7, 8, 33)), "batch": rng.choice((64, 256, 512)), "ubatch": rng.choice((0, 0, 64)), "kv_k": kv, "kv_v": kv if rng.random() < 0.7 else rng.choice(KV_TYPES),
                "swa_full": rng.random() < 0.5, "flash_attn": rng.random() < 0.8, "unified": rng.random() < 0.7, "rs_seq": rng.choice((0, 0, 2)), "outputs": rng.choice((0, 40))}
    try:
        return pylloyal.plan(path, context=rng.choice((None, 1, 256, 300, 1000, 2048)), memory="64GiB", **ways)  # type: ignore[arg-type]
    except errors.InvalidArgumentError:
        return None


@pytest.mark.parametrize("name", MODELS)
def test_what_is_planned_is_what_the_engine_lays_out(name: str, paths: dict[str, Path]) -> None:
    n = 0
    for i in range(10 * N_SETTINGS):
        made = random_plan(paths[name], f"{name} {i}")
        if made is None:
            continue
        try:
            ran = ask_engine(paths[name], made.n_ctx, made.settings)
        except (errors.UnsupportedOperationError, errors.InvalidArgumentError) as error:
            # What a store does not take, and other users of the engine may: the plan is for these too.
            if not any(word in str(error) for word in ("n_ubatch", "causal", "decoder", "n_batch")):
                raise
            continue
        totals = made.totals
        assert (totals["kv_bytes"], totals["recurrent_bytes"], totals["output_bytes"]) == (ran.kv_bytes, ran.recurrent_bytes, ran.output_bytes), (i, made.settings)
        # A table of tokens that is the output too may be there twice where nothing is mapped, as in a dry run.
        assert ran.model_bytes - totals["weights_bytes"] in (0, made.demand.weights.table), (i, made.settings)
        assert [getattr(made.context, key) for key in ("n_ctx", "n_ctx_seq", "n_batch", "n_ubatch", "n_seq_max")] == [ran.n_ctx, ran.n_ctx_seq, ran.n_batch, ran.n_ubatch, ran.n_seq_max], i
        assert totals["compute_bytes"] >= ran.compute_bytes, (i, made.settings)
        n += 1
        if n == N_SETTINGS:
            break
    assert n == N_SETTINGS or name == "tiny-bert"  # which has no decoder, so no store


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("tiny-bert", "tiny-qwen3-embed")])
def test_what_opens_is_what_was_planned(name: str, paths: dict[str, Path]) -> None:
    for swa_full, kv in ((True, "f16"), (False, "f16"), (True, "q8_0")):
        try:
            made = pylloyal.plan(paths[name], context=512, branches=3, batch=64, kv=kv, swa_full=swa_full, memory="1GiB")
        except errors.InvalidArgumentError:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pylloyal.open(paths[name], context=512, branches=3, batch=64, kv=kv, swa_full=swa_full, threads=1, memory="1GiB") as store:
                assert store.differences == ()
                assert store.plan.totals["weights_bytes"] == store.actual.model_bytes
                assert {line.known for line in store.plan.lines if line.kind != "other"} == {"exact", "measured"}
                assert store.plan.totals["compute_bytes"] == store.actual.compute_bytes
                assert store.admission.cells().total == store.pressure().n_ctx == 512
                assert made.totals["kv_bytes"] == store.actual.kv_bytes
                root = store.root()
                root.prefill([1, 2, 3])
                assert store.admission.cells().used == 3


def test_closing_the_store_closes_its_model(paths: dict[str, Path]) -> None:
    before = pylloyal.live_objects()
    store = pylloyal.open(paths["tiny-llama"], context=256, threads=1)
    model = store.model
    store.close()
    store.close()
    assert store.is_closed and model.is_closed and pylloyal.live_objects() == before


def test_a_refusal_allocates_nothing(paths: dict[str, Path]) -> None:
    """Not a page of what it refused: 16 GiB of cells that the pool says are not there."""
    pylloyal.open(paths["tiny-llama"], context=256, threads=1).close()  # the library is loaded
    process, before = psutil.Process(), pylloyal.live_objects()
    rss = process.memory_info().rss
    with pytest.raises(errors.InsufficientMemoryError) as caught:
        pylloyal.open(paths["tiny-llama"], context=2048, branches=8, memory="4MiB", threads=1)
    assert process.memory_info().rss - rss < 8 * MIB
    assert pylloyal.live_objects() == before
    error = caught.value
    assert error.need is not None and error.have is not None and error.need > error.have and error.remedies


def test_following_the_suggestion_opens(paths: dict[str, Path]) -> None:
    pool = FixedPool("RAM", 3 * MIB, 3 * MIB)
    ways = {"context": 2048, "batch": 64, "branches": 8, "policy": Policy(headroom_percent=0, least_tokens=256)}
    full = pylloyal.plan(paths["tiny-llama"], memory="1GiB", **ways)  # type: ignore[arg-type]
    tight = full.need - full.totals["kv_bytes"] // 3
    pool = FixedPool("RAM", tight, tight)
    made = pylloyal.plan(paths["tiny-llama"], memory=pool, **ways)  # type: ignore[arg-type]
    assert made.verdict == "refused" and made.remedies
    for remedy in made.remedies:
        s = remedy.settings
        with pylloyal.open(paths["tiny-llama"], context=remedy.n_ctx, branches=s.n_branches, batch=s.n_batch, ubatch=s.n_ubatch, kv_k=s.type_k, kv_v=s.type_v, swa_full=s.swa_full, memory=pool,
                           policy=Policy(headroom_percent=0, least_tokens=256), threads=1) as store:
            assert store.pressure().n_ctx == remedy.n_ctx
    assert pool.free() == tight


def test_the_second_plan_sees_the_first(paths: dict[str, Path]) -> None:
    with pylloyal.open(paths["tiny-llama"], context=2048, memory="1GiB", threads=1) as store:
        one = store.plan.need
    there_is = one * 3 // 2
    pool = FixedPool("RAM", there_is, there_is)
    with pylloyal.open(paths["tiny-llama"], context=2048, memory=pool, threads=1) as first:
        free = pool.free()
        assert free is not None and free == there_is - first.plan.need
        assert first.plan.totals["weights_bytes"] > 0
        with pytest.raises(errors.InsufficientMemoryError) as caught:
            pylloyal.open(paths["tiny-llama"], context=2048, memory=pool, threads=1)
        assert caught.value.have is not None and caught.value.have <= free
        assert pool.free() == free
    assert pool.free() == there_is
    pylloyal.open(paths["tiny-llama"], context=2048, memory=pool, threads=1).close()


def test_two_stores_on_one_file_have_its_weights_once(paths: dict[str, Path]) -> None:
    pool = FixedPool("RAM", 64 * MIB, 64 * MIB)
    first = pylloyal.open(paths["tiny-llama"], context=256, memory=pool, threads=1)
    second = pylloyal.open(paths["tiny-llama"], context=512, memory=pool, threads=1)
    weights = first.plan.totals["weights_bytes"]
    assert weights > 0 and second.plan.totals["weights_bytes"] == 0
    assert pool.free() == 64 * MIB - first.plan.need - second.plan.need
    first.close()
    assert pool.free() == 64 * MIB - second.plan.need - weights  # the second still has them
    elsewhere = FixedPool("RAM", 64 * MIB, 64 * MIB)
    with pylloyal.open(paths["tiny-llama"], context=256, memory=elsewhere, threads=1) as third:
        assert third.plan.totals["weights_bytes"] == weights  # another budget
    second.close()
    assert pool.free() == 64 * MIB
    with pylloyal.open(paths["tiny-llama"], context=256, memory=pool, threads=1) as fourth:
        assert fourth.plan.totals["weights_bytes"] == weights


def test_a_store_that_is_only_dropped_gives_everything_back(paths: dict[str, Path]) -> None:
    pool = FixedPool("RAM", 64 * MIB, 64 * MIB)
    store = pylloyal.open(paths["tiny-llama"], context=256, memory=pool, threads=1)
    assert pool.free() == 64 * MIB - store.plan.need
    del store
    gc.collect()
    assert pool.free() == 64 * MIB
    with pylloyal.open(paths["tiny-llama"], context=256, memory=pool, threads=1) as again:
        assert again.plan.totals["weights_bytes"] > 0  # nobody else has them


def test_auto_takes_what_there_is(paths: dict[str, Path]) -> None:
    """More than the bound on compute buffers would have allowed: the engine is asked where it matters."""
    path = paths["tiny-llama"]
    policy = Policy(headroom_percent=0, least_tokens=256)
    offline = pylloyal.plan(path, memory="1500KiB", policy=policy, batch=64)
    with pylloyal.open(path, memory="1500KiB", policy=policy, batch=64, threads=1) as store:
        assert store.pressure().n_ctx >= int(offline.windows.served.tokens)
        assert store.plan.windows.served.bound == "KV" and store.differences == ()


def test_a_failed_open_gives_everything_back(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FixedPool("RAM", 1 << 30, 1 << 30)
    before = pylloyal.live_objects()

    def fail(*_: object, **__: object) -> None:
        raise errors.InternalKernelError("made up")

    for where in ("pylloyal.opening.PlannedStore.__init__", "pylloyal.opening.compare"):
        with monkeypatch.context() as patch:
            patch.setattr(where, fail)
            with pytest.raises(errors.InternalKernelError):
                pylloyal.open(paths["tiny-llama"], context=512, memory=pool, threads=1)
        assert pool.free() == 1 << 30
        assert pylloyal.live_objects() == before


def test_a_difference_is_told(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pylloyal.opening.compare", lambda plan, actual: (*compare(plan, actual), Difference("kv_bytes", 1, 2)))
    with pytest.warns(pylloyal.PlanMismatchWarning, match="kv_bytes was planned as 1 and is 2"):
        pylloyal.open(paths["tiny-llama"], context=256, threads=1).close()
    made = pylloyal.plan(paths["tiny-llama"], context=512, memory="1GiB")
    ran = ask_engine(paths["tiny-llama"], 512, made.settings)
    assert compare(made, ran) == ()
    assert [d.name for d in compare(made, dataclasses.replace(ran, kv_bytes=1, n_ctx=5))] == ["n_ctx", "kv_bytes"]
    assert [d.name for d in compare(made, dataclasses.replace(ran, compute_bytes=1 << 40))] == ["compute_bytes"]


def test_the_engines_answer_is_remembered(paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYLLOYAL_CACHE_DIR", str(tmp_path))
    pylloyal.open(paths["tiny-llama"], context=256, threads=1).close()
    files = list((tmp_path / "dry-runs").iterdir())
    assert len(files) == 1 and files[0].suffix == ".json"
    monkeypatch.setattr("pylloyal.opening.dry_run", lambda *_, **__: pytest.fail("asked again"))
    pylloyal.open(paths["tiny-llama"], context=256, threads=1).close()
    files[0].write_text("{")  # damaged: asked anew
    monkeypatch.undo()
    monkeypatch.setenv("PYLLOYAL_CACHE_DIR", str(tmp_path))
    pylloyal.open(paths["tiny-llama"], context=256, threads=1).close()
    info = system_info()
    monkeypatch.setattr("pylloyal.opening.system_info", lambda: {**info, "devices": [*info["devices"], {"name": "Vulkan9", "description": "another"}]})
    pylloyal.open(paths["tiny-llama"], context=256, threads=1).close()
    assert len(list((tmp_path / "dry-runs").iterdir())) == 2  # a device more, and the engine may compute elsewhere


def test_verify_from_the_command_line(paths: dict[str, Path]) -> None:
    done = subprocess.run([sys.executable, "-m", "pylloyal", "plan", str(paths["tiny-gemma3"]), "--no-swa-full", "--memory", "1GiB", "--verify"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.split("the engine")[1].splitlines() if line.strip()}
    assert {name: row[-1] for name, row in rows.items()} == {
        "n_ctx": "equal", "n_ctx_seq": "equal", "n_batch": "equal", "n_ubatch": "equal", "n_seq_max": "equal", "kv_bytes": "equal", "recurrent_bytes": "equal", "output_bytes": "equal",
        "weights_bytes": "equal", "compute_bytes": "equal"}
