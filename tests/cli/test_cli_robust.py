"""How commands end, and what of their output everybody relies on."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

typer = pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from gpuarena import cli, errors  # noqa: E402
from gpuarena.cli import _output, _status  # noqa: E402


def app_of(command):
    app = typer.Typer(cls=_status.Group, pretty_exceptions_enable=False)
    app.command("it")(command)
    app.command("other")(lambda: None)
    return app


@pytest.fixture
def run(monkeypatch):
    """Run an app as a process would; return its status."""

    def run(app, *arguments):
        monkeypatch.setattr(sys, "argv", ["gpuarena", *arguments])
        with pytest.raises(SystemExit) as ended:
            _status.run(app)
        return ended.value.code

    return run


def raising(error):
    def command():
        raise error

    return app_of(command)


# ---------------------------------------------------------------------------------------------------------- statuses


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.ArgumentError("capacity 0 [no] :smile:"), "error: capacity 0 [no] :smile:\n"),
        (errors.ArgumentError("label '\x1b[2J\u202e'"), "error: label '\\x1b[2J\\u202e'\n"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), "error: a/b: No such file or directory\n"),
        (PermissionError(13, "Permission denied", b"a"), "error: b'a': Permission denied\n"),
        (MemoryError("1 TiB"), "error: out of memory: 1 TiB\n"),
        (MemoryError(), "error: out of memory\n"),
        (errors.OutOfMemoryError("needs 5 bytes"), "error: needs 5 bytes\n"),
        (errors.ArgumentError("x" * 300), f"error: {'x' * 300}\n"),  # no breaks: the window makes them
    ],
)
def test_a_foreseen_error_is_one_line_and_status_1(run, capsys, error, said):
    assert run(raising(error), "it") == 1
    assert capsys.readouterr() == ("", said)


def test_an_error_of_the_demo(run, capsys):
    from gpuarena.demo.errors import CacheError

    assert run(raising(CacheError("no folder", "make one")), "it") == 1
    assert capsys.readouterr().err == "error: no folder\nWhat to do: make one.\n"


@pytest.mark.parametrize("error", [RuntimeError("x"), OSError("no file was named"), KeyError("x")])
def test_what_nobody_foresaw_keeps_its_traceback(monkeypatch, error):
    monkeypatch.setattr(sys, "argv", ["gpuarena", "it"])
    with pytest.raises(type(error)):
        _status.run(raising(error))


def test_an_interrupt_is_one_line_and_status_130(run, capsys):
    assert run(raising(KeyboardInterrupt()), "it") == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_an_interrupt_leaves_no_half_written_file(run, capsys, tmp_path):
    class Slow(dict):
        def items(self):
            raise KeyboardInterrupt

    def command():
        _output.write_json(tmp_path / "a.json", {"a": Slow()}, Console())

    assert run(app_of(command), "it") == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("nope",), ("it", "--nope"), ("it", "more")])
def test_wrong_usage_is_status_2(run, capsys, arguments):
    assert run(raising(RuntimeError("not reached")), *arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_command_that_ends_well_is_status_0(run, capsys):
    assert run(app_of(lambda: print("done")), "it") == 0
    assert capsys.readouterr() == ("done\n", "")


#: As most people have it: with output that is buffered.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
LOUD = """
import errno, sys, typer
from rich.console import Console
from gpuarena.cli import _status

app = typer.Typer(cls=_status.Group, pretty_exceptions_enable=False)

@app.command()
def rich():
    for number in range(100_000):
        Console().print(number)

@app.command()
def plain():
    for number in range(100_000):
        print(number)

@app.command()
def echo():
    try:
        for number in range(100_000):
            typer.echo(number)
    finally:
        print("still in the buffer when the process ends")

@app.command()
def late():
    sys.stdin.read()
    print("all of it, in the buffer")

sys.argv = ["gpuarena", sys.argv[1]]
_status.run(app)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break otherwise there")
@pytest.mark.parametrize("printed_by", ["rich", "plain", "echo"])
def test_a_reader_that_goes_away_is_status_141_without_a_word(printed_by):
    with subprocess.Popen(
        [sys.executable, "-c", LOUD, printed_by],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=BUFFERED,
    ) as process:
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break otherwise there")
def test_a_reader_that_goes_away_before_anything_was_written():
    with subprocess.Popen(
        [sys.executable, "-c", LOUD, "late"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=BUFFERED
    ) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.wait(timeout=60) == 141


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", LOUD, "echo"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env=BUFFERED,
        )
    assert (done.returncode, done.stderr) == (
        1,
        "error: cannot write the output: No space left on device\n",
    )


def test_letters_that_the_terminal_lacks_are_escaped(run, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", errors="strict"))

    def command():
        table = _output.plain_table("ö")
        table.add_column("é")
        table.add_row("█")
        Console().print(table)
        sys.stdout.flush()

    assert run(app_of(command), "it") == 0
    text = written.getvalue().decode("ascii")
    assert "\\xf6" in text
    assert "\\u2588" in text


# ------------------------------------------------------------------------------------------------------------ output


@pytest.mark.parametrize("columns", ["80", "40"])
@pytest.mark.parametrize("command", ["", "info", "demo", "size", "top", "bench", "bench decode", "bench kv"])
def test_the_help_is_whole(command, columns):
    done = CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"COLUMNS": columns})
    assert done.exit_code == 0
    assert all(len(line) <= int(columns) for line in done.stdout.splitlines())
    if columns == "80":
        assert "…" not in done.stdout
        assert ("Example" in done.stdout) == (command in ("info", "demo", "size", "top"))
        if not command:
            assert "Status: 0 done; 1 an error" in done.stdout


def test_help_and_version_import_no_library_that_is_slow():
    code = """
    import sys
    from gpuarena import cli
    for arguments in (["--help"], ["--version"], ["info", "--help"], ["bench", "decode", "--help"], ["top", "--help"]):
        sys.argv = ["gpuarena", *arguments]
        try:
            cli.main()
        except SystemExit as ended:
            assert not ended.code, ended.code
    slow = {"torch", "cupy", "transformers", "matplotlib", "prometheus_client", "gpuarena_transformers"}
    print(*sorted(slow & set(sys.modules)), file=sys.stderr)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")


words = st.text(st.characters(codec="ascii", categories=["Lu", "Ll", "Nd"]), min_size=1, max_size=12)


@given(
    st.lists(st.tuples(words, st.booleans(), st.booleans()), min_size=1, max_size=7),
    st.integers(0, 3),
    st.integers(20, 120),
    st.data(),
)
def test_a_table_shows_every_cell_at_any_width(columns, n_rows, width, data):
    table = _output.plain_table()
    for heading, right, no_wrap in columns:
        table.add_column(heading, justify="right" if right else "left", no_wrap=no_wrap, overflow="fold")
    rows = [[data.draw(words) for _ in columns] for _ in range(n_rows)]
    for row in rows:
        table.add_row(*row)
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=False, color_system=None).print(table)
    text = file.getvalue()
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    letters = sorted("".join(text.split()))
    for cell in (cell for row in rows for cell in row):
        for letter in cell:
            letters.remove(letter)  # raises if it is not there


def test_a_table_changes_its_form_where_it_would_be_cut_off():
    table = _output.plain_table()
    cells = ("alpha", "1234.56", "beta", "0.25", "gamma")
    for cell in cells:
        table.add_column(cell[0], no_wrap=True)
    table.add_row(*cells)
    forms = []
    for width in range(12, 60):
        file = io.StringIO()
        Console(file=file, width=width).print(table)
        shown = file.getvalue()
        assert all(cell in shown for cell in cells), width
        forms.append("a alpha" not in shown and "1 1234.56" not in shown)
    assert forms == sorted(forms)  # stacked, and from some width on side by side
    assert forms.index(True) + 12 == sum(map(len, cells)) + 2 * len(cells)


def test_a_table_that_is_too_wide_is_stacked_with_its_headings():
    table = _output.plain_table("title", caption="caption")
    for heading in ("name", "median, us", "", "ratio"):
        table.add_column(heading, no_wrap=True)
    table.add_row("first [b]one[/b]", "1234.56", Text("a [text]"), "0.5")
    file = io.StringIO()
    Console(file=file, width=24).print(table)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines == [
        "title",
        "",
        "first one",
        "  median, us 1234.56, a",
        "  [text], ratio 0.5",
        "",
        "caption",
        "",
    ]


def test_json_has_no_numbers_that_json_lacks(capsys):
    _output.print_json({"a": [float("nan"), (float("inf"), 1.5)], "é": "\x1b"})
    text = capsys.readouterr().out
    assert text.isascii()
    assert json.loads(text) == {"a": [None, [None, 1.5]], "é": "\x1b"}


def test_json_to_standard_output_or_to_a_file(tmp_path, capsys):
    path = tmp_path / "[b]a.json"
    assert not _output.console_beside(path).stderr
    _output.write_json(path, {"a": 1}, _output.console_beside(path))
    assert json.loads(path.read_text()) == {"a": 1}
    assert capsys.readouterr().out == f"written to {path}\n"
    console = _output.console_beside(_output.Path("-"))
    console.print("a table")
    _output.write_json(_output.Path("-"), {"a": 1}, console)
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ({"a": 1}, "a table\n")
    with pytest.raises(FileNotFoundError):
        _output.console_beside(tmp_path / "none" / "a.json")


@given(st.text(), st.integers(4, 30))
def test_what_is_printable(text, limit):
    shown = _output.printable(text, limit)
    assert shown.isprintable()
    assert len(shown) <= limit
    if text.isprintable() and len(text) <= limit:
        assert shown == text


@given(st.integers(0, 2**60))
def test_byte_counts_in_tables(nbytes):
    shown = _output.short_nbytes(nbytes)
    number, unit = shown.split()
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].index(unit)
    assert float(number) * scale == pytest.approx(nbytes, rel=0.0051, abs=0.5)
    assert len(shown) <= 8 or nbytes >= 1000 * 1024**4
    assert "e" not in number


def test_a_spinner_is_for_terminals_only(capsys, monkeypatch):
    with _output.progress("importing"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with _output.progress("importing"):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert "importing" in err


def test_a_missing_extra_is_named_and_a_fault_of_ours_is_not_hidden():
    with (
        pytest.raises(
            errors.BackendError, match=r"gpuarena top needs .*'gpuarena\[cli,metrics\]'.*no_such_library"
        ),
        _output.needs("metrics", "top"),
    ):
        import no_such_library  # noqa: F401
    with pytest.raises(ModuleNotFoundError), _output.needs("metrics", "top"):
        import gpuarena.no_such_module  # noqa: F401


def test_a_device_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(errors.BackendError, match=r"pip install 'gpuarena\[torch\]'"):
        _output.usable_device(None)


# -------------------------------------------------------------------------------------------------------- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_for_shells(run, capsys, monkeypatch, shell):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert run(cli.app, "--show-completion", shell) == 0
    assert f"_GPUARENA_COMPLETE=complete_{shell}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("gpuarena in", {"info"}),
        ("gpuarena bench de", {"decode"}),
        ("gpuarena info --js", {"--json"}),
        ("gpuarena size qwen3", {"qwen3-0.6b", "qwen3-8b"}),
        ("gpuarena size ./", set()),  # the shell knows its files
    ],
)
def test_completing(run, capsys, monkeypatch, words, expected):
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    monkeypatch.setenv("_GPUARENA_COMPLETE", "complete_bash")
    assert run(cli.app) == 0
    assert set(capsys.readouterr().out.split()) == expected


def test_names_of_models_are_completed_without_transformers():
    code = "import sys; from gpuarena.cli.size import complete_model; print(complete_model('gpt2'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['gpt2'] False"


# -------------------------------------------------------------------------------------------------------------- size


@pytest.mark.parametrize(
    ("name", "said", "unsaid"),
    [
        ("{tmp}/models/qwen", ["models has Qwen2", "built in: qwen3-8b"], []),
        ("{tmp}/modles/qwen2/config.json", ["no file or folder", "{tmp} has models"], []),
        ("{tmp}/a/b/c", ["{tmp} has no a", "built in are deepseek-v3, "], []),
        ("{tmp}/nothing/Qwen2.5-1.5B", ["close to a model that is built in: qwen2.5-1.5b"], ["deepseek"]),
        ("{tmp}/\x1b[2J.json", ["\\x1b[2J"], ["\x1b"]),
    ],
)
def test_a_path_at_which_there_is_nothing_says_what_may_be_meant(tmp_path, name, said, unsaid):
    from gpuarena.cli.size import _check_there

    (tmp_path / "models" / "Qwen2").mkdir(parents=True)
    with pytest.raises(errors.ArgumentError) as caught:
        _check_there(name.format(tmp=tmp_path))
    for part in said:
        assert part.format(tmp=tmp_path) in str(caught.value)
    for part in unsaid:
        assert part not in str(caught.value)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-1.5B", "{tmp}", "x" * 5000])
def test_names_and_paths_that_are_there_are_not_looked_into(tmp_path, name):
    from gpuarena.cli.size import _check_there

    _check_there(name.format(tmp=tmp_path))
