// The page of `shardline report`: sections made from the data of one to five runs.
"use strict";

const view = { x: "step", smoothing: null, log: false, run: 0, memory: "peak", experts: null, keys: "changed", search: "" };
const several = () => data.runs.length > 1;
const runColor = (index) => color(`c${index}`);
const current = () => data.runs[Math.min(view.run, data.runs.length - 1)];

// ---- head ---------------------------------------------------------------------------------------------------------

const NUMBERS = [["loss", "loss, last", format.loss], ["validation", "validation loss, best", format.loss],
  ["tokens_per_second", "tokens/s, median", format.compact], ["mfu", "MFU, median", format.percent], ["memory_gib", "memory, peak", format.gib],
  ["tokens", "tokens", format.compact], ["seconds", "time", format.duration], ["restarts", "restarts", format.whole]];

function stateMark({ word, step, last_step: last }) {
  const words = { finished: "finished", running: `running, step ${step} of ${last}`, stopped: `stopped at step ${step} of ${last}`,
    failed: `failed after step ${step}`, lost: `silent since step ${step}`, unknown: `step ${step} of ${last}` };
  return h("span", { class: `state ${word}` }, words[word]);
}

function head() {
  const [run] = data.runs;
  const kicker = h("div", { class: "kicker" }, data.watch ? "Shardline report, live" : "Shardline report", themeChoice());
  if (several()) {
    const rows = data.runs.map((one, index) => [h("span", {}, swatch(runColor(index)), one.name), stateMark(one.state),
      ...NUMBERS.map(([key]) => one.numbers[key])]);
    return [h("header", { class: "top" }, kicker, h("h1", {}, `${data.runs.length} runs`)),
      h("div", { class: "card" }, table([["run", null], ["state", null], ...NUMBERS.map(([, name, show]) => [name, show])], rows, true))];
  }
  const tiles = NUMBERS.filter(([key]) => run.numbers[key] != null).map(([key, name, show]) =>
    h("div", { class: "tile" }, h("b", {}, show(run.numbers[key])), h("span", {}, name)));
  return [h("header", { class: "top" }, kicker, h("h1", {}, run.name, stateMark(run.state)), facts(run.facts),
    run.state.why ? h("p", { class: "why" }, run.state.why) : null), h("div", { class: "tiles" }, tiles)];
}

// ---- curves -------------------------------------------------------------------------------------------------------

const X_AXES = {
  step: { name: "step", title: "step", show: format.whole, sync: true, of: (series) => series.step },
  tokens: { name: "tokens", title: "tokens", show: format.compact, of: (series) => series.tokens },
  time: { name: "after", title: "time since the start", show: format.duration, incrs: CLOCK, of: (series) => (series.time ? series.time.map((value) => value && value - series.time[0]) : []) },
};

// The x values of rows that only have a step, such as validations.
function placed(run, steps) {
  if (view.x === "step") return steps;
  if (!run.series.step) return steps.map(() => null);
  const xs = X_AXES[view.x].of(run.series);
  const known = new Map(run.series.step.map((step, at) => [step, xs[at]]));
  return steps.map((step) => known.get(step) ?? null);
}

function curve(id, title, key, show, options = {}) {
  const having = () => data.runs.map((run, index) => ({ run, index })).filter(({ run }) => run.series[key]);
  const smooth = () => (options.smooth ? smoothing() : 0);
  return card({
    id, title, ...options,
    content: () => ({
      columns: [...(several() ? [["run", null]] : []), ["step", format.whole], ["tokens", format.whole], [title.toLowerCase(), show]],
      rows: having().flatMap(({ run }) => run.series.step.map((step, at) => [...(several() ? [run.name] : []), step, run.series.tokens[at], run.series[key][at]])),
    }),
    draw: (holder) => {
      const lines = having().flatMap(({ run, index }) => {
        const label = several() ? run.name : options.lineName || title.toLowerCase();
        const [xs, ys, paint] = [X_AXES[view.x].of(run.series), run.series[key], runColor(index)];
        const line = { label, xs, ys: smooth() ? smoothed(ys, smooth()) : ys, paint };
        return smooth() ? [{ label, xs, ys, paint, faint: true, of: label }, line] : [line];
      });
      lineChart(holder, { lines: [...lines, ...(options.more ? options.more() : [])], x: X_AXES[view.x], y: { show, tick: options.tick },
        log: options.log ? view.log : false, fromZero: options.fromZero });
    },
  });
}

function smoothing() {
  if (view.smoothing === null) view.smoothing = Math.max(...data.runs.map((run) => (run.series.step || []).length)) > 80 ? 0.6 : 0;
  return view.smoothing;
}

function lossLines() {
  const of = (run, label) => (several() ? `${run.name}, ${label}` : label);
  return data.runs.flatMap((run, index) => {
    const lines = [];
    if (run.validation.step.length)
      lines.push({ label: of(run, "validation"), xs: placed(run, run.validation.step), ys: run.validation.loss, paint: several() ? runColor(index) : color("c1"), dash: [5, 4], points: true });
    if (run.before_resume.step.length && view.x === "step")
      lines.push({ label: of(run, "before a restart"), xs: run.before_resume.step, ys: run.before_resume.loss, paint: color("faint"), dash: [2, 3] });
    return lines;
  });
}

function learning() {
  if (!data.runs.some((run) => run.series.step)) return null;
  let loss;
  const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: smoothing(), "aria-label": "Smoothing of the loss" });
  slider.addEventListener("input", () => { view.smoothing = Number(slider.value); loss.redraw(); });
  loss = curve("loss", "Loss", "loss", format.loss, { wide: true, log: true, smooth: true, more: lossLines, lineName: "training", tick: format.small,
    tools: [h("label", {}, "smooth", slider), toggle("Log", view.log, (pressed) => { view.log = pressed; loss.redraw(); })] });
  const cards = [loss, curve("lr", "Learning rate", "lr", format.small, { fromZero: true }),
    curve("grad_norm", "Gradient norm", "grad_norm", format.number, { fromZero: true, note: null })];
  if (data.runs.some((run) => run.series.reward_margin))
    cards.push(curve("reward_margin", "Reward margin", "reward_margin", format.number), curve("reward_accuracy", "Reward accuracy", "reward_accuracy", format.percent));
  const axes = [["step", "Step"], ["tokens", "Tokens"], ...(data.runs.some((run) => run.series.time) ? [["time", "Time"]] : [])];
  const tools = [choice("Horizontal axis", axes, view.x, (value) => { view.x = value; redrawAll(); })];
  return section("learning", "Learning", null, tools, h("div", { class: "grid" }, cards));
}

function speed() {
  if (!data.runs.some((run) => run.series.step)) return null;
  const has = (key) => data.runs.some((run) => run.series[key]);
  const byRank = data.runs.some((run) => run.memory);
  const cards = [curve("tokens_per_second", "Tokens per second", "tokens_per_second", format.whole, { fromZero: true, tick: format.compact }),
    curve("step_seconds", "Seconds per step", "step_seconds", format.seconds, { fromZero: true })];
  if (has("mfu")) cards.push(curve("mfu", "MFU", "mfu", format.percent, { fromZero: true }));
  if (several() || !byRank)
    cards.push(curve("memory_gib", "Peak memory", "memory_gib", format.gib, { fromZero: true, tick: format.gibTick, note: "The highest of all ranks." }));
  if (byRank) cards.push(memoryByRank(cards.length % 2 === 0));
  return section("speed", "Speed and memory", null, [], h("div", { class: "grid" }, cards));
}

function memoryByRank(wide) {
  const figure = card({
    id: "memory_by_rank", wide, title: several() ? `Memory by rank, ${current().name}` : "Memory by rank",
    tools: [choice("What is shown", [["peak", "Peak"], ["now", "Now"]], view.memory, (value) => { view.memory = value; figure.redraw(); })],
    content: () => {
      const { step, ranks, peak, now } = current().memory || { step: [], ranks: [], peak: [], now: [] };
      return { columns: [["rank", format.whole], ["step", format.whole], ["peak", format.gib], ["now", format.gib]],
        rows: ranks.flatMap((rank, at) => step.map((number, place) => [rank, number, peak[at][place], now[at][place]])) };
    },
    draw: (holder) => {
      const memory = current().memory;
      if (!memory) return holder.append(h("p", { class: "note" }, "This run has no memory by rank."));
      const paint = (at) => (memory.ranks.length <= 5 ? runColor(at) : between(color("c0"), color("c1"), at / (memory.ranks.length - 1)));
      const lines = memory.ranks.map((rank, at) => ({ label: `rank ${rank}`, xs: placed(current(), memory.step), ys: memory[view.memory][at], paint: paint(at) }));
      lineChart(holder, { lines, x: X_AXES[view.x], y: { show: format.gib, tick: format.gibTick }, fromZero: true });
    },
  });
  return figure;
}

// ---- inside a step ------------------------------------------------------------------------------------------------

function partStyle(name) {
  const [kind, axis] = name.split(" ");
  if (!axis) return { paint: color(kind), label: { data: "data", compute: "compute", idle: "idle (bubble)", optimizer: "optimizer" }[kind] };
  const label = kind === "hidden" ? `compute hiding ${data.axes[axis]}` : `exposed ${data.axes[axis]}`;
  return kind === "exposed" ? { paint: color(axis), label } : { paint: between(color("compute"), color(axis), 0.45), label };
}

function insideStep(run) {
  if (!run.parts) return null;
  const { names, step, mean, ranks, by_rank: byRank } = run.parts;
  const styles = () => names.map(partStyle);
  const cards = [card({
    id: "step_parts", title: "Where a step goes", wide: true,
    note: "Mean of all ranks. Exposed communication is time in which a rank waits; hidden communication overlaps with computing.",
    content: () => ({ columns: [["step", format.whole], ...styles().map(({ label }) => [label, format.seconds])],
      rows: step.map((number, at) => [number, ...mean.map((part) => part[at])]) }),
    draw: (holder) => stackedBars(holder, { labels: step, x: "step", show: format.seconds, parts: styles().map((style, at) => ({ ...style, values: mean[at] })) }),
  })];
  if (ranks.length > 1) {
    cards.push(card({
      id: "step_by_rank", title: "By rank", wide: true, note: "Median of all logged steps after the first.",
      content: () => ({ columns: [["rank", format.whole], ...styles().map(({ label }) => [label, format.seconds])],
        rows: ranks.map((rank, at) => [rank, ...byRank[at]]) }),
      draw: (holder) => rankBars(holder, { names: ranks.map((rank) => `rank ${rank}`), parts: styles(), values: byRank, show: format.seconds }),
    }), paceCard(run));
  }
  const first = engaged(run);
  if (first) cards.push(first);
  return section("inside", "Inside a step", null, [], h("div", { class: "grid" }, cards));
}

function paceCard(run) {
  const slow = run.paces.filter((pace) => pace.phase);
  const verdict = slow.length ? `The others wait for ${slow.map((pace) => `rank ${pace.rank} (${pace.phase})`).join(", ")}.`
    : "No rank takes over 10 % longer than others with the same layers.";
  const content = () => ({
    columns: [["rank", format.whole], ["host", null], ["works", format.seconds], ["waits", format.seconds], ["of the median", format.percent], ["slow in", null]],
    rows: run.paces.map((pace) => [pace.rank, pace.host, pace.own, pace.waiting, pace.ratio, pace.phase]) });
  return card({ id: "slow_ranks", title: "Slow ranks", wide: true, note: verdict, content,
    draw: (holder) => {
      const { columns, rows } = content();
      const worst = rows.map((row) => row.map((value, at) => (at === 5 && value ? h("span", { class: "slow" }, value) : value))).sort((a, b) => b[4] - a[4]);
      holder.append(table(columns, worst.slice(0, 16)));
      if (worst.length > 16) holder.append(h("p", { class: "note" }, "The slowest 16; the table has them all."));
    } });
}

function engaged(run) {
  if (!run.engaged.length) return null;
  const columns = [["what", null], ["on rank 0", null], ["differs on ranks", null]];
  const content = () => ({ columns, rows: run.engaged });
  return card({ id: "engaged", title: "What the first step did", wide: true, note: "As observed: kernels, graphs, saved activations, the update.", content,
    draw: (holder) => holder.append(table(columns, run.engaged.map(([what, value, others]) => [what, h("span", {}, ...breakable(value)), others]), true)) });
}

// ---- pipeline, mesh, experts --------------------------------------------------------------------------------------

function pipeline(run) {
  if (!run.pipeline) return null;
  const { step, ranks, measured, ideal } = run.pipeline;
  const titled = [["measured", measured], ["ideal", ideal]].map(([name, chart]) => ({
    title: `${name}: ${format.seconds(chart.total)}, ${format.percent(chart.bubble)} idle`, spans: chart.spans }));
  return section("pipeline", "Pipeline", null, [], h("div", { class: "grid" }, card({
    id: "pipeline", title: `Actions of step ${step}`, wide: true,
    note: "Ideal: the same order if every action took the mean time of its kind, and messages took no time. A rank's later stages are paler.",
    content: () => ({ columns: [["", null], ["rank", format.whole], ["action", null], ["stage", format.whole], ["micro-batch", format.whole], ["start", format.seconds], ["end", format.seconds]],
      rows: [["measured", measured], ["ideal", ideal]].flatMap(([name, chart]) => chart.spans.flatMap((row, place) =>
        row.map(([kind, stage, micro, start, end]) => [name, ranks[place], KINDS[kind][0], stage, micro, start, end]))) }),
    draw: (holder) => gantt(holder, { charts: titled, ranks, total: Math.max(measured.total, ideal.total), show: format.seconds }),
  })));
}

function mesh(run) {
  if (!run.mesh) return null;
  return section("mesh", "Mesh", null, [], h("div", { class: "grid" }, card({
    id: "mesh", title: "What ranks hold and how they communicate", wide: true,
    note: "Lines join the ranks of a group; their width is what a rank sends in the last logged step.",
    content: () => meshTable(run.mesh), draw: (holder) => meshMap(holder, run.mesh, "in the last logged step"),
  })));
}

function experts(run) {
  if (!run.experts) return null;
  const { steps, layers, loads, tokens } = run.experts;
  const cards = [card({
    id: "expert_load", title: "Load by layer", wide: true, note: "Tokens of the most used expert relative to the mean: 1 is perfectly even.",
    content: () => ({ columns: [["layer", null], ...steps.map((step) => [`step ${step}`, format.number])], rows: layers.map((layer, at) => [layer, ...loads[at]]) }),
    draw: (holder) => heatMap(holder, { rows: layers.map((layer) => `layer ${layer}`), columns: steps, values: loads, low: 1, show: format.number,
      name: (row, column) => `layer ${layers[row]}, step ${steps[column]}`, columnName: "step; max over mean:" }),
  })];
  if (tokens.length) {
    const chosen = () => tokens.find((one) => one.step === view.experts) || tokens[tokens.length - 1];
    const figure = card({
      id: "expert_tokens", title: "Tokens by expert", wide: true,
      tools: [h("label", {}, "step"), choice("Step", tokens.map((one) => [one.step, String(one.step)]), chosen().step, (step) => { view.experts = step; figure.redraw(); })],
      content: () => ({ columns: [["layer", format.whole], ...chosen().experts[0].map((_, at) => [`expert ${at}`, format.whole])],
        rows: chosen().layers.map((layer, at) => [layer, ...chosen().experts[at]]) }),
      draw: (holder) => heatMap(holder, { rows: chosen().layers.map((layer) => `layer ${layer}`), columns: chosen().experts[0].map((_, at) => at),
        values: chosen().experts, low: 0, show: format.whole, name: (row, column) => `layer ${chosen().layers[row]}, expert ${column}`, columnName: "expert; tokens:" }),
    });
    cards.push(figure);
  }
  return section("experts", "Experts", null, [], h("div", { class: "grid" }, cards));
}

// ---- events -------------------------------------------------------------------------------------------------------

const LANES = [["runs", "accent", ["start", "end"]], ["saves", "good", ["save"]], ["validations", "c3", ["validation"]],
  ["faults", "bad", ["fault", "error"]], ["warnings", "warn", ["warning"]]];

function events(run) {
  if (!run.events.length) return null;
  const lanes = LANES.filter(([, , kinds], at) => at === 0 || run.events.some((event) => kinds.includes(event.kind)));
  const laneOf = (kind) => lanes.findIndex(([, , kinds]) => kinds.includes(kind));
  const times = run.events.map((event) => event.time);
  const spans = [];
  for (const { kind, time } of run.events) {
    if (kind === "start") spans.push([time, Math.max(...times, data.runs.includes(run) && run.series.time ? Math.max(...run.series.time) : 0)]);
    else if (["end", "error", "fault"].includes(kind) && spans.length) spans[spans.length - 1][1] = Math.min(spans[spans.length - 1][1], time);
  }
  const columns = [["time", null], ["step", format.whole], ["what", null], ["", null]];
  const rows = run.events.map((event) => [format.when(event.time), event.step, event.kind, event.text]);
  return section("events", "Events", null, [], h("div", { class: "grid" }, card({
    id: "events", title: "What happened when", wide: true, content: () => ({ columns, rows }),
    draw: (holder) => eventChart(holder, { lanes, spans, from: Math.min(...times), to: Math.max(...times, ...spans.map(([, end]) => end)),
      events: run.events.map((event) => ({ time: event.time, lane: laneOf(event.kind), text: event.text })) }),
  })));
}

// ---- config and gaps ----------------------------------------------------------------------------------------------

function config() {
  const search = h("input", { type: "search", placeholder: "find a key", "aria-label": "Find a key" });
  const holder = h("div", {});
  const chosen = () => data.config.filter((row) => (view.keys === "all" || row[view.keys]) && row.key.includes(view.search));
  const shown = () => {
    const rows = chosen().map((row) => h("tr", { class: row.differs ? "differs" : "" }, h("td", {}, breakable(row.key)),
      row.values.map((value) => h("td", { class: value != null && value !== row.default ? "changed" : "same" }, value ?? "unset")), h("td", { class: "same" }, row.default ?? "unset")));
    const names = ["key", ...data.runs.map((run) => (several() ? run.name : "value")), "default"];
    holder.replaceChildren(h("div", { class: "table tall config" }, h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))),
      rows.length ? "" : h("p", { class: "note" }, "No such key."));
  };
  search.addEventListener("input", () => { view.search = search.value.trim(); shown(); });
  const csv = () => download("config.csv", csvText([["key"], ...data.runs.map((run) => [run.name]), ["default"]], chosen().map((row) => [row.key, ...row.values, row.default])));
  const options = [["changed", "Changed"], ...(several() ? [["differs", "Different"]] : []), ["all", "All"]];
  shown();
  return section("config", "Config", several() ? "Bold values differ from the defaults; a mark on the left shows keys in which the runs differ." : "Bold values differ from the defaults.",
    [search, choice("Keys", options, view.keys, (value) => { view.keys = value; shown(); }), h("button", { type: "button", onclick: csv, "aria-label": "Config: download as CSV" }, "CSV")],
    h("div", { class: "card" }, holder));
}

// Flags look like flags.
const asCode = (text) => (text.startsWith("--") ? h("code", {}, text) : text);

function gaps() {
  const rows = data.runs.flatMap((run) => run.missing.map((row) => [...(several() ? [run.name] : []), ...row]));
  if (!rows.length) return null;
  const columns = [...(several() ? [["run", null]] : []), ["what", null], ["why it is missing", null], ["how to get it", null]];
  return section("missing", "Not in this report", null, [], h("div", { class: "card" }, table(columns, rows.map((row) => [...row.slice(0, -1), asCode(row[row.length - 1])]), true)));
}

// ---- all of it ----------------------------------------------------------------------------------------------------

function draw() {
  redraws.clear();
  const run = current();
  const picker = several() ? h("div", { class: "section-head", style: "padding-top:2.4rem;margin:0" }, h("h2", {}, "One run at a time"),
    choice("Run", data.runs.map((one, index) => [index, one.name]), view.run, (index) => { view.run = index; draw(); document.getElementById("picker").scrollIntoView(); })) : null;
  if (picker) picker.id = "picker";
  const common = [learning(), speed()].filter(Boolean);
  const own = [insideStep(run), pipeline(run), mesh(run), experts(run), events(run)].filter(Boolean);
  const last = [config(), gaps()].filter(Boolean);
  const made = `Made ${format.when(data.made)}. Drag in a chart to zoom, double-click to see all; arrow keys move through the values of the focused chart.`;
  page.replaceChildren(...head(), navigation([...common, ...own, ...last]), ...common, ...(picker && own.length ? [picker] : []), ...own, ...last,
    h("footer", {}, made));
}

async function refresh(tag) {
  try {
    const answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag");
      data = await answer.json();
      const [x, y] = [scrollX, scrollY];
      draw();
      scrollTo(x, y);
    }
  } catch { /* the server is gone: the page stays as it is */ }
  setTimeout(refresh, 4000, tag);
}

applyTheme();
draw();
if (data.watch) setTimeout(refresh, 4000);
