"""The page of the command line, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx
from typer.main import get_command

__all__ = ["commands", "setup"]

#: What the page holds in their place.
_PLACE = "<!-- commands -->"


def setup(app: Sphinx) -> dict[str, Any]:
    """Put the commands into the page when it is read."""
    app.connect("source-read", _fill)
    app.connect("env-get-outdated", lambda *_: ["reference/command-line"])  # commands may have changed
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _fill(app: Sphinx, docname: str, source: list[str]) -> None:
    if _PLACE in source[0]:
        source[0] = source[0].replace(_PLACE, commands())


def commands() -> str:
    """Return all commands of ``gpuarena`` as Markdown: usage, description, options, examples."""
    from gpuarena.cli import app

    return "\n".join(_command(get_command(app), "gpuarena", 2))


def _command(command: Any, name: str, level: int) -> Iterator[str]:
    context = command.context_class(command, info_name=name)
    yield from (f"{'#' * level} {name}", "")
    yield from ("```console", f"$ {command.get_usage(context).removeprefix('Usage: ')}", "```", "")
    yield from _text(command.help or "")
    # (kind of parameter, what it is called, what it means)
    found = [
        (one.param_type_name, *record) for one in command.params if (record := one.get_help_record(context))
    ]
    for kind, heading in (("argument", "argument"), ("option", "option")):
        rows = [(term, text) for its_kind, term, text in found if its_kind == kind]
        if rows:
            yield from (f"| {heading} | |", "|---|---|")
            yield from (f"| `{_cell(term)}` | {_escaped(_cell(text))} |" for term, text in rows)
            yield ""
    inner = getattr(command, "commands", {})
    if inner:
        yield from ("| command | |", "|---|---|")
        for one in inner:
            anchor = f"{name} {one}".replace(" ", "-")
            yield f"| [`{name} {one}`](#{anchor}) | {_escaped((inner[one].help or '').splitlines()[0])} |"
        yield ""
    yield from _examples(command.epilog or "")
    for one in inner:
        yield from _command(inner[one], f"{name} {one}", 2 if level == 2 else 3)


def _text(text: str) -> Iterator[str]:
    """Return paragraphs, whose lines stay apart, as they do in a terminal."""
    for paragraph in text.split("\n\n"):
        yield from ("\\\n".join(_escaped(line) for line in paragraph.splitlines()), "")


def _examples(epilog: str) -> Iterator[str]:
    first, *lines = [line for line in epilog.replace(r"\[", "[").split("\n") if line.strip()] or [""]
    if first.startswith("Example"):
        yield from ("```console", *(f"$ {line}" for line in lines), "```", "")
    elif first:
        yield from (_escaped(" ".join([first, *lines])), "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _escaped(text: str) -> str:
    """Return prose in which only backticks are markup."""
    parts = text.split("`")
    for number in range(0, len(parts), 2):
        for letter in "<*_[":
            parts[number] = parts[number].replace(letter, "\\" + letter)
    return "`".join(parts)
