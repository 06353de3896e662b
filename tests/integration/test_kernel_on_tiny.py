"""The whole kernel suite again, on a real engine."""
from tests.unit.test_kernel import *  # noqa: F403
