"""What every role is made of: a named node with control streams to its peers.

`Node` listens under its name, dials its peers, and calls `on_<kind>` for each frame. Handlers are
plain functions: they decide and post, they never wait. Only four things wait: a reader of a
connection, the step loop, a KV transfer, the sending of a prompt (`post_when_room`).

Between two nodes runs one **control** stream; KV goes over **kv** streams of its own, so that
tokens and commands never queue behind it. The dialling side says which it is in the first frame,
`open`.

A frame that is not as `messages.MESSAGES` says, or a `PeerError` raised by a handler, ends the
request that the frame speaks of (`fail`), else the connection. Late frames for requests that are
gone are ignored by the handlers. Anything else that escapes is a bug and ends the run.

A peer that does not take its control frames is as good as lost: its connection is ended, and its
reader does what there is to do then.

A control stream that was lost is opened again by whoever opened it, as soon as the peer listens.
What was under way with that peer is over by then: each side ended it when it learnt of the loss.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from pddrt.env import Env
from pddrt.errors import BadFrame, ConnectionLost, PeerError
from pddrt.frames import Frame
from pddrt.messages import MESSAGES, check_fields
from pddrt.netem.net import Connection, Net
from pddrt.types import MS, SECOND, Ns

Handler = Callable[[Connection, Frame], None]

REDIAL_FIRST: Ns = 50 * MS
REDIAL_LONGEST: Ns = SECOND
"""Between two attempts to reach a lost peer: from the one to the other, doubled each time, less up
to half of it at random, so that not all come at once when it is back."""
REDIALS = 10_000
"""Attempts; then it is given up (some two hours)."""


class Node:
    """A name on the net. Subclasses define `on_<kind>(conn, frame)`."""

    def __init__(self, env: Env, net: Net, name: str) -> None:
        self.env = env
        self.net = net
        self.name = name
        self.peers: dict[str, Connection] = {}
        self.hold: Callable[[], Awaitable[None]] | None = None
        """Awaited before each frame is handled, where somebody slows this node down."""
        self._connections: list[Connection] = []
        self._overrun: dict[str, PeerError] = {}
        self._dialled: list[str] = []
        self._redials: dict[str, asyncio.Task[None]] = {}
        self._closing = False

    # -- starting and ending -----------------------------------------------------------------------

    async def start(self) -> None:
        """From here on others can connect. Also after a crash."""
        self._closing = False
        await self.net.listen(self.name, self._accept)

    async def dial(self, peers: Sequence[str]) -> None:
        """Opens a control stream to each of `peers`, which must be listening."""
        for peer in peers:
            await self._call(peer)

    async def _call(self, peer: str) -> None:
        conn = await self.open(peer, "control")
        self.peers[peer] = conn
        if peer not in self._dialled:
            self._dialled.append(peer)
        self.env.spawn(self._read(conn), f"{self.name} reads {peer}")
        self.peer_opened(peer)

    def redial(self, peers: Sequence[str]) -> None:
        """As `dial`, for peers that may not be listening: tries again until they are."""
        for peer in peers:
            if peer not in self._redials:
                redialling = self._redial(peer)
                self._redials[peer] = self.env.spawn(redialling, f"{self.name} redials {peer}")

    async def _redial(self, peer: str) -> None:
        rng, wait = self.env.rng(f"{self.name} redials {peer}"), REDIAL_FIRST
        for _ in range(REDIALS):
            await self.env.sleep(round(wait * rng.uniform(0.5, 1)))
            try:
                await self._call(peer)
                break
            except ConnectionLost:
                wait = min(2 * wait, REDIAL_LONGEST)
        del self._redials[peer]

    async def open(self, peer: str, purpose: str) -> Connection:
        conn = await self.net.connect(self.name, peer)
        if self._closing:
            conn.abort()
            raise ConnectionLost(f"{self.name} is closing")
        self._connections.append(conn)
        conn.post(Frame("open", {"purpose": purpose}))
        return conn

    def drop(self, conn: Connection) -> None:
        """Ends one stream now; what has not left is lost."""
        conn.abort()
        if conn in self._connections:
            self._connections.remove(conn)

    async def close(self) -> None:
        """Ends every stream of this node. What was not over is lost."""
        self._closing = True
        for conn in self._connections:
            conn.abort()
        self._stop_redialling()

    def hang_up(self) -> None:
        """Ends every stream of this node, and does not listen. Nobody here hears of it."""
        self._closing = True
        self.net.unlisten(self.name)
        self._stop_redialling()
        self.peers.clear()
        for conn in self._connections:
            conn.abort()
        self._connections.clear()

    def _stop_redialling(self) -> None:
        for redialling in self._redials.values():
            redialling.cancel()
        self._redials.clear()

    def streams(self, peer: str) -> dict[Connection, str]:
        """The open streams to `peer`: control or kv."""
        control = self.peers.get(peer)
        open_now = [conn for conn in self._connections if conn.peer == peer]
        return {conn: "control" if conn is control else "kv" for conn in open_now}

    # -- frames ------------------------------------------------------------------------------------

    def post(self, peer: str, kind: str, payload: bytes = b"", **fields: object) -> None:
        """Sends a control frame; nothing happens if the peer is gone (its reader has seen to
        that).
        """
        conn = self.peers.get(peer)
        if conn is None:
            return
        try:
            conn.post(Frame(kind, fields, payload))
        except PeerError as error:
            self._overrun[peer] = error
            conn.abort()

    def post_when_room(
        self, peer: str, wanted: Callable[[], bool], kind: str, payload: bytes, **fields: object
    ) -> None:
        """As `post`, for what carries a prompt: many of those would overrun what may be posted.

        Goes out as soon as the stream takes it, unless `wanted()` is over before it was begun. What
        is posted to `peer` afterwards stays behind it.
        """

        async def send() -> None:
            conn = self.peers.get(peer)
            if conn is not None and wanted():
                with contextlib.suppress(ConnectionLost):  # its reader has seen to that
                    await conn.send(Frame(kind, fields, payload))

        self.env.spawn(send(), f"{self.name} sends {kind} to {peer}")

    async def _accept(self, conn: Connection) -> None:
        if self._closing:
            conn.abort()
            return
        self._connections.append(conn)
        try:
            first = await conn.recv()
            if first.kind != "open":
                raise BadFrame(f"{conn.peer} began with {first.kind!r}")
            check_fields(first)
        except PeerError:
            self.drop(conn)
            return
        if self.hold is not None:
            await self.hold()
        if conn not in self._connections:
            return
        if first["purpose"] == "control":
            if before := self.peers.get(conn.peer):  # its end has not come here yet
                self._lost(before, ConnectionLost(f"{conn.peer} has opened another"))
            self.peers[conn.peer] = conn
            self.peer_opened(conn.peer)
        await self._read(conn)

    async def _read(self, conn: Connection) -> None:
        try:
            while True:
                frame = await conn.recv()
                if self.hold is not None:
                    await self.hold()
                    if conn not in self._connections:
                        continue  # it has ended meanwhile
                self._dispatch(conn, frame)
        except PeerError as error:
            self._lost(conn, error)

    def _lost(self, conn: Connection, error: PeerError) -> None:
        self.drop(conn)
        control = self.peers.get(conn.peer) is conn
        if control:
            del self.peers[conn.peer]
            error = self._overrun.pop(conn.peer, error)
        if not self._closing:
            (self.peer_lost if control else self.stream_lost)(conn, error)
            if control and conn.peer in self._dialled:
                self.redial([conn.peer])

    def _dispatch(self, conn: Connection, frame: Frame) -> None:
        handler: Handler | None = getattr(self, f"on_{frame.kind}", None)
        if handler is None or frame.kind not in MESSAGES:
            raise BadFrame(f"{conn.peer} sent a frame of unknown kind {frame.kind!r}")
        try:
            check_fields(frame)
            handler(conn, frame)
        except PeerError as error:
            request = frame.fields.get("request")
            if not isinstance(request, str) or not self.heeds(conn.peer, request):
                raise
            self.blame(conn, frame, request, f"{self.name}: {error}")

    def on_bye(self, conn: Connection, frame: Frame) -> None:
        """A peer leaves; nobody looks for it when its stream has ended."""
        if self.peers.get(conn.peer) is conn and conn.peer in self._dialled:
            self._dialled.remove(conn.peer)

    # -- for subclasses ----------------------------------------------------------------------------

    def peer_opened(self, peer: str) -> None:
        """A control stream to `peer` is open."""

    def peer_lost(self, conn: Connection, error: PeerError) -> None:
        """The control stream to `conn.peer` has ended, not by our will."""

    def stream_lost(self, conn: Connection, error: PeerError) -> None:
        """A kv stream from `conn.peer` has ended; cancels end that way too."""

    def heeds(self, peer: str, request: str) -> bool:
        """Whether `peer` may have something to do with `request`. A mistake of anybody else is held
        against its stream, never against the request.
        """
        return True

    def blame(self, conn: Connection, frame: Frame, request: str, detail: str) -> None:
        """`frame`, which speaks of `request`, is wrong. Whoever asked for something is answered."""
        self.fail(request, detail)

    def fail(self, request: str, detail: str) -> None:
        """This request cannot go on here."""
        raise NotImplementedError
