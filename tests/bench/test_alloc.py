import weakref

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from gpuarena.bench import _alloc_arrays, _alloc_peers, alloc  # noqa: E402
from gpuarena.bench._alloc_peers import Peer  # noqa: E402
from gpuarena.bench._collect import collect  # noqa: E402
from gpuarena.bench.device import Device, FakeGpu  # noqa: E402
from gpuarena.cli import app  # noqa: E402

POOLS = {"torch.empty in a MemPool", "CuPy, default pool", "CuPy, MemoryAsyncPool"} | {
    f"RMM, {kind}MemoryResource (bytes, no array)" for kind in ("Pool", "Arena")
}


SHARED = torch.empty(3, 5)


@pytest.fixture(scope="module")
def result():
    return alloc.run(quick=True, rounds=1)


@pytest.fixture(scope="module")
def on_fake_gpu():
    with pytest.MonkeyPatch.context() as patch:
        leave_out_what_is_slow(patch)
        return alloc.run(device=FakeGpu(), quick=True, rounds=1)


def leave_out_what_is_slow(monkeypatch):
    """Without 100 000 live regions and without processes."""
    makers, slow = alloc.core_groups, ("positions", "import")
    monkeypatch.setattr(
        alloc, "core_groups", lambda *args: (maker for maker in makers(*args) if maker[0] not in slow)
    )


def test_every_group_holds_positive_figures_next_to_its_reference(result):
    titles = [group["title"] for group in result["groups"]]
    assert len(titles) == len(set(titles)) == 10
    for group in result["groups"]:
        assert "not_measured" not in group
        if group["reference"] is None:
            assert all(row["nbytes"] > 0 for row in group["rows"].values())
            continue
        assert group["rows"][group["reference"]]["ratio"] == 1.0
        for row in group["rows"].values():
            low, high = row["quartiles_s"]
            assert 0 < low <= row["median_s"] <= high


def test_figures_of_older_files_keep_their_names(result):
    import json
    from pathlib import Path

    [path] = (Path(__file__).parents[2] / "docs" / "benchmarks").glob("*-cpu-alloc.json")
    now = {group["title"]: set(group["rows"]) for group in result["groups"]}
    for group in json.loads(path.read_text())["groups"]:
        if not group["title"].startswith("rollback"):  # a quick run drops fewer
            assert set(group["rows"]) <= now[group["title"]]


def test_what_a_step_takes_is_its_arrays_and_their_padding(result):
    rows = next(group["rows"] for group in result["groups"] if "held together" in group["title"])
    [shapes] = _alloc_arrays.step_shapes()
    wanted = sum(-(-4 * rows * columns // 256) * 256 for rows, columns in shapes)
    assert rows["a buffer sliced by hand"]["peak_nbytes"] == wanted
    # The last array is followed by no padding in an arena.
    assert wanted - 256 < rows["scope + arena.empty"]["peak_nbytes"] <= wanted


# -- what only a GPU has --------------------------------------------------------------------------------------------


def test_on_a_gpu_each_pool_is_timed_or_said_to_be_missing(on_fake_gpu):
    assert on_fake_gpu["fake"]
    assert on_fake_gpu.get("error") is None
    groups = {group["title"]: group for group in on_fake_gpu["groups"]}
    for title, group in groups.items():
        missing = group.get("not_measured", {})
        if title.startswith("torch arrays"):
            assert set(group["rows"]) | set(missing) > POOLS
            assert "torch.empty in a MemPool" in group["rows"]
        if title.startswith("CuPy arrays"):
            assert group["rows"] or missing
        assert all(": " in why or why for why in missing.values())
    assert not any("NumPy" in title or title == "import" for title in groups)


def test_rmms_pool_is_timed_without_a_driver(on_fake_gpu):
    pytest.importorskip("rmm")
    rows = on_fake_gpu["groups"][0]["rows"]
    assert rows["RMM, PoolMemoryResource (bytes, no array)"]["median_s"] > 0


def test_cupys_arrays_are_timed_beside_those_of_an_arena(monkeypatch):
    cupy = pytest.importorskip("cupy")

    def empty(shape, dtype):
        memory = np.empty(shape, dtype)
        address = memory.ctypes.data
        pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, memory.nbytes, memory, 0), 0)
        return cupy.ndarray(shape, dtype, pointer)

    monkeypatch.setattr(cupy, "empty", empty)
    monkeypatch.setattr(cupy.cuda, "MemoryAsyncPool", cupy.cuda.MemoryPool)
    makers = [maker for maker in _alloc_arrays.array_groups(FakeGpu(), 1) if maker[0].startswith("CuPy")]
    new, repeated = collect(FakeGpu(), makers)["groups"]
    assert list(new["rows"]) == [
        "cupy.empty",
        "arena.empty",
        "arena.alloc(...).array",
        "cupy.empty, MemoryAsyncPool",
    ]
    assert repeated["rows"]["scope + arena.empty"]["ratio"] > 0
    assert new["reference"] == repeated["reference"] == "cupy.empty"


# -- one loop for all -----------------------------------------------------------------------------------------------


class Array:
    """Knows how many of its kind live."""

    live = 0
    most = 0

    def __init__(self, shape):
        self.shape = shape
        Array.live += 1
        Array.most = max(Array.most, Array.live)
        weakref.finalize(self, self.gone)

    @staticmethod
    def gone():
        Array.live -= 1


def test_a_step_drops_each_array_or_holds_all_of_them():
    Array.live = Array.most = 0
    peer = Peer(Array, span=None)
    _alloc_peers.step(peer, [(1, 2)] * 5)
    assert (Array.live, Array.most) == (0, 1)
    _alloc_peers.step_holding(peer, [(1, 2)] * 5)
    assert (Array.live, Array.most) == (0, 5)


def test_the_shapes_of_two_steps_are_never_the_same():
    seen = []

    def allocate(shape):
        seen.append(shape)
        return torch.empty(shape)

    peers = {"all": Peer(allocate)}
    lists = _alloc_arrays.new_shapes()
    _alloc_peers.peer_group(
        "new", peers, {}, "all", lists=lists, n_steps=2, rounds=3, synchronize=lambda: None
    )
    timed = seen[len(lists[0]) :]  # what is allocated first is looked at, not timed
    assert len(timed) == len(set(timed)) == 200 * 2 * (1 + 2 + 3)


@pytest.mark.parametrize(
    ("allocate", "message"),
    [
        (lambda shape: torch.empty(shape[0] * shape[1] - 1), r"'it' gave 56 bytes for \[3, 5\] of float32"),
        (lambda shape: SHARED, "to two arrays at once"),
    ],
    ids=["too small", "one for two"],
)
def test_memory_that_is_wrong_is_not_timed(allocate, message):
    peer = Peer(allocate)
    with pytest.raises(alloc.WrongDataError, match=message):
        _alloc_peers.check_peer("it", peer, [(3, 5), (3, 5)])
    options = {"lists": [[(3, 5), (3, 5)]], "rounds": 1, "synchronize": lambda: None}
    needed = {"right": Peer(torch.empty)}
    group = _alloc_peers.peer_group("arrays", needed, {"it": lambda: peer}, "right", **options)
    assert list(group["rows"]) == ["right"]
    assert "WrongDataError: 'it' gave" in group["not_measured"]["it"]
    with pytest.raises(alloc.WrongDataError):
        _alloc_peers.peer_group("arrays", {"it": peer}, {}, "it", **options)


@pytest.mark.parametrize("n_good", [0, 2, 7], ids="after {} arrays".format)
def test_a_peer_that_breaks_leaves_the_others_timed(n_good):
    made = []

    def breaking(shape):
        if len(made) >= n_good:
            raise MemoryError("no more\nat all")
        made.append(shape)
        return torch.empty(shape)

    def absent():
        raise ImportError("no such library")

    others = {"breaking": lambda: Peer(breaking), "absent": absent, "well": lambda: Peer(torch.empty)}
    group = _alloc_peers.peer_group(
        "arrays",
        {"ours": Peer(torch.empty)},
        others,
        "ours",
        lists=[[(2, 2)] * 2],
        rounds=4,
        synchronize=lambda: None,
    )
    assert list(group["rows"]) == ["ours", "well"]
    assert group["not_measured"] == {
        "breaking": "MemoryError: no more",
        "absent": "ImportError: no such library",
    }


def test_a_group_that_fails_on_a_gpu_leaves_the_others():
    heard = []

    def failing(title):
        raise alloc.WrongDataError("wrong numbers")

    def fine(title):
        return {"title": title, "reference": None, "rows": {}}

    makers = [("one", fine), ("two", failing), ("three", fine)]
    found = collect(FakeGpu(), makers, heard.append)
    assert [group["title"] for group in found["groups"]] == ["one", "two", "three"]
    assert heard == found["groups"]
    assert found["groups"][1]["not_measured"] == {"the whole group": "WrongDataError: wrong numbers"}
    assert found["error"] == "two: WrongDataError: wrong numbers"
    with pytest.raises(alloc.WrongDataError):
        collect(Device(), makers)


def test_the_command_prints_the_tables_and_writes_the_figures(tmp_path, monkeypatch):
    leave_out_what_is_slow(monkeypatch)
    path = tmp_path / "alloc.json"
    arguments = ["bench", "alloc", "--quick", "--device", "cpu", "--rounds", "1"]
    done = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "arena.empty" in done.output
    assert '"benchmark": "alloc"' in path.read_text()
