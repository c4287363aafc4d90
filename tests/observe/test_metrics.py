import builtins

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gpuarena import Arena, errors
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
