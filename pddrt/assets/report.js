"use strict";
// The Gantt chart: canvas, because thousands of rows are moved at once. Everything else on the page
// works without this file. Texts come from users: they are only ever set as text.
(() => {
  document.documentElement.classList.add("js");
  sortable();
  const source = document.getElementById("data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const at = Object.fromEntries(data.fields.map((name, i) => [name, i]));
  const rows = data.rows, field = (row, name) => row[at[name]];
  const VARS = {
    gateway: "--gateway", lost: "--lost", prefill_queue: "--queue", prefill: "--prefill", decoder_queue: "--dqueue",
    transfer: "--transfer", delivery: "--deliver", relay_decode: "--relay", handoff_gap: "--handoff", main_decode: "--main",
    prefill_decode: "--prefill", outage: "--outage", ending: "--ending", no_token: "--bad", kv_relay: "--kvr", kv_main: "--kvm",
  };
  const KIND = Object.fromEntries(data.kinds.map(([kind, letter, title]) => [kind, [letter, title, VARS[kind]]]));
  const lanes = [];  // faults that do not overlap, a lane above the rows each; what is too much goes into the last
  for (const fault of data.faults) {
    const start = fault[0], end = fault[1] ?? fault[0];
    let lane = lanes.findIndex((of) => of[of.length - 1][3] < start);
    if (lane < 0 && lanes.length < 4) { lanes.push([]); lane = lanes.length - 1; }
    lanes[lane < 0 ? lanes.length - 1 : lane].push([...fault.slice(0, 3), end]);
  }
  const ROW = 26, LANE = 16, TICKS = 24, AXIS = TICKS + lanes.length * LANE, NAME = 76;
  const view = document.getElementById("view"), canvas = view.querySelector("canvas");
  const spacer = view.querySelector("div"), tip = document.getElementById("tip");
  const detail = document.getElementById("detail"), draw = canvas.getContext("2d");
  const control = (id) => document.getElementById(id);
  let shown = [], from = 0, to = 1, picked = null, colours = {}, waiting = false;

  const own = () => control("align").value === "own";
  const origin = (row) => (own() ? field(row, "sent") : 0);
  const span = () => (own() ? Math.max(1, ...shown.map((r) => field(r, "end"))) : Math.max(1, data.end));
  function time(us) {
    const abs = Math.abs(us);
    if (abs >= 1e6) return +(us / 1e6).toPrecision(abs >= 1e8 ? 6 : 4) + " s";
    if (abs >= 1e3) return +(us / 1e3).toPrecision(4) + " ms";
    return +us.toFixed(0) + " \u00b5s";
  }
  const many = (count, what) => count + " " + what + (count === 1 ? "" : "s");
  function scale() {
    const width = canvas.clientWidth - NAME - 8;
    return { x: (t) => NAME + ((t - from) / (to - from)) * width, t: (x) => from + ((x - NAME) / width) * (to - from) };
  }
  function arrange() {
    const wanted = control("find").value.trim().toLowerCase(), sort = control("sort").value;
    const key = {
      sent: (r) => field(r, "sent"), ttft: (r) => -(field(r, "ttft") ?? -1),
      e2e: (r) => -field(r, "end"), gap: (r) => -length(r, "handoff_gap"),
    }[sort];
    const only = control("only").checked && !own();
    const inView = (r) => field(r, "sent") <= to && field(r, "sent") + field(r, "end") >= from;
    shown = rows.filter((r) => !wanted || [field(r, "id"), data.pipelines[field(r, "pipeline")],
      slowest_leg(r), ...field(r, "attempts").map((a) => a[0])].some((text) => text.toLowerCase().includes(wanted)));
    if (only) shown = shown.filter(inView);
    shown.sort((a, b) => key(a) - key(b));
    spacer.style.height = Math.max(0, shown.length * ROW + AXIS - view.clientHeight + 40) + "px";
    control("count").textContent = shown.length + " of " + rows.length + " requests";
    later();
  }
  const slowest_leg = (row) => (field(row, "slow") === null ? "" : data.kinds[field(row, "slow")][2]);
  function* segments(row) {
    const flat = field(row, "segments");
    for (let i = 0; i < flat.length; i += 4) yield [data.kinds[flat[i]][0], flat[i + 1], flat[i + 2], flat[i + 3]];
  }
  function length(row, kind) {
    for (const [k, a, b] of segments(row)) if (k === kind) return b - a;
    return 0;
  }
  function later() {
    if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; paint(); }); }
  }
  function recolour() {
    const style = getComputedStyle(document.documentElement);
    colours = new Proxy({}, { get: (_, key) => style.getPropertyValue(key) });
  }
  function paint() {
    const ratio = window.devicePixelRatio || 1, width = view.clientWidth, height = view.clientHeight;
    canvas.style.width = width + "px"; canvas.style.height = height + "px";
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    draw.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw.fillStyle = colours["--bg"]; draw.fillRect(0, 0, width, height);
    draw.font = "11px system-ui, 'DejaVu Sans', sans-serif"; draw.textBaseline = "middle";
    const { x } = scale();
    grid(x, width, height);
    const first = Math.max(0, Math.floor((view.scrollTop) / ROW));
    for (let i = first; i < shown.length; i++) {
      const y = AXIS + i * ROW - view.scrollTop;
      if (y > height) break;
      paintRow(shown[i], y, x, width);
    }
    draw.fillStyle = colours["--bg"]; draw.fillRect(0, 0, width, AXIS - 4);
    axis(x, width);
    faults(x, width);
  }
  function ticks() {
    const about = Math.max(2, (canvas.clientWidth - NAME) / 110), raw = (to - from) / about;
    const decade = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * decade).find((s) => s >= raw);
    const found = [];
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) found.push(t);
    return found;
  }
  function grid(x, width, height) {
    draw.strokeStyle = colours["--edge"]; draw.lineWidth = 1;
    for (const t of ticks()) line(x(t), AXIS - 4, height);
  }
  function faults(x, width) {
    draw.textAlign = "left"; draw.fillStyle = colours["--dim"];
    if (lanes.length) draw.fillText("faults", 4, TICKS + LANE / 2 - 4);
    if (own()) { if (lanes.length) draw.fillText("are at times of the run, each at another time of a request", NAME, TICKS + LANE / 2 - 4); return; }
    lanes.forEach((lane, i) => {
      const y = TICKS - 4 + i * LANE;
      lane.forEach(([start, end, what], place) => {
        let left = x(start), right = end === null ? left + 3 : x(end);
        if (right < NAME || left > width) return;
        left = Math.max(NAME, left); right = Math.min(width, Math.max(right, left + 3));
        draw.fillStyle = colours["--bad"]; draw.globalAlpha = 0.28; draw.fillRect(left, y, right - left, LANE - 3);
        draw.globalAlpha = 1; draw.fillRect(left, y, 2, LANE - 3);
        const next = lane[place + 1], room = (next ? Math.min(width, x(next[0])) : width) - left - 8;
        draw.fillStyle = colours["--fg"]; draw.save(); draw.beginPath(); draw.rect(left, y, Math.max(0, room + 4), LANE); draw.clip();
        if (room > 24) draw.fillText(what, left + 5, y + LANE / 2 - 1);
        draw.restore();
      });
    });
  }
  function line(x, top, bottom) {
    if (x < NAME) return;
    draw.beginPath(); draw.moveTo(Math.round(x) + 0.5, top); draw.lineTo(Math.round(x) + 0.5, bottom); draw.stroke();
  }
  function axis(x, width) {
    draw.fillStyle = colours["--dim"]; draw.textAlign = "left";
    draw.fillText(own() ? "since sent" : "run time", 4, TICKS / 2 - 1);
    draw.textAlign = "center";
    for (const t of ticks()) if (x(t) > NAME + 10 && x(t) < width - 24) draw.fillText(time(t), x(t), TICKS / 2 - 1);
  }
  function paintRow(row, y, x, width) {
    if (row === picked) { draw.fillStyle = colours["--pick"]; draw.fillRect(0, y, width, ROW); }
    const zero = origin(row) ? 0 : field(row, "sent");
    for (const [kind, a, b] of segments(row)) {
      const [letter, , colour] = KIND[kind], wire = kind === "kv_relay" || kind === "kv_main";
      let left = x(a + zero), right = x(b + zero);
      if (right < NAME || left > width || b <= a) continue;
      left = Math.max(NAME, left); right = Math.min(width, Math.max(right, left + 1));
      const top = wire ? y + (kind === "kv_relay" ? 16 : 20) : y + 2, tall = wire ? 3 : 13;
      draw.fillStyle = colours[colour]; draw.fillRect(left, top, right - left, tall);
      if (!wire && right - left > 12) {
        draw.fillStyle = colours["--on"]; draw.textAlign = "center"; draw.font = "bold 11px system-ui, 'DejaVu Sans', sans-serif";
        draw.fillText(letter, (left + right) / 2, top + 7); draw.font = "11px system-ui, 'DejaVu Sans', sans-serif";
      }
    }
    const first = x(zero), last = x(zero + field(row, "end"));
    if (last < NAME || first > width) {  // nothing of it is in the view: an arrow to where it is
      draw.fillStyle = colours["--dim"]; draw.textAlign = last < NAME ? "left" : "right";
      draw.fillText(last < NAME ? "\u25c2 " + time(zero) : time(zero) + " \u25b8", last < NAME ? NAME + 4 : width - 4, y + 9);
    }
    draw.fillStyle = colours["--fg"];
    for (const [t] of field(row, "rounds")) {
      const left = x(t + zero);
      if (left >= NAME && left <= width) draw.fillRect(left, y + 1, 1, 15);
    }
    draw.fillStyle = colours["--bg"]; draw.fillRect(0, y, NAME, ROW);
    if (row === picked) { draw.fillStyle = colours["--pick"]; draw.fillRect(0, y, NAME, ROW); }
    draw.fillStyle = /^(stop|length)$/.test(field(row, "finish")) ? colours["--fg"] : colours["--bad"];
    draw.textAlign = "left"; draw.fillText(field(row, "id").slice(0, 11), 4, y + 9);
  }
  function under(event) {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const row = shown[Math.floor((py - AXIS + view.scrollTop) / ROW)];
    return { px, row: py > AXIS ? row : undefined, inRow: (py - AXIS + view.scrollTop) % ROW };
  }
  function hover(event) {
    const { px, row, inRow } = under(event);
    const when = scale().t(px), near_by = (3 * (to - from)) / canvas.clientWidth;
    const wrong = own() || row ? [] : data.faults.filter(([a, b]) => a - near_by <= when && when <= (b === null ? a : b) + near_by);
    if (!row && !wrong.length) { tip.style.display = "none"; return; }
    if (!row) return say(event, wrong.map((f) => "fault: " + f[2] + ", at " + time(f[0]) + (f[1] === null ? "" : " for " + time(f[1] - f[0]))));
    const t = scale().t(px) - (origin(row) ? 0 : field(row, "sent"));
    const near = (2 * (to - from)) / canvas.clientWidth, wires = inRow > 15;
    const hit = [...segments(row)].filter(([kind, a, b]) => kind.startsWith("kv_") === wires && a - near <= t && t <= b + near);
    const lines = [field(row, "id") + "  " + data.pipelines[field(row, "pipeline")]];
    for (const [kind, a, b] of hit) lines.push(KIND[kind][0] + "  " + KIND[kind][1] + ": " + time(b - a) + ", from " + time(a) + " after it was sent");
    for (const [when, ids, last] of field(row, "rounds")) if (Math.abs(when - t) < 2 * near) lines.push(ids + " ids handed over" + (last ? ", the last" : ""));
    lines.push("TTFT " + (field(row, "ttft") === null ? "-" : time(field(row, "ttft")) + ", the largest leg is " + slowest_leg(row)));
    say(event, lines);
  }
  function say(event, lines) {
    tip.textContent = lines.join("\n"); tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 16, window.innerHeight - tip.offsetHeight - 8) + "px";
  }
  function add(parent, tag, text, kind) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    parent.appendChild(made);
    return made;
  }
  function pick(row) {
    picked = row; detail.textContent = "";
    if (!row) return later();
    const [p, r, m] = field(row, "sources"), attempts = field(row, "attempts");
    add(detail, "h3", field(row, "id") + "  " + data.pipelines[field(row, "pipeline")]);
    add(detail, "p", "Prompt " + field(row, "prompt_tokens") + " tokens, answer " + field(row, "answer_tokens") + " (P " + p + ", R " + r +
      ", M " + m + "). Ended: " + field(row, "finish") + ".");
    if (field(row, "ttft") !== null) add(detail, "p", "TTFT " + time(field(row, "ttft")) + ", the largest leg is " + slowest_leg(row) + ". In all " + time(field(row, "end")) + ".");
    if (field(row, "story")) { const said = add(detail, "p"); add(said, "b", "What went wrong: "); said.append(field(row, "story") + "."); }
    const table = add(add(detail, "div", undefined, "scroll"), "table"), head = add(table, "tr");
    for (const text of ["", "what", "from", "to", "lasted"]) add(head, "th", text, text === "what" || !text ? "l" : "");
    const parts = [...segments(row)].filter(([, a, b]) => b > a).sort((u, v) => u[3] - v[3] || u[1] - v[1]);
    (attempts.length ? attempts : [null]).forEach((attempt, number) => {
      if (attempt) {
        const [way, began, hitP, hitM, start, end] = attempt, line = add(add(table, "tr"), "td", undefined, "wrap");
        line.colSpan = 5;
        add(line, "b", (attempts.length > 1 ? "attempt " + (number + 1) + ", " : "") + (way || "not routed"));
        line.append(" from " + time(began) + ": of the prompt " + many(hitP, "token") + " cached on P" + (hitM === null ? "" : ", " + hitM + " on MD") +
          (start === undefined ? "" : "; P computed it from " + time(start) + " to " + time(end)));
      }
      for (const [kind, a, b, of] of parts) {
        if (of !== number) continue;
        const line = add(table, "tr");
        add(add(line, "td", undefined, "l"), "span", KIND[kind][0], "k c-" + kind); add(line, "td", KIND[kind][1], "l");
        for (const t of [a, b, b - a]) add(line, "td", time(t));
      }
    });
    const rounds = field(row, "rounds");
    if (rounds.length) add(detail, "p", "Handed over: " + rounds.map(([t, ids, last]) => ids + " ids at " + time(t) + (last ? " (the last)" : "")).join(", ") + ".");
    if (field(row, "prompt")) add(detail, "p", "Prompt: " + field(row, "prompt"), "text dim");
    if (field(row, "answer")) add(detail, "p", "Answer: " + field(row, "answer"), "text dim");
    later();
  }
  function zoom(factor, centre) {
    const middle = centre ?? (from + to) / 2, width = Math.min(span() * 1.05, Math.max(20, (to - from) * factor));
    const share = (middle - from) / (to - from);
    from = middle - share * width; to = from + width; clamp();
  }
  let settling = 0;
  function clamp() {
    if (control("only").checked) { clearTimeout(settling); settling = setTimeout(arrange, 250); }
    const width = to - from, high = span() * 1.05;
    if (from < 0) { from = 0; to = width; }
    if (to > high) { to = high; from = Math.max(0, high - width); }
    later();
  }
  function everything() { from = 0; to = span() * 1.02; if (control("only").checked) arrange(); later(); }
  function show(row) {
    const start = own() ? 0 : field(row, "sent"), width = Math.max(50, field(row, "end"));
    const before = [from, to];
    from = Math.max(0, start - width * 0.25); to = start + width * 1.25;
    if (control("only").checked) arrange();
    const index = shown.indexOf(row);
    if (index < 0) { [from, to] = before; return; }
    view.scrollTop = Math.max(0, index * ROW - view.clientHeight / 2 + ROW);
    pick(row);
  }
  const slowest = (by) => rows.reduce((a, b) => ((field(b, by) ?? -1) > (field(a, by) ?? -1) ? b : a), rows[0]);
  let grabbed = null, moved = false;
  canvas.addEventListener("pointerdown", (e) => { grabbed = [e.clientX, from, to]; moved = false; canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointermove", (e) => {
    if (!grabbed) return hover(e);
    if (Math.abs(e.clientX - grabbed[0]) > 3) moved = true;
    const shift = ((e.clientX - grabbed[0]) / (canvas.clientWidth - NAME - 8)) * (grabbed[2] - grabbed[1]);
    from = grabbed[1] - shift; to = grabbed[2] - shift; clamp();
  });
  canvas.addEventListener("pointerup", (e) => { grabbed = null; if (!moved) { const { row } = under(e); if (row) pick(row); } });
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("dblclick", (e) => { const { row } = under(e); if (row) show(row); });
  view.addEventListener("wheel", (e) => {
    if (!e.ctrlKey && !e.metaKey && !e.shiftKey) return;
    e.preventDefault();
    zoom(1.0015 ** (e.deltaY || e.deltaX), scale().t(e.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });
  view.addEventListener("scroll", later);
  view.addEventListener("keydown", (e) => {
    const index = shown.indexOf(picked), shift = (to - from) / 8;
    const act = {
      "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4), "0": everything,
      ArrowLeft: () => { from -= shift; to -= shift; clamp(); }, ArrowRight: () => { from += shift; to += shift; clamp(); },
      ArrowDown: () => choose(Math.min(shown.length - 1, index + 1)), ArrowUp: () => choose(Math.max(0, index - 1)),
      Enter: () => picked && show(picked),
    }[e.key];
    if (act) { e.preventDefault(); act(); }
  });
  function choose(index) {
    if (!shown[index]) return;
    pick(shown[index]);
    const y = index * ROW;
    if (y < view.scrollTop) view.scrollTop = y;
    if (y + ROW + AXIS > view.scrollTop + view.clientHeight) view.scrollTop = y + ROW + AXIS - view.clientHeight;
  }
  const clicks = { in: () => zoom(0.6), out: () => zoom(1.6), all: everything, slow: () => { control("find").value = ""; arrange(); show(slowest("ttft")); } };
  for (const [id, act] of Object.entries(clicks)) control("g-" + id).addEventListener("click", act);
  for (const id of ["find", "sort", "only"]) control(id).addEventListener("input", arrange);
  control("align").addEventListener("input", () => { picked ? show(picked) : everything(); arrange(); });
  document.addEventListener("click", (e) => {
    const link = e.target.closest("a[data-request]");
    if (!link) return;
    const row = rows.find((r) => field(r, "id") === link.dataset.request);
    if (row) { control("find").value = ""; arrange(); show(row); }
  });
  new ResizeObserver(() => { arrange(); }).observe(view);
  const words = document.getElementById("words");
  addEventListener("hashchange", () => { if (words && location.hash === "#words") words.open = true; });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { recolour(); later(); });
  recolour(); arrange(); everything();
  if (rows.length > 60) show(slowest("ttft")); else if (rows.length) pick(slowest("ttft"));

  function sortable() {
    for (const head of document.querySelectorAll("th[data-sort]")) {
      head.tabIndex = 0;
      const sort = () => {
        const table = head.closest("table"), column = head.cellIndex, down = head.dataset.sort !== "down";
        head.dataset.sort = down ? "down" : "up";
        const body = [...table.rows].slice(1), value = (r) => r.cells[column].dataset.v ?? r.cells[column].textContent;
        body.sort((a, b) => {
          const [u, v] = [value(a), value(b)], numbers = u !== "" && v !== "" && !isNaN(u) && !isNaN(v);
          if (u === "" || v === "") return u === v ? 0 : u === "" ? 1 : -1;
          const less = numbers ? u - v : u.localeCompare(v, "en", { numeric: true });
          return down ? -less : less;
        });
        for (const row of body) row.parentNode.appendChild(row);
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (e) => { if (e.key === "Enter") sort(); });
    }
  }
})();
