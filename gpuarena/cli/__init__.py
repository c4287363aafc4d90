"""The command line: ``gpuarena --help``."""

from __future__ import annotations

from typing import Annotated

try:
    import rich  # noqa: F401 - the modules below need it
    import typer
except ImportError as error:  # pragma: no cover - the message is for an installation without the extra
    raise SystemExit(
        f"the gpuarena command needs its extra: pip install 'gpuarena[cli]' ({error})"
    ) from error

import gpuarena
from gpuarena.cli._output import examples
from gpuarena.cli._status import Group, run
from gpuarena.cli.bench import bench_app
from gpuarena.cli.demo import demo
from gpuarena.cli.explain import EXAMPLES as EXPLAIN_EXAMPLES
from gpuarena.cli.explain import explain
from gpuarena.cli.export import export
from gpuarena.cli.info import info
from gpuarena.cli.simulate import EXAMPLES, simulate
from gpuarena.cli.size import size
from gpuarena.cli.top import top
from gpuarena.cli.view import view

__all__ = ["app", "main"]

app = typer.Typer(
    help="One device buffer, a bump pointer, exact rollback; and KV caches on it.",
    no_args_is_help=True,
    cls=Group,
    epilog="Status: 0 done; 1 an error, in one line; 2 wrong usage; 130 interrupted; "
    "141 the reader of a pipe went away (as `head` does).",
    pretty_exceptions_enable=False,
)
app.command("info", epilog=examples("gpuarena info", "gpuarena info --json"))(info)
app.command(
    "demo",
    epilog=examples("gpuarena demo", 'gpuarena demo "Who was Ada?" --model random --context 600'),
)(demo)
app.command(
    "size",
    epilog=examples("gpuarena size qwen2.5-1.5b --context 32768", "gpuarena size ./model --batch 4 --json"),
)(size)
app.command("simulate", epilog=EXAMPLES)(simulate)
app.command("explain", epilog=EXPLAIN_EXAMPLES)(explain)
app.command(
    "top", epilog=examples("gpuarena top 9464", "gpuarena top http://node7:9464/metrics --once --json")
)(top)
app.command("view")(view)
app.command(
    "export",
    epilog=examples("gpuarena export run.jsonl -o run.pickle", "gpuarena export run.jsonl -o run.json"),
)(export)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line of this process; see `gpuarena.cli._status` for how it ends."""
    run(app)


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
