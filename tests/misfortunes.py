"""What befalls a case of the swarm: fault plans by seed, and ghosts.

A third of the cases has only faults that make requests late (so all of them must finish), most have
any. Triggers are moments, rates and events, in all phases of a request.

A **ghost** speaks in the name of an instance, as one does that was cut off and does not know it:
KV, words and first ids of an epoch that is not the one under way, and offers whose digest or layout
is not what it should be. Nothing of it may have any effect. A **silent** one makes an offer in good
order and then says nothing more: only the decoder's lease can end that.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

from pddrt.deployment import Deployment
from pddrt.errors import ConnectionLost
from pddrt.faults import KINDS
from pddrt.frames import Frame, pack_ids
from pddrt.messages import MESSAGES, Manifest, prompt_digest
from pddrt.netem.faults import NetFaults
from pddrt.netem.net import Connection
from pddrt.netem.stream import EmulatedNet
from pddrt.roles.instance import Instance
from pddrt.roles.receive import Decoding, Receiver
from pddrt.roles.send import Sender
from pddrt.types import MS, SECOND, KVLayout, Sampling

if TYPE_CHECKING:
    from .swarm import Case

PHASES = (
    "queued", "prefill", "KV crossing", "relay decoding", "handoff round", "overlap",
    "main decoding", "alone", "after",
)  # fmt: skip
ROLES = {"p": "prefill", "rld": "relay", "md": "main"}
FRAMES = frozenset({"corrupt", "truncate", "duplicate", "delay"})
OF_INSTANCES = ("crash", "pause", "slow", "step-fails", "out-of-memory", "pages-taken")
PLACES = {
    **dict.fromkeys(OF_INSTANCES, tuple(ROLES.values())),
    **dict.fromkeys(("link-down", "link-slow", "link-long", "jitter-storm"), ("rdma", "wan")),
    **dict.fromkeys(FRAMES, (*ROLES.values(), "gateway", "client")),
    "reset": (*ROLES.values(), "gateway", "client"),
    **dict.fromkeys(("cancel", "disconnect", "slow-reader"), ("client",)),
    **dict.fromkeys(("stale-signals", "wrong-signals"), ("gateway",)),
}
"""Where a kind can strike."""
NOBODY = {("relay", "alone"), ("client", "after")}
"""Where there is nobody to be hit."""

STALE, SILENT = "ghost", "silent"
"""How requests are called that nobody sent."""
AWAITED = (
    "RequestSent", "Routed", "Admitted", "PrefillStarted", "PrefillEnded", "KVSent", "KVReceived",
    "KVWhole", "MainReady", "HandoffBegan", "HandoffSent", "HandoffTaken", "HandoffCaughtUp",
    "HandoffEnded", "Released", "TokensMade", "TokensReceived", "Finished", "StepBegan",
    "Preempted", "Spared", "Resumed", "Freed", "Kept", "Learnt", "InstanceCrashed",
    "TransferCancelled", "InstanceReturned",
)  # fmt: skip
AT_THE_HANDOFF = (
    "MainReady", "HandoffBegan", "HandoffSent", "HandoffCaughtUp", "HandoffTaken", "HandoffEnded",
)  # fmt: skip
MIDDLE = ("TokensReceived", "TokensMade", "Released")
GENTLE = (
    "link-down", "link-slow", "link-long", "jitter-storm", "delay", "pause", "slow", "pages-taken",
    "slow-reader", "skew", "stale-signals", "wrong-signals",
)  # fmt: skip
CARRIED = (
    "kv", "first", "offer", "admit", "whole", "ready", "ids", "caught", "follow", "switched",
    "overlap", "tokens", "answer", "end", "close", "prefill", "generate", "failed", "cancel",
    "learn", "refuse", "withdraw", "noted",
)  # fmt: skip


def draw(rng: random.Random, case: Case) -> tuple[dict[str, Any], ...]:
    mood = rng.random()
    if mood < 0.08:
        return ()
    gentle = mood < 0.3
    rough = (*(kind for kind in KINDS if kind not in GENTLE), "pause", "corrupt", "duplicate")
    found: list[dict[str, Any]] = []
    for _ in range(rng.choice([1, 1, 2, 3, 6])):
        do = rng.choice(GENTLE if gentle else rng.choice([rough, tuple(KINDS)]))
        if do == "skew" and any(f["do"] == "skew" for f in found):
            continue
        effect = _effect(rng, do, case, gentle)
        if do == "pause" and not gentle and rng.random() < 0.5:
            effect.pop("for", None)
        early = effect.get("kind") == "kv" and rng.random() < 0.6  # of several frames the first
        trigger = {"on": {"event": "PrefillStarted"}} if early else _trigger(rng, do, case)
        if do == "pause" and "for" not in effect:  # for good: in the middle of an answer
            trigger = {"on": {"event": rng.choice(MIDDLE), "nth": rng.randint(2, 12)}}
            if decoders := [i for i in instances(case) if not i.startswith("p")]:
                effect["instance"] = rng.choice(decoders)
        found.append({"do": do, **effect, **trigger})
    return tuple(found)


AT: dict[str, tuple[dict[str, Any], ...]] = {
    "queued": ({"event": "Routed"},),
    "prefill": ({"event": "PrefillStarted"},),
    "KV crossing": ({"event": "PrefillEnded"}, {"event": "KVSent"}),
    "relay decoding": ({"event": "TokensMade", "source": "R"},),
    "handoff round": ({"event": "HandoffBegan"}, {"event": "HandoffSent", "follows": False}),
    "overlap": ({"event": "HandoffSent", "follows": True},),
    "main decoding": ({"event": "TokensReceived", "source": "M"},),
    "alone": ({"event": "TokensReceived"},),
    "after": ({"event": "Finished"},),
}
"""What tells that a request is in each phase."""


def aim(rng: random.Random, case: Case) -> Case:
    """The case made so that one fault hits one place in one phase; any of those that there are is
    as likely as the others, also where chance alone hardly ever gets there.
    """
    do = rng.choice(list(PLACES))
    place = rng.choice(PLACES[do])
    phase = rng.choice([phase for phase in PHASES if (place, phase) not in NOBODY])
    case = _with_phase(rng, case, place, phase)
    names = [name for name in instances(case) if place == ROLES[_stem(name)]] or [place]
    effect = _effect(rng, do, case, gentle=False)
    if do in OF_INSTANCES:
        effect["instance"] = rng.choice(names)
    elif place in ("rdma", "wan"):
        effect["link"] = place
        effect.pop("direction", None)
    elif do in FRAMES:
        for end in ("kind", "src", "dst"):
            effect.pop(end, None)
        effect[rng.choice(["src", "dst"])] = rng.choice(names)
    elif do == "reset":
        partner = "client" if place == "gateway" else "gateway"
        effect = {"between": [rng.choice(names), partner]}
    on = {**rng.choice(AT[phase]), "nth": rng.choice([1, 1, 2, 3])}
    return replace(case, faults=({"do": do, **effect, "on": on},))


def _stem(name: str) -> str:
    return name.rstrip("0123456789")


def _with_phase(rng: random.Random, case: Case, place: str, phase: str) -> Case:
    """The case made so that a request comes into this phase, and stays for a while."""
    asked = tuple(
        (start, tuple((text[:80], 90, think) for text, _, think in turns))
        for start, turns in case.sessions
    )
    case = replace(case, sessions=asked, anomaly="", jitter=0, delay=15 * MS, eos_ids=(), stop=())
    match phase:
        case "overlap":  # the main decoder must be the faster one, and behind
            fast = {"relay_slow": 4, "rate": 2_500_000, "relay_above": 0, "min_tokens": 0}
            return replace(case, policy="pdd", handoff="overlap", **fast)  # type: ignore[arg-type]
        case "relay decoding" | "handoff round" | "main decoding":
            handoff = rng.choice(["catch-up", "adaptive", "erratic"])
            return replace(case, policy="pdd", handoff=handoff, relay_above=0, rate=1_000_000)
        case "KV crossing":
            policy = "naive" if place == "main" else "pdd"
            return replace(case, policy=policy, relay_above=0, rate=400_000, fabric=1_000_000)
        case "alone":
            policy = "recompute" if place in ("main", "wan") else "colocated"
            return replace(case, policy=policy, relays=max(1, case.relays))
        case "after":  # who has something of it hears late that it is over
            policy = "relay-only" if place == "relay" else case.policy
            site = "a" if place == "main" else "b"
            return replace(case, policy=policy, relay_above=0, gateway_site=site)
    return case


def instances(case: Case) -> list[str]:
    counts = {"p": case.prefills, "rld": case.relays, "md": case.mains}
    return [f"{stem}{i}" for stem, n in counts.items() for i in range(n)]


def _ms(low: int, high: int, rng: random.Random) -> str:
    return f"{rng.randint(low, high)} ms"


def _trigger(rng: random.Random, do: str, case: Case) -> dict[str, Any]:
    if do == "skew":
        return {}
    way = rng.random()
    if way < 0.35:
        return {"at": _ms(0, rng.choice([50, 400, 1500]), rng)}
    if way < 0.5:
        return {"rate": f"{rng.choice([2, 10])}/s", "count": rng.randint(1, 4)}
    on: dict[str, Any] = {"event": rng.choice(AWAITED), "nth": rng.choice([1, 1, 2, 5, 20])}
    if case.policy == "pdd" and rng.random() < 0.4:
        return {"on": {"event": rng.choice(AT_THE_HANDOFF), "nth": rng.choice([1, 1, 2, 4])}}
    if on["event"] not in ("InstanceCrashed", "InstanceReturned", "StepBegan") and way < 0.7:
        on["request"] = f"s{rng.randrange(len(case.sessions))}.0"
    if way > 0.9:
        return {"on": {**on, "every": True}, "count": rng.randint(2, 4)}
    return {"on": on}


def _effect(rng: random.Random, do: str, case: Case, gentle: bool) -> dict[str, Any]:
    """`gentle`: nothing lasts so long that a deadline passes."""
    whose = rng.choice(instances(case))
    members = [*instances(case), "gateway", "client"]
    until: dict[str, Any] = {}
    if gentle or rng.random() < 0.75:
        until = {"for": _ms(1, rng.choice([30, 300, 1000 if gentle else 4000]), rng)}
    link: dict[str, Any] = {"link": rng.choice(["wan", "wan", "rdma"]), **until}
    if rng.random() < 0.4:
        link["direction"] = rng.choice(["a>b", "b>a"]) if link["link"] == "wan" else "a>a"
    frames = {"frames": rng.choice([1, 1, 3]), **until}
    if rng.random() < 0.8:
        few = rng.choice([("kv",), ("ids", "tokens", "answer"), CARRIED])
        frames["kind"] = rng.choice(few)
    if rng.random() < 0.3:
        frames[rng.choice(["src", "dst"])] = rng.choice(members)
    match do:
        case "link-down":
            return link
        case "link-slow":
            return {**link, "to": f"{rng.choice([100, 1000])} kbit/s"}
        case "link-long":
            return {**link, "delay": f"{rng.choice([80, 200, 700])} ms"}
        case "jitter-storm":
            if not case.delay:  # jitter needs a delay
                link = {"link": "rdma", **until}
            return {**link, "jitter": f"{rng.choice([10, 50, 150])} ms"}
        case "reset":
            if rng.random() < 0.3:
                return {}
            between = {"between": _joined(rng, case)}
            return between | rng.choice([{}, {"purpose": "kv"}, {"purpose": "control"}])
        case "corrupt" | "truncate" | "duplicate":
            return frames
        case "delay":
            return {**frames, "by": _ms(1, rng.choice([5, 100, 800]), rng)}
        case "crash":
            return {"instance": whose, "memory": rng.choice(["lost", "kept"]), **until}
        case "pause":
            return {"instance": whose, **until}
        case "slow":
            return {"instance": whose, "factor": rng.choice([2, 10, 50]), **until}
        case "step-fails" | "out-of-memory":
            return {"instance": whose, "steps": rng.choice([1, 1, 3])}
        case "pages-taken":
            return {"instance": whose, "share": rng.choice([0.3, 0.9, 1.0]), **until}
        case "slow-reader":
            return {"by": _ms(1, 40, rng), **until}
        case "skew":
            offset = rng.choice(["3 s", "-3 s", "40 ms", "0 s"])
            drift = rng.choice(["0 ppm", "200 ppm", "-200 ppm"])
            return {"site": rng.choice("ab"), "offset": offset, "drift": drift}
        case "stale-signals":
            return {"by": _ms(1, 2000, rng), **until}
        case "wrong-signals":
            return {"factor": rng.choice([0, 0.1, 10, 1000]), **until}
    return {}


def reset_all(deployment: Deployment) -> None:
    """Cuts every stream. Where the end of a frame is missing, that shows only with the next one,
    however long it takes to come.
    """
    assert isinstance(deployment.net, EmulatedNet)
    net = NetFaults(deployment.net)
    for node in [deployment.client, deployment.gateway, *deployment.instances]:
        for conn in list(node._connections):
            net.reset(conn)


def _joined(rng: random.Random, case: Case) -> list[str]:
    """Two members that have a stream between them."""
    if rng.random() < 0.15:
        return ["client", "gateway"]
    names = {
        stem: [i for i in instances(case) if i.startswith(stem)] for stem in ("p", "rld", "md")
    }
    pairs = [("gateway", name) for name in instances(case)]
    pairs += [(a, b) for a in names["p"] for b in names["rld"] + names["md"]]
    pairs += [(a, b) for a in names["rld"] for b in names["md"]]
    return list(rng.choice(pairs))


# -- ghosts ----------------------------------------------------------------------------------------


async def haunt(deployment: Deployment, case: Case) -> None:
    rng = random.Random(f"ghosts {case.seed}")
    if case.silent:
        await deployment.env.sleep(rng.randint(0, 300 * MS))
        await _fall_silent(deployment, rng)
    for number in range(case.ghosts):
        await deployment.env.sleep(rng.randint(0, 15 * MS))
        running = [i for i in deployment.instances if i.running]
        if running:
            with contextlib.suppress(ConnectionLost):  # it stops just now
                await _ghost(deployment, rng, rng.choice(running), number)


async def _stream(deployment: Deployment, src: str, dst: str) -> Connection:
    conn = await deployment.net.connect(src, dst)
    conn.post(Frame("open", {"purpose": "kv"}))
    return conn


async def _ghost(deployment: Deployment, rng: random.Random, to: Instance, number: int) -> None:
    if isinstance(to, Receiver) and to._entries and rng.random() < 0.7:
        entry = rng.choice(list(to._entries.values()))
        conn = await _stream(deployment, entry.prefill, to.name)
        conn.post(_late_kv(rng, entry))
    elif isinstance(to, Receiver):
        sender = next(i.name for i in deployment.instances if isinstance(i, Sender))
        conn = await _stream(deployment, sender, to.name)
        conn.post(_offer(_stale(rng, to, f"{STALE}.{number}")))
    elif isinstance(to, Sender) and any(e.transfers for e in to._entries.values()):
        entry_of = rng.choice([e for e in to._entries.values() if e.transfers])
        transfer = rng.choice(entry_of.transfers)
        conn = await _stream(deployment, transfer.dst, to.name)
        about = {"request": entry_of.request, "epoch": _other(rng, transfer.epoch)}
        kind = rng.choice(["admit", "whole", "refuse"])
        conn.post(Frame(kind, {**about, "have": 0, "reason": "a ghost"}))
    else:
        return
    await deployment.env.sleep(100 * MS)
    conn.abort()


def _other(rng: random.Random, epoch: int) -> int:
    return epoch + rng.choice([-1, 1, 1000]) if epoch else epoch + 1000


def _late_kv(rng: random.Random, entry: Decoding) -> Frame:
    """Of a transfer that is not the one under way, in good order otherwise."""
    about = {"request": entry.request, "epoch": _other(rng, entry.manifest.epoch)}
    kind = rng.choice(["kv", "kv", "first", "withdraw", "curtail"])
    if kind == "kv":
        kv = entry.side.kv
        start = kv.prefix if not kv.whole else 0
        end = min(kv.length, start + rng.randint(1, 8))
        payload = bytes((end - start) * entry.manifest.layout.bytes_per_token)
        return Frame("kv", {**about, "start": start, "end": end}, payload)
    if kind == "first":
        at = {"position": entry.side.limits.prompt_len, "id": 7, "logprobs": None}
        return Frame("first", {**about, **at})
    return Frame(kind, about)


def _manifest(to: Instance, request: str, epoch: int, rng: random.Random) -> Manifest:
    layout, ids = to.engine.layout, tuple(rng.randrange(250) for _ in range(20))
    digest = prompt_digest(layout.fingerprint, ids)
    parts = {"relay": None, "main": None}
    parts["relay" if to.spec.role == "relay" else "main"] = to.name
    return Manifest(request, epoch, layout, ids, digest, 10, Sampling(), "gateway", **parts)


def _stale(rng: random.Random, to: Instance, request: str) -> Manifest:
    right = _manifest(to, request, 99, rng)
    other = rng.choice(["fingerprint", "layers", "kv_heads", "digest", "prompt"])
    if other == "digest":
        return replace(right, digest=prompt_digest(right.layout.fingerprint, right.prompt[1:]))
    if other == "prompt":
        return replace(right, prompt=(*right.prompt[:-1], 251))
    value = "another" if other == "fingerprint" else 3
    return replace(right, layout=replace(right.layout, **{other: value}))


def _offer(manifest: Manifest) -> Frame:
    return Frame("offer", manifest.fields(), pack_ids(manifest.prompt))


async def _fall_silent(deployment: Deployment, rng: random.Random) -> None:
    decoders = [i for i in deployment.instances if isinstance(i, Receiver) and i.running]
    senders = [i.name for i in deployment.instances if isinstance(i, Sender)]
    if decoders and senders:
        to = rng.choice(decoders)
        with contextlib.suppress(ConnectionLost):
            conn = await _stream(deployment, senders[0], to.name)
            conn.post(_offer(_manifest(to, f"{SILENT}.0", 1 << 40, rng)))


# -- strangers -------------------------------------------------------------------------------------


def garbage(rng: random.Random, requests: Sequence[str], layout: KVLayout) -> Frame:
    """A frame of a known kind whose fields are partly right and partly anything."""
    anything = [None, True, -1, 0, 1 << 40, 1.5, float("nan"), "", "P", b"x", [], [1], {}]
    likely = {
        "request": rng.choice(requests),
        "epoch": rng.randint(1, 6),
        "start": rng.choice([0, rng.randint(0, 200)]),
        "end": rng.randint(0, 200),
        "position": rng.randint(0, 200),
        "sampling": astuple(Sampling()),
        "logprobs": rng.choice([None, [], [[-1.0, [[5, -0.5]]]]]),
        "layout": [
            layout.fingerprint,
            layout.layers,
            layout.kv_heads,
            layout.head_dim,
            layout.dtype,
        ],
        "relay": rng.choice([None, "rld0"]),
        "main": "md0",
        "last": True,
        "source": "M",
    }
    kind = rng.choice([k for k in MESSAGES if k != "submit"])  # a stranger's ids are its own
    about = {
        name: likely.get(name, rng.choice(["x", 1])) if rng.random() < 0.8 else rng.choice(anything)
        for name in MESSAGES[kind]
        if rng.random() < 0.97
    }
    if about.get("lease_ns") == 1 << 40:  # who asks properly is served, for as long as it asks
        about["lease_ns"] = 5 * SECOND
    payload = rng.choice([b"", b"x", pack_ids(range(rng.randint(1, 20))), bytes(1024 * 8)])
    return Frame(kind, about, payload)


async def intrude(deployment: Deployment, case: Case) -> None:
    """A stranger talks to everyone."""
    rng, conns = random.Random(f"stranger {case.seed}"), dict[str, Connection]()
    layout = deployment.instances[0].engine.layout
    for _ in range(case.stranger):
        await deployment.env.sleep(rng.choice([0, 1 * MS, 10 * MS]))
        there = [i for i in deployment.instances if i.running]
        name = rng.choice([*there, deployment.gateway]).name
        if name not in conns or rng.random() < 0.3:  # the last one may have been ended
            try:
                conns[name] = await deployment.net.connect("stranger", name)
            except ConnectionLost:  # it has crashed meanwhile
                continue
            purpose = rng.choice(["control", "kv", "nothing"])
            conns[name].post(Frame("open", {"purpose": purpose}))
        conns[name].post(garbage(rng, ["s0.0", "s1.0", *deployment.gateway._streams], layout))
