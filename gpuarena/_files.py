"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import IO, Any

__all__ = ["check_replaceable", "replacing"]

#: What a full or failing disk answers to a write, which does not know the name of its file.
_WRITE_FAILURES = {errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC)}


@contextlib.contextmanager
def replacing(path: Any, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a new file that takes the place of `path` when the block ends, and is gone if it raises.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "figures.txt"
    >>> with replacing(path) as file:
    ...     _ = file.write("whole")
    >>> path.read_text()
    'whole'

    An old file stays as it was until then, also when the process is interrupted; the new one has its permissions.
    A link stays a link, and the file that it leads to is exchanged. What is no regular file (``/dev/stdout``, a
    named pipe) cannot be exchanged and is written to directly.

    Parameters
    ----------
    path : str or path
        Its folder must be there.
    mode : {"w", "wb"}
        Text is written in UTF-8, line ends as they are.

    Raises
    ------
    OSError
        The file cannot be made or written. Its ``filename`` is `path`, whichever file the system complained about.
    """
    path = os.fspath(path)
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    with _named(path):
        permissions = _permissions(path)
        if permissions is None:
            with open(path, mode, **text) as file:
                yield file
            return
        target = os.path.realpath(path)  # of a link, the file that it leads to
        temporary = _temporary(target)
        try:
            with open(temporary, mode.replace("w", "x"), **text) as file:
                yield file
                file.flush()
                if permissions:
                    os.chmod(temporary, permissions)
                os.fsync(file.fileno())  # or a crash of the system could leave the new name with no contents
            os.replace(temporary, target)  # closed before, as some systems want it
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # it was not made, or has taken its place already
                os.unlink(temporary)
            raise


def check_replaceable(path: Any) -> None:
    """Raise the `OSError` now that `replacing` would raise later, after hours of work; nothing is changed.

    >>> check_replaceable("/no/such/folder/figures.json")
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: '/no/such/folder/figures.json'
    """
    path = os.fspath(path)
    with _named(path):
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _permissions(path) is None:
            return
        temporary = _temporary(os.path.realpath(path))
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _temporary(target: str) -> str:
    return os.path.join(os.path.dirname(target), f".gpuarena-{os.urandom(8).hex()}.tmp")


def _permissions(path: str) -> int | None:
    """Return the permissions of the old file, 0 if there is none, None if there is something that is no file."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return 0
    return stat.S_IMODE(mode) if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else None


@contextlib.contextmanager
def _named(path: Any) -> Iterator[None]:
    """Let errors of the system name `path`, not the temporary file; leave those about other files alone."""
    try:
        yield
    except OSError as error:
        unnamed = error.filename is None and error.errno in {*_WRITE_FAILURES, errno.EISDIR}
        if unnamed or ".gpuarena-" in str(error.filename) or error.filename == os.path.realpath(path):
            error.filename = path
            with contextlib.suppress(AttributeError):
                del error.filename2  # the second name of an exchange; None would be printed
        raise
