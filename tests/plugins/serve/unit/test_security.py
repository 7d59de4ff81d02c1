"""Every refusal, and that the body of an accepted request arrives unchanged."""

import asyncio

import pytest

from gigamask.plugins.serve import security
from gigamask.plugins.serve.security import TOKEN_COOKIE, SecurityMiddleware, SecurityPolicy

OWN = frozenset({"localhost", "127.0.0.1", "::1"})
PLAIN = SecurityPolicy(OWN)
TOKEN = "a1b2c3d4e5f6a7b8"


async def answer(send, body, headers=()):
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def app(scope, receive, send):
    """Answers with the body it was given, and tells whether the server's own messages come through
    behind it."""
    message = await receive()
    assert not message["more_body"]
    later = await receive()
    headers = [(b"content-type", b"text/plain"), (b"later", later["type"].encode())]
    await answer(send, message["body"], headers)


def scope_of(method="GET", path="/", headers=None, query="", kind="http"):
    told = {"host": "localhost:8000"} | (headers or {})
    scope = {"type": kind, "method": method, "path": path, "query_string": query.encode()}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in told.items()]
    return scope


def receives(*parts):
    """A function that receives a body in parts, then that the client has disconnected."""
    left = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts, 1)
    ]

    async def receive():
        return left.pop(0) if left else {"type": "http.disconnect"}

    return receive


async def exchange(guard, scope, receive):
    """Send a request; return status, headers and body, or None where there was no answer."""
    said = []

    async def send(message):
        said.append(message)

    await guard(scope, receive, send)
    if not said:
        return None
    return (
        said[0]["status"],
        {name.decode(): value.decode() for name, value in said[0]["headers"]},
        b"".join(each["body"] for each in said[1:]),
    )


def ask(policy, *request, parts=(b"",), receive=None, wrapped=app, **scope):
    guard = SecurityMiddleware(wrapped, policy)
    return asyncio.run(exchange(guard, scope_of(*request, **scope), receive or receives(*parts)))


def status_of(*given, **named):
    return ask(*given, **named)[0]


@pytest.mark.parametrize(
    "host", "localhost localhost:8000 127.0.0.1:1 [::1]:8000 LOCALHOST".split()
)
def test_its_own_names_are_known(host):
    status, headers, _ = ask(PLAIN, headers={"host": host})
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store", "unless the page says otherwise"


@pytest.mark.parametrize(
    "host",
    [
        "",
        *"evil.example localhost.evil.example 192.168.0.7 [ 127.0.0.1.nip.io:80 "
        "a@localhost:b]".split(),
    ],
)
def test_other_names_are_refused(host):
    status, headers, body = ask(PLAIN, headers={"host": host})
    assert status == 421
    assert b"--allow-host" in body
    assert "content-security-policy" in headers


def test_any_ip_address_is_known_where_it_listens_to_all_but_no_other_name():
    policy = SecurityPolicy(OWN, any_ip_address=True)
    assert status_of(policy, headers={"host": "192.168.0.7:8000"}) == 200
    assert status_of(policy, headers={"host": "evil.example"}) == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://localhost:8000"},
    ],
)
def test_other_sites_may_not_write(headers):
    status, _, body = ask(PLAIN, "POST", "/api/pictures", headers)
    assert status == 403
    assert (b"--allow-host" in body) == ("sec-fetch-site" not in headers)
    assert status_of(PLAIN, "GET", "/", headers) == 200


def test_the_page_itself_may_write_also_if_a_proxy_has_changed_its_host():
    own = {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}
    for host in ("localhost:8000", "127.0.0.1:8001"):
        assert status_of(PLAIN, "POST", "/api/pictures", own | {"host": host}) == 200
    del own["sec-fetch-site"]
    assert status_of(PLAIN, "POST", "/api/pictures", own) == 200


def test_the_path_of_a_proxy_is_removed_whether_or_not_the_proxy_did_so():
    async def told(scope, receive, send):
        await answer(send, scope["path"].encode())

    policy = SecurityPolicy(OWN, root_path="/me/8000")
    for path, seen in (("/me/8000/api", b"/api"), ("/api", b"/api"), ("/me/80", b"/me/80")):
        assert ask(policy, path=path, wrapped=told)[2] == seen
    token = SecurityPolicy(OWN, TOKEN, root_path="/me")
    assert status_of(token, path="/me/", query=f"token={TOKEN}") == 303


def test_token_is_required_taken_from_the_url_once_and_kept_in_a_cookie():
    policy = SecurityPolicy(OWN, TOKEN)
    assert status_of(policy) == 401
    assert status_of(policy, query="token=other") == 401
    status, headers, _ = ask(policy, query=f"token={TOKEN}")
    assert (status, headers["location"]) == (303, "./")
    assert headers["set-cookie"] == f"{TOKEN_COOKIE}={TOKEN}; HttpOnly; SameSite=lax"
    assert status_of(policy, headers={"cookie": f"{TOKEN_COOKIE}={TOKEN}"}) == 200
    assert status_of(policy, headers={"authorization": f"Bearer {TOKEN}"}, path="/api/about") == 200
    for wrong in (
        {"cookie": f"{TOKEN_COOKIE}=x"},
        {"cookie": "a\x01b=;;"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": "Bearer é"},
    ):
        assert status_of(policy, headers=wrong) == 401
    assert (
        status_of(policy, path="/api/about", query=f"token={TOKEN}") == 401
    )  # else it would stand in the addresses of pictures


def test_bodies_are_bounded_in_chunks_too_and_only_pictures_may_be_large():
    policy = SecurityPolicy(OWN, max_body_bytes=10, max_image_bytes=30)
    status, headers, body = ask(policy, "POST", parts=(b"12345", b"67890"))
    assert (status, body) == (200, b"1234567890")
    assert headers["later"] == "http.disconnect", "the server's own messages come through"
    assert status_of(policy, "POST", parts=(b"12345", b"67890", b"1")) == 413
    picture = {"content-type": "image/jpeg"}
    assert ask(policy, "POST", headers=picture, parts=(b"x" * 15, b"x" * 15))[2] == b"x" * 30
    assert status_of(policy, "POST", headers=picture, parts=(b"x" * 31,)) == 413
    assert ask(policy, "POST", parts=()) is None, "the client has disconnected"


def test_of_a_body_that_never_ends_little_is_read():
    read = []

    async def receive():
        read.append(1)
        return {"type": "http.request", "body": b"x" * 8, "more_body": True}

    assert status_of(SecurityPolicy(OWN, max_body_bytes=100), "POST", receive=receive) == 413
    assert len(read) == 13


def test_uploads_at_once_are_bounded_together():
    """Requests that wait for the rest of their bodies hold what has arrived."""
    policy = SecurityPolicy(OWN, max_body_bytes=60, max_total_bytes=100)
    guard, statuses = SecurityMiddleware(app, policy), []
    go_on = asyncio.Event()

    async def upload():
        begun, rest = [], receives(b"x" * 40, b"y")

        async def receive():
            if begun:
                await go_on.wait()
            begun.append(1)
            return await rest()

        statuses.append((await exchange(guard, scope_of("POST"), receive))[0])

    async def run():
        uploads = [asyncio.create_task(upload()) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.wait([uploads[2]])
        go_on.set()
        await asyncio.gather(*uploads)
        await upload()

    asyncio.run(run())
    assert statuses == [503, 200, 200, 200]


def test_a_body_that_does_not_arrive_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(security, "BODY_TIMEOUT_S", 0.01)

    async def receive():
        await asyncio.sleep(60)

    assert status_of(PLAIN, "POST", receive=receive) == 408


def test_other_protocols_are_left_alone_but_for_starting_and_stopping():
    called = []

    async def told(scope, receive, send):
        called.append(scope["type"])

    assert ask(PLAIN, kind="websocket", wrapped=told) is None
    ask(PLAIN, kind="lifespan", wrapped=told)
    assert called == ["lifespan"]
