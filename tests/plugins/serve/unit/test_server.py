"""Where the page listens, and that a token is left out only on loopback addresses, when asked."""

import socket
import threading
import time

import pytest

from gigamask.plugins.serve import server
from gigamask.plugins.serve.runs_view import RunsView
from tests.errors import error_line

OPEN = server.security_policy("localhost", None, no_token=True)


@pytest.mark.parametrize("host", "127.0.0.1 localhost ::1 127.8.8.8".split())
def test_only_its_own_names_are_known_on_localhost(host):
    assert server.security_policy(host, None, no_token=True).token is None
    policy = server.security_policy(host, None)
    assert len(policy.token) == 32
    assert not policy.any_ip_address
    assert policy.allows_host(f"[{host}]:80" if ":" in host else f"{host}:80")
    assert not policy.allows_host("evil.example")
    assert not policy.allows_host("10.0.0.1")


@pytest.mark.parametrize("host", "0.0.0.0 :: 10.0.0.1 some.name".split())
def test_elsewhere_a_token_is_made_up_each_time(host):
    with error_line(f"--host {host}"):
        server.security_policy(host, None, no_token=True)
    one, other = (server.security_policy(host, None, ("Proxy.example",)) for _ in range(2))
    assert len(one.token) == 32
    assert one.token != other.token
    assert one.allows_host("10.0.0.7:1")
    assert one.allows_host("proxy.example")
    assert not one.allows_host("evil.example")


def test_flags_of_access_that_cannot_hold_are_refused():
    with error_line("--token"):
        server.security_policy("localhost", "x" * 16, no_token=True)
    for path in ("user/me", "/a b", "/a?b", "//evil.example/x", "/a\n"):
        with error_line("--root-path"):
            server.security_policy("localhost", None, root_path=path)


def test_servers_on_two_ports_keep_tokens_apart():
    one, other = (server.security_policy("localhost", "x" * 16, port=port) for port in (80, 81))
    assert one.token == other.token == "x" * 16
    assert one.cookie != other.cookie


class SlowRuns(RunsView):
    """Runs that take longer to list than a request may take to arrive."""

    def runs(self):
        time.sleep(0.3)
        return []


@pytest.mark.slow
def test_connections_without_a_request_are_closed(monkeypatch, tmp_path):
    """They would otherwise keep others out; a request in progress is not closed."""
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.1)
    request, without_delay = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n", []
    connect = server.TimedProtocol.connection_made

    def connection_made(protocol, transport):
        connect(protocol, transport)
        accepted = transport.get_extra_info("socket")
        without_delay.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(server.TimedProtocol, "connection_made", connection_made)
    with server.bind("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        running = server.make_server(server.AppState(runs=SlowRuns(tmp_path)), OPEN)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            idle, half, slow = (socket.create_connection(address, timeout=20) for _ in range(3))
            half.sendall(request[:20])
            slow.sendall(request)
            assert slow.recv(12) == b"HTTP/1.1 200"
            assert set(without_delay) == {1}, "an answer waits for no acknowledgment"
            slow.sendall(request[:20])
            assert idle.recv(1) == b""
            assert half.recv(1) == b""
            while slow.recv(1000):  # the first response, then the end
                pass
        finally:
            running.should_exit = True
            thread.join()
            for connection in (idle, half, slow):
                connection.close()


def test_the_address_is_what_a_browser_opens():
    with server.bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert server.page_url(listener, "127.0.0.1", OPEN) == f"http://127.0.0.1:{port}/"
        policy = server.security_policy("localhost", "x" * 16, root_path="/me/8000/")
        address = server.page_url(listener, "localhost", policy)
        assert address == f"http://localhost:{port}/me/8000/?token={'x' * 16}"
    with server.bind("0.0.0.0", 0) as listener:
        assert socket.gethostname() in server.page_url(listener, "0.0.0.0", policy)


def test_address_that_is_in_use_or_invalid_is_an_error():
    with server.bind("127.0.0.1", 0) as first:
        first.listen()
        for message, *place in (
            ("another --port", "127.0.0.1", first.getsockname()[1]),
            ("--host", "no.such.host.invalid", 0),
            (r"192\.0\.2\.1", "192.0.2.1", 0),
        ):
            with error_line(message), server.bind(*place):
                pass
