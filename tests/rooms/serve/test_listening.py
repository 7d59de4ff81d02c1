"""Where the page listens: on this machine alone without a token, elsewhere never without one."""

import socket

import pytest

from gigamask.faults import Fault
from gigamask.serve import listening


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_on_this_machine_alone_no_token_is_asked_for(host):
    door = listening.door(host, None, ())
    assert door.token is None
    assert not door.any_address
    assert door.knows(f"[{host}]:80" if ":" in host else f"{host}:80")
    assert not door.knows("evil.example")
    assert not door.knows("10.0.0.1")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "some.name"])
def test_elsewhere_a_token_is_made_up_each_time(host):
    doors = [listening.door(host, None, ("Proxy.example",)) for _ in range(2)]
    assert len(doors[0].token) == 32
    assert doors[0].token != doors[1].token
    assert doors[0].knows("10.0.0.7:1")
    assert doors[0].knows("proxy.example")
    assert not doors[0].knows("evil.example")


def test_a_token_of_ones_own_is_asked_for_on_this_machine_too():
    assert listening.door("127.0.0.1", "x" * 16, ()).token == listening.door("0.0.0.0", "x" * 16, ()).token == "x" * 16


def test_the_address_is_what_a_browser_opens():
    with listening.bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert listening.address(listener, "127.0.0.1", None) == f"http://127.0.0.1:{port}/"
        assert listening.address(listener, "localhost", "abc") == f"http://localhost:{port}/?token=abc"
    with listening.bind("0.0.0.0", 0) as listener:
        assert socket.gethostname() in listening.address(listener, "0.0.0.0", "abc")


def test_an_address_that_is_taken_or_none_is_a_fault():
    with listening.bind("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(Fault, match="another --port"), listening.bind("127.0.0.1", first.getsockname()[1]):
            pass
    with pytest.raises(Fault, match="is no address"), listening.bind("no.such.host.invalid", 0):
        pass
    with pytest.raises(Fault, match="cannot be listened on"), listening.bind("192.0.2.1", 0):
        pass
