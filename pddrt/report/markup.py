"""The pieces of HTML that a report is made of: the page, texts, tables, legends, badges.

Whatever comes from a run goes through `text` or `inert`: nothing in it can become markup or code.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from pddrt.report.figures import duration
from pddrt.report.slowness import ns
from pddrt.report.svg import swatch
from pddrt.show import clean

Json = Mapping[str, Any]


def page(title: str, body: Iterable[str], script: str = "") -> str:
    """A whole page that needs nothing but itself: nothing on it may come from elsewhere, and no
    script may run but the one whose digest stands in its head. `title` is HTML, as are the sections
    of `body`.
    """
    style = (files("pddrt") / "assets" / "report.css").read_text(encoding="utf-8")
    policy, end = "default-src 'none'; style-src 'unsafe-inline'", ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
        end = f'<div id="tip" role="status"></div>\n<script>{script}</script>'
    sections = "\n".join(section for section in body if section)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style></head>\n<body><main>\n{sections}\n</main>"
        f"{end}</body></html>\n"
    )


def text(value: object) -> str:
    """Of a run's texts, as HTML: nothing in it is markup, and nothing hides."""
    return escape(clean(str(value)))


def inert(value: Any) -> str:
    """JSON inside a script element: whatever is in a text, it does not end the element."""
    shown = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return shown.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def table(
    head: Sequence[str],
    body: Iterable[Sequence[str]],
    left: Sequence[int] = (0,),
    wrap: Sequence[int] = (),
    sort: bool = False,
    tall: bool = False,
    first: bool = False,
) -> str:
    """Cells are HTML. Elements that HTML closes by itself are not closed: there may be thousands. A
    cell of (text, value) is sorted by its value. `first`: the first column stays where it is.
    """
    rows = list(body)
    if not rows:
        return ""
    kinds = [' class="wrap"' if i in wrap else ' class="l"' if i in left else ""
             for i in range(len(head))]  # fmt: skip
    sorts = " data-sort" if sort else ""
    heads = "".join(
        f"<th{k.replace('wrap', 'l')}{sorts}>{h}" for h, k in zip(head, kinds, strict=True)
    )
    lines = "\n".join(
        "<tr>" + "".join(f"<td{k}{c[3:] if c.startswith('<td') else '>' + c}"
                         for c, k in zip(cells, kinds, strict=True))
        for cells in rows
    )  # fmt: skip
    scroll = "scroll" + " tall" * tall + " first" * first
    return f'<div class="{scroll}"><table><tr>{heads}\n{lines}</table></div>'


def valued(value: float | None, shown: str) -> str:
    """A cell that is sorted by its value."""
    return f'<td data-v="{"" if value is None else f"{value:g}"}">{shown}'


def time(seconds: float | None) -> str:
    return "-" if seconds is None else duration(ns(seconds))


def link(request: str) -> str:
    return f'<a href="#timeline" data-request="{text(request)}">{text(request)}</a>'


def legend(
    boxes: Iterable[tuple[str, str, str]] = (),
    thin: Iterable[tuple[str, str]] = (),
    lines: Iterable[tuple[str, int, str]] = (),
) -> str:
    """Bars (colour, letter, words), thin bars (colours, words) and lines (colour, dash, words)."""
    items = [f'<i class="c-{colour}">{letter}</i>{words}' for colour, letter, words in boxes]
    items += [f'<i class="thin {colour}"></i>{words}' for colour, words in thin]
    items += [
        f'<svg viewBox="0 0 28 12" width="28" height="12" aria-hidden="true">'
        f"{swatch(1, 10, f'c-{colour}', dash)}</svg>{words}"
        for colour, dash, words in lines
    ]
    return f'<div class="legend">{"".join(f"<span>{item}</span>" for item in items)}</div>'


def fidelity(summary: Json) -> str:
    """Whether figures that went over a link are to be trusted. Stands beside each of them."""
    fidelity = (summary.get("provenance") or {}).get("fidelity")
    if not fidelity:
        return '<span class="badge warn" title="no verdict is recorded">network: unknown</span>'
    verdict = text(fidelity["verdict"])
    kind = "warn" if verdict not in ("exact", "ok") else "good"
    late = f"p99 of sent - due on the worst link: {duration(ns(fidelity['late_p99_s']))}"
    return f'<span class="badge {kind}" title="{late}">network: {verdict}</span>'
