"""Bind the page's socket, decide who may reach it, and serve it until it is stopped.

Not here: how requests are checked (`serve.security`), what they do (`serve.app`).
"""

import ipaddress
import secrets
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress

import uvicorn

from gigamask.errors import GigamaskError
from gigamask.serve.app import AppState, build
from gigamask.serve.security import SecurityMiddleware, SecurityPolicy

MAX_CONNECTIONS = 64
"""A browser opens six."""
SHUTDOWN_TIMEOUT_S = 3
"""Seconds that responses in progress have left when the server is stopped."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def security_policy(host: str, token: str | None, more_hosts: Sequence[str]) -> SecurityPolicy:
    """Return who may reach the page.

    On a loopback address, whoever uses one of its names; elsewhere whoever has the token.

    Args:
        host: address that the server listens on.
        token: secret to ask for; made up on other addresses than this machine's own if None.
        more_hosts: further names of the server, such as that of a proxy.
    """
    hosts = {name.lower() for name in (*LOOPBACK_NAMES, host, *more_hosts)}
    if is_loopback(host):
        return SecurityPolicy(frozenset(hosts), token)
    with suppress(OSError):
        hosts |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return SecurityPolicy(frozenset(hosts), token or secrets.token_hex(16), any_ip_address=True)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; clients that connect before the server runs wait.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.

    Raises:
        GigamaskError: if the host is not an address of this machine, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise GigamaskError(
            f"--host {host}: is not an address of this machine ({error.strerror}); give one, such"
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
            f"cannot listen on {host}:{port} ({error.strerror}); give another --port, or 0 for a"
            " free one"
        ) from None


def page_url(listener: socket.socket, host: str, token: str | None) -> str:
    """Return the address to open in a browser.

    Args:
        listener: the listening socket.
        host: the host that was requested.
        token: the access token, if there is one.
    """
    address, port = listener.getsockname()[:2]
    if ipaddress.ip_address(address).is_unspecified:
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def serve(state: AppState, policy: SecurityPolicy, listener: socket.socket) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        state: what the page shows.
        policy: which requests are answered.
        listener: the listening socket.
    """
    config = uvicorn.Config(
        SecurityMiddleware(build(state), policy),
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        lifespan="off",
    )
    # uvicorn raises the signal again once it has stopped.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)
