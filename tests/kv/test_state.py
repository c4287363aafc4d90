"""Saving, loading and copying caches: what tests/properties/test_state_properties.py does not compare with a model."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from gpuarena import (
    Arena,
    ArenaClosedError,
    CheckpointError,
    DTypeError,
    OutOfMemoryError,
    StaleRegionError,
    as_dtype,
)
from gpuarena.errors import ArgumentError, ArgumentTypeError, BackendError, CaptureError, StateError
from gpuarena.kv import KVCache, KVSpec, LayerSpec, RingLayer, SharedLayer, WindowLayer
from gpuarena.kv.state import _pieces, _writer, read_state

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")

SMALL = KVSpec.uniform(layers=2, kv_heads=2, head_dim=4, dtype="float32")


def make(spec=SMALL, *, backend="host", batch=2, max_tokens=16, **options):
    arena = Arena(2 * spec.arena_nbytes(batch, max_tokens), backend=backend)  # room for a fork
    return KVCache(arena, spec, batch=batch, max_tokens=max_tokens, **options)


def fill(cache, n_tokens, *, rows=1, first=0):
    """Append tokens whose numbers are all their position plus 100 times their row, to every layer."""
    for number, layer in cache.spec.owned:
        position = np.arange(first, first + n_tokens) + 100 * np.arange(rows)[:, None]
        pair = []
        for dtype, dim in ((layer.dtype, layer.key_dim), (layer.value_dtype, layer.value_dim)):
            array = np.broadcast_to(position[:, None, :, None], (rows, layer.kv_heads, n_tokens, dim))
            array = array.astype(dtype.numpy)
            if cache.arena.backend == "torch":
                array = torch.from_numpy(array.copy())
            pair.append(array)
        cache.append(number, *pair)
    return cache


def numbers(cache, layer=0):
    """Return the number of each token of row 0, as `fill` made them."""
    return [int(n) for n in cache.layers[layer].keys[0, 0, :, 0]]


def header_of(path):
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


# --------------------------------------------------------------------------------------------------------------- files

_ALL_DTYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "uint16": torch.uint16,
    "int16": torch.int16,
    "uint32": torch.uint32,
    "int32": torch.int32,
    "uint64": torch.uint64,
    "int64": torch.int64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
}


def test_the_dtypes_that_a_file_can_hold_are_all_tested():
    assert _writer.CODES.keys() == _ALL_DTYPES.keys()


@pytest.mark.parametrize("name", _ALL_DTYPES)
def test_safetensors_reads_every_dtype_and_the_other_library_loads_it(name, path):
    dtype = _ALL_DTYPES[name]
    raw = torch.arange(2 * 3 * 4 * dtype.itemsize, dtype=torch.uint8) % (2 if name == "bool" else 251)
    rows = raw.view(dtype).view(1, 2, 3, 4)
    spec = KVSpec.uniform(layers=1, kv_heads=2, head_dim=4, dtype=name)
    cache = make(spec, backend="torch")
    cache.append(0, rows, rows)
    cache.save(path)
    with safetensors.safe_open(path, framework="pt") as file:
        found = file.get_tensor("layers.0.values")
        assert found.dtype == dtype
        assert torch.equal(found.contiguous().view(torch.uint8), rows.view(torch.uint8))
    host = KVCache.load(path, Arena("1MiB"))
    assert host.layers[0].keys.tobytes() == raw.numpy().tobytes()
    host.save(path)
    back = KVCache.load(path, Arena("1MiB", backend="torch"))
    assert torch.equal(back.layers[0].values.contiguous().view(torch.uint8), rows.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("complex128", "torch"),
        ("complex128", "host"),
        ("bits8", "torch"),
        ("float8_e3m4", "host"),
        ("int4", "host"),
    ],
)
def test_a_dtype_that_safetensors_lacks_is_named_before_anything_is_written(name, backend, path):
    spec = KVSpec([LayerSpec(1, 2, 2, "float32"), LayerSpec(1, 2, 2, "float32", value_dtype=name)])
    cache = make(spec, backend=backend)
    with pytest.raises(DTypeError, match=rf"layers\.1\.values.*{name}") as caught:
        cache.save(path)
    assert caught.value.dtype == name
    assert not os.listdir(path.parent)
    assert cache.copy_to(Arena("1MiB", backend=backend)).spec == spec  # which needs no file


def test_metadata_are_texts_that_safetensors_shows(path):
    fill(make(), 3, rows=2).save(path, metadata={"model": "tiny"})
    with safetensors.safe_open(path, framework="np") as file:
        found = file.metadata()
    assert found["user.model"] == "tiny"
    assert (found["format"], found["format_version"], found["kind"]) == ("gpuarena.kv", "1", "rows")
    assert (found["rows"], found["held"]) == ("2", "[[[0, 3]], [[0, 3]]]")
    assert json.loads(found["spec"])[0] == {
        **json.loads(found["spec"])[0],
        "kv_heads": 2,
        "dtype": "float32",
        "window": None,
    }
    saved = read_state(path)
    assert (saved.metadata, saved.lengths, saved.nbytes) == (
        {"model": "tiny"},
        (3, 3),
        2 * 2 * 2 * 3 * 2 * 4 * 4,
    )


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        ({"a": 1}, ArgumentTypeError),
        ({1: "a"}, ArgumentTypeError),
        ([("a", "b")], ArgumentTypeError),
        ({"a": "\ud800"}, ArgumentError),
        ({"\ud800": "a"}, ArgumentError),
    ],
)
def test_metadata_that_are_no_texts_are_refused(metadata, error, path):
    with pytest.raises(error, match="metadata"):
        make().save(path, metadata=metadata)
    assert not os.listdir(path.parent)


def test_paths_of_all_kinds(path, monkeypatch):
    cache = fill(make(), 2)
    for kind in (path, str(path), os.fsencode(path)):
        cache.save(kind)
        assert numbers(KVCache.load(kind, Arena("1MiB"))) == [0, 1]
    monkeypatch.chdir(path.parent)
    cache.save("here.safetensors")
    cache.restore("here.safetensors")
    for bad in (None, 3, [path]):
        for call in (cache.save, cache.restore, read_state, lambda p: KVCache.load(p, Arena(1024))):
            with pytest.raises(ArgumentTypeError, match="path"):
                call(bad)


def test_what_the_system_says_of_a_path_passes_unchanged(path, tmp_path):
    cache = fill(make(), 2)
    with pytest.raises(FileNotFoundError):
        cache.restore(path)
    with pytest.raises(FileNotFoundError):
        KVCache.load(path, Arena(1024))
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "no" / "such")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="irectory"):
        cache.save(tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]
    assert numbers(cache) == [0, 1]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_instead_of_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(StateError, match="no file"):
        make().restore(path)


def test_saving_takes_and_loading_gives_no_more_host_memory_than_the_staging(path):
    spec = KVSpec.uniform(layers=4, kv_heads=2, head_dim=64, dtype="float32")
    cache = make(spec, batch=1, max_tokens=1 << 14)
    fill(cache, 1 << 14)  # 64 MiB, 8 MiB each plane
    other = make(spec, batch=1, max_tokens=1 << 14)
    arena = Arena(other.arena.capacity)
    for call in (lambda: cache.save(path), lambda: other.restore(path), lambda: cache.copy_to(arena)):
        tracemalloc.start()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < _pieces.PIECE_NBYTES + (3 << 20)


@pytest.mark.parametrize("backend", ["host", "torch"])
@pytest.mark.parametrize("limit", [1, 7, 64, 200])
def test_pieces_of_any_size_carry_the_same_bytes(backend, limit, path, monkeypatch):
    monkeypatch.setattr(_pieces, "PIECE_NBYTES", limit)
    cache = fill(make(backend=backend), 5, rows=2)
    cache.save(path)
    monkeypatch.undo()
    loaded = KVCache.load(path, Arena("1MiB"))
    monkeypatch.setattr(_pieces, "PIECE_NBYTES", limit)
    again = loaded.copy_to(Arena("1MiB", backend="torch"))
    cache.reset()
    cache.restore(path)
    for number in (0, 1):
        wanted = np.arange(5.0)[:, None] + 100 * np.arange(2)[:, None, None, None] + np.zeros((2, 2, 5, 4))
        for one in (cache, loaded, again):
            assert np.array_equal(np.asarray(one.layers[number].values), wanted)


# ------------------------------------------------------------------------------------------------------------ progress


def test_progress_grows_to_the_total(path, monkeypatch):
    monkeypatch.setattr(_pieces, "PIECE_NBYTES", 64)
    cache = fill(make(), 5, rows=2)
    total = 2 * 2 * 2 * 5 * 2 * 16
    for call in (
        lambda note: cache.save(path, progress=note),
        lambda note: KVCache.load(path, Arena("1MiB"), progress=note),
        lambda note: cache.restore(path, progress=note),
    ):
        seen = []
        call(lambda done, all_of_it, seen=seen: seen.append((done, all_of_it)))
        done = [one for one, _ in seen]
        assert {whole for _, whole in seen} == {total}
        assert done == sorted(set(done))
        assert done[-1] == total
        assert len(done) > 5


def test_progress_of_nothing_is_reported_once(path):
    cache = make()
    for call in (
        lambda note: cache.save(path, progress=note),
        lambda note: KVCache.load(path, Arena("1MiB"), progress=note),
        lambda note: cache.restore(path, progress=note),
    ):
        seen = []
        call(lambda *figures, seen=seen: seen.append(figures))
        assert seen == [(0, 0)]


def test_progress_has_to_be_a_function(path):
    cache = make()
    cache.save(path)
    for call in (
        cache.save,
        cache.restore,
        lambda p, progress: KVCache.load(p, Arena("1MiB"), progress=progress),
    ):
        with pytest.raises(ArgumentTypeError, match="progress"):
            call(path, progress=3)


class Stop(BaseException):
    """What an interrupt from the keyboard is like."""


def interrupted_at(call):
    """Let `call` be interrupted at each report of progress in turn; yield the bytes that were done."""
    n = 0
    while True:
        left = [n]
        at = []

        def note(done, total, left=left, at=at):
            if left[0] == 0:
                at.append((done, total))
                raise Stop
            left[0] -= 1

        try:
            call(note)
        except Stop:
            yield at[0]
        else:
            return
        n += 1


def test_an_interrupted_save_leaves_the_old_file(path, monkeypatch):
    monkeypatch.setattr(_pieces, "PIECE_NBYTES", 64)
    old = fill(make(), 2)
    old.save(path)
    before = path.read_bytes()
    new = fill(make(), 5, rows=2)
    n = 0
    for _ in interrupted_at(lambda note: new.save(path, progress=note)):
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == [path.name]
        n += 1
    assert n > 5
    assert path.read_bytes() != before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_a_save_that_the_system_refuses_leaves_the_old_file(name, path, monkeypatch):
    fill(make(), 2).save(path)
    before = path.read_bytes()

    def refuse(*arguments):
        raise OSError("no")

    monkeypatch.setattr(os, name, refuse)
    with pytest.raises(OSError, match="no"):
        fill(make(), 3).save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_the_old_file_is_there_until_the_new_one_is_complete(path, monkeypatch):
    fill(make(), 2).save(path)
    before = path.read_bytes()
    monkeypatch.setattr(_pieces, "PIECE_NBYTES", 64)
    seen = []
    fill(make(), 4).save(path, progress=lambda *_: seen.append(path.read_bytes() == before))
    assert all(seen)
    assert len(seen) > 3
    assert read_state(path).length == 4


def test_a_new_file_has_the_rights_that_the_system_gives(path, tmp_path):
    make().save(path)
    (tmp_path / "other").write_bytes(b"")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_interrupted_load_leaves_the_arena_as_it_was(path, monkeypatch):
    monkeypatch.setattr(_pieces, "PIECE_NBYTES", 64)
    fill(make(), 5, rows=2).save(path)
    arena = Arena("1MiB")
    n = 0
    for _ in interrupted_at(lambda note: KVCache.load(path, arena, progress=note)):
        assert (arena.stats.used, arena.stats.top) == (0, 0)
        n += 1
    assert n > 5
    assert arena.stats.used > 0


@pytest.mark.parametrize("layout", ["head-major", "token-major"])
def test_an_interrupted_restore_leaves_the_cache_empty(layout, path, monkeypatch):
    monkeypatch.setattr(_pieces, "PIECE_NBYTES", 64)
    fill(make(), 5, rows=2).save(path)
    cache = make(layout=layout)

    def restore(note):
        cache.reset()
        fill(cache, 7)
        restore.mark = cache.checkpoint()
        cache.restore(path, progress=note)

    n = 0
    for _ in interrupted_at(restore):
        assert cache.is_empty
        assert cache.rows is None
        with pytest.raises(CheckpointError):
            cache.rollback(restore.mark)
        fill(cache, 3, rows=2)  # it is as good as new
        assert numbers(cache) == [0, 1, 2]
        n += 1
    assert n > 5
    assert numbers(cache) == list(range(5))
    assert cache.rows == 2


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_what_safetensors_says_while_bytes_are_read_is_told(backend, path, monkeypatch):
    fill(make(), 5, rows=2).save(path)
    calls = []

    class Opened:
        """A file of which the third tensor cannot be read."""

        def __init__(self, *arguments, **options):
            self._file = real(*arguments, **options)

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __exit__(self, *of_error):
            self._file.__exit__(*of_error)

        def get_slice(self, name):
            return Slice(self._file.get_slice(name))

    class Slice:
        def __init__(self, tensor):
            self._tensor = tensor
            self.get_dtype, self.get_shape = tensor.get_dtype, tensor.get_shape

        def __getitem__(self, index):
            calls.append(index)
            if len(calls) == 3:
                raise safetensors.SafetensorError("the disk is gone")
            return self._tensor[index]

    real = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Opened)
    cache, arena = fill(make(backend=backend), 7), Arena("1MiB", backend=backend)
    for call in (lambda: cache.restore(path), lambda: KVCache.load(path, arena)):
        calls.clear()
        with pytest.raises(StateError, match=r"layers\.1\.keys cannot be read: the disk is gone"):
            call()
    assert cache.is_empty
    assert arena.stats.used == 0


def test_no_more_than_safetensors_is_missing(path, monkeypatch):
    cache = fill(make(), 2)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    cache.save(path)
    for call in (cache.restore, read_state, lambda p: KVCache.load(p, Arena("1MiB"))):
        with pytest.raises(BackendError, match=r"gpuarena\[state\]"):
            call(path)
    assert numbers(cache) == [0, 1]


# ---------------------------------------------------------------------------------------------------------- mismatches

_LAYER = LayerSpec(2, 4, 4, "float32", window=3, sinks=1, slack=2)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (replace(_LAYER, kv_heads=1), "kv_heads"),
        (replace(_LAYER, key_dim=5), "key_dim"),
        (replace(_LAYER, value_dim=0), "value_dim"),
        (replace(_LAYER, dtype="float16"), "dtype"),
        (replace(_LAYER, value_dtype="int32"), "value_dtype"),
        (replace(_LAYER, window=4), "window"),
        (replace(_LAYER, window=None, sinks=0, slack=None), "window"),
        (replace(_LAYER, sinks=0), "sinks"),
        (replace(_LAYER, slack=1), "slack"),
        (replace(_LAYER, slack=None), "slack"),
        (SharedLayer(0), "kv_heads"),
    ],
)
def test_each_field_of_a_spec_that_differs_is_named(other, field, path):
    first = LayerSpec(1, 1, 1, "uint8")
    fill(make(KVSpec([first, _LAYER])), 6).save(path)
    wanted = KVSpec([first, other])
    cache = fill(make(wanted), 2)
    arena = Arena("1MiB")
    for call in (lambda: cache.restore(path), lambda: KVCache.load(path, arena, spec=wanted)):
        with pytest.raises(StateError, match=rf"layer 1: {field} is .* in the file") as caught:
            call()
        assert (caught.value.layer, caught.value.field) == (1, field)
        assert caught.value.found == getattr(_LAYER, field)
        assert caught.value.wanted == getattr(other, field, None)
        assert caught.value.path == str(path)
    assert arena.stats.used == 0
    assert numbers(cache) == [0, 1]


def test_another_number_of_layers_is_named(path):
    make(SMALL).save(path)
    wanted = KVSpec.uniform(layers=3, kv_heads=2, head_dim=4, dtype="float32")
    with pytest.raises(StateError, match="layers is 2 in the file, 3") as caught:
        make(wanted).restore(path)
    assert (caught.value.field, caught.value.found, caught.value.wanted) == ("layers", 2, 3)


def test_too_many_rows_or_tokens_are_named(path):
    cache = fill(make(batch=3), 9, rows=3)
    cache.save(path)
    arena = Arena("1MiB")
    small, short = fill(make(batch=2), 1), fill(make(batch=3, max_tokens=8), 1)
    for size, field, target in (({"batch": 2}, "rows", small), ({"max_tokens": 8}, "tokens", short)):
        held = 3 if field == "rows" else 9
        for error, call in (
            (StateError, lambda size=size: KVCache.load(path, arena, **size)),
            (ArgumentError, lambda size=size: cache.copy_to(arena, **size)),
            (StateError, lambda target=target: target.restore(path)),
        ):
            wanted = f"{held} {field} are held, the cache is for {held - 1}, 1 too few; make it for at least {held}"
            with pytest.raises(error, match=wanted) as caught:
                call()
            assert (caught.value.field, caught.value.found, caught.value.wanted) == (field, held, held - 1)
    assert arena.stats.used == 0
    assert (numbers(small), numbers(short)) == ([0], [0])
    assert KVCache.load(path, arena, batch=3, max_tokens=9).length == 9


@pytest.mark.parametrize("bad", [0, -1])
def test_sizes_that_cannot_be_are_refused(bad, path):
    cache = make()
    cache.save(path)
    arena = Arena("1MiB")
    for options in ({"batch": bad}, {"max_tokens": bad}):
        with pytest.raises(ArgumentError, match="at least 1"):
            KVCache.load(path, arena, **options)
        with pytest.raises(ArgumentError, match="at least 1"):
            cache.copy_to(arena, **options)


def test_arguments_of_other_types_are_refused(path):
    cache = make()
    cache.save(path)
    for arena in (None, np.zeros(4)):
        with pytest.raises(ArgumentTypeError, match="Arena"):
            KVCache.load(path, arena)
        with pytest.raises(ArgumentTypeError, match="Arena"):
            cache.copy_to(arena)
    with pytest.raises(ArgumentTypeError, match="KVSpec"):
        KVCache.load(path, Arena("1MiB"), spec=[_LAYER])


def test_an_arena_that_lacks_the_dtype_is_as_before(path):
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=4, dtype="float8_e3m4")
    cache = make(spec)
    arena = Arena("1MiB", backend="torch")
    with pytest.raises(DTypeError, match="float8_e3m4"):
        cache.copy_to(arena)
    assert arena.stats.used == 0


# -------------------------------------------------------------------------------------------------------------- damage


def framed(header, payload=b""):
    """Return the bytes of a file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def written(path, header, payload=b""):
    path.write_bytes(framed(header, payload))


_INFO = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 100_000_001),
        struct.pack("<Q", 2**64 - 1),
        struct.pack("<Q", 9) + b"{}",
        struct.pack("<Q", 0),
        framed([]),
        framed(b"\xff\xff{}"),
        framed(b"[" * 200_000),
        framed(b'{"a":' + b"9" * 9_999 + b"}"),
        framed({"__metadata__": [1]}),
        framed({"__metadata__": {"a": 1}}),
        *(
            framed(tensors, b"12345678")
            for tensors in (
                {"a": 1},
                {"a": {**_INFO, "dtype": 1}},
                {"a": {**_INFO, "dtype": "F31"}},
                {"a": {**_INFO, "shape": 4}},
                {"a": {**_INFO, "shape": [2]}},
                {"a": {**_INFO, "shape": [2**40, 2**40]}},
                {"a": {**_INFO, "data_offsets": [0, -4]}},
                {"a": {**_INFO, "data_offsets": [4, 0]}},
                {"a": _INFO, "b": _INFO},
                {"a": _INFO, "b": {**_INFO, "data_offsets": [2, 6]}},
                {"a": {**_INFO, "data_offsets": [1, 5]}},
                {"a": {**_INFO, "data_offsets": [0, 2**70]}},
                {"a": _INFO},
            )
        ),
    ],
)
def test_what_safetensors_refuses_is_told(data, path):
    path.write_bytes(data)
    cache = fill(make(), 2)
    for call in (cache.restore, read_state, lambda p: KVCache.load(p, Arena("1MiB"))):
        with pytest.raises(StateError, match="no safetensors file, or damaged") as caught:
            call(path)
        assert caught.value.path == str(path)
    assert numbers(cache) == [0, 1]


@pytest.mark.parametrize("header", [{}, {"__metadata__": {}}, {"__metadata__": {"a": "1"}}])
def test_what_somebody_else_wrote_is_told(header, path):
    path.write_bytes(framed(header))
    with pytest.raises(StateError, match="lack 'format'; this library did not write it"):
        read_state(path)


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("format", "other", "format is 'other', wanted is 'gpuarena.kv'"),
        ("format_version", "2", "format_version is '2', wanted is '1'"),
        ("kind", "lanes", "kind is 'lanes', wanted is 'rows' or 'sequences'"),
        ("rows", "0", "rows is '0'.*at least 1"),
        ("rows", "null", "although there are tokens"),
        ("rows", "1.0", "rows is '1.0'.*an integer"),
        ("rows", "\u0661", "rows is"),
        ("batch", "-1", "batch is '-1'.*at least 1"),
        ("batch", "true", "batch is 'true'.*an integer"),
        ("max_tokens", "1" + "0" * 20, "max_tokens is.*no size is so large"),
        ("max_tokens", "9" * 5000, "max_tokens is"),
        ("spec", "{}", "at least one layer"),
        ("spec", "[]", "at least one layer"),
        ("spec", "[1]", "spec is"),
        ("spec", "null", "spec is"),
        ("spec", '[{"kv_heads": 1}]', "missing"),
        ("spec", '[{"source": 0}]', "no earlier layer"),
        (
            "spec",
            f'[{{"kv_heads": {10**4000}, "key_dim": 1, "value_dim": 1, "dtype": "uint8"}}]',
            "no size is so large",
        ),
        ("spec", '[{"kv_heads": 1, "key_dim": 1.0, "value_dim": 1, "dtype": "uint8"}]', "an integer"),
        ("spec", '[{"kv_heads": 1, "key_dim": 1, "value_dim": 1, "dtype": "object"}]', "dtype is one of"),
        ("spec", '[{"kv_heads": 1, "key_dim": 1, "value_dim": 1, "dtype": "i4,f8"}]', "dtype is one of"),
        ("spec", '[{"kv_heads": 1, "key_dim": 1, "value_dim": 1, "dtype": "complex128"}]', "has no dtype"),
        ("held", "{}", "held is"),
        ("held", "[[[0, 3]]]", "held is"),
        ("held", "[[[0, 3]], [[1, 3]]]", "layer 1 .* cannot hold"),
        ("held", "[[[0, 3]], [[0, 1], [1, 3]]]", "layer 1 .* cannot hold"),
        ("held", "[[[0, 3]], []]", "layer 1 .* cannot hold"),
        ("held", "[[[0, 3]], [[3, 0]]]", "runs ascend"),
        ("held", "[[[0, 3]], [[0, 1.5]]]", "held is"),
        ("held", "[[[0, 3]], [3]]", "held is"),
        ("held", "nonsense", "held is"),
        ("held", "[" * 100_000, "held is"),
    ],
)
def test_metadata_that_cannot_be_are_told(field, text, message, path):
    fill(make(), 3).save(path)
    data = path.read_bytes()
    header = header_of(path)
    payload = data[8 + struct.unpack("<Q", data[:8])[0] :]
    header["__metadata__"][field] = text
    written(path, header, payload)
    with pytest.raises(StateError, match=message) as caught:
        read_state(path)
    assert caught.value.field == field
    assert len(str(caught.value)) < 2000
    del header["__metadata__"][field]
    written(path, header, payload)
    with pytest.raises(StateError, match=f"lack '{field}'"):
        read_state(path)


@pytest.mark.parametrize(
    "held",
    [
        [[0, 7]],  # more than there are slots: 1 sink, window 3, slack 2
        [[0, 1], [1, 9]],
        [[0, 1], [1, 6]],  # which would be one run
        [[0, 0], [4, 9]],
        [[0, 2], [4, 9]],
        [[0, 1], [3, 9]],  # as above
        [[0, 1], [8, 9]],  # less than the window before the next token
        [[0, 1], [4, 6], [7, 9]],
        [[1, 1], [4, 9]],
    ],
)
def test_runs_that_a_bounded_window_cannot_hold_are_told(held, path):
    spec = KVSpec([_LAYER])
    fill(make(spec), 9).save(path)
    header = header_of(path)
    assert json.loads(header["__metadata__"]["held"]) == [[[0, 1], [4, 9]]]
    header["__metadata__"]["held"] = json.dumps([held])
    data = path.read_bytes()
    written(path, header, data[8 + struct.unpack("<Q", data[:8])[0] :])
    with pytest.raises(StateError, match=r"layer 0 .* cannot hold|runs ascend"):
        read_state(path)


def test_a_tensor_that_is_missing_or_unknown_or_of_another_type_is_told(path):
    fill(make(), 3).save(path)
    data = path.read_bytes()
    payload = data[8 + struct.unpack("<Q", data[:8])[0] :]

    def changed(change):
        header = header_of_data(data)
        change(header)
        written(path, header, payload)
        with pytest.raises(StateError) as caught:
            KVCache.load(path, Arena("1MiB"))
        return str(caught.value)

    def rename(header):
        header["other"] = header.pop("layers.1.keys")

    def recode(header):
        header["layers.1.keys"]["dtype"] = "I32"

    def reshape(header):
        header["layers.1.keys"]["shape"] = [1, 2, 4, 3]

    def enlarge(header):
        a, b = header["layers.0.keys"], header["layers.0.values"]
        a["data_offsets"] = [0, 100]
        b["data_offsets"] = [100, 192]

    assert "its metadata tell of no tensor 'other'" in changed(rename)
    assert "tensor 'layers.1.keys' is I32, its metadata tell of F32" in changed(recode)
    assert "tensor 'layers.1.keys' is (1, 2, 4, 3), its metadata tell of (1, 2, 3, 4)" in changed(reshape)
    assert "no safetensors file, or damaged" in changed(enlarge)
    header = header_of_data(data)
    del header[max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][0])]
    written(path, header, payload[:-96])
    with pytest.raises(StateError, match=r"lacks 1 tensors, the first is 'layers\.1\.values'"):
        KVCache.load(path, Arena("1MiB"))


def header_of_data(data):
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def test_a_field_that_later_versions_add_may_be_missing_and_an_unknown_one_not(path):
    spec = KVSpec([LayerSpec(1, 2, 2, "float32")])
    make(spec).save(path)
    header = header_of(path)
    layer = json.loads(header["__metadata__"]["spec"])[0]
    del layer["storage"]
    header["__metadata__"]["spec"] = json.dumps([layer])
    written(path, header)
    assert read_state(path).spec == spec
    header["__metadata__"]["spec"] = json.dumps([{**layer, "rope": 1}])
    written(path, header)
    with pytest.raises(StateError, match="rope"):
        read_state(path)


def test_a_header_that_safetensors_would_refuse_is_not_written(path, monkeypatch):
    monkeypatch.setattr(_writer, "MAX_HEADER_NBYTES", 4096)
    with pytest.raises(ArgumentError, match="safetensors allows 4096"):
        make().save(path, metadata={"a": "x" * 4096})
    assert not os.listdir(path.parent)


@pytest.mark.parametrize("backend", ["host", "torch"])
@pytest.mark.parametrize(
    ("field", "n"), [("batch", 2**62), ("max_tokens", 2**63 - 1), ("max_tokens", 10**12)]
)
def test_a_file_of_a_cache_that_cannot_be_made_needs_no_memory(field, n, backend, path):
    make().save(path)
    header = header_of(path)
    header["__metadata__"][field] = str(n)
    written(path, header)
    arena = Arena("1MiB", backend=backend)
    with pytest.raises(OutOfMemoryError, match="requested for 'keys and values'") as caught:
        KVCache.load(path, arena)
    assert caught.value.missing == caught.value.requested - arena.stats.available
    assert arena.stats.used == 0


# -------------------------------------------------------------------------------------------------- arenas and devices


def test_a_stale_cache_is_neither_saved_nor_restored_nor_copied(path):
    good = fill(make(), 2)
    good.save(path)
    before = path.read_bytes()
    cache = fill(make(), 3)
    cache.arena.reset()
    for call in (
        lambda: cache.save(path),
        lambda: cache.restore(path),
        lambda: cache.copy_to(Arena("1MiB")),
        cache.fork,
    ):
        with pytest.raises(StaleRegionError):
            call()
    assert path.read_bytes() == before
    closed = Arena("1MiB")
    closed.close()
    for call in (lambda: KVCache.load(path, closed), lambda: good.copy_to(closed)):
        with pytest.raises(ArenaClosedError):
            call()


def test_nothing_is_done_while_a_graph_is_captured(path, monkeypatch):
    cache, other = fill(make(), 2), make()
    cache.save(path)
    before = path.read_bytes()
    monkeypatch.setattr(other.arena, "_captures", lambda: True)
    calls = [
        lambda: other.save(path),
        lambda: other.restore(path),
        lambda: other.copy_to(cache.arena),
        lambda: cache.copy_to(other.arena),
        lambda: KVCache.load(path, other.arena),
        other.fork,
    ]
    for call in calls:
        with pytest.raises(CaptureError):
            call()
    assert path.read_bytes() == before


def test_checkpoints_do_not_travel_and_shared_prefixes_do():
    cache = fill(make(), 4)
    mark = cache.checkpoint()
    cache.repeat(2)
    copy = cache.fork()
    with pytest.raises(CheckpointError, match="another cache"):
        copy.rollback(mark)
    inner = copy.checkpoint()
    copy.reorder([1, 0])
    copy.rollback(inner)  # the rows are known to be alike, so their exchange kills no checkpoint
    cache.rollback(mark)


def test_a_step_that_stands_half_way_is_kept_as_it_is(path):
    cache = fill(make(), 4)
    cache.layers[1].truncate(2)
    cache.save(path)
    assert read_state(path).lengths == (4, 2)
    assert read_state(path).length == 2
    for copy in (KVCache.load(path, Arena("1MiB")), cache.fork()):
        assert (numbers(copy, 0), numbers(copy, 1)) == ([0, 1, 2, 3], [0, 1])
        assert copy.high_water == 4


@pytest.mark.parametrize("backend", ["virtual", "virtual:torch"])
def test_arenas_that_grow(backend, path):
    fill(make(), 5).save(path)
    arena = Arena("64MiB", backend=backend)
    cache = KVCache.load(path, arena, max_tokens=2000)
    assert cache.layout == "token-major"
    assert numbers(cache, 1) == list(range(5))
    fill(cache, 1500, first=5)
    cache.save(path)
    other = KVCache(Arena("64MiB", backend=backend), SMALL, batch=2, max_tokens=2000)
    other.restore(path)
    assert numbers(other, 1) == list(range(1505))
    fork = cache.fork()
    assert fork.layout == cache.layout
    fill(fork, 100, first=1505)
    assert numbers(fork) == list(range(1605))
    assert numbers(cache) == list(range(1505))


@pytest.mark.parametrize("backend", ["virtual", "virtual:torch"])
def test_rings_are_copied_to_rings_where_the_arena_grows(backend, path):
    spec = KVSpec([LayerSpec(2, 4, 4, "float32", window=5, slack=3), LayerSpec(2, 4, 4, "float32")])
    cache = KVCache(Arena("64MiB", backend=backend), spec, batch=2, max_tokens=64, rings=True)
    for first in range(0, 30, 3):
        fill(cache, 3, rows=2, first=first)
    cache.save(path)
    other = KVCache(Arena("64MiB", backend=backend), spec, batch=2, max_tokens=64, rings=True)
    other.restore(path)
    rings = [other, cache.fork(), cache.copy_to(Arena("64MiB", backend=backend))]
    windows = [cache.copy_to(Arena("1MiB")), KVCache.load(path, Arena("1MiB", backend="torch"))]
    rings.append(rings[0].copy_to(Arena("64MiB", backend="virtual")))
    for copies, kind in ((rings, RingLayer), (windows, WindowLayer)):
        for copy in copies:
            assert type(copy.layers[0]) is kind
            for first in range(30, 48, 3):
                assert numbers(copy)[-4:] == list(range(first - 4, first))
                fill(copy, 3, rows=2, first=first)
            assert numbers(copy, 1) == list(range(48))
    assert numbers(cache, 1) == list(range(30))


def test_what_is_made_in_inference_mode_can_be_used_outside(path):
    with torch.inference_mode():
        cache = fill(make(backend="torch"), 3)
        cache.save(path)
        loaded = KVCache.load(path, Arena("1MiB", backend="torch"))
        copy = loaded.copy_to(Arena("1MiB", backend="torch"))
        cache.restore(path)
    for one in (cache, loaded, copy):
        fill(one, 2, first=3)
        assert numbers(one) == list(range(5))
    with torch.inference_mode():
        copy.restore(path)
        copy.fork()


def test_torch_is_not_imported_for_a_host_cache_nor_safetensors_to_save_one(path):
    code = f"""
import sys
import numpy as np
from gpuarena import Arena
from gpuarena.kv import KVCache, KVSpec, LayerSpec
import gpuarena.kv.state
spec = KVSpec([LayerSpec(1, 4, 4, dtype) for dtype in ("bfloat16", "float8_e4m3fn")])
cache = KVCache(Arena("1MiB"), spec, batch=1, max_tokens=4)
for number, layer in cache.spec.owned:
    k = np.ones((1, 1, 2, 4)).astype(layer.dtype.numpy)
    cache.append(number, k, k)
cache.save({str(path)!r})
assert not {{"torch", "cupy", "safetensors", "pickle"}} & (sys.modules.keys() - before), sys.modules
loaded = KVCache.load({str(path)!r}, Arena("1MiB"))
assert (loaded.layers[1].keys == 1).all()
assert not {{"torch", "cupy", "pickle"}} & (sys.modules.keys() - before), sys.modules
"""
    code = "import sys; import gpuarena.errors; before = set(sys.modules)\n" + code
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_dtype_of_the_table_is_saved_or_named(path):
    from gpuarena.dtypes import known_names

    for name in known_names():
        spec = KVSpec([LayerSpec(1, 2, 2, as_dtype(name))])
        try:
            cache = make(spec)
        except DTypeError:
            continue  # NumPy has none
        if name in _ALL_DTYPES:
            cache.save(path)
        else:
            with pytest.raises(DTypeError, match=name):
                cache.save(path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_cache_goes_from_the_gpu_to_a_file_to_the_host_and_back(dtype, path, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setattr(_pieces, "PIECE_NBYTES", 1000)
    spec = KVSpec([LayerSpec(2, 4, 4, dtype), LayerSpec(2, 4, 4, dtype, window=3, slack=2)])
    cache = KVCache(Arena("1MiB", backend="torch", device="cuda"), spec, batch=2, max_tokens=64)
    rows = (
        torch.randint(0, 120, (2, 2, 40, 4), dtype=torch.uint8, device="cuda")
        .to(torch.float32)
        .to(getattr(torch, dtype))
    )
    for number in (0, 1):
        cache.append(number, rows, rows)
    cache.save(path)
    host = KVCache.load(path, Arena("1MiB"))
    back = host.copy_to(Arena("1MiB", backend="torch", device="cuda"))
    back.reset()
    back.restore(path)
    again = back.fork().copy_to(Arena("1MiB", backend="torch"))
    for number in (0, 1):
        wanted = cache.layers[number].keys.contiguous().view(torch.uint8).cpu().numpy().tobytes()
        assert host.layers[number].keys.tobytes() == wanted
        for one in (back, again):
            assert one.layers[number].keys.contiguous().view(torch.uint8).cpu().numpy().tobytes() == wanted


# -------------------------------------------------------------------------------------------------- quantised layers


def stored(cache):
    """Return the bytes of the codes and scales of all tokens of a cache."""
    found = []
    for layer in cache.layers:
        for name, plane in layer.filled():
            if isinstance(plane, torch.Tensor):
                plane = plane.contiguous().view(torch.uint8).numpy()
            found.append((name, plane.tobytes()))
    return found


@pytest.mark.parametrize("backend", ["host", "torch"])
@pytest.mark.parametrize("storage", ["int8", "float8_e4m3fn", "int4"])
def test_codes_and_scales_are_saved_as_they_are_stored(storage, backend, path):
    spec = KVSpec(
        [
            LayerSpec(2, 40, 40, "float32", storage=storage),
            LayerSpec(1, 7, 0, "bfloat16", storage=storage, window=3),
            LayerSpec(1, 3, 3, "bfloat16"),
        ]
    )
    random = torch.Generator().manual_seed(0)

    def feed(caches, n_tokens):
        for number, layer in spec.owned:
            for_all = [
                torch.randn((2, layer.kv_heads, n_tokens, dim), generator=random)
                for dim in (layer.key_dim, layer.value_dim)
            ]
            for cache in caches:
                if cache.arena.backend == "torch":
                    pair = [array.to(layer.dtype.torch) for array in for_all]
                else:
                    pair = [array.numpy().astype(layer.dtype.numpy) for array in for_all]
                cache.append(number, *pair)

    cache = make(spec, backend=backend, max_tokens=12)
    feed([cache], 5)
    cache.save(path)
    tensors = dict(safetensors.deserialize(path.read_bytes()))
    wanted = stored(cache)
    for number in (0, 1):
        for name, data in wanted[4 * number : 4 * number + 4]:
            assert bytes(tensors[f"layers.{number}.{name}"]["data"]) == data
    assert sum(len(one["data"]) for one in tensors.values()) == cache.stats.used_nbytes
    restored = make(spec, backend=backend, max_tokens=12)
    feed([restored], 7)
    restored.restore(path)
    same = [cache, KVCache.load(path, Arena("1MiB", backend=backend), spec=spec), restored, cache.fork()]
    other = cache.copy_to(Arena("1MiB", backend="host" if backend == "torch" else "torch"))
    for one in (*same[1:], other):
        assert stored(one) == wanted
    feed(same, 3)
    for one in same[1:]:
        assert stored(one) == stored(cache)
        assert bool((one.layers[0].keys == cache.layers[0].keys).all())
    with pytest.raises(StateError, match=rf"layer 0: storage is {storage} in the file, None"):
        KVCache.load(
            path, Arena("1MiB"), spec=KVSpec([replace(spec.layers[0], storage=None), *spec.layers[1:]])
        )


@pytest.mark.parametrize("storage", ['"int3"', '""', "8", "[]", "true"])
def test_a_storage_that_there_is_not_is_told(storage, path):
    make(KVSpec([LayerSpec(1, 2, 2, "float32")])).save(path)
    header = header_of(path)
    text = header["__metadata__"]["spec"]
    header["__metadata__"]["spec"] = text.replace('"storage": null', f'"storage": {storage}')
    assert header["__metadata__"]["spec"] != text
    written(path, header)
    with pytest.raises(StateError, match=r"spec is .* in its metadata"):
        read_state(path)
