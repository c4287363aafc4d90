import json

import pytest

torch = pytest.importorskip("torch")

from typer.testing import CliRunner  # noqa: E402

from gpuarena import Arena  # noqa: E402
from gpuarena.bench import _kv_append, _kv_pages, _kv_reads, _kv_stores, kv  # noqa: E402
from gpuarena.bench._kv_meter import TrafficMeter  # noqa: E402
from gpuarena.bench._kv_setup import Setup  # noqa: E402
from gpuarena.bench.device import Device, FakeGpu  # noqa: E402
from gpuarena.bench.harness import Variant, WrongDataError, check, group, measure  # noqa: E402
from gpuarena.cli import app  # noqa: E402
from gpuarena.errors import ArgumentError  # noqa: E402
from gpuarena.kv import KVCache  # noqa: E402

SETUP = Setup("cpu", "float32", layers=2, rounds=2, quick=True)


@pytest.fixture(scope="module")
def result():
    return kv.run(device=FakeGpu(), quick=True)  # three rounds


def make(makers, start=""):
    return [group(title) for title, group in makers if title.startswith(start)]


def rows_of(result, start):
    return [one["rows"] for one in result["groups"] if one["title"].startswith(start)]


def test_every_group_holds_positive_figures_next_to_its_reference(result):
    assert result["fake"]
    assert result.get("error") is None
    titles = [one["title"] for one in result["groups"]]
    assert len(titles) == len(set(titles)) == 12
    starts = (
        "append a token",
        "pages of 16",
        "all appends",
        "reorder",
        "answer again",
        "go back",
        "attention of",
        "attention over quantised",
    )
    for start in starts:
        assert rows_of(result, start)
    for one in result["groups"]:
        assert one["rows"][one["reference"]]["ratio"] == 1.0
        for row in one["rows"].values():
            low, high = row["quartiles_s"]
            assert 0 < low <= row["median_s"] <= high
            assert row["ratio"] > 0


def test_the_linear_cache_writes_each_token_once_and_cat_all_of_them_again_and_again(result):
    for n, rows in zip((8, 32), rows_of(result, "all appends"), strict=True):
        assert rows["KVCache.append"]["write_amplification"] == 1.0
        assert rows["torch.cat"]["write_amplification"] == (n + 1) / 2
        # 1, 2, 4, ... tokens are moved to buffers of twice the size.
        assert rows["doubling"]["write_amplification"] == (n + n - 1) / n


def test_the_peak_is_what_is_held_and_what_it_is_copied_from(result):
    per_token = 2 * 2 * 2 * 128 * 2  # layers, keys and values, heads, dim, bytes
    for n, rows in zip((8, 32), rows_of(result, "all appends"), strict=True):
        held = n * per_token
        assert held <= rows["KVCache.append"]["peak_nbytes"] <= held + 1024
        # Keys and values of two layers are four tensors; the old one of the last lives beside all the new ones.
        assert rows["torch.cat"]["peak_nbytes"] == held + (n - 1) * per_token // 4
        assert rows["doubling"]["peak_nbytes"] == held + n // 2 * per_token // 4
        if "KVCache, growing" in rows:  # what is committed, in whole pages
            assert held <= rows["KVCache, growing"]["peak_nbytes"] <= held + 65536


def test_reordering_allocates_as_counted(result):
    (rows,) = rows_of(result, "reorder")
    assert rows["KVCache.reorder"]["allocated_nbytes"] == 0
    assert rows["index_select, new tensors"]["allocated_nbytes"] == 4 * 32 * 2 * 2 * 2 * 128 * 2


def test_what_is_stored_quantised_takes_less(result):
    for rows in rows_of(result, "attention over quantised"):
        plain = rows["view, attend"]["bytes_per_token"]
        assert plain == 2 * 2 * 128 * 2
        stored = [row["bytes_per_token"] for name, row in rows.items() if name != "view, attend"]
        assert len(stored) == 3
        assert all(plain / 8 < nbytes < plain * 0.6 for nbytes in stored)


# -- what an append makes the device do ---------------------------------------------------------------------------


def test_launches_of_an_append_are_those_of_a_layer(result):
    for rows in rows_of(result, "append a token"):
        assert rows["KVCache.append"]["launches"] == 2  # keys and values
        assert rows["KVCache, append_pair of the layers"]["launches"] == 1
        assert rows["torch.cat"]["launches"] == 2
        assert rows["narrow + copy_ + narrow"]["launches"] == 2
    (rows,) = rows_of(result, "pages of 16")
    assert rows["PagedKVCache, append, gather"]["launches"] > rows["PagedKVCache, append"]["launches"]


class NoProfiler(FakeGpu):
    def launches(self, body):
        raise RuntimeError("CUPTI is not there\nfor some reason")


class BlindProfiler(FakeGpu):
    def launches(self, body):
        return 0


@pytest.mark.parametrize("device", [NoProfiler(), BlindProfiler()], ids=["none", "blind"])
def test_launches_that_nobody_counted_are_no_figure(device):
    setup = Setup(device, "float32", layers=1, rounds=1, quick=True)
    (one,) = make(_kv_append.append_groups(setup), "append a token, 16 held")
    assert not any("launches" in row for row in one["rows"].values())
    assert one["not_measured"]["launches"] in (
        "RuntimeError: CUPTI is not there",
        "WrongDataError: the profiler saw none",
    )


# -- pages of transformers ----------------------------------------------------------------------------------------


@pytest.fixture
def their_memory(monkeypatch):
    """What their pages ask about the memory of a CPU needs psutil."""
    cache = pytest.importorskip("transformers.generation.continuous_batching.cache")
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: (None, 1 << 32, 0, 0))


def test_their_pages_hold_and_return_what_is_appended(their_memory):
    (one,) = make(_kv_pages.page_groups(SETUP))
    assert "not_measured" not in one
    theirs = [name for name in one["rows"] if name.startswith("PagedAttentionCache")]
    assert len(theirs) == 2


def test_their_pages_are_compared_before_they_are_timed(their_memory, monkeypatch):
    right = _kv_pages.TheirPages._index
    monkeypatch.setattr(_kv_pages.TheirPages, "_index", lambda self, slots: right(self, slots[::-1]))
    (one,) = make(_kv_pages.page_groups(SETUP))
    [why] = one["not_measured"].values()
    assert why.startswith("WrongDataError: 'PagedAttentionCache.update")
    assert "PagedKVCache, append" in one["rows"]


def test_pages_that_another_version_made_otherwise_are_not_measured(monkeypatch):
    def other(*args):
        raise TypeError("unexpected keyword argument")

    monkeypatch.setattr(_kv_pages, "_their_cache", other)
    (one,) = make(_kv_pages.page_groups(SETUP))
    assert one["not_measured"] == {
        "PagedAttentionCache of transformers": "TypeError: unexpected keyword argument"
    }
    assert "PagedKVCache, append" in one["rows"]


# -- inputs take turns --------------------------------------------------------------------------------------------


def samples_of(monkeypatch, makers):
    """Return the bodies of the variants of the first group, which is not timed."""
    taken = {}

    def keep(self, title, variants, reference):
        taken.update(variants)
        return {"title": title, "reference": None, "rows": {}}

    monkeypatch.setattr(Setup, "group", keep)
    next(group(title) for title, group in makers)
    return taken


@pytest.mark.parametrize("module", [_kv_append, _kv_pages], ids=["append", "pages"])
def test_no_append_gets_the_tokens_of_the_last_sample(monkeypatch, module):
    seen = []
    right = module.steps

    def watched(store, turn, n):
        return right(store, (seen.append(id(token)) or token for token in turn), n)

    monkeypatch.setattr(module, "steps", watched)
    groups = {_kv_append: _kv_append.append_groups, _kv_pages: _kv_pages.page_groups}
    with torch.inference_mode():
        variants = samples_of(monkeypatch, groups[module](SETUP))
        for name, variant in variants.items():
            seen.clear()
            for _ in range(2):
                variant.ready()
                variant.body()
            assert len(seen) == len(set(seen)) == 2 * variant.n, name


@pytest.mark.parametrize("makers", ["read_groups", "quantized_groups"])
def test_no_read_gets_the_query_or_the_layer_of_the_last_one(monkeypatch, makers):
    seen = []
    right = _kv_reads._variant

    def watched(read, *args, **figures):
        def seeing(q, layer):
            seen.append((q.data_ptr(), layer))
            return read(q, layer)

        return right(seeing, *args, **figures)

    monkeypatch.setattr(_kv_reads, "_variant", watched)
    monkeypatch.setattr("gpuarena.bench._kv_setup._N_ROTATED", 24)
    with torch.inference_mode():
        variants = samples_of(monkeypatch, getattr(_kv_reads, makers)(SETUP))
        for name, variant in variants.items():
            seen.clear()
            for _ in range(3):
                variant.body()
            queries, layers = zip(*seen, strict=True)
            assert len(set(queries)) == len(set(layers)) == 24, name


def test_what_takes_turns_is_more_than_caches_hold():
    slow, fast = (Setup(device, "bfloat16", 1, 1) for device in (Device(), FakeGpu()))
    assert slow.n_to_rotate(1 << 20) * (1 << 20) >= 64 << 20
    assert fast.n_to_rotate(1 << 20) * (1 << 20) >= 4 * (
        50 << 20
    )  # as much again where it is stored in 4 bits
    assert slow.n_to_rotate(1 << 40) >= 2


# -- wrong data is not timed --------------------------------------------------------------------------------------


def test_a_variant_with_wrong_data_is_not_timed():
    calls = []

    def wrong():
        calls.append("wrong")
        return [torch.tensor([1.0, 2.0])]

    variants = {
        "right": Variant(lambda: [torch.ones(2)], wanted=lambda: [torch.ones(2)]),
        "wrong": Variant(wrong, wanted=lambda: [torch.ones(2)]),
    }
    with pytest.raises(WrongDataError, match="'wrong' gave wrong numbers in tensor 0"):
        group("numbers", variants, "right", rounds=1)
    assert calls == ["wrong"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: [torch.ones(3)], r"gave \[3\] as tensor 0, \[2\] is wanted"),
        (lambda: [torch.ones(2)] * 2, "gave 2 tensors, 1 are wanted"),
        (lambda: [torch.full((2,), torch.nan)], "wrong numbers"),
        (lambda: [torch.full((2,), 1.2)], "wrong numbers"),
    ],
)
@pytest.mark.parametrize("tolerance", [0.0, 0.1])
def test_each_way_to_be_wrong_is_seen(given, message, tolerance):
    with pytest.raises(WrongDataError, match=message):
        check("it", Variant(given, wanted=lambda: [torch.ones(2)], tolerance=tolerance))


def test_a_difference_within_the_tolerance_is_none():
    check("it", Variant(lambda: [torch.full((2,), 1.05)], wanted=lambda: [torch.ones(2)], tolerance=0.1))


def test_a_cache_that_holds_a_wrong_token_is_found(monkeypatch):
    class Wrong(KVCache):
        def append(self, layer, keys, values):
            return super().append(layer, keys, keys if keys.shape[2] == 1 else values)

    def cache(self, spec, max_tokens, *, batch=1, copies=1):
        arena = Arena(copies * (spec.arena_nbytes(batch, max_tokens) + 256), backend="torch", device="cpu")
        return Wrong(arena, spec, batch=batch, max_tokens=max_tokens)

    monkeypatch.setattr(Setup, "cache", cache)
    with pytest.raises(WrongDataError, match=r"KVCache\.append"):
        make(_kv_append.append_groups(SETUP))
    with pytest.raises(WrongDataError, match=r"KVCache\.append"):
        make(_kv_append.loop_groups(SETUP, 0))


# -- the meter and the clock --------------------------------------------------------------------------------------


def test_the_meter_counts_elements_of_its_dtype_once():
    buffer, new = torch.zeros(4, 4), torch.ones(4, 1)
    position, other = torch.tensor([2]), torch.tensor([3])
    with TrafficMeter(torch.float32) as meter:
        buffer.narrow(1, 0, 1).copy_(new)
        buffer.index_copy_(1, position, new)
        position.add_(1)
        position.copy_(other)
        torch.empty(100)
        kept = torch.cat((buffer, new), dim=1)
    assert meter.written == 4 + 4 + 20
    assert meter.peak_nbytes == 400  # the empty one, dropped before the other was made
    assert kept.shape == (4, 5)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "write", [lambda x: x.add_(1), lambda x: x + 1, lambda x: x[[0]], lambda x: x.to(torch.bfloat16).float()]
)
def test_the_meter_refuses_what_it_cannot_count(write, inference):
    with (
        torch.inference_mode(inference),
        pytest.raises(WrongDataError, match="nobody has said"),
        TrafficMeter(torch.float32),
    ):
        write(torch.empty(3))


@pytest.mark.parametrize("step", [3, 256])
def test_growing_by_steps_writes_what_it_moves(step):
    n, tokens = 10, _kv_stores.tokens_of(SETUP, 4)
    figures = _kv_append.count_traffic(
        SETUP, lambda: _kv_stores.Growing(SETUP, lambda held: held + step), tokens, n
    )
    moved = sum(range(step, n, step))
    assert figures["write_amplification"] == (n + moved) / n


def test_getting_ready_is_not_timed_and_time_is_per_step(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("gpuarena.bench.harness.perf_counter", lambda: clock[0])

    def spend(seconds):
        clock[0] += seconds

    variants = {
        "one": Variant(lambda: spend(1.0), ready=lambda: spend(100.0)),
        "four": Variant(lambda: spend(2.0), 4),
    }
    timings = measure(variants, rounds=3)
    assert timings["one"].samples == (1.0, 1.0, 1.0)
    assert timings["four"].samples == (0.5, 0.5, 0.5)
    rows = group("times", variants, "four", rounds=3)["rows"]
    assert (rows["one"]["ratio"], rows["four"]["ratio"]) == (2.0, 1.0)
    assert (rows["one"]["median_s"], rows["one"]["quartiles_s"]) == (1.0, [1.0, 1.0])


# -- how it is called ---------------------------------------------------------------------------------------------


def test_without_transformers_the_rest_is_measured(monkeypatch):
    for module in ("_kv_append", "_kv_moves"):
        monkeypatch.setattr(f"gpuarena.bench.{module}.transformers_or_none", lambda: None)
    names = [name for one in kv.run(quick=True, rounds=1)["groups"] for name in one["rows"]]
    assert not any("StaticLayer" in name or "DynamicCache" in name for name in names)
    assert "copy.deepcopy of a list of tensors" in names


def test_bad_arguments_are_refused():
    with pytest.raises(ArgumentError, match="bfloat16, float32, not 'int8'"):
        kv.run(dtype="int8")
    with pytest.raises(ArgumentError, match="at least 1, not 0 and 28"):
        kv.run(rounds=0)


def test_the_command_prints_the_tables_and_writes_the_figures(tmp_path):
    path = tmp_path / "kv.json"
    arguments = ["bench", "kv", "--quick", "--device", "cpu", "--dtype", "float32", "--cat-limit", "8"]
    done = CliRunner().invoke(app, [*arguments, "--rounds", "1", "--json", str(path)])
    assert done.exit_code == 0, done.output
    for word in ("KVCache.append", "x written", "peak, MB", "allocated, B", "B/token"):
        assert word in done.output
    written = json.loads(path.read_text())
    assert (written["benchmark"], written["geometry"]["dtype"]) == ("kv", "float32")
    short, long = rows_of(written, "all appends")
    assert "torch.cat" in short
    assert "torch.cat" not in long
