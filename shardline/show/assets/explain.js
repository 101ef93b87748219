// The page of `shardline explain --html`: chapters, each with a picture and the table behind it.
"use strict";

const AXIS_PAINTS = ["tp", "cp", "ep", "dp_shard", "dp_replicate", "pp", "etp", "expert_shard"];
const formats = { text: null, whole: format.whole, bytes: format.bytes, share: format.percent };
const units = (value) => `${format.number(value)} units`;
const axisPaint = (axis) => (AXIS_PAINTS.includes(axis) ? axisColor(axis) : color("other"));

// ---- pictures -----------------------------------------------------------------------------------------------------

function column(chapter, name) {
  const at = chapter.columns.findIndex(([title]) => title === name);
  return chapter.rows.map((row) => row[at]);
}

function sentBars(holder, chapter) {
  const [when, axis, bytes] = ["when", "axis", "bytes"].map((name) => column(chapter, name));
  const [phases, axes] = [when, axis].map((values) => [...new Set(values)]);
  const values = phases.map((phase) => axes.map((name) =>
    bytes.reduce((sum, size, at) => sum + (when[at] === phase && axis[at] === name ? size : 0), 0)));
  rankBars(holder, { names: phases, left: 104, values, show: format.bytes, parts: axes.map((name) => ({ label: AXIS_NAMES[name] || name, paint: axisPaint(name) })) });
}

const PURPOSES = ["compute", "optimizer", "dp_shard", "data"];
function memoryBars(holder, chapter) {
  const { purposes, ranks } = chapter.picture;
  const columns = purposes.map((name) => column(chapter, name));
  rankBars(holder, { names: ranks.map((rank) => `rank ${rank}`), values: ranks.map((_, at) => columns.map((values) => values[at] || 0)), show: format.bytes,
    parts: purposes.map((label, at) => ({ label, paint: color(PURPOSES[at]) })) });
}

const PICTURES = {
  mesh: (holder, { picture }) => meshMap(holder, picture, "in a step"),
  shards: (holder, { picture }) => matrices(holder, picture),
  life: (holder, { rows }) => holder.append(h("ol", { class: "life" }, rows.map(([where, what]) => h("li", {}, h("b", {}, where), `: ${what}`)))),
  schedule: (holder, { picture }) => gantt(holder, { charts: [{ title: "planned", spans: picture.spans }], ranks: picture.ranks, total: picture.total, show: units }),
  sent: sentBars,
  memory: memoryBars,
};
const TITLES = { mesh: "What ranks hold and how they communicate", shards: "Pieces of each parameter", life: "From its sample to the update", schedule: "Actions over time",
  sent: "Bytes that rank 0 sends, by phase", memory: "Bytes by purpose", config: "Keys" };
const NOTES = {
  shards: "The filled piece is what the first rank holds; numbers are ranks.",
  memory: "All purposes stacked; the table also shows what a rank holds at once.",
  mesh: "Lines join the ranks of a group; their width is what a rank of the first pipeline position sends in a step.",
};

// ---- all of it ----------------------------------------------------------------------------------------------------

function chapterSection(chapter) {
  const columns = chapter.columns.map(([name, kind]) => [name, formats[kind]]);
  const content = () => ({ columns, rows: chapter.rows });
  const words = h("div", { class: "words" }, chapter.words.map((text) => h("p", {}, text)));
  const draw = chapter.picture ? (holder) => PICTURES[chapter.picture.kind](holder, chapter) : (holder) => holder.append(table(columns, chapter.rows, true));
  const figure = chapter.rows.length ? card({ id: chapter.key, title: TITLES[chapter.key], note: chapter.picture && NOTES[chapter.picture.kind], wide: true, content, draw }) : null;
  return section(chapter.key, chapter.title, null, [], words, ...(figure ? [h("div", { class: "grid" }, figure)] : []));
}

const sections = data.chapters.map(chapterSection);
applyTheme();
page.replaceChildren(
  h("header", { class: "top" }, h("div", { class: "kicker" }, "Shardline explain", themeChoice()), h("h1", {}, data.title), facts(data.facts)),
  navigation(sections), ...sections, h("footer", {}, "Sizes and bytes are derived from the config; nothing was run. Arrow keys move through the focused picture."));
