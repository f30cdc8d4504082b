"""P: computes prompts in chunks, while `send` streams their KV out.

A request here: queued for pages > computing > first token sampled > transfers finishing > gone. P
samples the first token. It travels to the first decoder of the route, behind the KV; where the
answer ends with it, or it may go out early, P tells the gateway itself.
"""

from __future__ import annotations

from pddrt.frames import Frame, unpack_ids
from pddrt.messages import Limits, finish
from pddrt.netem.net import Connection
from pddrt.roles.feed import Prefilling
from pddrt.roles.send import Sender
from pddrt.sched import Batch, Outcome, SequenceState
from pddrt.trace import PrefillEnded, PrefillStarted, TokensMade
from pddrt.types import Drawn, Sampling


class Prefill(Sender):
    def on_prefill(self, conn: Connection, frame: Frame) -> None:
        """From the gateway: compute this prompt and feed these decoders."""
        request, ids = frame["request"], unpack_ids(frame.payload)
        sampling = Sampling.of(frame["sampling"])
        if refusal := self.refusal(request, ids, len(ids)):
            self.tell_failed(conn.peer, request, f"{self.name}: {refusal}")
            return
        entry = Prefilling(
            request=request,
            gateway=conn.peer,
            ids=ids,
            limits=Limits.of(len(ids), frame["max_tokens"], self.eos_ids, sampling),
            sampling=sampling,
            relay=frame["relay"],
            main=frame["main"],
            held=frame["held"],
            lease=self.env.call_at(
                self.env.now() + frame["lease_ns"], self.fail, request, "lease expired on P"
            ),
        )
        self._entries[request] = entry
        self.must_begin(request, conn.peer, ids, frame["begin_ns"])
        self.wait_for_memory(request, ids, len(ids), limit=len(ids) - 1)

    def admitted(self, request: str, hit: int) -> None:
        if request in self._alone:
            super().admitted(request, hit)
            return
        entry = self._entries[request]
        prompt, limits = list(entry.ids), entry.limits
        entry.seq = SequenceState(request, prompt, hit, len(prompt), entry.sampling, limits=limits)
        entry.hit = hit
        self.sched.add(entry.seq)
        if not entry.held or entry.first_decoder == entry.relay:
            self._begin_transfer(entry, entry.first_decoder)
        self.wake()

    def may_preempt(self, request: str) -> bool:
        """Decoders may still be sent what a request of P has."""
        return request not in self._entries

    def step_began(self, batch: Batch) -> None:
        super().step_began(batch)
        for entry in self._entries.values():
            if entry.seq is not None and entry.seq.in_step and entry.seq.computed == entry.hit:
                self.begun(entry.request)
                self.env.trace.emit(PrefillStarted(self.env.now(), entry.request, self.name))

    def stepped(self, outcome: Outcome) -> None:
        if outcome.request in self._alone:
            super().stepped(outcome)
            return
        entry = self._entries[outcome.request]
        if outcome.drawn is not None:
            self._first_token(entry, outcome.drawn)
        for transfer in entry.transfers:
            transfer.wake.set()

    def _first_token(self, entry: Prefilling, first: Drawn) -> None:
        now, start, token = self.env.now(), entry.limits.prompt_len, first.token
        self.sched.drop(entry.request)
        entry.first = first
        self.env.trace.emit(PrefillEnded(now, entry.request, self.name))
        self.env.trace.emit(
            TokensMade(now, entry.request, self.name, self.letter, start, start + 1, (token,))
        )
        self.keep(entry.request, entry.ids)
        ends = finish(entry.limits, start, token)
        if self.early_first_token or entry.unrelayed or ends:
            self.tell_first(entry, first)
        self._end_if_done(entry)
