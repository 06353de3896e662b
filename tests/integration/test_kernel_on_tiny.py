"""The whole kernel suite again, on a real engine."""
from tests.unit.test_kernel import *  # noqa: F403
from tests.unit.test_operations import *  # noqa: F403
