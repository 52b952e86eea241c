"""A host is reached when it answers, and not when something on the way only takes the connection."""

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stability_lab.machine.reach import no_answer


@pytest.fixture
def silent_host() -> Iterator[str]:
    """A port that takes no connection: its queue of one is full."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for filler in fillers:
            filler.close()


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def test_a_host_that_does_not_answer(silent_host: str) -> None:
    assert no_answer(silent_host, 0.2) in (f"{silent_host}: no answer within 0.2 s", f"{silent_host}: timed out")
    assert no_answer("http://no-such-host.invalid", 3) is not None
    assert no_answer("no address at all", 3) == "no address at all: unknown url type: 'no address at all'"


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(
    ("answer", "expected"), [(200, True), (403, True), (407, False), (503, False), ("close", False), ("silence", False)]
)
def test_only_an_answer_counts(
    scheme: str, answer: int | str, expected: bool, monkeypatch: pytest.MonkeyPatch, server: Callable[[int | str], Any]
) -> None:
    """The answer may come from the host itself, and from a proxy on the way to it."""
    wait = 0.3 if answer == "silence" else 3.0
    with server(answer) as host:
        if scheme == "http":
            assert (no_answer(host.url, wait) is None) == expected
        monkeypatch.setenv(f"{scheme}_proxy", host.url)
        through_proxy = no_answer(f"{scheme}://no-such-host.invalid", wait) is None
    if scheme == "http":
        assert through_proxy == expected
        assert answer == "silence" or host.requests[-1] == "HEAD http://no-such-host.invalid HTTP/1.1"
    else:  # 200 opens the tunnel, in which nothing answers here
        assert not through_proxy
        assert answer == "silence" or host.requests[-1].startswith("CONNECT no-such-host.invalid:443 ")
