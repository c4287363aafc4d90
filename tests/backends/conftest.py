from __future__ import annotations

import pytest
from shared_core.case import CASES


@pytest.fixture(scope="module")
def case(request):
    """The backend that a module's CASE names."""
    return CASES[request.module.CASE]
