"""The figures of arenas over HTTP, for Prometheus and for ``gpuarena top``.

They are served by the process that has the arenas. Attaching to a process from outside would need the right to trace
it, which containers do not give, and would stop it for each look; an endpoint costs nothing until somebody reads it,
and what reads it (Prometheus, Grafana, alerts) keeps a history, too.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from typing import TYPE_CHECKING, Any

from gpuarena.errors import ArenaError, ArgumentError, ArgumentTypeError, BackendError
from gpuarena.observe.metrics import ArenaCollector

if TYPE_CHECKING:
    from gpuarena.arena import Arena

__all__ = ["AddressError", "Server", "serve"]

#: Addresses that mean "all of this machine's" -> one of them, under which it reaches itself.
_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class AddressError(ArenaError, OSError):
    """Nothing can be served there: the port is taken or not allowed, or the address is not this machine's.

    Attributes
    ----------
    addr : str
    port : int
        What was asked for.
    """

    addr: str
    port: int


class Server:
    """An HTTP server in threads of its own, made by `serve`; a context manager.

    Attributes
    ----------
    addr : str
        The address that it listens on.
    port : int
        The port, also where any free one was asked for.
    url : str
        Where this machine reads the figures: what to give to ``gpuarena top``.
    """

    def __init__(self, httpd: Any, thread: threading.Thread, addr: str) -> None:
        self._httpd = httpd
        self._thread = thread
        self._closing = threading.Lock()
        self._closed = False
        self.addr = addr
        self.port: int = httpd.server_port
        host = _ALL.get(addr, addr)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Stop answering and give the port back; never raises, and may be called again.

        Answers that are under way are finished or dropped. The arenas are left as they are.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(OSError):
                if self._thread.is_alive():  # not in a forked child, where nobody would answer
                    self._httpd.shutdown()
                    self._thread.join()
                self._httpd.server_close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server {'closed' if self._closed else self.url}>"


def serve(*arenas: Arena, port: int = 0, addr: str = "127.0.0.1") -> Server:
    """Serve the figures of arenas over HTTP, in the format of Prometheus, until `Server.close`.

    >>> import urllib.request
    >>> from gpuarena import Arena
    >>> arena = Arena(1024, name="scratch")
    >>> with serve(arena) as server:
    ...     text = urllib.request.urlopen(server.url).read().decode()
    >>> 'gpuarena_capacity_bytes{arena="scratch",device="cpu"} 1024.0' in text
    True

    ``gpuarena top URL`` shows them live. The server runs in a daemon thread, which does not keep the process alive,
    also when nobody holds what is returned. It may be called several times; each server has its own port, and metrics
    that the process has registered elsewhere are neither shown nor touched. Each reading takes the arenas' locks for
    as long as `Arena.stats` does. The arenas are referred to weakly, and leave when they are closed or gone.

    A forked child inherits the arenas, not the server: call it again there.

    Parameters
    ----------
    *arenas : Arena
        One or more, each with a name of its own; of a cache ``cache.arena``.
    port : int
        0 takes any free port; see `Server.port`.
    addr : str
        The address to listen on. The default is reached from this machine only; ``"0.0.0.0"`` or ``"::"`` from
        everywhere, by everybody: there is no password.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        No arenas, no arena, one without a name, a name twice, or a port that is not from 0 to 65535.
    AddressError
        The port is taken or not allowed, or the address is not this machine's.
    BackendError
        prometheus_client is not installed (extra ``metrics``).
    """
    if not arenas:
        raise ArgumentError("serve needs at least one arena")
    if isinstance(port, bool) or not hasattr(port, "__index__"):
        raise ArgumentTypeError(f"port must be an integer, not {type(port).__name__}")
    port = operator.index(port)
    if not 0 <= port <= 65535:
        raise ArgumentError(f"port must be from 0 to 65535, not {port}")
    if not isinstance(addr, str):
        raise ArgumentTypeError(f"addr must be a text, not {type(addr).__name__}")
    collector = ArenaCollector(*arenas)
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(collector)
    try:
        started: Any = start_http_server(port, addr, registry)
    except (OSError, UnicodeError) as error:  # UnicodeError: no host has such a name
        reason = getattr(error, "strerror", None) or str(error)
        raise AddressError(
            f"cannot serve on {addr!r}, port {port}: {reason}{'; port=0 takes any free port' if port else ''}",
            addr=addr,
            port=port,
        ) from error
    if started is None:  # before 0.20
        raise BackendError(
            "serving needs prometheus_client 0.20 or later: pip install --upgrade 'gpuarena[metrics]'",
            backend="prometheus_client",
        )
    httpd, thread = started
    return Server(httpd, thread, addr)
