"""Where a server listens, and what it says of that."""

from __future__ import annotations

import socket

import pytest

from kvfold.errors import AddressError
from kvfold.serving.server import bound_sockets, page_address


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("me.example", "http://me.example:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
    ],
)
def test_the_pages_address_is_one_that_a_browser_finds(host: str, address: str) -> None:
    assert page_address(host, 80) == address


def test_all_addresses_of_a_name_share_one_port_and_refuse_until_they_listen() -> None:
    made = bound_sockets("localhost", 0)
    (port,) = {one.getsockname()[1] for one in made}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
    for one in made:
        one.close()
    for one in bound_sockets("localhost", port):
        one.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_port_in_use_is_refused(host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=f"port {port}, can't be had"):
            bound_sockets(host, port)


@pytest.mark.parametrize("host", ["..", "192.0.2.1"])
def test_an_address_that_is_not_this_machines_is_refused(host: str) -> None:
    with pytest.raises(AddressError, match="choose others"):
        bound_sockets(host, 0)
