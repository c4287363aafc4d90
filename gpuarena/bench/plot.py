"""Pictures of what a benchmark found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpuarena.errors import ArgumentError

__all__ = ["plot_steps"]


def plot_steps(result: dict[str, Any], path: str | Path) -> None:
    """Draw the steps of ``gpuarena bench generate`` as ratios to the arena, one panel a batch.

    Parameters
    ----------
    result : dict
        What `gpuarena.bench.generate.run` returned, or what its JSON file holds.
    path : str or Path
        ``.png``, ``.svg`` or another ending that matplotlib knows.

    Raises
    ------
    ArgumentError
        No step is among the figures, or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot, which would look for a display
    except ImportError as error:
        raise ArgumentError(f"a plot needs matplotlib: pip install 'gpuarena[plot]' ({error})") from error

    steps = [group for group in result["groups"] if group.get("kind") == "step"]
    if not steps:
        raise ArgumentError("there is no step among the figures to draw")
    batches = sorted({group["batch"] for group in steps})
    figure = Figure(figsize=(5.2 * len(batches), 4.2), layout="constrained")
    axes = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for axis, batch in zip(axes, batches, strict=True):
        here = sorted((group for group in steps if group["batch"] == batch), key=lambda one: one["n_tokens"])
        lengths = [group["n_tokens"] for group in here]
        for name in dict.fromkeys(name for group in here for name in group["rows"]):
            points = [
                (group["n_tokens"], group["rows"][name]["ratio"]) for group in here if name in group["rows"]
            ]
            ours = name == here[0]["reference"]
            axis.plot(
                *zip(*points, strict=True),
                marker="o",
                label=name,
                linewidth=2.5 if ours else 1.2,
                zorder=3 if ours else 2,
            )
        floors = [
            (group["n_tokens"], group["floor_s"] / group["rows"][group["reference"]]["median_s"])
            for group in here
            if "floor_s" in group and group["reference"]
        ]
        if floors:
            axis.plot(
                *zip(*floors, strict=True), color="black", linestyle=":", label="weights and keys read once"
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.set_title(f"batch {batch}")
        axis.set_xlabel("tokens held")
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel(f"time of a step / that of {steps[0]['reference']}")
    axes[0].legend(fontsize="small")
    environment, geometry = result["environment"], result["geometry"]
    figure.suptitle(
        f"{geometry['model']}, {geometry['dtype']}, {environment.get('gpu') or environment['processor']}, "
        f"{environment['date'][:10]}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)
