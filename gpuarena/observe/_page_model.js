// First of three parts of one script (page.py joins them): texts, and a log as columns of numbers.
// The page is a map: addresses upwards, time to the right. Everything comes from the JSON of the element "data"; texts of the
// log reach the page by textContent and fillText only, so that none of them is ever read as markup.

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const plot = $("plot"), base = $("map");
// Okabe and Ito's hues, and an olive for their yellow, which white would swallow. Labels beyond these get a pattern.
const HUES = ["#e09a00", "#3f9fdb", "#009e73", "#0072b2", "#d55e00", "#cc79a7", "#999933"];
const MOST_ROWS = 100, MOST_LABELS = 60, MOST_LANES = 5;  // of the table, the legend, the scopes' bands
const HATCH = 9;
const LEFT = 78, RIGHT = 8, LANE = 14, BELOW = 36;        // margins of the plot, in CSS pixels

let m;                             // the arena shown, as `decode` makes it
let at, unit = "events";           // where each event stands on the horizontal axis: indices or nanoseconds
let x0, x1, y0, y1;                // what is in view
let cursor = 0, hover = null, selected = -1, pinned = false;
let aim = -1;                      // the address of what was selected last, where the selection looks for the next
let found = null, foundList = [], foundAt = -1, foundLabel = -2;  // the search, or the label chosen in the legend
let box = { left: LEFT, top: 4, width: 1, height: 1, scale: 1 }, ids = new Int32Array(1), colours;

// -- texts ------------------------------------------------------------------------------------------------------

// Characters that show nothing, or turn the text around: controls, marks of direction, halves of a pair.
const UNSEEN = new RegExp(
  "[\\u0000-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb]" +
  "|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]", "g");

function visible(text, limit = 160) {
  const cut = text.length > limit ? text.slice(0, limit).replace(/[\ud800-\udbff]$/, "") : text;
  const shown = cut.replace(UNSEEN, (c) => `\u2039U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u203a`);
  return text.length > limit ? `${shown}\u2026 (${grouped(text.length)} characters)` : shown;
}
function grouped(n) { return String(n).replace(/\B(?=(\d{3})+$)/g, "\u202f"); }
function short(nbytes) {
  let power = 0, value = Number(nbytes);
  while (Math.abs(value) >= 1024 && power < 6) { value /= 1024; power++; }
  return power ? `${value.toFixed(2)} ${["", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"][power]}` : `${value} B`;
}
const exact = (n) => `${grouped(n)} bytes${Number(n) >= 1024 ? ` (${short(n)})` : ""}`;
const plural = (n, one) => `${grouped(n)} ${one}${n === 1 ? "" : "s"}`;
const ms = (ns) => `${(ns / 1e6).toFixed(ns < 1e9 ? 3 : 1)} ms`;
const spoken = (label) => label < 0 ? "no label" : m.strings[label] === "" ? "empty label" : visible(m.strings[label]);

function make(tag, content, className) {
  const node = document.createElement(tag);
  if (content instanceof Node) node.append(content);
  else if (content !== undefined) node.textContent = content;
  if (className) node.className = className;
  return node;
}
// A label, told from "no label" and from no text by more than its words.
function named(label, limit) {
  return label < 0 || m.strings[label] === "" ? make("span", spoken(label), "none")
    : make("bdi", visible(m.strings[label], limit));
}
// The end of a path says more than its beginning.
const tail = (text, limit) => text.length > limit ? `\u2026${visible(text.slice(-limit))}` : visible(text);

// -- one arena --------------------------------------------------------------------------------------------------

function decode(raw) {
  // A log without events is one moment.
  const n = Math.max(1, raw.times.length), count = raw.start.length, one = { ...raw, n, count, n_events: raw.times.length };
  const sums = (list) => { let sum = 0; return list.map((step) => (sum += step)); };
  one.times = raw.times.length ? sums(raw.times) : [0];
  one.start = Int32Array.from(sums(raw.start));
  one.stop = Int32Array.from(raw.life, (life, i) => life < 0 ? n : one.start[i] + life);
  for (const key of ["offset", "nbytes", "padding"]) one[key] = Float64Array.from(raw[key]);
  const last = one.times[n - 1];
  one.axes = {
    events: Float64Array.from({ length: n + 1 }, (_, i) => i),
    ms: Float64Array.from([...one.times, last + Math.max(last / 100, 1)]),  // what is live at the end is seen to go on
  };
  const numbers = new Map();  // labels by the order of their first regions
  one.kind = Int32Array.from(raw.label, (label) => {
    if (!numbers.has(label)) numbers.set(label, numbers.size);
    return numbers.get(label);
  });
  one.labels = [...numbers.keys()];
  let taken = new Set(), round = 0;
  one.hues = one.labels.map((label) => {  // by the text, so that a label keeps its colour from log to log if it can
    if (label < 0) return [-1, 0];
    if (taken.size === HUES.length) { taken = new Set(); round++; }
    let hue = 0;
    for (const c of one.strings[label].slice(0, 400)) hue = (hue * 31 + c.codePointAt(0)) % 1000003;
    for (hue %= HUES.length; taken.has(hue); hue = (hue + 1) % HUES.length);
    taken.add(hue);
    return [hue, round % 4];
  });
  // What each label held at its highest: one pass over the events, with the regions that end at each as a list.
  const head = new Int32Array(n + 1).fill(-1), rest = new Int32Array(count);
  for (let i = 0; i < count; i++) { rest[i] = head[one.stop[i]]; head[one.stop[i]] = i; }
  const now = new Float64Array(one.labels.length);
  one.highest = new Float64Array(one.labels.length);
  for (let event = -1, i = 0; event < n; event++) {
    if (event >= 0) for (let j = head[event]; j >= 0; j = rest[j]) now[one.kind[j]] -= one.nbytes[j];
    for (; i < count && one.start[i] === event; i++) {
      const k = one.kind[i];
      now[k] += one.nbytes[i];
      one.highest[k] = Math.max(one.highest[k], now[k]);
    }
  }
  one.order = one.labels.map((_, k) => k).sort((a, b) => one.highest[b] - one.highest[a] || a - b);
  one.peak = one.peaks.length ? one.peaks[one.peaks.length - 1][1] : 0;
  // Bands of scopes: one inside another lies below it.
  const open = [];
  one.lanes = 0;
  one.scopes.sort((a, b) => a.start - b.start || (b.stop ?? n) - (a.stop ?? n));
  for (const scope of one.scopes) {
    scope.until = scope.stop ?? n;
    while (open.length && open[open.length - 1] <= scope.start) open.pop();
    scope.depth = open.length;
    open.push(scope.until);
    one.lanes = Math.min(MOST_LANES, Math.max(one.lanes, open.length));
  }
  one.marks = [...one.rollbacks.map((mark) => ({ ...mark, failed: false })), ...one.failures.map((mark) => ({ ...mark, failed: true }))]
    .sort((a, b) => a.index - b.index);
  one.top = one.peak;  // the highest address of the used part
  for (let i = 0; i < count; i++) one.top = Math.max(one.top, one.offset[i] + one.nbytes[i] + (one.high[i] ? one.padding[i] : 0));
  return one;
}

function show(index) {
  m = decode(data.maps[index]);
  if (!m.times.some((time) => time > 0)) unit = "events";
  $("by-time").disabled = unit === "events" && !m.times.some((time) => time > 0);
  $("by-event").checked = unit === "events";
  $("failure").hidden = !m.failures.length;
  at = m.axes[unit];
  [x0, x1] = [0, at[m.n]];
  // The cursor begins where most was taken, which is what people look for.
  cursor = m.peaks.length ? Math.max(0, m.peaks[m.peaks.length - 1][0]) : 0;
  [hover, selected, aim, pinned] = [null, -1, -1, false];
  $("facts").replaceChildren(
    [m.name === null ? "" : `arena ${visible(m.name, 60)}`, visible(m.device, 60), exact(m.capacity), plural(m.n_events, "event"),
      plural(m.count, "region"), `peak ${short(m.peak)}`, ""].filter((text, i) => i || text).join(" \u00b7 "),
    make("span", plural(m.failures.length, "failure"), m.failures.length ? "bad" : ""));
  paint();
  fit(true);
  find();
}

// The whole arena, or what was ever used of it; the latter is the same where both ends were.
function fit(used) {
  [y0, y1] = [0, Math.max(1, used ? Math.min(m.capacity, m.top * 1.06) : m.capacity)];
  [x0, x1] = [0, at[m.n]];
  redraw();
}

const isLive = (i, event) => m.start[i] <= event && event < m.stop[i];
function liveAt(event) {  // by address
  const live = [];
  for (let i = 0; i < m.count; i++) if (isLive(i, event)) live.push(i);
  return live.sort((a, b) => m.offset[a] - m.offset[b] || a - b);
}
function eventAt(x) {  // the last event that is not after x
  let low = 0, high = m.n;
  while (low < high) { const middle = (low + high) >> 1; if (at[middle] <= x) low = middle + 1; else high = middle; }
  return Math.max(0, low - 1);
}
