"""Where the page listens: an address and a port enter, who may come in and a socket leave; then it is served until it is told to stop.

Not here: what is asked at the door (`serve.guard`), what is behind it (`serve.app`).
"""

import ipaddress
import secrets
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import uvicorn

from gigamask.faults import Fault
from gigamask.serve.app import Rooms, build
from gigamask.serve.guard import Door, Guard

AT_ONCE = 64
"""Connections; a browser opens six."""
CLOSING_S = 3
"""How long answers that are under way are waited for when it is told to stop."""
OWN_NAMES = ("localhost", "127.0.0.1", "::1")


def is_own(host: str) -> bool:
    """Tells whether an address is reachable from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def door(host: str, token: str | None, more: Sequence[str]) -> Door:
    """Returns who may come in: on this machine's own address whoever calls it by that; else whoever has the token, which is made up unless given."""
    names = {name.lower() for name in (*OWN_NAMES, *more)}
    if is_own(host):
        return Door(frozenset(names | {host.lower()}), token)
    with suppress(OSError):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return Door(frozenset(names | {host.lower()}), token or secrets.token_hex(16), any_address=True)


@contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """Opens the socket; raises `Fault` where the address cannot be listened on."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise Fault(f"--host {host}: is no address of this machine ({error.strerror}); give one, such as 127.0.0.1") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
            listener.listen(AT_ONCE)  # whoever comes before all is ready waits
        except OSError as error:
            act = "give another --port, or 0 for a free one"
            raise Fault(f"{host}:{port} cannot be listened on ({error.strerror}); {act}") from None
        yield listener


def address(listener: socket.socket, host: str, token: str | None) -> str:
    """Returns what to open in a browser."""
    port = listener.getsockname()[1]
    if ipaddress.ip_address(listener.getsockname()[0]).is_unspecified:
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def serve(rooms: Rooms, door: Door, listener: socket.socket) -> None:
    """Answers until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        Guard(build(rooms), door),
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=AT_ONCE,
        timeout_graceful_shutdown=CLOSING_S,
        lifespan="off",
    )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises the signal again once it has stopped
    try:
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)
