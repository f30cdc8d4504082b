"""A proxy: one listening port, one upstream, and an emulated link between them, for any program.

    spec -> Proxy.start() -> accepts -> `relay.Relayed`, one a connection

All connections of a proxy share its link, each direction by itself: the rate is the link's, not a
connection's. Toxics (see `toxics`) act on single connections, before the link. Link, toxics and the
switch `enabled` may change at any time; what is under way obeys from then on.

`Proxies` are those of one process, by name, with one bound on what they hold together. What goes
wrong with a connection (the upstream refuses, no file is left to open) ends that connection, is
said once to `notices`, and counted.

Owns: listening sockets, connections. Leaves out: the HTTP interface (`proxy_api`), where specs come
from (`proxy_file`). Nothing of this outlives the process, and nothing outside it is changed.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import itertools
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pddrt.env import Env, Timer
from pddrt.errors import CannotRun
from pddrt.netem.fidelity import Kept
from pddrt.netem.flow import Direction, join, law_of
from pddrt.netem.net import LinkSpec, LinkStats
from pddrt.netem.relay import MOST_READ, Hold, Pipe, Relayed
from pddrt.netem.toxics import STAGES, Toxic
from pddrt.types import MS, SECOND, US, Ns

LOOK_AHEAD: Ns = 100 * US
QUANTUM: Ns = MS
HOLD_LIMIT = 1 << 30
DIAL_DEADLINE: Ns = 20 * SECOND
MAX_CONNECTIONS = 4096
ACCEPTS = 64
"""Connections accepted in one turn of the loop."""
PAUSE_ACCEPTING: Ns = 100 * MS
_KERNEL_TIME: Ns = 20 * MS
_KERNEL_LEAST, _KERNEL_MOST = 64 << 10, 4 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """What of one direction of a link may change: `rate` in bytes/s (None unlimited, 0 an outage),
    the delay one way, its deviation."""

    rate: int | None = None
    delay: Ns = 0
    jitter: Ns = 0


ENDS = ("client", "upstream")
LOOPBACK = "127.0.0.1"
"""Where no host is given. Others are let in only where 0.0.0.0 or [::] is."""


def link_of(up: Shape, down: Shape) -> LinkSpec:
    """A link with these two directions and nothing else to it."""
    there, back = (
        LinkSpec("link", ENDS, shape.rate, shape.delay, shape.jitter) for shape in (up, down)
    )
    return replace(there, back=back)


NO_LINK = link_of(Shape(), Shape())


@dataclass(frozen=True, slots=True)
class ProxySpec:
    """`listen` and `upstream` as HOST:PORT; port 0 takes a free one. `link` is between `ENDS`."""

    name: str
    listen: str
    upstream: str
    link: LinkSpec = NO_LINK
    enabled: bool = True
    toxics: tuple[Toxic, ...] = ()


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `[V6]:PORT` or `:PORT` (this machine, 127.0.0.1). Raises
    ValueError."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"found '{text[:64]}'; allowed: HOST:PORT, with a port up to 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"found '{text[:64]}'; allowed: [HOST]:PORT for an IPv6 address")
    return host, int(port)


def shown_address(address: tuple[str, int]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Notices:
    """What went wrong, each kind said once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._say = say

    def tell(self, what: str) -> None:
        self.counts[what] += 1
        if self.counts[what] == 1 and len(self.counts) <= 1000:
            self._say(what)


class Proxy:
    """See the module. `listen` is where it really listens, once started."""

    def __init__(self, env: Env, spec: ProxySpec, hold: Hold, notices: Notices) -> None:
        self.env = env
        self.name = spec.name
        self.listen = spec.listen
        self.asked = spec.listen
        self.upstream = spec.upstream
        self.enabled = False
        self.toxics: dict[str, Toxic] = {}
        self.connections: dict[int, Relayed] = {}
        self.accepted = 0
        self.refused = 0
        ways = {"up": spec.link.toward(*ENDS), "down": spec.link.toward(*ENDS[::-1])}
        self.shapes = {way: Shape(s.rate, s.delay, s.jitter) for way, s in ways.items()}
        self.up, self.down = (self._direction(way, link) for way, link in ways.items())
        join(self.up, self.down)
        self._past = {"up": 0, "down": 0}
        self._hold = hold
        self._notices = notices
        self._numbers = itertools.count()
        self._servers: list[socket.socket] = []
        self._dials: set[asyncio.Task[None]] = set()
        self._scratch = memoryview(bytearray(MOST_READ))
        self._resting: Timer | None = None
        for toxic in spec.toxics:
            self.add_toxic(toxic)

    def _direction(self, way: str, spec: LinkSpec) -> Direction:
        law = law_of(spec, f"{self.env.seed}/proxy/{self.name}/{way}")
        return Direction(self.env, law, LinkStats(self.name, way, ""), LOOK_AHEAD, QUANTUM)

    # -- the switch -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises CannotRun where the address cannot be had."""
        if self.enabled:
            return
        host, port = parse_address(self.listen)
        loop = asyncio.get_running_loop()
        try:
            where = await loop.getaddrinfo(
                host or LOOPBACK, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            server = _listening(where[0], self.shapes["up"].rate)
        except OSError as error:
            why = error.strerror or str(error)
            raise CannotRun(f"proxy {self.name} cannot listen on {self.listen}: {why}") from None
        self._servers.append(server)
        self.listen = shown_address(server.getsockname())
        self.enabled = True
        loop.add_reader(server.fileno(), self._accept, server)

    async def stop(self) -> None:
        """Listens no more; every connection is closed."""
        self.enabled = False
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        loop = asyncio.get_running_loop()
        servers, self._servers = self._servers, []
        for server in servers:
            loop.remove_reader(server.fileno())
            server.close()
        for dial in list(self._dials):
            dial.cancel()
        if self._dials:
            await asyncio.wait(self._dials)
        for relayed in list(self.connections.values()):
            relayed.kill(reset=False)

    async def close(self) -> None:
        await self.stop()
        self.up.close()
        self.down.close()

    async def move(self, listen: str, upstream: str, enabled: bool) -> None:
        """Other addresses, or the switch. A new address ends what is open. Raises ValueError, and
        CannotRun where the address cannot be had: then it listens where it did."""
        parse_address(listen), parse_address(upstream)
        before = self.listen, self.asked, self.upstream
        was_enabled = self.enabled
        if (listen not in (self.listen, self.asked)) or upstream != self.upstream:
            await self.stop()
            if listen not in (self.listen, self.asked):
                self.listen = self.asked = listen
            self.upstream = upstream
        if not enabled:
            await self.stop()
            return
        try:
            await self.start()
        except CannotRun:
            self.listen, self.asked, self.upstream = before
            if was_enabled:
                await self.start()
            raise

    # -- the link ---------------------------------------------------------------------------------

    def reshape(self, way: str, shape: Shape) -> None:
        """Another link, from now on. Raises ValueError for an impossible one."""
        direction = self.up if way == "up" else self.down
        if shape.jitter and not shape.delay:
            raise ValueError("jitter needs a delay to vary")
        before = self.shapes[way]
        if shape.rate != before.rate:
            direction.set_rate(shape.rate)
        if (shape.delay, shape.jitter) != (before.delay, before.jitter):
            direction.set_delay(shape.delay, shape.jitter)
        self.shapes[way] = shape
        self._wake()

    def _wake(self) -> None:
        for relayed in list(self.connections.values()):  # reading may end one
            for pipe in relayed.pipes:
                pipe.wanted()

    # -- toxics -----------------------------------------------------------------------------------

    def add_toxic(self, toxic: Toxic) -> None:
        assert toxic.name not in self.toxics
        self.toxics[toxic.name] = toxic
        for number, relayed in list(self.connections.items()):
            self._infect(number, relayed, toxic)

    def change_toxic(self, toxic: Toxic) -> None:
        """Other attributes, or another toxicity: that holds for connections to come."""
        self.toxics[toxic.name] = toxic
        for relayed in list(self.connections.values()):
            _pipe(relayed, toxic).change(toxic)

    def remove_toxic(self, name: str) -> None:
        toxic = self.toxics.pop(name)
        for relayed in list(self.connections.values()):
            _pipe(relayed, toxic).remove(name)

    def _infect(self, number: int, relayed: Relayed, toxic: Toxic) -> None:
        seed = f"{self.env.seed}/proxy/{self.name}/{toxic.name}/{number}"
        if self.env.rng(f"proxy/{self.name}/{toxic.name}/{number}").random() < toxic.toxicity:
            pipe = _pipe(relayed, toxic)
            pipe.add(STAGES[toxic.type](pipe, toxic, seed))

    # -- connections ------------------------------------------------------------------------------

    def _accept(self, server: socket.socket) -> None:
        for _ in range(ACCEPTS):
            try:
                client, _ = server.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file or no memory is left: others need a chance to end
                self._notices.tell(f"proxy {self.name} cannot accept: {error.strerror}")
                self._rest(server)
                return
            self.accepted += 1
            if len(self.connections) >= MAX_CONNECTIONS:
                self._notices.tell(f"proxy {self.name} has {MAX_CONNECTIONS} connections; no more")
                self.refused += 1
                client.close()
                continue
            self._relay(client)

    def _rest(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(server.fileno())

        def again() -> None:
            self._resting = None
            if server in self._servers:
                loop.add_reader(server.fileno(), self._accept, server)

        self._resting = self.env.call_at(self.env.now() + PAUSE_ACCEPTING, again)

    def _relay(self, client: socket.socket) -> None:
        client.setblocking(False)
        _prompt(client)
        number = next(self._numbers)

        def over(relayed: Relayed) -> None:
            self._past["up"] += relayed.up.passed
            self._past["down"] += relayed.down.passed
            del self.connections[number]

        relayed = Relayed(self.env, client, self.up, self.down, self._hold, self._scratch, over)
        self.connections[number] = relayed
        for toxic in self.toxics.values():
            self._infect(number, relayed, toxic)
        relayed.begin(lambda: self._spawn_dial(relayed))

    def _spawn_dial(self, relayed: Relayed) -> None:
        task = asyncio.get_running_loop().create_task(self._dial(relayed))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dial(self, relayed: Relayed) -> None:
        sock = None
        try:
            async with asyncio.timeout(DIAL_DEADLINE / SECOND):
                family, address = await _resolved(self.upstream)
                sock = socket.socket(family, socket.SOCK_STREAM)
                sock.setblocking(False)
                _bound(sock, self.shapes["down"].rate)
                await asyncio.get_running_loop().sock_connect(sock, address)
        except (OSError, TimeoutError) as error:
            if sock is not None:
                sock.close()
            why = "no answer" if isinstance(error, TimeoutError) and not error.args else str(error)
            if isinstance(error, ConnectionRefusedError):
                why = "connection refused"
            self.refused += 1
            self._notices.tell(f"proxy {self.name}: upstream {self.upstream}: {why}")
            relayed.refused()
            return
        except asyncio.CancelledError:
            if sock is not None:
                sock.close()
            raise
        _prompt(sock)
        relayed.opened(sock)

    # -- what is known ----------------------------------------------------------------------------

    @property
    def transferred(self) -> tuple[int, int]:
        """Bytes handed to the upstream and to clients, since the beginning."""
        live = self.connections.values()
        up = self._past["up"] + sum(relayed.up.passed for relayed in live)
        return up, self._past["down"] + sum(relayed.down.passed for relayed in live)

    @property
    def held(self) -> int:
        return sum(pipe.held for r in self.connections.values() for pipe in r.pipes)

    def kept(self) -> list[Kept]:
        """How well its times were kept, each way."""
        found = []
        for way, direction in (("up", self.up), ("down", self.down)):
            stats = direction.stats()
            about = (self.name, way, direction.peak_rate, stats.bytes, stats.busy)
            found.append(Kept(*about, direction.ledger))
        return found


def _pipe(relayed: Relayed, toxic: Toxic) -> Pipe:
    return relayed.up if toxic.stream == "upstream" else relayed.down


class Proxies:
    """Those of one process, by name."""

    def __init__(self, env: Env, say: Callable[[str], None], hold_limit: int = HOLD_LIMIT) -> None:
        self.env = env
        self.hold = Hold(hold_limit)
        self.notices = Notices(say)
        self.by_name: dict[str, Proxy] = {}

    async def add(self, spec: ProxySpec) -> Proxy:
        """Raises CannotRun where it cannot listen; then there is none of this name."""
        assert spec.name not in self.by_name
        proxy = Proxy(self.env, spec, self.hold, self.notices)
        if spec.enabled:
            await proxy.start()
        self.by_name[spec.name] = proxy
        return proxy

    async def remove(self, name: str) -> None:
        await self.by_name.pop(name).close()

    async def populate(self, specs: Iterable[ProxySpec]) -> list[Proxy]:
        """One proxy each; those that are there already, with the same addresses, stay as they are
        but for the switch. Raises CannotRun."""
        found = []
        for spec in specs:
            there = self.by_name.get(spec.name)
            if there is not None:
                same = spec.listen in (there.listen, there.asked)
                if same and spec.upstream == there.upstream:
                    await there.move(there.listen, there.upstream, spec.enabled)
                    found.append(there)
                    continue
                await self.remove(spec.name)
            found.append(await self.add(spec))
        return found

    async def reset(self) -> None:
        """Every proxy is enabled and has no toxics. Raises CannotRun."""
        for proxy in self.by_name.values():
            await proxy.start()
            for name in list(proxy.toxics):
                proxy.remove_toxic(name)

    async def close(self) -> None:
        for name in list(self.by_name):
            await self.remove(name)


# -- sockets ---------------------------------------------------------------------------------------


async def _resolved(upstream: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    host, port = parse_address(upstream)
    host = host or LOOPBACK
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return found[0][0], found[0][4]
    return (socket.AF_INET if version == 4 else socket.AF_INET6), (host, port)


def _listening(where: tuple[object, ...], rate: int | None) -> socket.socket:
    family, kind, proto, _, address = where
    server = socket.socket(family, kind, proto)  # type: ignore[arg-type]
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bound(server, rate)
        server.bind(address)  # type: ignore[arg-type]
        server.listen(1024)
        server.setblocking(False)
    except OSError:
        server.close()
        raise
    return server


def _bound(sock: socket.socket, rate: int | None) -> None:
    """What the kernel keeps before we read it is before the link, too: some milliseconds of it."""
    wanted = _KERNEL_MOST if rate is None else rate * _KERNEL_TIME // SECOND
    size = min(max(wanted, _KERNEL_LEAST), _KERNEL_MOST)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_MOST)
    for name in (b"cubic", b"reno"):  # the kernel's pacing must not shape: see `tcpnet`
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return
        except (OSError, AttributeError):
            continue


def _prompt(sock: socket.socket) -> None:
    """Small writes leave at once."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTCONN, errno.ECONNRESET):
            raise
