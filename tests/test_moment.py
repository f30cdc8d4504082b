"""The state of a deployment, rebuilt from events: it agrees with what the run says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
from rich.console import Console

from pddrt import faults
from pddrt import trace as ev
from pddrt.inspection import moment_show, recorded, stepping
from pddrt.inspection.moment import RECEIVES, WAITS, Moment, as_json
from pddrt.inspection.rebuild import MOMENTARY, Rebuild
from pddrt.inspection.recorded import Recorded
from pddrt.trace import Event, dumps, request_of

from .recordings import paced, stormy


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded.opened(stormy(tmp_path_factory.mktemp("runs") / "storm"))


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded.opened(paced(tmp_path_factory.mktemp("runs") / "rounds"))


def moments(run: Recorded) -> Iterator[tuple[Moment, Event]]:
    """After each event."""
    state = Rebuild()
    for _, event in run.walk():
        state(event)
        yield state, event


def kinds_that_last() -> set[str]:
    """Of faults, by what the scenario says of them."""
    found = set()
    for kind in vars(faults).values():
        if isinstance(kind, type) and issubclass(kind, faults.Fault) and "do" in vars(kind).get(
            "__annotations__", {}
        ):  # fmt: skip
            names = get_args(kind.model_fields["do"].annotation)
            if issubclass(kind, faults.Lasting) or kind.__name__ == "Skew":
                found.update(names)
            else:
                assert set(names) <= MOMENTARY, names
    return found


def test_faults_that_are_over_at_once_are_never_in_effect(storm: Recorded) -> None:
    lasting = kinds_that_last()
    assert "link-down" in lasting
    assert not lasting & MOMENTARY
    down = 0
    for state, _ in moments(storm):
        assert all(told.split(":")[0] in lasting for told in state.faults.values())
        down += any(told.startswith("link-down") for told in state.faults.values())
    assert down


@pytest.mark.parametrize("which", ["storm", "rounds"])
def test_at_the_end_the_pools_are_as_the_instances_say(
    which: str, request: pytest.FixtureRequest
) -> None:
    run: Recorded = request.getfixturevalue(which)
    checked = 0
    for state, event in moments(run):
        if isinstance(event, ev.PoolChecked):
            checked += 1
            i = state.instances[event.instance]
            assert (i.used, i.cached, i.free) == (0, event.pages_cached, event.pages_free)
    assert checked >= 3
    assert not state.requests
    assert not state.parts
    assert state.ended == run.num_requests
    assert not any(state.on_the_way(d) for d in state.links.values())


@pytest.mark.parametrize("which", ["storm", "rounds"])
def test_clients_have_what_they_received(which: str, request: pytest.FixtureRequest) -> None:
    got: dict[str, int] = {}
    for state, event in moments(request.getfixturevalue(which)):
        if isinstance(event, ev.TokensReceived):
            name = request_of(event.request)
            got[name] = got.get(name, 0) + event.end - event.start
            if name in state.requests:
                assert state.requests[name].received == got[name]


def test_each_side_of_a_handoff_knows_no_more_than_there_is(rounds: Recorded) -> None:
    seen, most = 0, 0
    for state, _ in moments(rounds):
        for request in state.requests.values():
            h = request.handoff
            if h is not None and h.sent is not None:
                assert h.caught is not None
                assert h.taken is not None
                assert h.relay_last is not None
                assert h.caught <= h.taken <= h.sent <= h.relay_last
                assert h.in_flight == h.sent - h.taken
                seen, most = seen + 1, max(most, h.in_flight)
    assert seen
    assert most > 1


def test_kv_is_on_the_way_between_its_being_sent_and_its_arrival(rounds: Recorded) -> None:
    way: dict[tuple[str, str], int] = {}
    for state, event in moments(rounds):
        if isinstance(event, ev.KVSent):
            key = (event.request, event.dst)
            way[key] = way.get(key, 0) + event.bytes
        elif isinstance(event, ev.KVReceived):
            way[event.request, event.instance] -= event.bytes
        flows = {(t.request, t.dst): t.bytes for d in state.links.values()
                 for t in state.on_the_way(d)}  # fmt: skip
        assert flows == {key: left for key, left in way.items() if left}


def test_parts_lack_the_kv_that_has_not_come(rounds: Recorded) -> None:
    seen = 0
    for state, event in moments(rounds):
        if isinstance(event, ev.KVReceived):
            part = state.parts[event.request, event.instance]
            assert part.phase == RECEIVES
            assert part.lacking == part.prompt_tokens - part.hit - sum(
                end - start for start, end in part.arrived
            )
            seen += part.lacking > 0
    assert seen


def test_who_waits_for_memory_is_told_to(storm: Recorded) -> None:
    """From the offer to the reservation, and on every instance of its route."""
    waited = {
        (part.request, part.role)
        for state, _ in moments(storm)
        for part in state.parts.values()
        if part.phase == WAITS
    }
    routed = [e for _, e in storm.walk() if isinstance(e, ev.Admitted)]
    roles = {e.instance: e.role for _, e in storm.walk() if isinstance(e, ev.InstanceStarted)}
    assert waited >= {(e.request, roles[e.instance]) for e in routed}


def test_a_crash_leaves_nothing_behind(storm: Recorded) -> None:
    crashes = 0
    for state, event in moments(storm):
        if isinstance(event, ev.InstanceCrashed):
            crashes += 1
            i = state.instances[event.instance]
            assert i.down
            assert i.used == 0
            assert not state.parts_on(event.instance)
    assert crashes


# -- without what came long before -----------------------------------------------------------------


@pytest.mark.parametrize("which", ["storm", "rounds"])
def test_a_state_is_the_same_without_what_was_over_before(
    which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Recorded = request.getfixturevalue(which)
    total = run.index.num_events
    numbers = [total * share // 10 for share in (2, 5, 8, 9)]
    whole = {n: as_json(stepping.moment_at(run, n)) for n in numbers}
    monkeypatch.setattr(stepping, "PARTIAL_FROM", 0)
    partial = 0
    for number, before in whole.items():
        after = as_json(stepping.moment_at(run, number))
        partial += after["partial"]
        assert dumps(after["requests"]) == dumps(before["requests"])
        for name, instance in after["instances"].items():
            known = before["instances"][name]
            assert dumps(instance["requests"]) == dumps(known["requests"])
            assert instance["pages"]["requests"] == known["pages"]["requests"]
        assert {n: link["flows"] for n, link in after["links"].items()} == {
            n: link["flows"] for n, link in before["links"].items()
        }
    assert partial, "or nothing was tried"


# -- what it looks like ----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 160])
def test_any_moment_can_be_shown(storm: Recorded, width: int) -> None:
    console = Console(width=width, color_system=None, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for state, _ in moments(storm):
        if state.number % 97 == 0:
            for line in moment_show.moment(state):
                console.print(line)
            for name in (*state.instances, *state.requests, "wan"):
                assert moment_show.about(state, name), name
            assert moment_show.about(state, "nobody") is None
    shown = console.export_text().splitlines()
    assert all(len(line) <= width for line in shown)
    for words in ("site a", "of KV on the way", "handoff:", "in effect: link-down", "down"):
        assert any(words in line for line in shown), words
