"""Files that are exchanged whole, and what is said of those that cannot be."""

import errno
import os
import stat
import threading

import pytest

from gpuarena._files import check_replaceable, replacing


def write(path, text, then=None):
    with replacing(path) as file:
        file.write(text)
        if then is not None:
            raise then


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_file_is_exchanged_when_the_block_ends(tmp_path, mode):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path, mode) as file:
        file.write("new\n" if mode == "w" else b"new\n")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_bytes() == b"new\n"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError, SystemExit])
def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(failure):
        write(path, "half", then=failure)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
def test_an_interrupt_while_it_is_exchanged(tmp_path, monkeypatch, call):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr(os, call, interrupt)
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write("new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_an_interrupt_right_after_the_exchange_does_not_lose_the_file(tmp_path, monkeypatch):
    real = os.replace

    def exchange_and_interrupt(*arguments):
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", exchange_and_interrupt)
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a.txt") as file:
        file.write("new")
    assert names(tmp_path) == ["a.txt"]


def test_a_disk_that_is_full_also_when_the_file_is_closed(tmp_path):
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    path = tmp_path / "a.bin"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError) as caught, replacing(path, "wb") as file:
            file.write(
                b"x" * 6000
            )  # stays in the buffer, which is written when the block ends, and when it is closed
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert names(tmp_path) == []


def test_permissions_are_kept_and_a_link_stays_a_link(tmp_path):
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to("a.txt")
    with replacing(link) as file:
        file.write("new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_what_is_no_file_is_written_to_and_not_exchanged(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    got = []
    reader = threading.Thread(target=lambda: got.append(path.read_text()), daemon=True)
    reader.start()
    check_replaceable(path)
    with replacing(path) as file:
        file.write("through")
    reader.join(timeout=30)
    assert got == ["through"]
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("none/a.txt", FileNotFoundError), (".", IsADirectoryError), ("x" * 300, OSError)],
)
def test_a_file_that_cannot_be_made_is_named_and_not_the_temporary_one(tmp_path, name, kind, check):
    path = tmp_path / name
    with pytest.raises(kind) as caught:
        check_replaceable(path) if check else write(path, "new")
    assert caught.value.filename == str(path)
    assert ".tmp" not in str(caught.value)
    assert " -> " not in str(caught.value)
    assert names(tmp_path) == []


def test_a_check_changes_nothing(tmp_path):
    path = tmp_path / "a.txt"
    check_replaceable(path)
    assert names(tmp_path) == []
    path.write_text("old")
    check_replaceable(path)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_errors_of_other_files_keep_their_names(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "a.txt"):
        (tmp_path / "other").read_text()
    assert caught.value.filename == str(tmp_path / "other")
    with pytest.raises(BrokenPipeError) as caught, replacing(tmp_path / "a.txt"):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    assert caught.value.filename is None
