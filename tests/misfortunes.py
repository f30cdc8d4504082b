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
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pddrt.deployment import Deployment
from pddrt.errors import ConnectionLost
from pddrt.faults import KINDS
from pddrt.frames import Frame, pack_ids
from pddrt.messages import Manifest, prompt_digest
from pddrt.netem.faults import NetFaults
from pddrt.netem.net import Connection
from pddrt.netem.stream import EmulatedNet
from pddrt.roles.instance import Instance
from pddrt.roles.receive import Decoding, Receiver
from pddrt.roles.send import Sender
from pddrt.types import MS, Sampling

if TYPE_CHECKING:
    from .swarm import Case

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
