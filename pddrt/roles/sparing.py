"""Transfers to main decoders that the gateway holds back or cuts: the anomaly filter at work.

`policy.anomaly` decides; this keeps what it must know of each relayed request that is under way,
asks at the right moments, and tells P. Without a rule nothing is spared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pddrt.env import Env
from pddrt.policy.anomaly import Anomaly, Filter
from pddrt.policy.route import Facts, Route
from pddrt.roles.outlook import Outlook
from pddrt.trace import Resumed, Spared


@dataclass(slots=True)
class _Case:
    """A relayed request. `kv_bytes`: what its main decoder is thought to lack, now."""

    route: Route
    prompt: list[int]
    lacking: int
    kv_bytes: int
    bytes_per_token: int
    expected: int
    spared: bool = False


class Sparing:
    def __init__(
        self, env: Env, outlook: Outlook, rule: Anomaly | None, post: Callable[..., None]
    ) -> None:
        """`post(peer, kind, **fields)` sends a frame."""
        self._env = env
        self._outlook = outlook
        self._filter = Filter(rule) if rule is not None else None
        self._post = post
        self._cases: dict[str, _Case] = {}

    def routed(
        self, request: str, session: str | None, route: Route, facts: Facts, prompt: list[int]
    ) -> Route:
        """The route, `held` perhaps."""
        if self._filter is None:
            return route
        self._filter.routed += 1
        main = next((m for m in facts.mains if m.name == route.main), None)
        if route.prefill is None or route.relay is None or main is None:
            return route
        lacking, kv_bytes = facts.prompt_tokens - main.hit, facts.lacking(main)
        expected = self._filter.expected(session, facts.max_tokens)
        case = _Case(route, prompt, lacking, kv_bytes, facts.bytes_per_token, expected)
        self._cases[request] = case
        if not self._filter.holds(lacking, expected):
            return route
        self._spare(request, case, "held")
        return replace(route, held=True)

    def relay_holds(self, request: str) -> None:
        """The relay has the whole KV: is the rest of the transfer worth it?"""
        case = self._cases.get(request)
        rest = self._outlook.rest(self._env.now(), request)
        if case is None or case.spared or not rest:
            return
        assert self._filter is not None
        assert case.route.relay is not None
        step = self._outlook.instances[case.route.relay].said.step_ns
        takes = self._outlook.expected(self._env.now(), request, case.route, rest)
        if self._filter.cuts(case.expected, step, takes):
            there = len(case.prompt) - -(-rest // case.bytes_per_token)
            case.kv_bytes = rest
            self._outlook.cut(request)
            self._outlook.whole(request, case.route.main or "", case.prompt[:there])
            self._post(case.route.prefill, "cut", request=request)
            self._spare(request, case, "cut")

    def _spare(self, request: str, case: _Case, how: str) -> None:
        case.spared = True
        about = (request, how, case.expected, case.lacking, case.kv_bytes)
        self._env.trace.emit(Spared(self._env.now(), *about))

    def spares(self, request: str) -> bool:
        """Whether its main decoder is not sent it, as things stand."""
        case = self._cases.get(request)
        return case is not None and case.spared

    def main_holds(self, request: str) -> None:
        """The main decoder has the whole KV: a cut came too late."""
        case = self._cases.get(request)
        if case is not None and case.spared:
            case.spared = False
            assert self._filter is not None
            self._filter.spared -= 1
            self._env.trace.emit(Resumed(self._env.now(), request, 0, "it had crossed already"))

    def made(self, request: str, tokens: int) -> None:
        """The answer has so many tokens, and goes on."""
        case = self._cases.get(request)
        if case is None or not case.spared:
            return
        assert self._filter is not None
        if tokens >= self._filter.rule.output_below:
            case.spared = False
            now = self._env.now()
            expected = self._outlook.expected(now, request, case.route, case.kv_bytes)
            self._outlook.let_go(request, case.route, case.kv_bytes, expected)
            self._post(case.route.prefill, "resume", request=request)
            self._env.trace.emit(Resumed(now, request, tokens, "the answer goes on"))

    def needed(self, request: str, tokens: int) -> None:
        """Its relay is lost after so many tokens: P sends all that its main decoder lacks."""
        case = self._cases.pop(request, None)
        if case is not None and case.spared:
            assert self._filter is not None
            self._filter.spared -= 1
            now = self._env.now()
            expected = self._outlook.expected(now, request, case.route, case.kv_bytes)
            self._outlook.let_go(request, case.route, case.kv_bytes, expected)
            self._env.trace.emit(Resumed(now, request, tokens, "the relay is lost"))

    def forget(self, request: str) -> None:
        """It has no main decoder any more."""
        self._cases.pop(request, None)

    def ended(self, request: str, session: str | None, tokens: int, answered: bool) -> None:
        self._cases.pop(request, None)
        if answered and self._filter is not None:
            self._filter.answered(session, tokens)
