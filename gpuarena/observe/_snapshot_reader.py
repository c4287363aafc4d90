"""Reading snapshots that were pickled for PyTorch's memory viewer, without running what a pickle can ask for."""

from __future__ import annotations

import io
import os
import pickle
import stat
from typing import Any, NoReturn

from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.observe._snapshot_device import Device, WrongError, checked_dict, checked_int, checked_list
from gpuarena.observe._snapshot_opcodes import refusal
from gpuarena.observe.timeline import Timeline

__all__ = ["load_snapshot"]


class _PlainUnpickler(pickle.Unpickler):
    """Makes lists, dicts, texts and numbers. Everything else has to be imported, and nothing is."""

    def find_class(self, module: str, name: str) -> NoReturn:
        asked = f"{module}.{name}"[:100]
        raise pickle.UnpicklingError(f"it asks for {asked}, and a snapshot needs plain values only")


def load_snapshot(path: Any) -> tuple[Timeline, ...]:
    """Return what a snapshot holds, by `dump_snapshot` or by ``torch.cuda.memory._dump_snapshot``.

    >>> import pathlib, tempfile
    >>> from gpuarena import Arena
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "arena.pickle"
    >>> arena = Arena(1024)
    >>> _ = arena.alloc((2, 3), "float32", label="mask")
    >>> arena.dump_snapshot(path)
    >>> [(region.label, region.offset, region.nbytes) for region in load_snapshot(path)[0].regions]
    [('mask', 0, 24)]

    Each arena is a timeline. The segments of PyTorch's allocator on a device are one: they lie end to end, by address,
    in one range of offsets, because nobody looks at hundreds of maps. Indices are those of the device's events in
    the file, where a free is two.

    The file is not trusted. Nothing that it names is imported or called.

    Parameters
    ----------
    path : str or path

    Returns
    -------
    tuple of Timeline
        By device and address. Scopes and rollbacks are not in the format, so there are none.

    Raises
    ------
    ArgumentError
        The file is no snapshot: cut off, of another kind, with sizes that do not add up or cannot be. The message says
        which.
    OSError
        It cannot be read.
    """
    try:
        name = os.fspath(path)
    except TypeError as error:
        raise ArgumentTypeError(f"a path is a text or a Path: {error}") from None
    with open(name, "rb") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
            raise ArgumentError(f"{name} is no snapshot: it is a device, which may never end", path=name)
        pickled = file.read()
    refused = refusal(pickled)
    if refused is not None:
        raise ArgumentError(f"{name} is no snapshot: {refused}", path=name)
    try:
        data = _PlainUnpickler(io.BytesIO(pickled)).load()
    except Exception as error:  # a damaged pickle can make the unpickler raise anything
        told = str(error) or type(error).__name__
        raise ArgumentError(f"{name} is no snapshot: {told}", path=name) from error
    try:
        return _read(data)
    except WrongError as error:
        raise ArgumentError(f"{name} is no snapshot: {error}", path=name) from None


def _read(data: Any) -> tuple[Timeline, ...]:
    if type(data) is list:  # segments only, as old versions wrote them
        data = {"segments": data}
    if type(data) is not dict or "segments" not in data:
        raise WrongError("it has no segments")
    segments = [
        checked_dict(segment, f"segment {i}")
        for i, segment in enumerate(checked_list(data["segments"], "segments"))
    ]
    traces = checked_list(data.get("device_traces", []), "device_traces")
    devices: dict[int, Device] = {}
    for number, segment in enumerate(segments):
        index = checked_int(segment, "device", f"segment {number}", default=0, limit=1 << 16)
        devices.setdefault(index, Device(index)).add_segment(segment, number)
    for device in devices.values():
        device.check_segments()
    seen: set[int] = set()
    for index, trace in enumerate(traces):
        events = checked_list(trace, f"device_traces[{index}]")
        if events:
            if id(events) in seen:
                raise WrongError(f"device_traces[{index}] has the events of another device")
            seen.add(id(events))
            devices.setdefault(index, Device(index)).add_events(events)
    return tuple(line for index in sorted(devices) for line in devices[index].timelines())
