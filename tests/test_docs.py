"""The files in docs/: their examples run, and they name what there is."""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
#: The rules of the arena, by group: placement, failure, sizes, rollback, scopes, ends and slices, the rest.
N_RULES = {"P": 10, "F": 6, "S": 10, "R": 15, "C": 8, "D": 8, "T": 7}
UNIQUE = ["7", "8", "9", "10", "11", "14", "17", "32", "38", "40", "41", "42", "48", "68"]


def text_of(name):
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "n_examples"),
    [
        ("promises.md", 40),
        ("limits.md", 20),
        ("architecture.md", 0),
        ("kv.md", 40),
        ("transformers.md", 35),
        ("observe.md", 30),
        ("simulate.md", 27),
    ],
)
def test_the_examples_run(name, n_examples):
    pytest.importorskip("torch")
    if name == "transformers.md":
        pytest.importorskip("transformers")
    if name == "observe.md":
        pytest.importorskip("prometheus_client")
    if name == "limits.md" and sys.platform != "linux":
        pytest.skip("memory that grows needs Linux")
    text = re.sub(r"^```.*$", "", text_of(name), flags=re.M)  # a fence is no output
    examples = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    assert len(examples.examples) >= n_examples
    output: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(examples, out=output.append)
    assert not results.failed, "".join(output)


@pytest.mark.parametrize("name", ["transformers.md", "transformers-static.md"])
def test_the_blocks_run(name):
    """Those of the pages on transformers that are no dialogue: one after the other, in one namespace."""
    pytest.importorskip("transformers")
    blocks = re.findall(r"^```python\n(.*?)^```", text_of(name), re.M | re.S)
    namespace: dict[str, object] = {}
    for block in blocks:
        if ">>>" not in block:
            exec(compile(block, f"docs/{name}", "exec"), namespace)
    assert namespace


@pytest.mark.parametrize("name", [path.name for path in DOCS.glob("*.md")])
def test_links_and_paths_lead_somewhere(name):
    text = text_of(name)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (DOCS / target).exists(), target
    for path in re.findall(r"`((?:gpuarena|integrations|tests)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path


def test_every_rule_is_promised_once():
    rules = [f"{group}{number + 1}" for group, n in N_RULES.items() for number in range(n)]
    promised = re.findall(r"\[([A-Z]\d+)\]", text_of("promises.md"))
    assert promised == rules


def test_what_no_other_allocator_offers_is_listed():
    rows = re.findall(r"^\| (\d+) \| .+ \| .+ \| .+ \|$", text_of("promises.md"), re.M)
    assert rows == UNIQUE
