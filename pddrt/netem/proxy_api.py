"""The control interface of `netem proxy`: Toxiproxy's HTTP interface, so that its clients work.

    GET    /proxies                      all, by name          GET  /version
    POST   /proxies                      a new one             POST /populate  a list of them
    GET    /proxies/NAME                 one                   POST /reset     enable all, no toxics
    POST   /proxies/NAME  (or PATCH)     addresses, the switch
    DELETE /proxies/NAME
    GET    /proxies/NAME/toxics          POST: a new one
    GET    /proxies/NAME/toxics/TOXIC    POST, PATCH: change; DELETE

and, ours, the link below the toxics:

    GET    /proxies/NAME/link            {"up": {"rate", "delay", "jitter"}, "down": {...}}
    POST   /proxies/NAME/link            the same, with units ("20 ms"); what is left out stays
    GET    /proxies/NAME/stats           connections, bytes, how late data left

Errors are {"error": text, "status": code}. Programs in browsers are refused, since any page might
be one. Bodies are bounded, and so is how many proxies and toxics there may be.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pddrt.errors import CannotRun
from pddrt.netem.fidelity import judge
from pddrt.netem.proxy import LOOPBACK, Notices, Proxies, Proxy, ProxySpec, Shape, parse_address
from pddrt.netem.toxics import STAGES, Toxic, ToxicType, Way, checked
from pddrt.trace import dumps
from pddrt.units import (
    format_duration,
    format_rate,
    parse_duration,
    parse_rate,
)

SPEAKS = "2.12.0"
"""The version of that interface."""
MAX_BODY = 1 << 20
MAX_PROXIES, MAX_TOXICS, MAX_NAME = 1024, 64, 256

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _body(text: str) -> Refused:
    return Refused(400, f"bad request body: {text}")


def as_json(proxy: Proxy) -> dict[str, Any]:
    return {
        "name": proxy.name,
        "listen": proxy.listen,
        "upstream": proxy.upstream,
        "enabled": proxy.enabled,
        "toxics": [toxic.as_json() for toxic in proxy.toxics.values()],
    }


class Interface:
    def __init__(self, proxies: Proxies) -> None:
        self._proxies = proxies

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_guard])
        one, toxic = "/proxies/{proxy}", "/proxies/{proxy}/toxics/{toxic}"
        app.add_routes(
            [
                web.get("/version", self._version),
                web.post("/reset", self._reset),
                web.post("/populate", self._populate),
                web.get("/proxies", self._index),
                web.post("/proxies", self._create),
                web.get(one, self._show),
                web.post(one, self._update),
                web.patch(one, self._update),
                web.delete(one, self._delete),
                web.get(f"{one}/link", self._link),
                web.post(f"{one}/link", self._relink),
                web.get(f"{one}/stats", self._stats),
                web.get(f"{one}/toxics", self._toxics),
                web.post(f"{one}/toxics", self._add_toxic),
                web.get(toxic, self._toxic),
                web.post(toxic, self._change_toxic),
                web.patch(toxic, self._change_toxic),
                web.delete(toxic, self._remove_toxic),
            ]
        )
        return app

    # -- all of them ------------------------------------------------------------------------------

    async def _version(self, _request: web.Request) -> web.Response:
        from pddrt import __version__

        return _answer({"version": SPEAKS, "server": f"pddrt {__version__}"})

    async def _reset(self, _request: web.Request) -> web.Response:
        await self._proxies.reset()
        return web.Response(status=204)

    async def _index(self, _request: web.Request) -> web.Response:
        return _answer({name: as_json(p) for name, p in self._proxies.by_name.items()})

    async def _populate(self, request: web.Request) -> web.Response:
        asked = await _json(request, list)
        specs = []
        for i, one in enumerate(asked):
            if not isinstance(one, dict):
                raise _body(f"proxy {i + 1} is no object")
            specs.append(_spec(one, f" at proxy {i + 1}"))
        there = len({*self._proxies.by_name, *(spec.name for spec in specs)})
        if there > MAX_PROXIES:
            raise _body(f"more than {MAX_PROXIES} proxies")
        proxies = await self._proxies.populate(specs)
        return _answer({"proxies": [as_json(proxy) for proxy in proxies]}, 201)

    async def _create(self, request: web.Request) -> web.Response:
        spec = _spec(await _json(request, dict))
        if spec.name in self._proxies.by_name:
            raise Refused(409, "proxy already exists")
        if len(self._proxies.by_name) >= MAX_PROXIES:
            raise _body(f"more than {MAX_PROXIES} proxies")
        return _answer(as_json(await self._proxies.add(spec)), 201)

    # -- one --------------------------------------------------------------------------------------

    def _proxy(self, request: web.Request) -> Proxy:
        found = self._proxies.by_name.get(request.match_info["proxy"])
        if found is None:
            raise Refused(404, "proxy not found")
        return found

    async def _show(self, request: web.Request) -> web.Response:
        return _answer(as_json(self._proxy(request)))

    async def _update(self, request: web.Request) -> web.Response:
        proxy = self._proxy(request)
        asked = await _json(request, dict)
        listen = _text(asked, "listen") or proxy.listen
        upstream = _text(asked, "upstream") or proxy.upstream
        await proxy.move(listen, upstream, _flag(asked, proxy.enabled))
        return _answer(as_json(proxy))

    async def _delete(self, request: web.Request) -> web.Response:
        await self._proxies.remove(self._proxy(request).name)
        return web.Response(status=204)

    async def _link(self, request: web.Request) -> web.Response:
        return _answer(_shapes(self._proxy(request)))

    async def _relink(self, request: web.Request) -> web.Response:
        proxy = self._proxy(request)
        asked = await _json(request, dict)
        shapes = {}
        for way, given in asked.items():
            if way not in ("up", "down") or not isinstance(given, dict):
                raise _body('allowed: {"up": {...}, "down": {...}}')
            shapes[way] = _shape(given, proxy.shapes[way])
        for way, shape in shapes.items():
            proxy.reshape(way, shape)
        return _answer(_shapes(proxy))

    async def _stats(self, request: web.Request) -> web.Response:
        proxy = self._proxy(request)
        up, down = proxy.transferred
        about = {
            "connections": {
                "open": len(proxy.connections),
                "accepted": proxy.accepted,
                "refused": proxy.refused,
            },
            "bytes": {"up": up, "down": down},
            "held_bytes": proxy.held,
            "fidelity": judge(proxy.kept()),
        }
        return web.Response(text=dumps(about) + "\n", content_type="application/json")

    # -- toxics -----------------------------------------------------------------------------------

    def _found(self, request: web.Request) -> tuple[Proxy, Toxic]:
        proxy = self._proxy(request)
        toxic = proxy.toxics.get(request.match_info["toxic"])
        if toxic is None:
            raise Refused(404, "toxic not found")
        return proxy, toxic

    async def _toxics(self, request: web.Request) -> web.Response:
        return _answer([toxic.as_json() for toxic in self._proxy(request).toxics.values()])

    async def _add_toxic(self, request: web.Request) -> web.Response:
        proxy = self._proxy(request)
        toxic = toxic_from(await _json(request, dict))
        if toxic.name in proxy.toxics:
            raise Refused(409, "toxic already exists")
        if len(proxy.toxics) >= MAX_TOXICS:
            raise _body(f"more than {MAX_TOXICS} toxics")
        proxy.add_toxic(toxic)
        return _answer(toxic.as_json())

    async def _toxic(self, request: web.Request) -> web.Response:
        return _answer(self._found(request)[1].as_json())

    async def _change_toxic(self, request: web.Request) -> web.Response:
        proxy, toxic = self._found(request)
        asked = await _json(request, dict)
        attributes = _attributes(toxic.type, asked, toxic.attributes)
        toxicity = _toxicity(asked, toxic.toxicity)
        changed = Toxic(toxic.name, toxic.type, toxic.stream, toxicity, attributes)
        proxy.change_toxic(changed)
        return _answer(changed.as_json())

    async def _remove_toxic(self, request: web.Request) -> web.Response:
        proxy, toxic = self._found(request)
        proxy.remove_toxic(toxic.name)
        return web.Response(status=204)


def toxic_from(asked: Mapping[str, Any]) -> Toxic:
    """A toxic as somebody asks for it. Raises Refused."""
    stream: Way = asked.get("stream") or "downstream"
    if stream not in ("upstream", "downstream"):
        raise Refused(400, "stream was invalid, can be either upstream or downstream")
    type_ = asked.get("type")
    if not isinstance(type_, str) or type_ not in STAGES:
        raise Refused(400, "invalid toxic type")
    name = _text(asked, "name") or f"{type_}_{stream}"
    kind = cast(ToxicType, type_)
    return Toxic(name, kind, stream, _toxicity(asked, 1.0), _attributes(kind, asked, {}))


def _attributes(
    type_: ToxicType, asked: Mapping[str, Any], before: Mapping[str, int]
) -> dict[str, int]:
    given = asked.get("attributes") or {}
    if not isinstance(given, dict):
        raise _body("attributes is no object")
    known = STAGES[type_].attributes
    if given and not any(name in known for name in given):  # misspelt: it would do nothing
        raise _body(f"{type_} has the attributes {', '.join(known)}, and none of those given")
    try:
        return checked(type_, given, before)
    except ValueError as error:
        raise _body(str(error)) from None


def _toxicity(asked: Mapping[str, Any], default: float) -> float:
    value = asked.get("toxicity")
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise _body("toxicity must be a number from 0 to 1")
    return float(value)


def _spec(asked: Mapping[str, Any], where: str = "") -> ProxySpec:
    name, upstream = _text(asked, "name"), _text(asked, "upstream")
    for field, value in (("name", name), ("upstream", upstream)):
        if not value:
            raise Refused(400, f"missing required field: {field}{where}")
    listen = _text(asked, "listen") or "localhost:0"
    for address in (listen, upstream):
        try:
            parse_address(address)
        except ValueError as error:
            raise _body(f"{error}{where}") from None
    return ProxySpec(name, listen, upstream, enabled=_flag(asked, True))


def _shapes(proxy: Proxy) -> dict[str, Any]:
    return {
        way: {
            "rate": None if shape.rate is None else format_rate(shape.rate),
            "delay": format_duration(shape.delay),
            "jitter": format_duration(shape.jitter),
        }
        for way, shape in proxy.shapes.items()
    }


def _shape(given: Mapping[str, Any], before: Shape) -> Shape:
    try:
        if unknown := set(given) - {"rate", "delay", "jitter"}:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        rate = before.rate
        if "rate" in given:
            rate = None if given["rate"] is None else parse_rate(given["rate"])
        delay = parse_duration(given["delay"]) if "delay" in given else before.delay
        jitter = parse_duration(given["jitter"]) if "jitter" in given else before.jitter
        if jitter and not delay:
            raise ValueError("jitter needs a delay to vary")
    except ValueError as error:
        raise _body(str(error)) from None
    return Shape(rate, delay, jitter)


# -- requests and answers --------------------------------------------------------------------------


def _text(asked: Mapping[str, Any], field: str) -> str:
    value = asked.get(field)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_NAME or not value.isprintable():
        raise _body(f"{field} must be a printable text of up to {MAX_NAME} characters")
    return value


def _flag(asked: Mapping[str, Any], default: bool) -> bool:
    value = asked.get("enabled", default)
    if not isinstance(value, bool):
        raise _body("enabled must be true or false")
    return value


async def _json(request: web.Request, wanted: type) -> Any:
    raw = await request.read()
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _body(str(error)) from None
    if not isinstance(found, wanted):
        raise _body("a list is wanted" if wanted is list else "an object is wanted")
    return found


def _answer(body: Any, status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.headers.get("User-Agent", "").startswith("Mozilla/"):
        return web.Response(status=403, text="User agent not allowed\n")
    try:
        return await handler(request)
    except Refused as error:
        status, text = error.status, str(error)
    except CannotRun as error:
        status, text = 500, str(error)
    except ValueError as error:
        status, text = 400, f"bad request body: {error}"
    except web.HTTPException as error:
        status, text = error.status, error.reason
    return _answer({"error": text, "status": status}, status)


class _Brief(logging.Handler):
    """What the server would log with a traceback is said in a line, each kind once."""

    def __init__(self, notices: Notices) -> None:
        super().__init__(logging.ERROR)
        self._notices = notices

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self._notices.tell("the control interface refused what is no HTTP request")
        else:
            what = record.getMessage() if error is None else f"{type(error).__name__}: {error}"
            self._notices.tell(f"the control interface failed: {what}")


class Serving:
    """The interface, listening."""

    def __init__(self, proxies: Proxies) -> None:
        logger = logging.Logger("control")  # of its own: nobody else's settings hold
        logger.addHandler(_Brief(proxies.notices))
        app = Interface(proxies).app()
        self._runner = web.AppRunner(app, access_log=None, logger=logger)

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Where it listens. Raises CannotRun where the address cannot be had."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host or LOOPBACK, port).start()
        except OSError as error:
            await self._runner.cleanup()
            why = error.strerror or str(error)
            text = f"the control interface cannot listen on {host}:{port}: {why}"
            raise CannotRun(text) from None
        found: tuple[str, int] = self._runner.addresses[0][:2]
        return found

    async def close(self) -> None:
        await self._runner.cleanup()
