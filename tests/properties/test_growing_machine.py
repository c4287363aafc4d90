"""The cache that grows in place, against the model of `test_kv_machine`, with a growth at each token."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import rule
from test_kv_machine import HostLibrary, KVMachine, TorchLibrary, run_kv_machine

import gpuarena.kv.growing
import gpuarena.kv.spec
from gpuarena import Arena
from gpuarena.errors import LiveArraysError


class GrowingMachine(KVMachine):
    """As `KVMachine`, on an arena that grows."""

    backend = "virtual"

    def _make_arena(self):
        nbytes = self.spec.arena_nbytes(self.batch, self.max_tokens, layout="token-major")
        self.arena = Arena(nbytes, backend=self.backend)

    def _find_memory(self):
        self.outside = np.zeros(0, bool)
        self.addresses = []
        self.stride = self.cache._records.record_nbytes
        begin = self.cache._records.region.address
        for shape, spec in zip(self.shapes, self.spec.layers, strict=True):
            pair = []
            for dim, dtype in ((shape.key_dim, spec.dtype), (shape.value_dim, spec.value_dtype)):
                pair.append(begin)
                begin += -(-self.batch * shape.heads * dim * dtype.itemsize // 16) * 16
            self.addresses.append(pair)
        assert begin - self.cache._records.region.address == self.stride

    def _raw(self):
        records = self.cache._records
        if not records.region.is_live:
            return np.zeros(0, np.uint8)
        return np.array(records.region.as_numpy()[: records.n_tokens]).reshape(-1)

    def _n_slots(self):
        n_tokens = self.cache._records.n_tokens
        assert n_tokens == self.most, "memory follows the longest the cache ever was"
        return n_tokens

    @property
    def most(self):
        """Most tokens of a layer since the memory was last given back."""
        self._most = max(getattr(self, "_most", 0), *self.model.lengths)
        return self._most

    def _make_cache(self):
        self._most = 0
        super()._make_cache()

    @rule()
    def trim(self):
        self.most  # it remembers
        with contextlib.suppress(LiveArraysError):  # dead caches, or a traceback, may hold views
            self.cache.trim()
            self._most = max(self.model.lengths)


class GrowingTensors(GrowingMachine):
    backend = "virtual:torch"


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(gpuarena.kv.growing, "_STEP_NBYTES", 1)
    monkeypatch.setattr(gpuarena.kv.spec, "_PIECE_NBYTES", 1)  # rows are reordered token by token


N_EXAMPLES = settings.default.max_examples // 2


def test_a_growing_cache_of_numpy_arrays_behaves_as_the_model():
    run_kv_machine(HostLibrary(), GrowingMachine, max_examples=N_EXAMPLES)


def test_a_growing_cache_of_tensors_behaves_as_the_model():
    pytest.importorskip("torch")
    run_kv_machine(TorchLibrary("cpu"), GrowingTensors, max_examples=N_EXAMPLES)
