"""The command line: ``gpuarena --help``."""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ImportError as error:  # pragma: no cover - the message is for an installation without the extra
    raise SystemExit(
        f"the gpuarena command needs its extra: pip install 'gpuarena[cli]' ({error})"
    ) from error

import gpuarena
from gpuarena.cli.bench import bench_app
from gpuarena.cli.demo import demo
from gpuarena.cli.size import size
from gpuarena.errors import ArenaError

__all__ = ["app", "main"]

app = typer.Typer(
    help="One device buffer, a bump pointer, exact rollback; and KV caches on it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo)
app.command("size")(size)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line; errors of this package end it with their message and status 1."""
    from gpuarena.demo.errors import WeightsError

    try:
        app()
    except (ArenaError, WeightsError) as error:
        console = Console(stderr=True)
        console.print("error: ", style="red", end="")
        console.print(str(error), markup=False, highlight=False)  # a message may hold brackets
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpuarena {gpuarena.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass
