"""Whether libraries see the same bytes at the same address, however far into the memory, in types of 8 and 16 bits.

On a dry run NumPy, which shares the host's memory with torch, takes the place of CuPy.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

from gpuarena import Arena, Region
from gpuarena.bench.device import Device
from gpuarena.bench.gpu._check import Check, NotMeasuredError, Probe
from gpuarena.bench.harness import Variant, group

__all__ = ["checks", "second_library"]

#: A way to look at a region with a library.
Way = Callable[[Region], Any]

#: A 16-bit pattern whose two bytes differ, and the number that it is in bfloat16.
_PATTERN, _NUMBER = 0x4080, 4.0
#: What a check of large memory leaves for everything else, in bytes.
_SPARE = 1 << 28
_from_dlpack = torch.utils.dlpack.from_dlpack
_LOW_PRECISION = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def checks() -> list[Check]:
    """Return the checks of this module."""
    return [
        Check("one address in all libraries", _one_address, 10),
        Check("views beyond 2**31 bytes and elements", _beyond_32_bits, 10),
        Check("bfloat16 and float8 views", _low_precision, 5),
    ]


def second_library(device: Device) -> tuple[ModuleType | None, str]:
    """Return CuPy, NumPy on a dry run, or None where CuPy cannot be used; and which, or why not."""
    if device.is_fake:
        return np, "numpy"
    try:
        import cupy

        (cupy.arange(4) + 1).get()  # to compile a kernel takes more than to be imported
    except Exception as error:  # whatever is missing, torch alone can be looked at
        return None, f"CuPy cannot be used here: {type(error).__name__}: {error}"
    found: ModuleType = cupy
    return found, "cupy"


def _look(region: Region, library: ModuleType) -> Any:
    """Return a region as an array of CuPy or NumPy."""
    return region.as_numpy() if library is np else region.as_cupy()


def _address(array: Any) -> int:
    """Return where the first element of an array of any of the libraries lies."""
    if isinstance(array, torch.Tensor):
        return array.data_ptr()
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


# -- one address --------------------------------------------------------------------------------------------------------


def _one_address(probe: Probe) -> None:
    device = probe.device
    library, which = second_library(device)
    arenas = {"torch": Arena(1 << 16, backend="torch", device=device.name)}
    if library is np:
        arenas["numpy"] = Arena(1 << 16, backend="host")
    elif library is not None:
        arenas["cupy"] = Arena(1 << 16, backend="cupy", device=device.name)
    n_ways = sum(_agree(probe, name, arena, _ways(library)) for name, arena in arenas.items())
    probe.figure("same address and bytes", n_ways, "ways")
    probe.figure("torch.as_tensor without a device", _without_device(arenas["torch"]))
    _time_ways(probe, arenas, library)
    if library is None:
        raise NotMeasuredError(f"{n_ways} ways of torch agree; {which}")


def _ways(library: ModuleType | None) -> dict[str, Way]:
    ways: dict[str, Way] = {
        "region.array": lambda region: region.array,
        "as_torch": lambda region: region.as_torch(),
        "torch.from_dlpack": _from_dlpack,
        # By __cuda_array_interface__. The device is given, for without it torch copied to the CPU (pytorch#54139).
        "torch.as_tensor": lambda region: torch.as_tensor(region, device=region.as_torch().device),
    }
    if library is not None:
        ways[f"as_{library.__name__}"] = lambda region: _look(region, library)
        ways[f"{library.__name__}.from_dlpack"] = library.from_dlpack
        ways[f"{library.__name__}.asarray"] = library.asarray  # by the array interface of the memory
    return ways


def _agree(probe: Probe, name: str, arena: Arena, ways: dict[str, Way]) -> int:
    """Check addresses, and that what one library writes the others read; return the number of ways."""
    region = arena.alloc((3, 4), "float32", fill=0)
    part = region[1:, ::2]
    for way, see in ways.items():
        for one in (region, part):
            found = _address(see(one))
            probe.expect(
                found == one.address,
                f"{way} of a region of a {name} arena lies at {found:#x} and the region at {one.address:#x}: "
                f"it was copied",
            )
    probe.device.synchronize()
    writers = [way for way in ways if way.startswith("as_")]
    for number, writer in enumerate(writers, 1):
        ways[writer](part)[...] = number
        probe.device.synchronize()
        for way, see in ways.items():
            found = see(part).tolist()
            probe.expect(
                found == [[number] * 2] * 2,
                f"{writer} wrote {number} to a region of a {name} arena, where {way} reads {found}",
            )
    edge = region.as_torch()[:, 1::2].tolist()
    probe.expect(edge == [[0.0] * 2] * 3, f"writes beside the view of a {name} arena: {edge} should be 0")
    return len(ways)


def _without_device(arena: Arena) -> str:
    """Say what torch does with a region when it is not told the device; it is no promise of ours."""
    region = arena.alloc(4, "float32", fill=0)
    try:
        tensor = torch.as_tensor(region)
    except Exception as error:  # whatever it is, it is the finding
        return f"raises {type(error).__name__}"
    return "shares" if tensor.data_ptr() == region.address else f"copies to {tensor.device.type}"


def _time_ways(probe: Probe, arenas: dict[str, Arena], library: ModuleType | None) -> None:
    """Time a look at a region, of the arena of the other library where that is what costs."""
    n = 3 if probe.quick else 300
    regions = {name: arena.alloc((64, 64), "float32", fill=0) for name, arena in arenas.items()}
    own = regions.pop("torch")
    calls: dict[str, Callable[[], Any]] = {
        "region.array": lambda: own.array,
        "torch.from_dlpack, torch arena": lambda: _from_dlpack(own),
    }
    for name, foreign in regions.items():
        assert library is not None, "it has an arena"
        calls[f"as_torch, {name} arena"] = foreign.as_torch
        calls[f"as_{name}, torch arena"] = own.as_numpy if library is np else own.as_cupy
        calls[f"{name}.from_dlpack, torch arena"] = lambda: library.from_dlpack(own)
    calls["torch.empty of that shape"] = lambda: torch.empty((64, 64), device=probe.device.torch_device)

    def repeated(call: Callable[[], Any]) -> Variant:
        def body() -> None:
            for _ in range(n):
                call()

        return Variant(body, n)

    timed = group(
        "one look at a region of 64 x 64 float32",
        {name: repeated(call) for name, call in calls.items()},
        "region.array",
        rounds=3 if probe.quick else 15,
        synchronize=probe.device.synchronize,
    )
    probe.groups.append(timed)


# -- far into the memory ------------------------------------------------------------------------------------------------


def _beyond_32_bits(probe: Probe) -> None:
    device = probe.device
    library, which = second_library(device)
    border = 1 << (10 if probe.quick else 31)
    n = border + 1024  # bfloat16, so that there are more than 2**32 bytes
    device.forget_peak()
    memory = device.memory()
    needed = 4 * n + _SPARE  # torch counts by way of a bool for each element
    if memory is not None and memory.total_nbytes - memory.used_nbytes < needed:
        free = memory.total_nbytes - memory.used_nbytes
        raise NotMeasuredError(f"{needed} bytes of memory are needed, {free} are free")
    arena = Arena(2 * n + 4096, backend="torch", device=device.name)
    region, behind = arena.alloc(n, "bfloat16", fill=0), arena.alloc(4, "int32", fill=0)
    probe.figure("one view of uint8", 2 * n, "bytes")
    probe.figure("one view of bfloat16", n, "elements")
    probe.figure("beside torch", which)
    whole = region.array
    positions = (0, border // 2, border - 1, border, n - 1)
    for number, at in enumerate(positions, 1):
        piece = region[at : at + 1]
        probe.expect(piece.offset == 2 * at, f"element {at} is at byte {piece.offset}, not at {2 * at}")
        piece[...] = number
        found = float(whole[at])
        probe.expect(found == number, f"element {at} of {n} was set to {number} and is {found}")
    n_set = int(torch.count_nonzero(whole))
    probe.expect(n_set == len(positions), f"{len(positions)} elements were set, {n_set} of {n} are not 0")
    behind[...] = torch.arange(1, 5, dtype=torch.int32, device=device.torch_device)
    probe.expect(
        behind.array.tolist() == [1, 2, 3, 4], f"a region at byte {behind.offset} lost what it was given"
    )
    if library is not None:
        _reach(probe, region, border, library)
    probe.expect(
        behind.array.tolist() == [1, 2, 3, 4], f"a write to the last bytes before {behind.offset} ran over"
    )


def _reach(probe: Probe, region: Region, border: int, library: ModuleType) -> None:
    """Write with the second library where torch reads, and read its bytes."""
    numbers, raw = region.view("uint16"), region.view("uint8")
    patterns, as_bytes = _look(numbers, library), _look(raw, library)
    n = region.shape[0]
    probe.expect(as_bytes.shape == (2 * n,), f"{library.__name__} sees {as_bytes.shape} bytes of {2 * n}")
    for at in (border - 1, border, n - 1):
        patterns[at : at + 1] = _PATTERN
        probe.device.synchronize()
        found = float(region.array[at])
        probe.expect(
            found == _NUMBER, f"{library.__name__} wrote {_NUMBER} to element {at}, torch reads {found}"
        )
        pair = as_bytes[2 * at : 2 * at + 2]
        probe.expect(
            pair.tolist() == [_PATTERN & 0xFF, _PATTERN >> 8] and _address(pair) == region.address + 2 * at,
            f"{library.__name__} sees {pair.tolist()} at byte {2 * at}, which lies at {_address(pair):#x}",
        )


# -- types of 8 and 16 bits ---------------------------------------------------------------------------------------------


def _low_precision(probe: Probe) -> None:
    library, which = second_library(probe.device)
    probe.figure("beside torch", which)
    arena = Arena(1 << 20, backend="torch", device=probe.device.name)
    for number, name in enumerate(_LOW_PRECISION, 1):
        _conversions(probe, arena, name, library)
        probe.figure("same bytes and numbers", number, "dtypes")


def _conversions(probe: Probe, arena: Arena, name: str, library: ModuleType | None) -> None:
    device = probe.device.torch_device
    dtype: torch.dtype = getattr(torch, name)
    # Every pattern of 8 bits, NaN among them, and twice as many numbers of all sizes.
    patterns = torch.arange(256, device=device).to(torch.uint8)
    exponents = torch.linspace(-12, 8, 512, device=device)
    numbers = torch.exp2(exponents) * torch.where(torch.arange(512, device=device) % 3 == 0, -1.0, 1.0)
    wanted = numbers.to(dtype)
    region, converted = arena.alloc(512, name), arena.alloc(512, name)
    region[...] = wanted
    converted.array.copy_(numbers)
    for way, one in (("a copy into the arena", region), ("a conversion into the arena", converted)):
        same = torch.equal(one.view("uint8").array, wanted.view(torch.uint8))
        probe.expect(same, f"{name}: {way} holds other bytes than torch's own conversion")
    probe.expect(
        torch.equal(region.array.float(), wanted.float()),
        f"{name}: what is converted back differs from torch's own",
    )
    probe.expect(
        torch.equal(region.array.clone().view(torch.uint8), wanted.view(torch.uint8)), f"{name}: a copy out"
    )
    raw = arena.alloc(256, "uint8")
    raw[...] = patterns
    typed = raw.view(name)
    probe.expect(typed.address == raw.address, f"{name}: a view of bytes lies elsewhere")
    ours, theirs = typed.array.float(), patterns.view(dtype).float()
    probe.expect(
        torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True),
        f"{name}: bytes mean other numbers in a view",
    )
    if library is not None:
        probe.device.synchronize()
        found = _look(region.view("uint8"), library).tolist()
        probe.expect(
            found == wanted.view(torch.uint8).tolist(),
            f"{name}: {library.__name__} sees other bytes than torch",
        )
