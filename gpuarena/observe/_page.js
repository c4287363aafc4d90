// Last of three parts of one script: panels, searching, the view, pointer and keys, and the start.

// -- panels -----------------------------------------------------------------------------------------------------

function list(node, rows) {
  node.replaceChildren(...rows.flatMap(([term, value]) => [make("dt", term), make("dd", value, term === "label" ? "label" : "")]));
}
const when = (event) => event < 0 ? "before the log" : `event ${grouped(event)} (${ms(m.times[event])})`;
function lifetime(i) {
  const first = Math.max(0, m.start[i]), last = Math.min(m.stop[i], m.n - 1);
  const until = m.stop[i] >= m.n ? "the end, live" : when(m.stop[i]);
  const long = `${plural(m.stop[i] - first, "event")}, ${ms(m.times[last] - m.times[first])}`;
  return `${when(m.start[i])} to ${until}: ${long}`;
}
const side = (one) => one ? "high end" : "low end";
const recorded = (text) => visible(m.strings[text], 300) || "not recorded";
function details(i, limit) {
  return [
    ["label", named(m.label[i], limit)], ["shape", visible(m.strings[m.shape[i]], 200)],
    ["dtype", visible(m.strings[m.dtype[i]]) || "unknown"], ["size", exact(m.nbytes[i])],
    ["offset", `${grouped(m.offset[i])}, ${side(m.high[i])}`], ["end", grouped(m.offset[i] + m.nbytes[i])],
    ["padding", exact(m.padding[i])], ["call site", recorded(m.site[i])], ["live", lifetime(i)],
  ];
}
function markDetails(mark) {
  if (mark.failed) {
    return [["failure", `a request that did not fit, ${side(mark.high)}`], ["label", named(mark.label)],
      ["asked for", exact(mark.nbytes)], ["call site", recorded(mark.site)], ["at", when(mark.index)]];
  }
  return [["rollback", `${side(mark.high)}, ${plural(mark.n_regions, "region")} dropped`],
    ["pointer", `${grouped(mark.old_top)} to ${grouped(mark.new_top)}`], ["cause", recorded(mark.cause)],
    ["at", when(mark.index)]];
}
function scopeDetails(scope) {
  return [["scope", named(scope.label)], ["call site", recorded(scope.site)],
    ["pointer", `${grouped(scope.top)}, ${side(scope.high)}`],
    ["open", `${when(scope.start)} to ${scope.stop === null ? "the end" : when(scope.stop)}`]];
}
function happened(event) {
  const mark = m.marks.find((one) => one.index === event);
  if (mark) return mark.failed ? `failure: ${exact(mark.nbytes)} asked for` : `rollback, ${plural(mark.n_regions, "region")} dropped`;
  const first = m.start.indexOf(event);
  return first < 0 ? "" : `allocated ${spoken(m.label[first])}`;
}

let tableTimer = 0, pointing = false;
function panels() {
  const held = new Float64Array(m.labels.length);
  let used = 0, padding = 0, count = 0;
  for (let i = 0; i < m.count; i++) {
    if (!isLive(i, cursor)) continue;
    held[m.kind[i]] += m.nbytes[i];
    used += m.nbytes[i]; padding += m.padding[i]; count++;
  }
  const what = happened(cursor);
  list($("now"), [["event", `${grouped(cursor)} of ${grouped(m.n)}${what ? `: ${what}` : ""}`], ["time", ms(m.times[cursor])], ["regions", grouped(count)],
    ["in use", exact(used)], ["padding", exact(padding)], ["free", exact(m.capacity - used - padding)], ["high-water", exact(m.peak)]]);
  const cells = $("legend").querySelectorAll("td.now");
  m.order.slice(0, MOST_LABELS).forEach((k, row) => { 
    const text = held[k] ? short(held[k]) : "\u2013";
    if (cells[row].textContent !== text) cells[row].textContent = text;
  });
  if (selected >= 0) list($("region"), details(selected, 20000));
  else $("region").replaceChildren(make("span", "Click a region, or choose one with the arrow keys and Enter, to keep it here.", "hint"));
  $("region-head").textContent = selected < 0 ? "Region" : pinned ? "Region, pinned" : "Region";
  clearTimeout(tableTimer);  // it is the slowest part, and nobody reads it while the pointer moves
  $("live-regions").setAttribute("aria-busy", "true");
  if (pointing) tableTimer = setTimeout(table, 120);
  else table();
}
function table() {
  const live = liveAt(cursor).reverse();
  const more = live.length > MOST_ROWS ? `, of which the ${MOST_ROWS} with the highest addresses are listed` : "";
  $("table-head").textContent = `Regions at the cursor: ${grouped(live.length)}${more}`;
  $("rows").replaceChildren(...live.slice(0, MOST_ROWS).map((i) => {
    const row = make("tr"), button = make("button", named(m.label[i], 60));
    button.type = "button";
    button.tabIndex = -1;
    button.dataset.region = i;
    row.append(make("td", button));
    for (const value of [m.nbytes[i], m.offset[i], m.offset[i] + m.nbytes[i], m.padding[i]]) row.append(make("td", grouped(value), "number"));
    const span = `${m.start[i] < 0 ? "before" : grouped(m.start[i])}\u2013${m.stop[i] >= m.n ? "end" : grouped(m.stop[i])}`;
    const shape = visible(m.strings[m.shape[i]], 80), dtype = visible(m.strings[m.dtype[i]], 40);
    for (const text of [shape, dtype, span, tail(m.strings[m.site[i]], 48)]) row.append(make("td", text));
    if (i === selected) row.setAttribute("aria-current", "true");
    return row;
  }));
  firstStop($("rows"));
  $("live-regions").setAttribute("aria-busy", "false");
}

const SWATCHES = [  // of the patterns of `inPattern`
  "", "repeating-linear-gradient(var(--free) 0 1px, transparent 1px 4px)",
  "repeating-linear-gradient(90deg, var(--free) 0 1px, transparent 1px 4px)",
  "radial-gradient(var(--free) 1px, transparent 1.2px) 0 0 / 4px 4px",
];
function legend() {
  const rows = m.order.slice(0, MOST_LABELS).map((k) => {
    const swatch = make("span", "", "swatch"), [hue, pattern] = m.hues[k];
    swatch.style.background = `${SWATCHES[pattern]} ${hue < 0 ? colours.plain : HUES[hue]}`;
    const row = make("tr"), button = make("button", swatch);
    button.append(named(m.labels[k], 60));
    button.type = "button";
    button.tabIndex = -1;
    button.dataset.label = m.labels[k];
    button.setAttribute("aria-pressed", String(foundLabel === m.labels[k]));
    row.append(make("td", button), make("td", "", "number now"), make("td", short(m.highest[k]), "number"));
    return row;
  });
  if (m.order.length > MOST_LABELS) {
    const row = make("tr"), cell = make("td", `and ${plural(m.order.length - MOST_LABELS, "label")} with less`, "none");
    cell.colSpan = 3;
    row.append(cell);
    rows.push(row);
  }
  $("legend").replaceChildren(...rows);
  firstStop($("legend"));
  $("legend-head").textContent = `Labels: ${grouped(m.order.length)}`;
}
// A list of buttons is one stop of the Tab key; arrows go on from there.
function firstStop(body) { const first = body.querySelector("button"); if (first) first.tabIndex = 0; }
for (const body of [$("legend"), $("rows")]) {
  body.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key], all = [...body.querySelectorAll("button")];
    const next = step && all[all.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    document.activeElement.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}
$("rows").addEventListener("click", (event) => {
  const row = event.target.closest("tr");
  if (row) { select(Number(row.querySelector("button").dataset.region), true); reveal(selected); }
});
$("legend").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const label = Number(button.dataset.label), again = foundLabel === label;
  $("search").value = "";
  find(again ? -2 : label);
  $("legend").querySelector(`[data-label="${label}"]`).focus();
});

// -- choosing and searching -------------------------------------------------------------------------------------

function say(text) { $("live").textContent = text; }
const placed = (i) => `${exact(m.nbytes[i])} at offset ${grouped(m.offset[i])}`;
function select(i, pin) {
  selected = i;
  aim = i < 0 ? -1 : m.offset[i];
  pinned = pin && i >= 0;
  if (i >= 0) {
    const kind = `${visible(m.strings[m.dtype[i]])} ${visible(m.strings[m.shape[i]], 80)}`;
    say(`${spoken(m.label[i])}, ${kind}, ${placed(i)}, ${lifetime(i)}${pinned ? ", pinned" : ""}`);
    if (!isLive(i, cursor)) setCursor(Math.max(0, m.start[i]));
  }
  moved();
}
function setCursor(event) {
  cursor = Math.max(0, Math.min(m.n - 1, event));
  const span = x1 - x0;
  if (at[cursor] < x0 || at[cursor] > x1) look(at[cursor] - span / 2, span, y0, y1 - y0);
  else moved();
}
// The selection stays at its address when the cursor leaves its region's life.
function walk(event) {
  setCursor(event);
  const what = happened(cursor);
  let text = `event ${grouped(cursor)}${what ? `, ${what}` : ""}`;
  if (aim >= 0 && (selected < 0 || !isLive(selected, cursor))) {
    pinned = false;
    selected = liveAt(cursor).find((i) => m.offset[i] <= aim && aim < m.offset[i] + m.nbytes[i]) ?? -1;
    text += selected < 0 ? "; nothing at this address" : `; ${spoken(m.label[selected])}, ${placed(selected)}`;
    moved();
  }
  say(text);
}
function climb(step) {
  const live = liveAt(cursor);
  if (!live.length) { say("no region is live here"); return; }
  const place = live.indexOf(selected);
  const next = place < 0 ? (step > 0 ? 0 : live.length - 1) : Math.min(live.length - 1, Math.max(0, place + step));
  select(live[next], false);
  const i = live[next];
  if (m.offset[i] + m.nbytes[i] < y0 || m.offset[i] > y1) look(x0, x1 - x0, m.offset[i] - (y1 - y0) / 2, y1 - y0);
}
function reveal(i) {  // bring a region into view, large enough to see
  const from = at[Math.max(0, m.start[i])], long = at[m.stop[i]] - from, high = m.nbytes[i];
  let wide = x1 - x0, left = x0, tall = y1 - y0, low = y0;
  if (long / wide * box.width < 8) wide = Math.max(long * 24, smallest()[0]);
  if (wide !== x1 - x0 || from + long < x0 || from > x1) left = from + long / 2 - wide / 2;
  if (high / tall * box.height < 4) tall = Math.max(high * 40, smallest()[1]);
  if (tall !== y1 - y0 || m.offset[i] + high < y0 || m.offset[i] > y1) low = m.offset[i] + high / 2 - tall / 2;
  look(left, wide, low, tall);
}

function find(label = -2) {
  const needle = $("search").value.toLowerCase();
  foundLabel = label;
  foundAt = -1;
  if (label > -2) found = Uint8Array.from(m.label, (one) => one === label);
  else if (needle === "") found = null;
  else {
    const hit = m.strings.map((text) => text.toLowerCase().includes(needle));
    found = Uint8Array.from(m.label, (one, i) => (one >= 0 && hit[one]) || hit[m.site[i]]);
  }
  foundList = [];
  if (found !== null) for (let i = 0; i < m.count; i++) if (found[i]) foundList.push(i);
  count();
  legend();
  redraw();
}
function count() {
  const place = foundAt >= 0 ? `${grouped(foundAt + 1)} of ` : "";
  const of = foundLabel > -2 ? ` of ${spoken(foundLabel).slice(0, 40)}` : "";
  const text = foundList.length ? `${place}${plural(foundList.length, "region")}${of}` : "no region matches";
  $("count").textContent = found === null ? "" : text;
  $("previous").disabled = $("next").disabled = !foundList.length;
}
function step(by) {  // to the next match; without a search to the next region as they were made
  const all = found === null ? null : foundList, size = all ? all.length : m.count;
  if (!size) return;
  const from = all ? foundAt : selected;
  const next = from < 0 ? (by > 0 ? 0 : size - 1) : (from + by + size) % size;
  const i = all ? all[next] : next;
  if (all) { foundAt = next; count(); }
  select(i, true);
  setCursor(Math.max(0, m.start[i]));
  reveal(i);
}
function jump(failed) {
  const marks = m.marks.filter((mark) => mark.failed === failed);
  const mark = marks.find((one) => one.index > cursor) ?? marks[0];
  if (!mark) { say(failed ? "no request failed" : "nothing was rolled back"); return; }
  walk(mark.index);
}
function clear() {
  if (aim >= 0) { select(-1, false); say("selection cleared"); }
  else if ($("search").value || foundLabel > -2) { $("search").value = ""; find(); say("search cleared"); }
}

// -- the view ---------------------------------------------------------------------------------------------------

const smallest = () => [unit === "events" ? 4 : Math.max(at[m.n] * 1e-7, 10), Math.min(256, m.capacity)];
function look(left, wide, low, tall) {
  const [narrow, flat] = smallest(), long = at[m.n], high = Math.max(1, m.capacity);
  wide = Math.min(long, Math.max(narrow, wide));
  tall = Math.min(high, Math.max(flat, tall));
  x0 = Math.max(0, Math.min(left, long - wide)); x1 = x0 + wide;
  y0 = Math.max(0, Math.min(low, high - tall)); y1 = y0 + tall;
  redraw();
}
function zoom(factor, x, bytesFactor = 1, y = y0) {  // about a point that stays where it is
  const wide = (x1 - x0) * factor, tall = (y1 - y0) * bytesFactor;
  look(x - (x - x0) * factor, wide, y - (y - y0) * bytesFactor, tall);
}
const zoomAtCursor = (factor) => zoom(factor, at[cursor] < x0 || at[cursor] > x1 ? (x0 + x1) / 2 : at[cursor]);
const zoomBytes = (factor) => zoom(1, x0, factor, selected >= 0 ? m.offset[selected] : y0);
const pan = (right, up) => look(x0 + right * (x1 - x0), x1 - x0, y0 + up * (y1 - y0), y1 - y0);

let asked = 0;
function later(what) {  // at most one drawing a frame: 2 is everything, 1 what moves with the pointer
  if (!asked) requestAnimationFrame(() => {
    const all = asked === 2;
    asked = 0;
    if (all) draw(); else overlay();
    panels();
    pointing = false;
  });
  asked = Math.max(asked, what);
}
const redraw = () => later(2), moved = () => later(1);

// -- pointer and keys -------------------------------------------------------------------------------------------

function inPlot(event) {
  const rect = plot.getBoundingClientRect();
  return { x: event.clientX - rect.left - plot.clientLeft, y: event.clientY - rect.top - plot.clientTop };
}
function pick({ x, y }) {  // what is there
  const inside = x >= box.left && x < box.left + box.width;
  const time = x0 + (x - box.left) / box.width * (x1 - x0), nbytes = y1 - (y - box.top) / box.height * (y1 - y0);
  const hit = { x, y, time, nbytes, region: -1, scope: null, mark: null };
  if (!inside) return hit;
  if (y < box.top) {
    const lane = Math.floor((y - 2) / LANE), now = eventAt(hit.time);
    hit.scope = m.scopes.find((scope) => scope.depth === lane && scope.start <= now && now < scope.until) ?? null;
  } else if (y < box.top + box.height) {
    const column = Math.floor((x - box.left) * box.scale), row = Math.floor((y - box.top) * box.scale);
    hit.region = ids[row * ids.W + Math.min(column, ids.W - 1)] ?? -1;
  } else {
    let near = 6;
    for (const mark of m.marks) {
      const distance = Math.abs(px(at[mark.index]) - x);
      if (distance < near || (distance === near && mark.failed)) { near = distance; hit.mark = mark; }
    }
  }
  return hit;
}
function tip() {
  const rows = hover === null ? null : hover.region >= 0 ? details(hover.region, 160)
    : hover.mark ? markDetails(hover.mark) : hover.scope ? scopeDetails(hover.scope) : null;
  $("tip").hidden = !rows;
  if (!rows) return;
  const body = make("dl");
  list(body, rows);
  $("tip").replaceChildren(body);
  const width = $("tip").offsetWidth, height = $("tip").offsetHeight;  // beside the pointer, inside the plot
  const x = hover.x + 14 + width > plot.clientWidth ? Math.max(0, hover.x - 14 - width) : hover.x + 14;
  const y = Math.max(0, Math.min(hover.y + 14, plot.clientHeight - height - 2));
  $("tip").style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
}
let grip = null;
plot.addEventListener("pointermove", (event) => {
  if (grip) {
    const dx = event.clientX - grip.x, dy = event.clientY - grip.y;
    if (Math.abs(dx) + Math.abs(dy) > 3) grip.dragged = true;
    if (grip.dragged) {
      $("tip").hidden = pointing = true;
      look(grip.x0 - dx / box.width * (x1 - x0), x1 - x0, grip.y0 + dy / box.height * (y1 - y0), y1 - y0);
    }
    return;
  }
  hover = pick(inPlot(event));
  if (!pinned && hover.x >= box.left) cursor = Math.min(m.n - 1, eventAt(hover.time));
  pointing = true;
  tip();
  moved();
});
plot.addEventListener("pointerleave", () => { hover = null; tip(); moved(); });
plot.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  plot.setPointerCapture(event.pointerId);
  grip = { x: event.clientX, y: event.clientY, x0, y0, dragged: false };
});
plot.addEventListener("pointercancel", () => { grip = null; });
plot.addEventListener("pointerup", (event) => {
  const clicked = grip && !grip.dragged;
  grip = null;
  if (!clicked) return;
  hover = pick(inPlot(event));
  cursor = Math.min(m.n - 1, eventAt(hover.time));
  select(hover.region, true);
});
plot.addEventListener("wheel", (event) => {
  event.preventDefault();
  const hit = pick(inPlot(event)), amount = event.deltaY || (event.shiftKey ? event.deltaX : 0), factor = 1.0018 ** amount;
  if (event.shiftKey) zoom(1, hit.time, factor, hit.nbytes);
  else if (event.ctrlKey) zoom(factor, hit.time, factor, hit.nbytes);
  else if (event.deltaY) zoom(factor, hit.time);
  else pan(event.deltaX / box.width, 0);
}, { passive: false });

const KEYS = {
  ArrowLeft: () => walk(cursor - 1), ArrowRight: () => walk(cursor + 1), ArrowUp: () => climb(1), ArrowDown: () => climb(-1),
  "Shift+ArrowLeft": () => pan(-.1, 0), "Shift+ArrowRight": () => pan(.1, 0), "Shift+ArrowUp": () => pan(0, .1), "Shift+ArrowDown": () => pan(0, -.1),
  PageUp: () => walk(cursor - tenth()), PageDown: () => walk(cursor + tenth()), Home: () => walk(0), End: () => walk(m.n - 1),
  "+": () => zoomAtCursor(.5), "=": () => zoomAtCursor(.5), "-": () => zoomAtCursor(2), "]": () => zoomBytes(.5), "[": () => zoomBytes(2),
  0: () => fit(true), n: () => step(1), p: () => step(-1), f: () => jump(true), r: () => jump(false),
  Enter: () => { if (selected >= 0) select(selected, !pinned); },
};
const tenth = () => Math.max(1, Math.round((eventAt(x1) - eventAt(x0)) / 10));
plot.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const act = KEYS[(event.shiftKey && event.key.startsWith("Arrow") ? "Shift+" : "") + event.key];
  if (act) { event.preventDefault(); hover = null; tip(); act(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target !== $("search")) { event.preventDefault(); $("search").focus(); $("search").select(); }
  if (event.key === "Escape") {
    if (event.target !== $("search") || !$("search").value) { clear(); return; }
    event.preventDefault();
    $("search").value = "";
    find();
    say("search cleared");
  }
});
$("search").addEventListener("input", () => find());
$("search").addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); step(event.shiftKey ? -1 : 1); } });
$("next").addEventListener("click", () => step(1));
$("previous").addEventListener("click", () => step(-1));
$("zoom-in").addEventListener("click", () => zoomAtCursor(.5));
$("zoom-out").addEventListener("click", () => zoomAtCursor(2));
$("used").addEventListener("click", () => fit(true));
$("whole").addEventListener("click", () => fit(false));
$("failure").addEventListener("click", () => jump(true));
for (const [id, name] of [["by-event", "events"], ["by-time", "ms"]]) {
  $(id).addEventListener("change", () => {
    const [first, last] = [eventAt(x0), Math.min(m.n, eventAt(x1) + 1)];  // the same events stay in view
    unit = name;
    at = m.axes[unit];
    look(at[first], at[last] - at[first], y0, y1 - y0);
  });
}

// -- theme and start --------------------------------------------------------------------------------------------

const prefersDark = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
function themed() {
  $("theme").textContent = isDark() ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", isDark() ? "Switch to light colours" : "Switch to dark colours");
  paint();
  legend();
  redraw();
}
$("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; themed(); });
prefersDark.addEventListener("change", themed);

$("title").textContent = document.title = visible(data.title, 200);
if (data.maps.length > 1) {
  for (const [i, one] of data.maps.entries()) {
    const option = make("option", visible(one.name ?? `arena ${i}`, 60));
    option.value = i;
    $("which").append(option);
  }
  $("arenas").hidden = false;
  $("which").addEventListener("change", () => show(Number($("which").value)));
}
show(0);
themed();
new ResizeObserver(redraw).observe(plot);
