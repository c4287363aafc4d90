"""The README: its code runs and prints what it says, and its set-up commands are the ones that CI uses."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
HUB_NAME = '"HuggingFaceTB/SmolLM2-135M-Instruct"'


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A folder with a tiny random model, which stands in for the name on the hub."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_code_runs_and_prints_what_its_comments_say(number, small_model):
    code = BLOCKS[number]
    expected = [
        line.split("# ")[-1].strip() for line in code.splitlines() if re.match(r"\s*print\(.*\)  # ", line)
    ]
    assert expected, "a block that prints nothing shows nothing"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code.replace(HUB_NAME, repr(str(small_model))), f"README block {number}", "exec"), {})
    assert printed.getvalue().splitlines() == expected


def test_every_example_is_found():
    assert len(BLOCKS) == README.read_text(encoding="utf-8").count("```python") == 4


def test_the_screen_is_what_the_command_prints():
    typer_testing = pytest.importorskip("typer.testing")
    from gpuarena.cli import app

    [screen] = re.findall(r"```text\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    command, *shown = screen.splitlines()
    assert command == "$ gpuarena explain"
    # The encoding is that of a terminal that has these characters, whatever the one of the tests.
    environment = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "FORCE_COLOR": None}
    printed = typer_testing.CliRunner(charset="utf-8").invoke(app, ["explain"], env=environment)
    assert printed.exit_code == 0
    lines = [line.rstrip() for line in printed.stdout.splitlines()]
    assert [line for line in lines if line in shown] == shown


def test_the_set_up_commands_are_exactly_two():
    commands = re.findall(r"```sh\n(.*?)\n```", README.read_text(encoding="utf-8"), re.S)
    assert commands == [
        'pip install ".[demo]" && gpuarena demo',
        'pip install -e ".[test]" && python -m pytest -n auto --dist worksteal',
    ]


def test_the_figures_are_those_of_the_files():
    names = [
        "DynamicCache + sdpa",
        "DynamicCache + gpuarena",
        "StaticCache (exact) + sdpa",
        "StaticCache (largest) + sdpa",
    ]
    expected = []
    for path in sorted((README.parent / "docs" / "benchmarks").glob("*-cpu-decode-*.json")):
        result = json.loads(path.read_text())
        for one in result["groups"]:
            ratios = [f"{one['rows'][name]['ratio']:.2f}" for name in names]
            expected.append([f"{result['geometry']['dtype']}, {one['n_tokens']} tokens", *ratios])
    rows = re.findall(r"^\| (\w+, \d+ tokens) \| (.*) \|$", README.read_text(encoding="utf-8"), re.M)
    assert [[title, *cells.split(" | ")] for title, cells in rows] == expected


def test_the_floor_is_that_of_the_files():
    found = [
        group["rows"]["ArenaCache + gpuarena"]["floor_ratio"]
        for path in (README.parent / "docs" / "benchmarks").glob("*-cpu-decode-*.json")
        for group in json.loads(path.read_text())["groups"]
    ]
    text = README.read_text(encoding="utf-8")
    [said] = re.findall(r"`ArenaCache` takes ([\d.]+) to ([\d.]+) times what the bytes", text)
    assert list(said) == [f"{min(found):.2f}", f"{max(found):.2f}"]


def test_the_figures_of_allocation_are_those_of_the_file():
    [path] = (README.parent / "docs" / "benchmarks").glob("*-cpu-alloc.json")
    groups = {group["title"]: group["rows"] for group in json.loads(path.read_text())["groups"]}
    new, repeated = (rows for title, rows in groups.items() if title.startswith("torch arrays"))
    figures = [
        new["arena.empty"]["ratio"],
        new["as_strided(...).data (with a version counter of its own)"]["ratio"],
        repeated["scope + arena.empty"]["ratio"],
    ]
    text = README.read_text(encoding="utf-8")
    [found] = re.findall(
        r"`arena.empty` takes ([\d.]+) times.*?alone takes ([\d.]+)\) and ([\d.]+) times", text, re.S
    )
    assert list(found) == [f"{figure:.2f}" for figure in figures]
    positions = groups["positions"]
    for n_live in ("1 region", "100000 regions"):
        assert f"{positions[f'checkpoint + rollback, {n_live} live']['median_s'] * 1e6:.1f}" == "1.5"


def test_the_figures_of_the_caches_are_those_of_the_file():
    [path] = (README.parent / "docs" / "benchmarks").glob("*-cpu-kv-bfloat16.json")
    groups = {group["title"]: group["rows"] for group in json.loads(path.read_text())["groups"]}
    held = [rows for title, rows in groups.items() if title.startswith("append a token")]
    names = ["torch.cat", "StaticLayer.update (all slots)", "index_copy_, position ready"]
    expected = [
        [f"{rows[name]['ratio']:.{digits}f}" for rows in held]
        for name, digits in zip(names, (0, 2, 2), strict=True)
    ]
    text = README.read_text(encoding="utf-8")
    [line] = re.findall(r"tokens held:\s+`torch.cat` takes.*?by hand.*? times", text, re.S)
    numbers = re.findall(r"(?<!`)\b\d+(?:\.\d+)?(?=,| and|\s+and| times)", line)
    assert numbers == [number for row in expected for number in row]


def test_the_figures_of_generate_are_those_of_the_files():
    folder = README.parent / "docs" / "benchmarks"
    groups = {}
    for dtype in ("bfloat16", "float32"):
        [path] = folder.glob(f"*-cpu-generate-{dtype}.json")
        groups[dtype] = {
            (g["kind"], g["batch"], g["n_tokens"]): g["rows"] for g in json.loads(path.read_text())["groups"]
        }
    longest = [groups[dtype]["step", 4, 16384] for dtype in groups]
    expected = [
        f"{rows[name]['ratio']:.2f}"
        for name in ("DynamicCache + sdpa", "DynamicCache + gpuarena", "ideal + gpuarena")
        for rows in longest
    ]
    text = " ".join(README.read_text(encoding="utf-8").split())
    [sentence] = re.findall(r"With four rows and 16 384 tokens each.*?\(`gpuarena bench generate`", text)
    assert re.findall(r"\d\.\d\d", sentence) == expected
    ours, other = "ArenaCache + gpuarena", "DynamicCache + sdpa"
    for steps in groups.values():
        rows = [found for (kind, _, _), found in steps.items() if kind == "step"]
        assert all(found[ours]["allocated_nbytes"] == 0 for found in rows)
        one = steps["step", 1, 16384]
        assert f"{one[ours]['peak_nbytes'] / one[other]['peak_nbytes']:.2f}" == "0.89"
