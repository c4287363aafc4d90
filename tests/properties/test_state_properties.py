"""Caches that go through files and copies, against a model: for each layer the bytes of every token ever appended."""

from __future__ import annotations

import itertools
import json
import struct
from contextlib import contextmanager

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuarena import Arena, CheckpointError, as_dtype
from gpuarena.errors import ArenaError, OutOfMemoryError, StateError
from gpuarena.kv import KVCache, KVSpec, LayerSpec, SharedLayer
from gpuarena.kv.state import read_state

torch = pytest.importorskip("torch")

# what safetensors calls the types, written down apart from the library
CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int16": "I16",
    "uint32": "U32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_CAPACITY = 1 << 18


# ---------------------------------------------------------------------------------------------------------- libraries


def native(raw, dtype, backend):
    """Return bytes ``[..., dim * itemsize]`` as an array of a library."""
    dim = raw.shape[-1] // as_dtype(dtype).itemsize
    array = np.ascontiguousarray(raw).reshape(-1).view(as_dtype(dtype).numpy).reshape(*raw.shape[:-1], dim)
    if backend == "host":
        return array
    flat = torch.from_numpy(np.array(raw).reshape(-1))
    return flat.view(as_dtype(dtype).torch).reshape(*raw.shape[:-1], dim)


def raw_of(array):
    """Return an array of any library as bytes ``[..., dim * itemsize]``."""
    if isinstance(array, torch.Tensor):
        shape, itemsize = tuple(array.shape), array.element_size()
        array = array.contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        shape, itemsize = array.shape, array.itemsize
        array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return array.reshape(*shape[:-1], shape[-1] * itemsize)


# -------------------------------------------------------------------------------------------------------------- model


class Model:
    """The bytes of every token of each layer that owns keys and values."""

    def __init__(self, spec, rows, seed):
        self.spec, self.rows = spec, rows
        self._random = np.random.default_rng(seed)
        self.history = {
            number: [np.zeros((rows, layer.kv_heads, 0, n), np.uint8) for n in self._widths(layer)]
            for number, layer in spec.owned
        }

    @staticmethod
    def _widths(layer):
        return layer.key_dim * layer.dtype.itemsize, layer.value_dim * layer.value_dtype.itemsize

    def grow(self, number, n_tokens):
        """Add tokens to a layer and return their bytes."""
        layer = self.spec.layers[number]
        new = []
        for which, (n, dtype) in enumerate(
            zip(self._widths(layer), (layer.dtype, layer.value_dtype), strict=True)
        ):
            top = 2 if dtype == "bool" else 256
            made = self._random.integers(0, top, (self.rows, layer.kv_heads, n_tokens, n), np.uint8)
            new.append(made)
            self.history[number][which] = np.concatenate([self.history[number][which], made], axis=2)
        return new

    def step(self, caches, n_tokens):
        """Append the same new tokens to all layers of all caches, and compare what comes back."""
        for number, layer in self.spec.owned:
            new = self.grow(number, n_tokens)
            returned = [
                cache.append(
                    number,
                    native(new[0], layer.dtype, cache.arena.backend),
                    native(new[1], layer.value_dtype, cache.arena.backend),
                )
                for cache in caches
            ]
            for one in returned[1:]:
                for mine, other in zip(returned[0], one, strict=True):
                    assert np.array_equal(raw_of(mine), raw_of(other))

    def cut(self, n_tokens):
        for planes in self.history.values():
            planes[:] = [plane[:, :, :n_tokens] for plane in planes]

    def held(self, cache, number):
        """Return the bytes that a layer has to show, for the positions that it says."""
        positions = list(itertools.chain(*cache.layers[number].positions))
        return [plane[:, :, positions] for plane in self.history[number]]

    def check(self, cache, positions=None):
        assert cache.spec == self.spec
        for number, _ in self.spec.owned:
            layer = cache.layers[number]
            assert layer.length == self.history[number][0].shape[2]
            if positions is not None:
                assert layer.positions == positions[number]
            if cache.rows is None:
                assert layer.length == 0
                continue
            assert cache.rows == self.rows
            for shown, wanted in zip((layer.keys, layer.values), self.held(cache, number), strict=True):
                assert np.array_equal(raw_of(shown), wanted)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("state") / "cache.safetensors"


def positions_of(cache):
    return {number: cache.layers[number].positions for number, _ in cache.spec.owned}


# --------------------------------------------------------------------------------------------------------- strategies


@st.composite
def layers(draw):
    dtype = draw(st.sampled_from(sorted(CODES)))
    key_dim = draw(st.integers(1, 4))
    window = draw(st.none() | st.integers(1, 5))
    joint = draw(st.booleans())
    return LayerSpec(
        kv_heads=draw(st.integers(1, 2)),
        key_dim=key_dim,
        value_dim=key_dim if joint else draw(st.integers(0, 3)),
        dtype=dtype,
        value_dtype=None if joint else draw(st.none() | st.sampled_from(sorted(CODES))),
        window=window,
        sinks=0 if window is None else draw(st.integers(0, 2)),
        slack=None if window is None else draw(st.none() | st.integers(1, 4)),
    )


@st.composite
def specs(draw):
    own = draw(st.lists(layers(), min_size=1, max_size=3))
    shared = draw(st.lists(st.integers(0, len(own) - 1), max_size=2))
    return KVSpec([*own, *map(SharedLayer, shared)])


def least_slack(spec):
    return min((layer.slack for _, layer in spec.owned if layer.slack is not None), default=3)


@st.composite
def programs(draw):
    """A cache with a history: spec, batch, rows, max_tokens, chunks of tokens, a cut, backend, layout."""
    spec = draw(specs())
    batch = draw(st.integers(1, 3))
    slack = least_slack(spec)
    chunks = draw(st.lists(st.integers(0, slack + 1), max_size=4))
    if chunks:
        chunks[0] = draw(st.integers(0, 14))
    return {
        "spec": spec,
        "batch": batch,
        "rows": draw(st.integers(1, batch)),
        "max_tokens": max(1, sum(chunks)) + draw(st.integers(0, 6)),
        "chunks": chunks,
        "cut": draw(st.none() | st.integers(0, 20)),
        "backend": draw(st.sampled_from(["host", "torch"])),
        "layout": draw(st.sampled_from(["head-major", "token-major"])),
        "seed": draw(st.integers(0, 99)),
    }


def build(program):
    """Return a cache and its model."""
    spec = program["spec"]
    cache = KVCache(
        Arena(_CAPACITY, backend=program["backend"]),
        spec,
        batch=program["batch"],
        max_tokens=program["max_tokens"],
        layout=program["layout"],
    )
    model = Model(spec, program["rows"], program["seed"])
    for n_tokens in program["chunks"]:
        model.step([cache], n_tokens)
    cut = program["cut"]
    if cut is not None and cut <= cache.length:
        try:
            cache.truncate(cut)
            model.cut(cut)
        except ArenaError:
            pass  # a bounded window has forgotten what it would need
    model.check(cache)
    return cache, model


def go_on(model, caches, n_steps=2):
    """Append to all caches while there is room, and compare what they hold and read."""
    for _ in range(n_steps):
        n_tokens = min(least_slack(model.spec) + 1, min(cache.max_tokens - cache.length for cache in caches))
        model.step(caches, n_tokens)
        for cache in caches:
            model.check(cache)
        for number in range(len(model.spec.layers)):
            shown = [[raw_of(array) for array in cache.read(number)] for cache in caches]
            for one in shown[1:]:
                assert all(np.array_equal(a, b) for a, b in zip(shown[0], one, strict=True))


# ---------------------------------------------------------------------------------------------------------- properties


@settings(max_examples=60)
@given(program=programs(), backend=st.sampled_from(["host", "torch"]), more=st.integers(0, 2))
def test_a_file_brings_back_every_byte_and_the_cache_goes_on_as_if_nothing_had_been(
    program, backend, more, path
):
    cache, model = build(program)
    cache.save(path, metadata={"model": "tiny", "ü": '"spec":[]'})
    saved = read_state(path)
    assert (saved.spec, saved.batch, saved.max_tokens, saved.rows) == (
        cache.spec,
        cache.batch,
        cache.max_tokens,
        cache.rows,
    )
    assert saved.metadata == {"model": "tiny", "ü": '"spec":[]'}
    assert saved.length == cache.length
    arena = Arena(_CAPACITY, backend=backend)
    loaded = KVCache.load(path, arena, max_tokens=cache.max_tokens + more, batch=cache.batch + more)
    assert (loaded.max_tokens, loaded.batch, loaded.rows) == (
        cache.max_tokens + more,
        cache.batch + more,
        cache.rows,
    )
    assert loaded.high_water >= loaded.length
    model.check(loaded, positions_of(cache))
    model.check(cache)
    go_on(model, [cache, loaded])


@settings(max_examples=60)
@given(program=programs())
def test_a_file_holds_exactly_the_filled_bytes(program, path):
    cache, model = build(program)
    cache.save(path)
    data = path.read_bytes()
    found = dict(safetensors.deserialize(data))
    wanted = {}
    for number, layer in model.spec.owned:
        for name, dtype, dim, held in zip(
            ("keys", "values"),
            (layer.dtype, layer.value_dtype),
            (layer.key_dim, layer.value_dim),
            model.held(cache, number),
            strict=True,
        ):
            rows = model.rows if cache.rows is not None else 0
            wanted[f"layers.{number}.{name}"] = (
                CODES[dtype.name],
                [rows, *held.shape[1:3], dim],
                held.tobytes() if rows else b"",
            )
    assert {n: (one["dtype"], one["shape"], bytes(one["data"])) for n, one in found.items()} == wanted
    (n_header,) = struct.unpack("<Q", data[:8])
    assert len(data) == 8 + n_header + sum(len(raw) for *_, raw in wanted.values())
    header = json.loads(data[8 : 8 + n_header])
    for name, (code, *_) in wanted.items():  # each array is aligned to its items
        itemsize = {code: as_dtype(name).itemsize for name, code in CODES.items()}[code]
        assert (8 + n_header + header[name]["data_offsets"][0]) % min(itemsize, 8) == 0


@settings(max_examples=60)
@given(program=programs(), other=st.integers(0, 5), backend=st.sampled_from(["host", "torch"]))
def test_a_restored_cache_holds_the_file_and_nothing_else(program, other, backend, path):
    cache, model = build(program)
    cache.save(path)
    target = KVCache(
        Arena(_CAPACITY, backend=backend), cache.spec, batch=cache.batch + 1, max_tokens=cache.max_tokens
    )
    before = Model(cache.spec, 1, 5)
    before.step([target], min(other, cache.max_tokens))
    mark = target.checkpoint()
    target.restore(path)
    model.check(target, positions_of(cache))
    with pytest.raises(CheckpointError):
        target.rollback(mark)
    go_on(model, [cache, target])


@settings(max_examples=60)
@given(program=programs(), backend=st.sampled_from(["host", "torch", "same"]), more=st.integers(0, 2))
def test_a_copy_holds_every_byte_and_is_independent(program, backend, more):
    cache, model = build(program)
    if backend == "same":
        copy = cache.fork()
        assert (copy.arena, copy.batch, copy.max_tokens, copy.layout) == (
            cache.arena,
            cache.batch,
            cache.max_tokens,
            cache.layout,
        )
    else:
        copy = cache.copy_to(
            Arena(_CAPACITY, backend=backend), batch=cache.batch + more, max_tokens=cache.max_tokens + more
        )
    model.check(copy, positions_of(cache))
    go_on(model, [cache, copy], n_steps=1)
    cache.reset()
    other = Model(cache.spec, 1, 5)
    other.step([cache], min(3, cache.max_tokens))
    model.check(copy)
    copy.reset()
    other.check(cache)


# ------------------------------------------------------------------------------------------------------- hostile files


class FileKit:
    """One saved file of several kinds of layers, what it holds, and a target that holds something else."""

    spec = KVSpec(
        [
            LayerSpec(1, 2, 2, "bfloat16"),
            LayerSpec(2, 3, 1, "float32", window=3, sinks=1, slack=2, value_dtype="uint8"),
            SharedLayer(0),
            LayerSpec(1, 2, 0, "int16", window=2, slack=1),
        ]
    )

    def __init__(self, folder):
        self.path = folder / "hostile.safetensors"
        cache = KVCache(Arena(_CAPACITY), self.spec, batch=2, max_tokens=12)
        self.model = Model(self.spec, 2, 0)
        self.model.step([cache], 9)
        cache.save(self.path, metadata={"a": "b"})
        self.data = self.path.read_bytes()
        self.target = KVCache(Arena(_CAPACITY, backend="torch"), self.spec, batch=2, max_tokens=12)
        self.before = Model(self.spec, 1, 1)
        self.before.step([self.target], 4)
        self.mark = self.target.checkpoint()
        self.arenas = [Arena(_CAPACITY), Arena(_CAPACITY, backend="torch")]
        self.arena = self.arenas[0]

    @contextmanager
    def unchanged_on_error(self):
        """Pass errors of files, and see that neither the target nor an arena has changed."""
        try:
            yield
        except (StateError, OutOfMemoryError):  # the latter for sizes that no arena has
            assert all(arena.stats.used == 0 for arena in self.arenas)
            self.before.check(self.target)
            self.target.rollback(self.mark)  # its checkpoint lives
        else:
            for arena in self.arenas:
                arena.reset()

    def try_out(self, data, *, is_equal=True):
        """Load and restore a changed file; whatever comes of it has to be typed or, where `is_equal`, the same cache."""
        self.path.write_bytes(data)
        for arena in self.arenas:
            with self.unchanged_on_error():
                self._look_at(KVCache.load(self.path, arena), is_equal)
        with self.unchanged_on_error():
            self.target.restore(self.path)
            self._look_at(self.target, is_equal)
            self.target.reset()
            self.before = Model(self.spec, 1, 1)
            self.before.step([self.target], 4)
            self.mark = self.target.checkpoint()

    def _look_at(self, cache, is_equal):
        if is_equal:
            self.model.check(cache)
        for number, layer in cache.spec.owned:
            for shown, dim in zip(cache.read(number, 0), (layer.key_dim, layer.value_dim), strict=True):
                assert shown.shape[3] == dim
            assert cache.layers[number].keys.shape[2] == sum(map(len, cache.layers[number].positions))


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    return FileKit(tmp_path_factory.mktemp("hostile"))


@settings(max_examples=150)
@given(data=st.data())
def test_flipped_bytes_of_the_header_are_found_or_harmless(kit, data):
    n_header = 8 + struct.unpack("<Q", kit.data[:8])[0]
    flips = data.draw(
        st.lists(st.tuples(st.integers(0, n_header - 1), st.integers(1, 255)), min_size=1, max_size=3)
    )
    changed = bytearray(kit.data)
    for place, bits in flips:
        changed[place] ^= bits
    kit.try_out(bytes(changed), is_equal=False)


def test_a_flipped_byte_of_the_arrays_is_loaded_as_it_is(kit):
    """There is no checksum, and nothing else that would notice."""
    changed = bytearray(kit.data)
    changed[-1] ^= 1  # of the narrowest tensor
    kit.path.write_bytes(changed)
    for cache in (KVCache.load(kit.path, kit.arena), KVCache.load(kit.path, kit.arenas[1])):
        shown = [raw_of(array) for number, _ in kit.spec.owned for array in kit_arrays(cache, number)]
        wanted = [array for number, _ in kit.spec.owned for array in kit.model.held(cache, number)]
        assert sum(int((a != b).sum()) for a, b in zip(shown, wanted, strict=True)) == 1
    for arena in kit.arenas:
        arena.reset()


def kit_arrays(cache, number):
    return cache.layers[number].keys, cache.layers[number].values


@settings(max_examples=60)
@given(data=st.data())
def test_truncated_and_prolonged_files_are_found(kit, data):
    n = data.draw(st.integers(0, len(kit.data) - 1))
    tail = data.draw(st.binary(max_size=40))
    for changed in (kit.data[:n], kit.data + tail + b"x", kit.data[:n] + tail):
        if len(changed) != len(kit.data):
            kit.path.write_bytes(changed)
            for arena in kit.arenas:
                with pytest.raises(StateError):
                    KVCache.load(kit.path, arena)
                assert arena.stats.used == 0
            with pytest.raises(StateError):
                kit.target.restore(kit.path)
    kit.before.check(kit.target)
    kit.target.rollback(kit.mark)


def taken_apart(data):
    n = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def put_together(header, payload, **options):
    """Return a file."""
    text = json.dumps(header, **options).encode()
    return struct.pack("<Q", len(text)) + text + payload


def test_the_documentation_is_enough_to_write_a_file(kit):
    data = put_together(*taken_apart(kit.data), indent=1)
    kit.path.write_bytes(data)
    kit.model.check(KVCache.load(kit.path, kit.arena))
    kit.arena.reset()


_HOSTILE = [
    None,
    True,
    0,
    1,
    2,
    3,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    2**31,
    2**63 - 1,
    2**63,
    2**200,
    "",
    "1",
    "null",
    "[]",
    "[[",
    "float32",
    "object",
    "O",
    "complex128",
    "i4,f8",
    "\ud800",
    "9" * 18,
    "9" * 4000,
    "[" * 100_000,
    [],
    [[]],
    [0, 1],
    [[0, 1]],
    [2**63 - 1, 2**63 - 1],
    {},
    {"source": 0},
    {"source": -1},
]


def nodes(tree, path=()):
    """Yield the path of every node of a JSON tree below its root."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from nodes(child, (*path, key))


def changed_at(tree, path, change):
    """Return a copy of a JSON tree in which `change` was made to one node."""
    tree = json.loads(json.dumps(tree))
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    change(parent, path[-1])
    return tree


@settings(max_examples=400)
@given(data=st.data())
def test_a_header_that_lies_is_found_or_harmless(kit, data):
    header, payload = taken_apart(kit.data)
    inner = {name: json.loads(header["__metadata__"][name]) for name in ("spec", "held")}
    trees = {"header": header, **inner}
    for _ in range(data.draw(st.integers(1, 2))):
        which = data.draw(st.sampled_from(sorted(trees)))
        paths = list(nodes(trees[which]))
        if not paths:
            continue
        path = data.draw(st.sampled_from(paths))
        kind = data.draw(st.sampled_from(["replace", "delete", "swap"]))
        value = data.draw(st.sampled_from(_HOSTILE))
        other = data.draw(st.sampled_from(paths))

        def change(parent, key, kind=kind, value=value, other=other, tree=trees[which]):
            if kind == "replace":
                parent[key] = value
            elif kind == "delete":
                del parent[key]
            else:
                for step in other:
                    tree = tree[step]
                parent[key] = tree

        trees[which] = changed_at(trees[which], path, change)
    header = trees["header"]
    if isinstance(header.get("__metadata__"), dict):
        for name, tree in inner.items():
            if trees[name] != tree:
                header["__metadata__"][name] = json.dumps(trees[name])
    kit.try_out(put_together(header, payload), is_equal=False)


@settings(max_examples=60)
@given(program=programs(), size=st.integers(0, 4000))
def test_a_copy_that_does_not_fit_leaves_the_arena_as_it_was(program, size, path):
    cache, model = build(program)
    cache.save(path)
    arena = Arena(size + 1)
    taken = arena.alloc(size // 2, "uint8")
    before = arena.stats
    for make in (lambda: cache.copy_to(arena), lambda: KVCache.load(path, arena)):
        start = arena.checkpoint()
        try:
            copy = make()
        except OutOfMemoryError:
            after = arena.stats
            assert (after.top, after.used, after.n_regions) == (before.top, before.used, before.n_regions)
        else:
            model.check(copy)
            arena.rollback(start)
    assert taken.is_live
