import subprocess
import sys

import pytest
import torch
import torch._dynamo

from gpuarena import Arena

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting_backend(counter):
    def compile_graph(graph, _inputs):
        counter.append(graph)
        return graph.forward

    return compile_graph


def test_regions_of_changing_offsets_compile_once_and_in_one_graph():
    arena = Arena("1MiB", backend="torch")
    graphs = []

    @torch.compile(backend=counting_backend(graphs), fullgraph=True)
    def step(x, out):
        torch.mul(x, 2, out=out)
        return out.sum()

    for number in range(6):
        with arena.scope():
            arena.empty(number + 1, "uint8")  # moves what follows
            x = arena.full((4, 8), number, "float32")
            out = arena.empty((4, 8), "float32")
            assert step(x, out).item() == 64 * number
            assert torch.equal(out, x * 2)
    assert len(graphs) == 1


def test_slices_of_a_region_compile_in_one_graph():
    arena = Arena("1MiB", backend="torch")
    graphs = []

    @torch.compile(backend=counting_backend(graphs), fullgraph=True)
    def total(x):
        return (x + 1).sum()

    region = arena.alloc((8, 16), "float32", fill=1)
    for row in range(4):
        assert total(region[row : row + 2].array).item() == 64
    assert len(graphs) == 1


def test_an_in_place_write_of_a_compiled_function_lands_in_the_arena():
    arena = Arena("1MiB", backend="torch")
    region = arena.alloc((3, 4), "float32", fill=1)
    neighbour = arena.alloc((3, 4), "float32", fill=5)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def grow(x):
        x.add_(1)

    grow(region.array)
    assert region.array.tolist() == [[2.0] * 4] * 3
    assert neighbour.array.tolist() == [[5.0] * 4] * 3


def test_a_compiled_backward_through_regions_is_the_eager_one():
    arena = Arena("1MiB", backend="torch")
    x = arena.from_array(torch.arange(12.0).reshape(3, 4)).array
    weight = torch.full((4,), 2.0, requires_grad=True)

    def loss(x, weight):
        return ((x * weight) ** 2).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(loss(x, weight), weight)[0]
    assert torch.equal(torch.autograd.grad(compiled(x, weight), weight)[0], expected)


INDUCTOR = """
import torch
from gpuarena import Arena

arena = Arena("1MiB", backend="torch")

@torch.compile(fullgraph=True)
def step(x, out):
    out.copy_(torch.relu(x) * 3)

for number in (1, -1, 2):
    with arena.scope():
        arena.empty(100 + number, "uint8")
        x = arena.full((8, 32), number, "float32")
        out = arena.empty((8, 32), "float32")
        step(x, out)
        assert torch.equal(out, torch.full((8, 32), 3.0 * max(number, 0))), number
print("well")
"""


@pytest.mark.slow
def test_inductor_reads_and_writes_regions():
    # In a process of its own: setuptools, which inductor needs, cannot be imported after distutils.
    done = subprocess.run([sys.executable, "-c", INDUCTOR], capture_output=True, text=True, timeout=300)
    assert done.stdout == "well\n", done.stderr[-2000:]


def test_buffers_made_inside_inference_mode_work_outside_and_the_other_way_round():
    arena = Arena("1MiB", backend="torch")
    with torch.inference_mode():
        inside = arena.full(4, 1, "float32")
        repeated = []
        for _ in range(3):
            with arena.scope():
                repeated.append(arena.empty(4, "float32"))
    outside = arena.full(4, 2, "float32")
    with torch.inference_mode():
        outside.add_(1)
    inside.add_(1)
    assert not any(x.is_inference() for x in (inside, outside, *repeated))
    weight = torch.ones(4, requires_grad=True)
    (inside * weight).sum().backward()
    assert weight.grad.tolist() == [2.0] * 4


def test_arrays_of_a_repeated_scope_have_version_counters_of_their_own():
    arena = Arena("1MiB", backend="torch")
    weight = torch.ones(4, requires_grad=True)
    kept = []
    for _ in range(4):
        with arena.scope():
            x = arena.empty(4, "float32")
            x.fill_(3)
            kept.append((x * weight).sum())
    with arena.scope():
        arena.empty(4, "float32").fill_(7)
    for loss in kept:  # every one saved memory that was given back since
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_write_to_one_array_of_a_repeated_scope_leaves_the_others_backward_alone():
    arena = Arena("1MiB", backend="torch")
    weight = torch.ones(4, requires_grad=True)
    for _ in range(4):
        weight.grad = None
        with arena.scope():
            x, y = arena.empty(4, "float32"), arena.empty(4, "float32")
            x.fill_(3)
            loss = (x * weight).sum()
            y.fill_(5)
            y.mul_(2)
            loss.backward()
        assert weight.grad.tolist() == [3.0] * 4


def test_arrays_of_a_repeated_scope_are_new_objects():
    arena = Arena("1MiB", backend="torch")
    seen = []
    for _ in range(5):
        with arena.scope():
            x = arena.empty(4, "float32")
            assert not x.requires_grad
            assert x.grad is None
            assert not x.__dict__
            x.requires_grad_()
            x.note = "mine"
            seen.append(x)
    assert len({id(x) for x in seen}) == 5
    assert len({x.data_ptr() for x in seen}) == 1
