"""Metrics, priors, scores and reading anew again, on a real engine."""
from tests.unit.test_measures import *  # noqa: F403
