"""The bodies of shared_core on a GPU. Set GPUARENA_FAKE_GPU=1 to run them on torch's CPU tensors instead.

With that, a machine without a GPU checks the tests themselves.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from shared_core.case import CASES, FAKE_GPU, why_no_gpu

_REASONS = why_no_gpu()


@pytest.fixture(scope="module", params=["no GPU"] if all(_REASONS.values()) else list(_REASONS))
def case(request):
    """A backend with its memory on a GPU."""
    reason = _REASONS.get(request.param, "; ".join(filter(None, _REASONS.values())))
    if reason:
        pytest.skip(reason)
    return CASES["torch-cpu" if FAKE_GPU else request.param]


@pytest.fixture
def device(case):
    """A device of torch, with the name that its tensors give it."""
    if case.library != "torch":
        pytest.skip("for tensors only")
    import torch

    return torch.device("cpu") if case.on_cpu else torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def families():
    """The tiny models of the transformers tests."""
    sys.path.append(str(Path(__file__).parents[1] / "transformers"))
    import families

    return families
