"""The handoff protocol: what each side of a request may do, and when. No I/O, no clock.

Positions are absolute: the prompt is [0, m), the first answer token x0 is at m. When to send what
is the handoff policy's decision (`policy.handoff`); what may happen then stands here.

    Relay side (RLD)
    state      event                        next
    RECEIVING  KV whole and x0 known        DECODING   Decode, and `decide` if MD was ready
    RECEIVING  ... and x0 ends it           FINISHED
    DECODING   MD is ready                  `decide`
    ROUND      MD has caught up             `decide`
    ROUND      MD takes too long            as Finish
    FREEZING   the running step's id        HANDED     SendIds, the last
    FOLLOWED   the bound is reached         HANDED
    FOLLOWED   MD is first (the gateway)    HANDED
    FINISHED   ... after it was FOLLOWED    HANDED
    any that decodes, an id ends it         FINISHED
    any that decodes, MD is lost            DECODING   there may be another one later

    `decide`   Finish, no id is coming      HANDED     SendIds, the last
               Finish, a step will yield it FREEZING
               Piece                        ROUND      SendIds; it decodes on
               Follow                       FOLLOWED   LetFollow; it decodes on

    Main side (MD)
    RECEIVING  KV whole, relayed            READY      Ready
    RECEIVING  KV whole and x0 known        DECODING   Decode
    RECEIVING  ... and x0 ends it           FINISHED
    READY      a piece                      EXTENDING  Extend
    EXTENDING  its KV is there              READY      CaughtUp
    READY, EXTENDING  the last ids          DECODING   Decode
    READY      ids to follow                FOLLOWING  Decode
    FOLLOWING  ids to follow                FOLLOWING  Decode, where they say anything new
    DECODING   an id ends it                FINISHED
    READY, EXTENDING  RLD is lost, ids      DECODING   Decode (from the gateway's ids)

Any state may be left for CLOSED from outside (cancel, deadline, the gateway's close); nothing leads
out of HANDED and CLOSED. What comes late is ignored, what cannot be is refused (BadFrame; the shell
fails that request). The last piece is never empty: the pass over it yields the next id.

In FOLLOWING both sides decode. The gateway passes on whichever id of a position comes first and
sends MD what it has passed on of the relay's, so that there is one answer: where MD's own ids
differ (a near tie, rounded otherwise), it goes back to the gateway's. What comes while a step of
MD runs waits for its end. An id that seems to end the answer ends MD's decoding only until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from pddrt.errors import BadFrame
from pddrt.messages import KVAssembly, Limits, chain, finish
from pddrt.policy.handoff import Decision, Finish, Follow, Piece
from pddrt.types import FinishReason


@dataclass(frozen=True, slots=True)
class Decode:
    """Step from here on: `ids` continue the prompt. KV that is there for an answer holds for the
    first `kept` of them, and no further.
    """

    ids: tuple[int, ...]
    kept: int


@dataclass(frozen=True, slots=True)
class Extend:
    """Compute the KV of `ids`, which continue the prompt, and draw nothing."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Tell the relay that the main decoder holds the whole KV."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Tell the relay that the KV up to position `end` is there."""

    end: int


@dataclass(frozen=True, slots=True)
class SendIds:
    """Send ids of [start, start + len(ids)) to the main decoder; `last`: and nothing after them.
    `reason`: why it is the last.
    """

    start: int
    ids: tuple[int, ...]
    last: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LetFollow:
    """Ask the gateway to send the main decoder what it passes on."""


Action = Decode | Extend | Ready | CaughtUp | SendIds | LetFollow


class State(Enum):
    RECEIVING = auto()
    READY = auto()
    EXTENDING = auto()
    FOLLOWING = auto()
    DECODING = auto()
    ROUND = auto()
    FOLLOWED = auto()
    FREEZING = auto()
    HANDED = auto()
    FINISHED = auto()
    CLOSED = auto()


FINAL = frozenset({State.HANDED, State.FINISHED, State.CLOSED})
RELAY_DECODES = frozenset({State.DECODING, State.ROUND, State.FOLLOWED, State.FREEZING})
HANDS_OVER = frozenset({State.READY, State.EXTENDING})
"""States of a main decoder that depends on the relay to go on."""


@dataclass(slots=True)
class _Side:
    """What both decoders share: KV that arrives, ids that are known, an end."""

    limits: Limits
    state: State = State.RECEIVING
    ids: list[int] = field(default_factory=list)
    """Answer ids known here, from x0 on."""
    chain: int = 0
    """Digest of `ids`."""
    kv: KVAssembly = field(init=False)

    def __post_init__(self) -> None:
        self.kv = KVAssembly(self.limits.prompt_len)

    @property
    def final(self) -> bool:
        return self.state in FINAL

    @property
    def next(self) -> int:
        """Position of the id that comes next."""
        return self.limits.prompt_len + len(self.ids)

    def on_kv(self, start: int, end: int) -> list[Action]:
        if self.state is not State.RECEIVING:
            raise BadFrame(f"KV of [{start}, {end}) for a request that is {self.state.name}")
        self.kv.claim(start, end)
        return self._start()

    def close(self) -> None:
        """The request is over for this side, whatever it was doing."""
        if not self.final:
            self.state = State.CLOSED

    def _start(self) -> list[Action]:
        """More of what it needs to begin has arrived, perhaps all."""
        raise NotImplementedError

    def _decode(self) -> list[Action]:
        """The KV is whole and x0 known: on from there, unless x0 is all there is."""
        if finish(self.limits, self.limits.prompt_len, self.ids[0]):
            self.state = State.FINISHED
            return []
        self.state = State.DECODING
        return [Decode(tuple(self.ids), kept=len(self.ids))]

    def _learn(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)
        self.chain = chain(ids, self.chain)

    def _book(self, token: int) -> FinishReason | None:
        position = self.next
        self._learn([token])
        return finish(self.limits, position, token)


Ask = Callable[[int, tuple[int, ...], int], Decision]
"""The handoff policy's decision on (lacking, before, left): see `policy.handoff.Facts`."""


@dataclass(slots=True)
class RelaySide(_Side):
    """The relay decoder's half. `coming`, where an event needs it: a running step will yield an
    id.
    """

    ask: Ask | None = None
    """None: nobody to hand over to (P-RLD)."""
    main_is_ready: bool = False
    sent: int = 0
    """Answer ids that the main decoder has been sent."""
    before: tuple[int, ...] = ()
    """What it lacked at each decision so far."""
    bound: int = 0
    """How many ids there may be while it is FOLLOWED; 0: it never was."""
    reason: str = ""
    """Why it stops or has stopped."""

    def on_first(self, token: int) -> list[Action]:
        if self.state is not State.RECEIVING or self.ids:
            raise BadFrame("a second first token")
        self._learn([token])
        return self._start()

    def _start(self) -> list[Action]:
        if not self.kv.whole or not self.ids:
            return []
        actions = self._decode()
        if self.main_is_ready and actions:
            later = self._decide(coming=False)
            return later if self.final else actions + later
        return actions

    def on_main_ready(self, coming: bool) -> list[Action]:
        if self.main_is_ready or self.ask is None:
            raise BadFrame("the main decoder is ready twice, or is none")
        self.main_is_ready = True
        if self.state is not State.DECODING:
            return []  # RECEIVING: remembered; final: too late to matter
        return self._decide(coming)

    def on_caught_up(self, end: int, coming: bool) -> list[Action]:
        """The main decoder has the KV of what it was sent, up to position `end`."""
        if self.final or self.state is State.FREEZING:
            return []  # it was slow, and the last ids are on their way or not needed
        expected = self.limits.prompt_len + self.sent
        if self.state is not State.ROUND or end != expected:
            raise BadFrame(f"caught up to {end} with {self.sent} ids sent, {self.state.name}")
        return self._decide(coming)

    def on_overdue(self, coming: bool) -> list[Action]:
        """The answer to a piece takes too long."""
        return self._finish("no answer", coming) if self.state is State.ROUND else []

    def on_switched(self) -> None:
        """The gateway has had an id of the main decoder's first: what is made here is not asked for
        any more, not even an end.
        """
        if not self.bound:
            raise BadFrame(f"switched, and nobody follows a request that is {self.state.name}")
        if self.state in (State.FOLLOWED, State.FINISHED):
            self.state, self.reason = State.HANDED, "the main decoder is first"

    def on_main_lost(self) -> None:
        """There is nobody to hand over to any more: as if there had never been."""
        self.ask, self.main_is_ready = None, False
        self.sent, self.before, self.bound = 0, (), 0
        if self.state in RELAY_DECODES:
            self.state = State.DECODING

    def on_token(self, token: int) -> tuple[list[Action], FinishReason | None]:
        assert self.state in RELAY_DECODES, self.state
        reason = self._book(token)
        if reason:
            self.state = State.FINISHED
        elif self.state is State.FREEZING:
            return self._hand_over(), None
        elif self.state is State.FOLLOWED and len(self.ids) >= self.bound:
            self.state, self.reason = State.HANDED, "the bound"
        return [], reason

    def _decide(self, coming: bool) -> list[Action]:
        assert self.ask is not None
        lacking = len(self.ids) - self.sent + coming
        decision = self.ask(lacking, self.before, self.limits.max_tokens - len(self.ids))
        self.before = (*self.before, lacking)
        match decision:
            case Finish(reason):
                return self._finish(reason, coming)
            case Piece(most):
                # The last piece must have an id: the newest stays here, unless one is coming.
                made = self.ids[self.sent : len(self.ids) if coming else -1]
                ids = tuple(made[: max(0, most)])
                if not ids:
                    return self._finish("nothing to send ahead", coming)
                start = self.limits.prompt_len + self.sent
                self.sent += len(ids)
                self.state = State.ROUND
                return [SendIds(start, ids, last=False)]
            case Follow(most):
                self.bound = len(self.ids) + max(1, most)
                self.state = State.FOLLOWED
                return [LetFollow()]

    def _finish(self, reason: str, coming: bool) -> list[Action]:
        self.reason = reason
        if coming:
            self.state = State.FREEZING
            return []
        return self._hand_over()

    def _hand_over(self) -> list[Action]:
        self.state = State.HANDED
        start, ids = self.limits.prompt_len + self.sent, tuple(self.ids[self.sent :])
        self.sent = len(self.ids)
        return [SendIds(start, ids, last=True, reason=self.reason)]


@dataclass(slots=True)
class MainSide(_Side):
    """The main decoder's half. Not `relayed` (pipeline P-MD): it starts from P's first token."""

    relayed: bool = True
    told: list[int] = field(default_factory=list)
    """FOLLOWING: the answer as far as the gateway has passed on the relay's ids."""
    agreed: int = 0
    """So many ids are known to be the same in `ids` and `told`."""
    given: int = 0
    """So many of `ids` are the relay's, by its own word."""
    taken: bool = False
    """It goes on in place of the relay: what that says is not asked for any more."""

    def on_first(self, token: int) -> list[Action]:
        if self.relayed or self.ids or self.state is not State.RECEIVING:
            raise BadFrame("a first token that nobody waits for")
        self._learn([token])
        return self._start()

    def _start(self) -> list[Action]:
        if not self.kv.whole:
            return []
        if self.relayed:
            self.state = State.READY
            return [Ready()]
        return self._decode() if self.ids else []

    def on_ids(self, start: int, ids: Sequence[int], last: bool) -> list[Action]:
        """Ids from the relay; nothing is decoded before the KV is whole."""
        if self.taken:
            return []
        if self.state not in HANDS_OVER or (self.state is State.EXTENDING and not last):
            raise BadFrame(f"ids for a request that is {self.state.name}")
        self._check(start, ids, self.next)
        self._learn(ids)
        self.given = len(self.ids)
        if last:
            return self._decode()
        self.state = State.EXTENDING
        return [Extend(tuple(self.ids))]

    def on_follow(self, start: int, ids: Sequence[int], in_step: bool) -> list[Action]:
        """What the gateway has passed on of the relay's ids, from x0 on and without gaps."""
        if self.state not in (State.READY, State.FOLLOWING):
            raise BadFrame(f"ids to follow for a request that is {self.state.name}")
        self._check(start, ids, self.limits.prompt_len + len(self.told))
        if self.state is State.READY and list(ids[: len(self.ids)]) != self.ids:
            raise BadFrame("ids to follow that are not those of the pieces")
        self.told.extend(ids)
        self.state = State.FOLLOWING
        return [] if in_step else self._catch_up()

    def on_takeover(self, start: int, ids: Sequence[int], in_step: bool) -> list[Action]:
        """The relay is lost; the gateway has passed on `ids`, from x0 on. Where more is known here
        (it was on its way to the gateway), that is as good.
        """
        if not self.relayed or self.state in (State.FOLLOWING, *FINAL):
            return []
        if self.state is State.RECEIVING:
            raise BadFrame("a takeover before the KV is whole")
        self._check(start, ids, self.limits.prompt_len)
        both = min(len(ids), len(self.ids))
        if list(ids[:both]) != self.ids[:both]:
            raise BadFrame("a takeover with ids that are not those of the relay")
        if self.state is State.DECODING:
            return []
        self.taken = True
        news = ids[both:]
        self._learn(news)
        if self.state is State.EXTENDING and in_step and not news:
            return []  # when that step has ended
        return self._take_over()

    def _take_over(self) -> list[Action]:
        """The KV of the last id is computed again where it is there: that pass yields the next."""
        self.state = State.DECODING
        return [Decode(tuple(self.ids), kept=len(self.ids) - 1)]

    def on_computed(self, pending: int) -> list[Action]:
        """A step has ended that drew nothing; `pending` known ids have no KV yet."""
        if self.state is State.FOLLOWING:
            return self._catch_up()
        if self.state is State.EXTENDING and not pending and self.taken:
            return self._take_over()
        if self.state is State.EXTENDING and not pending:
            self.state = State.READY
            return [CaughtUp(self.next)]
        return []

    def on_token(self, token: int) -> tuple[list[Action], FinishReason | None]:
        """The end of the answer while FOLLOWING holds only until the gateway says otherwise."""
        assert self.state in (State.DECODING, State.FOLLOWING), self.state
        reason = self._book(token)
        if self.state is State.FOLLOWING:
            if actions := self._catch_up():
                return actions, None
        elif reason:
            self.state = State.FINISHED
        return [], reason

    def _check(self, start: int, ids: Sequence[int], expected: int) -> None:
        if start != expected or not ids:
            raise BadFrame(f"{len(ids)} ids from {start}; expected some from {expected}")
        if any(finish(self.limits, position, token) for position, token in enumerate(ids, start)):
            raise BadFrame(f"{len(ids)} ids from {start} go past the end of the answer")

    def _catch_up(self) -> list[Action]:
        """Own ids go on from what the gateway has passed on; where they do not, that is true."""
        known = min(len(self.ids), len(self.told))
        while self.agreed < known and self.ids[self.agreed] == self.told[self.agreed]:
            self.agreed += 1
        if (kept := self.agreed) == len(self.told):
            return []
        if kept < len(self.ids):
            self.ids, self.chain = [], 0
        self._learn(self.told[len(self.ids) :])
        self.agreed = len(self.told)
        return [Decode(tuple(self.ids), kept)]
