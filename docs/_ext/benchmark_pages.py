"""The pages of benchmarks, from the files of figures in ``benchmarks``: one page a file, and what they found in short.

The pages go to ``benchmarks/files``, which git ignores, before Sphinx looks for its sources; the overview takes the
place of a comment in ``benchmarks/index.md``. Nothing here holds a figure: all are computed from the files.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuarena.bench._labels import label, parts
from gpuarena.bench.plot import plot_steps
from gpuarena.bench.report import markdown
from gpuarena.errors import ArgumentError

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["overview", "page", "setup", "write_pages"]

#: What the overview takes the place of.
_PLACE = "<!-- benchmarks -->"
NOT_MEASURED = "not measured"

Results = dict[str, Any]


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages when a build begins, and the overview when its page is read."""
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir) / "benchmarks"))
    app.connect("source-read", _fill)
    app.connect("env-get-outdated", lambda *_: ["benchmarks/index"])  # what it is made of may have changed
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _fill(app: Sphinx, docname: str, source: list[str]) -> None:
    if _PLACE in source[0]:
        source[0] = source[0].replace(_PLACE, overview(Path(app.srcdir) / "benchmarks"))


def load(folder: Path) -> dict[str, Results]:
    """Return the results in a folder by the names of their files: those of GPUs first, then by what was measured.

    Dry runs are left out. Of two with the same name the newer one is the first.
    """
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))
    }
    real = {name: results for name, results in found.items() if not results.get("fake")}
    newest = sorted(real.items(), key=lambda one: one[1]["environment"]["date"], reverse=True)
    return dict(sorted(newest, key=lambda one: (not _is_gpu(one[1]), title(one[1]).split(":")[0])))


# -- one page a file ------------------------------------------------------------------------------------------------


def write_pages(folder: Path) -> None:
    """Write a page and its pictures for each file, and remove those of files that are gone."""
    out = folder / "files"
    out.mkdir(exist_ok=True)
    kept = set()
    for name, results in load(folder).items():
        pictures = _draw(results, out / f"{name}.svg", since=(folder / f"{name}.json").stat().st_mtime)
        text = page(name, results, pictures)
        path = out / f"{name}.md"
        if (
            not path.exists() or path.read_text(encoding="utf-8") != text
        ):  # an untouched page is not built again
            path.write_text(text, encoding="utf-8")
        kept |= {path.name, *pictures}
    for path in out.iterdir():
        if path.name not in kept:
            path.unlink()


def page(name: str, results: Results, pictures: list[str]) -> str:
    """Return the page of one file."""
    text = markdown(results, title=title(results))
    heading, _, rest = text.partition("\n")
    shown = [f"![Ratios of the steps]({picture})" for picture in pictures]
    links = f"The figures: {{download}}`{name}.json <../{name}.json>`."
    return "\n\n".join([heading, *shown, links, rest.strip()]) + "\n"


def title(results: Results) -> str:
    """Return what was measured, where and when."""
    names = [label(part) for part in parts(results)]
    what = names[0] if len(names) == 1 else f"{len(names)} benchmarks"
    return f"{what}: {machine(results)}, {results['environment']['date'][:10]}"


def machine(results: Results) -> str:
    """Return the GPU, or the processor."""
    found = results["environment"]
    return str(found.get("gpu") or found.get("processor") or "unknown machine")


def _draw(results: Results, path: Path, since: float) -> list[str]:
    """Draw what there is a picture for, unless that was done after the time `since`; return the files' names."""
    drawn = []
    for number, part in enumerate(parts(results)):
        here = path.with_name(f"{path.stem}-{number}.svg")
        if not any(group.get("kind") == "step" for group in part.get("groups", [])):
            continue
        if not here.exists() or here.stat().st_mtime < since:
            geometry = {"model": part.get("benchmark"), **part.get("geometry", {})}
            try:
                plot_steps({"environment": results["environment"], **part, "geometry": geometry}, here)
            except ArgumentError:  # nothing in it can be drawn, or matplotlib is missing
                continue
        drawn.append(here.name)
    return drawn


# -- the overview ---------------------------------------------------------------------------------------------------


def overview(folder: Path) -> str:
    """Return which benchmark was measured on what, and the ratios of each file in short."""
    files = load(folder)
    lines = ["## What was measured", "", *_measured(files), "", "## In short", "", _HOW_TO_READ, ""]
    for name, results in files.items():
        lines += [
            f"### {title(results)}",
            "",
            f"{_circumstances(results)} [All figures](files/{name}.md).",
            "",
        ]
        lines += [*headline(results), ""]
    toctree = ["```{toctree}", ":hidden:", "", *(f"files/{name}" for name in files), "```"]
    return "\n".join([*lines, *toctree])


_HOW_TO_READ = (
    "A ratio is the time of a variant divided by that of the reference, which ran in turns with it in the same process: "
    "above 1 the variant is slower than the reference. Where several sizes were measured, the table has the least ratio, "
    "the median and the greatest."
)


def _measured(files: Mapping[str, Results]) -> Iterator[str]:
    """Return a table: a row a benchmark, and the newest files of it from a CPU and from a GPU."""
    where: dict[str, dict[bool, str]] = {}
    for name, results in files.items():
        is_gpu = _is_gpu(results)
        for part in parts(results):
            date = results["environment"]["date"][:10]
            where.setdefault(label(part), {}).setdefault(
                is_gpu, f"[{machine(results)}, {date}](files/{name}.md)"
            )
    yield from ("| benchmark | CPU | GPU |", "|---|---|---|")
    for what in sorted(where):
        cells = [where[what].get(is_gpu, NOT_MEASURED) for is_gpu in (False, True)]
        yield f"| {what} | {cells[0]} | {cells[1]} |"
    if not any(_is_gpu(results) for results in files.values()):
        yield from ("", "No file here is from a GPU: every figure below is a CPU's.")


def _is_gpu(results: Results) -> bool:
    return str(results["environment"].get("device", "cpu")).startswith("cuda")


def _circumstances(results: Results) -> str:
    found = results["environment"]
    versions = found.get("versions", {})
    parts_of_it = [
        f"{key} {versions[key]}"
        for key in ("gpuarena", "torch", "transformers", "cupy-cuda13x")
        if key in versions
    ]
    if found.get("commit"):
        parts_of_it.append(f"commit `{found['commit']}`")
    if found.get("torch_threads"):
        parts_of_it.append(f"torch on {found['torch_threads']} threads")
    return ", ".join(parts_of_it) + "."


def headline(results: Results) -> list[str]:
    """Return a table of the ratios: a row for each variant and reference, over all sizes."""
    found: dict[tuple[str, str], list[float]] = {}
    for part in parts(results):
        groups = [
            *part.get("groups", []),
            *(one for check in part.get("checks", []) for one in check["groups"]),
        ]
        for group in groups:
            for name, row in group["rows"].items():
                if name != group["reference"] and "ratio" in row:
                    found.setdefault((group["reference"], name), []).append(row["ratio"])
    if not found:
        return ["No ratios."]
    lines = ["| | sizes | least | median | greatest |", "|---|---:|---:|---:|---:|"]
    last = None
    for (reference, name), ratios in found.items():
        if reference != last:
            lines.append(f"| **over {_plain(reference)}:** | | | | |")
        least, greatest = (f"{value:.2f}" for value in (min(ratios), max(ratios)))
        ends = (least, greatest) if len(ratios) > 1 else ("", "")
        median = f"{statistics.median(ratios):.2f}"
        lines.append(f"| {_plain(name)} | {len(ratios)} | {ends[0]} | {median} | {ends[1]} |")
        last = reference
    return lines


def _plain(text: str) -> str:
    """Return a name as Markdown that shows it as it is, within a cell."""
    return re.sub(r"([\\|<>*`_\[\]])", r"\\\1", text)
