// --- table ---

const COLUMNS = [
  ["Layer", "layer", (row) => row.layer],
  ["Phase", "phase", (row) => row.phase],
  ["Operation", "operation", (row) => row.operation],
  ["Calls", "calls", (row) => row.calls],
  ["Wall", "wall", (row) => ns(row.wall_ns)],
  ["Compute", "compute", (row) => ns(row.compute_ns)],
  ["Comm.", "communication", (row) => ns(row.communication_ns)],
  ["Exposed", "exposed", (row) => ns(row.exposed_ns)],
  ["Overlap", "overlap", (row) => row.overlap.median],
  ["Bytes", "bytes", (row) => row.bytes],
  ["Plan, implementation", "served", (row) => served(row)],
];
const TEXT = new Set(["layer", "phase", "operation", "served"]);
const order = { column: -1, falling: false }; // -1: as they first ran

const ns = (times) => times[byId("statistic").value];

function served(row) {
  const known = row.served.filter((each) => each.plan || each.implementation);
  return known.map(({ plan, implementation, calls }) => {
    const text = [plan, implementation].filter(Boolean).join(", ");
    return row.served.length > 1 ? `${text} (${counted(calls, "call")})` : text;
  }).join("; ");
}

function showHeads() {
  COLUMNS.forEach(([title, name], number) => {
    const button = element("button", { type: "button", title: meaning("row", name) }, title);
    button.addEventListener("click", () => {
      const starts = !TEXT.has(name); // numbers: the largest first
      if (order.column !== number) Object.assign(order, { column: number, falling: starts });
      else if (order.falling === starts) order.falling = !starts;
      else order.column = -1;
      showRows();
    });
    byId("heads").append(element("th", { scope: "col", class: TEXT.has(name) ? null : "number" }, button));
  });
}

function showRows() {
  const which = byId("which").value;
  const source = which === "all" ? DATA.summary : DATA.summary.ranks.find((rank) => `${rank.rank}` === which);
  const wanted = byId("filter").value.trim().toLowerCase();
  const rows = source.rows.filter((row) => `${row.layer} ${row.operation} ${row.phase}`.toLowerCase().includes(wanted));
  if (order.column >= 0) {
    const value = COLUMNS[order.column][2];
    rows.sort((a, b) => compare(value(a), value(b)) * (order.falling ? -1 : 1));
  }
  [...byId("heads").children].forEach((head, number) => {
    head.setAttribute("aria-sort", number !== order.column ? "none" : order.falling ? "descending" : "ascending");
  });
  const most = Math.max(1, ...source.rows.map((row) => ns(row.exposed_ns) || 0));
  byId("rows").replaceChildren(...rows.map((row) => tableRow(row, most)));
  byId("count").textContent = `${rows.length} of ${counted(source.rows.length, "row")}`;
}

/** What is not known comes last, whichever way. */
function compare(a, b) {
  if (a === null || b === null) return a === b ? 0 : (a === null) === order.falling ? 1 : -1;
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}

function tableRow(row, most) {
  const cells = COLUMNS.map(([, name, value]) => {
    const given = value(row);
    if (name === "layer") return element("td", { title: given }, element("bdi", {}, given));
    if (name === "served") return element("td", { class: "served", title: given }, given || "–");
    if (TEXT.has(name)) return element("td", {}, given);
    if (name === "calls") {
      const failed = row.errors ? [" ", element("span", { class: "bad" }, `(${row.errors} failed)`)] : [];
      return element("td", { class: "number" }, `${given}`, ...failed);
    }
    if (name === "bytes") return element("td", { class: "number" }, given ? bytes(given) : "–");
    if (name === "overlap") return element("td", { class: "number" }, percent(given), ...meter(given, "hidden"));
    const bar = name === "exposed" ? meter(given / most, "exposed") : [];
    return element("td", { class: "number" }, time(given === null ? null : given / 1e3), ...bar);
  });
  const line = element("tr", { tabindex: "0" }, ...cells);
  const show = () => showCalls(row);
  line.addEventListener("click", show);
  line.addEventListener("keydown", (event) => { if (event.key === "Enter") show(); });
  return line;
}

function meter(share, color) {
  const style = { width: `${100 * Math.min(1, share)}%`, background: `var(--${color})` };
  return share > 0 ? [element("i", { class: "meter", style })] : [];
}

/** The first call of a row, in the timeline. */
function showCalls(row) {
  const which = byId("which").value;
  for (const strip of PLACES.strips) {
    if (strip.lane !== "operation" || (which !== "all" && `${strip.rank}` !== which)) continue;
    const index = strip.row.details.findIndex((number) => {
      const details = DATA.details[number];
      return details.layer === row.layer && details.name === row.operation;
    });
    if (index < 0) continue;
    choose({ strip, index }, true);
    closer();
    svg.scrollIntoView({ block: "nearest" });
    return;
  }
}

function showTable() {
  byId("which").append(element("option", { value: "all" }, "all"),
    ...DATA.summary.ranks.map(({ rank }) => element("option", { value: `${rank}` }, `${rank}`)));
  for (const id of ["which", "statistic"]) byId(id).addEventListener("change", showRows);
  byId("filter").addEventListener("input", showRows);
  showHeads();
  showRows();
}
