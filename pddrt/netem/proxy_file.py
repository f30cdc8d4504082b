"""What `netem proxy` is told: options or a file, checked, as `ProxySpec`s.

    api: 127.0.0.1:8474            # the control interface; absent: none
    seed: 1
    proxies:
      db:
        listen: 127.0.0.1:26379
        upstream: 127.0.0.1:6379
        profile: cross-country     # and whatever else a link in a scenario may have
        rate: {client>upstream: 20 Mbit/s, upstream>client: 100 Mbit/s}
        delay: 20 ms
        tcp: cubic
        toxics:
          - {type: slicer, stream: upstream, attributes: {average_size: 64}}

A list of proxies as Toxiproxy's server reads it (`[{name, listen, upstream, enabled}]`) is taken
as well. Options are laid over an empty file, so that they are checked alike.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from pddrt import document, links
from pddrt.document import Document, Keys, Problem
from pddrt.errors import BadInput
from pddrt.link_fields import Link
from pddrt.netem.profiles import load
from pddrt.netem.proxy import ENDS, ProxySpec, parse_address
from pddrt.netem.toxics import STAGES, Toxic, ToxicType, Way, checked
from pddrt.sections import Allowed, Section, check
from pddrt.units import format_duration, shown


def _address(value: Any) -> Any:
    if isinstance(value, str):
        parse_address(value)
    return value


Address = Annotated[str, BeforeValidator(_address), Allowed("HOST:PORT")]
Attributes = Annotated[
    dict[str, int | float], Allowed("a mapping of attribute names to whole numbers")
]


MAX_NAME = 256


class ToxicFields(Section):
    type: ToxicType
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: Way = "downstream"
    toxicity: Annotated[float, Field(ge=0, le=1), Allowed("a number from 0 to 1")] = 1.0
    attributes: Attributes = Field(default_factory=dict)


class ProxyFields(Link):
    """A proxy, and the link from its clients to its upstream."""

    between: ClassVar[tuple[str, str]] = ENDS  # type: ignore[misc]
    listen: Address
    upstream: Address
    enabled: Annotated[bool, Allowed("true | false")] = True
    toxics: Annotated[
        tuple[ToxicFields, ...], Field(strict=False, max_length=64), Allowed("a list of toxics")
    ] = ()


class FileFields(Section):
    proxies: Annotated[dict[str, ProxyFields], Allowed("a mapping of names to proxies")]
    api: Address | None = None
    seed: Annotated[int, Allowed("a whole number")] = 0


@dataclass(frozen=True, slots=True)
class Plan:
    proxies: tuple[ProxySpec, ...]
    api: str | None = None
    seed: int = 0

    def with_options(self, api: str | None, seed: int | None) -> Plan:
        """Options say it last. Raises BadInput."""
        try:
            _address(api)
        except ValueError as error:
            raise BadInput(f"--api: {error}") from None
        return Plan(self.proxies, api or self.api, self.seed if seed is None else seed)


OPTIONS = ("listen", "upstream", "profile", "rate", "delay", "jitter", "tcp", "loss", "queue")
"""Options that are called as the fields of a proxy."""


def of_options(given: Mapping[str, str | None]) -> Plan:
    """One proxy, called `proxy`. `rate_down` and `delay_down` are of the way to the client. Raises
    BadInput with all that is wrong."""
    found = Document("options", {}, {})
    up, down = f"{ENDS[0]}>{ENDS[1]}", f"{ENDS[1]}>{ENDS[0]}"
    for name in OPTIONS:
        value: Any = given.get(name)
        if (back := given.get(f"{name}_down")) is not None:
            if value is None:
                value = back if name == "rate" else _delay_of(given.get("profile"))
            value = {up: value, down: back}
        if value is not None:
            found.put(("proxies", "proxy", name), value, f"--{name}")
    for name in ("listen", "upstream"):
        found.places.setdefault(("proxies", "proxy", name), f"--{name}")
    found.places.setdefault(("proxies", "proxy"), "options")
    try:
        return _plan(found, None)
    except BadInput as error:  # which field an option means, its name says
        said = [re.sub(r"^(--[\w-]+: )[\w.]+: ", r"\1", text) for text in error.problems]
        raise BadInput(said) from None


def _delay_of(profile: str | None) -> str:
    """What holds towards the upstream where only the other way's delay is given."""
    try:
        return format_duration(load(profile).delay) if profile is not None else "0 s"
    except BadInput:
        return "0 s"  # said as the profile's fault


def read(path: str | Path) -> Plan:
    """Raises BadInput with all that is wrong with the file."""
    if (listed := _listed(path)) is not None:
        return Plan(tuple(listed))
    return _plan(document.read(path), Path(path).parent)


def _plan(found: Document, folder: Path | None) -> Plan:
    outcome = check(found, FileFields)
    problems = found.problems + outcome.problems
    made = outcome.model.proxies if outcome.model else {}
    for problem in links.problems(made, folder):
        problems.append(dataclasses.replace(problem, keys=("proxies", *problem.keys[1:])))
    wrong = {problem.keys[1:2] for problem in problems}
    specs = []
    for name, fields in made.items():
        toxics = tuple(_toxics(name, fields, problems))
        if (name,) not in wrong:
            link = links.spec(name, fields, folder)
            where = (name, fields.listen, fields.upstream)
            specs.append(ProxySpec(*where, link, fields.enabled, toxics))
    for name in made:
        if not (name.isprintable() and 0 < len(name) <= MAX_NAME):
            text = f"found {shown(name)}; allowed: a printable name of up to {MAX_NAME} characters"
            problems.append(Problem(("proxies", name), text))
    problems = [dataclasses.replace(p, text=_by_ends(p.text)) for p in problems]
    if problems or outcome.model is None:
        raise BadInput(found.lines(problems))
    return Plan(tuple(specs), outcome.model.api, outcome.model.seed)


def _by_ends(text: str) -> str:
    """A link's complaint in words of a proxy's two ends."""
    up, down = f"{ENDS[0]}>{ENDS[1]}", f"{ENDS[1]}>{ENDS[0]}"
    return text.replace("{a>b: ..., b>a: ...}", f"{{{up}: ..., {down}: ...}}")


def _toxics(name: str, fields: ProxyFields, problems: list[Problem]) -> Iterator[Toxic]:
    names = set()
    for i, one in enumerate(fields.toxics):
        here = ("proxies", name, "toxics", i)
        toxic = _toxic(one, here, problems)
        if toxic is None:
            continue
        if toxic.name in names:
            text = f"found a second toxic called {shown(toxic.name)}; give it another `name`"
            problems.append(Problem(here, text))
        names.add(toxic.name)
        yield toxic


def _toxic(fields: ToxicFields, keys: Keys, problems: list[Problem]) -> Toxic | None:
    known = STAGES[fields.type].attributes
    for name in fields.attributes:
        if name not in known:
            text = f"is no attribute of {fields.type}; allowed: {', '.join(known)}"
            problems.append(Problem((*keys, "attributes", name), text))
    try:
        attributes = checked(fields.type, fields.attributes, {})
    except ValueError as error:
        problems.append(Problem((*keys, "attributes"), str(error)))
        return None
    name = fields.name or f"{fields.type}_{fields.stream}"
    return Toxic(name, fields.type, fields.stream, fields.toxicity, attributes)


def _listed(path: str | Path) -> list[ProxySpec] | None:
    """Of a JSON list; None for anything else, which is to be a mapping. Raises BadInput."""
    where = document.shown_path(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(document.MAX_BYTES)
    except (OSError, ValueError):
        return None  # the other reader says so
    if not raw.lstrip().startswith(b"["):
        return None
    try:
        items = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: found '[', but no list in JSON follows: {error}") from None
    specs, problems = [], []
    for i, item in enumerate(items):
        try:
            specs.append(_of_json(item))
        except ValueError as error:
            problems.append(f"{where}: proxy {i + 1}: {error}")
    if problems:
        raise BadInput(problems)
    return specs


def _of_json(item: Any) -> ProxySpec:
    if not isinstance(item, dict):
        raise ValueError("found no object")
    for field in ("name", "listen", "upstream"):
        if not isinstance(item.get(field), str) or not item[field]:
            raise ValueError(f"{field}: found {shown(item.get(field))}; allowed: a text")
    if not item["name"].isprintable() or len(item["name"]) > MAX_NAME:
        raise ValueError(f"name: found {shown(item['name'])}; allowed: a printable text")
    parse_address(item["listen"]), parse_address(item["upstream"])
    enabled = item.get("enabled", True)
    if not isinstance(enabled, bool):
        raise ValueError(f"enabled: found {shown(enabled)}; allowed: true | false")
    return ProxySpec(item["name"], item["listen"], item["upstream"], enabled=enabled)
