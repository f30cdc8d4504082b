"""What may befall a net: links that are worse than they were, streams that break, frames that are
not what was sent. The same for both nets.

**Links.** An `Impairment` worsens both directions of a link or one way of it, for as long as it is
in force. Several at a time do not add up: the lowest rate holds, the longest delay, the largest
jitter, and never better than the link itself.

**Frames.** A `Snare` lies in wait for frames of a kind, from one instance to another, and does
something to the next of them before they go on the link:

    corrupt    a byte behind the lengths is another one: the checksum does not match
    truncate   its end is missing, and what follows on the stream takes its place
    duplicate  it is sent twice
    delay      it is held back, and what is behind it on the stream with it

Bytes that the reader checks are damaged as they cross, so that what finds the damage is what would
find it on a wire. A net without snares does not know of this file.

**Streams.** `reset`: both ends read what has arrived, then ConnectionLost.

Owns: what is in force. Leaves out when, and for how long (see `pddrt.injector`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pddrt.env import Timer
from pddrt.errors import ConnectionLost
from pddrt.frames import PREFIX
from pddrt.netem.net import Connection, LinkSpec
from pddrt.netem.stream import EmulatedNet, Outgoing, Stream
from pddrt.types import Ns

Way = tuple[str, str]
Harm = Literal["corrupt", "truncate", "duplicate", "delay"]

_CHECKED = PREFIX.size - 8
"""Where a frame's checksum begins: damage before it may be of the lengths, which is another kind of
harm (the reader waits for bytes that nobody sends), or of a byte that means nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Impairment:
    """`way`: (from site, to site), None for both. `rate` at most (bytes/s, 0: an outage), `delay`
    and `jitter` at least.
    """

    link: str
    way: Way | None = None
    rate: int | None = None
    delay: Ns = 0
    jitter: Ns = 0


@dataclass(slots=True, eq=False)
class Snare:
    """For the next `frames` frames of `kind` from `src` to `dst` (None: any). `by`: of a delay.

    `caught` is called with each, before anything is done to it.
    """

    harm: Harm
    rng: random.Random
    kind: str | None = None
    src: str | None = None
    dst: str | None = None
    frames: int = 1
    by: Ns = 0
    caught: Callable[[Stream, Outgoing], None] = lambda _stream, _out: None

    def wants(self, stream: Stream, out: Outgoing) -> bool:
        mine = ((self.kind, out.kind), (self.src, stream.name), (self.dst, stream.peer))
        return self.frames > 0 and all(one in (None, other) for one, other in mine)


class NetFaults:
    def __init__(self, net: EmulatedNet) -> None:
        self._net = net
        self._impairments: list[Impairment] = []
        self._state: dict[tuple[str, Way], tuple[int | None, Ns, Ns]] = {}
        """Of each link and way: rate, delay and jitter, where they were ever changed here."""
        self._snares: list[Snare] = []
        self._held: list[tuple[Timer, Stream, Outgoing]] = []

    # -- links -------------------------------------------------------------------------------------

    def impair(self, impairment: Impairment) -> None:
        """Raises LookupError where there is no such link or way."""
        spec = self._spec(impairment.link)
        if impairment.way not in (None, spec.between, spec.between[::-1]):
            raise LookupError(f"{spec.name} does not lead from {impairment.way}")
        self._impairments.append(impairment)
        self._apply(spec)

    def relieve(self, impairment: Impairment) -> None:
        """It is not in force any more."""
        self._impairments.remove(impairment)
        self._apply(self._spec(impairment.link))

    def _spec(self, link: str) -> LinkSpec:
        found = [spec for spec in self._net.topology.links if spec.name == link]
        if not found:
            raise LookupError(f"no link is called {link!r}")
        return found[0]

    def _apply(self, spec: LinkSpec) -> None:
        ways = list(dict.fromkeys((spec.between, spec.between[::-1])))
        plain = [spec.toward(*way) for way in ways]
        before = [
            self._state.get((spec.name, way), (one.rate, one.delay, one.jitter))
            for way, one in zip(ways, plain, strict=True)
        ]
        after = [self._effective(spec, way) for way in ways]
        changed = [way for way, old, new in zip(ways, before, after, strict=True) if old != new]
        alike = len(changed) == len(ways) and len(set(after)) == len(set(before)) == 1
        for way, old, new in zip(ways, before, after, strict=True):
            if way not in changed or (alike and way != ways[0]):
                continue
            only = None if alike else way
            if new[0] != old[0]:
                self._net.set_rate(spec.name, new[0], only)
            if new[1:] != old[1:]:
                self._net.set_delay(spec.name, new[1], new[2], only)
        self._state.update(zip([(spec.name, way) for way in ways], after, strict=True))

    def _effective(self, spec: LinkSpec, way: Way) -> tuple[int | None, Ns, Ns]:
        here = [i for i in self._impairments if i.link == spec.name and i.way in (None, way)]
        spec = spec.toward(*way)
        rates = [rate for rate in (spec.rate, *(i.rate for i in here)) if rate is not None]
        delay = max(spec.delay, *(i.delay for i in here), 0)
        jitter = max(spec.jitter, *(i.jitter for i in here), 0)
        return min(rates, default=None), delay, jitter

    # -- frames ------------------------------------------------------------------------------------

    def lay(self, snare: Snare) -> None:
        self._snares.append(snare)
        self._net.tamper = self._tamper

    def lift(self, snare: Snare) -> None:
        """It does nothing any more; what it holds back goes on in its time."""
        self._snares.remove(snare)
        if not self._snares:
            self._net.tamper = None

    def _tamper(self, stream: Stream, out: Outgoing) -> list[Outgoing]:
        snare = next((s for s in self._snares if s.wants(stream, out)), None)
        if snare is None:
            return [out]
        snare.frames -= 1
        snare.caught(stream, out)
        match snare.harm:
            case "corrupt":
                out.replace(_damaged(out.whole(), snare.rng))
            case "truncate":
                whole = out.whole()
                out.replace(whole[: snare.rng.randrange(1, len(whole))])
            case "duplicate":
                return [out, out.copy()]
            case "delay":
                self._hold(stream, out, snare.by)
        return [out]

    def _hold(self, stream: Stream, out: Outgoing, by: Ns) -> None:
        env = self._net.env
        out.held = True
        timer = env.call_at(env.now() + by, stream.let_go, out)
        self._held = [h for h in self._held if h[2].held]
        self._held.append((timer, stream, out))

    # -- streams, and the end ----------------------------------------------------------------------

    def reset(self, connection: Connection) -> None:
        """As if somebody on the way had cut it."""
        assert isinstance(connection, Stream)
        peer = connection.peer
        connection.broken(ConnectionLost(f"the connection to {peer} was reset on the way"))

    def close(self) -> None:
        """Lets go of everything: the links are as they were."""
        for impairment in list(self._impairments):
            self.relieve(impairment)
        for snare in list(self._snares):
            self.lift(snare)
        for timer, stream, out in self._held:
            timer.cancel()
            stream.let_go(out)
        self._held.clear()


def _damaged(whole: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(whole)
    at = rng.randrange(_CHECKED, len(whole))
    damaged[at] ^= rng.randrange(1, 256)
    return bytes(damaged)
