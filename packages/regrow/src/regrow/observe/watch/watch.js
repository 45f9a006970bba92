// The live page: it shows a snapshot, then ticks. All data comes from this job's own coordinator.
"use strict";
const MOST_POINTS = 600, BINS = { s: "starting", t: "training", m: "mending", l: "lost", d: "done" };
const SPENT = { productive: ["productive", "--training"], data_wait: ["data wait", "--data"], checkpoint: ["checkpoint stall", "--hydrate"],
  other: ["incidents, start, between steps", "--other"] };
const $ = (id) => document.getElementById(id);
const state = { snap: null, tick: null, points: [], chosen: 0, asking: false, lastPoint: 0, every: 1, layout: [], drawn: 0 };
let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["training", "mending", "lost", "starting", "done", "curve", "ink", "dim", "line", "focus", "panel", "cell",
    "detect", "abort", "regroup", "hydrate", "redo", "data", "other"]) colours[name] = style.getPropertyValue("--" + name).trim();
}
const seconds = (s) => s == null ? "–" : s < 0.0995 ? Math.round(s * 1000) + " ms" : s < 9.995 ? s.toFixed(2) + " s" : s < 99.95 ? s.toFixed(1) + " s" : clock(s);
function clock(s) { s = Math.floor(s); const two = (n) => String(n).padStart(2, "0");
  return s >= 3600 ? `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}` : `${Math.floor(s / 60)}:${two(s % 60)}`; }
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const number = (x) => x == null ? "–" : Math.abs(x) >= 1e5 ? compact.format(x) : Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en")
  : Number.isInteger(x) ? String(x) : x.toPrecision(3);
function text(id, words) { const at = $(id); if (at.textContent !== words) at.textContent = words; }

function canvas(id, height) {
  const at = $(id), wide = at.clientWidth, ratio = window.devicePixelRatio || 1, pen = at.getContext("2d");
  if (at.width !== Math.round(wide * ratio) || at.height !== Math.round(height * ratio)) {
    at.style.height = height + "px"; at.width = Math.round(wide * ratio); at.height = Math.round(height * ratio);
  }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0); pen.clearRect(0, 0, wide, height); pen.font = "12px system-ui, sans-serif";
  return [pen, wide];
}

// --- the grid: nodes as blocks of cells ---------------------------------------------------------------------------

function place(wide) {
  const { ranks, home, nodes } = state.snap, groups = nodes.map(() => []);
  ranks.forEach((_, i) => groups[home[i]].push(i));
  const size = ranks.length <= 16 ? 46 : ranks.length <= 128 ? 26 : ranks.length <= 700 ? 16 : 11, gap = size > 20 ? 4 : 2;
  const named = nodes.length <= 64, most = Math.max(1, ...groups.map((g) => g.length)), cells = [];
  const across = Math.min(most, Math.max(1, Math.floor((wide - 12) / (size + gap)))), block = across * (size + gap) + 12;
  let x = 0, y = 0, tall = 0;
  const names = [];
  groups.forEach((group, node) => {
    const blockWide = Math.max(block, named ? 9 * Math.min(nodes[node].length, 14) : 0);
    if (x > 0 && x + blockWide > wide) { x = 0; y += tall + 10; tall = 0; }
    const top = named ? 18 : 0;
    if (named) names.push([nodes[node], x, y + 12]);
    group.forEach((i, k) => { cells[i] = [x + (k % across) * (size + gap), y + top + Math.floor(k / across) * (size + gap)]; });
    tall = Math.max(tall, top + Math.ceil(group.length / across) * (size + gap));
    x += blockWide;
  });
  state.layout = { wide, size, cells, names, height: Math.max(20, y + tall) };
}

function drawGrid() {
  const wide = $("grid").clientWidth;
  if (state.layout.wide !== wide || state.layout.cells.length !== state.snap.ranks.length) place(wide);
  const { size, cells, names, height } = state.layout, [pen] = canvas("grid", height), { states, took } = state.tick;
  pen.fillStyle = colours.dim;
  for (const [name, x, y] of names) pen.fillText(name, x, y);
  for (const letter of Object.keys(BINS)) {  // grouped by colour, which is cheaper than a change for each cell
    pen.fillStyle = colours[BINS[letter]];
    for (let i = 0; i < cells.length; i++) if (states[i] === letter) pen.fillRect(cells[i][0], cells[i][1], size, size);
  }
  if (size >= 26) {
    pen.fillStyle = colours.cell; pen.textAlign = "center";
    for (let i = 0; i < cells.length; i++) {
      pen.font = "600 12px system-ui, sans-serif"; pen.fillText(state.snap.ranks[i], cells[i][0] + size / 2, cells[i][1] + (size > 40 ? 19 : size / 2 + 4));
      if (size > 40 && took[i] >= 0) { pen.font = "11px system-ui, sans-serif"; pen.fillText(seconds(took[i] / 1000), cells[i][0] + size / 2, cells[i][1] + 35); }
    }
    pen.textAlign = "start";
  }
  const cell = cells[state.chosen];
  if (cell && (document.activeElement === $("grid") || state.pointed)) {
    pen.strokeStyle = colours.focus; pen.lineWidth = 2; pen.strokeRect(cell[0] - 1, cell[1] - 1, size + 2, size + 2);
  }
}

function describe() {
  const i = state.chosen, { ranks, workers, nodes, home } = state.snap;
  if (!(i in ranks)) return;
  const took = state.tick.took[i];
  text("chosen", `rank ${ranks[i]} on ${nodes[home[i]]}: ${BINS[state.tick.states[i]]}, worker ${workers[i]}` + (took >= 0 ? `, newest step ${seconds(took / 1000)}` : ""));
}

function move(event) {
  const { cells } = state.layout, here = cells[state.chosen], steps = { ArrowRight: 1, ArrowLeft: -1 };
  if (!here) return;
  let to = state.chosen;
  if (event.key in steps) to += steps[event.key];
  else if (event.key === "Home") to = 0;
  else if (event.key === "End") to = cells.length - 1;
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    const down = event.key === "ArrowDown";
    let best = Infinity;
    cells.forEach(([x, y], i) => { const far = down ? y - here[1] : here[1] - y;
      if (far > 0 && far * 50 + Math.abs(x - here[0]) < best) { best = far * 50 + Math.abs(x - here[0]); to = i; } });
  } else return;
  event.preventDefault();
  state.chosen = Math.max(0, Math.min(cells.length - 1, to));
  drawGrid(); describe();
}

// --- curves -------------------------------------------------------------------------------------------------------

function drawCurve(id, pick, { zero = false, stairs = false } = {}) {
  const [pen, wide] = canvas(id, 130), points = state.points.filter((p) => pick(p) != null), left = 46, low0 = 112;
  if (!points.length) { pen.fillStyle = colours.dim; pen.fillText("nothing yet", 4, 20); return; }
  const from = state.points[0][0], to = Math.max(from + 1, state.points[state.points.length - 1][0]);
  let low = Infinity, high = -Infinity;
  for (const p of points) { low = Math.min(low, pick(p)); high = Math.max(high, pick(p)); }
  if (zero) low = Math.min(0, low);
  if (high === low) high = low + 1;
  const x = (p) => left + (wide - left - 4) * (p[0] - from) / (to - from), y = (v) => low0 - (low0 - 10) * (v - low) / (high - low);
  pen.strokeStyle = colours.line; pen.lineWidth = 1; pen.fillStyle = colours.dim;
  for (const v of [low, high]) { pen.beginPath(); pen.moveTo(left, y(v)); pen.lineTo(wide, y(v)); pen.stroke(); pen.fillText(number(v), 0, y(v) + 4); }
  pen.fillText(clock(from), left, 127); pen.textAlign = "right"; pen.fillText(clock(to), wide, 127); pen.textAlign = "start";
  pen.strokeStyle = colours.curve; pen.lineWidth = 1.6; pen.beginPath();
  points.forEach((p, i) => { if (!i) pen.moveTo(x(p), y(pick(p))); else { if (stairs) pen.lineTo(x(p), y(pick(points[i - 1]))); pen.lineTo(x(p), y(pick(p))); } });
  pen.stroke();
}

function drawTimeline() {
  const [pen, wide] = canvas("timeline", 46), all = state.snap.incidents, to = Math.max(1, state.tick.at);
  pen.fillStyle = colours.line; pen.fillRect(0, 14, wide, 10);
  pen.fillStyle = colours.dim; pen.fillText("0:00", 0, 42); pen.textAlign = "right"; pen.fillText(clock(to), wide, 42); pen.textAlign = "start";
  for (const each of all) {
    let at = each.at;
    each.stages.forEach((took, k) => { pen.fillStyle = colours[state.snap.stage_names[k]]; pen.fillRect(wide * at / to, 9, Math.max(1.5, wide * took / to), 20); at += took; });
  }
  const open = state.tick.incident;
  if (open) { pen.fillStyle = colours.mending; pen.fillRect(wide * open.at / to, 5, Math.max(3, wide * (to - open.at) / to), 28); }
}

// --- words and tables ---------------------------------------------------------------------------------------------

function cellOf(row, words, kind) { const at = row.insertCell(); at.textContent = words; if (kind) at.className = kind; return at; }

function drawIncidents() {
  const body = document.createElement("tbody"), open = state.tick.incident;
  body.id = "incidents";
  for (const each of [...(open ? [open] : []), ...[...state.snap.incidents].reverse()]) {
    const row = body.insertRow(), who = each.ranks.length && !each.cause.startsWith("rank") ? `rank ${each.ranks.join(", ")}: ` : "";
    cellOf(row, each.number); cellOf(row, clock(each.at)); cellOf(row, each.step);
    cellOf(row, who + each.cause + (each.steps_lost ? `; ${each.steps_lost} steps lost` : ""), "what");
    cellOf(row, each.total == null ? "…" : each.rung); cellOf(row, each.total == null ? "is being mended" : seconds(each.total));
    const bar = document.createElement("div");
    bar.className = "bar";
    each.stages.forEach((took, k) => { const part = document.createElement("i"), name = state.snap.stage_names[k];
      part.style.flex = `${1000 * took} 0 0`; part.style.background = colours[name]; part.title = `${name} ${seconds(took)}`; bar.append(part); });
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", each.stages.map((took, k) => `${state.snap.stage_names[k]} ${seconds(took)}`).join(", "));
    cellOf(row, "").append(bar);
  }
  if (!body.rows.length) { const none = body.insertRow().insertCell(); none.colSpan = 7; none.className = "dim"; none.textContent = "none so far"; }
  $("incidents").replaceWith(body);
}

function legend(id, entries) {
  const key = JSON.stringify(entries);
  if ($(id).dataset.key === key) return;
  $(id).dataset.key = key; $(id).replaceChildren();
  for (const [words, colour] of entries) { const box = document.createElement("i"); box.style.background = colour; $(id).append(box, words); }
}

function drawWords() {
  const t = state.tick, counted = t.summed.tokens ?? t.summed.samples, unit = t.summed.tokens != null ? "tokens/s" : t.summed.samples != null ? "samples/s" : "steps/s";
  const is = t.ended != null ? (t.ended === 0 ? "done" : "lost") : t.incident ? "mending" : t.states.includes("t") ? "training" : "starting";
  text("job", state.snap.job || "regrow"); text("status", is === "lost" ? `ended with ${t.ended}` : is); $("status").dataset.is = is;
  document.title = `${state.snap.job}: ${is}`;
  text("step", t.step.toLocaleString("en")); text("world", t.world === t.wanted ? `${t.world}` : `${t.world} of ${t.wanted}`);
  text("speed", t.speed == null ? "–" : number(counted == null ? t.speed : t.speed * counted)); text("speed-unit", unit);
  text("curve-speed-name", unit === "steps/s" ? "Steps a second" : unit === "tokens/s" ? "Tokens a second" : "Samples a second");
  text("loss", t.metrics.loss == null ? "–" : t.metrics.loss.toPrecision(4)); text("clock", clock(t.at));
  text("goodput", t.goodput == null ? "–" : (100 * t.goodput).toFixed(1) + " %"); text("generation", `${t.generation}`); text("standbys", `${t.standbys}`);
  const counts = {};
  for (const letter of t.states) counts[letter] = (counts[letter] || 0) + 1;
  legend("states", Object.entries(BINS).filter(([l]) => counts[l]).map(([l, name]) => [`${name} ${counts[l]}`, colours[name]]));
  const all = Object.values(t.spent).reduce((a, b) => a + b, 0) || 1, parts = $("spent");
  Object.entries(SPENT).forEach(([name, [, colour]], k) => { const part = parts.children[k] || parts.appendChild(document.createElement("i"));
    part.style.width = (100 * t.spent[name] / all) + "%"; part.style.background = `var(${colour})`; });
  legend("spent-words", Object.entries(SPENT).map(([name, [words, colour]]) => [`${words} ${(100 * t.spent[name] / all).toFixed(1)} %`, `var(${colour})`]));
  state.counted = counted == null ? 1 : counted;
}

function drawAll() {
  if (!state.snap) return;
  drawWords(); drawGrid(); describe(); drawTimeline();
  drawCurve("curve-loss", (p) => p[4]); drawCurve("curve-speed", (p) => p[3] == null ? null : p[3] * state.counted, { zero: true });
  drawCurve("curve-world", (p) => p[2], { zero: true, stairs: true });
  state.drawn += 1; document.body.dataset.drawn = state.drawn;
}

// --- what comes in ------------------------------------------------------------------------------------------------

async function snapshot() {
  if (state.asking) return;
  state.asking = true;
  try {
    const answer = await fetch("snapshot");
    if (!answer.ok) return;
    state.snap = await answer.json(); state.tick = state.snap.tick; state.points = state.snap.points; state.layout = { cells: [] };
    legend("stages", state.snap.stage_names.map((name) => [name, `var(--${name})`]));
    drawIncidents(); drawAll();
  } catch { /* the stream reconnects once a server answers again */ } finally { state.asking = false; }
}

function took(tick) {
  if (!state.snap || tick.version !== state.snap.tick.version) { snapshot(); if (!state.snap) return; }
  if (tick.states.length !== state.snap.ranks.length) return;  // a snapshot with the new ranks was requested
  state.tick = tick;
  const last = state.points[state.points.length - 1];
  if (!last || tick.at - last[0] >= state.every) {
    if (state.points.length >= MOST_POINTS) { state.points = state.points.filter((_, i) => i % 2 === 0); state.every *= 2; }
    state.points.push([tick.at, tick.step, tick.world, tick.speed, tick.metrics.loss ?? null]);
  }
  if (!state.waiting) { state.waiting = true; requestAnimationFrame(() => { state.waiting = false; drawAll(); }); }
}

function listen() {
  const source = new EventSource("ticks");
  source.onmessage = (event) => {
    const tick = JSON.parse(event.data);
    took(tick);
    if (tick.ended != null) source.close();  // no tick follows
  };
  source.onerror = () => { if (!state.tick || state.tick.ended == null) { text("status", "no connection"); $("status").dataset.is = ""; } };
}

// --- actions: only with the job's token, which stays in this function and is sent in a header of each request ---

function acting() {
  let token = "";
  const say = (words) => { $("acted").textContent = words; };
  const made = (kind, fields, ...inside) => { const at = Object.assign(document.createElement(kind), fields); at.append(...inside); return at; };

  async function post(path, body) {
    const answer = await fetch(path, { method: "POST", headers: { "Authorization": `Bearer ${token}`, "Content-Type": "application/json" }, body: JSON.stringify(body) });
    let told = {};
    try { told = await answer.json(); } catch { /* no JSON body */ }
    return { ok: answer.ok && told.accepted !== false, told, words: told.error || told.reason || (answer.ok ? "" : `refused (${answer.status})`) };
  }

  function confirmed(what) {  // Escape and Enter both cancel: the first button is the one that changes nothing
    const box = $("sure"), no = made("button", { type: "button", textContent: "Leave it" }), yes = made("button", { type: "button", textContent: what.yes });
    box.replaceChildren(made("p", { id: "sure-what", textContent: what.text }), made("form", {}, no, yes));
    return new Promise((done) => {
      box.onclose = () => done(box.returnValue === "yes");
      no.onclick = () => box.close("no"); yes.onclick = () => box.close("yes");
      box.returnValue = "no"; box.showModal(); no.focus();
    });
  }

  async function act(name, what, body) {
    if (!await confirmed(what)) { say("nothing was done"); return; }
    say(`${what.doing} …`);
    try { const { ok, words } = await post(`act/${name}`, body()); say(ok ? words || `${what.doing}: done` : `not done: ${words}`); }
    catch { say("no connection: whether it was done is not known"); }
  }

  function offer(name, label, field, doing) {
    const form = made("form", {}, made("label", {}, `${label} `, field), made("button", { textContent: `${label} …` }));
    form.onsubmit = (event) => { event.preventDefault(); doing(field.value); };
    form.dataset.act = name;
    return form;
  }

  function show(actions) {
    const all = {
      drain: () => { const field = made("select", {});
        const fill = () => { const was = field.value; field.replaceChildren(...state.snap.nodes.map((node) => made("option", { textContent: node }))); if (was) field.value = was; };
        fill(); field.onfocus = fill;
        return offer("drain", "Drain node", field, (node) => act("drain", { text: `Give ${node} back? Its ranks leave it, then its agent ends.`, yes: `Drain ${node}`, doing: `draining ${node}` },
          () => ({ node, grace: 30, reason: "the live page" }))); },
      scale: () => { const field = made("input", { type: "number", min: 1, required: true, value: state.tick.wanted });
        return offer("scale", "Scale to ranks", field, (text) => { const ranks = Number(text);
          act("scale", { text: `Have ${ranks} ranks in the world, instead of ${state.tick.world}?`, yes: `Scale to ${ranks}`, doing: `scaling to ${ranks} ranks` }, () => ({ ranks, reason: "the live page" })); }); },
      kill: () => { const field = made("input", { type: "number", min: 0, required: true, value: state.snap.ranks[state.chosen] ?? 0 });
        $("grid").addEventListener("keydown", () => { field.value = state.snap.ranks[state.chosen] ?? field.value; });
        return offer("kill", "Kill rank", field, (text) => { const rank = Number(text);
          act("kill", { text: `End the worker of rank ${rank} by SIGKILL? The job mends it.`, yes: `Kill rank ${rank}`, doing: `killing rank ${rank}` },
            () => ({ fault: `asked-${crypto.getRandomValues(new Uint32Array(1))[0].toString(16)}`, rank })); }); },
    };
    $("acts").replaceChildren(...actions.filter((name) => name in all).map((name) => all[name]()));
    $("unlock").hidden = true;
    const first = $("acts").querySelector("select, input");
    if (first) first.focus();
  }

  $("unlock").onsubmit = async (event) => {
    event.preventDefault();
    token = $("token").value.trim(); $("token").value = "";
    if (!token || !state.snap) return;
    try {
      const { ok, told, words } = await post("act", {});
      if (ok) { say(""); show(told.actions); } else { token = ""; say(words); }
    } catch { token = ""; say("no connection"); }
  };
}

readColours();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); if (state.snap) { drawIncidents(); drawAll(); } });
addEventListener("resize", () => drawAll());
$("grid").addEventListener("keydown", move);
for (const kind of ["focus", "blur"]) $("grid").addEventListener(kind, () => drawAll());
$("grid").addEventListener("mousemove", (event) => {
  const { cells = [], size } = state.layout, found = cells.findIndex(([x, y]) => event.offsetX >= x && event.offsetX < x + size && event.offsetY >= y && event.offsetY < y + size);
  if (found >= 0) { state.chosen = found; state.pointed = true; drawGrid(); describe(); }
});
$("grid").addEventListener("mouseleave", () => { state.pointed = false; });
acting(); snapshot(); listen();
