"""Pictures of results: what is drawn, what is refused before a long run, and that files are whole."""

import re
import subprocess
import sys
import warnings

import pytest
from made_results_kit import POLICIES, made, struck

from gpuarena.errors import ArgumentError, ArgumentTypeError, BackendError
from gpuarena.simulate.plot import check_plot_path, plot_results

pytest.importorskip("matplotlib")


def drawn(results, **options):
    from gpuarena.simulate.plot import _figure

    return _figure(results, options.get("bytes_per_token"))


def axis_titled(figure, title):
    (found,) = [axis for axis in figure.axes if axis.get_title() == title]
    return found


# Paths.


@pytest.mark.parametrize("name", ["figures.txt", "figures", "figures.pgf", ".png"])
def test_an_ending_that_is_no_picture_is_refused(tmp_path, name):
    with pytest.raises(ArgumentError, match=r"its ending is none of \.png"):
        check_plot_path(tmp_path / name)


@pytest.mark.parametrize("name", ["a.png", "a.SVG", "a.pdf"])
def test_a_path_that_will_do_is_returned_and_nothing_is_made(tmp_path, name):
    assert check_plot_path(tmp_path / name) == tmp_path / name
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"there is no folder .*missing"):
        check_plot_path(tmp_path / "missing" / "a.png")


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "a.png").mkdir()
    with pytest.raises(IsADirectoryError):
        check_plot_path(tmp_path / "a.png")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendError, match=r"pip install 'gpuarena\[plot\]'"):
        check_plot_path(tmp_path / "a.png")
    with pytest.raises(BackendError):
        plot_results({"exact": made()}, tmp_path / "a.png")


def test_the_module_loads_without_matplotlib():
    code = "import sys; import gpuarena.simulate.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# What is refused.


def test_no_result_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="no result"):
        plot_results({}, tmp_path / "a.png")


def test_bytes_of_a_token_are_an_integer(tmp_path):
    with pytest.raises(ArgumentTypeError):
        plot_results({"exact": made()}, tmp_path / "a.png", bytes_per_token=1.5)


# What is drawn.


def test_bars_are_the_shares_of_the_slots():
    one = made(sum_used=50_000, sum_reserved=10_000, sum_internal=15_000, sum_free=25_000)
    axis = axis_titled(drawn({"exact": one, "paged": made("paged")}), "what the slots are")
    bars = sorted(
        (round(bar.get_y(), 3), round(bar.get_x(), 6), round(bar.get_width(), 6)) for bar in axis.patches
    )
    assert [(x, width) for _, x, width in bars[:4]] == [(0, 50), (50, 10), (60, 15), (75, 25)]
    assert sum(width for _, _, width in bars[4:]) == 100
    assert [label.get_text() for label in axis.get_yticklabels()] == ["exact", "paged"]
    assert axis.yaxis_inverted(), "the first policy is on top, as in the tables"
    assert "%" in axis.get_xlabel()


def test_areas_end_at_the_capacity_and_times_are_seconds():
    axis = axis_titled(drawn({"exact": struck()}), "exact")
    top = axis.collections[-1].get_datalim(axis.transData)
    assert (top.x0, top.x1, top.y1) == (0, 90 / 20, 1000)
    used = axis.collections[0].get_datalim(axis.transData)
    assert used.y1 == 390, "300 + 90 at the last step"
    assert axis.get_ylabel() == "slots (tokens)"
    assert "s since" in axis.get_xlabel()


def test_areas_in_gigabytes():
    axis = axis_titled(drawn({"exact": struck()}, bytes_per_token=2_000_000), "exact")
    assert axis.collections[-1].get_datalim(axis.transData).y1 == pytest.approx(2.0)
    assert "GB" in axis.get_ylabel()


def test_the_worst_moment_is_marked():
    assert [line.get_xdata()[0] for line in axis_titled(drawn({"exact": struck()}), "exact").lines] == [2.5]
    assert axis_titled(drawn({"exact": struck(worst=None)}), "exact").lines[:] == []


def test_shares_by_length_are_of_first_failures_or_of_those_turned_away():
    axis = axis_titled(drawn({"exact": struck()}), "requests whose first attempt fails")
    (line,) = axis.lines
    assert [round(y, 2) for y in line.get_ydata()] == [3.33, 20.0, 60.0]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["< 100", "100 to 399", ">= 400"]
    axis = axis_titled(drawn({"exact": struck(reject=True)}), "requests turned away")
    assert list(axis.lines[0].get_ydata()) == [0, 0, 0]


def test_policies_without_samples_or_classes_are_drawn(tmp_path):
    texts = [text.get_text() for axis in drawn({"exact": made()}).axes for text in axis.texts]
    assert "no samples" in texts
    assert "no request" in texts


def test_colours_are_told_apart_also_in_grey():
    """By their relative luminance, neighbours in a stack."""
    from gpuarena.simulate.plot import _PARTS

    def luminance(colour):
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        return sum(
            weight * (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4)
            for weight, one in zip((0.2126, 0.7152, 0.0722), channels, strict=True)
        )

    lights = [luminance(colour) for _, _, colour in _PARTS]
    assert (lights[1] + 0.05) / (lights[0] + 0.05) > 1.5
    assert (lights[3] + 0.05) / (lights[2] + 0.05) > 1.5


# Files.


def test_ten_policies_with_hostile_names_are_drawn_as_text(tmp_path):
    names = ["$x^{$", "_hidden", "a" * 200, "<b>&amp;", "\u6f22", "%s", r"\frac", "li\nne", "", "exact"]
    results = {name: struck(policy) for name, policy in zip(names, [*POLICIES, "exact", "max"], strict=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_results(results, tmp_path / "a.svg", bytes_per_token=28672)
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for shown in ("$x^{$", " _hidden", "&lt;b&gt;&amp;amp;", r"\frac", "a" * 19 + "\u2026"):
        assert shown in text
    assert not re.search(r"(href|src)\s*=\s*[\"']https?:", text)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_results_give_the_same_file(tmp_path, suffix):
    for name in ("a", "b"):
        plot_results({"exact": struck()}, tmp_path / f"{name}.{suffix}")
    first = (tmp_path / f"a.{suffix}").read_bytes()
    assert first == (tmp_path / f"b.{suffix}").read_bytes()
    assert len(first) > 2000
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a.{suffix}", f"b.{suffix}"]


def test_an_old_picture_stays_when_drawing_fails(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    path = tmp_path / "a.png"
    path.write_bytes(b"old")

    def fail(self, target, **options):
        target.write(b"half")
        raise RuntimeError("out of ink")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(RuntimeError, match="out of ink"):
        plot_results({"exact": struck()}, path)
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["a.png"]
