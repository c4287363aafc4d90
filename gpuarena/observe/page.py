"""A memory map as one HTML file: addresses upwards, time to the right, nothing loaded from anywhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gpuarena
from gpuarena._files import replacing
from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.observe.timeline import Timeline

__all__ = ["page_text", "write_page"]

#: What a number of JavaScript holds exactly.
_LARGEST = 2**53 - 1


def write_page(timeline: Timeline | Sequence[Timeline], path: Any, *, title: str | None = None) -> None:
    """Write the memory map of a timeline to `path`, whole or not at all.

    >>> import pathlib, tempfile
    >>> from gpuarena import Arena
    >>> from gpuarena.observe.timeline import timeline
    >>> arena = Arena("1MiB")
    >>> with arena.record() as trace:
    ...     region = arena.alloc((64, 64), "float32", label="weights")
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "map.html"
    >>> write_page(timeline(trace.events), path, title="one region")

    The file needs no network and no other file. It draws regions by label with their padding, scopes, rollbacks,
    failures and the high-water line; it is searched and walked through by mouse and by keys. Labels and call sites
    are shown as they are, whatever is in them.

    Parameters
    ----------
    timeline : Timeline or sequence of Timeline
        Of several, the page shows one at a time.
    path : str or path
        Its folder must be there.
    title : str, optional
        Default: the arena's name.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        There is no timeline, something else is given, or one is too large for a page; no file is written then.
    OSError
        The file cannot be written; an old one is as it was.
    """
    text = page_text(timeline, title=title)
    with replacing(path) as file:
        file.write(text)


def page_text(timeline: Timeline | Sequence[Timeline], *, title: str | None = None) -> str:
    """Return the page that `write_page` writes. It holds ASCII characters only."""
    timelines = [timeline] if isinstance(timeline, Timeline) else list(timeline)
    for one in timelines:
        if not isinstance(one, Timeline):
            raise ArgumentTypeError(f"a memory map is of timelines, not {type(one).__name__}")
    if not timelines:
        raise ArgumentError("there is no timeline to make a memory map of")
    if title is None:
        title = ", ".join(one.name for one in timelines if one.name) or "Memory map"
    script, style = _script(), _part("_page.css")
    parts = {
        # Nothing is loaded, and no script or style runs but these two, whatever a label makes of the page.
        "policy": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'",
        "version": html.escape(gpuarena.__version__),
        "title": _title_text(title),
        "style": style,
        "data": _script_json({"title": title, "maps": [_columns(one) for one in timelines]}),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("_page.html"))


@functools.cache
def _part(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="ascii")


@functools.cache
def _script() -> str:
    """Return the script, whose parts share their names and nothing else sees them."""
    parts = "".join(_part(name) for name in ("_page_model.js", "_page_draw.js", "_page.js"))
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _title_text(title: str) -> str:
    """Return a title as HTML; halves of surrogate pairs and controls, which HTML cannot hold, become U+FFFD."""
    held = re.sub("[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", title)
    return html.escape(held).encode("ascii", "xmlcharrefreplace").decode()


def _script_json(value: Any) -> str:
    """Return JSON that cannot end the script element it stands in, nor be taken for markup.

    What is not ASCII is written as escapes, which JSON has for halves of surrogate pairs too: every text of Python
    arrives as it was.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class _Strings:
    """A table of texts; columns hold their places in it, -1 for None."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str | None) -> int:
        if text is None:
            return -1
        place = self._places.setdefault(text, len(self.texts))
        if place == len(self.texts):
            self.texts.append(text)
        return place


def _columns(one: Timeline) -> dict[str, Any]:
    """Return a timeline as the page reads it: a list for each column, as one object a region would take far more."""
    strings = _Strings()
    regions = sorted(one.regions, key=lambda span: span.start)
    largest = max((span.offset + span.nbytes + span.padding for span in regions), default=0)
    if max(largest, one.capacity) > _LARGEST:
        raise ArgumentError(
            f"the arena has {max(largest, one.capacity)} bytes, and a page counts up to {_LARGEST}"
        )
    return {
        "name": one.name,
        "device": one.device,
        "capacity": one.capacity,
        "strings": strings.texts,  # filled below
        "times": _differences(one.times_ns),
        "high": [int(span.side == "high") for span in regions],
        "offset": [span.offset for span in regions],
        "nbytes": [span.nbytes for span in regions],
        "padding": [span.padding for span in regions],
        "shape": [strings.place(_shape_text(span.shape)) for span in regions],
        "dtype": [strings.place(span.dtype) for span in regions],
        "label": [strings.place(span.label) for span in regions],
        "site": [strings.place(span.site) for span in regions],
        "start": _differences(span.start for span in regions),
        "life": [-1 if span.stop is None else span.stop - span.start for span in regions],
        "scopes": [
            {
                "high": int(scope.side == "high"),
                "label": strings.place(scope.label),
                "site": strings.place(scope.site),
                "top": scope.top,
                "start": scope.start,
                "stop": scope.stop,
            }
            for scope in one.scopes
        ],
        "rollbacks": [
            {
                "high": int(back.side == "high"),
                "index": back.index,
                "old_top": back.old_top,
                "new_top": back.new_top,
                "n_regions": back.n_regions,
                "cause": strings.place(back.cause),
            }
            for back in one.rollbacks
        ],
        "failures": [
            {
                "high": int(failure.side == "high"),
                "index": failure.index,
                "nbytes": str(failure.nbytes),  # a request can be of any size
                "label": strings.place(failure.label),
                "site": strings.place(failure.site),
            }
            for failure in one.failures
        ],
        "peaks": [list(peak) for peak in one.peaks],
    }


def _differences(values: Iterable[int]) -> list[int]:
    """Return each value less the one before it, which takes fewer digits."""
    differences, last = [], 0
    for value in values:
        differences.append(value - last)
        last = value
    return differences


def _shape_text(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
