"""Bind the page's socket, choose who may reach it, and serve it until it is stopped.

Requests are checked in `security` and handled in `app`.
"""

import asyncio
import ipaddress
import logging
import re
import secrets
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gigamask.errors import GigamaskError
from gigamask.plugins.serve.app import AppState, build
from gigamask.plugins.serve.security import TOKEN_COOKIE, SecurityMiddleware, SecurityPolicy
from gigamask.signals import STOP_SIGNALS, stop_signals_handled

MAX_CONNECTIONS = 512
"""Maximum number of connections; a browser opens six."""
HEAD_TIMEOUT_S = 10.0
"""Seconds within which the head of a request must arrive, else its connection is closed."""
SHUTDOWN_TIMEOUT_S = 3
"""Seconds that responses in progress have to finish when the server is stopped."""
ROOT_PATH = re.compile(r"(/[\w.~@:%+-]+)*/?")
"""A path without a query."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class TimedProtocol(H11Protocol):
    """A connection that is closed if the head of a request does not arrive in time.

    uvicorn itself waits without limit, so that idle connections would keep others out. And asyncio
    leaves Nagle's algorithm on for sockets that do not state their protocol, as those of
    `socket.create_server`: an answer would wait 40 ms for the client's delayed acknowledgment.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyrefly: ignore[bad-override]
        """Accept the connection and await its first request."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._close_without(self.cycle)

    def on_response_complete(self) -> None:
        """Await the next request on this connection."""
        finished = self.cycle
        super().on_response_complete()
        self._close_without(finished)

    def _close_without(self, finished: object) -> None:
        """Close the connection unless a request after the finished one begins in time."""
        self.loop.call_later(
            HEAD_TIMEOUT_S, lambda: self.cycle is finished and self.transport.close()
        )


class StoppingServer(uvicorn.Server):
    """A server that asks what it computes to stop as soon as it is asked itself."""

    def __init__(self, config: uvicorn.Config, state: AppState) -> None:
        """Start nothing yet.

        Args:
            config: Configuration of the server.
            state: State of the page.
        """
        super().__init__(config)
        self.state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal to stop.

        Args:
            sig: Number of the signal.
            frame: Where it arrived.
        """
        self.state.ask_to_stop()
        # Requests that go on for too long are cut off, each with a traceback in the log.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def security_policy(
    host: str,
    token: str | None,
    more_hosts: Sequence[str] = (),
    no_token: bool = False,
    port: int = 0,
    root_path: str = "",
) -> SecurityPolicy:
    """Return the access policy of the page.

    Args:
        host: Address that the server listens on.
        token: Secret to require; None generates one.
        more_hosts: Further names of the server, such as that of a proxy.
        no_token: Whether to require no token, which only a loopback address allows.
        port: Port that the server listens on.
        root_path: Path that a proxy puts before those of the page.

    Raises:
        GigamaskError: The flags contradict each other, or the path is none.
    """
    names = {name.lower() for name in (*LOOPBACK_NAMES, host, *more_hosts)}
    if no_token and (token or not is_loopback(host)):
        other = "--token" if token else f"--host {host}"
        raise GigamaskError(f"--no-token: does not go with {other}; leave one of them out")
    if not ROOT_PATH.fullmatch(root_path):
        raise GigamaskError(
            f"--root-path {root_path}: must be a path such as /user/me/proxy/8000; leave it out if"
            " the proxy removes it"
        )
    if not is_loopback(host):
        with suppress(OSError):
            names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return SecurityPolicy(
        frozenset(names),
        None if no_token else token or secrets.token_hex(16),
        f"{TOKEN_COOKIE}_{port}",
        root_path.rstrip("/"),
        any_ip_address=not is_loopback(host),
    )


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket, on which clients can wait for the server to start.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.

    Raises:
        GigamaskError: The host is not an address of this machine, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise GigamaskError(
            f"--host {host}: is not an address of this machine ({error.strerror}); pass one, such"
            " as 127.0.0.1"
        ) from None
    try:
        return socket.create_server(
            (host, port),
            family=family,
            backlog=MAX_CONNECTIONS,
            dualstack_ipv6=family == socket.AF_INET6 and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        raise GigamaskError(
            f"cannot listen on {host}:{port} ({error.strerror}); pass another --port, or 0 for a"
            " free one"
        ) from None


def page_url(listener: socket.socket, host: str, policy: SecurityPolicy) -> str:
    """Return the address to open in a browser.

    Args:
        listener: The listening socket.
        host: The requested host.
        policy: The access policy.
    """
    address, port = listener.getsockname()[:2]
    if ipaddress.ip_address(address).is_unspecified:
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    query = f"?token={policy.token}" if policy.token else ""
    return f"http://{name}:{port}{policy.root_path}/{query}"


def serve(state: AppState, policy: SecurityPolicy, listener: socket.socket) -> None:
    """Serve the page until a stop signal.

    Args:
        state: State of the page.
        policy: Which requests are allowed.
        listener: The listening socket.
    """
    own = {signal.SIGINT, signal.SIGTERM}  # uvicorn raises them again once it has stopped
    with (
        stop_signals_handled(signal.default_int_handler, {signal.SIGTERM}),
        stop_signals_handled(
            lambda *_: signal.raise_signal(signal.SIGTERM), set(STOP_SIGNALS) - own
        ),
        suppress(KeyboardInterrupt),
    ):
        make_server(state, policy).run(sockets=[listener])


def make_server(state: AppState, policy: SecurityPolicy) -> uvicorn.Server:
    """Return the server of the page, not yet started.

    Args:
        state: State of the page.
        policy: Which requests are allowed.
    """
    config = uvicorn.Config(
        SecurityMiddleware(build(state), policy),
        http=TimedProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        lifespan="off",
    )
    return StoppingServer(config, state)
