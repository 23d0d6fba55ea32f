"use strict";

// Errors are left where a test of the page finds them: <html data-errors>.
addEventListener("error", (event) => {
  const root = document.documentElement;
  root.dataset.errors = `${root.dataset.errors || ""}${event.message}\n`;
});

const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

// --- text ---

/** A length of time, given in microseconds, with three digits that count. */
function time(us) {
  if (us === null || us === undefined) return "–";
  const size = Math.abs(us);
  if (size >= 1e6) return `${digits(us / 1e6)} s`;
  if (size >= 1e3) return `${digits(us / 1e3)} ms`;
  if (size >= 1 || size === 0) return `${digits(us)} µs`;
  return `${digits(us * 1e3)} ns`;
}

function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : 2);
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (count >= 1000 && at < units.length - 1) {
    count /= 1000;
    at += 1;
  }
  return `${at ? digits(count) : count} ${units[at]}`;
}

const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(0)}%`);
const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** An element with attributes and children; strings become text, never markup. */
function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.entries(value).forEach(([k, v]) => node.style.setProperty(k, v));
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function pairs(list) {
  return list.flatMap(([term, text, attributes]) => [
    element("dt", attributes || {}, term),
    element("dd", {}, text),
  ]);
}
