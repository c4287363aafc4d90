"""What the commands of ``gpuarena bench`` share: where they run, and where their results go."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from gpuarena._files import replacing
from gpuarena.cli._bench_tables import print_group
from gpuarena.cli._output import console_beside, needs, usable_device, write_json

if TYPE_CHECKING:  # a command imports torch when it runs
    from gpuarena.bench.device import Device

__all__ = [
    "CompiledOption",
    "DeviceOption",
    "FakeGpuOption",
    "GpuOption",
    "JsonOption",
    "QuickOption",
    "Target",
    "device_named",
    "measure",
    "working",
]

DeviceOption = Annotated[
    str | None, typer.Option("--device", help="Default: the GPU if there is one, otherwise the CPU.")
]
GpuOption = Annotated[bool, typer.Option("--gpu", help="The same as --device cuda.")]
FakeGpuOption = Annotated[
    bool, typer.Option("--fake-gpu", help="A dry run: what a GPU would do, tiny, on the CPU.")
]
CompiledOption = Annotated[
    bool, typer.Option("--compiled", help="With torch.compile, too, which takes up to a minute a variant.")
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="Small sizes and few samples, to see that it runs.")
]
JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json", help="Write the figures to this file; - prints them, and the tables go to standard error."
    ),
]


class Target:
    """Where results go: a console, and files that are written as results come.

    Raises
    ------
    OSError
        A file could not be written, which is better known before hours of work than after.
    """

    def __init__(self, json_path: Path | None = None, markdown_path: Path | None = None) -> None:
        self.json_path = json_path
        self.markdown_path = markdown_path
        self.console = console_beside(json_path, markdown_path)

    def keep(self, results: dict[str, Any]) -> None:
        """Write the results so far, so that they are there whatever ends the process."""
        if self.json_path is not None and _is_file(self.json_path):
            write_json(self.json_path, results, Console(quiet=True))
        if self.markdown_path is not None and _is_file(self.markdown_path):
            self._write_markdown(results)

    def finish(self, results: dict[str, Any]) -> None:
        """Write the results and say where they are."""
        write_json(self.json_path, results, self.console)
        if self.markdown_path is not None:
            self._write_markdown(results)
            if str(self.markdown_path) != "-":
                self.console.print(
                    f"written to {self.markdown_path}", highlight=False, markup=False, soft_wrap=True
                )

    def _write_markdown(self, results: dict[str, Any]) -> None:
        from gpuarena.bench.report import markdown

        text = markdown(results)
        if str(self.markdown_path) == "-":
            typer.echo(text, nl=False)
            return
        with replacing(self.markdown_path) as file:
            file.write(text)


def _is_file(path: Path) -> bool:
    """Whether a path can be written again and again: not so standard output or a pipe."""
    if str(path) == "-":
        return False
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def device_named(device: str | None, *, gpu: bool, fake_gpu: bool) -> Device:
    """Return the device that the options ask for.

    Raises
    ------
    typer.BadParameter
        More than one of them is given.
    BackendError, DeviceMismatchError
        There is no such device, or no torch.
    """
    given = [name for name, one in (("--device", device), ("--gpu", gpu), ("--fake-gpu", fake_gpu)) if one]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} exclude each other", param_hint=given[0])
    name = "fake-gpu" if fake_gpu else "cuda" if gpu else device
    if name not in ("fake-gpu", "cuda"):
        name = usable_device(name)
    with needs("torch", "bench"):
        from gpuarena.bench.device import device_of

    return device_of(name)


def measure(
    name: str,
    run: Callable[..., dict[str, Any]],
    device: Device,
    target: Target,
    **arguments: Any,
) -> dict[str, Any]:
    """Run one benchmark, show its groups as they come, and write the figures; a dry run is always quick.

    When it breaks or is interrupted, the groups that were done are written before the error goes on.
    """
    from gpuarena.bench.environment import environment

    facts = {key: arguments[key] for key in ("dtype", "compiled") if arguments.get(key)}
    so_far = {"benchmark": name, **facts, "environment": environment(device.name), "fake": device.is_fake}
    groups: list[dict[str, Any]] = []

    def heard(group: dict[str, Any]) -> None:
        groups.append(group)
        print_group(target.console, group)
        target.keep({**so_far, "groups": groups, "unfinished": True})

    try:
        with working(target.console, f"bench {name}"):
            found = run(
                **arguments | {"quick": arguments["quick"] or device.is_fake},
                device=device,
                on_group=heard,
            )
    except BaseException as error:
        if groups:
            text = (
                "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
            )
            target.finish({**so_far, "groups": groups, "error": text})
        raise
    found = {**found, "fake": device.is_fake}
    target.finish(found)
    return found


@contextlib.contextmanager
def working(console: Console, text: str) -> Iterator[Callable[[str], object]]:
    """Show a spinner and `text` on a terminal while the block runs, which is given a function that changes the text."""
    if not console.is_terminal:
        console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(text) as status:
        yield status.update
