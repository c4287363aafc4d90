"""``gpuarena info``: what it tells is so, and nothing makes it fail."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import types

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import gpuarena
from gpuarena.cli import _survey, app


def run(*arguments, **env):
    return CliRunner().invoke(app, ["info", *arguments], catch_exceptions=False, env=env)


def figures():
    done = run("--json")
    assert done.exit_code == 0
    return json.loads(done.stdout)


def backend(found, name, device=...):
    (one,) = [
        one
        for one in found["backends"]
        if one["backend"] == name and (device is ... or one["device"] == device)
    ]
    return one


@pytest.fixture
def without(monkeypatch):
    """Let libraries not be installed."""

    def without(*names):
        real = _survey.importlib.util.find_spec
        for name in names:
            for module in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
                monkeypatch.delitem(sys.modules, module)
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(
            _survey.importlib.util, "find_spec", lambda name, *a: None if name in names else real(name, *a)
        )

    return without


@pytest.fixture
def few(monkeypatch):
    """Look at NumPy only, which takes no time."""
    monkeypatch.setattr(_survey, "_LIBRARIES", ("numpy",))
    for of in ("_torch_devices", "_cupy_devices"):
        monkeypatch.setattr(_survey, of, lambda libraries: [])
    for of in ("_torch_cuda", "_cupy_cuda"):
        monkeypatch.setattr(_survey, of, lambda libraries: {"runtime": None, "driver": None})
    monkeypatch.setattr(_survey, "_candidates", lambda devices: [("host", None)])


def test_with_nothing_but_the_extra_of_the_command_line(without):
    without("torch", "cupy", "transformers")
    found = figures()
    assert found["gpuarena"] == gpuarena.__version__
    assert found["libraries"]["numpy"] == {"version": np.__version__, "installed": True, "problem": None}
    assert found["libraries"]["torch"] == {"version": None, "installed": False, "problem": "not installed"}
    assert backend(found, "host") == {
        "backend": "host", "device": "cpu", "works": True, "problem": None, "install": None,
    }  # fmt: skip
    assert backend(found, "torch", "cpu") == {
        "backend": "torch", "device": "cpu", "works": False, "problem": "torch is not installed",
        "install": "pip install 'gpuarena[torch]'",
    }  # fmt: skip
    assert backend(found, "virtual:cupy")["install"] == "pip install 'gpuarena[cupy13]'"
    assert found["devices"] == []
    text = run(COLUMNS="80").stdout
    assert "torch is not installed: pip install 'gpuarena[torch]'" in text
    assert "…" not in text


def test_with_torch():
    torch = pytest.importorskip("torch")
    found = figures()
    assert found["libraries"]["torch"]["version"] == torch.__version__
    assert backend(found, "torch", "cpu")["works"]
    assert backend(found, "torch", "pinned")["works"] == torch.cuda.is_available()
    assert len([one for one in found["devices"] if one["library"] == "torch"]) == (
        torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    )
    assert found["cuda"]["torch"]["runtime"] == torch.version.cuda
    assert {one["backend"] for one in found["backends"]} == {
        "host", "torch", "cupy", "virtual", "virtual:torch", "virtual:cupy",
    }  # fmt: skip
    for one in found["backends"]:
        assert one["works"] == (one["problem"] is None)
        assert "\n" not in (one["problem"] or "")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("raise RuntimeError('no [driver] \\x1b[2J\\nsecond line')", "RuntimeError: no [driver] \x1b[2J"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "E: (no message)"),
        ("1 +", "SyntaxError: invalid syntax (__init__.py, line 2)"),
    ],
)
def test_a_library_that_raises_when_it_is_imported_is_shown_as_such(
    without, monkeypatch, tmp_path, source, problem
):
    without("torch", "transformers")
    for module in [one for one in sys.modules if one == "cupy" or one.startswith("cupy.")]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(f"print('on standard output')\n{source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = figures()
    assert found["libraries"]["cupy"]["problem"] == problem
    assert found["libraries"]["cupy"]["installed"]
    assert not backend(found, "cupy", None)["works"]
    assert backend(found, "cupy", None)["install"] is None
    assert backend(found, "host")["works"]
    done = run(COLUMNS="80")
    assert done.exit_code == 0
    assert "\x1b[2J" not in done.stdout
    sys.modules.pop("cupy", None)


def test_devices_that_raise_when_they_are_asked(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("device lost\nmore")

    accelerator = types.SimpleNamespace(
        current_accelerator=lambda check_available: types.SimpleNamespace(type="xyz"), device_count=lambda: 2
    )
    xyz = types.SimpleNamespace(
        get_device_name=lambda index: f"card {index}",
        mem_get_info=lambda index: (10, 100) if index == 0 else broken(),
    )
    torch = types.SimpleNamespace(accelerator=accelerator, xyz=xyz)
    monkeypatch.setitem(sys.modules, "torch", torch)
    libraries = {"torch": {"problem": None, "installed": True}}
    good, bad = _survey._torch_devices(libraries)
    assert (good["device"], good["name"], good["free_nbytes"], good["total_nbytes"]) == (
        "xyz:0",
        "card 0",
        10,
        100,
    )
    assert (bad["device"], bad["problem"]) == ("xyz:1", "RuntimeError: device lost")
    accelerator.device_count = broken
    assert _survey._torch_devices(libraries)[0]["problem"] == "RuntimeError: device lost"
    tried = list(_survey._candidates([good, bad]))
    for one in (("torch", "xyz:0"), ("virtual:torch", "xyz:1"), ("torch", "cpu"), ("torch", "pinned")):
        assert one in tried


def test_a_backend_that_reads_back_something_else_does_not_work(few, monkeypatch):
    class Forgetful(gpuarena.Arena):
        def alloc(self, *arguments, **options):
            region = super().alloc(*arguments, **options)
            region.array[3] = 99
            return ReadOnly(region)

    class ReadOnly:
        def __init__(self, region):
            self.array = region.array

        def __setitem__(self, place, value):
            pass

    monkeypatch.setattr(_survey.gpuarena, "Arena", Forgetful)
    one = backend(figures(), "host")
    assert not one["works"]
    assert "read back [255, 255, 255, 99, " in one["problem"]


def test_a_backend_that_raises_says_why_in_one_line(few, monkeypatch):
    def refuse(*arguments, **options):
        raise ZeroDivisionError("by zero\nmore")

    monkeypatch.setattr(_survey.gpuarena, "Arena", refuse)
    assert backend(figures(), "host")["problem"] == "ZeroDivisionError: by zero"


def test_growing_device_memory_without_its_bindings_names_the_extra(monkeypatch):
    monkeypatch.setattr(_survey, "_has", lambda module: False)
    found = _survey._try("virtual:torch", "cuda:99", {"torch": {"problem": None, "installed": True}})
    assert not found["works"]
    assert found["install"] == "pip install 'gpuarena[cuda]'"


def test_warnings_are_told_and_do_not_end_it(few, monkeypatch):
    def warn(libraries):
        import warnings

        warnings.warn("the driver is too old\nmore", UserWarning, stacklevel=1)
        warnings.warn("something is deprecated", DeprecationWarning, stacklevel=1)
        return []

    monkeypatch.setattr(_survey, "_torch_devices", warn)
    assert figures()["warnings"] == ["the driver is too old"]
    assert "warning: the driver is too old" in run().stdout


def test_extras_are_those_that_the_package_declares():
    """The oracle is `packaging`, which pip reads the same texts with."""
    requirements = pytest.importorskip("packaging.requirements")
    declared = importlib.metadata.metadata("gpuarena").get_all("Provides-Extra")
    expected = {}
    for extra in set(declared) - {"all", "docs", "mutation", "test"}:
        lacking = set()
        for text in importlib.metadata.requires("gpuarena"):
            one = requirements.Requirement(text)
            if one.marker is None or not one.marker.evaluate({"extra": extra}):
                continue
            if one.marker.evaluate({"extra": ""}) or one.name == "gpuarena":
                continue
            try:
                met = one.specifier.contains(importlib.metadata.version(one.name), prereleases=True)
            except importlib.metadata.PackageNotFoundError:
                met = False
            if not met:
                lacking.add(f"{one.name}{one.specifier}")
        expected[extra] = lacking
    found = _survey._extras()
    assert {extra: set(one["missing"]) for extra, one in found.items()} == expected
    assert all(one["installed"] == (not one["missing"]) for one in found.values())


def test_extras_of_extras_and_versions_that_are_too_old(monkeypatch):
    texts = [
        "numpy>=2.0",
        "torch>=2.11; extra == 'torch'",
        'gpuarena[cli,torch] ; extra == "demo"',
        "rich (>=13) ; extra == 'cli'",
        "gguf>=0.10; (sys_platform == 'linux') and extra == 'demo'",
        "gpuarena[demo]; extra == 'cli'",  # a circle
    ]
    versions = {"torch": "2.9.1+cu130", "rich": "13", "numpy": "2.0"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    metadata = types.SimpleNamespace(get_all=lambda key: ["cli", "demo", "torch", "test"])
    monkeypatch.setattr(_survey.importlib.metadata, "requires", lambda name: texts)
    monkeypatch.setattr(_survey.importlib.metadata, "metadata", lambda name: metadata)
    monkeypatch.setattr(_survey.importlib.metadata, "version", version)
    missing = {extra: one["missing"] for extra, one in _survey._extras().items()}
    assert missing["torch"] == ["torch>=2.11"]
    assert sorted(missing["demo"]) == ["gguf>=0.10", "torch>=2.11"]
    versions["torch"] = "2.11.0"
    assert _survey._extras()["torch"]["installed"]


def test_memory_of_the_host():
    memory = _survey._host_memory()
    if sys.platform == "linux":
        assert 0 < memory["available_nbytes"] <= memory["total_nbytes"]
        assert memory["limit_nbytes"] is None or memory["limit_nbytes"] < memory["total_nbytes"]


@pytest.mark.parametrize(("number", "text"), [(13020, "13.2"), (12040, "12.4"), (0, None)])
def test_versions_of_cuda(number, text):
    assert _survey._cuda_version(number) == text
