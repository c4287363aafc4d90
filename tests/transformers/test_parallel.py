"""A model that is split over two processes by its heads (tensor parallel), on the CPU with gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # transformers loads such models with it

import families  # noqa: E402 - after the skips

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return what both ranks found out, and the logits of the whole model."""
    pytest.importorskip("transformers.distributed")
    folder = tmp_path_factory.mktemp("ranks")
    model = families.model("llama")
    model.save_pretrained(folder / "model")
    script = Path(__file__).with_name("parallel_rank.py")
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    ids = torch.arange(3, 12)[None]
    outputs = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        num_beams=3,
        do_sample=False,
        max_new_tokens=6,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)], torch.stack(outputs.logits)


@pytest.mark.parametrize("made_from", ["config", "measured"])
def test_logits_are_those_of_the_whole_model(ranks, made_from):
    found, expected = ranks
    for one in found:
        assert one["tp_size"] == 2
        torch.testing.assert_close(one["logits"][made_from], expected, atol=families.TOLERANCE, rtol=0)


def test_each_rank_holds_its_own_heads(ranks):
    for one in ranks[0]:
        assert one["heads"] == [1, 1]  # of two


def test_all_ranks_agree_on_the_length(ranks):
    lengths = [one["agreed"] for one in ranks[0]]
    assert lengths[0] == lengths[1]
    assert 1 <= lengths[0] < 256
