"""The pages in docs/: their code runs, their links lead somewhere, and they name what there is."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
#: What a build of the site puts there is made of what is tested.
BUILT = ("_build", "benchmarks/files")
PAGES = sorted(
    path.relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
    if not path.relative_to(DOCS).as_posix().startswith(BUILT)
)
#: Stands before a block that only a GPU can run; it is compiled.
GPU_MARK = "<!-- needs a GPU -->"
#: The rules of the arena, by group: placement, failure, sizes, rollback, scopes, ends and slices, the rest.
N_RULES = {"P": 10, "F": 6, "S": 10, "R": 15, "C": 8, "D": 8, "T": 7}
UNIQUE = ["7", "8", "9", "10", "11", "14", "17", "32", "38", "40", "41", "42", "48", "68"]


class Block(NamedTuple):
    line: int
    code: str
    needs_gpu: bool

    @property
    def is_dialogue(self):
        return ">>> " in self.code


def text_of(name):
    return (DOCS / name).read_text(encoding="utf-8")


def blocks_of(name):
    """All Python of a page: fences called python, and those with a dialogue, in order.

    ``python notest`` is for code that is shown and cannot run anywhere, such as a part of a function.
    """
    found, fence, start, before = [], None, 0, ""
    lines = text_of(name).splitlines()
    for number, line in enumerate(lines, 1):
        if fence is None and line.startswith("```"):
            fence, start = line[3:].strip(), number
            before = next((one for one in reversed(lines[: number - 1]) if one.strip()), "")
        elif fence is not None and line == "```":
            code = "\n".join(lines[start : number - 1]) + "\n"
            if fence == "python" or (fence in ("", "pycon") and code.startswith(">>> ")):
                found.append(Block(start, code, before.strip() == GPU_MARK))
            fence = None
    assert fence is None, f"the fence of line {start} has no end"
    return found


def need(code):
    """Skip where a library is missing that the code imports, or that what it imports needs."""
    for name in sorted(set(re.findall(r"^(?:>>> |\.\.\. )?\s*(?:from|import) (\w+)", code, re.M))):
        pytest.importorskip({"gpuarena_transformers": "transformers"}.get(name, name))
    if re.search(r"backend=.virtual|growing|\.attend\b", code):
        pytest.importorskip("torch")
    if "virtual" in code and sys.platform != "linux":
        pytest.skip("memory that grows needs Linux")


@pytest.mark.parametrize("name", [name for name in PAGES if blocks_of(name)])
def test_the_code_runs(name, tmp_path, monkeypatch):
    """All of a page in one namespace, as a reader would who types it."""
    blocks = blocks_of(name)
    need("\n".join(block.code for block in blocks))
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    parser, n_examples = doctest.DocTestParser(), 0
    for block in blocks:
        where = f"docs/{name}"
        if block.needs_gpu:
            sources = parser.get_examples(block.code) if block.is_dialogue else [block]
            for source in sources:
                compile(source.source if block.is_dialogue else source.code, where, "exec")
        elif block.is_dialogue:
            test = parser.get_doctest(block.code, namespace, f"{name}:{block.line}", where, block.line)
            test.globs = namespace
            output: list[str] = []
            failed, n_tried = doctest.DocTestRunner(verbose=False).run(
                test, out=output.append, clear_globs=False
            )
            assert not failed, "".join(output)
            n_examples += n_tried
        else:
            code = "\n" * block.line + block.code  # so that a traceback has the page's lines
            exec(compile(code, where, "exec"), namespace)
    dialogues = [block.code for block in blocks if block.is_dialogue and not block.needs_gpu]
    assert n_examples == len(re.findall(r"^>>> ", "\n".join(dialogues), re.M))


@pytest.mark.parametrize("name", PAGES)
def test_no_code_is_missed(name):
    text = text_of(name)
    blocks = blocks_of(name)
    assert text.count(">>> ") == sum(block.code.count(">>> ") for block in blocks)
    assert len(re.findall(r"^```python$", text, re.M)) == sum(
        1 for block in blocks if text.splitlines()[block.line - 1] == "```python"
    )
    assert text.count(GPU_MARK) == sum(block.needs_gpu for block in blocks)


def test_few_pages_need_a_gpu():
    marked = [name for name in PAGES if GPU_MARK in text_of(name)]
    assert len(marked) <= 4


# -- links ----------------------------------------------------------------------------------------------------------


def headings_of(path):
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_and_paths_lead_somewhere(name):
    text = re.sub(r"^```.*?^```", "", text_of(name), flags=re.M | re.S)
    page = DOCS / name
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", text):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor:
            assert anchor in headings_of(path), f"{target}#{anchor}"
    for path in re.findall(r"`((?:gpuarena|integrations|tests|docs)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


# -- what pages say -------------------------------------------------------------------------------------------------


def test_every_rule_is_promised_once():
    rules = [f"{group}{number + 1}" for group, n in N_RULES.items() for number in range(n)]
    promised = re.findall(r"\[([A-Z]\d+)\]", text_of("promises.md"))
    assert promised == rules


def test_what_no_other_allocator_offers_is_listed():
    rows = re.findall(r"^\| (\d+) \| .+ \| .+ \| .+ \|$", text_of("promises.md"), re.M)
    assert rows == UNIQUE


def names_of(package):
    """`__all__` of a package, from its source: what it needs may be missing."""
    root = ROOT / "integrations" if package == "gpuarena_transformers" else ROOT
    tree = ast.parse((root / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
    values = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    ]
    return ast.literal_eval(values[0])


def test_every_public_name_is_in_the_reference():
    """Those of packages whose pages list them one by one; the other pages take all of a module."""
    listed = set(
        re.findall(
            r"auto\w+:: (\S+)",
            "\n".join(map(text_of, (f"reference/{one}.md" for one in ("arena", "helpers", "kv")))),
        )
    )
    apart = {"errors", "ContiguousKVCache", "LaneCache", "PagedKVCache", "Sequence"}
    errors = set(re.findall(r"^class (\w+)", (ROOT / "gpuarena/errors.py").read_text(encoding="utf-8"), re.M))
    for package in ("gpuarena", "gpuarena.kv"):
        assert set(names_of(package)) - listed <= apart | errors
    whole = {
        one
        for path in (DOCS / "reference").glob("*.md")
        for one in re.findall(r"automodule:: (\S+)", path.read_text(encoding="utf-8"))
    }
    packages = (
        "backends",
        "errors",
        "kv.contiguous",
        "kv.lanes",
        "kv.paged",
        "kv.state",
        "observe",
        "simulate",
        "testing",
    )
    assert {f"gpuarena.{one}" for one in packages} | {"gpuarena_transformers"} <= whole


# -- the site -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def benchmark_pages():
    """The extension that makes the pages of benchmarks."""
    spec = importlib.util.spec_from_file_location("benchmark_pages", DOCS / "_ext" / "benchmark_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tables_of(markdown):
    """The tables of a page: under the last line of bold or heading before it, rows of cells without markup."""
    found, title, rows = [], "", None
    for line in markdown.splitlines():
        if line.startswith("|"):
            cells = [cell.strip().replace("\\", "").strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if rows is None:
                rows = []
                found.append((title, rows))
            if not set("".join(cells)) <= set("-:"):
                rows.append(cells)
            continue
        rows = None
        if line.startswith(("**", "#")):
            title = line.strip("*# ").replace("\\", "")
    return found


@pytest.mark.parametrize("path", sorted((DOCS / "benchmarks").glob("*.json")), ids=lambda path: path.stem)
def test_the_page_of_a_benchmark_has_the_figures_of_its_file(path, benchmark_pages):
    results = json.loads(path.read_text(encoding="utf-8"))
    page = benchmark_pages.page(path.stem, results, [])
    environment = results["environment"]
    for fact in (environment["date"], environment["commit"], environment["processor"]):
        assert fact in page.replace("\\", "")
    shown = tables_of(page)
    wanted = [
        (
            group["title"],
            [
                [name, *([f"{row['ratio']:.2f}"] if "ratio" in row else [])]
                for name, row in group["rows"].items()
            ],
        )
        for one in results.get("benchmarks", [results])
        for group in one.get("groups", [])
    ]
    for title, rows in wanted:
        [found] = [table[1:] for name, table in shown if name == title]
        assert len(found) == len(rows)
        for cells, (name, *ratio) in zip(found, rows, strict=True):
            assert cells[0] == name
            assert not ratio or cells[3] == ratio[0]


def test_the_overview_has_the_ratios_of_all_files_and_says_what_no_gpu_measured(benchmark_pages, tmp_path):
    def group(title, **ratios):
        return {
            "title": title,
            "reference": "ours",
            "rows": {"ours": {"ratio": 1.0}, **{n: {"ratio": r} for n, r in ratios.items()}},
        }

    def write(name, device, *groups, **more):
        environment = {
            "date": "2031-02-03T00:00:00+00:00",
            "processor": "P",
            "device": device,
            "gpu": None,
            **more,
        }
        results = {"benchmark": name, "environment": environment, "groups": groups, "fake": device == "fake"}
        (tmp_path / f"{name}-{device[:4]}.json").write_text(json.dumps(results))

    write("kv", "cpu", group("a", cat_a=4.0, mine=0.5), group("b", cat_a=2.0), group("c", cat_a=9.0))
    write("odd", "fake", group("a", cat=77.0))
    text = benchmark_pages.overview(tmp_path)
    tables = tables_of(text)
    assert tables[0][1][1:] == [["kv", "[P, 2031-02-03](files/kv-cpu.md)", "not measured"]]
    assert tables[1][1][1:] == [
        ["**over ours:**", "", "", "", ""],
        ["cat_a", "3", "2.00", "4.00", "9.00"],
        ["mine", "1", "", "0.50", ""],
    ]
    assert "No file here is from a GPU" in text
    assert "77" not in text  # a dry run
    write("kv", "cuda:0", group("a", cat=3.0), gpu="G")
    text = benchmark_pages.overview(tmp_path)
    assert tables_of(text)[0][1][1:] == [
        ["kv", "[P, 2031-02-03](files/kv-cpu.md)", "[G, 2031-02-03](files/kv-cuda.md)"]
    ]
    assert "No file here is from a GPU" not in text


#: A page of the reference, and where a name of another project on it leads.
ELSEWHERE = [
    ("kv", "https://docs.pytorch.org/docs/stable/tensors.html#torch.Tensor"),
    ("backends", "https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch.dtype"),
    ("backends", "https://docs.cupy.dev/en/stable/reference/generated/cupy.ndarray.html#cupy.ndarray"),
    ("backends", "https://numpy.org/doc/stable/reference/generated/numpy.ndarray.html#numpy.ndarray"),
    ("transformers", "https://huggingface.co/docs/transformers/internal/generation_utils#transformers.Cache"),
    (
        "transformers",
        "https://huggingface.co/docs/transformers/main_classes/configuration#transformers.PreTrainedConfig",
    ),
]


@pytest.mark.nightly  # .ci/check builds the site in each run
def test_the_site_builds_without_a_warning_and_names_of_others_are_links(tmp_path):
    for name in ("sphinx", "myst_parser", "furo", "sphinx_copybutton", "transformers", "typer", "matplotlib"):
        pytest.importorskip(name)
    environment = {key: value for key, value in os.environ.items() if key != "GPUARENA_DOCS_ONLINE"}
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-E", "-q", "-b", "html", DOCS, tmp_path],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    for page, address in ELSEWHERE:
        assert f'href="{address}"' in (tmp_path / "reference" / f"{page}.html").read_text(encoding="utf-8"), (
            address
        )
    assert 'id="gpuarena.Arena.alloc"' in (tmp_path / "reference" / "arena.html").read_text(encoding="utf-8")
    assert "gpuarena bench decode" in (tmp_path / "reference" / "command-line.html").read_text(
        encoding="utf-8"
    )
