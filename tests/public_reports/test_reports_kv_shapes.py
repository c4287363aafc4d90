"""What KV caches were reported for at the limits: overflow, tables, zero lengths, 32 bits, addresses that must stay.

The oracle is Python's integers, which have no limit, and attention in plain torch.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from gpuarena import Arena, CapacityError  # noqa: E402
from gpuarena.errors import ArgumentError, SequenceError, ShapeError  # noqa: E402
from gpuarena.kv import KVCache, KVSpec, LayerSpec  # noqa: E402
from gpuarena.kv.contiguous import ContiguousKVCache  # noqa: E402
from gpuarena.kv.lanes import LaneCache  # noqa: E402
from gpuarena.kv.paged import BlockTable, FlashInferTables, PagedKVCache  # noqa: E402
from gpuarena.kv.paged._page_tables import slot_mapping  # noqa: E402
from gpuarena.kv.paged._pages import PagePool  # noqa: E402

HEADS, DIM, SIZE, PAGES = 2, 4, 4, 8
SPEC = KVSpec.uniform(layers=2, kv_heads=HEADS, head_dim=DIM, dtype="float32")
ONE = KVSpec.uniform(layers=1, kv_heads=HEADS, head_dim=DIM, dtype="float32")

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def dirty(nbytes):
    """An arena whose memory is NaN wherever nothing was written."""
    return Arena.from_buffer(torch.full((nbytes + 512,), 0xFF, dtype=torch.uint8))


def linear(spec=SPEC, max_tokens=12, **options):
    nbytes = spec.arena_nbytes(1, max_tokens)
    return KVCache(dirty(nbytes), spec, batch=1, max_tokens=max_tokens, **options)


def pages(spec=ONE, **options):
    nbytes = PagedKVCache.arena_nbytes(spec, num_pages=PAGES, page_size=SIZE)
    return PagedKVCache(dirty(nbytes), spec, num_pages=PAGES, page_size=SIZE, **options)


def tokens(start, stop, layer=0):
    """[1, heads, n, dim] of numbers, with small parts that tell heads and elements apart."""
    numbers = torch.arange(float(start), float(stop))[None, None, :, None] + layer
    return numbers + torch.arange(HEADS)[None, :, None, None] / 8 + torch.arange(DIM) / 64


# ------------------------------------------------------------------------------------------------------- overflow


def one_row(kind):
    """A cache of 12 tokens in two layers: its arena, what appends, what is held of a layer, what cuts."""
    if kind == "lanes":
        cache = LaneCache(dirty(1 << 14), SPEC, lanes=1, max_tokens=12)
        return cache.arena, cache.append, cache.read, lambda n: cache.truncate(0, n)
    if kind == "paged":
        nbytes = PagedKVCache.arena_nbytes(SPEC, num_pages=3, page_size=4)
        cache = PagedKVCache(dirty(nbytes), SPEC, num_pages=3, page_size=4)
        row = cache.sequence()
        return cache.arena, row.append, lambda layer: [a[None] for a in row.read(layer)], row.truncate
    if kind == "contiguous":
        nbytes = ContiguousKVCache.arena_nbytes(SPEC, capacity_tokens=20)
        cache = ContiguousKVCache(dirty(nbytes), SPEC, capacity_tokens=20)
        row = cache.request(12)
        return cache.arena, row.append, row.read, row.truncate
    if kind == "int8":
        cache = linear(
            KVSpec.uniform(layers=2, kv_heads=HEADS, head_dim=DIM, dtype="float32", storage="int8")
        )
    elif kind == "growing":
        cache = KVCache(Arena("1MiB", backend="virtual:torch"), SPEC, batch=1, max_tokens=12)
    else:
        cache = linear()
    return cache.arena, cache.append, cache.read, cache.truncate


# huggingface/transformers#39593, #30351, kvcache-ai/ktransformers#777: overflow is found on the device, whose context
# is lost with it
@pytest.mark.parametrize(
    "kind", ["full", pytest.param("growing", marks=linux), "int8", "lanes", "paged", "contiguous"]
)
def test_huggingface_transformers_39593_overflow_is_found_before_anything_is_written(kind):
    arena, append, read, truncate = one_row(kind)
    for layer in range(2):
        append(layer, tokens(0, 10, layer), -tokens(0, 10, layer))
    whole = [[array.clone() for array in read(layer)] for layer in range(2)]
    before, memory = arena.stats, arena.capacity
    for n_new in (3, 4, 1000):
        with pytest.raises(CapacityError) as caught:
            append(0, tokens(10, 10 + n_new), tokens(10, 10 + n_new))
        error = caught.value
        if kind == "paged":  # figures in pages of four tokens, of which the last has room for two
            needed = -(-(n_new - 2) // 4)
            assert (error.requested, error.available, error.missing) == (needed, 0, needed)
        else:
            assert (error.used, error.requested, error.missing) == (10, n_new, n_new - 2)
            assert (error.capacity, error.available) == (12, 2)
            assert "10" in str(error)
        assert (arena.stats, arena.capacity) == (before, memory)
        for layer in range(2):
            assert all(torch.equal(*pair) for pair in zip(read(layer), whole[layer], strict=True))
    for layer in range(2):  # and what does fit goes in: the last slot is one
        append(layer, tokens(10, 12, layer), -tokens(10, 12, layer))
    for layer in range(2):
        keys, values = read(layer)
        assert keys.shape[2] == 12
        torch.testing.assert_close(keys, tokens(0, 12, layer), atol=0.06 if kind == "int8" else 0, rtol=0)
        torch.testing.assert_close(values, -keys, atol=0, rtol=0)
    truncate(11)
    with pytest.raises(CapacityError):
        append(0, tokens(11, 13), tokens(11, 13))


# Dao-AILab/flash-attention#2711, #2709: a length beyond the block table reads out of bounds
@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, 3 * SIZE + 1])
def test_dao_ailab_flash_attention_2711_no_length_reaches_beyond_its_table(length):
    cache = pages()
    rows = [cache.sequence(), cache.sequence()]
    rows[0].append(0, tokens(0, length), tokens(0, length))
    rows[1].append(0, tokens(0, SIZE), tokens(0, SIZE))
    table, lengths = cache.block_table(rows)
    assert (table.dtype, lengths.dtype) == (torch.int32, torch.int32)
    assert lengths.tolist() == [length, SIZE]
    assert all(n <= table.shape[1] * SIZE for n in lengths.tolist())
    n_pages = -(-length // SIZE)
    assert table[0, :n_pages].tolist() == list(rows[0].pages)
    if n_pages > 1:
        with pytest.raises(ShapeError):
            cache.block_table(rows, width=n_pages - 1)
        small = BlockTable(torch.zeros(2, n_pages - 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
        with pytest.raises(ShapeError):
            cache.block_table(rows, out=small)
        assert not small.block_table.any()
        assert not small.cache_seqlens.any()
    assert cache.block_table(rows, width=7).block_table.shape == (2, 7)


# microsoft/onnxruntime#32391: a block number that is no block's is read
def test_microsoft_onnxruntime_32391_every_number_in_a_table_is_a_page_of_the_cache():
    cache = pages()
    rows = [cache.sequence() for _ in range(3)]
    for row, n in zip(rows, (5, 9, 10), strict=True):
        row.append(0, tokens(0, n), tokens(0, n))
    rows[1].truncate(1)
    empty = cache.sequence()
    table = cache.block_table([*rows, empty], width=6).block_table
    assert ((table >= 0) & (table < PAGES)).all(), "also in what is padding"
    for row, numbers in zip(rows, table.tolist(), strict=False):
        assert tuple(numbers[: len(row.pages)]) == row.pages
    csr = cache.flashinfer_tables(rows)
    assert ((csr.kv_indices >= 0) & (csr.kv_indices < PAGES)).all()
    with pytest.raises(SequenceError, match="of another cache"):  # whose numbers would mean other pages
        pages().block_table(rows)
    rows[0].free()
    with pytest.raises(SequenceError, match="was freed"):
        cache.block_table(rows)
    fixed = linear(ONE)  # and where positions are given, they are checked as well
    fixed.buffers(0)
    fixed.advance(3)
    fixed.buffers(0)
    for wrong in (-1, 12, 2**31):
        with pytest.raises(ArgumentError):
            fixed.write_at(0, torch.tensor([wrong]), tokens(0, 1), tokens(0, 1))


# flashinfer-ai/flashinfer#320: the length of the last page is 0 or more than a page, and nobody looks
def test_flashinfer_ai_flashinfer_320_the_last_page_has_one_token_to_all_of_them():
    cache = pages()
    row, other = cache.sequence(), cache.sequence()
    other.append(0, tokens(0, 3), tokens(0, 3))
    with pytest.raises(SequenceError, match="row 1 is an empty sequence"):
        cache.flashinfer_tables([other, row])
    for length in range(1, 6 * SIZE + 1):
        row.append(0, tokens(length, length + 1), tokens(length, length + 1))
        indptr, indices, last = (array.tolist() for array in cache.flashinfer_tables([row, other]))
        assert 1 <= last[0] <= SIZE
        assert (indptr[1] - indptr[0] - 1) * SIZE + last[0] == length
        assert indices[: indptr[1]] == list(row.pages)
        assert last[1] == 3
    for length in range(6 * SIZE - 1, 0, -1):
        row.truncate(length)
        indptr, _, last = (array.tolist() for array in cache.flashinfer_tables([row, other]))
        assert (indptr[1] - 1) * SIZE + last[0] == length
        assert 1 <= last[0] <= SIZE


# ------------------------------------------------------------------------------------------------------- 32 bits


# vllm-project/vllm#50427, #50483, pytorch/pytorch#190857, #186749, Dao-AILab/flash-attention#772, pytorch/FBGEMM#5095:
# slots or strides overflow 32 bits, and tokens go to the wrong place
def test_vllm_project_vllm_50427_slots_beyond_32_bits_are_right():
    size = 1 << 20
    pool = PagePool(n_pages=5000, page_size=size)  # 5.2e9 slots; it touches no memory
    first, second = pool.sequence(), pool.sequence()
    first.append(4200 * size - 1)
    second.append(700 * size + 3)
    first.append(2)
    wanted = []
    for sequence, start, stop in ((first, 4200 * size - 2, 4200 * size + 1), (second, 0, 2)):
        for place in range(start, stop):
            wanted.append(sequence.pages[place // size] * size + place % size)
    found = slot_mapping([(first, 4200 * size - 2, 4200 * size + 1), (second, 0, 2)])
    assert found == wanted
    assert max(found) > 2**32
    assert max(first.pages) < 2**31
    cache = pages()
    row = cache.sequence()
    row.append(0, tokens(0, 3), tokens(0, 3))
    assert cache.slot_mapping([(row, 0, 3)]).dtype == torch.int64


# the same in memory: 5.2e9 elements of addresses, of which a few pages are ever touched
@linux
def test_vllm_project_vllm_50427_elements_beyond_32_bits_are_reached():
    n_tokens, dim = 40_000, 16_384
    spec = KVSpec([LayerSpec(4, dim, dim, "float16")])
    arena = Arena(1 << 36, backend="virtual:torch")
    cache = KVCache(arena, spec, batch=2, max_tokens=n_tokens, layout="head-major")
    cache.layers[0]._cut(n_tokens - 2)  # tokens that nobody wrote, which would take memory
    token = torch.arange(dim).remainder(1000).to(torch.float16)
    new = torch.stack([token + row * 8 + head for row in range(2) for head in range(4)]).view(2, 4, 1, dim)
    keys, values = cache.append(0, new, -new)
    assert keys.shape == (2, 4, n_tokens - 1, dim)
    region = cache.layers[0].regions[0].reshape((-1,))
    for plane, sign in ((0, 1), (1, -1)):
        for row, head in ((0, 0), (1, 3)):
            offset = (((plane * 2 + row) * 4 + head) * n_tokens + n_tokens - 2) * dim
            assert torch.equal(region[offset : offset + dim].array, sign * new[row, head, 0])
    assert offset > 2**32
    assert torch.equal(keys[1, 3, -1], new[1, 3, 0])
    assert torch.equal(values[0, 2, -1], -new[0, 2, 0])


# --------------------------------------------------------------------------------------------------- zero lengths


# Dao-AILab/flash-attention#2470, flashinfer-ai/flashinfer#868 (and 353, 440): a sequence of no tokens gives NaN or crashes
def test_dao_ailab_flash_attention_2470_no_tokens_are_a_length_too():
    none = tokens(0, 0)
    for cache in (
        linear(),
        linear(KVSpec.uniform(layers=2, kv_heads=HEADS, head_dim=DIM, dtype="float32", window=3, slack=2)),
    ):
        for start in (0, 5):
            for layer in range(2):
                new = tokens(cache.layers[layer].length, start, layer)
                cache.append(layer, new, -new)
                keys, values = cache.append(layer, none, none)
                assert keys.shape == values.shape
                assert keys.shape[2] <= start
            assert cache.length == start
        assert torch.equal(cache.layers[1].keys[:, :, -1], tokens(4, 5, 1)[:, :, 0])
    lanes = LaneCache(dirty(1 << 14), SPEC, lanes=3, max_tokens=12)
    for layer in range(2):
        new = tokens(0, 4, layer).expand(3, -1, -1, -1)
        lanes.append(layer, new, -new, n_tokens=[4, 0, 2])
    q = torch.ones(3, HEADS, 1, DIM)
    out = lanes.attend(0, q)
    assert not out[1].any(), "of nothing comes nothing"
    assert not out.isnan().any()
    for row, n in ((0, 4), (2, 2)):
        keys = tokens(0, n)[0]
        alone = torch.softmax((keys * q[row]).sum(-1) * DIM**-0.5, -1)[..., None].mul(-keys).sum(1)
        torch.testing.assert_close(out[row, :, 0], alone)
    assert lanes.cu_seqlens().tolist() == [0, 4, 4, 6]
    assert lanes.packed(0)[0].shape == (6, HEADS, DIM)
    cache = pages()
    row, empty = cache.sequence(), cache.sequence()
    row.append(0, tokens(0, 3), tokens(0, 3))
    table, lengths = cache.block_table([empty, row])
    assert lengths.tolist() == [0, 3]
    assert table[1].tolist() == list(row.pages)
    assert empty.read(0)[0].shape == (HEADS, 0, DIM)
    with pytest.raises(ArgumentError):
        empty.append(0, none, none)
    assert (empty.length, empty.pages) == (0, ())
    with pytest.raises(ShapeError, match="a sequence of 0 tokens"):
        cache.attend(0, torch.ones(1, HEADS, 1, DIM), [empty])


# ------------------------------------------------------------------------------------------------------ addresses


# infinigence/ApxInf#89, kekzl/imp#1648 (and 1709, 1726), pytorch/pytorch#191611: a graph that is replayed reads the
# address or the length of another step
def test_infinigence_apxinf_89_addresses_stay_and_lengths_are_on_the_device():
    cache = linear(ONE, 64)
    first = [array.data_ptr() for array in cache.buffers(0)]
    kept_keys, kept_values = cache.buffers(0)
    for length in range(40):
        start = cache.advance(1)
        assert start == length
        cache.write_at(0, torch.tensor([start]), tokens(start, start + 1), -tokens(start, start + 1))
        assert [array.data_ptr() for array in cache.buffers(0)] == first
        if length % 10 == 9:
            cache.truncate(length - 1)
            cache.advance(2)
            new = tokens(length - 1, length + 1)
            cache.write_at(0, torch.arange(length - 1, length + 1), new, -new)
    assert torch.equal(kept_keys[:, :, :40], tokens(0, 40)), "what a graph has seen once shows all steps"
    assert torch.equal(kept_values[:, :, :40], -tokens(0, 40))
    assert not kept_keys[:, :, 40:].any()

    lanes = LaneCache(dirty(1 << 14), ONE, lanes=2, max_tokens=12)
    vector = lanes.length_vector
    seen = [vector.data_ptr(), lanes.cu_seqlens().data_ptr()]
    for n in range(1, 6):
        new = tokens(0, 2).expand(2, -1, -1, -1)
        lanes.append(0, new, new, n_tokens=[2, 1])
        assert vector.tolist() == list(lanes.lengths) == [2 * n, n]
        assert lanes.cu_seqlens().tolist() == [0, 2 * n, 3 * n]
        assert [lanes.length_vector.data_ptr(), lanes.cu_seqlens().data_ptr()] == seen

    paged = pages()
    rows = [paged.sequence(), paged.sequence()]
    csr = FlashInferTables(*(torch.full((n,), 99, dtype=torch.int32) for n in (3, PAGES, 2)))
    table = BlockTable(torch.full((2, 4), 99, dtype=torch.int32), torch.full((2,), 99, dtype=torch.int32))
    addresses = [array.data_ptr() for array in (*csr, *table)]
    for n in range(1, 14):
        with paged.step(rows, 1) as step:
            step.write(0, tokens(n, n + 1).expand(2, -1, -1, -1), tokens(n, n + 1).expand(2, -1, -1, -1))
            assert paged.flashinfer_tables(rows, out=csr) is not None
            paged.block_table(rows, out=table)
        fresh = paged.flashinfer_tables(rows)
        used = 2 * -(-n // SIZE)
        assert csr.kv_indptr.tolist() == fresh.kv_indptr.tolist() == [0, used // 2, used]
        assert csr.kv_indices.tolist() == [*rows[0].pages, *rows[1].pages, *[0] * (PAGES - used)]
        assert table.cache_seqlens.tolist() == [n, n]
        assert table.block_table[0].tolist() == [*rows[0].pages, *[0] * (4 - used // 2)]
        assert [array.data_ptr() for array in (*csr, *table)] == addresses


# huggingface/transformers#37908 (and 29151, 46424, 47731): each length is compiled anew, the size that was asked for is
# ignored, and a cache that nobody uses stays in memory
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_huggingface_transformers_37908_one_graph_and_the_size_that_was_asked_for():
    import torch._dynamo

    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    memory = torch.full((ONE.arena_nbytes(1, 20) + 512,), 0xFF, dtype=torch.uint8)
    cache = KVCache(Arena.from_buffer(memory), ONE, batch=1, max_tokens=20)
    assert cache.buffers(0)[0].shape == (1, HEADS, 20, DIM)

    @torch.compile(backend=backend, fullgraph=True)
    def step(cache, q, k, v, positions):
        keys, values = cache.write_at(0, positions, k, v)
        mask = cache.mask_at(0, positions, 20)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    q = torch.ones(1, HEADS, 1, DIM)
    with torch.no_grad():
        for number in range(20):
            start = cache.advance(1)
            out = step(
                cache, q, tokens(number, number + 1), -tokens(number, number + 1), torch.tensor([start])
            )
            keys = tokens(0, number + 1)[0]
            alone = torch.softmax((keys * q[0]).sum(-1) * DIM**-0.5, -1)[..., None].mul(-keys).sum(1)
            torch.testing.assert_close(out[0, :, 0], alone)
        with pytest.raises(CapacityError):
            cache.advance(1)
    assert len(graphs) == 1
    gone = weakref.ref(memory)
    graphs.clear()
    del cache, memory, step
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


# huggingface/transformers#37078, MemTensor/MemOS#2301: what a cache gives out is its own memory, and one changes the other
def test_huggingface_transformers_37078_views_are_live_and_clones_are_not():
    cache = linear(ONE)
    keys, _ = cache.append(0, tokens(0, 3), -tokens(0, 3))
    assert keys.untyped_storage().data_ptr() == cache.layers[0].keys.untyped_storage().data_ptr()
    mine = keys.clone()
    cache.truncate(0)
    cache.append(0, tokens(50, 53), -tokens(50, 53))
    assert torch.equal(keys, tokens(50, 53)), "a view, as documented"
    assert torch.equal(mine, tokens(0, 3))
    new = tokens(53, 54)
    cache.append(0, new, new)
    new.zero_()  # what was appended was copied in
    assert torch.equal(cache.layers[0].keys, tokens(50, 54))
    other = cache.copy_to(Arena("64KiB", backend="torch"))
    other.layers[0].keys.zero_()
    other.append(0, tokens(0, 5), tokens(0, 5))
    assert (cache.length, other.length) == (4, 9)
    assert torch.equal(cache.layers[0].keys, tokens(50, 54))
    paged = pages()
    row = paged.sequence()
    row.append(0, tokens(0, 3), -tokens(0, 3))
    for array in row.read(0):  # gathered, so it is the reader's own
        array.zero_()
    assert torch.equal(row.read(0)[0], tokens(0, 3)[0])


# meta-pytorch/attention-gym#189, pytorch/pytorch#182593, vllm-project/vllm#30915: paged FlexAttention mixes rows up that
# come in another order, or sees what a page held before
def test_meta_pytorch_attention_gym_189_rows_in_any_order_and_pages_used_before():
    from torch.nn.attention.flex_attention import flex_attention

    def kernel(*args, **options):
        with warnings.catch_warnings():  # it warns that it was not compiled
            warnings.simplefilter("ignore")
            return flex_attention(*args, **options)

    torch.manual_seed(189)
    cache = pages()
    for pool in (cache.keys(0), cache.values(0)):
        pool.zero_()  # uncompiled it multiplies what is hidden by 0, and 0 times NaN is NaN
    gone = [cache.sequence() for _ in range(2)]
    for row in gone:
        row.append(0, torch.full((1, HEADS, 13, DIM), 1e4), torch.full((1, HEADS, 13, DIM), 1e4))
    q = torch.randn(3, HEADS, 1, DIM)
    cache.attend(0, q[:2], gone)  # masks of these rows may be remembered
    cache.flex_attend(0, q[:2], gone, kernel=kernel)
    for row in gone:
        row.free()
    contents = [torch.randn(2, HEADS, n, DIM) for n in (5, 1, 9)]
    rows = []
    for keys, values in contents:
        rows.append(cache.sequence())
        rows[-1].append(0, keys[None], values[None])
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0], [2, 1, 0]):
        wanted = []
        for place, number in enumerate(order):
            keys, values = contents[number]
            scores = torch.softmax((keys * q[place]).sum(-1) * DIM**-0.5, -1)
            wanted.append((scores[..., None] * values).sum(1, keepdim=True))
        some = [rows[number] for number in order]
        torch.testing.assert_close(cache.attend(0, q, some), torch.stack(wanted))
        torch.testing.assert_close(cache.flex_attend(0, q, some, kernel=kernel), torch.stack(wanted))


class Written(TorchDispatchMode):
    """Counts the elements that operations write. Views write none, nor does `set_`, which places a tensor on memory."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_view = (func.is_view and not func._schema.is_mutable) or "aten.set_." in str(func)
        if isinstance(out, torch.Tensor) and not is_view:
            self.n += out.numel()
        return out


# openvinotoolkit/openvino.genai#4051: whenever the cache grows all of it is copied, so that a long prompt costs O(n^2)
@linux
def test_openvinotoolkit_openvino_genai_4051_growing_writes_each_token_once():
    spec = KVSpec.uniform(layers=2, kv_heads=HEADS, head_dim=64, dtype="float32")
    arena = Arena("64MiB", backend="virtual:torch")
    cache = KVCache(arena, spec, batch=1, max_tokens=8192)
    new = torch.ones(1, HEADS, 256, 64)
    addresses, committed = set(), []
    with Written() as written:
        for _ in range(32):
            for layer in range(2):
                keys, _ = cache.append(layer, new, new)
                if layer == 0:
                    addresses.add(keys.data_ptr())
            committed.append(arena.stats.committed)
    assert written.n == 2 * 2 * 8192 * HEADS * 64, "keys and values of each layer, once"
    assert len(addresses) == 1
    assert committed[0] < committed[-1] / 8
    assert np.all(np.diff(committed) >= 0)
