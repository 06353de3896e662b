"""The machine's assertions explain themselves like those of a test."""
import pytest

pytest.register_assert_rewrite("tests.invariants.machine", "tests.invariants.rules", "tests.invariants.oracle")
