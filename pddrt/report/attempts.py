"""The attempts that were made at each request, and on which way each was lost. From events; pure.

A request goes by way of the instances that it was routed to. Where one of them is lost, the gateway
goes on without it (a **reroute**: the attempt stays), or begins again elsewhere (a **retry**: the
next attempt, which computes the prompt, and what there is of the answer, once more).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pddrt import trace as ev
from pddrt.types import Ns


@dataclass(slots=True)
class Reroute:
    """What `trace.Rerouted` says. `taken`: when a main decoder took over from a lost relay."""

    t: Ns
    lost: str
    then: str
    main: str | None
    why: str
    taken: Ns | None = None


@dataclass(slots=True)
class Attempt:
    """`name` is what instances know it by. `after`: tokens of the answer that there were before it;
    `ended`, `why`: when and why the next one began in its place.
    """

    name: str
    began: Ns
    pipeline: str
    prefill: str | None
    relay: str | None
    main: str | None
    prompt_tokens: int
    after: int = 0
    prefill_started: Ns | None = None
    prefill_ended: Ns | None = None
    hits: dict[str, int] = field(default_factory=dict)
    reroutes: list[Reroute] = field(default_factory=list)
    ended: Ns | None = None
    why: str = ""

    @property
    def instances(self) -> list[str]:
        """Those that it was routed to, in the order of its way, and the main decoder that it went
        on to.
        """
        also = [r.main for r in self.reroutes]
        found = (self.prefill, self.relay, self.main, *also)
        return list(dict.fromkeys(name for name in found if name))

    @property
    def way(self) -> str:
        return " > ".join(name for name in (self.prefill, self.relay, self.main) if name)

    @property
    def cut(self) -> tuple[Ns, str] | None:
        """When the gateway first knew that it would not end as it was, and why."""
        if self.reroutes and (self.ended is None or self.reroutes[0].t <= self.ended):
            return self.reroutes[0].t, self.reroutes[0].why
        return None if self.ended is None else (self.ended, self.why)

    @property
    def moved(self) -> bool:
        """Whether it went on without an instance that was lost."""
        return any(r.then != "on" for r in self.reroutes)


class Attempts:
    """Listens to a trace."""

    def __init__(self) -> None:
        self.of: dict[str, list[Attempt]] = {}
        """By request, in order."""
        self._named: dict[str, Attempt] = {}
        self._after: dict[str, int] = {}
        """Tokens that there were when a retry was told and not yet routed."""

    def __call__(self, event: ev.Event) -> None:
        match event:
            case ev.Routed():
                self._begin(event)
            case ev.Retried():
                for before in self.of.get(ev.request_of(event.request), [])[-1:]:
                    before.ended, before.why = event.t, event.why
                    self._after[ev.request_of(event.request)] = event.after
            case ev.Rerouted():
                for attempt in self.of.get(ev.request_of(event.request), [])[-1:]:
                    attempt.reroutes.append(
                        Reroute(event.t, event.lost, event.then, event.main, event.why)
                    )
            case ev.TakenOver():
                for attempt in self.of.get(ev.request_of(event.request), [])[-1:]:
                    for reroute in attempt.reroutes[-1:]:
                        reroute.taken = event.t
            case ev.Admitted() if event.request in self._named:
                # One that was preempted is admitted again; what counts is the first time.
                self._named[event.request].hits.setdefault(event.instance, event.hit)
            case ev.PrefillStarted() if event.request in self._named:
                self._named[event.request].prefill_started = event.t
            case ev.PrefillEnded() if event.request in self._named:
                self._named[event.request].prefill_ended = event.t

    def _begin(self, e: ev.Routed) -> None:
        request = ev.request_of(e.request)
        attempt = Attempt(
            e.request, e.t, e.pipeline, e.prefill, e.relay, e.main, e.prompt_tokens,
            self._after.pop(request, 0),
        )  # fmt: skip
        self._named[e.request] = attempt
        self.of.setdefault(request, []).append(attempt)
