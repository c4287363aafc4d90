import builtins
import socket
import threading
import urllib.request

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gpuarena import Arena, errors
from gpuarena.observe import AddressError, serve
from gpuarena.observe.metrics import ArenaCollector


def scrape(*arenas):
    registry = CollectorRegistry()
    registry.register(ArenaCollector(*arenas))
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_shows_the_figures_of_the_moment():
    arena = Arena(4096, name="a")
    labels = (("arena", "a"), ("device", "cpu"))
    with arena.scope():
        arena.alloc(100, "uint8", label="mask")
        arena.alloc(8, "uint8")
        inside = scrape(arena)
    after = scrape(arena)
    assert inside["gpuarena_used_bytes", labels] == 108
    assert inside["gpuarena_padding_bytes", labels] == 156
    assert inside["gpuarena_fragmentation_ratio", labels] == pytest.approx(156 / 264)
    assert inside["gpuarena_label_bytes", (*labels, ("label", "mask"))] == 100
    assert after["gpuarena_used_bytes", labels] == 0
    assert after["gpuarena_allocations_total", labels] == 2
    assert after["gpuarena_freed_bytes_total", labels] == 108
    assert after["gpuarena_peak_bytes", labels] == 264


def test_a_failed_request_is_counted():
    arena = Arena(64, name="a")
    with pytest.raises(errors.OutOfMemoryError):
        arena.alloc(65, "uint8")
    labels = (("arena", "a"), ("device", "cpu"))
    assert scrape(arena)["gpuarena_failed_allocations_total", labels] == 1


def test_hostile_names_and_labels_are_escaped():
    arena = Arena(4096, name='a"} 1\n# TYPE')
    arena.alloc(1, "uint8", label='x"\n\\')
    values = scrape(arena)
    assert any(dict(labels).get("label") == 'x"\n\\' for _, labels in values)


def test_arenas_that_are_gone_or_closed_are_left_out():
    one, two, three = Arena(64, name="one"), Arena(64, name="two"), Arena(64, name="three")
    collector = ArenaCollector(one, two, three)
    registry = CollectorRegistry()
    registry.register(collector)
    one.close()
    del two
    text = generate_latest(registry).decode()
    assert 'arena="three"' in text
    assert 'arena="one"' not in text
    assert 'arena="two"' not in text


def test_arenas_without_a_name_of_their_own_are_refused():
    with pytest.raises(errors.ArgumentError, match="no name"):
        ArenaCollector(Arena(64))
    with pytest.raises(errors.ArgumentError, match="same name"):
        ArenaCollector(Arena(64, name="a"), Arena(64, name="a"))
    with pytest.raises(errors.ArgumentTypeError):
        ArenaCollector("a")


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(errors.BackendError, match=r"gpuarena\[metrics\]"):
        ArenaCollector(Arena(64, name="a"))


# ------------------------------------------------------------------------------------------------------------- serve


def read(server):
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(server.url, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


def test_a_server_answers_with_the_figures_of_the_moment_until_it_is_closed():
    arena = Arena(4096, name="a")
    with serve(arena) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        assert 'gpuarena_used_bytes{arena="a",device="cpu"} 0.0' in read(server)
        arena.alloc(100, "uint8")
        assert 'gpuarena_used_bytes{arena="a",device="cpu"} 100.0' in read(server)
        assert not server.closed
    assert server.closed
    server.close()
    with pytest.raises(OSError):
        read(server)
    assert arena.stats.used == 100
    with serve(arena, port=server.port) as again:  # the port was given back
        assert again.port == server.port


def test_servers_are_apart_from_each_other_and_from_the_metrics_of_the_process():
    one, two = Arena(64, name="one"), Arena(64, name="two")
    mine = Gauge("of_the_process", "something else")
    before = generate_latest(REGISTRY)
    try:
        with serve(one) as first, serve(two) as second, serve(one, two) as both:
            assert len({first.port, second.port, both.port}) == 3
            names = [
                {name for name in ('arena="one"', 'arena="two"', "of_the_process") if name in read(server)}
                for server in (first, second, both)
            ]
            assert b"gpuarena" not in generate_latest(REGISTRY)
        assert names == [{'arena="one"'}, {'arena="two"'}, {'arena="one"', 'arena="two"'}]
        assert before.count(b"\n") == generate_latest(REGISTRY).count(b"\n")
    finally:
        REGISTRY.unregister(mine)


def test_arenas_that_are_gone_or_closed_leave_a_server():
    one, two = Arena(64, name="one"), Arena(64, name="two")
    with serve(one, two) as server:
        one.close()
        assert 'arena="one"' not in read(server)
        assert 'arena="two"' in read(server)
        del two
        assert "arena=" not in read(server)


def test_a_server_reads_while_the_arena_is_used():
    arena = Arena(1 << 16, name="a")
    stop = threading.Event()
    faults = []

    def use():
        while not stop.is_set():
            with arena.scope():
                for n in range(1, 20):
                    arena.alloc(n, "uint8", label=str(n % 3))

    def look(server):
        try:
            for _ in range(10):
                families = {
                    family.name: family.samples for family in text_string_to_metric_families(read(server))
                }
                (used,) = families["gpuarena_used_bytes"]
                (available,) = families["gpuarena_available_bytes"]
                (padding,) = families["gpuarena_padding_bytes"]
                assert used.value + padding.value + available.value == 1 << 16  # all of one moment
        except BaseException as error:
            faults.append(error)

    with serve(arena) as server:
        user = threading.Thread(target=use)
        lookers = [threading.Thread(target=look, args=(server,)) for _ in range(3)]
        for thread in (user, *lookers):
            thread.start()
        for thread in lookers:
            thread.join()
        stop.set()
        user.join()
    assert faults == []


@pytest.mark.parametrize("addr", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_the_address_leads_to_the_server(addr):
    arena = Arena(64, name="a")
    try:
        server = serve(arena, addr=addr)
    except AddressError:
        if ":" not in addr:
            raise
        pytest.skip("no IPv6")
    with server:
        assert server.addr == addr
        assert 'arena="a"' in read(server)


def test_a_port_that_is_taken():
    arena = Arena(64, name="a")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            AddressError, match=f"port {port}: Address already in use; port=0 takes"
        ) as caught:
            serve(arena, port=port)
    assert (caught.value.addr, caught.value.port) == ("127.0.0.1", port)
    assert isinstance(caught.value, (errors.ArenaError, OSError))


@pytest.mark.parametrize("addr", ["203.0.113.7", "no host", "a" * 70 + ".b", ""])
def test_an_address_that_is_not_this_machine_s(addr):
    with pytest.raises(AddressError, match="cannot serve on"):
        serve(Arena(64, name="a"), addr=addr)


@pytest.mark.parametrize(
    ("arguments", "options", "kind"),
    [
        ([], {}, errors.ArgumentError),
        (["a"], {}, errors.ArgumentTypeError),
        (None, {"port": -1}, errors.ArgumentError),
        (None, {"port": 65536}, errors.ArgumentError),
        (None, {"port": True}, errors.ArgumentTypeError),
        (None, {"port": "80"}, errors.ArgumentTypeError),
        (None, {"addr": 3}, errors.ArgumentTypeError),
    ],
)
def test_what_cannot_be_served_is_refused(arguments, options, kind):
    arena = Arena(64, name="a")
    n_threads = threading.active_count()
    with pytest.raises(kind):
        serve(*([arena] if arguments is None else arguments), **options)
    assert threading.active_count() == n_threads


def test_closing_in_a_forked_child_does_not_wait_for_a_thread_that_is_not_there(monkeypatch):
    with serve(Arena(64, name="a")) as server:
        with monkeypatch.context() as patch:
            patch.setattr(server, "_httpd", forked := Forked())
            patch.setattr(server, "_thread", threading.Thread())  # as it looks in a child: not alive
            server.close()
        assert forked.calls == ["server_close"]
        server._closed = False


class Forked:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda: self.calls.append(name)
