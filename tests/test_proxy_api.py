"""The control interface: driven by a public Toxiproxy client, and by hand where that one would not
go."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from toxiproxy import Toxiproxy
from toxiproxy.exceptions import InvalidToxic, NotFound, ProxyExists

from pddrt.errors import CannotRun
from pddrt.netem.proxy import parse_address
from pddrt.netem.proxy_api import MAX_BODY, MAX_TOXICS, Serving
from tests.proxylab import ProxyLab, proxy_lab, run


def with_interface(check: Callable[..., None]) -> None:
    """Runs `check(where, lab, ask)` in a thread, while the interface of a proxy `db` is served.
    `ask(coroutine)` runs something on the loop."""

    async def main() -> None:
        async with proxy_lab() as lab:
            serving = Serving(lab.proxies)
            loop = asyncio.get_running_loop()
            where = await serving.start("127.0.0.1", 0)

            def ask(coroutine: Any) -> Any:
                return asyncio.run_coroutine_threadsafe(coroutine, loop).result(20)

            try:
                await asyncio.to_thread(check, where, lab, ask)
            finally:
                await serving.close()

    run(main)


def call(
    where: tuple[str, int], method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    url = f"http://{where[0]}:{where[1]}{path}"
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read()
    try:
        return status, json.loads(text) if text else None
    except ValueError:
        return status, text


def test_a_public_client_drives_everything() -> None:
    def check(where: tuple[str, int], lab: ProxyLab, ask: Any) -> None:
        server = Toxiproxy()
        server.update_api_consumer(*where)
        assert server.running()
        assert json.loads(server.version())["version"].startswith("2.")
        assert list(server.proxies()) == ["db"]

        made = server.create(upstream=lab.proxy.upstream, name="second")
        assert made.enabled
        assert parse_address(made.listen)[1] > 0
        with pytest.raises(ProxyExists):
            server.create(upstream="127.0.0.1:1", name="second")
        _talk(made.listen, ask, lab, b"through the second")

        made.add_toxic(type="latency", attributes={"latency": 5, "jitter": 1})
        made.add_toxic(
            name="narrow", type="bandwidth", stream="upstream", toxicity=0.5,
            attributes={"rate": 1000},
        )  # fmt: skip
        toxics = made.toxics()
        assert {t.name: (t.type, t.stream, t.toxicity, t.attributes) for t in toxics.values()} == {
            "latency_downstream": ("latency", "downstream", 1.0, {"latency": 5, "jitter": 1}),
            "narrow": ("bandwidth", "upstream", 0.5, {"rate": 1000}),
        }
        with pytest.raises(ProxyExists):  # any conflict, to this client
            made.add_toxic(name="narrow", type="slicer")
        with pytest.raises(InvalidToxic):
            made.add_toxic(type="noise")
        with pytest.raises(InvalidToxic):
            made.add_toxic(type="latency", stream="sideways")
        made.destroy_toxic("narrow")
        assert list(made.toxics()) == ["latency_downstream"]
        with pytest.raises(NotFound):
            made.destroy_toxic("narrow")

        with made.down():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(parse_address(made.listen), 5)
            assert not server.get_proxy("second").enabled
            assert server.reset()
            assert server.get_proxy("second").enabled
        assert server.get_proxy("second").toxics() == {}
        _talk(made.listen, ask, lab, b"and again, on the same port")

        several = [
            {"name": "second", "upstream": made.upstream, "listen": made.listen},
            {"name": "third", "upstream": made.upstream, "listen": "127.0.0.1:0"},
        ]
        assert [proxy.name for proxy in server.populate(several)] == ["third"]
        server.destroy(server.get_proxy("third"))
        server.destroy_all()
        assert server.proxies() == {}

    with_interface(check)


def _talk(listen: str, ask: Any, lab: ProxyLab, text: bytes) -> None:
    with socket.create_connection(parse_address(listen), 5) as client:
        client.sendall(text)
        end = ask(lab.accept())
        assert ask(end.exactly(len(text))) == text


def test_populate_creates_replaces_and_leaves_alone() -> None:
    def check(where: tuple[str, int], lab: ProxyLab, ask: Any) -> None:
        listen = lab.proxy.listen
        same = {"name": "db", "listen": listen, "upstream": lab.proxy.upstream}
        new = {"name": "new", "listen": "127.0.0.1:0", "upstream": "127.0.0.1:1"}
        client = socket.create_connection(parse_address(listen), 5)
        end = ask(lab.accept())
        status, said = call(where, "POST", "/populate", [same, new])
        assert (status, [p["name"] for p in said["proxies"]]) == (201, ["db", "new"])
        client.sendall(b"open as before")
        assert ask(end.exactly(14)) == b"open as before"
        moved = {**same, "upstream": "127.0.0.1:2", "enabled": False}
        status, said = call(where, "POST", "/populate", [moved])
        assert status == 201
        assert said["proxies"][0]["upstream"] == "127.0.0.1:2"
        assert said["proxies"][0]["enabled"] is False
        assert client.recv(1) == b""
        client.close()

    with_interface(check)


def test_a_proxy_is_moved_and_switched() -> None:
    def check(where: tuple[str, int], lab: ProxyLab, _ask: Any) -> None:
        status, said = call(where, "PATCH", "/proxies/db", {"enabled": False})
        assert (status, said["enabled"], said["listen"]) == (200, False, lab.proxy.listen)
        status, said = call(where, "POST", "/proxies/db", {"upstream": "127.0.0.1:3"})
        assert (status, said["upstream"], said["enabled"]) == (200, "127.0.0.1:3", False)
        status, said = call(where, "POST", "/proxies/db", {"enabled": True})
        assert (status, said["enabled"]) == (200, True)

    with_interface(check)


def test_the_link_is_read_and_changed_with_units() -> None:
    def check(where: tuple[str, int], lab: ProxyLab, _ask: Any) -> None:
        path = "/proxies/db/link"
        change = {"up": {"rate": "10 Mbit/s", "delay": "20 ms", "jitter": "1 ms"}}
        status, said = call(where, "POST", path, change)
        assert status == 200
        assert said["up"] == {"rate": "10 Mbit/s", "delay": "20 ms", "jitter": "1 ms"}
        assert said["down"] == {"rate": None, "delay": "0 s", "jitter": "0 s"}
        status, said = call(where, "POST", path, {"up": {"rate": None}})
        assert said["up"]["rate"] is None
        assert said["up"]["delay"] == "20 ms"
        for wrong in ({"up": {"rate": 5}}, {"up": {"rat": "5 MB/s"}}, {"sideways": {}}, [],
                      {"down": {"jitter": "1 ms"}}, {"up": {"rate": "-1 MB/s"}}):  # fmt: skip
            assert call(where, "POST", path, wrong)[0] == 400
        assert call(where, "GET", path)[1] == said

    with_interface(check)


def test_a_toxic_is_changed_in_place() -> None:
    def check(where: tuple[str, int], _lab: ProxyLab, _ask: Any) -> None:
        asked = {"type": "latency", "attributes": {"latency": 10}}
        assert call(where, "POST", "/proxies/db/toxics", asked)[0] == 200
        path = "/proxies/db/toxics/latency_downstream"
        change = {"attributes": {"jitter": 3}, "toxicity": 0.25}
        for method in ("POST", "PATCH"):
            status, said = call(where, method, path, change)
            assert status == 200
            assert said == call(where, "GET", path)[1]
            assert said["attributes"] == {"latency": 10, "jitter": 3}
            assert said["toxicity"] == 0.25
        assert call(where, "DELETE", path) == (204, None)
        assert call(where, "GET", path)[0] == 404

    with_interface(check)


WRONG = {
    "no proxy": ("GET", "/proxies/nobody", None, 404, "proxy not found"),
    "no toxic": ("GET", "/proxies/db/toxics/none", None, 404, "toxic not found"),
    "no page": ("GET", "/nothing/here", None, 404, "Not Found"),
    "no method": ("DELETE", "/version", None, 405, "Method Not Allowed"),
    "no JSON": ("POST", "/proxies", b"{", 400, "bad request body"),
    "no UTF-8": ("POST", "/proxies", b"\xff\xfe", 400, "bad request body"),
    "deep": ("POST", "/proxies", b"[" * 100_000, 400, "bad request body"),
    "no object": ("POST", "/proxies", [1], 400, "object is wanted"),
    "no list": ("POST", "/populate", {}, 400, "list is wanted"),
    "no name": ("POST", "/proxies", {"upstream": "a:1"}, 400, "missing required field: name"),
    "no upstream": ("POST", "/proxies", {"name": "a"}, 400, "missing required field: upstream"),
    "no port": ("POST", "/proxies", {"name": "a", "upstream": "a"}, 400, "HOST:PORT"),
    "long name": ("POST", "/proxies", {"name": "a" * 300, "upstream": "a:1"}, 400, "256"),
    "no switch": ("POST", "/proxies/db", {"enabled": "yes"}, 400, "true or false"),
    "negative": (
        "POST", "/proxies/db/toxics", {"type": "bandwidth", "attributes": {"rate": -1}}, 400,
        "rate must be a whole number from 0",
    ),
    "huge": (
        "POST", "/proxies/db/toxics", {"type": "latency", "attributes": {"latency": 1e300}}, 400,
        "latency must be",
    ),
    "toxicity": (
        "POST", "/proxies/db/toxics", {"type": "latency", "toxicity": 2}, 400, "from 0 to 1",
    ),
    "too large": ("POST", "/populate", b" " * (MAX_BODY + 1), 413, "Too Large"),
}  # fmt: skip


def test_what_is_wrong_is_refused_as_there_and_changes_nothing() -> None:
    def check(where: tuple[str, int], _lab: ProxyLab, _ask: Any) -> None:
        before = call(where, "GET", "/proxies")
        for name, (method, path, body, status, text) in WRONG.items():
            found, said = call(where, method, path, body)
            assert found == status, name
            assert said["status"] == status, name
            assert text in said["error"], (name, said)
        assert call(where, "GET", "/proxies") == before

    with_interface(check)


def test_a_port_in_use_is_an_error_of_the_server_and_leaves_no_proxy() -> None:
    def check(where: tuple[str, int], lab: ProxyLab, _ask: Any) -> None:
        asked = {"name": "two", "listen": lab.proxy.listen, "upstream": "127.0.0.1:1"}
        status, said = call(where, "POST", "/proxies", asked)
        assert status == 500
        assert "cannot listen" in said["error"]
        assert list(call(where, "GET", "/proxies")[1]) == ["db"]

    with_interface(check)


GARBAGE = (
    b"\x00" * 5000,
    b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"\r\n\r\n",
    b"POST /proxies HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n{",
)


def test_garbage_and_browsers_are_turned_away_and_the_service_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def check(where: tuple[str, int], lab: ProxyLab, _ask: Any) -> None:
        for garbage in GARBAGE:
            with socket.create_connection(where, 5) as client:
                client.sendall(garbage)
                client.shutdown(socket.SHUT_WR)
                client.settimeout(10)
                while client.recv(1 << 16):
                    pass
        assert lab.said == ["the control interface refused what is no HTTP request"]
        assert capsys.readouterr().err == ""
        agent = {"User-Agent": "Mozilla/5.0"}
        assert call(where, "GET", "/proxies", **agent)[0] == 403
        assert call(where, "GET", "/proxies")[0] == 200

    with_interface(check)


def test_a_move_to_an_address_that_is_taken_changes_nothing() -> None:
    def check(where: tuple[str, int], lab: ProxyLab, _ask: Any) -> None:
        before = call(where, "GET", "/proxies/db")[1]
        taken = f"{where[0]}:{where[1]}"
        status, said = call(where, "POST", "/proxies/db", {"listen": taken, "upstream": "h:1"})
        assert status == 500
        assert "cannot listen" in said["error"]
        assert call(where, "GET", "/proxies/db")[1] == before
        assert before["enabled"]
        socket.create_connection(parse_address(lab.proxy.listen), 5).close()

    with_interface(check)


def test_a_toxic_of_misspelt_attributes_and_a_name_that_is_none_are_refused() -> None:
    def check(where: tuple[str, int], _lab: ProxyLab, _ask: Any) -> None:
        misspelt = {"type": "latency", "attributes": {"latncy": 5}}
        status, said = call(where, "POST", "/proxies/db/toxics", misspelt)
        assert status == 400
        assert "latency has the attributes latency, jitter" in said["error"]
        more = {"type": "latency", "attributes": {"latency": 5, "else": 1}}
        assert call(where, "POST", "/proxies/db/toxics", more)[0] == 200
        asked = {"name": "a\0b", "listen": ":0", "upstream": "h:1"}
        assert call(where, "POST", "/proxies", asked)[0] == 400

    with_interface(check)


def test_there_is_a_bound_on_toxics() -> None:
    def check(where: tuple[str, int], _lab: ProxyLab, _ask: Any) -> None:
        codes = [
            call(where, "POST", "/proxies/db/toxics", {"type": "latency", "name": f"t{k}"})[0]
            for k in range(MAX_TOXICS + 1)
        ]
        assert codes == [200] * MAX_TOXICS + [400]

    with_interface(check)


def test_stats_say_what_went_through_and_how_late() -> None:
    def check(where: tuple[str, int], lab: ProxyLab, ask: Any) -> None:
        call(where, "POST", "/proxies/db/link", {"up": {"delay": "1 ms"}})
        _talk(lab.proxy.listen, ask, lab, b"twelve bytes")
        status, said = call(where, "GET", "/proxies/db/stats")
        assert status == 200
        assert said["bytes"]["up"] == 12
        assert said["connections"]["accepted"] == 1
        assert said["fidelity"]["links"]["db"]["directions"]["up"]["late_histogram"]

    with_interface(check)


def test_a_control_port_in_use_is_refused_by_name() -> None:
    async def main() -> None:
        async with proxy_lab() as lab:
            with pytest.raises(CannotRun, match="control interface cannot listen on"):
                await Serving(lab.proxies).start(*parse_address(lab.proxy.listen))

    run(main)
