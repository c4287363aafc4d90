"""``gpuarena top``: the figures of another process, read over HTTP."""

from __future__ import annotations

import http.server
import importlib
import json
import socket
import threading
import time
import types

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("prometheus_client")

from typer.testing import CliRunner

from gpuarena import Arena, errors
from gpuarena.cli import _scrape, app
from gpuarena.observe import serve

top = importlib.import_module("gpuarena.cli.top")  # the package has the command under this name


def run(*arguments, **env):
    return CliRunner().invoke(app, ["top", *map(str, arguments)], env={"COLUMNS": "80", **env})


@pytest.fixture
def answer():
    """Serve texts one after the other, the last one again and again; return the address."""
    servers = []

    def serve_texts(*texts, status=200, delay=0.0):
        left = list(texts)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                time.sleep(delay)
                body = left.pop(0) if len(left) > 1 else left[0]
                try:
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(body if isinstance(body, bytes) else body.encode())
                except OSError:  # the reader has given up
                    pass

            def log_message(self, *arguments):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"127.0.0.1:{server.server_port}"

    yield serve_texts
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def unused_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def sample(name, value, arena="a"):
    return f'gpuarena_{name}{{arena="{arena}",device="cpu"}} {value}\n'


def test_the_figures_are_those_of_the_arenas():
    one, two = Arena(4096, name="one"), Arena(8192, name="two")
    one.alloc(100, "uint8", label="mask")
    one.alloc(7, "uint8")
    two.alloc(4000, "uint8", label="keys")
    with pytest.raises(errors.OutOfMemoryError):
        two.alloc(5000, "uint8")
    with serve(one, two) as server:
        done = run(server.url, "--once", "--json")
        shown = run(server.port, "--once").stdout
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["url"] == server.url
    assert [figures["arena"] for figures in found["arenas"]] == ["one", "two"]
    for arena, figures in zip((one, two), found["arenas"], strict=True):
        stats = arena.stats
        for field in (
            "capacity", "used", "padding", "available", "committed", "peak", "n_regions", "fragmentation",
            "n_allocs_total", "n_failed", "bytes_requested_total", "bytes_freed_total",
        ):  # fmt: skip
            assert figures[field] == pytest.approx(getattr(stats, field)), field
        assert figures["by_label"] == {label or "": nbytes for label, nbytes in arena.by_label().items()}
        assert figures["device"] == "cpu"
        assert figures["allocs_per_s"] is None
    for part in ("one cpu", "mask", "(no label)", "107 B", "4 KiB", "3.91 KiB", "59%"):
        assert part in shown
    row = next(line for line in shown.splitlines() if line.lstrip().startswith("two"))
    assert row.split()[-2:] == ["1", "1"]  # regions and failed; there is no rate yet


def test_rates_are_of_what_was_counted_between_two_readings(answer, monkeypatch):
    clock = iter([100.0, 102.0, 103.0, 104.0, 108.0])
    monkeypatch.setattr(_scrape, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    counts = [10, 60, 20, 20]
    texts = [sample("allocations_total", n) + sample("freed_bytes_total", 3 * n) for n in counts]
    reader = _scrape.Reader(_scrape.full_url(answer(*texts, sample("allocations_total", 5, arena="b"))))
    rates = [reader.read()[0]["allocs_per_s"] for _ in range(5)]
    assert rates == [None, 25.0, None, 0.0, None]  # fewer than before: it is another arena of that name


def test_it_ends_well_when_the_process_does():
    arena = Arena(4096, name="a")
    server = serve(arena)
    threading.Timer(1.0, server.close).start()
    done = run(server.url, "--interval", "0.1", "--json")
    assert done.exit_code == 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) > 2
    assert lines[0]["arenas"][0]["allocs_per_s"] is None
    assert lines[1]["arenas"][0]["allocs_per_s"] == 0.0
    assert done.stderr.startswith(f"ended: {server.url} does not answer: ")
    assert done.stderr.count("\n") == 1


def test_on_a_terminal_the_table_is_drawn_anew_and_stays(answer):
    texts = [sample("used_bytes", 512) + sample("capacity_bytes", 1024)] * 3 + ["not metrics {"]
    done = run(answer(*texts), "--interval", "0.1", FORCE_COLOR="1", TERM="xterm")
    assert isinstance(done.exception, _scrape.NotMetricsError)
    assert done.stdout.count("512 B") >= 3
    assert "\x1b[?25h" in done.stdout  # the cursor is back


def test_ctrl_c_is_how_one_leaves(answer, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "time", types.SimpleNamespace(sleep=interrupt, strftime=time.strftime))
    done = run(answer(sample("used_bytes", 512)))
    assert (done.exit_code, done.stderr) == (0, "")
    assert "512 B" in done.stdout


def test_a_process_that_was_never_there(monkeypatch):
    done = run(unused_port(), "--once")
    assert isinstance(done.exception, _scrape.NoAnswerError)
    assert "does not answer: Connection refused" in str(done.exception)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("gone", 404, "answers 404 Not Found: no figures are served there"),
        ("busy", 503, "answers 503"),
        ("<html><body>hello</body></html>", 200, "not in the format of Prometheus"),
        (b"\xff\xfe", 200, "not in the format of Prometheus"),
        ('gpuarena_used_bytes{arena="a"} many\n', 200, "not in the format of Prometheus"),
    ],
)
def test_what_answers_something_else(answer, body, status, message):
    done = run(answer(body, status=status), "--once")
    assert isinstance(done.exception, errors.ArenaError)
    assert message in str(done.exception)


def test_what_speaks_no_http():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet():
            connection, _ = listener.accept()
            connection.sendall(b"SSH-2.0-x\x1b[2J\r\n")
            connection.close()

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        done = run(listener.getsockname()[1], "--once")
        thread.join()
    assert isinstance(done.exception, _scrape.NoAnswerError)


def test_a_process_that_is_busy_is_waited_for(answer):
    reader = _scrape.Reader(_scrape.full_url(answer("", delay=1.0)), timeout_s=0.1)
    with pytest.raises(_scrape.NoAnswerError, match=r"does not answer in 0\.1 s") as caught:
        reader.read()
    assert caught.value.waiting


def test_a_late_answer_is_told_and_the_figures_stay(answer, monkeypatch):
    readings = iter([[{"arena": "a", "device": "", "by_label": {}, "used": 5}], True, False])

    def read(self):
        one = next(readings)
        if isinstance(one, bool):
            raise _scrape.NoAnswerError("late" if one else "gone", waiting=one)
        return one

    monkeypatch.setattr(_scrape.Reader, "read", read)
    done = run(1, "--interval", "0.1", "--json")
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr.splitlines()[0] == "late"
    assert done.stderr.splitlines()[1].startswith("ended: gone; the last figures are of ")


def test_other_metrics_and_unknown_figures_are_left_out(answer):
    text = (
        "# HELP python_info about\n# TYPE python_info gauge\n"
        'python_info{version="3.13"} 1\nup 1\n'
        + sample("used_bytes", "1.5e3")
        + sample("figure_of_tomorrow", 3)
        + 'gpuarena_used_bytes{pool="x"} 3\n'
    )
    assert _scrape.parse(text) == [{"arena": "a", "device": "cpu", "by_label": {}, "used": 1500}]
    assert "no arenas" in run(answer("up 1\n"), "--once").stdout


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-5"])
def test_absurd_figures_are_shown_and_do_no_harm(answer, value):
    names = ("used_bytes", "padding_bytes", "capacity_bytes", "peak_bytes", "regions", "fragmentation_ratio")
    text = "".join(sample(name, value) for name in (*names, "failed_allocations_total", "allocations_total"))
    text += f'gpuarena_label_bytes{{arena="a",device="cpu",label="x"}} {value}\n'
    for more in ((), ("--json",)):
        done = run(answer(text), "--once", *more)
        assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["arenas"][0]["used"] in (None, -5)


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_hostile_names_and_labels_stay_text(columns):
    arena = Arena(4096, name="[red]a\x1b[2J")
    arena.alloc(9, "uint8", label="\x07:smile: [/]\u202e\nx" + "y" * 500)
    with serve(arena) as server:
        done = run(server.url, "--once", COLUMNS=columns)
    assert done.exit_code == 0
    assert done.stdout.replace("\n", "").isprintable()
    assert all(len(line) <= int(columns) for line in done.stdout.splitlines())
    if columns == "200":
        assert "[red]a\\x1b[2J cpu" in done.stdout
        assert "\\x07:smile: [/]\\u202e\\nx" in done.stdout


def test_only_ascii_where_nothing_else_can_be_shown(answer):
    text = sample("used_bytes", 512) + sample("capacity_bytes", 1024) + sample("peak_bytes", 768)
    address = answer(text)
    done = CliRunner(charset="ascii").invoke(app, ["top", address, "--once"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert done.stdout.isascii()
    assert "####++.." in done.stdout


@pytest.mark.parametrize(
    ("taken", "peak", "capacity", "expected"),
    [
        (0, 0, 100, "........"),
        (1, 1, 100, "#......."),
        (50, 75, 100, "####++.."),
        (99, 99, 100, "#######."),
        (100, 100, 100, "########"),
        (50, 0, 100, "####...."),
        (200, 300, 100, "########"),
        (5, 5, 0, ""),
        (float("nan"), 50, 100, "........"),
    ],
)
def test_bars(taken, peak, capacity, expected):
    assert top._bar(taken, peak, capacity, 8, "#+.").plain == expected


def test_the_most_labels_of_an_arena_are_added_up(answer):
    text = sample("used_bytes", 100) + "".join(
        f'gpuarena_label_bytes{{arena="a",device="cpu",label="l{n}"}} {n}\n' for n in range(1, 13)
    )
    shown = run(answer(text), "--once").stdout
    assert "l12" in shown
    assert "l4" not in shown
    line = next(line for line in shown.splitlines() if "4 labels more" in line)
    assert line.split()[-2:] == ["10", "B"]


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "file://localhost/etc/passwd",
        "ftp://host/x",
        "",
        "http://",
        "host:port",
        "host:99999",
        "a b",
        "http://h\x1b/",
    ],
)
def test_what_is_no_address_is_wrong_usage(url):
    done = run(url, "--once")
    assert done.exit_code == 2
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "often"])
def test_an_interval_that_is_none_is_wrong_usage(interval):
    assert run("1", "--interval", interval, "--once").exit_code == 2
