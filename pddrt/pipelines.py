"""The pipeline policy of a scenario: what its name means, and what it needs of instances and links.

A policy says which pipelines it may choose. From that follows which roles there must be, which
paths KV and ids take, how much memory each role needs, and what of the scenario it leaves unused.
`local` also moves main decoders: into the site of P (`home`).

    policy       pipelines           needs KV paths   topology
    pdd          P-RLD-MD, P-MD      P-RLD, P-MD      as it stands
    naive        P-MD                P-MD             as it stands
    compress     P-MD                P-MD             as it stands; KV between sites in 8 bits
    local        P-MD                P-MD             MD's instances in P's site
    colocated    P                   none             P answers; others are idle
    recompute    MD                  none             MD answers; others are idle
    prfaas       P-MD, MD            P-MD             as it stands
    relay-only   P-RLD, P-MD         P-RLD, P-MD      as it stands

A class of the user's may say its `pipelines`; else it may choose any that the instances allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pddrt import plugins, sections
from pddrt.document import Keys, Problem
from pddrt.errors import BadInput
from pddrt.fields import Instance, Pipeline
from pddrt.netem.net import LinkSpec, route
from pddrt.policy.route import (
    PIPELINES,
    Alone,
    Facts,
    Naive,
    NoRoute,
    Pdd,
    Policy,
    Prfaas,
    RelayOnly,
    Route,
)
from pddrt.types import Role

if TYPE_CHECKING:
    from pddrt.scenario import Scenario

POLICIES: Mapping[str, Callable[[Pipeline], Pdd | Naive | Alone | Prfaas | RelayOnly]] = {
    "pdd": lambda p: Pdd(p.relay_above, p.relay_full),
    "naive": lambda p: Naive("naive"),
    "local": lambda p: Naive("local"),
    "compress": lambda p: Naive("compress"),
    "colocated": lambda p: Alone("prefill"),
    "recompute": lambda p: Alone("main"),
    "prfaas": lambda p: Prfaas(p.offload_above),
    "relay-only": lambda p: RelayOnly(p.relay_above, p.relay_full),
}


class Plugged:
    """A policy of the user's. Its mistakes are RunFailed, and name its class and line."""

    def __init__(self, user: Any, pipelines: Iterable[str] = tuple(PIPELINES)) -> None:
        """`pipelines`: those it may choose."""
        self._user = user
        self._pipelines = tuple(pipelines)

    def route(self, facts: Facts) -> Route:
        def objection(route: Route) -> str:
            if wrong := facts.objection(route):
                return wrong
            if route.pipeline in self._pipelines:
                return ""
            name = type(self._user).__name__
            allowed = ", ".join(self._pipelines)
            return (
                f"found pipeline {route.pipeline}; allowed: what {name}.pipelines says: {allowed}"
            )

        return plugins.guarded(self._user.route, Route, objection, passes=(NoRoute,))(facts)


def policy_of(scenario: Scenario) -> Policy:
    """The scenario's pipeline policy. Raises BadInput where it is a class that cannot be had."""
    name = scenario.pipeline.policy
    if name in POLICIES:
        return POLICIES[name](scenario.pipeline)
    return Plugged(plugins.make(_class_of(scenario)), chosen_from(scenario))


def _class_of(scenario: Scenario) -> Any:
    return plugins.load(
        scenario.pipeline.policy, "pipeline policy", ["route(facts)"], scenario.folder
    )


def chosen_from(scenario: Scenario) -> tuple[str, ...]:
    """The pipelines that the scenario's policy may choose. Raises BadInput."""
    name = scenario.pipeline.policy
    if name in POLICIES:
        return POLICIES[name](scenario.pipeline).pipelines
    present = {entry.role for entry in scenario.instances.values()}
    possible = tuple(p for p, roles in PIPELINES.items() if present.issuperset(roles))
    found = getattr(_class_of(scenario), "pipelines", possible)
    listed = isinstance(found, (tuple, list)) and all(isinstance(p, str) for p in found)
    if not listed or not set(found) <= set(PIPELINES) or not found:
        raise BadInput(f"{name} has pipelines {found!r}; allowed: some of {', '.join(PIPELINES)}")
    return tuple(found)


def kv_tokens(pipelines: Iterable[str], role: Role, prompt: int, answer: int) -> int:
    """Tokens of KV that one request of these lengths needs on an instance of `role`; 0: none."""
    if role == "prefill":
        decodes = "P" in pipelines
        return prompt + answer - 1 if decodes else prompt if roles_of(pipelines)["prefill"] else 0
    return prompt + answer - 1 if roles_of(pipelines)[role] else 0


def roles_of(pipelines: Iterable[str]) -> dict[Role, bool]:
    """Whether each role has a part in any of `pipelines`."""
    used = {role for pipeline in pipelines for role in PIPELINES[pipeline]}
    roles: tuple[Role, ...] = ("prefill", "relay", "main")
    return {role: role in used for role in roles}


def home(scenario: Scenario, entry: Instance) -> str:
    """The site of an instance under the scenario's policy."""
    if scenario.pipeline.policy == "local" and entry.role == "main":
        return next((i.site for i in _of(scenario, "prefill")), entry.site)
    return entry.site


def _of(scenario: Scenario, *roles: Role) -> list[Instance]:
    return [entry for entry in scenario.instances.values() if entry.role in roles]


# -- what is wrong ---------------------------------------------------------------------------------


def policy_problems(scenario: Scenario) -> Iterator[Problem]:
    """A policy that cannot be had, or that the instances cannot serve."""
    name, keys = scenario.pipeline.policy, ("pipeline", "policy")
    try:
        policy_of(scenario)
        pipelines = chosen_from(scenario)
    except BadInput as error:
        yield from (Problem(keys, text) for text in error.problems)
        return
    present = {entry.role for entry in scenario.instances.values()}
    for role, used in roles_of(pipelines).items():
        if used and role not in present:
            yield Problem(
                ("instances",), f"no instance of role {role}; policy {name} needs at least one"
            )
    sites = list(dict.fromkeys(i.site for i in _of(scenario, "prefill")))
    if name == "local" and len(sites) > 1:
        yield Problem(keys, f"found 'local' with prefill instances at {', '.join(sites)}; "
                            "allowed: with all of them at one site")  # fmt: skip
    if name == "compress" and scenario.pipeline.wan_kv == "as-is":
        yield Problem(("pipeline", "wan_kv"), "found 'as-is' with policy compress; "
                                              "allowed there: 8-bit")  # fmt: skip


def site_problems(scenario: Scenario) -> Iterator[Problem]:
    """Unknown sites, two links for one path, and paths that are needed and not there."""
    links: dict[frozenset[str], str] = {}
    for name, link in scenario.links.items():
        other = links.setdefault(frozenset(link.between), name)
        if other != name:
            text = f"found the sites of link {other} again; allowed: one link between two sites"
            yield Problem(("links", name, "between"), text)
    linked = sorted(set().union(*links)) if links else []
    homes: list[tuple[Keys, str]] = [
        (("instances", name, "site"), entry.site) for name, entry in scenario.instances.items()
    ]
    if scenario.gateway.site is not None:
        homes.append((("gateway", "site"), scenario.gateway.site))
    unknown = set()
    for keys, site in homes:
        if linked and site not in linked:
            unknown.add(site)
            text = f"{sections.unknown_name(site, linked)} (the sites that links join)"
            yield Problem(keys, text)
    plain = [
        LinkSpec(name, (link.between[0], link.between[1]), None, 0)
        for name, link in scenario.links.items()
    ]
    for a, b, why, inside_too in _needed_paths(scenario):
        hops = route(plain, a, b)
        missing = not hops and (a != b or inside_too)
        if missing and not unknown & {a, b}:
            where = f"inside site {a}" if a == b else f"between sites {a} and {b}"
            yield Problem(("links",), f"no link {where}, which {why} needs; "
                                      f"declare one with between: [{a}, {b}]")  # fmt: skip
        for hop in hops if len(hops) > 1 else ():
            if (tcp := scenario.links[hop.name].tcp) != "none":
                row = ", ".join(h.name for h in hops)
                yield Problem(("links", hop.name, "tcp"),
                              f"found '{tcp}' on one of several links in a row ({row}, from {a} to "
                              f"{b}); allowed there: none")  # fmt: skip


def _needed_paths(scenario: Scenario) -> list[tuple[str, str, str, bool]]:
    """Pairs of sites that must be joined: (a, b, who needs it, whether also where a is b).

    KV needs a declared link even inside a site (its rate is a result); control does not.
    """

    def of(*roles: Role) -> list[str]:
        return list(dict.fromkeys(home(scenario, entry) for entry in _of(scenario, *roles)))

    pairs: dict[tuple[str, str], tuple[str, bool]] = {}

    def need(a: str, b: str, why: str, inside_too: bool) -> None:
        if (b, a) in pairs:
            a, b = b, a
        pairs.setdefault((a, b), (why, inside_too))

    try:
        pipelines = [frozenset(PIPELINES[name]) for name in chosen_from(scenario)]
    except BadInput:
        pipelines = []  # somebody else says so
    steps: tuple[tuple[Role, Role, str, bool], ...] = (
        ("prefill", "relay", "KV from prefill to relay", True),
        ("prefill", "main", "KV from prefill to main", True),
        ("relay", "main", "the handoff from relay to main", False),
    )
    for a in of("prefill", "relay"):
        for src, dst, why, inside_too in steps:
            if a in of(src) and any({src, dst} <= roles for roles in pipelines):
                for b in of(dst):
                    need(a, b, why, inside_too)
    for site in of("prefill", "relay", "main"):
        need(scenario.gateway_site, site, "the gateway", False)
    return [(a, b, why, inside_too) for (a, b), (why, inside_too) in pairs.items()]
