// --- header and ranks ---

function showHeader() {
  const { command, created, tpkernels, torch, world_size: world } = DATA.summary;
  const words = command ? `${command.join(" ")} · ` : "";
  byId("about").textContent =
    `${words}${counted(world, "rank")} · ${created} · tpkernels ${tpkernels}, torch ${torch}`;
  const warnings = DATA.summary.missing_ranks.map((rank) => `Rank ${rank}: nothing is known of it.`);
  for (const rank of DATA.summary.ranks) {
    if (rank.error) warnings.push(`Rank ${rank.rank} ended early: ${rank.error}`);
    if (rank.left_out) {
      warnings.push(`Rank ${rank.rank}: ${counted(rank.left_out, "later interval")} left out.`);
    }
    if (rank.clock.bound_ns === null) {
      warnings.push(`Rank ${rank.rank}: its clock was not compared with rank 0's.`);
    }
  }
  byId("warnings").append(...warnings.map((text) => element("li", {}, text)));
  byId("warnings").hidden = warnings.length === 0;
}

function showRanks() {
  for (const rank of DATA.summary.ranks) {
    const wall = Math.max(1, rank.wall_ns);
    const parts = [
      ["compute", rank.compute_ns - rank.hidden_ns],
      ["hidden", rank.hidden_ns],
      ["exposed", rank.exposed_ns],
    ];
    const { offset_ns: offset, bound_ns: bound } = rank.clock;
    const clock = bound === null ? "unknown" : `${time(offset / 1e3)} ± ${time(bound / 1e3)}`;
    const swatch = (name) => ({ style: { "--swatch": `var(--${name})` }, title: meaning("rank", name) });
    byId("cards").append(
      element("article", { class: "card" },
        element("header", {}, element("b", {}, `rank ${rank.rank}`),
          element("span", { title: rank.host }, `${rank.host} · ${rank.device}`)),
        element("p", { class: "large" }, time(rank.exposed_ns / 1e3),
          element("small", {}, `exposed: ${percent(rank.exposed_ns / wall)} of ${time(wall / 1e3)}`)),
        element("div", { class: "share", "aria-hidden": "true" }, ...parts.map(([name, ns]) =>
          element("i", { style: { width: `${(100 * ns) / wall}%`, background: `var(--${name})` } }))),
        element("dl", {}, ...pairs([
          ["compute", time(rank.compute_ns / 1e3), swatch("compute")],
          ["communication", time(rank.communication_ns / 1e3), swatch("communication")],
          ["of it hidden", time(rank.hidden_ns / 1e3), swatch("hidden")],
          ["exposed", time(rank.exposed_ns / 1e3), swatch("exposed")],
          ["communicated", bytes(rank.bytes), { title: meaning("rank", "bytes") }],
          ["clock", rank.rank === 0 ? "the reference" : clock, { title: meaning("rank", "clock") }],
        ]))));
  }
  for (const rank of DATA.summary.missing_ranks) {
    byId("cards").append(element("article", { class: "card absent" },
      element("header", {}, element("b", {}, `rank ${rank}`)), element("p", {}, "nothing recorded")));
  }
}

function meaning(part, name) {
  return DATA.definitions[`${part}.${name}`] || null;
}

function showMeaning() {
  const terms = Object.entries(DATA.definitions).map(([name, text]) => {
    const [part, ...rest] = name.split(".");
    return [`${rest.join(".").replaceAll("_", " ")}${part === "rank" ? ", of a rank" : ""}`, text];
  });
  byId("meaning").querySelector("dl").append(...pairs(terms));
}
