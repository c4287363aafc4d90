"""Reservations under random calls and failures."""

from __future__ import annotations

import sys

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from vmm_doubles import CheckedVmm, peek, poke

from gpuarena import errors
from gpuarena.backends import _vmm
from gpuarena.backends._vmm import Reservation, settle_postponed

G = 64 << 10  # bytes of a granule


class ReservationMachine(RuleBasedStateMachine):
    """Reservations on a driver of 64 granules that fails, against what a dictionary of bytes remembers."""

    reservations = Bundle("reservations")

    def __init__(self):
        super().__init__()
        self.driver = CheckedVmm(G, limit=64 * G)
        self.written: dict[Reservation, dict[int, int]] = {}
        self.n_faults = 0  # since all was undone for the last time

    @rule(target=reservations, nbytes=st.integers(1, 100 * G), shift=st.integers(0, 20))
    def reserve(self, nbytes, shift):
        try:
            r = Reservation(self.driver, nbytes, alignment=1 << shift)
        except (errors.OutOfMemoryError, errors.BackendError):
            assert self.n_faults
            return multiple()
        self.written[r] = {}
        return r

    @rule(at=st.integers(1, 12), out_of_memory=st.booleans())
    def fail(self, at, out_of_memory):
        self.driver.fail(at=at, out_of_memory=out_of_memory)
        self.n_faults += 1

    @rule(capturing=st.booleans())
    def capture(self, capturing):
        self.driver.capturing = capturing

    @rule()
    def settle(self):
        self.driver.forgive()
        self.driver.capturing = False
        self.n_faults = settle_postponed()
        assert self.n_faults == 0
        for r in self.written:
            r.trim(r.nbytes + G)  # nothing, but it clears up what earlier calls could not
        assert self.driver.used == sum(r.committed for r in self.written)
        assert len(self.driver.reserved) == len(self.written)

    @rule(r=reservations, share=st.floats(0, 1.01))
    def commit(self, r, share):
        stop = int(r.nbytes * share)
        before = r.committed
        needed = max(-(-stop // G) * G - before, 0)
        fits = needed <= 64 * G - self.driver.used and stop <= r.nbytes
        captures = needed > 0 and self.driver.capturing and stop <= r.nbytes
        try:
            r.commit(stop)
        except errors.CaptureError:
            assert captures or self.n_faults
            assert r.committed == before
        except (errors.OutOfMemoryError, errors.BackendError):
            assert not fits or self.n_faults
            assert r.committed == before
        else:
            assert not captures
            assert stop <= r.nbytes
            assert before + needed <= r.committed
            for at in (before, r.committed - 1) if r.committed > before else ():
                self.written[r][at] = at % 251 + 1
                poke(r.address + at, bytes([at % 251 + 1]))

    @rule(r=reservations, share=st.floats(0, 1))
    def trim(self, r, share):
        stop = int(r.nbytes * share)
        before = r.committed
        try:
            given_back = r.trim(stop)
        except (errors.CaptureError, errors.BackendError, errors.OutOfMemoryError):
            assert self.driver.capturing or self.n_faults
            given_back = 0
        assert r.committed == before - given_back
        assert given_back == 0 or r.committed >= stop
        self.written[r] = {at: byte for at, byte in self.written[r].items() if at < r.committed}

    @rule(r=consumes(reservations))
    def close(self, r):
        r.close()
        assert r.committed == 0
        del self.written[r]

    @invariant()
    def committed_memory_reads_as_written(self):
        for r, written in self.written.items():
            for at, byte in written.items():
                assert peek(r.address + at) == bytes([byte])
            assert r.committed % G == 0
            # what could not be undone may still be mapped
            assert self.n_faults or peek(r.address + r.committed) is None
        if not self.n_faults and not _vmm._postponed:
            assert self.driver.used == sum(r.committed for r in self.written)

    def teardown(self):
        self.driver.forgive()
        self.driver.capturing = False
        for r in self.written:
            r.close()
        assert settle_postponed() == 0
        assert self.driver.is_empty()


TestReservationMachine = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")(
    ReservationMachine.TestCase
)
