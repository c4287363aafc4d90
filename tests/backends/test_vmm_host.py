from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys

import pytest
from vmm_doubles import peek, poke

from gpuarena import errors
from gpuarena.backends._vmm import Reservation
from gpuarena.backends._vmm_host import HostVmm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

G = 64 << 10  # bytes of a granule


def test_tens_of_huge_reservations_cost_nothing():  # pytorch#186213
    before = resident()
    many = [Reservation(HostVmm(), 1 << 40) for _ in range(40)]
    for i, r in enumerate(many):
        r.commit(1)
        poke(r.address, bytes([i]))
    assert [peek(r.address)[0] for r in many] == list(range(40))
    assert resident() - before < 16 << 20
    for r in many:
        r.close()
    assert not any(peek(r.address) for r in many)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_trimmed_pages_go_back_to_the_system_and_come_back_as_zeros():  # cuda-python#2882
    r = Reservation(HostVmm(), 1 << 40)
    before = resident()
    r.commit(128 << 20)
    ctypes.memset(r.address, 1, 128 << 20)
    full = resident()
    assert full - before > 120 << 20
    given_back = r.trim(1 << 20)
    assert given_back > 100 << 20
    assert abs(full - resident() - (128 << 20) + r.committed) < 8 << 20
    assert peek(r.address + r.committed - 1) == b"\1"
    r.commit(128 << 20)
    assert peek(r.address + (100 << 20)) == b"\0"
    r.close()


def test_locked_pages_that_the_system_keeps_stay_readable():
    libc = ctypes.CDLL(None, use_errno=True)
    r = Reservation(HostVmm(), G)
    r.commit(G)
    poke(r.address, b"abc")
    if libc.mlock(ctypes.c_void_p(r.address), ctypes.c_size_t(4096)):
        pytest.skip("this process may not lock memory")
    with pytest.raises(errors.BackendError, match="madvise"):
        r.trim(0)
    assert (r.committed, peek(r.address, 3)) == (G, b"abc")
    libc.munlock(ctypes.c_void_p(r.address), ctypes.c_size_t(4096))
    assert r.trim(0) == G
    r.close()


def test_a_bounded_address_space_is_out_of_memory():
    def bound():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))

    code = """
from gpuarena import OutOfMemoryError
from gpuarena.backends._vmm import Reservation
from gpuarena.backends._vmm_host import HostVmm
try: Reservation(HostVmm(), 1 << 40)
except OutOfMemoryError as error: print(error.limit, "mmap" in str(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=bound)
    assert (done.stdout, done.stderr) == ("address space True\n", "")


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(errors.BackendError, match=r"needs Linux.*darwin.*backend='host'"):
        HostVmm()
