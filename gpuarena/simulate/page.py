"""A report of what simulations found, as one HTML file that needs nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from importlib import resources
from string import Template

from gpuarena._files import replacing
from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.kv.spec import positive
from gpuarena.simulate._drawing import classes_table, figures_table, share_bars, slot_map, time_area
from gpuarena.simulate._format import keep_together
from gpuarena.simulate.result import Result
from gpuarena.simulate.words import diagnose_worst

__all__ = ["render_page", "write_page"]


def write_page(
    results: Mapping[str, Result],
    path: str | os.PathLike[str],
    *,
    title: str,
    words: str,
    bytes_per_token: int | None = None,
) -> None:
    """Write the report of `render_page` to a file, whole or not at all.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As `render_page`.
    OSError
        No file can be written there.
    """
    text = render_page(results, title=title, words=words, bytes_per_token=bytes_per_token)
    with replacing(path) as file:
        file.write(text)


def render_page(
    results: Mapping[str, Result], *, title: str, words: str, bytes_per_token: int | None = None
) -> str:
    """Return the report: the words, the figures, what the slots are, and where they lie at the worst moment.

    The page loads nothing and runs no script, is light or dark as the reader's system is, and shows every name as the
    text that it is.

    Parameters
    ----------
    results : mapping of str to Result
        By the names to show, at least one.
    title : str
        Heads the page, as text.
    words : str
        What `gpuarena.simulate.words.describe_results` says; an empty line parts paragraphs.
    bytes_per_token : int, optional
        Of a model's KV cache; the capacity is then in GB of 10**9 bytes, too.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        There is no result, a text is none, or `bytes_per_token` is no positive integer.
    """
    for what, text in (("title", title), ("words", words)):
        if not isinstance(text, str):
            raise ArgumentTypeError(f"{what} must be a text, not {type(text).__name__}")
    if not results:
        raise ArgumentError("there is no result to write of")
    if bytes_per_token is not None:
        bytes_per_token = positive(bytes_per_token, "bytes_per_token")
    template = resources.files("gpuarena.simulate").joinpath("_page.html").read_text(encoding="utf-8")
    page = Template(template).substitute(
        title=escape(title),
        words="\n".join(f"<p>{escape(keep_together(one))}</p>" for one in words.split("\n\n") if one.strip()),
        figures=figures_table(results, bytes_per_token),
        shares=share_bars(results),
        times=f'<div class="panels">{"".join(time_area(name, one) for name, one in results.items())}</div>',
        classes=classes_table(results),
        worst=_worst(results),
    )
    # A lone surrogate, as in a file name that is no UTF-8, is in no file.
    return page.encode("utf-8", "replace").decode("utf-8")


def _worst(results: Mapping[str, Result]) -> str:
    struck = {name: one for name, one in results.items() if one.worst is not None}
    if not struck:
        return "<p>No request failed by fragmentation.</p>"
    ranked = sorted(struck, key=lambda name: -_free_share(struck[name]))
    shown = _moment(ranked[0], struck[ranked[0]])
    if len(ranked) > 1:
        others = "".join(_moment(name, struck[name]) for name in ranked[1:])
        shown += f"<details><summary>Of the other policies</summary>{others}</details>"
    return shown


def _free_share(one: Result) -> float:
    return one.worst.free_share if one.worst is not None else 0.0


def _moment(name: str, one: Result) -> str:
    assert one.worst is not None, "only results with a worst moment are drawn"
    keys = (
        '<p class="note"><span class="key used"></span>tokens held <span class="key reserved"></span>taken '
        '<span class="key free"></span>free; framed: the largest hole '
        '<span class="key need"></span>the request that does not fit</p>'
    )
    return f"<h3>{escape(name)}</h3>{slot_map(one.worst)}{keys}<p>{escape(str(diagnose_worst(one)))}</p>"
