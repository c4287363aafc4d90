"""Reading what `gpuarena.observe.serve` serves: figures of arenas, over HTTP."""

from __future__ import annotations

import http.client
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from gpuarena.errors import ArenaError
from gpuarena.observe.metrics import COUNTERS, GAUGES, LABEL_BYTES

__all__ = ["NoAnswerError", "NotMetricsError", "Reader", "full_url", "parse"]

#: Far more than the figures of a thousand arenas; what is longer is something else.
_MOST_NBYTES = 64 * 1024**2
#: Name of a sample -> field of `Stats`.
_FIELDS = {f"gpuarena_{name}": field for field, (name, _) in GAUGES.items()}
_FIELDS |= {f"gpuarena_{name}_total": field for field, (name, _) in COUNTERS.items()}
#: The key of a rate -> the counter that it comes from.
_RATES = {"allocs_per_s": "n_allocs_total", "freed_nbytes_per_s": "bytes_freed_total"}


class NoAnswerError(ArenaError, OSError):
    """Nobody answers at an address, or not with success; `waiting` says that an answer may still come."""

    waiting: bool


class NotMetricsError(ArenaError, ValueError):
    """What answered does not speak the format of Prometheus."""


def full_url(text: str) -> str:
    """Return the address that is meant; a port alone is one of this machine.

    >>> full_url("9464"), full_url("node7:9464"), full_url("http://[::1]:9464/other")
    ('http://127.0.0.1:9464/metrics', 'http://node7:9464/metrics', 'http://[::1]:9464/other')

    Raises
    ------
    ValueError
        It is no address of a web server.
    """
    if text.isascii() and text.isdigit():
        text = f"127.0.0.1:{text}"
    parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname or not text.isprintable() or " " in text:
        raise ValueError("it must be http://HOST:PORT, HOST:PORT or PORT")
    parts.port  # noqa: B018 - raises ValueError of what is no port
    return urllib.parse.urlunsplit(parts._replace(path="/metrics") if parts.path in ("", "/") else parts)


class Reader:
    """Reads an endpoint again and again, and knows what was counted in between.

    Parameters
    ----------
    url : str
    timeout_s : float
        How long to wait for an answer.
    """

    def __init__(self, url: str, *, timeout_s: float = 5.0) -> None:
        self.url = url
        self._timeout_s = timeout_s
        handlers = []
        if urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost"):
            handlers.append(urllib.request.ProxyHandler({}))  # no proxy reaches this machine's own ports
        self._opener = urllib.request.build_opener(*handlers)
        self._before: dict[tuple[str, str], dict[str, Any]] = {}
        self._read_at: float | None = None

    def read(self) -> list[dict[str, Any]]:
        """Return the figures of each arena; the rates are None at the first reading.

        Raises
        ------
        NoAnswerError, NotMetricsError
        """
        body = self._fetch()
        now = time.monotonic()
        try:
            arenas = parse(str(body, "utf-8"))
        except ValueError as error:
            raise NotMetricsError(
                f"{self.url} answers, but not in the format of Prometheus; is it what gpuarena.observe.serve gave?"
            ) from error
        seconds = None if self._read_at is None else now - self._read_at
        for one in arenas:
            before = self._before.get((one["arena"], one["device"]), {})
            for rate, counter in _RATES.items():
                one[rate] = _rate(before.get(counter), one.get(counter), seconds)
        self._before = {(one["arena"], one["device"]): one for one in arenas}
        self._read_at = now
        return arenas

    def _fetch(self) -> bytes:
        try:
            with self._opener.open(self.url, timeout=self._timeout_s) as answer:
                body: bytes = answer.read(_MOST_NBYTES + 1)
        except urllib.error.HTTPError as error:
            error.close()
            raise NoAnswerError(
                f"{self.url} answers {error.code} {error.reason}: no figures are served there", waiting=False
            ) from error
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            reason: Any = error.reason if isinstance(error, urllib.error.URLError) else error
            late = isinstance(reason, TimeoutError)
            said = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise NoAnswerError(
                f"{self.url} does not answer" + (f" in {self._timeout_s:g} s" if late else f": {said}"),
                waiting=late,
            ) from error
        if len(body) > _MOST_NBYTES:
            raise NotMetricsError(
                f"{self.url} answers with more than {_MOST_NBYTES} bytes, which are no figures"
            )
        return body


def parse(text: str) -> list[dict[str, Any]]:
    """Return the figures of each arena in a text of metrics: fields of `Stats`, and bytes ``by_label``.

    Metrics of other libraries are left out.

    Raises
    ------
    ValueError
        It is no text of metrics.
    """
    from prometheus_client.parser import text_string_to_metric_families

    arenas: dict[tuple[str, str], dict[str, Any]] = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if "arena" not in labels or not (name in _FIELDS or name == LABEL_BYTES):
                continue
            key = labels["arena"], labels.get("device", "")
            one = arenas.setdefault(key, {"arena": key[0], "device": key[1], "by_label": {}})
            number = int(value) if math.isfinite(value) and value == int(value) else value
            if name == LABEL_BYTES:
                one["by_label"][labels.get("label", "")] = number
            else:
                one[_FIELDS[name]] = number
    return list(arenas.values())


def _rate(before: float | None, now: float | None, seconds: float | None) -> float | None:
    if before is None or now is None or not seconds or now < before:  # less: another arena of that name
        return None
    return (now - before) / seconds
