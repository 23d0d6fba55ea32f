// --- timeline ---

const LANES = ["operation", "compute", "communication"];
const TITLES = { operation: "operations", compute: "compute", communication: "comm." };
const GUTTER = 92; // pixels left of the intervals, for names
const AXIS = 26; // pixels above the first rank
const ROW = { operation: 18, compute: 18, communication: 18 }; // pixels of a lane's only row
const THIN = 10; // of each, where a lane has several
const GAP = 3;
const LABEL = 34; // pixels from which an operation shows its name

const svg = byId("timeline");
const WHOLE = {
  begin: Math.min(0, ...DATA.ranks.map((rank) => rank.begin)),
  end: Math.max(1e-3, ...DATA.ranks.map((rank) => rank.end)),
};
const view = { ...WHOLE };
let chosen = null; // {strip, index}: what the details are of
let held = false; // by a click or a key, until Escape

/** Every row of every lane of every rank, with its place; and how high all are. */
function layOut() {
  const strips = [];
  const bands = [];
  let y = AXIS;
  for (const rank of DATA.ranks) {
    const top = y;
    y += 8;
    for (const lane of LANES) {
      const rows = rank.lanes[lane];
      const height = rows.length > 1 ? THIN : ROW[lane];
      rows.forEach((row, number) => {
        strips.push({ rank: rank.rank, lane, row, number, y, height });
        y += height + (number === rows.length - 1 ? GAP : 1);
      });
    }
    y += 6;
    bands.push({ rank: rank.rank, top, bottom: y });
  }
  return { strips, bands, height: y };
}

const PLACES = layOut();
const width = () => Math.max(120, svg.clientWidth);
const scale = () => (width() - GUTTER - 8) / (view.end - view.begin);
const toPixel = (us) => GUTTER + (us - view.begin) * scale();
const toTime = (pixel) => view.begin + (pixel - GUTTER) / scale();
const endOf = (row, index) => row.begin[index] + row.duration[index];

/** The first interval of a row that ends after `us`; their ends are in order. */
function firstAfter(row, us, from = 0) {
  let low = from;
  let high = row.begin.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (endOf(row, middle) > us) high = middle;
    else low = middle + 1;
  }
  return low;
}

function styleOf(details) {
  if (details.kind !== "operation") return details.kind;
  if (details.error) return "operation failed";
  return details.phase === "backward" ? "operation backward" : "operation";
}

/** Rectangles of what is visible, one path for each style; thinner than a pixel: drawn as one. */
function drawStrip(strip, into) {
  const { row, y, height } = strip;
  const paths = {};
  const last = toPixel(view.end);
  let index = firstAfter(row, view.begin);
  while (index < row.begin.length) {
    const left = Math.max(GUTTER, toPixel(row.begin[index]));
    if (left > last) break;
    const right = Math.min(last, toPixel(endOf(row, index)));
    const details = DATA.details[row.details[index]];
    const style = styleOf(details);
    const shown = Math.max(1, right - left);
    paths[style] = `${paths[style] || ""}M${left.toFixed(2)} ${y}h${shown.toFixed(2)}v${height}h${-shown.toFixed(2)}z`;
    if (strip.lane === "operation" && right - left > LABEL) into.labels.push(label(strip, details, left, right));
    // Those that end within the pixel just drawn would not be seen.
    index = right - left < 1 ? Math.max(index + 1, firstAfter(row, toTime(left + 1), index)) : index + 1;
  }
  for (const [style, d] of Object.entries(paths)) into.shapes.push(drawn("path", { class: style, d }));
}

function label(strip, details, left, right) {
  const fits = Math.floor((right - left - 8) / 6.3);
  const own = details.layer === details.name ? details.name : `${details.layer} · ${details.name}`;
  const name = own.length <= fits ? own : shortened(details.layer, fits);
  return drawn("text", { x: left + 4, y: strip.y + strip.height / 2 + 4 }, name);
}

/** The end of a path, of whole parts where one fits: `…3.mlp`. */
function shortened(path, fits) {
  if (path.length <= fits) return path;
  const parts = path.split(".");
  while (parts.length > 1 && parts.join(".").length >= fits) parts.shift();
  const end = parts.join(".");
  return `…${end.length < fits ? end : end.slice(1 - fits)}`;
}

function ticks() {
  const rough = (view.end - view.begin) / Math.max(2, (width() - GUTTER) / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough) || rough;
  const found = [];
  for (let at = Math.ceil(view.begin / step) * step; at <= view.end; at += step) found.push(at);
  return { found, step };
}

function axisLabel(us, step) {
  const [unit, factor] = view.end >= 1e6 ? ["s", 1e6] : view.end >= 1e3 ? ["ms", 1e3] : ["µs", 1];
  const places = Math.max(0, Math.ceil(-Math.log10(step / factor) - 1e-9));
  return `${(us / factor).toFixed(Math.min(9, places))} ${unit}`;
}

function hatch() {
  return drawn("defs", {},
    drawn("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      drawn("rect", { class: "hatch-ground", width: 6, height: 6 }),
      drawn("path", { class: "hatch-line", d: "M1 0v6" })));
}

function draw() {
  svg.setAttribute("height", PLACES.height + 4);
  const back = [];
  PLACES.bands.forEach((band, number) => {
    if (number % 2) back.push(drawn("rect", { class: "stripe", x: 0, y: band.top, width: width(), height: band.bottom - band.top }));
    back.push(drawn("path", { class: "edge", d: `M0 ${band.top + 0.5}H${width()}` }));
  });
  const { found, step } = ticks();
  for (const at of found) {
    const x = toPixel(at);
    back.push(drawn("path", { class: "grid", d: `M${x} ${AXIS}V${PLACES.height}` }));
    if (x < width() - 40) back.push(drawn("text", { class: "faint", x: x + 3, y: 17 }, axisLabel(at, step)));
  }
  const into = { shapes: [], labels: [] };
  for (const strip of PLACES.strips) drawStrip(strip, into);
  const names = PLACES.bands.map((band) => drawn("text", { class: "name", x: 10, y: band.top + 20 }, `rank ${band.rank}`));
  for (const strip of PLACES.strips) {
    if (strip.number === 0 && strip.lane !== "operation") {
      names.push(drawn("text", { class: "faint", x: 10, y: strip.y + 12 }, TITLES[strip.lane]));
    }
  }
  svg.replaceChildren(hatch(), ...back, ...into.shapes, ...into.labels, ...names, drawn("g", { id: "marks" }));
  mark();
}

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    draw();
  });
}

/** From the first interval to the last, with a little room: most of a recording may be neither. */
function lookAtIntervals() {
  let [begin, end] = [Infinity, -Infinity];
  for (const { row } of PLACES.strips) {
    if (!row.begin.length) continue;
    begin = Math.min(begin, row.begin[0]);
    end = Math.max(end, endOf(row, row.begin.length - 1));
  }
  const room = (end - begin) / 50;
  if (begin < end) look(begin - room, end + room);
}

/** Shows [begin, end), at least a nanosecond and at most everything. */
function look(begin, end) {
  const most = WHOLE.end - WHOLE.begin;
  const length = Math.min(most, Math.max(1e-3, end - begin));
  const middle = (begin + end) / 2;
  view.begin = Math.min(Math.max(WHOLE.begin, middle - length / 2), WHOLE.end - length);
  view.end = view.begin + length;
  redraw();
}

function zoom(factor, around = (view.begin + view.end) / 2) {
  look(around - (around - view.begin) * factor, around + (view.end - around) * factor);
}

function pan(share) {
  const by = share * (view.end - view.begin);
  const kept = Math.max(WHOLE.begin - view.begin, Math.min(WHOLE.end - view.end, by));
  look(view.begin + kept, view.end + kept);
}
