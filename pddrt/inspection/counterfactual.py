"""What a request would have cost by way of each other pipeline, in the run as it was. Pure.

The question is asked of one request at a time, and the others are taken to have done what they did:
they keep their instances, their memory and their hand-overs of KV. So the answer leaves out what a
choice does to others, and to later turns of its own conversation (`compare` runs a whole policy).
What is asked for is TTFT, the end of the answer, the time on RLD, and the KV that crosses the WAN;
the answer keeps its length, since tokens do not depend on who makes them.

How each part is had, the surest first:

    prompt on P      as it ran; else behind the prompts that P had, at what its steps cost
    KV at RLD        as it ran; else chunk by chunk over that link, once RLD had memory for it
    KV at MD         as it crossed in the run, if it did, earlier by as much as it was offered late;
                     else chunk by chunk on the link among what others sent (`crossing`)
    notice           the median of others in the run; else the delay
    pace of tokens   its own there (the median gap); else that of the instance's steps meanwhile,
                     and in between what one alone takes
    handoff          as it ran; else the medians of others: how long after MD had the KV RLD was
                     done, and the gap at the switch
    prompt on MD     in chunks, with the sequences that MD had in its steps

Left out: who would have been preempted, that RLD or MD would have had more in their batches, TCP.
Requests that were tried again or went on without a lost instance have no answer, nor have those
that did not end by themselves. docs/counterfactuals.md holds all of it against really running it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pddrt.inspection.hindsight import Hindsight, Machine, Seen, spans_of
from pddrt.policy.route import PIPELINES
from pddrt.types import SECOND, Ns

ID_BYTES, FRAME_BYTES = 4, 500
"""Of the frame that brings a prompt to MD as ids: each, and the rest of it (a round figure)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one request by way of one pipeline; None where nothing can be said. `how`: in words, what
    it rests on, or why there is nothing. `ran`: this is what happened.
    """

    pipeline: str
    ran: bool
    ttft: Ns | None
    e2e: Ns | None
    relay: Ns | None
    """How long RLD holds it after it can decode; 0 where it has no part."""
    wan_bytes: int | None
    how: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt on P: when it had memory, and when which part of it was computed."""

    instance: str
    admitted: Ns
    ended: Ns
    chunks: Sequence[tuple[Ns, int, int]]


def costs(known: Hindsight, seen: Seen) -> list[Cost]:
    """By way of every pipeline that the deployment has instances for, the one that ran first.

    Empty where nothing can be said: see `Seen.trouble`.
    """
    if seen.trouble or seen.ttft is None or not _all_known(known, seen):
        return []
    estimate = Estimate(known, seen)
    roles = {machine.role for machine in known.machines.values()}
    others = [p for p, needs in PIPELINES.items() if roles >= set(needs) and p != seen.pipeline]
    return [as_it_ran(seen), *(estimate.by(pipeline) for pipeline in others)]


def _all_known(known: Hindsight, seen: Seen) -> bool:
    """It was routed, over instances that the events have told of."""
    members = [name for name in (seen.prefill, seen.relay, seen.main) if name is not None]
    return bool(members) and all(name in known.machines for name in members)


def as_it_ran(seen: Seen) -> Cost:
    relay: Ns | None = 0
    if seen.relay is not None:
        held, freed = seen.whole.get(seen.relay), seen.freed.get(seen.relay)
        relay = None if held is None or freed is None else freed - held
    return Cost(seen.pipeline, True, seen.ttft, seen.e2e, relay, seen.wan_bytes, "as it ran")


def replayed(known: Hindsight, seen: Seen) -> Cost | None:
    """The pipeline that ran, but estimated as if its KV had not been seen to cross: what the
    estimates are worth, by what is known.
    """
    if seen.trouble or seen.ttft is None or seen.prefill is None or not _all_known(known, seen):
        return None
    return Estimate(known, seen, blind=True).by(seen.pipeline)


class Estimate:
    """For one request. `blind`: its own crossings are not to be used."""

    def __init__(self, known: Hindsight, seen: Seen, blind: bool = False) -> None:
        self._known = known
        self._seen = seen
        self._blind = blind
        self._notes: list[str] = []

    def by(self, pipeline: str) -> Cost:
        self._notes = []
        found = self._of(pipeline)
        if found is None:
            return Cost(pipeline, False, None, None, None, None, "; ".join(self._notes))
        ttft, e2e, relay, wan = found
        how = "; ".join(self._notes) or "the prompt on P as it ran"
        return Cost(pipeline, False, ttft, e2e, relay, wan, how)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _of(self, pipeline: str) -> tuple[Ns, Ns | None, Ns | None, int] | None:
        if pipeline == "MD":
            return self._on_main()
        prompt = self._prompt()
        if prompt is None:
            return None
        if pipeline == "P":
            first = prompt.ended + self._delay(self._site(prompt.instance), self._gateway)
            rest = self._rest(prompt.instance, first, "P")
            return self._costs(first, rest, 0, 0)
        if pipeline == "P-MD":
            return self._p_md(prompt)
        return self._relayed(prompt, handed_over=pipeline == "P-RLD-MD")

    def _costs(
        self, first: Ns, rest: Ns | None, relay: Ns | None, wan: int
    ) -> tuple[Ns, Ns | None, Ns | None, int]:
        """`first`: when the gateway lets the first token go; `rest`: from there to the end."""
        seen = self._seen
        assert seen.first is not None
        delivery = seen.first - seen.released if seen.released is not None else 0
        ttft = first + delivery - seen.sent
        return ttft, None if rest is None else ttft + rest, relay, wan

    # -- pipelines ---------------------------------------------------------------------------------

    def _p_md(self, prompt: Prompt) -> tuple[Ns, Ns | None, Ns | None, int] | None:
        main = self._pick("main")
        held = None if main is None else self._at_main(prompt, main, prompt.admitted)
        if main is None or held is None:
            return None
        first = self._released(prompt, held, main)
        return self._costs(first, self._rest(main, first, "M"), 0, self._wan(prompt, main))

    def _relayed(
        self, prompt: Prompt, handed_over: bool
    ) -> tuple[Ns, Ns | None, Ns | None, int] | None:
        seen, relay = self._seen, self._pick("relay")
        if relay is None:
            return None
        admitted, held = self._at_relay(prompt, relay)
        if admitted is None or held is None:
            return None
        first = self._released(prompt, held, relay)
        rest, left = self._rest(relay, first, "R"), max(0, seen.output_tokens - 1)
        if not handed_over:
            return self._costs(first, rest, rest, 0)
        main = self._pick("main")
        there = None if main is None else self._at_main(prompt, main, admitted)
        if main is None:
            return None
        wan, pace = self._wan(prompt, main), self._pace(relay, held, left, "R")
        if there is None or rest is None or pace is None:
            return self._costs(first, rest, rest, 0 if there is None else wan)
        busy = max(0, there - held) + self._handover(relay, main, pace)
        by_relay = busy // pace if pace else left
        if by_relay >= left:
            self._note("RLD would have ended it")
            return self._costs(first, rest, rest, wan)
        gap, by_main = self._gap(relay, main, by_relay + 1), left - by_relay - 1
        after = self._pace(main, held + busy + gap, by_main, "M")
        end = None if after is None else by_relay * pace + gap + by_main * after
        return self._costs(first, end, busy, wan)

    def _on_main(self) -> tuple[Ns, Ns | None, Ns | None, int] | None:
        seen, main = self._seen, self._pick("main")
        if main is None or seen.routed is None:
            return None
        machine, hit = self._known.machines[main], self._hit(main, "main")
        road = self._known.roads.get((self._gateway, machine.site))
        frame = [(seen.routed, FRAME_BYTES + ID_BYTES * seen.prompt_tokens)]
        begin = road.arrival(frame, seen.routed) if road is not None else None
        if begin is None:
            begin = seen.routed + self._delay(self._gateway, machine.site)
        room = machine.room_from(begin, seen.prompt_tokens + 1 - hit, seen.stay(main))
        if room is None:
            self._note(f"{main} never had memory for it")
            return None
        begin = room + machine.running_at(room)
        took = self._prefill_time(main, begin, hit)
        if took is None:
            self._note(f"{main} computed no prompt in this run: its speed is not known")
            return None
        self._note(f"{main} computes {seen.prompt_tokens - hit:,} tokens")
        first = begin + took + self._delay(machine.site, self._gateway)
        return self._costs(first, self._rest(main, first, "M"), 0, 0)

    def _released(self, prompt: Prompt, held: Ns, decoder: str) -> Ns:
        """When the gateway lets the first token go; `held`: when the decoder has its KV."""
        if self._known.setting.early or self._seen.output_tokens == 1:
            return prompt.ended + self._delay(self._site(prompt.instance), self._gateway)
        machine = self._known.machines[decoder]
        usual = self._known.notices.get((machine.role, machine.site))
        notice = _median(usual) if usual else self._delay(machine.site, self._gateway)
        return held + notice

    # -- the prompt on P ---------------------------------------------------------------------------

    def _prompt(self) -> Prompt | None:
        """As it ran; else on the P that would have had it first."""
        seen = self._seen
        name = seen.prefill
        if name is not None and seen.ended is not None and name in seen.admitted:
            return Prompt(name, seen.admitted[name], seen.ended, seen.chunks)
        found = [p for name in self._names("prefill") if (p := self._prompt_on(name)) is not None]
        if not found:
            self._note("no P whose speed is known")
            return None
        best = min(found, key=lambda p: p.ended)
        self._note(f"{best.instance} computes it behind the prompts it had")
        return best

    def _prompt_on(self, name: str) -> Prompt | None:
        seen, machine = self._seen, self._known.machines[name]
        if seen.routed is None:
            return None
        begin = seen.routed + self._delay(self._gateway, machine.site)
        hit = min(self._hit(name, "prefill"), seen.prompt_tokens - 1)
        room = machine.room_from(begin, seen.prompt_tokens - hit, seen.stay(name))
        if room is None:
            return None
        start = max(room + machine.running_at(room), self._known.behind(name, begin))
        took = self._prefill_time(name, start, hit)
        if took is None:
            return None
        return Prompt(name, room, start + took, [(start + took, hit, seen.prompt_tokens)])

    def _prefill_time(self, name: str, begin: Ns, hit: int) -> Ns | None:
        """For the prompt behind its first `hit` tokens, in chunks, from `begin` on."""
        known, machine, length = self._known, self._known.machines[name], self._seen.prompt_tokens
        hit = min(hit, length - 1)
        cost = known.setting.costs.get(name)
        if cost is None:
            speed = machine.tokens_per_s()
            return None if speed is None else int((length - hit) * SECOND / speed)
        chunk, total = known.setting.chunk_tokens.get(name, length), 0
        decodes = [(1, length)] * machine.sequences_at(begin)
        for start in range(hit, length, chunk):
            total += cost(spans_of([(min(chunk, length - start), start), *decodes]))
        return total

    # -- KV at the decoders ------------------------------------------------------------------------

    def _at_relay(self, prompt: Prompt, relay: str) -> tuple[Ns | None, Ns | None]:
        """When RLD has memory for it, and when it holds the KV."""
        seen, machine = self._seen, self._known.machines[relay]
        delay = self._delay(self._site(prompt.instance), machine.site)
        if relay in seen.admitted and relay in seen.whole and not self._blind:
            return seen.admitted[relay], seen.whole[relay]
        hit = self._hit(relay, "relay")
        tokens = seen.prompt_tokens + 1 - hit
        room = machine.room_from(prompt.admitted + delay, tokens, seen.stay(relay))
        if room is None:
            self._note(f"{relay} never had memory for it")
            return None, None
        if room > prompt.admitted + delay:
            self._note(f"{relay} had no memory for it at first")
        return room, self._crossed(prompt, relay, hit, room + delay)

    def _at_main(self, prompt: Prompt, main: str, offered: Ns) -> Ns | None:
        """When MD holds the KV; `offered`: when P could offer it."""
        seen, machine = self._seen, self._known.machines[main]
        delay = self._delay(self._site(prompt.instance), machine.site)
        whole = seen.whole.get(main)
        if whole is not None and seen.prefill == prompt.instance and not self._blind:
            self._note("its KV as it crossed in the run")
            relay = seen.admitted.get(seen.relay or "", prompt.admitted)
            shift = self._could_send(prompt, main, offered) - self._could_send(prompt, main, relay)
            return max(whole + shift, prompt.ended + delay)
        hit = self._hit(main, "main")
        begin = max(offered + delay, seen.admitted.get(main, 0) if self._blind else 0)
        room = machine.room_from(begin, seen.prompt_tokens + 1 - hit, seen.stay(main))
        if room is None:
            self._note(f"{main} never had memory for it")
            return None
        self._note("its KV played again among what others sent")
        return self._crossed(prompt, main, hit, room + delay)

    def _could_send(self, prompt: Prompt, main: str, offered: Ns) -> Ns:
        """When the first KV for MD can go out: it has answered the offer, and there is some."""
        back = 2 * self._delay(self._site(prompt.instance), self._site(main))
        ready = [t for t, size in self._chunks(prompt, main, self._hit(main, "main")) if size]
        return max([offered + back, *ready[:1]])

    def _crossed(self, prompt: Prompt, dst: str, hit: int, begin: Ns) -> Ns | None:
        """When KV behind the first `hit` tokens is at `dst`, none of it sent before `begin`."""
        ends = (self._site(prompt.instance), self._site(dst))
        road, chunks = self._known.roads.get(ends), self._chunks(prompt, dst, hit)
        if road is None:
            self._note(f"no link is known from {ends[0]} to {ends[1]}")
            return None
        arrival = road.arrival(chunks, begin, f"{self._seen.id}>{dst}")
        if arrival is None:
            self._note("the link stays down")
            return None
        return max(arrival, prompt.ended + road.delay)

    def _chunks(self, prompt: Prompt, dst: str, hit: int) -> list[tuple[Ns, int]]:
        """(when it can be sent, bytes) of what `dst` lacks."""
        computed_from = min((start for _, start, _ in prompt.chunks), default=hit)
        parts = [(prompt.admitted, hit, computed_from), *prompt.chunks]
        whole = prompt.ended if not self._known.setting.while_computing else 0
        each = self._token_bytes(prompt, dst)
        return [
            (max(ready, whole), round(max(0, end - max(start, hit)) * each))
            for ready, start, end in parts
        ]

    def _token_bytes(self, prompt: Prompt, dst: str) -> float:
        """Of KV on its way there: the same everywhere, but where it is compressed."""
        ends = (self._site(prompt.instance), self._site(dst))
        known = self._known.token_bytes
        return known.get(ends) or max(known.values(), default=0.0)

    def _wan(self, prompt: Prompt, main: str) -> int:
        if self._site(prompt.instance) == self._site(main):
            return 0
        lacking = self._seen.prompt_tokens - self._hit(main, "main")
        return round(max(0, lacking) * self._token_bytes(prompt, main))

    # -- tokens ------------------------------------------------------------------------------------

    def _rest(self, instance: str, since: Ns, letter: str) -> Ns | None:
        """From the first token to the end, all of it decoded there."""
        left = max(0, self._seen.output_tokens - 1)
        pace = self._pace(instance, since, left, letter)
        return None if pace is None else left * pace

    def _pace(self, instance: str, since: Ns, tokens: int, letter: str) -> Ns | None:
        """Between two tokens there, from `since` on."""
        if not tokens:
            return 0
        machine, seen = self._known.machines[instance], self._seen
        own = seen.pace(letter) if instance in seen.admitted else None
        if own is not None:
            return own
        cost, alone = self._known.setting.costs.get(instance), machine.decode_step()
        if cost is not None:
            alone = cost(spans_of([(1, seen.prompt_tokens)]))
        if alone is None:
            self._note(f"what a decode step of {instance} takes is not known")
            return None
        return machine.decoding(since, tokens, alone) // tokens

    def _handover(self, relay: str, main: str, pace: Ns) -> Ns:
        """From MD's having the KV to RLD's end."""
        if usual := self._known.handoffs:
            return _median(took for took, _ in usual)
        return self._delay(self._site(main), self._site(relay)) + pace // 2

    def _gap(self, relay: str, main: str, ids: int) -> Ns:
        """At the switch, with so many ids to extend over."""
        if usual := self._known.handoffs:
            return _median(gap for _, gap in usual)
        there, back = self._site(main), self._gateway
        ways = self._delay(self._site(relay), there) + self._delay(there, back)
        cost = self._known.setting.costs.get(main)
        if cost is None:
            return ways + (self._known.machines[main].decode_step() or 0)
        return ways + cost(spans_of([(max(1, ids), self._seen.prompt_tokens)]))

    # -- who ---------------------------------------------------------------------------------------

    @property
    def _gateway(self) -> str:
        return self._known.setting.gateway_site

    def _names(self, role: str) -> list[str]:
        return [name for name, m in self._known.machines.items() if m.role == role]

    def _pick(self, role: str) -> str | None:
        """Whom it had, else whoever had the most memory left when it was routed."""
        seen = self._seen
        own = {"relay": seen.relay, "main": seen.main}[role]
        if own is not None:
            return own
        at = seen.routed or seen.sent
        names = self._names(role)
        if not names:
            self._note(f"there is no {role} instance")
            return None
        return min(names, key=lambda name: _fullness(self._known.machines[name], at))

    def _hit(self, instance: str, role: str) -> int:
        """Tokens of the prompt that were cached there, or on the best of its role."""
        seen = self._seen
        return seen.hits.get(instance, min(seen.cached.get(role, 0), seen.prompt_tokens))

    def _site(self, instance: str) -> str:
        return self._known.machines[instance].site

    def _delay(self, src: str, dst: str) -> Ns:
        return self._known.setting.delays.get((src, dst), 0)


def _fullness(machine: Machine, at: Ns) -> float:
    return machine.used_at(at) / max(1, machine.pages)


def _median(values: Iterable[Ns]) -> Ns:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


# -- regret ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Regret:
    """Of one request: what the best of the other pipelines would have saved; below zero where what
    ran was the best.
    """

    request: str
    ran: Cost
    best: Cost
    lost: Ns


def regret(
    request: str, table: Sequence[Cost], of: str, among: Sequence[str] = ()
) -> Regret | None:
    """`table`: its `costs`. `of`: ttft or e2e. `among`: pipelines that could have been chosen, all
    where empty. None where there was no choice, or nothing is known of it.
    """
    if not table or getattr(table[0], of) is None:
        return None
    ran = table[0]
    others = [
        cost
        for cost in table[1:]
        if getattr(cost, of) is not None and (not among or cost.pipeline in among)
    ]
    if not others:
        return None
    best = min(others, key=lambda cost: int(getattr(cost, of)))
    return Regret(request, ran, best, int(getattr(ran, of)) - int(getattr(best, of)))
