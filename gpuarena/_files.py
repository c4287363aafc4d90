"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO, Any

__all__ = ["replacing"]


@contextlib.contextmanager
def replacing(path: Any, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a new file that takes the place of `path` when the block ends, and is gone if it raises.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "figures.txt"
    >>> with replacing(path) as file:
    ...     _ = file.write("whole")
    >>> path.read_text()
    'whole'

    An old file stays as it was until then, also when the process is interrupted.

    Parameters
    ----------
    path : str or path
        Its folder must be there.
    mode : {"w", "wb"}
        Text is written in UTF-8, line ends as they are.
    """
    path = os.fspath(path)
    temporary = os.path.join(os.path.dirname(path) or ".", f".gpuarena-{os.urandom(8).hex()}.tmp")
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    with open(temporary, mode.replace("w", "x"), **text) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a crash of the system could leave the new name with no contents
            file.close()  # before the exchange, as some systems want it
            os.replace(temporary, path)
        except BaseException:
            file.close()
            os.unlink(temporary)
            raise
