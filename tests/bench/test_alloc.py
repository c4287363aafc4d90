import pytest
from typer.testing import CliRunner

from gpuarena.bench import alloc
from gpuarena.cli import app


@pytest.fixture(scope="module")
def result():
    return alloc.run(quick=True)


def test_every_group_holds_positive_figures_next_to_its_reference(result):
    titles = [group["title"] for group in result["groups"]]
    assert len(titles) == len(set(titles)) == 9
    for group in result["groups"]:
        if group["reference"] is None:
            assert all(row["nbytes"] > 0 for row in group["rows"].values())
            continue
        assert group["rows"][group["reference"]]["ratio"] == 1.0
        for row in group["rows"].values():
            low, high = row["quartiles_s"]
            assert 0 < low <= row["median_s"] <= high


def test_the_shapes_of_two_rounds_are_never_the_same():
    lists = alloc._shapes()
    seen = set()
    for shapes in lists:
        assert seen.isdisjoint(shapes)
        seen.update(shapes)


def test_a_variant_with_the_wrong_memory_is_not_timed():
    class Wrong:
        shape = (3, 4)

    with pytest.raises(alloc.WrongDataError, match=r"asked for \(3, 5\), got \(3, 4\)"):
        alloc._check(Wrong(), (3, 5))


def test_the_command_prints_the_tables_and_writes_the_figures(tmp_path):
    path = tmp_path / "alloc.json"
    done = CliRunner().invoke(app, ["bench", "alloc", "--quick", "--device", "cpu", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "arena.empty" in done.output
    assert '"benchmark": "alloc"' in path.read_text()
