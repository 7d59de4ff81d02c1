"""What stands before the page: every request enters, those that may go on do, with a body that is known to be small enough.

A page on a loopback address is reachable by whatever site the browser shows beside it, so names are checked (a site may have its own name lead to
127.0.0.1) and so is where a writing request comes from. On other addresses a token is asked for, once, and then kept in a cookie.

Not here: what the requests ask for (`serve.app`).
"""

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

COOKIE = "gigamask_token"
BODY_S = 60.0
"""A body must have arrived by then."""
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'"
HEADERS = {
    "content-security-policy": f"{POLICY}; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Door:
    """Who may come in: by which names the page is called, with which token, and how large bodies may be, `image_bytes` for pictures.

    Where `any_address` is set, IP addresses are names as good as the listed ones: no other site can have one.
    """

    names: frozenset[str]
    token: str | None = None
    any_address: bool = False
    body_bytes: int = 2**16
    image_bytes: int = 2**26

    def knows(self, host: str) -> bool:
        """Tells whether a Host header names this page."""
        name = (urlsplit(f"//{host}").hostname or "").lower() if _is_host(host) else ""
        return name in self.names or (self.any_address and _is_address(name))


@dataclass(frozen=True)
class Guard:
    """Wraps an ASGI application."""

    app: App
    door: Door

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers a request or hands it on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._refusal(scope, headers)
        if refused:
            await _answer(send, *refused)
            return
        if self.door.token and scope["method"] == "GET" and scope["path"] == "/" and self._asked_with(scope):
            kept = f"{COOKIE}={self.door.token}; Path=/; HttpOnly; SameSite=Strict"
            await _answer(send, 303, "", {"location": "/", "set-cookie": kept})
            return
        most = self.door.image_bytes if headers.get("content-type", "").startswith("image/") else self.door.body_bytes
        try:
            body = await asyncio.wait_for(_body(receive, most), BODY_S)
        except TimeoutError:
            await _answer(send, 408, f"the request did not arrive within {BODY_S:.0f} s")
            return
        if body is None:
            await _answer(send, 413, f"the request is larger than {most:,} bytes, which is the most that is taken")
            return
        await self.app(scope, _replayed(body, receive), _with_headers(send))

    def _refusal(self, scope: MutableMapping[str, Any], headers: dict[str, str]) -> tuple[int, str] | None:
        """Returns status and reason where a request may not come in."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.door.knows(host):
            return 421, "this page is not called by that name; give the address it printed, or start it with --allow-host NAME"
        if scope["method"] not in ("GET", "HEAD") and (
            headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") or (origin and urlsplit(origin).netloc != host)
        ):
            return 403, "the request comes from another site"
        if self.door.token and not (self._asked_with(scope) or self._has_token(headers)):
            return 401, "a token is needed; open the address that 'gigamask serve' printed"
        return None

    def _asked_with(self, scope: MutableMapping[str, Any]) -> bool:
        """Tells whether the address has the token in it, which is taken once, for the page itself."""
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        return scope["path"] == "/" and self._right(given)

    def _has_token(self, headers: dict[str, str]) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        return (scheme.lower() == "bearer" and self._right(given)) or (cookie is not None and self._right(cookie.value))

    def _right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self.door.token or "").encode())


async def _body(receive: Receive, most: int) -> bytes | None:
    """Returns a request's body, in chunks or not; None where it has more bytes than that, of which no more are kept."""
    parts, held = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        held += len(parts[-1])
        if held > most:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Returns what gives the body at once, and then what the server says."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _with_headers(send: Send) -> Send:
    """Returns what sends each response with the headers that keep other sites out."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *((name.encode(), value.encode()) for name, value in HEADERS.items())]
        await send(message)

    return sent


async def _answer(send: Send, status: int, text: str, more: dict[str, str] | None = None) -> None:
    told = {"content-type": "text/plain; charset=utf-8", "connection": "close", **HEADERS, **(more or {})}
    headers = [(name.encode(), value.encode("latin-1")) for name, value in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def _is_host(host: str) -> bool:
    try:
        urlsplit(f"//{host}")
    except ValueError:
        return False
    return bool(host)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
