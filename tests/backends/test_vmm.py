from __future__ import annotations

import random
import sys

import pytest
from vmm_doubles import CheckedVmm, peek, poke

from gpuarena import errors
from gpuarena.backends import _vmm
from gpuarena.backends._vmm import LARGEST_CHUNK, Reservation, settle_postponed
from gpuarena.backends._vmm_host import HostVmm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

G = 64 << 10  # the granule of the host driver


@pytest.fixture
def driver():
    return CheckedVmm(G)


@pytest.fixture(autouse=True)
def _nothing_is_left_over():
    yield
    assert settle_postponed() == 0


def sizes(reservation):
    return [nbytes for _, nbytes in reservation._holdings.chunks]


def test_chunks_double_up_to_the_largest(driver):
    r = Reservation(driver, 1 << 30)
    for _ in range(13):
        r.commit(r.committed + 1)
    assert sizes(r) == [G << i for i in range(11)] + [LARGEST_CHUNK] * 2
    r.close()


def test_a_large_request_is_made_of_several_chunks(driver):
    r = Reservation(driver, 1 << 30)
    r.commit(10 * G)
    assert sizes(r) == [G, 2 * G, 4 * G, 8 * G]
    r.close()


def test_the_calls_come_in_the_order_that_gives_memory_back(driver):
    r = Reservation(driver, 4 * G)
    r.commit(1)
    r.close()
    assert [call for call in driver.log if call != "is_capturing"] == [
        *("granularity", "reserve"),
        *("create", "map", "release", "set_access"),
        *("unmap", "free"),
    ]


@pytest.mark.parametrize("nbytes", [1, G - 1, G, G + 1, 3 * G + 5])
def test_any_capacity_can_be_reached_with_just_that_much_memory(nbytes):  # rmm#1957
    n_granules = -(-nbytes // G)
    driver = CheckedVmm(G, limit=n_granules * G)
    r = Reservation(driver, nbytes)
    for stop in range(1, nbytes, G):
        r.commit(stop)
    r.commit(nbytes)
    assert (r.nbytes, r.committed) == (nbytes, n_granules * G)
    assert peek(r.address + nbytes - 1) == b"\0"
    assert peek(r.address + r.committed) is None
    r.close()
    assert driver.is_empty()


def test_a_refused_chunk_is_tried_as_small_as_will_do():  # rmm#496
    driver = CheckedVmm(G, limit=10 * G)
    r = Reservation(driver, 100 * G)
    r.commit(7 * G)  # 1 + 2 + 4
    r.commit(8 * G)  # 8 are refused
    assert sizes(r) == [G, 2 * G, 4 * G, G]
    r.commit(9 * G)
    r.commit(10 * G)
    with pytest.raises(errors.OutOfMemoryError):
        r.commit(10 * G + 1)
    r.close()


def test_out_of_memory_names_its_limit():
    driver = CheckedVmm(G, limit=4 * G)
    r = Reservation(driver, 100 * G)
    r.commit(2 * G)
    with pytest.raises(
        errors.OutOfMemoryError, match=r"the limit is the memory: create.* 196 608 .* committed"
    ) as e:
        r.commit(50 * G)
    error = e.value
    assert (error.requested, error.available, error.missing) == (50 * G, 3 * G, 47 * G)
    assert (error.capacity, error.reserved, error.committed, error.limit) == (
        100 * G,
        100 * G,
        3 * G,
        "memory",
    )
    with pytest.raises(errors.OutOfMemoryError, match="reservation") as e:
        r.commit(100 * G + 1)
    assert (e.value.limit, e.value.missing, e.value.available) == ("reservation", 1, 100 * G)
    r.close()
    for nbytes in (1 << 62, sys.maxsize, 1 << 70):
        with pytest.raises(errors.OutOfMemoryError, match="address space") as e:
            Reservation(HostVmm(), nbytes)
        assert (e.value.limit, e.value.requested, e.value.missing) == ("address space", nbytes, nbytes)


def test_an_error_that_is_not_about_memory_is_named_so(driver):
    driver.fail(call="reserve")
    with pytest.raises(errors.BackendError, match=r"cannot reserve .* failed on demand"):
        Reservation(driver, G)
    r = Reservation(driver, 9 * G)
    driver.fail(call="set_access")
    with pytest.raises(errors.BackendError, match=r"cannot back .* set_access: failed on demand"):
        r.commit(1)
    r.commit(G)
    driver.fail(call="unmap")
    with pytest.raises(errors.BackendError, match=r"cannot give back .* unmap"):
        r.trim(0)
    assert (r.committed, peek(r.address)) == (G, b"\0")
    r.close()
    assert driver.is_empty()


@pytest.mark.parametrize("out_of_memory", [False, True])
@pytest.mark.parametrize("at", range(1, 14))
def test_a_commit_that_fails_anywhere_changes_nothing(driver, at, out_of_memory):
    r = Reservation(driver, 100 * G)
    r.commit(G)
    poke(r.address, b"abc")
    driver.fail(at=at, out_of_memory=out_of_memory)  # of the calls of three chunks
    if out_of_memory and at > 9:  # the last chunk is larger than what is missing, and is tried again
        r.commit(10 * G)
    else:
        with pytest.raises(errors.OutOfMemoryError if out_of_memory else errors.BackendError):
            r.commit(10 * G)
        assert (r.committed, driver.used, driver.handles) == (G, G, {})
        assert peek(r.address + G) is None
    assert peek(r.address, 3) == b"abc"
    driver.forgive()
    r.commit(100 * G)
    assert peek(r.address, 3) == b"abc"
    r.close()
    assert driver.is_empty()


def test_what_cannot_be_undone_is_undone_later(driver):
    r = Reservation(driver, 100 * G)
    r.commit(G)
    for call in ("map", "release"):
        driver.fail(call=call)
    with pytest.raises(errors.BackendError, match="map"):
        r.commit(2 * G)
    assert len(driver.handles) == 1
    for call in ("set_access", "unmap"):
        driver.fail(call=call)
    with pytest.raises(errors.BackendError, match="set_access"):
        r.commit(2 * G)
    assert (r.committed, driver.used, driver.handles) == (G, 3 * G, {})
    r.commit(2 * G)
    assert (r.committed, driver.used) == (3 * G, 3 * G)
    for call in ("set_access", "unmap"):
        driver.fail(call=call)
    with pytest.raises(errors.BackendError, match="set_access"):
        r.commit(4 * G)
    r.close()
    assert driver.is_empty()


def test_an_interrupt_leaves_all_or_nothing(driver, monkeypatch):
    r = Reservation(driver, 100 * G)
    r.commit(G)

    def interrupt(address, nbytes):
        if nbytes == 4 * G:
            raise KeyboardInterrupt
        CheckedVmm.set_access(driver, address, nbytes)

    monkeypatch.setattr(driver, "set_access", interrupt)
    with pytest.raises(KeyboardInterrupt):
        r.commit(7 * G)
    assert (r.committed, driver.used) == (G, G)
    r.close()


def test_trim_gives_back_whole_chunks_only(driver):
    r = Reservation(driver, 100 * G)
    r.commit(15 * G)  # 1 + 2 + 4 + 8
    assert r.trim(15 * G) == 0
    assert r.trim(7 * G + 1) == 0
    assert r.trim(7 * G) == 8 * G
    assert r.trim(1) == 6 * G
    assert (r.committed, driver.used) == (G, G)
    assert peek(r.address + G) is None
    assert r.trim(0) == G
    assert (r.committed, r.trim(0)) == (0, 0)
    r.commit(3 * G)
    r.close()
    assert driver.is_empty()


def test_a_trim_that_fails_halfway_counts_what_it_gave_back(driver):
    r = Reservation(driver, 100 * G)
    r.commit(7 * G)
    poke(r.address + G, b"abc")
    driver.fail(call="unmap", at=2)
    assert r.trim(0) == 4 * G
    assert (r.committed, peek(r.address + G, 3)) == (3 * G, b"abc")
    r.close()


def test_nothing_is_committed_or_trimmed_during_a_capture(driver):
    r = Reservation(driver, 100 * G)
    r.commit(3 * G)
    driver.capturing = True
    r.commit(3 * G)  # there already
    for call in (lambda: r.commit(3 * G + 1), lambda: r.trim(0)):
        with pytest.raises(errors.CaptureError, match="while a graph is being captured"):
            call()
    assert (r.committed, driver.used) == (3 * G, 3 * G)
    driver.capturing = False
    r.commit(3 * G + 1)
    r.close()


def test_closing_during_a_capture_is_put_off_to_the_next_operation_outside(driver):
    closed, other, third = (Reservation(driver, 100 * G) for _ in range(3))
    closed.commit(3 * G)
    other.commit(G)
    driver.capturing = True
    closed.close()
    assert (closed.committed, driver.used) == (0, 4 * G)
    with pytest.raises(errors.CaptureError):
        other.commit(2 * G)
    third.close()
    assert (settle_postponed(), driver.used, len(driver.reserved)) == (2, 4 * G, 3)
    driver.capturing = False
    other.trim(G)
    assert (len(_vmm._postponed), driver.used, len(driver.reserved)) == (0, G, 1)
    other.close()


@pytest.mark.parametrize("call", ["is_capturing", "unmap", "free"])
def test_a_close_that_fails_is_tried_again(driver, call):
    r = Reservation(driver, 100 * G)
    r.commit(7 * G)
    driver.fail(call=call)
    r.close()
    assert not driver.is_empty()
    Reservation(driver, G).close()
    assert driver.is_empty()


def test_a_closed_reservation_is_told(driver):
    r = Reservation(driver, G)
    r.close()
    r.close()
    for call in (lambda: r.commit(1), lambda: r.trim(0)):
        with pytest.raises(errors.ArenaClosedError):
            call()
    assert driver.log.count("free") == 1


@pytest.mark.parametrize("shift", [0, 12, 16, 17, 24, 30])
def test_addresses_are_aligned_and_the_whole_range_is_freed(driver, shift):
    for nbytes in (1, G, 5 * G + 1):
        r = Reservation(driver, nbytes, alignment=1 << shift)
        assert r.address % (1 << shift) == 0
        r.commit(nbytes)
        assert peek(r.address + nbytes - 1) == b"\0"
        r.close()
    assert driver.is_empty()


def test_a_thousand_grows_of_any_size_move_nothing(driver):  # cuda-python#2908, #2907
    rng = random.Random(0)
    r = Reservation(driver, 1 << 40)
    address, stop, written = r.address, 0, {}
    for i in range(1000):
        stop += rng.choice([1, 3, rng.randrange(1, G), rng.randrange(1, 1 << 21)])
        r.commit(stop)
        assert stop <= r.committed < stop + LARGEST_CHUNK
        written[stop - 1] = bytes([i % 251 + 1])
        poke(address + stop - 1, written[stop - 1])
    assert all(peek(address + at) == byte for at, byte in written.items())
    assert (r.address, driver.used) == (address, r.committed)
    r.close()
    assert driver.is_empty()
