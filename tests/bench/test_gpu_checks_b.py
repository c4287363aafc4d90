"""The GPU checks of memory: that each passes on a dry run, and fails, saying why, when something is wrong."""

import gc
import json
import os
import shlex
import sys
import time

import pytest

torch = pytest.importorskip("torch")

from gpuarena import Arena, errors  # noqa: E402
from gpuarena.backends import _vmm  # noqa: E402
from gpuarena.backends._vmm_host import HostVmm  # noqa: E402
from gpuarena.backends.torch import TorchBackend  # noqa: E402
from gpuarena.backends.virtual import VirtualBackend  # noqa: E402
from gpuarena.bench import fragmentation as requests  # noqa: E402
from gpuarena.bench.device import Device, FakeGpu, Memory  # noqa: E402
from gpuarena.bench.fragmentation import SCENARIOS, ModelledAllocator  # noqa: E402
from gpuarena.bench.gpu import (  # noqa: E402
    exhaustion,
    fragmentation,
    growth,
    sanitizer,
    suite,
    threads,
)
from gpuarena.bench.gpu._check import NotMeasuredError, Probe, run_check  # noqa: E402
from gpuarena.kv import KVLayer  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30
CHECKS = {
    check.title: check for module in (threads, exhaustion, growth, fragmentation) for check in module.checks()
}
GROWTH = "memory that grows in place"
TOO_LARGE, FULL_DEVICE, FULL_CACHE = (check.title for check in exhaustion.checks())
FRAGMENTATION = "memory reserved for requests that fragment an allocator"
THREADS = "two threads that allocate"
_KEPT = []


@pytest.fixture(autouse=True)
def quick_collections():
    """What was made before is left out of the collections that the checks ask for, which would take half a second."""
    gc.freeze()
    yield
    gc.unfreeze()
    while _KEPT:
        _KEPT.pop().give_back()


def run(title):
    result = run_check(CHECKS[title], FakeGpu(), quick=True)
    json.dumps(result)
    return result


@pytest.fixture
def no_model(monkeypatch):
    """Importing transformers takes longer than all else here; one test does it."""
    monkeypatch.setattr(exhaustion, "_small_model", lambda probe: None)


def test_a_model_goes_on_after_its_cache_was_full():
    pytest.importorskip("transformers")
    result = run(FULL_CACHE)
    assert result["passed"], result["why"]
    assert result["figures"]["with a model"]["value"] < 1e-3


@pytest.mark.parametrize("title", CHECKS)
def test_a_dry_run_passes_and_gives_figures(title, no_model):
    result = run(title)
    assert (result["passed"], result["why"]) == (True, "")
    assert result["figures"]
    timed = [group for group in result["groups"] if group["reference"]]
    assert all(row["median_s"] > 0 for group in timed for row in group["rows"].values())


def test_all_of_them_are_in_the_suite():
    titles = [check.title for check in suite.checks()]
    assert len(set(titles)) == len(titles)
    assert {*CHECKS, *(check.title for check in sanitizer.checks())} <= set(titles)


# -- what is wrong is found ---------------------------------------------------------------------------------------------


def memory_is_not_given_back(monkeypatch):
    monkeypatch.setattr(HostVmm, "unmap", lambda self, address, nbytes: None)


def closing_gives_nothing_back(monkeypatch):
    monkeypatch.setattr(_vmm._Holdings, "give_back", lambda self: _KEPT.append(self))


def kernels_miss_a_number(monkeypatch):
    arange = torch.arange

    def wrong(n, **options):
        made = arange(n, **options)
        if "out" in options:
            made[n // 2] = 0
        return made

    monkeypatch.setattr(torch, "arange", wrong)


def growing_clears_what_was_there(monkeypatch):
    commit = VirtualBackend.commit

    def clearing(self, stop):
        commit(self, stop)
        self.fill_bytes(0, 4096, 0)

    monkeypatch.setattr(VirtualBackend, "commit", clearing)


def growing_that_fails_keeps_what_it_got(monkeypatch):
    commit = VirtualBackend.commit

    def in_steps(self, stop):
        for at in range(self.committed + 1, stop, 64 << 10):
            commit(self, at)
        commit(self, stop)

    monkeypatch.setattr(VirtualBackend, "commit", in_steps)


def an_arena_that_fails_leaks(monkeypatch):
    leaked = []

    def leaking(cls, nbytes, **options):
        leaked.append(torch.ones(64 * MIB, dtype=torch.uint8))
        raise errors.OutOfMemoryError("no", requested=nbytes)

    monkeypatch.setattr(TorchBackend, "allocate", classmethod(leaking))


def a_full_cache_is_written_to(monkeypatch):
    capacity_error = KVLayer._capacity_error

    def late(self, n_new):
        self.read(1)[0].fill_(9)
        return capacity_error(self, n_new)

    monkeypatch.setattr(KVLayer, "_capacity_error", late)


def nothing_is_rolled_back(monkeypatch):
    monkeypatch.setattr(Arena, "rollback", lambda self, checkpoint: None)


def regions_overlap(monkeypatch):
    root = TorchBackend.root
    monkeypatch.setattr(TorchBackend, "root", lambda self, offset, *more: root(self, offset & 511, *more))
    monkeypatch.setattr(TorchBackend, "again", lambda self, prototype: prototype)


def arrays_lie_elsewhere(monkeypatch):
    monkeypatch.setattr(Arena, "empty", lambda self, shape, dtype: torch.empty(shape, dtype=torch.int32))


@pytest.mark.parametrize(
    ("fault", "title", "message"),
    [
        (memory_is_not_given_back, GROWTH, "trim says that it gave back"),
        (
            growing_clears_what_was_there,
            GROWTH,
            "contents of an array changed while the memory behind it grew",
        ),
        (kernels_miss_a_number, GROWTH, "1 of 1024 numbers that a kernel wrote across chunks are wrong"),
        (closing_gives_nothing_back, FULL_DEVICE, "more than before are used after closing the arena"),
        (growing_that_fails_keeps_what_it_got, FULL_DEVICE, "the failure changed the arena"),
        (
            growing_clears_what_was_there,
            FULL_DEVICE,
            "region 1 was filled with 1, and holds bytes from 0 to 1",
        ),
        (an_arena_that_fails_leaks, TOO_LARGE, "more than before are used after the failure"),
        (a_full_cache_is_written_to, FULL_CACHE, "written to before it raised"),
        (nothing_is_rolled_back, FRAGMENTATION, "an arena needs"),
        (arrays_lie_elsewhere, THREADS, "two threads allocated 100 regions each, the arena has 0"),
        (regions_overlap, THREADS, "numbers that two threads wrote to regions of one arena are wrong"),
    ],
)
def test_a_fault_is_found_and_named(monkeypatch, no_model, fault, title, message):
    fault(monkeypatch)
    result = run(title)
    assert result["passed"] is False
    assert message in result["why"]


# -- what is missing is said --------------------------------------------------------------------------------------------


class LooksReal(FakeGpu):
    """The CPU, where a check thinks that it is on a GPU."""

    is_fake = False


@pytest.mark.parametrize("title", [GROWTH, FULL_DEVICE])
def test_without_the_bindings_nothing_is_measured(monkeypatch, title):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    result = run_check(CHECKS[title], LooksReal(), quick=True)
    assert result["passed"] is None
    assert "pip install 'gpuarena[cuda]'" in result["why"]


def test_a_gpu_is_filled_up_to_what_is_to_be_left():
    class Gpu(Device):
        used = 3 * GIB

        def __init__(self):
            super().__init__("meta")

        def memory(self):
            return Memory(
                0, 0, 0, self.used + sum(room_tensor.numel() for room_tensor in room._tensors), 80 * GIB
            )

    room = exhaustion._CudaRoom.__new__(exhaustion._CudaRoom)
    room._tensors = []
    room._device = gpu = Gpu()
    room.fill(GIB)
    assert 80 * GIB - gpu.memory().used_nbytes == GIB + room.SCRATCH_NBYTES
    assert len(room._tensors) == 10
    with pytest.raises(NotMeasuredError, match="free memory are needed"):
        room.fill(2 * GIB)
    room.empty()
    assert gpu.memory().used_nbytes == 3 * GIB


# -- fragmentation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "native", "expandable", "arena", "on_one_end"),
    [(0, 256, 140, 128, 128), (1, 128, 140, 128, 128), (2, 96, 100, 64, 96), (3, 22, 22, 2, 2)],
)
def test_the_scenarios_need_what_they_are_known_to_need(number, native, expandable, arena, on_one_end):
    # in MiB; those of torch are from the developers' log, or follow from the rules that it states
    scenario = SCENARIOS[number]
    found = [
        ModelledAllocator().replay(scenario),
        ModelledAllocator(expandable=True).replay(scenario),
        requests.needed_by_arena(scenario, told=True),
        requests.needed_by_arena(scenario, told=False),
    ]
    assert found == [native * MIB, expandable * MIB, arena * MIB, on_one_end * MIB]
    assert scenario.live_nbytes == arena * MIB


def test_the_model_grows_page_by_page_and_splits_what_is_left():
    allocator, seen = ModelledAllocator(expandable=True), []
    for number in range(8):
        allocator.take(str(number), 16 * MIB)
        seen.append(allocator.reserved_nbytes // MIB)
    assert seen == [20, 40, 60, 80, 80, 100, 120, 140]
    allocator = ModelledAllocator()
    for name, mib in (("a", 2), ("b", 9), ("c", 2), ("d", 7)):
        allocator.take(name, mib * MIB)
    assert allocator.reserved_nbytes == 20 * MIB  # one segment for all of them
    for name in ("b", "d"):
        allocator.give(name)
    for name, mib in (("smallest that fits", 7), ("the rest", 9)):
        allocator.take(name, mib * MIB)
    assert allocator.reserved_nbytes == 20 * MIB
    for name, nbytes in (("e", MIB - 1), ("f", MIB - 1), ("g", 1)):
        allocator.take(name, nbytes)
    assert allocator.reserved_nbytes == 24 * MIB  # two that are rounded up fill a segment


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def replayed(reserved, is_expandable):
    titles = [scenario.title for scenario in SCENARIOS]
    line = {"reserved_nbytes": dict(zip(titles, reserved, strict=True)), "expandable": is_expandable}
    return f"echo loading; echo {shlex.quote(json.dumps(line))}"


@pytest.mark.parametrize(
    ("smallest", "is_expandable", "passed", "why"),
    [
        (22, "true", True, ""),
        (22, "false", None, "segments are otherwise"),
        (1, "true", False, "more than the 1 of"),
    ],
)
def test_what_torch_reserves_comes_from_processes_of_their_own(
    monkeypatch, tmp_path, smallest, is_expandable, passed, why
):
    native = [256 * MIB, 128 * MIB, 96 * MIB, smallest if smallest == 1 else smallest * MIB]
    python = script(
        tmp_path / "python",
        f'[ "$2" = gpuarena.bench.fragmentation ] && [ -z "$PYTORCH_ALLOC_CONF" ] || exit 1\n'
        f'case "$PYTORCH_CUDA_ALLOC_CONF" in\n'
        f"expandable_segments:True) {replayed([140 * MIB] * 2 + [100 * MIB, 22 * MIB], is_expandable == 'true')};;\n"
        f"expandable_segments:False) {replayed(native, False)};;\nesac",
    )
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    result = run_check(CHECKS[FRAGMENTATION], LooksReal(), quick=True)
    assert result["passed"] is passed
    assert why in result["why"]
    row = result["groups"][0]["rows"]["8 x 16 MiB, then 4 x 32 MiB"]
    assert (row["wanted_MiB"], row["arena_MiB"], row["torch_MiB"]) == (128, 128, 256)
    if passed:
        assert result["figures"]["caching allocator: not as modelled"]["value"] == 0


def test_the_process_prints_what_is_read_from_it(capsys):
    requests.main("fake-gpu")
    found = json.loads(capsys.readouterr().out)
    assert set(found["reserved_nbytes"]) == {scenario.title for scenario in SCENARIOS}
    assert found["expandable"] is False


# -- compute-sanitizer --------------------------------------------------------------------------------------------------

CLEAN = f"echo '========= COMPUTE-SANITIZER'; echo {shlex.quote(sanitizer.DONE)}; echo '========= ERROR SUMMARY: 0 errors'"
WRONG = (
    "echo '========= COMPUTE-SANITIZER'; echo '========= Invalid __global__ write of size 4 bytes'\n"
    f"echo {shlex.quote(sanitizer.DONE)}; echo '========= ERROR SUMMARY: 3 errors'; exit 1"
)
EARLY = "echo 'Segmentation fault'; echo '========= ERROR SUMMARY: 0 errors'; exit 139"
NONE = "echo 'no device to attach to' >&2; exit 255"


@pytest.mark.parametrize(
    ("text", "passed", "why", "n_errors"),
    [
        (CLEAN, True, "", 0),
        (WRONG, False, "found 3 errors, first: Invalid __global__ write of size 4 bytes", 3),
        (EARLY, False, "ended early, with 139: Segmentation fault", 0),
        (NONE, None, "ended with 255 and no summary: no device to attach to", None),
    ],
    ids=["clean", "errors", "ended early", "no summary"],
)
def test_the_sanitizer_is_asked_and_understood(monkeypatch, tmp_path, text, passed, why, n_errors):
    path = tmp_path / "compute-sanitizer"
    script(path, f'[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] || exit 3\necho "$@" > {tmp_path}/asked\n{text}')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    result = run_check(sanitizer.checks()[0], FakeGpu(), quick=True)
    assert result["passed"] is passed
    assert why in result["why"]
    assert result["figures"].get("errors", {}).get("value") == n_errors
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:2] == ["--tool", "memcheck"]
    assert asked[-4:] == [sys.executable, "-m", "gpuarena.bench.gpu.sanitizer", "cpu"]


def test_the_errors_of_several_processes_add_up():
    assert sanitizer.n_errors("========= ERROR SUMMARY: 2 errors\n========= ERROR SUMMARY: 1 error\n") == 3
    assert sanitizer.n_errors("ERROR SUMMARY: 0 errors") is None  # said by somebody else


def test_a_sanitizer_that_hangs_is_killed_with_all_that_it_started(monkeypatch, tmp_path):
    script(tmp_path / "compute-sanitizer", f"sleep 60 & echo $! > {tmp_path}/child; wait")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitizer, "LIMIT_S", 1.0)
    result = run_check(sanitizer.checks()[0], FakeGpu(), quick=True)
    assert result["passed"] is None
    assert result["why"] == "compute-sanitizer was still running after 1 s"
    assert result["seconds"] < 30  # what it started holds its output open
    child = int((tmp_path / "child").read_text())
    for _ in range(100):  # whoever adopts it takes a moment
        try:
            with open(f"/proc/{child}/stat") as file:
                if file.read().split()[2] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    pytest.fail("what the sanitizer started is still running")


def test_without_a_sanitizer_nothing_is_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotMeasuredError, match="not on the PATH"):
        sanitizer.checks()[0].body(Probe(FakeGpu()))


def test_the_program_under_the_sanitizer_is_right():
    sanitizer.program(FakeGpu())
