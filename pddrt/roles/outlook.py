"""What the gateway believes of the instances and paths: capacities, load, caches, transfers.

Nothing here is asked for when a request comes. What instances are doing is what they said last
(`roles.load`, so old as the gateway allowed) and what has been sent to them since and that report
does not know of: requests that come within the age of one signal do not all go to the same place.
What paths carry is what streams achieved on them (`policy.estimate`). A policy sees all of it as
`policy.route.Facts`.

P says of each transfer to a main decoder when the path is what it waits for (`streaming`), and what
it came to in the end (`crossed`); a transfer is **crossing** from its routing, or from when it was
let go, until then. It may outlast its request: KV still crosses when the answer is there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pddrt.frames import Frame
from pddrt.kv.memory import KVMemory
from pddrt.messages import Limits
from pddrt.netem.net import LinkSpec, Topology
from pddrt.policy.estimate import PathRate
from pddrt.policy.route import Facts, InstanceFacts, PathFacts, Route, transfer_time
from pddrt.roles.load import Load
from pddrt.types import Ns

MAX_LATE = 1000
"""How many answered requests are remembered whose KV is still crossing; a guess may be lost."""


@dataclass(slots=True)
class Capacity:
    """What an instance said of itself, and what it is thought to be doing and to have cached.

    `said` is its last report, `unseen` what was sent there and is not in it: tokens by request.
    `requests`: sent there and not over. `memory` is a guess at its prefix cache: the same cache,
    fed with what was sent there, page numbers that mean nothing. The instance is not asked; what it
    finds when it admits decides.
    """

    role: str
    kv_tokens: int
    page_tokens: int
    max_batch: int
    max_context: int
    bytes_per_token: int
    memory: KVMemory
    requests: int = 0
    said: Load = field(default_factory=Load)
    unseen: dict[str, int] = field(default_factory=dict)
    life: int = 0
    """How often it has begun anew: what was cached in an earlier life is gone."""

    @classmethod
    def of(cls, hello: Frame) -> Capacity:
        num_pages = hello["kv_tokens"] // hello["page_tokens"]
        memory = KVMemory(num_pages, hello["page_tokens"], "", caching=hello["caching"])
        return cls(
            hello["role"],
            hello["kv_tokens"],
            hello["page_tokens"],
            hello["max_batch"],
            hello["max_context"],
            hello["bytes_per_token"],
            memory,
            life=hello["life"],
        )

    @property
    def tokens(self) -> int:
        """What a new request would have before it; see `Load`."""
        return self.said.tokens + sum(self.unseen.values())

    def full(self, tokens: int) -> bool:
        """Whether a request that needs so many tokens of KV would probably have to wait here, for
        memory or for its turn in the batch.
        """
        coming = [*self.unseen.values(), tokens]
        pages = self.said.pages + sum(-(-t // self.page_tokens) for t in coming)
        requests = self.said.waiting + self.said.holding + len(coming)
        room = self.kv_tokens // self.page_tokens
        return self.said.waiting > 0 or pages > room or requests > self.max_batch

    def remember(self, ids: Sequence[int]) -> None:
        """KV of `ids` has been there."""
        if ids and self.memory.reserve("", ids, len(ids)):
            if self.memory.tail(""):
                self.memory.copied("")
            self.memory.keep("", ids)
            self.memory.release("")


@dataclass(slots=True)
class Crossing:
    """KV on its way to a main decoder. `kv_bytes`: what was thought to be lacking there, and
    `expected` how long that takes, when it was routed or let go. `whole`: it is all there. `late`:
    the request was over before, and this is what its main decoder will hold.
    """

    src: str
    dst: str
    kv_bytes: int
    expected: Ns | None
    whole: bool = False
    late: list[int] | None = None


class Outlook:
    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.instances: dict[str, Capacity] = {}
        """Those in reach that have said what they are."""
        self._gone: dict[str, Capacity] = {}
        self._crossing: dict[str, Crossing] = {}
        self._paths: dict[str, PathRate] = {}
        """By the name of the link."""

    # -- requests ----------------------------------------------------------------------------------

    def refusal(self, limits: Limits) -> str | None:
        """Why no instance could ever serve this request; None if some can, if the policy finds
        them.
        """
        if not limits.prompt_len:
            return "the prompt is empty"
        if not self.instances:
            return "no instance is in reach"
        needed = limits.prompt_len + limits.max_tokens
        context = min(i.max_context for i in self.instances.values())
        if needed > context:
            return (
                f"{limits.prompt_len} prompt + {limits.max_tokens} answer tokens are more than "
                f"the model's context of {context}"
            )
        return None

    def facts(
        self, now: Ns, ids: Sequence[int], max_tokens: int, reachable: Collection[str]
    ) -> Facts:
        """What a policy sees of a request with the prompt `ids`."""

        def of(role: str) -> list[InstanceFacts]:
            return [
                self._facts_of(name, i, ids)
                for name, i in self.instances.items()
                if i.role == role and name in reachable
            ]

        prefills, mains = of("prefill"), of("main")
        paths: dict[tuple[str, str], PathFacts] = {}
        by_link: dict[str, PathFacts] = {}
        for p in prefills:
            for m in mains:
                if not self.topology.joined(p.name, m.name):
                    continue
                link = self.topology.link_between(p.name, m.name)
                name = link.name if link else ""
                if name not in by_link:
                    by_link[name] = self._path_facts(now, link)
                paths[p.name, m.name] = by_link[name]
        return Facts(
            prompt_tokens=len(ids),
            bytes_per_token=next(
                (i.bytes_per_token for i in self.instances.values() if i.role == "prefill"), 0
            ),
            prefills=prefills,
            relays=of("relay"),
            mains=mains,
            paths=paths,
            max_tokens=max_tokens,
        )

    def _facts_of(self, name: str, i: Capacity, ids: Sequence[int]) -> InstanceFacts:
        hit = i.memory.peek(ids)
        full = i.full(len(ids) + 1 - hit)
        return InstanceFacts(name, i.requests, i.tokens, hit, i.kv_tokens, full)

    def _path_facts(self, now: Ns, link: LinkSpec | None, but: str = "") -> PathFacts:
        """`but`: a request whose own transfer does not count."""
        if link is None:
            return PathFacts(None, 0)
        others = (r for r, c in self._crossing.items() if r != but and self._link_of(c) is link)
        return PathFacts(
            self._path(link).rate, link.delay, tuple(self._rest(now, r) for r in others)
        )

    def _rest(self, now: Ns, request: str) -> int:
        """Bytes of this transfer that have probably not crossed yet."""
        crossing = self._crossing[request]
        if crossing.whole:
            return 0
        link = self._link_of(crossing)
        rest = self._path(link).rest(now, request) if link else 0
        return crossing.kv_bytes if rest is None else rest

    def _link_of(self, crossing: Crossing) -> LinkSpec | None:
        return self.topology.link_between(crossing.src, crossing.dst)

    def _path(self, link: LinkSpec) -> PathRate:
        return self._paths.setdefault(link.name, PathRate(link.rate))

    # -- what happens to requests ------------------------------------------------------------------

    def opened(self, request: str, route: Route, facts: Facts) -> None:
        """A request was sent on its way."""
        for member in (*facts.prefills, *facts.relays, *facts.mains):
            if member.name in route.members:
                instance = self.instances[member.name]
                instance.requests += 1
                instance.unseen[request] = facts.prompt_tokens + 1 - member.hit
        if not route.held:
            self.let_go(request, route, self.lacking(route, facts), route.wan_estimate)

    def lacking(self, route: Route, facts: Facts) -> int:
        """Bytes that the main decoder of `route` probably has not got."""
        main = next((m for m in facts.mains if m.name == route.main), None)
        return 0 if main is None else facts.lacking(main)

    def let_go(self, request: str, route: Route, kv_bytes: int, expected: Ns | None) -> None:
        """The transfer to the main decoder, if there is any, begins as soon as it can."""
        if route.prefill is not None and route.main is not None:
            self._crossing[request] = Crossing(route.prefill, route.main, kv_bytes, expected)

    def cut(self, request: str) -> None:
        """It will not go on."""
        self._crossing.pop(request, None)

    def left(self, request: str, name: str) -> None:
        """This request has no part there any more."""
        if instance := self.instances.get(name):
            instance.requests -= 1
            instance.unseen.pop(request, None)

    def joined(self, request: str, name: str, tokens: int) -> None:
        """This request, under way, will have a part there, too."""
        self.instances[name].requests += 1
        self.instances[name].unseen[request] = tokens

    def closed(self, request: str, members: Sequence[str]) -> None:
        for name in members:
            self.left(request, name)
        crossing = self._crossing.get(request)
        if crossing is not None and crossing.late is None:
            self.cut(request)

    def answered(self, request: str, route: Route, ids: Sequence[int], spared: bool) -> None:
        """P and whoever ended it will know the KV of `ids`; MD only when that of the prompt has
        crossed, and not at all if it was `spared`. Before `closed`.
        """
        crossing = self._crossing.get(request)
        if crossing is not None and crossing.whole:
            crossing = None
        ended_by = route.relay if route.main is None else route.main
        for name in (route.prefill, ended_by if crossing is None and not spared else None):
            if name is not None and name in self.instances:
                self.instances[name].remember(ids)
        if crossing is not None:
            crossing.late = list(ids)
            late = [r for r, c in self._crossing.items() if c.late is not None]
            for oldest in late[:-MAX_LATE]:
                self.cut(oldest)

    # -- what instances say ------------------------------------------------------------------------

    def introduced(self, name: str, hello: Frame, order: Sequence[str]) -> None:
        """An instance says what it is, perhaps again. `order`: of those that there may be."""
        capacity, before = Capacity.of(hello), self._gone.pop(name, None)
        if before is not None and before.life == capacity.life:
            capacity.memory = before.memory
        self.instances[name] = capacity
        self.instances = {n: self.instances[n] for n in order if n in self.instances}

    def reported(self, instance: str, load: Load, arrived: Sequence[str]) -> None:
        """`arrived`: requests that the report knows of, and the one before it did not."""
        capacity = self.instances[instance]
        capacity.said = load
        for request in arrived:
            capacity.unseen.pop(request, None)

    def whole(self, request: str, instance: str, prompt: Sequence[int]) -> None:
        """`instance` holds the KV of the whole prompt of a request that is under way."""
        if instance in self.instances:
            self.instances[instance].remember(prompt)
        crossing = self._crossing.get(request)
        if crossing is not None and crossing.dst == instance:
            crossing.whole = True

    def late(self, request: str, instance: str) -> None:
        """`instance` got the KV of a request that is over."""
        crossing = self._crossing.get(request)
        if crossing and crossing.late is not None and crossing.dst == instance:
            if instance in self.instances:
                self.instances[instance].remember(crossing.late)
            crossing.whole, crossing.late = True, []

    def streaming(self, now: Ns, src: str, frame: Frame) -> None:
        """P: from now on the path is what this transfer waits for, with `bytes` to go; or it is not
        any more, `bytes` have left.
        """
        link = self.topology.link_between(src, frame["to"])
        if link is None:
            return
        if frame["busy"]:
            self._path(link).busy(now, frame["request"], frame["bytes"])
        else:
            self._path(link).idle(now, frame["request"], frame["bytes"])

    def crossed(self, now: Ns, src: str, frame: Frame) -> tuple[Crossing | None, int | None]:
        """P: a transfer to a main decoder has ended. What was expected of it, and what the path is
        now thought to carry.
        """
        request, link = frame["request"], self.topology.link_between(src, frame["to"])
        crossing = self._crossing.pop(request, None)
        if link is None:
            return crossing, None
        self._path(link).over(now, request, whole=frame["whole"])
        return crossing, self._path(link).rate

    def gone(self, now: Ns, name: str) -> None:
        """An instance has left, or cannot be reached any more: what crosses from or to it does so
        no longer. It has no requests any more, and may come back.
        """
        if name in self.instances:
            self._gone[name] = self.instances.pop(name)
        for request, crossing in list(self._crossing.items()):
            if name in (crossing.src, crossing.dst):
                self.cut(request)
                if link := self._link_of(crossing):
                    self._path(link).over(now, request, whole=False)

    # -- expectations ------------------------------------------------------------------------------

    def delay(self, src: str, dst: str) -> Ns:
        link = self.topology.link_between(src, dst)
        return link.delay if link else 0

    def expected(self, now: Ns, request: str, route: Route, kv_bytes: int) -> Ns | None:
        """How long `kv_bytes` of this request would take to its main decoder, from now on."""
        assert route.prefill is not None
        assert route.main is not None
        link = self.topology.link_between(route.prefill, route.main)
        return transfer_time(kv_bytes, self._path_facts(now, link, but=request))

    def rest(self, now: Ns, request: str) -> int | None:
        """Bytes that have probably still to cross; None where nothing does."""
        return self._rest(now, request) if request in self._crossing else None
