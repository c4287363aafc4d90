// Second of three parts of one script: the map, drawn on a canvas, and the frames on top of it.

// -- drawing ----------------------------------------------------------------------------------------------------

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const pack = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;
const mix = (a, b, share) => a.map((value, i) => Math.round(value * share + b[i] * (1 - share)));

function paint() {  // the theme's colours, as pixels
  const names = ["paper", "ink", "faint", "line", "free", "padding", "plain", "focus", "water", "fail", "back", "band"];
  colours = Object.fromEntries(names.map((name) => [name, css(`--${name}`)]));
  const free = parts(colours.free);
  const shades = [colours.plain, ...HUES].map(parts).map((hue) => ({
    fill: pack(hue), second: pack(mix(hue, free, .55)), dim: pack(mix(hue, free, .16)),
    dark: .299 * hue[0] + .587 * hue[1] + .114 * hue[2] < 128,
  }));
  colours.of = m.hues.map(([hue, pattern]) => ({ ...shades[hue + 1], pattern }));
  const grey = parts(colours.padding), dim = pack(mix(grey, free, .3));
  colours.free = pack(free);
  colours.hatch = { fill: pack(mix(grey, free, .35)), second: pack(grey), dim, pattern: HATCH };
}
// Stripes, columns and dots tell labels with the same hue apart; padding is hatched.
const inPattern = (pattern, x, y) => pattern === 1 ? y % 4 === 0 : pattern === 2 ? x % 4 === 0
  : pattern === HATCH ? (x + y) % 5 === 0 : (x % 4 === 0 && y % 4 === 0) || (x % 4 === 2 && y % 4 === 2);

function draw() {
  const scale = window.devicePixelRatio || 1, width = plot.clientWidth, height = plot.clientHeight;
  base.width = Math.round(width * scale);
  base.height = Math.round(height * scale);
  const top = 4 + m.lanes * LANE;
  box = { left: LEFT, top, width: Math.max(1, width - LEFT - RIGHT), height: Math.max(1, height - top - BELOW), scale };
  const ctx = base.getContext("2d");
  raster(ctx);
  ctx.setTransform(scale, 0, 0, scale, 0, 0);
  ctx.font = "11px system-ui, 'Liberation Sans', sans-serif";
  ctx.textBaseline = "middle";
  drawTexts(ctx);
  drawAxes(ctx);
  drawScopes(ctx);
  drawMarks(ctx);
  drawWater(ctx);
  if (hover !== null) { hover = pick(hover); tip(); }  // the pointer is over something else now
  overlay();
}
const px = (x) => box.left + (x - x0) / (x1 - x0) * box.width;
const py = (y) => box.top + box.height - (y - y0) / (y1 - y0) * box.height;

// Regions go into a buffer of pixels, at least one each, and their numbers into another, by which the pointer finds
// them. So the work is bounded by the pixels and the regions in view, and what is smaller than a pixel shares one.
function raster(ctx) {
  const W = Math.max(1, Math.round(box.width * box.scale)), H = Math.max(1, Math.round(box.height * box.scale));
  const image = ctx.createImageData(W, H), pixels = new Uint32Array(image.data.buffer);
  pixels.fill(colours.free);
  ids = new Int32Array(W * H).fill(-1);
  ids.W = W;
  const sx = W / (x1 - x0), sy = H / (y1 - y0);
  const block = (left, right, low, high, id, { fill, second, dim, pattern }) => {
    let upper = Math.max(0, Math.floor(H - (high - y0) * sy)), lower = Math.min(H, Math.floor(H - (low - y0) * sy));
    if (lower <= upper) lower = Math.min(H, upper + 1);
    const inner = right - left > 3 ? right - 1 : right;      // a gap to the neighbour, where there is room
    const isDim = found !== null && !found[id], first = isDim ? dim : fill, other = isDim ? dim : second;
    const gap = lower - upper > 3 ? upper + 1 : upper;
    for (let y = upper, row = y * W; y < lower; y++, row += W) {
      if (right - left < 16) for (let x = row + left; x < row + right; x++) ids[x] = id;  // calls would cost more
      else ids.fill(id, row + left, row + right);
      if (y < gap) continue;
      if (pattern !== 0) for (let x = left; x < inner; x++) pixels[row + x] = inPattern(pattern, x, y) ? other : first;
      else if (inner - left < 16) for (let x = row + left; x < row + inner; x++) pixels[x] = first;
      else pixels.fill(first, row + left, row + inner);
    }
  };
  for (let i = 0; i < m.count; i++) {
    const from = at[Math.max(0, m.start[i])], to = at[m.stop[i]], offset = m.offset[i], end = offset + m.nbytes[i];
    const low = m.high[i] ? offset : offset - m.padding[i], high = m.high[i] ? end + m.padding[i] : end;
    if (from > x1 || to < x0 || low > y1 || high < y0) continue;
    const left = Math.min(W - 1, Math.max(0, Math.floor((from - x0) * sx)));
    const right = Math.max(left + 1, Math.min(W, Math.floor((to - x0) * sx)));
    if (m.padding[i] && m.padding[i] * sy >= .5) {
      block(left, right, m.high[i] ? end : low, m.high[i] ? high : offset, i, colours.hatch);
    }
    if (end >= y0 && offset <= y1) block(left, right, offset, end, i, colours.of[m.kind[i]]);
  }
  ctx.putImageData(image, Math.round(box.left * box.scale), Math.round(box.top * box.scale));
}

function drawTexts(ctx) {  // labels on what is large enough
  const texts = new Map();
  for (let i = 0, drawn = 0; i < m.count && drawn < 500; i++) {
    if (m.label[i] < 0 || (found !== null && !found[i])) continue;
    const left = Math.max(px(at[Math.max(0, m.start[i])]), box.left), right = Math.min(px(at[m.stop[i]]), box.left + box.width);
    if (right - left < 34) continue;
    const upper = Math.max(py(m.offset[i] + m.nbytes[i]), box.top), lower = Math.min(py(m.offset[i]), box.top + box.height);
    if (lower - upper < 13) continue;
    if (!texts.has(m.label[i])) texts.set(m.label[i], visible(m.strings[m.label[i]], 60));
    clipped(ctx, texts.get(m.label[i]), left + 4, (upper + lower) / 2, right - left - 8, colours.of[m.kind[i]].dark ? "#fff" : "#000");
    drawn++;
  }
}
function clipped(ctx, text, x, y, width, colour) {
  ctx.fillStyle = colour;
  if (ctx.measureText(text).width > width) {
    const room = Math.floor(text.length * (width - 8) / ctx.measureText(text).width);
    if (room < 2) return;
    text = `${text.slice(0, room)}\u2026`;
  }
  ctx.fillText(text, x, y);
}

function drawAxes(ctx) {
  ctx.strokeStyle = colours.line;
  ctx.fillStyle = colours.faint;
  ctx.lineWidth = 1;
  ctx.textAlign = "right";
  const rough = (y1 - y0) / Math.max(2, box.height / 56);
  const step = 2 ** Math.ceil(Math.log2(Math.max(1, rough)));
  for (let y = Math.ceil(y0 / step) * step; y <= y1; y += step) {
    const line = Math.round(py(y)) + .5;
    ctx.strokeRect(box.left - 4, line, 4, 0);
    ctx.fillText(step < 1024 ? grouped(y) : tick(y, step), box.left - 7, line);
  }
  ctx.textAlign = "center";
  const wide = (x1 - x0) / Math.max(2, box.width / 110), power = 10 ** Math.floor(Math.log10(wide));
  let every = [1, 2, 5, 10].find((k) => k * power >= wide) * power;
  if (unit === "events") every = Math.max(1, Math.round(every));
  const scale = unit === "ms" ? 1e6 : 1, digits = Math.max(0, -Math.floor(Math.log10(every / scale)));
  for (let x = Math.ceil(x0 / every) * every; x <= x1; x += every) {
    ctx.strokeRect(Math.round(px(x)) + .5, box.top + box.height + 14, 0, 4);
    const text = unit === "ms" ? (x / scale).toFixed(Math.min(digits, 6)) : grouped(x);
    ctx.fillText(text, Math.min(Math.max(px(x), box.left + 8), box.left + box.width - 16), box.top + box.height + 27);
  }
  ctx.textAlign = "left";
  ctx.fillText(unit === "ms" ? "ms" : "event", 8, box.top + box.height + 27);
  ctx.strokeRect(box.left - .5, box.top - .5, box.width + 1, box.height + 1);
}
function tick(y, step) {  // as few digits as tell ticks apart
  const power = Math.min(5, Math.floor(Math.log2(Math.max(y, step)) / 10)), value = y / 1024 ** power;
  const digits = Math.min(3, Math.max(0, Math.ceil(-Math.log2(step / 1024 ** power))));
  return `${y ? value.toFixed(digits) : 0} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}`;
}

function drawScopes(ctx) {
  ctx.textAlign = "left";
  const reached = new Float64Array(MOST_LANES).fill(-1);  // bands narrower than a pixel share one
  for (const scope of m.scopes) {
    if (scope.depth >= m.lanes) continue;
    const left = Math.max(px(at[Math.max(0, scope.start)]), box.left), right = Math.min(px(at[scope.until]), box.left + box.width);
    if (right < box.left || left > box.left + box.width || right <= reached[scope.depth]) continue;
    const width = Math.max(1, right - left - 1), y = 2 + scope.depth * LANE;
    ctx.fillStyle = colours.band;
    ctx.fillRect(left, y, width, LANE - 2);
    reached[scope.depth] = left + width;
    if (width > 30 && scope.label >= 0) clipped(ctx, visible(m.strings[scope.label], 60), left + 4, y + LANE / 2 - .5, width - 8, colours.ink);
  }
  if (m.lanes) { ctx.fillStyle = colours.faint; ctx.fillText("scopes", 8, 2 + LANE / 2); }
}

function drawMarks(ctx) {  // below the map: rollbacks as ticks, failures as crosses
  const y = box.top + box.height + 2;
  let lastBack = -1, lastFail = -9, lines = 0;
  for (const mark of m.marks) {
    const x = Math.round(px(at[mark.index])) + .5;
    if (x < box.left || x > box.left + box.width) continue;
    if (mark.failed && x - lastFail > 2) {
      lastFail = x;
      ctx.strokeStyle = colours.fail;
      ctx.lineWidth = 2;
      ctx.beginPath();
      ctx.moveTo(x - 4, y + 1); ctx.lineTo(x + 4, y + 9); ctx.moveTo(x + 4, y + 1); ctx.lineTo(x - 4, y + 9);
      ctx.stroke();
      ctx.lineWidth = 1;
      if (lines++ < 60) { ctx.setLineDash([2, 3]); ctx.strokeRect(x, box.top, 0, box.height); ctx.setLineDash([]); }
    } else if (!mark.failed && x > lastBack) {
      const roomy = x - lastBack > 5;
      lastBack = x;
      ctx.strokeStyle = ctx.fillStyle = colours.back;
      ctx.lineWidth = 1;
      if (roomy) {  // an arrow the way the pointer went
        const from = py(mark.old_top), to = py(mark.new_top);
        ctx.beginPath(); ctx.moveTo(x - 3, y + 2); ctx.lineTo(x + 3, y + 2); ctx.lineTo(x, y + 8); ctx.fill();
        ctx.strokeRect(x, Math.min(Math.max(Math.min(from, to), box.top), box.top + box.height), 0,
          Math.max(0, Math.min(Math.max(from, to), box.top + box.height) - Math.max(Math.min(from, to), box.top)));
      } else ctx.strokeRect(x, y + 2, 0, 6);
    }
  }
}

function drawWater(ctx) {  // the most that both ends together took until then
  if (!m.peaks.length) return;
  ctx.save();
  ctx.beginPath();
  ctx.rect(box.left, box.top, box.width, box.height);
  ctx.clip();
  ctx.beginPath();
  let y = py(m.peaks[0][1]), last = -1, reached = 0;
  ctx.moveTo(px(at[Math.max(0, m.peaks[0][0])]), y);
  for (const [index, nbytes] of m.peaks) {
    const x = px(at[Math.max(0, index)]);
    if (x > box.left + box.width) break;
    reached = nbytes;
    if (x > last) ctx.lineTo(x, y);
    y = py(nbytes);
    ctx.lineTo(x, y);
    last = x;
  }
  if (reached === 0) { ctx.restore(); return; }  // it begins to the right of the view
  ctx.lineTo(box.left + box.width, y);
  ctx.strokeStyle = colours.paper; ctx.lineWidth = 3.5; ctx.stroke();
  ctx.strokeStyle = colours.water; ctx.lineWidth = 1.5; ctx.setLineDash([6, 3]); ctx.stroke();
  ctx.setLineDash([]);
  const text = `high-water ${short(reached)}`, width = ctx.measureText(text).width + 8;
  const line = y < box.top + 16 ? y + 2 : y - 16;
  ctx.textAlign = "left";
  ctx.fillStyle = colours.paper;
  ctx.fillRect(box.left + box.width - width - 3, line, width, 14);
  ctx.fillStyle = colours.ink;
  ctx.fillText(text, box.left + box.width - width + 1, line + 7);
  ctx.restore();
}

function overlay() {  // what moves with the pointer: elements, which a browser moves without drawing the map again
  const x = px((at[cursor] + at[Math.min(m.n, cursor + 1)]) / 2);
  place($("cursor"), x, box.top, 1, x >= box.left && x <= box.left + box.width ? box.height : -1);
  outline($("hovered"), hover === null || hover.region === selected ? -1 : hover.region);
  outline($("chosen"), selected);
  plot.dataset.view = JSON.stringify({ ...box, x0, x1, y0, y1, unit, cursor });  // where things are, for scripts
}
function place(node, x, y, width, height) {
  node.hidden = height < 0;
  node.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
  node.style.width = `${Math.max(1, Math.round(width))}px`;
  node.style.height = `${Math.max(1, Math.round(height))}px`;
}
function outline(node, i) {
  const outside = i < 0 || at[Math.max(0, m.start[i])] > x1 || at[m.stop[i]] < x0 || m.offset[i] > y1 || m.offset[i] + m.nbytes[i] < y0;
  if (outside) { node.hidden = true; return; }
  const limit = (value, from, size) => Math.min(Math.max(value, from - 3), from + size + 3);
  const left = limit(px(at[Math.max(0, m.start[i])]), box.left, box.width), right = limit(px(at[m.stop[i]]), box.left, box.width);
  const upper = limit(py(m.offset[i] + m.nbytes[i]), box.top, box.height), lower = limit(py(m.offset[i]), box.top, box.height);
  place(node, left, upper, right - left, lower - upper);
}
