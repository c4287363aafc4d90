"""Where a benchmark runs, and all that it asks of a device.

Every call that only a GPU has is in `CudaDevice`. `FakeGpu` answers the same questions on the CPU, so that whatever
is written for a GPU can be run from end to end without one: its figures mean nothing and results say so.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpuarena.bench.harness import Variant, measure
from gpuarena.errors import BackendError

__all__ = ["CudaDevice", "Device", "FakeGpu", "Memory", "device_of"]


@dataclass(frozen=True)
class Memory:
    """What a process holds of a device's memory, in bytes."""

    allocated_nbytes: int
    """Of live tensors."""
    reserved_nbytes: int
    """Held by the caching allocator, live or not."""
    peak_nbytes: int
    """Most of `allocated_nbytes` since `Device.forget_peak`."""
    used_nbytes: int
    """Of the whole device, by every process and library: what the driver does not count as free."""
    total_nbytes: int = 0
    """That the device has."""


class Device:
    """The CPU, and what the others are made from.

    Attributes
    ----------
    name : str
        As torch spells it: ``"cpu"``, ``"cuda:0"``.
    is_gpu : bool
        Whether the groups that need a GPU are to be run.
    is_fake : bool
        Whether figures mean nothing.
    """

    is_gpu = False
    is_fake = False

    def __init__(self, name: str = "cpu") -> None:
        self.name = name

    @property
    def torch_device(self) -> torch.device:
        """For tensors."""
        return torch.device(self.name)

    def synchronize(self) -> None:
        """Wait for all work."""

    def memory(self) -> Memory | None:
        """Return what is held now; None where nobody counts it."""
        return None

    def forget_peak(self) -> None:
        """Begin a new peak, after returning unused memory of the caching allocator to the driver."""

    def give_back(self) -> None:
        """Give memory back that nobody holds any more, cycles among it, and begin a new peak."""
        gc.collect()
        self.forget_peak()

    def has_expandable_segments(self) -> bool:
        """Return whether the caching allocator has memory that it can grow in place."""
        return False

    def new_stream(self) -> AbstractContextManager[Any]:
        """Return a context manager inside which this thread works on a stream of its own; on a CPU there is none."""
        return nullcontext()

    def capture(self, body: Callable[[], Any]) -> Callable[[], None]:
        """Run `body` a few times, capture it as a graph, and return what replays it; on a CPU it is run again.

        Memory that `body` takes from the caching allocator belongs to the graph; tensors that it assigns outside
        are overwritten by each replay.
        """

        def replay() -> None:
            body()

        replay()
        return replay

    def launches(self, body: Callable[[], Any]) -> int:
        """Return how many kernels and copies `body` makes the device do; on a CPU, how many operations."""
        counter = _Operations()
        with counter:
            body()
        return counter.n

    def copy_bandwidth(self, nbytes: int = 1 << 26) -> float:
        """Return bytes read plus bytes written in a second by a copy of `nbytes`, the median of 11."""
        source = torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)
        target = torch.empty_like(source)
        timing = measure(
            {"copy": Variant(lambda: target.copy_(source))}, rounds=11, warmup=2, synchronize=self.synchronize
        )
        return 2 * nbytes / timing["copy"].median


class CudaDevice(Device):
    """A GPU of CUDA or ROCm, through torch.

    Raises
    ------
    BackendError
        There is none.
    """

    is_gpu = True

    def __init__(self, name: str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise BackendError("there is no CUDA device; --fake-gpu runs the same on the CPU")
        device = torch.device(name)
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(f"cuda:{index}")

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self.torch_device)

    def memory(self) -> Memory:
        """Return what torch and the driver count."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return Memory(
            torch.cuda.memory_allocated(self.torch_device),
            torch.cuda.memory_reserved(self.torch_device),
            torch.cuda.max_memory_allocated(self.torch_device),
            total - free,
            total,
        )

    def forget_peak(self) -> None:
        """Empty the cache of torch and begin a new peak."""
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def has_expandable_segments(self) -> bool:
        """Look into torch's snapshot; versions that say nothing of it have none."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return any(segment.get("is_expandable") for segment in segments)

    def new_stream(self) -> AbstractContextManager[Any]:
        """Return a context manager inside which this thread's current stream is a new one of torch's pool."""
        made = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        entered: AbstractContextManager[Any] = torch.cuda.stream(made)
        return entered

    def capture(self, body: Callable[[], Any]) -> Callable[[], None]:
        """Warm up on a side stream, as torch asks, and capture."""
        side = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        side.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(side):
            for _ in range(3):
                body()
        torch.cuda.current_stream(self.torch_device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()

        def replay() -> None:
            graph.replay()

        return replay

    def launches(self, body: Callable[[], Any]) -> int:
        """Count what ran on the device, by torch's profiler."""
        from torch._C._autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        body()
        self.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            body()
            self.synchronize()
        return sum(  # an annotation is shown on the device as well, around the kernels that it is about
            event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
            for event in profiler.events() or ()
        )

    def copy_bandwidth(self, nbytes: int = 1 << 30) -> float:
        """As `Device`, over more than caches hold."""
        return super().copy_bandwidth(nbytes)


class FakeGpu(Device):
    """The CPU where a GPU is asked for; the memory is that of the process."""

    is_gpu = True
    is_fake = True

    is_capturing = False
    """Whether `capture` is at the run that a GPU would capture."""

    def memory(self) -> Memory:
        """Return the resident memory of the process, the most of it and what it is now, and what the machine has."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB on Linux
        page_nbytes = os.sysconf("SC_PAGE_SIZE")
        try:
            used = int(Path("/proc/self/statm").read_text().split()[1]) * page_nbytes
        except OSError:  # no Linux
            used = peak
        return Memory(peak, peak, peak, used, os.sysconf("SC_PHYS_PAGES") * page_nbytes)

    def capture(self, body: Callable[[], Any]) -> Callable[[], None]:
        """Run `body` once to warm up, and once with `is_capturing` set, for doubles that refuse what a capture does."""
        body()
        self.is_capturing = True
        try:
            body()
        finally:
            self.is_capturing = False

        def replay() -> None:
            body()

        return replay


class _Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += not func.is_view
        return func(*args, **(kwargs or {}))


def device_of(device: str | Device) -> Device:
    """Return the device of a name: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"fake-gpu"``.

    Raises
    ------
    BackendError
        There is no such device, or it is one that the benchmarks do not know.
    """
    if isinstance(device, Device):
        return device
    if device == "fake-gpu":
        return FakeGpu()
    if device == "cpu":
        return Device()
    if device.startswith("cuda"):
        return CudaDevice(device)
    raise BackendError(f"benchmarks run on cpu, cuda or fake-gpu, not on {device!r}")
