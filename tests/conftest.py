"""Profiles of Hypothesis, chosen by HYPOTHESIS_PROFILE: dev, ci (the default where CI is set), nightly or mutation."""

from __future__ import annotations

import contextlib
import os
import zlib

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("shared_core")

_slow_machine = [HealthCheck.too_slow, HealthCheck.filter_too_much]  # shared runners stall for seconds
settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=_slow_machine)
settings.register_profile(
    "ci",
    max_examples=30,  # a run of CI has 20 minutes; nightly has more
    stateful_step_count=50,
    deadline=None,
    derandomize=True,  # the same examples each time, so that a failure is a change in the code
    database=None,
    print_blob=True,
    suppress_health_check=_slow_machine,
)
settings.register_profile(
    "nightly", max_examples=2000, stateful_step_count=100, deadline=None, print_blob=True
)
settings.register_profile(
    "mutation",  # the same few examples for every mutant
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=_slow_machine,
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
settings.load_profile(PROFILE)

#: Of the cases of these modules the ci profile takes about one half, chosen by their names: a run of CI has 20 minutes.
#: The other profiles take all of them, and the tests marked `nightly`.
_HALVED = (
    "demo/test_weights.py",
    "test_process.py",
    "transformers/test_attention.py",
    "transformers/test_encoder_decoder.py",
    "transformers/test_families.py",
    "transformers/test_flex.py",
    "transformers/test_generate.py",
    "transformers/test_offload.py",
    "transformers/test_size_command.py",
    "transformers/test_states.py",
    "transformers/test_static_compile.py",
    "transformers/test_static_families.py",
    "transformers/test_switch.py",
    "transformers/test_upstream_cases.py",
    "transformers/test_vision.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the ci profile has no time for; pytest says how many tests were deselected."""
    if PROFILE != "ci":
        return
    kept, left_out = [], []
    for item in items:
        is_case = "[" in item.nodeid and item.nodeid.split("::")[0].endswith(_HALVED)
        is_other = is_case and zlib.crc32(item.nodeid.encode()) % 2 == 1
        (left_out if is_other or item.get_closest_marker("nightly") else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_configure() -> None:
    """Keep torch to one thread, since the arrays here are small, and let its compiler import setuptools.

    Before Python 3.12 setuptools cannot be imported once anything has looked for pip, as huggingface_hub does on its
    first request: its shim then leaves distutils to the standard library and fails its own check.
    """
    with contextlib.suppress(ImportError):
        import setuptools  # noqa: F401
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)
