"""Pictures of what simulations found, with matplotlib (the extra ``plot``)."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuarena._files import check_replaceable, replacing
from gpuarena.errors import ArgumentError, BackendError
from gpuarena.kv.spec import positive
from gpuarena.simulate._format import class_bounds, class_label
from gpuarena.simulate.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot_path", "plot_results"]

#: What the slots are, with a colour of each (Okabe and Ito's, told apart also without red or green, and in grey).
_PARTS = (
    ("used", "holds a token", "#0072B2"),
    ("reserved", "will hold one later", "#56B4E9"),
    ("internal", "never will (internal)", "#E69F00"),
    ("free", "free", "#E5E5E5"),
)
_LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX*<>"
#: Formats that need nothing but matplotlib itself.
_SUFFIXES = ("png", "svg", "pdf", "jpg", "jpeg", "webp", "tif", "tiff", "eps", "ps")
_MOST_COLUMNS = 5


def check_plot_path(path: str | os.PathLike[str]) -> Path:
    """Raise what `plot_results` would before a long run; return the path.

    >>> check_plot_path("figures.txt")
    Traceback (most recent call last):
        ...
    gpuarena.errors.ArgumentError: cannot draw 'figures.txt': its ending is none of .png, .svg, .pdf, .jpg, .jpeg, .webp, .tif, .tiff, .eps, .ps

    Raises
    ------
    ArgumentError
        The ending is no picture's, or the folder is not there.
    OSError
        No file can be written there.
    BackendError
        matplotlib is not installed.
    """
    target = Path(path)
    if target.suffix.lower().lstrip(".") not in _SUFFIXES:
        endings = ", ".join(f".{suffix}" for suffix in _SUFFIXES)
        raise ArgumentError(f"cannot draw {str(target)!r}: its ending is none of {endings}")
    folder = target.parent
    if not folder.is_dir():
        raise ArgumentError(f"cannot draw {str(target)!r}: there is no folder {str(folder)!r}")
    check_replaceable(target)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BackendError(f"a plot needs matplotlib: pip install 'gpuarena[plot]' ({error})") from error
    return target


def plot_results(
    results: Mapping[str, Result], path: str | os.PathLike[str], *, bytes_per_token: int | None = None
) -> None:
    """Draw the slots over time, what they are on average, and which lengths fail, in one picture.

    The picture is written whole or not at all.

    Parameters
    ----------
    results : mapping of str to Result
        By the names to show, at least one. The slots over time are those of `Result.samples`.
    path : str or path
        ``.png``, ``.svg``, ``.pdf`` or another ending that `check_plot_path` accepts.
    bytes_per_token : int, optional
        Of a model's KV cache; the slots over time are then in GB of 10**9 bytes.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        There is no result, `bytes_per_token` is no positive integer, or the path is refused by `check_plot_path`.
    BackendError
        matplotlib is not installed.
    """
    target = check_plot_path(path)
    if not results:
        raise ArgumentError("there is no result to draw")
    if bytes_per_token is not None:
        bytes_per_token = positive(bytes_per_token, "bytes_per_token")
    import matplotlib

    kind = target.suffix.lower().lstrip(".")
    no_date: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    rendered = io.BytesIO()
    # A name with a dollar sign is no formula, and the same results give the same file.
    with matplotlib.rc_context(
        {"text.parse_math": False, "svg.hashsalt": "gpuarena", "svg.fonttype": "none"}
    ):
        figure = _figure(results, bytes_per_token)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Gg]lyph")  # a name in a script that the font lacks
            figure.savefig(rendered, format=kind, dpi=150, metadata=no_date or None)
    with replacing(target, "wb") as file:
        file.write(rendered.getvalue())


def _figure(results: Mapping[str, Result], bytes_per_token: int | None) -> Any:
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    # All in inches: the layouts that matplotlib computes give up on long names.
    n_rows = -(-len(results) // _MOST_COLUMNS)
    n_columns = -(-len(results) // n_rows)
    panel, below, left, gap, between = 1.9, 1.8 + 0.2 * len(results), 0.95, 0.35, 0.75
    width = max(9.5, left + n_columns * 2.5 + 0.2)
    height = 0.5 + n_rows * (panel + between) + 0.5 + below + 0.6
    figure = Figure(figsize=(width, height))

    def axes_at(x: float, y: float, wide: float, high: float, **shared: Any) -> Any:
        return figure.add_axes((x / width, y / height, wide / width, high / height), **shared)

    wide = (width - left - 0.2 - gap * (n_columns - 1)) / n_columns
    first = None
    for index, (name, result) in enumerate(results.items()):
        row, column = divmod(index, n_columns)
        y = height - 0.5 - row * (panel + between) - 0.2 - panel
        axis = axes_at(left + column * (wide + gap), y, wide, panel, sharey=first)
        first = first or axis
        _draw_time(axis, name, result, bytes_per_token)
        axis.tick_params(labelsize="small", labelleft=column == 0)
        if column == 0:
            axis.set_ylabel("slots (tokens)" if bytes_per_token is None else "KV cache, GB")
        axis.set_xlabel("s since the first arrival", fontsize="small")
    names = 0.25 + 0.085 * max(len(_shown(name)) for name in results)  # at this font size
    half = (width - names - 0.9 - 0.2) / 2
    bars = axes_at(names, 0.6, half, below)
    _draw_bars(bars, results)
    _draw_classes(axes_at(names + half + 0.9, 0.6, half, below), results)
    handles, labels = bars.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), fontsize="small", frameon=False)
    return figure


def _shown(name: str) -> str:
    """Return a name that leaves room for a picture; matplotlib leaves out of legends what begins with an underscore."""
    name = "".join(letter if letter.isprintable() else "?" for letter in name)
    name = name if len(name) <= 20 else name[:19] + "\N{HORIZONTAL ELLIPSIS}"
    return f" {name}" if name.startswith("_") else name


def _draw_time(axis: Axes, name: str, result: Result, bytes_per_token: int | None) -> None:
    axis.set_title(_shown(name), fontsize="medium")
    scale = 1.0 if bytes_per_token is None else bytes_per_token / 1e9
    if not result.samples:
        axis.text(0.5, 0.5, "no samples", ha="center", va="center", transform=axis.transAxes, color="0.4")
        return
    times = [sample.step / max(1, result.rate) for sample in result.samples]
    layers = [[getattr(sample, part) * scale for sample in result.samples] for part, _, _ in _PARTS]
    if len(times) == 1:  # an area needs two points
        times, layers = [times[0], times[0] + 1 / max(1, result.rate)], [layer * 2 for layer in layers]
    axis.stackplot(times, *layers, colors=[colour for _, _, colour in _PARTS], linewidth=0)
    if result.worst is not None:
        axis.axvline(result.worst.time_s, color="black", linewidth=1, linestyle=":")
        axis.annotate(
            "worst",
            (result.worst.time_s, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -3),
            textcoords="offset points",
            va="top",
            fontsize="x-small",
        )
    axis.margins(x=0, y=0)


def _draw_bars(axis: Axes, results: Mapping[str, Result]) -> None:
    rows = list(range(len(results)))
    left = [0.0] * len(rows)
    for part, label, colour in _PARTS:
        shares = []
        for result in results.values():
            whole = result.capacity * result.steps
            shares.append(100 * getattr(result, f"sum_{part}") / whole if whole else 0.0)
        axis.barh(rows, shares, left=left, color=colour, label=label, edgecolor="white", linewidth=0.5)
        for row, (share, start) in enumerate(zip(shares, left, strict=True)):
            if share >= 8:  # percent: below, the number is wider than its bar
                dark = part == "used"
                text = f"{share:.0f}"
                axis.text(
                    start + share / 2,
                    row,
                    text,
                    ha="center",
                    va="center",
                    fontsize="x-small",
                    color="white" if dark else "black",
                )
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axis.set_yticks(rows, [_shown(name) for name in results], fontsize="small")
    axis.invert_yaxis()
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of the slots, mean over all steps")
    axis.set_title("what the slots are", fontsize="medium")


def _draw_classes(axis: Axes, results: Mapping[str, Result]) -> None:
    bounds = class_bounds(results.values())
    rejects = any(one.reject for one in results.values())
    what = "turned away" if rejects else "whose first attempt fails"
    axis.set_title(f"requests {what}", fontsize="medium")
    axis.set_ylabel("% of the requests of this length")
    axis.set_xlabel("prompt and output, tokens")
    axis.set_ylim(0, 100)
    if not bounds:
        axis.text(0.5, 0.5, "no request", ha="center", va="center", transform=axis.transAxes, color="0.4")
        return
    for index, one in enumerate(results.values()):
        shares = {
            (each.least, each.limit): 100
            * (each.n_rejected if one.reject else each.n_failed)
            / each.n_requests
            for each in one.classes
            if each.n_requests
        }
        here = [(at, shares[bound]) for at, bound in enumerate(bounds) if bound in shares]
        axis.plot(
            [at for at, _ in here],
            [share for _, share in here],
            color=_LINES[index % len(_LINES)],
            marker=_MARKERS[index % len(_MARKERS)],
            linestyle="-" if index < len(_LINES) else "--",
            clip_on=False,
            zorder=3,
        )
    axis.set_xticks(range(len(bounds)), [class_label(*bound) for bound in bounds], fontsize="x-small")
    axis.margins(x=0.08)
    axis.grid(axis="y", alpha=0.3)
    axis.legend(
        axis.get_lines(),
        [_shown(name) for name in results],
        fontsize="x-small",
        ncols=1 + len(results) // 6,
        framealpha=0.8,
    )
