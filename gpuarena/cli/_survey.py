"""What there is to work with: libraries, devices, memory, and which backends really work here."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpuarena

__all__ = ["survey"]

#: What is imported to see whether it works; everything else is told from what is installed.
_LIBRARIES = ("numpy", "ml_dtypes", "torch", "cupy", "transformers")
#: Library of a backend -> the extra that brings it, as pip wants it.
_EXTRA_OF = {"torch": "gpuarena[torch]", "cupy": "gpuarena[cupy13]", "cuda": "gpuarena[cuda]"}
#: Extras for working on this package, and sums of others.
_NOT_FOR_USERS = {"all", "docs", "mutation", "test"}
_REQUIREMENT = re.compile(
    r"\s*([\w.-]+)\s*(?:\[([^]]*)\])?\s*([^;]*)(?:;.*extra\s*==\s*['\"]([^'\"]+)['\"])?"
)


def survey(say: Callable[[str], Any] = lambda text: None) -> dict[str, Any]:
    """Return everything that ``gpuarena info`` tells; whatever a library raises is part of it.

    Parameters
    ----------
    say : callable
        Returns a context manager around what takes long, given what that is.
    """
    warned: list[str] = []
    libraries: dict[str, dict[str, Any]] = {}
    for name in _LIBRARIES:
        with say(f"importing {name}"), _quiet(warned):
            libraries[name] = _import(name)
    with say("asking for devices"), _quiet(warned):
        devices = [*_torch_devices(libraries), *_cupy_devices(libraries)]
        cuda = {"torch": _torch_cuda(libraries), "cupy": _cupy_cuda(libraries)}
    with say("trying the backends"), _quiet(warned):
        backends = [_try(backend, device, libraries) for backend, device in _candidates(devices)]
    return {
        "gpuarena": gpuarena.__version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "libraries": libraries,
        "cuda": cuda,
        "host_memory": _host_memory(),
        "devices": devices,
        "backends": backends,
        "extras": _extras(),
        "warnings": list(dict.fromkeys(warned)),
    }


# -- libraries --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet(warned: list[str]) -> Iterator[None]:
    """Keep what libraries print from standard output, which may have to be JSON, and note their warnings."""
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("always")
        yield
    # Deprecations are for the authors of libraries.
    told = [one for one in caught if not issubclass(one.category, (DeprecationWarning, FutureWarning))]
    warned.extend(_one_line(one.message) for one in told)


def _import(name: str) -> dict[str, Any]:
    """Import a library; return its version, and why it cannot be used if so."""
    try:
        installed = sys.modules.get(name) is not None or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError) as error:
        return {"version": None, "installed": True, "problem": _describe(error)}
    if not installed:
        return {"version": None, "installed": False, "problem": "not installed"}
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever a broken installation makes it raise
        return {"version": _installed_version(name), "installed": True, "problem": _describe(error)}
    version = getattr(module, "__version__", None) or _installed_version(name)
    return {"version": None if version is None else str(version), "installed": True, "problem": None}


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {_one_line(error)}"


def _one_line(what: Any) -> str:
    try:
        lines = str(what).strip().splitlines()
    except Exception:  # an error that cannot even be printed
        lines = []
    return " ".join(lines[0].split()) if lines else "(no message)"


def _usable(libraries: dict[str, dict[str, Any]], name: str) -> Any:
    return sys.modules.get(name) if libraries[name]["problem"] is None else None


# -- devices ----------------------------------------------------------------------------------------------------


def _torch_devices(libraries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    torch = _usable(libraries, "torch")
    if torch is None:
        return []
    try:
        kind = torch.accelerator.current_accelerator(check_available=True)
        count = torch.accelerator.device_count() if kind is not None else 0
    except Exception as error:  # drivers answer in many ways
        return [_device("torch", "accelerator", problem=_describe(error))]
    module: Any = getattr(torch, kind.type, None) if kind is not None else None
    found = []
    for index in range(count):
        device = f"{kind.type}:{index}"
        try:
            name = str(module.get_device_name(index)) if hasattr(module, "get_device_name") else None
            free, total = module.mem_get_info(index) if hasattr(module, "mem_get_info") else (None, None)
            found.append(_device("torch", device, name=name, free=free, total=total))
        except Exception as error:
            found.append(_device("torch", device, problem=_describe(error)))
    return found


def _cupy_devices(libraries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    cupy = _usable(libraries, "cupy")
    if cupy is None:
        return []
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception:  # no driver, or no device: trying the backend says which
        return []
    found = []
    for index in range(count):
        device = f"cuda:{index}"
        try:
            name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode(errors="replace")
            free, total = cupy.cuda.Device(index).mem_info
            found.append(_device("cupy", device, name=name, free=free, total=total))
        except Exception as error:
            found.append(_device("cupy", device, problem=_describe(error)))
    return found


def _device(
    library: str,
    device: str,
    *,
    name: str | None = None,
    free: int | None = None,
    total: int | None = None,
    problem: str | None = None,
) -> dict[str, Any]:
    return {
        "library": library,
        "device": device,
        "name": name,
        "free_nbytes": None if free is None else int(free),
        "total_nbytes": None if total is None else int(total),
        "problem": problem,
    }


def _torch_cuda(libraries: dict[str, dict[str, Any]]) -> dict[str, str | None]:
    torch = _usable(libraries, "torch")
    runtime = driver = None
    with contextlib.suppress(Exception):
        runtime = torch.version.cuda
    with contextlib.suppress(Exception):  # a private call: torch has no other way to tell
        driver = _cuda_version(torch._C._cuda_getDriverVersion())
    return {"runtime": runtime, "driver": driver}


def _cupy_cuda(libraries: dict[str, dict[str, Any]]) -> dict[str, str | None]:
    cupy = _usable(libraries, "cupy")
    versions: dict[str, str | None] = {"runtime": None, "driver": None}
    for key in versions:
        with contextlib.suppress(Exception):
            versions[key] = _cuda_version(getattr(cupy.cuda.runtime, f"{key}GetVersion")())
    return versions


def _cuda_version(number: int) -> str | None:
    """Return ``"13.2"`` of CUDA's 13020; None of 0, which is no driver."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _host_memory() -> dict[str, int | None]:
    """Return bytes: of the machine, of these what can be had without swapping, and the limit of a container."""
    found: dict[str, int | None] = {"total_nbytes": None, "available_nbytes": None, "limit_nbytes": None}
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no POSIX system
        found["total_nbytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, IndexError):  # no Linux
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found["available_nbytes"] = int(line.split()[1]) * 1024
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no container; "max" is no limit
            nbytes = int(Path("/sys/fs/cgroup", limit).read_text())
            if found["total_nbytes"] is None or nbytes < found["total_nbytes"]:  # or it says "all there is"
                found["limit_nbytes"] = nbytes
    return found


# -- backends ---------------------------------------------------------------------------------------------------


def _candidates(devices: list[dict[str, Any]]) -> Iterator[tuple[str, str | None]]:
    """Yield every backend on every device that it could be on; one without devices on its default one."""
    of = {
        library: [one["device"] for one in devices if one["library"] == library]
        for library in ("torch", "cupy")
    }
    yield "host", None
    yield "virtual", None
    for backend in ("torch", "virtual:torch"):
        yield backend, "cpu"
        for device in of["torch"]:
            yield backend, device
    yield "torch", "pinned"
    for backend in ("cupy", "virtual:cupy"):
        for device in of["cupy"] or [None]:
            yield backend, device
    yield "cupy", "pinned"


def _try(backend: str, device: str | None, libraries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Make a tiny arena, write into it, read it back; return whether that worked, and why not."""
    found = {"backend": backend, "device": device, "works": False, "problem": None, "install": None}
    library = backend.rpartition(":")[2]
    state = libraries.get(library)
    if state is not None and state["problem"] is not None:
        found["problem"] = f"{library} is {state['problem']}" if not state["installed"] else state["problem"]
        found["install"] = None if state["installed"] else _install(library)
        return found
    try:
        written = list(range(3, 19))
        with gpuarena.Arena(4096, backend=backend, device=device, name="info") as arena:
            region = arena.alloc(len(written), "uint8", fill=255)
            for place, value in enumerate(written):
                region[place] = value
            found["device"] = arena.device if device != "pinned" else device
            read = region.array.tolist()
        found["works"] = read == written
        if not found["works"]:
            found["problem"] = f"wrote {written}, read back {read}"
    except Exception as error:
        found["problem"] = _one_line(error) if isinstance(error, gpuarena.ArenaError) else _describe(error)
        if backend.startswith("virtual:") and "cuda" in str(device) and not _has("cuda.bindings"):
            found["install"] = _install("cuda")
    return found


def _install(library: str) -> str:
    return f"pip install '{_EXTRA_OF[library]}'"


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# -- extras -----------------------------------------------------------------------------------------------------


def _extras() -> dict[str, dict[str, Any]]:
    """Return, for each extra that the installed package declares, which of its requirements are not met."""
    try:
        declared = importlib.metadata.metadata("gpuarena").get_all("Provides-Extra") or []
        requirements = importlib.metadata.requires("gpuarena") or []
    except importlib.metadata.PackageNotFoundError:  # it runs from its source
        return {}
    parsed = [match.groups() for text in requirements if (match := _REQUIREMENT.match(text))]

    def missing(extra: str, seen: tuple[str, ...] = ()) -> list[str]:
        lacking: list[str] = []
        for name, inner, versions, of_extra in parsed:
            if of_extra != extra:
                continue
            if name == "gpuarena":  # an extra that is made of others
                for other in (inner or "").replace(" ", "").split(","):
                    if other not in (*seen, extra):
                        lacking += missing(other, (*seen, extra))
            elif not _is_met(name, versions):
                lacking.append(f"{name}{versions.strip()}")
        return list(dict.fromkeys(lacking))

    return {
        extra: {"installed": not (lacking := missing(extra)), "missing": lacking}
        for extra in sorted(declared)
        if extra not in _NOT_FOR_USERS
    }


def _is_met(name: str, versions: str) -> bool:
    version = _installed_version(name)
    wanted = re.search(r">=\s*([\d.]+)", versions)  # the only kind that this package has
    return version is not None and (wanted is None or _numbers(version) >= _numbers(wanted[1]))


def _numbers(version: str) -> list[int]:
    numbers = []
    for part in version.split("+")[0].split("."):
        match = re.match(r"\d+", part)
        if match is None:
            break
        numbers.append(int(match[0]))
    return numbers
