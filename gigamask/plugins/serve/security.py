"""ASGI middleware that decides which requests reach the page, and limits their size.

Any web site open in the browser can send requests to a loopback address, and can make its own name
resolve to 127.0.0.1 (DNS rebinding). So the Host header must be a name of this server, and a
request that writes must come from the page itself. Any account of the machine can connect to a
loopback address, too. So each browser needs a token, once.

The routes are in `app`; `serve.server` chooses the allowed names and the token.
"""

import asyncio
import hmac
import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_COOKIE = "gigamask_token"
BODY_TIMEOUT_S = 60.0
"""Seconds within which the whole body of a request must arrive."""
HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+))(?::\d+)?")
"""A Host header: an IPv6 address in brackets or a name, with an optional port."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class SecurityPolicy:
    """Which requests are allowed.

    Attributes:
        hosts: Names that the Host header may have, in lower case.
        token: Secret that each request must carry; None if none is needed.
        cookie: Name of the cookie that holds the token. Cookies do not depend on the port, so that
            servers on several ports need several names.
        root_path: Path that a proxy puts before those of the page, without a slash at the end; ""
            if there is none, or the proxy removes it.
        any_ip_address: Also accept any IP address as Host; DNS rebinding cannot forge one.
        max_body_bytes: Largest body of a request.
        max_image_bytes: Largest body of a request whose content type is an image.
        max_total_bytes: Limit of the bodies of all requests in progress.
    """

    hosts: frozenset[str]
    token: str | None = None
    cookie: str = TOKEN_COOKIE
    root_path: str = ""
    any_ip_address: bool = False
    max_body_bytes: int = 2**16
    max_image_bytes: int = 2**26
    max_total_bytes: int = 2**28

    def allows_host(self, header: str) -> bool:
        """Return whether a Host header names this server."""
        match = HOST.fullmatch(header)
        name = (match[1] or match[2]).lower() if match else ""
        return name in self.hosts or (self.any_ip_address and _is_ip_address(name))

    def accepts(self, token: str) -> bool:
        """Return whether a token is correct, compared in constant time."""
        return hmac.compare_digest(token.encode(), (self.token or "").encode())


@dataclass(eq=False)
class SecurityMiddleware:
    """Rejects the requests to an ASGI application that the policy does not allow."""

    app: ASGIApp
    policy: SecurityPolicy
    _total_bytes: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request, or pass it on with its whole body; drop websockets."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        if scope["path"].startswith(f"{self.policy.root_path}/"):
            scope = {**scope, "path": scope["path"][len(self.policy.root_path) :]}
        request = Request(scope, receive)
        response: Response | None = self._refuse(request) or self._log_in(request)
        body = bytearray()
        try:
            if response is None:
                response = await self._read(request, body)
            replay = _replay(bytes(body), receive)
            await (response or self.app)(scope, replay, send_with_headers)
        except ClientDisconnect:
            return
        finally:
            self._total_bytes -= len(body)

    async def _read(self, request: Request, body: bytearray) -> Response | None:
        """Read a request's body, chunked or not; return a response if a limit is exceeded."""
        is_image = request.headers.get("content-type", "").startswith("image/")
        limit = self.policy.max_image_bytes if is_image else self.policy.max_body_bytes
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    body += chunk
                    self._total_bytes += len(chunk)
                    if len(body) > limit:
                        text = f"the request is larger than {limit:,} bytes"
                        return PlainTextResponse(text, 413)
                    if self._total_bytes > self.policy.max_total_bytes:
                        return PlainTextResponse("too many uploads at once; try again", 503)
        except TimeoutError:
            text = f"the request did not arrive within {BODY_TIMEOUT_S:.0f} s"
            return PlainTextResponse(text, 408)
        return None

    def _refuse(self, request: Request) -> Response | None:
        """Return an error response to a request that is not allowed, None to one that is."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not self.policy.allows_host(host):
            text = (
                f"the Host header is {host[:100]!a}, which this server does not accept; open"
                " the printed address or, behind a proxy, restart with --allow-host and that name"
            )
            return PlainTextResponse(text, 421)
        if request.method in ("GET", "HEAD"):
            return None
        # A browser sets Sec-Fetch-Site itself, and also if a proxy has changed Host.
        site = request.headers.get("sec-fetch-site")
        sent_by = urlsplit(origin).netloc if origin else host
        if site in ("same-origin", "none") or (site is None and sent_by == host):
            return None
        text = f"the request comes from another site: its Origin header is {ascii(origin)[:100]}"
        if site is None:
            text += (
                f" and its Host header {host[:100]!a}; if a proxy stands between, let it keep"
                " Host (nginx: proxy_set_header Host $http_host), and restart with --allow-host"
                " and that name"
            )
        return PlainTextResponse(text, 403)

    def _log_in(self, request: Request) -> Response | None:
        """Check the token; move a token in the page's URL to a cookie.

        Only the URL of the page itself may carry the token; it would otherwise stay in the URLs of
        images.
        """
        if self.policy.token is None:
            return None
        token = request.query_params.get("token", "")
        is_page = request.scope["path"] == "/" and request.method == "GET"
        if is_page and self.policy.accepts(token):
            # Both refer to the path that the browser sees, which a proxy may have changed. A
            # strict cookie would be missing after a click on the address in another page.
            redirect = RedirectResponse("./", 303)
            redirect.set_cookie(self.policy.cookie, token, path=None, httponly=True, samesite="lax")
            return redirect
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        cookie = request.cookies.get(self.policy.cookie, "")
        if self.policy.accepts(cookie):
            return None
        if scheme.lower() == "bearer" and self.policy.accepts(bearer):
            return None
        text = "a token is needed; open the whole address that 'gigamask serve' printed"
        return PlainTextResponse(text, 401)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body first, and then the server's own messages."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
