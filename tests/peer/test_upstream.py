"""transformers' own generation tests, with an `ArenaCache` wherever `generate` makes a cache by itself.

Needs a checkout of transformers at the installed version, as the wheel has no tests::

    git clone --depth 1 --branch v5.24.0 https://github.com/huggingface/transformers
    pip install parameterized datasets accelerate httpx
    GPUARENA_TRANSFORMERS_CHECKOUT=$PWD/transformers python -m pytest tests/peer

``GPUARENA_PEER_MODELS`` names other folders of its ``tests/models``, separated by blanks. A test that fails is run again
without the plugin: it counts if it passes then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("transformers")

CHECKOUT = os.environ.get("GPUARENA_TRANSFORMERS_CHECKOUT")
MODELS = os.environ.get("GPUARENA_PEER_MODELS") or (
    "llama qwen2 gemma3 gpt_oss mistral mixtral falcon gpt2 deepseek_v3 jamba lfm2 t5 bart whisper"
)
#: Tests that generate. Those that compile, or ask for another cache by name, say nothing of this one.
CHOSEN = (
    "(generate or past_key_values or assisted or prompt_lookup or beam or left_padding or custom_4d or logits_to_keep)"
    " and not (compil or static_cache or quant or mtp or Integration or flash_att or tokeniz)"
)
#: What fails with the plugin and not without, and why that is no fault of the cache: a part of the test's name each.
ADAPTED: dict[str, str] = {}
HERE = Path(__file__).parent

needs_checkout = pytest.mark.skipif(
    CHECKOUT is None, reason="GPUARENA_TRANSFORMERS_CHECKOUT names no checkout"
)


def run(tests: list[str], report: Path, *options: str, select: str | None = CHOSEN) -> dict[str, str]:
    """Run tests of the checkout in a process of their own; return ``"passed"``, ``"failed"`` or ``"skipped"`` of each."""
    path = [str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "HF_HUB_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = "1"  # the models are tiny
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "log_cli=false"]
    command += [*options, f"--junitxml={report}", *(["-k", select] if select else []), *tests]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
        kinds = {child.tag for child in case}
        results[name] = (
            "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        )
    made = [line for line in done.stdout.splitlines() if line.startswith("arena caches made:")]
    print(made, {kind: list(results.values()).count(kind) for kind in ("passed", "failed", "skipped")})
    if options:
        assert made, done.stdout[-3000:]
        assert made[0] != "arena caches made: {}", "no test made a cache"
    return results


def node_id(name: str) -> str:
    """Return how pytest names a test of the report, whose class comes with its module."""
    path, test = name.split("::")
    module, _, class_name = path.rpartition("/")
    return f"{module}.py::{class_name}::{test}"


@needs_checkout
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", MODELS.split())
def test_a_model_of_transformers(model, tmp_path):
    results = run([f"tests/models/{model}"], tmp_path / "arena.xml", "-p", "arena_inject")
    assert "passed" in results.values()
    failed = [name for name, result in results.items() if result == "failed"]
    if failed:
        plain = run([node_id(name) for name in failed], tmp_path / "plain.xml", select=None)
        failed = [name for name in failed if plain.get(name) == "passed"]
    assert not [name for name in failed if not any(part in name for part in ADAPTED)]


def test_the_plugin_replaces_only_what_generate_made_by_itself(monkeypatch):
    """Without a checkout: a greedy, a beam and an assisted answer of a small model, with the same tokens."""
    torch = pytest.importorskip("torch")
    import arena_inject
    import transformers
    from gpuarena_transformers import ArenaCache, ArenaEncoderDecoderCache, cache_argument
    from transformers.generation.utils import GenerationMixin

    common = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": None}
    llama = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **common
    )
    t5 = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0, **common
    )
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    for config, kind in ((llama, ArenaCache), (t5, ArenaEncoderDecoderCache)):
        torch.manual_seed(0)
        auto = transformers.AutoModelForSeq2SeqLM if config is t5 else transformers.AutoModelForCausalLM
        model = auto.from_config(config).eval()
        ways = [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}]
        expected = [model.generate(ids, **options, **way) for way in ways]
        with monkeypatch.context() as patch:
            patch.setattr(
                GenerationMixin,
                "_prepare_cache_for_generation",
                GenerationMixin._prepare_cache_for_generation,
            )
            arena_inject.inject()
            for way, wanted in zip(ways, expected, strict=True):
                found = model.generate(ids, **options, **way)
                assert isinstance(found.past_key_values, kind)
                assert torch.equal(found.sequences, wanted.sequences)
            own = transformers.DynamicCache(config=config)
            if config is llama:
                assert model.generate(ids, **{cache_argument(): own}, **options).past_key_values is own
            assert not hasattr(model, "cache")
        assert not isinstance(model.generate(ids, **options).past_key_values, kind)
