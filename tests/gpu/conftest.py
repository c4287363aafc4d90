"""The bodies of shared_core on a GPU. Set GPUARENA_FAKE_GPU=1 to run them on torch's CPU tensors instead.

With that, a machine without a GPU checks the tests themselves. On a GPU what is quick comes first, since time on one
is short: then what CuPy has to compile kernels for, then what starts processes or compiles models.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from shared_core.case import CASES, FAKE_GPU, why_no_gpu

_REASONS = why_no_gpu()
_MODULES = ("streams", "core", "public_reports", "virtual", "kv", "offload", "static")
#: Parts of the names of tests that take seconds each.
_SLOW = (
    "when_python_exits",
    "a_forked_child",
    "static_gpu.py::test_generate",
    "static_gpu.py::test_nothing_waits",
    "static_gpu.py::test_a_full_cache",
)


def _why_cupy_cannot_compute() -> str | None:
    """Say why CuPy can compile no kernel, as without the CUDA toolkit's headers, although it finds a device."""
    import cupy

    try:
        ones = cupy.ones((2, 2), "float16")
        return None if float((ones.T + 1).sum()) == 8 else "CuPy computes wrong results"
    except Exception as error:
        return f"CuPy cannot run a kernel: {type(error).__name__}: {str(error)[:300]}"


if _REASONS.get("cupy", "absent") is None:
    _REASONS["cupy"] = _why_cupy_cannot_compute()
    if _REASONS["cupy"] is not None:
        sys.modules["cupy"] = None  # so that one sentence says it, and not every test


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Sort the tests of this folder, in the places that they have among the others."""
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if item.path.parent == here]
    found = sorted((items[place] for place in places), key=_rank)  # a stable sort
    for place, item in zip(places, found, strict=True):
        items[place] = item


def _rank(item) -> tuple[int, int]:
    module = item.path.stem.removeprefix("test_").removesuffix("_gpu")
    if any(part in item.nodeid for part in _SLOW):
        tier = 2
    else:
        tier = int("[cupy" in item.nodeid and module != "streams")
    return tier, _MODULES.index(module) if module in _MODULES else len(_MODULES)


_lost: list[BaseException] = []


@pytest.fixture(autouse=True)
def _device_answers():
    """Wait for the device, so that an error is its own test's; after one that stays, end the session."""
    if _lost:
        pytest.exit(f"the device is lost to this process, no other test can run: {_lost[0]}", returncode=3)
    yield
    torch = sys.modules.get("torch")
    if FAKE_GPU or torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream())  # a capture that broke leaves its own
    except RuntimeError as error:
        _lost.append(error)
        raise


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
