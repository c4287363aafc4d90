from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref

import numpy as np
import pytest

from gpuarena import Arena, Debug, FrameArenas, Region
from gpuarena.backends.host import HostBackend
from gpuarena.errors import (
    ArenaClosedError,
    ArgumentError,
    ArgumentTypeError,
    DTypeError,
    NotCopyableError,
    OutOfMemoryError,
    ShapeError,
    StaleRegionError,
)
from gpuarena.testing import FakeDevice


@pytest.fixture(params=["host", "torch"])
def arena(request):
    if request.param == "torch":
        pytest.importorskip("torch")
    return Arena(4096, backend=request.param, alignment=64)


# -- frames -----------------------------------------------------------------------------------------------------


def test_buffers_are_placed_in_the_order_given_and_are_attributes(arena):
    frame = arena.frame({"q": ((2, 3), "float32"), "k": (5, "uint8")}, mask=((), "bool"))
    assert [region.offset for region in (frame["q"], frame["k"], frame["mask"])] == [0, 64, 128]
    assert (tuple(frame.q.shape), tuple(frame.mask.shape)) == ((2, 3), ())
    assert frame.q is frame.q
    assert list(frame) == ["q", "k", "mask"]
    assert len(frame) == 3
    assert arena.by_label() == {"q": 24, "k": 5, "mask": 1}
    frame.q[...] = 2
    assert frame["q"].as_numpy().tolist() == [[2] * 3] * 2
    assert isinstance(frame["q"][1], Region)
    assert repr(frame) == "<frame of q, k, mask, live>"


def test_a_frame_and_its_region_are_the_same_memory_and_the_same_array(arena):
    frame = arena.frame(x=(4, "float32"))
    assert frame["x"].array is frame.x


def test_a_stale_frame_raises_at_every_access_and_says_why(arena):
    with arena.scope("step"):
        frame = arena.frame(x=(4, "float32"), y=(4, "float32"))
        frame.x
        taken = frame.y
    assert not frame.is_live
    for touch in (lambda: frame.x, lambda: frame.y, lambda: frame["x"].array):
        with pytest.raises(StaleRegionError, match="the end of scope 'step'"):
            touch()
    assert tuple(taken.shape) == (4,)  # unchecked, as all native arrays
    assert repr(frame) == "<frame of x, y, stale>"
    assert list(frame) == ["x", "y"]


def test_a_frame_is_live_or_stale_at_every_moment_of_a_rollback(arena):
    checkpoint = arena.checkpoint()
    frame = arena.frame(x=(4, "float32"), y=(4, "float32"))
    others = []

    def look(*args):  # where another thread might
        try:
            frame.x
            frame.y
        except StaleRegionError:
            pass
        except Exception as error:
            others.append(error)
        return look

    tracing = sys.gettrace()
    sys.settrace(look)
    try:
        arena.rollback(checkpoint)
    finally:
        sys.settrace(tracing)
    assert others == []
    for touch in (lambda: frame.x, lambda: frame.y):
        with pytest.raises(StaleRegionError):
            touch()


def test_a_frame_survives_rollbacks_above_it(arena):
    frame = arena.frame(x=(4, "float32"))
    frame.x[...] = 3
    address = frame["x"].address
    for _ in range(3):
        with arena.scope():
            arena.alloc(100, "uint8", fill=9)
    assert frame.x.tolist() == [3] * 4
    assert frame["x"].address == address


def test_an_old_frame_shows_nothing_of_a_new_one_at_its_place(arena):
    checkpoint = arena.checkpoint()
    old = arena.frame(x=(4, "float32"))
    arena.rollback(checkpoint)
    new = arena.frame(x=(4, "float32"))
    new.x[...] = 1
    with pytest.raises(StaleRegionError):
        old.x
    assert new.x.tolist() == [1] * 4


@pytest.mark.parametrize(
    "end", [lambda arena: arena.reset(), lambda arena: arena.close()], ids=["reset", "close"]
)
def test_a_frame_goes_with_reset_and_close(arena, end):
    frames = [arena.frame(x=(4, "float32")), arena.child(1024).frame(x=(4, "float32"))]
    high = arena.frame({"x": (4, "float32")}, side="high")
    end(arena)
    for frame in (*frames, high):
        with pytest.raises(StaleRegionError):
            frame.x


def test_a_frame_of_the_high_end_outlives_the_low_one(arena):
    with arena.scope():
        frame = arena.frame({"x": (4, "float32")}, side="high")
    frame.x[...] = 1
    with arena.scope(side="high"):
        inner = arena.frame({"x": (4, "float32")}, side="high")
    assert (frame.is_live, inner.is_live) == (True, False)


def test_a_frame_of_empty_buffers_goes_too(arena):
    with arena.scope():
        frame = arena.frame(x=((0, 3), "float32"))
        assert tuple(frame.x.shape) == (0, 3)
    with pytest.raises(StaleRegionError):
        frame.x


def test_assigning_to_an_attribute_is_refused_and_writing_into_it_is_not(arena):
    frame = arena.frame(x=(4, "float32"))
    for name in ("x", "y", "_regions"):
        with pytest.raises(AttributeError, match="write into"):
            setattr(frame, name, 5)
    frame.x[1:] = 5
    frame.x[0] = 4
    assert frame.x.tolist() == [4, 5, 5, 5]
    with pytest.raises(AttributeError, match="no attribute 'z'"):
        frame.z
    with pytest.raises(KeyError):
        frame["z"]
    assert not hasattr(frame, "__cuda_array_interface__")


@pytest.mark.parametrize(
    ("buffers", "more", "error"),
    [
        ({}, {}, ArgumentError),
        (None, {}, ArgumentError),
        ({"x": (1, "uint8")}, {"x": (1, "uint8")}, ArgumentError),
        ({"a b": (1, "uint8")}, {}, ArgumentError),
        ({"": (1, "uint8")}, {}, ArgumentError),
        ({"_x": (1, "uint8")}, {}, ArgumentError),
        ({"__class__": (1, "uint8")}, {}, ArgumentError),
        ({"is_live": (1, "uint8")}, {}, ArgumentError),
        ({5: (1, "uint8")}, {}, ArgumentTypeError),
        ({"x": 5}, {}, ArgumentTypeError),
        ({"x": (1,)}, {}, ArgumentTypeError),
        ({"x": [1, "uint8"]}, {}, ArgumentTypeError),
        ({"x": (1, "uint8")}, {"y": (-1, "uint8")}, ShapeError),
        ({"x": (1, "uint8")}, {"y": (1, "float31")}, DTypeError),
        ({"x": (1, "uint8")}, {"y": (4096, "uint8")}, OutOfMemoryError),
    ],
)
def test_a_frame_is_placed_whole_or_not_at_all(arena, buffers, more, error):
    arena.alloc(1, "uint8")
    checkpoint = arena.checkpoint()
    region = arena.alloc(3, "uint8")
    before = arena.stats
    with pytest.raises(error):
        arena.frame(buffers, **more)
    after = arena.stats
    if error is OutOfMemoryError:
        assert after.n_failed == 1
    assert {name: getattr(after, name) for name in after.__slots__ if name != "n_failed"} == {
        name: getattr(before, name) for name in before.__slots__ if name != "n_failed"
    }
    arena.rollback(checkpoint)
    with pytest.raises(StaleRegionError, match=r"given back by rollback\(\)"):
        region.array


def test_a_region_can_still_grow_after_a_frame_was_refused(arena):
    region = arena.alloc(3, "uint8", fill=1)
    with pytest.raises(OutOfMemoryError):
        arena.frame(x=(1, "uint8"), y=(4096, "uint8"))
    assert region.extend(5)[:3].array.tolist() == [1] * 3


@pytest.mark.parametrize("debug", [False, True])
def test_a_frame_whose_array_cannot_be_made_takes_nothing(debug):
    class Failing(HostBackend):
        def root(self, offset, shape, dtype):
            if shape == (3,):
                raise ZeroDivisionError
            return super().root(offset, shape, dtype)

        def tracked_root(self, offset, shape, dtype):
            array = self.root(offset, shape, dtype)
            return array, array

    arena = Arena(4096, backend=Failing.allocate, debug=debug)
    before = arena.stats
    with pytest.raises(ZeroDivisionError):
        arena.frame(x=(1, "uint8"), y=(3, "uint8"))
    assert arena.stats == before


def test_a_refused_frame_does_not_show_in_a_profile(arena):
    with arena.profile() as profile, pytest.raises(OutOfMemoryError):
        arena.frame(x=(1, "uint8"), y=(5000, "uint8"))
    assert (profile.regions.allocated, profile.nbytes.peak, profile.n_failed) == (0, 0, 1)


def test_frames_keep_the_arena_and_go_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        device = FakeDevice()
        arena = Arena(4096, backend=device)
        frame = arena.frame(x=(4, "uint8"))
        refs = [weakref.ref(arena), weakref.ref(frame)]
        frame.x[...] = 3
        del arena
        assert frame.x.tolist() == [3] * 4
        assert frame.is_live
        del frame
        assert [ref() for ref in refs] == [None, None]
        assert device.n_freed == 1
    finally:
        gc.enable()


def test_a_frame_is_not_copied(arena):
    frame = arena.frame(x=(4, "uint8"))
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotCopyableError):
            call(frame)


# -- arenas in turn ---------------------------------------------------------------------------------------------


def test_data_stay_valid_for_as_many_steps_as_there_are_arenas():
    steps = FrameArenas(3, 1024)
    regions = []
    for number in range(7):
        arena = steps.advance()
        assert steps.current is arena
        regions.append(arena.alloc(4, "uint8", fill=number))
        assert [region.is_live for region in regions] == [False] * (number - 2) + [True] * min(number + 1, 3)
        for back in range(min(number + 1, 3)):
            assert regions[-1 - back].arena is steps.previous(back)
            assert regions[-1 - back].array.tolist() == [number - back] * 4
    with pytest.raises(StaleRegionError, match=r"advance\(\)") as caught:
        regions[0].array
    assert __file__ in str(caught.value)
    assert len(steps) == 3


def test_before_the_first_step_there_is_no_arena():
    steps = FrameArenas(2, 64)
    for call in (lambda: steps.current, steps.previous, lambda: steps.previous(0)):
        with pytest.raises(ArgumentError, match="advance"):
            call()
    steps.advance()
    for n_steps in (2, -1, 100):
        with pytest.raises(ArgumentError, match="2 are kept"):
            steps.previous(n_steps)


def test_the_arenas_can_lie_in_a_given_one_and_leave_it_open():
    arena = Arena(4096)
    first = arena.alloc(4, "uint8")
    with FrameArenas(2, "1KiB", arena=arena) as steps:
        assert steps.arena is arena
        assert steps.advance().address == arena.address + 256
    assert not arena.closed
    assert first.is_live
    with pytest.raises(ArenaClosedError):
        steps.advance()
    with arena.scope():
        steps = FrameArenas(2, 100, arena=arena)
    with pytest.raises(ArenaClosedError, match="the end of an unnamed scope"):
        steps.advance()


def test_an_arena_of_its_own_is_closed_with_it():
    device = FakeDevice()
    with FrameArenas(2, 1000, backend=device, name="steps") as steps:
        steps.advance().alloc(1000, "uint8")
        steps.advance().alloc(1000, "uint8")
        assert device.n_allocated == 1
        assert "'steps'" in repr(steps)
    assert steps.arena.closed
    steps.close()
    assert device.n_released == 1


@pytest.mark.parametrize("n", [True, 2.0, "2", None])
def test_the_number_of_arenas_is_an_integer(n):
    with pytest.raises(ArgumentTypeError, match="FrameArenas"):
        FrameArenas(n, 64)


@pytest.mark.parametrize("n", [1, 0, -3])
def test_fewer_than_two_arenas_make_no_sense(n):
    with pytest.raises(ArgumentError, match="less than 2"):
        FrameArenas(n, 64)


def test_arenas_that_do_not_fit_change_nothing():
    arena = Arena(1024)
    checkpoint = arena.checkpoint()
    region = arena.alloc(4, "uint8")
    before = arena.stats
    with pytest.raises(OutOfMemoryError):
        FrameArenas(3, 300, arena=arena)
    assert (arena.stats.top, arena.stats.n_regions, arena.stats.peak) == (before.top, 1, before.peak)
    assert region.is_live
    arena.rollback(checkpoint)
    with pytest.raises(ArgumentError, match="name"):
        FrameArenas(2, 64, arena=arena, name="x")


@pytest.mark.parametrize(
    ("n", "nbytes", "options"),
    [
        (2, 1, {}),
        (5, 1000, {}),
        (7, 1000, {"debug": True}),
        (3, 100, {"alignment": 1}),
        (3, 100, {"alignment": 8192}),
        (3, 100, {"alignment": 1, "debug": True}),
        (3, 1000, {"backend": "torch", "debug": True}),
        (3, 1000, {"backend": "virtual"}),
        (3, 1000, {"debug": Debug(separate=True)}),
        (6, 256, {"debug": Debug(guard=5000)}),
        (4, 8192, {"alignment": 8192, "debug": True}),
    ],
)  # fmt: skip
def test_an_arena_of_its_own_is_large_enough_for_every_setting(n, nbytes, options):
    if options.get("backend") == "torch":
        pytest.importorskip("torch")
    steps = FrameArenas(n, nbytes, **options)
    for number in range(2 * n):
        region = steps.advance().alloc(nbytes, "uint8", fill=number)
        assert (np.asarray(region.as_numpy()) == number).all()
        assert steps.current.capacity == nbytes
