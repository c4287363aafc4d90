"""What the user sees while a model loads, and what not."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["download_bar", "quiet_libraries", "status"]


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Switch off the warnings, log lines and progress bars of loading, and put all as it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers  # noqa: F401  # sets up its logger, whose level is kept and restored here
        from tqdm.auto import tqdm  # type: ignore[import-untyped]  # has no annotations

        loggers = [
            logging.getLogger(name) for name in ("transformers", "huggingface_hub", "gguf", "accelerate")
        ]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        # All bars of these libraries are of this class or inherit from it; the one over the tensors of a GGUF file
        # obeys no switch of transformers.
        make_bar = tqdm.__init__
        tqdm.__init__ = lambda self, *args, **options: make_bar(self, *args, **{**options, "disable": True})
        try:
            yield
        finally:
            tqdm.__init__ = make_bar
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextlib.contextmanager
def status(console: Console | None, text: str) -> Iterator[None]:
    """Show `text` and a spinner while the block runs; nothing without a console."""
    if console is None:
        yield
        return
    with console.status(text):
        yield


@contextlib.contextmanager
def download_bar(console: Console | None, name: str, total_nbytes: int) -> Iterator[Callable[[int], None]]:
    """Show how far the download of `name` is; the block calls what it is given with the bytes so far."""
    if console is None:
        yield lambda nbytes: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"Downloading {name} from PyPI", total=total_nbytes)
        yield lambda nbytes: progress.update(task, completed=min(nbytes, total_nbytes))
