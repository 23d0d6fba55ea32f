// --- details ---

function at(x, y) {
  const strip = PLACES.strips.find((each) => y >= each.y && y < each.y + each.height);
  if (!strip || x < GUTTER) return null;
  const slack = 1.5 / scale(); // what is drawn a pixel wide can be pointed at
  const index = firstAfter(strip.row, toTime(x) - slack);
  if (index >= strip.row.begin.length || strip.row.begin[index] > toTime(x) + slack) return null;
  return { strip, index };
}

function facts({ strip, index }) {
  const { row, rank } = strip;
  const details = DATA.details[row.details[index]];
  const waits = details.kind === "exposed";
  const known = [
    ["time", `${time(row.duration[index])} from ${time(row.begin[index])}`],
    ["layer", details.layer],
    ["operation", details.of],
    ["phase", details.phase],
    ["plan", details.plan],
    ["served by", details.implementation],
    ["group", details.group],
    ["sent", details.sent_bytes === undefined ? null : bytes(details.sent_bytes)],
    ["tensor", details.bytes === undefined ? null : bytes(details.bytes)],
    ["error", details.error],
    ["", details.open ? "had not ended when recording did" : null],
    ["", details.kind === "communication" ? "ends when this rank noticed" : null],
  ].filter(([, text]) => text !== null && text !== undefined && text !== "");
  const kind = waits ? "exposed: waits for" : details.kind;
  return { title: `${kind} ${details.name}`, known: [["rank", `${rank}`], ...known] };
}

/** Marks the chosen interval and shows its details beside it. */
function mark() {
  const marks = byId("marks");
  const tip = byId("tip");
  if (!marks) return;
  marks.replaceChildren();
  tip.hidden = chosen === null;
  if (chosen === null) return;
  const { strip, index } = chosen;
  const left = Math.max(GUTTER, toPixel(strip.row.begin[index]));
  const right = Math.min(width(), Math.max(left + 1, toPixel(endOf(strip.row, index))));
  tip.hidden = right < GUTTER || left > width();
  marks.append(drawn("rect", { class: "chosen", x: left - 1, y: strip.y - 1, width: Math.max(2, right - left + 2), height: strip.height + 2, rx: 2 }));
  marks.append(drawn("path", { class: "cursor", d: `M${left} ${AXIS}V${PLACES.height}M${right} ${AXIS}V${PLACES.height}` }));
  const { title, known } = facts(chosen);
  tip.replaceChildren(element("b", {}, title), element("dl", {}, ...pairs(known)));
  const room = svg.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(4, Math.min(room, left))}px`;
  const below = strip.y + strip.height + 8;
  const high = tip.offsetHeight;
  const fitsBelow = below + high < PLACES.height || strip.y - high - 8 < -60;
  tip.style.top = `${fitsBelow ? below : strip.y - high - 8}px`;
}

function choose(found, hold) {
  if (held && !hold) return;
  chosen = found;
  held = Boolean(hold && found);
  if (held) {
    const { title, known } = facts(found);
    byId("spoken").textContent = `${title}; ${known.map((pair) => pair.join(" ")).join("; ")}`;
  }
  mark();
}

/** The next or previous interval of the row, in view. */
function step(by) {
  if (!chosen) return lane(1);
  const index = Math.min(chosen.strip.row.begin.length - 1, Math.max(0, chosen.index + by));
  choose({ strip: chosen.strip, index }, true);
  const begin = chosen.strip.row.begin[index];
  const end = endOf(chosen.strip.row, index);
  if (end < view.begin || begin > view.end) look(begin - (view.end - view.begin) / 2, begin + (view.end - view.begin) / 2);
}

/** The row below or above, at its first interval in view. */
function lane(by) {
  const used = PLACES.strips.filter((strip) => strip.row.begin.length);
  if (!used.length) return;
  const from = chosen ? used.indexOf(chosen.strip) : by > 0 ? -1 : used.length;
  const strip = used[Math.min(used.length - 1, Math.max(0, from + by))];
  choose({ strip, index: Math.min(strip.row.begin.length - 1, firstAfter(strip.row, view.begin)) }, true);
}

function closer() {
  if (!chosen) return;
  const { row } = chosen.strip;
  const length = Math.max(1e-3, row.duration[chosen.index]);
  look(row.begin[chosen.index] - length, endOf(row, chosen.index) + length);
}

const VIEWS = {
  in: () => zoom(0.5),
  out: () => zoom(2),
  all: () => look(WHOLE.begin, WHOLE.end),
  left: () => pan(-0.25),
  right: () => pan(0.25),
};
const KEYS = {
  "+": VIEWS.in,
  "=": VIEWS.in,
  "-": VIEWS.out,
  0: VIEWS.all,
  ArrowLeft: VIEWS.left,
  ArrowRight: VIEWS.right,
  ArrowUp: () => lane(-1),
  ArrowDown: () => lane(1),
  n: () => step(1),
  p: () => step(-1),
  Enter: closer,
  Escape: () => choose(null, true),
};

function listen() {
  const place = (event) => {
    const box = svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  let drag = null; // {x, moved}
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(sideways / width());
    else zoom(Math.exp(Math.max(-0.5, Math.min(0.5, event.deltaY / 250))), toTime(Math.max(GUTTER, place(event)[0])));
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, moved: 0 };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (!drag) return choose(at(...place(event)), false);
    const by = event.clientX - drag.x;
    drag.moved += Math.abs(by);
    drag.x = event.clientX;
    if (drag.moved < 4) return;
    svg.classList.add("dragging");
    pan(-by / (width() - GUTTER));
  });
  svg.addEventListener("pointerup", (event) => {
    if (drag && drag.moved < 4) choose(at(...place(event)), true);
    drag = null;
    svg.classList.remove("dragging");
  });
  svg.addEventListener("pointercancel", () => { drag = null; });
  svg.addEventListener("pointerleave", () => choose(null, false));
  svg.addEventListener("dblclick", (event) => zoom(0.4, toTime(place(event)[0])));
  svg.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  for (const button of document.querySelectorAll("[data-view]")) {
    button.addEventListener("click", VIEWS[button.dataset.view]);
  }
  new ResizeObserver(redraw).observe(svg);
}

function showLegend() {
  const kinds = [
    ["operation", "forward"], ["operation backward", "backward"], ["compute", "computes"],
    ["exposed", "exposed: waits, computes nothing"], ["communication", "communication under way"],
  ];
  byId("legend").append(...kinds.map(([style, text]) => element("li", {},
    drawn("svg", { "aria-hidden": "true" }, drawn("rect", { class: style, width: 18, height: 12 })), text)));
}
