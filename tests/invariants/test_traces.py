"""Random traces of operations on the stub engine: whatever is done, in whatever order, a store is what its reference says.

As a rule the same traces every time. ``PYLLOYAL_TRACE_OPERATIONS=100000`` makes at least that many new ones, from a seed that is
printed and that ``PYLLOYAL_TRACE_SEED`` repeats.
"""
from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from pylloyal import Model, errors
from tests.invariants.machine import Tally
from tests.invariants.operations import Traces
from tests.invariants.oracle import Oracle

STUB = "stub:n_vocab=260"
SETTINGS = settings(max_examples=240, stateful_step_count=100, derandomize=True, database=None, deadline=None, report_multiple_bugs=False, print_blob=False, phases=[Phase.generate, Phase.shrink],
                    suppress_health_check=list(HealthCheck))
DONE = {"root", "fork", "prune", "prune_subtree", "retain_only", "fast_forward", "repair", "prefill", "scatter", "commit", "commit_wrongly", "sample", "tick", "ticks", "set_logits", "merge_logits", "set_sampling",
        "set_grammar", "set_bias", "ask", "tick_and_read", "ask_of_tokens", "priors", "reseed", "set_metrics", "score", "reseed_kv", "save", "load", "load_elsewhere"}
REFUSED = {errors.InvalidArgumentError, errors.StaleHandleError, errors.BranchPoisonedError, errors.BranchHasChildrenError, errors.DivergedError, errors.NoLogitsError, errors.NothingLegalError, errors.GrammarError,
           errors.ContextOverflowError, errors.NoLeaseError, errors.FormatError, errors.UnsupportedOperationError}
FAILED = {errors.DecodeError, errors.NoCellsError, errors.InternalKernelError, errors.DecodeCancelledError}


class OnStub(Traces):
    """The engine fails at some decode, or never. Its logits are a hash of what is seen, so every comparison is bit for bit."""

    @initialize(n_ctx=st.integers(24, 400), n_branches=st.integers(1, 24), bushy=st.integers(0, 12), spare=st.integers(0, 12), failure=st.tuples(st.integers(0, 30), st.sampled_from([2, -2, -2, 1, -1]), st.integers(0, 3)),
                deterministic=st.sampled_from([False, False, True]))
    def open(self, n_ctx: int, n_branches: int, bushy: int, spare: int, failure: tuple[int, int, int], deterministic: bool) -> None:
        at, rc, rows = failure
        self.model = Model(f"{STUB};fail_at={at};fail_rc={rc};fail_rows={rows}")
        self.begin(self.model, lambda n: rc if n == at else 0, n_ctx=n_ctx, n_branches=n_branches, n_batch=n_branches + spare, deterministic=deterministic)
        self.grow(bushy)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.model.close()


@pytest.fixture
def machine() -> Iterator[type[OnStub]]:
    with Model(STUB) as model:
        OnStub.tally = Tally()
        OnStub.oracle = Oracle(model, n_ctx=400, n_batch=400, n_threads=1)
        yield OnStub


@pytest.mark.slow
def test_a_store_is_what_its_reference_says(machine: type[OnStub], capsys: pytest.CaptureFixture[str]) -> None:
    n = int(os.environ.get("PYLLOYAL_TRACE_OPERATIONS", "0"))
    if not n:
        run_state_machine_as_test(machine, settings=SETTINGS)
    number = int(os.environ.get("PYLLOYAL_TRACE_SEED") or secrets.randbelow(10**9))
    while machine.tally.total < n:
        with capsys.disabled():
            print(f"\nPYLLOYAL_TRACE_SEED={number}", end="", flush=True)
        run_state_machine_as_test(seed(number)(machine), settings=settings(SETTINGS, derandomize=False))
        number += 1
    tally = machine.tally
    with capsys.disabled():
        print(f"\n{tally}")
    assert tally.total >= (n or 20_000)
    assert tally.n_unsure * 20 < tally.n_measured > 1000
    assert not DONE - set(tally.done)
    assert not {kind.__name__ for kind in REFUSED} - set(tally.refused)
    assert not {kind.__name__ for kind in FAILED} - {name.split()[0] for name in tally.failed}
