// Pictures without axes: a pipeline's actions, the mesh and its communication, heat maps, bars by rank.
"use strict";

const KINDS = { F: ["forward", "c0"], B: ["backward", "c2"], I: ["input gradient", "c4"], W: ["weight gradient", "pp"] };

// ---- pipeline -----------------------------------------------------------------------------------------------------

// `charts`: {title, spans}, with a common scale `total`; a rank's later stages are paler. `show` formats a time.
function gantt(holder, { charts, ranks, total, show }) {
  const [left, rowHeight, head] = [64, 24, 24];
  const width = Math.max(holder.clientWidth, 480);
  const scale = (width - left - 8) / total;
  const height = charts.length * (head + ranks.length * (rowHeight + 4) + 12) + 18;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": charts.map((one) => one.title).join("; ") });
  const marks = [];
  let top = 0;
  for (const { title, spans } of charts) {
    picture.append(svg("text", { x: 0, y: top + 15, "font-weight": 600 }, title));
    top += head;
    spans.forEach((row, place) => {
      const y = top + place * (rowHeight + 4);
      const stages = [...new Set(row.map(([, stage]) => stage))].sort((a, b) => a - b);
      picture.append(svg("text", { x: 0, y: y + 16, class: "dim" }, `rank ${ranks[place]}`),
        svg("rect", { x: left, y, width: total * scale, height: rowHeight, fill: color("grid"), rx: 2 }));
      for (const [kind, stage, micro, start, end] of row) {
        const wide = Math.max((end - start) * scale, 1);
        const paint = between(color(KINDS[kind][1]), color("card"), Math.min(0.6, 0.3 * stages.indexOf(stage)));
        const node = svg("rect", { x: left + start * scale, y, width: Math.max(wide - 0.75, 0.75), height: rowHeight, fill: paint, rx: 1.5 });
        picture.append(node);
        const name = `${stage}${kind}${micro}`;
        if (wide > 8 * name.length) {
          picture.append(svg("text", { x: left + start * scale + wide / 2, y: y + 16, "text-anchor": "middle", "pointer-events": "none",
            style: `fill:${color("card")};font-size:10.5px` }, name));
        }
        marks.push({ node, tip: () => [tipTitle(`rank ${ranks[place]}, ${KINDS[kind][0]}`),
          tipRow(paint, `stage ${stage}, micro-batch ${micro}`, show(end - start)), tipRow(null, "begins at", show(start))] });
      }
    });
    top += ranks.length * (rowHeight + 4) + 12;
  }
  picture.append(svg("line", { x1: left, x2: left + total * scale, y1: top - 3, y2: top - 3, stroke: color("line-strong") }),
    svg("text", { x: left, y: top + 13, class: "dim" }, "0"),
    svg("text", { x: left + total * scale, y: top + 13, class: "dim", "text-anchor": "end" }, show(total)));
  const kinds = [...new Set(charts.flatMap((one) => one.spans.flat().map(([kind]) => kind)))];
  holder.append(h("div", { class: "scroll" }, picture), h("div", { class: "legend" },
    kinds.map((kind) => h("span", {}, swatch(color(KINDS[kind][1])), KINDS[kind][0])),
    h("span", {}, swatch(color("grid")), "idle")));
  inspectable(holder, marks);
}

// ---- mesh ---------------------------------------------------------------------------------------------------------

const AXIS_NAMES = { tp: "tensor (tp)", cp: "context (cp)", dp_shard: "sharded data (dp_shard)", dp_replicate: "replicas (dp_replicate)",
  pp: "pipeline (pp)", ep: "experts (ep)", etp: "expert tensors (etp)", expert_shard: "sharded experts (expert_shard)" };
const MOST_BOXES = 8; // along each side of the drawing
const axisColor = (axis) => color({ etp: "tp", expert_shard: "dp_replicate" }[axis] || axis);

// Stages side by side; in each, a row for every data rank and a column for every context and tensor rank.
function meshPlaces({ degrees, ranks }, room) {
  const [box, high, gap, rowGap, left] = [96, 44, 68, 34, 30];
  const columns = Math.min(degrees.cp * degrees.tp, MOST_BOXES);
  const stageWidth = columns * (box + gap) + 24;
  const places = new Map();
  for (const { rank, at } of ranks) {
    const column = at.cp * degrees.tp + at.tp;
    const row = at.dp_replicate * degrees.dp_shard + at.dp_shard;
    if (column >= MOST_BOXES || row >= MOST_BOXES || at.pp >= MOST_BOXES) continue;
    places.set(rank, { x: left + at.pp * stageWidth + column * (box + gap), y: 26 + row * (high + rowGap), column, row, at });
  }
  const rows = Math.min(degrees.dp_replicate * degrees.dp_shard, MOST_BOXES);
  const width = left + Math.min(degrees.pp, MOST_BOXES) * stageWidth;
  const bows = degrees.cp * degrees.tp > 2 || degrees.pp > 1; // below the last row
  return { places, box, high, width, height: 30 + rows * (high + rowGap) - (bows ? 8 : rowGap - 4), zoom: Math.max(1, Math.min(1.25, room / width)) };
}

// `sentName`: which bytes the numbers are, such as "in step 80".
function meshMap(holder, mesh, sentName) {
  const { places, box, high, width, height, zoom } = meshPlaces(mesh, holder.clientWidth);
  const picture = svg("svg", { width: width * zoom, height: height * zoom, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": "Ranks, and the groups in which they communicate" });
  const marks = [];
  const sentBy = new Map(mesh.ranks.map((one) => [one.rank, one.sent]));
  const most = Math.max(1, ...mesh.ranks.flatMap((one) => Object.values(one.sent)));
  const stages = new Set();
  for (const { at, x } of places.values()) {
    if (mesh.degrees.pp > 1 && !stages.has(at.pp)) picture.append(svg("text", { x, y: 14, class: "dim" }, `pipeline position ${at.pp}`));
    stages.add(at.pp);
  }
  const labels = [];
  const pairs = Object.entries(mesh.groups).flatMap(([name, groups]) => groups.flatMap((group) => group.slice(1).map((to, index) =>
    ({ name, group, index: index + 1, from: places.get(group[index]), to: places.get(to) })))).filter(({ from, to }) => from && to);
  const lanes = {}; // axes whose lines run in parallel lie side by side
  for (const pair of pairs) {
    pair.way = wayOf(pair.from, pair.to, box);
    const same = (lanes[pair.way] ??= []);
    if (!same.includes(pair.name)) same.push(pair.name);
  }
  pairs.forEach(({ name, group, index, from, to, way }) => {
    const sent = sentBy.get(group[index - 1])[name] || 0;
    const { path, x, y, anchor = "middle" } = EDGES[way](from, to, box, high, lanes[way].indexOf(name), lanes[way].length);
    const node = svg("path", { d: path, fill: "none", stroke: axisColor(name), "stroke-linecap": "round",
      "stroke-width": sent ? (1.5 + 4 * Math.sqrt(sent / most)).toFixed(1) : 1.5, opacity: sent ? 0.85 : 0.4 });
    picture.append(node);
    if (sent && x != null && places.size <= 16) labels.push(svg("text", { x, y, class: "dim", "text-anchor": anchor, "pointer-events": "none", style: "font-size:10px" }, format.bytes(sent)));
    marks.push({ node, tip: () => [tipTitle(AXIS_NAMES[name]), h("div", {}, `ranks ${group.join(", ")}`),
      tipRow(axisColor(name), `rank ${group[index - 1]} sends ${sentName}`, sent ? format.bytes(sent) : "not counted")] });
  });
  for (const { rank, at, holds, sent } of mesh.ranks) {
    const place = places.get(rank);
    if (!place) continue;
    const node = svg("rect", { x: place.x, y: place.y, width: box, height: high, rx: 5, fill: color("card"), stroke: color("line-strong") });
    const centred = { x: place.x + box / 2, "text-anchor": "middle", "pointer-events": "none" };
    const layers = (holds.match(/layers? [\d\-, ]*\d|no layers/) || [""])[0];
    picture.append(node, svg("text", { ...centred, y: place.y + 19, "font-weight": 600 }, `rank ${rank}`),
      svg("text", { ...centred, y: place.y + 34, class: "dim", style: "font-size:10px" }, layers.length > 17 ? `${layers.slice(0, 16)}…` : layers));
    const where = Object.entries(at).filter(([axis]) => mesh.degrees[axis] > 1).map(([axis, value]) => `${axis} ${value}`);
    marks.push({ node, tip: () => [tipTitle(`rank ${rank}: ${where.join(", ")}`), h("div", {}, holds),
      Object.entries(sent).sort((a, b) => b[1] - a[1]).map(([axis, value]) => tipRow(axisColor(axis), `sends over ${axis}`, format.bytes(value)))].flat() });
  }
  picture.append(...labels);
  const hidden = mesh.ranks.length - places.size;
  const totals = Object.entries(mesh.groups).map(([name, groups]) => {
    const counted = mesh.ranks.map((one) => one.sent[name] || 0).filter((size) => size > 0);
    const mean = counted.reduce((sum, size) => sum + size, 0) / Math.max(counted.length, 1);
    return h("span", {}, swatch(axisColor(name), "line"), `${AXIS_NAMES[name]}: ${groups[0].length} ranks${mean ? `, ${format.bytes(mean)} from each` : ""}`);
  });
  fill(holder, h("div", { class: "scroll" }, picture), h("div", { class: "legend" }, totals),
    hidden > 0 ? h("p", { class: "note" }, `${format.whole(hidden)} more ranks repeat this pattern; the table has them all.`) : null);
  inspectable(holder, marks);
}

// The shape of the line between two boxes: straight between neighbours, else a bow around the boxes in between.
function wayOf(from, to, box) {
  if (from.y === to.y) return to.x - from.x < 2.2 * box ? "right" : "rightBow";
  if (from.x === to.x) return Math.abs(from.row - to.row) === 1 ? "down" : "downBow";
  return "across";
}

// The path of a line in one of `count` lanes, and the position of its label; inner lanes have none.
const EDGES = {
  right: (from, to, box, high, lane, count) => {
    const y = from.y + high / 2 + 16 * (lane - (count - 1) / 2) + 2;
    return { path: `M${from.x + box} ${y}L${to.x} ${y}`, x: (from.x + box + to.x) / 2, y: y - 4 };
  },
  rightBow: (from, to, box, high, lane) => {
    const [start, end, low] = [from.x + box / 2 + 9 * lane, to.x + box / 2 - 9 * lane, from.y + high];
    return { path: `M${start} ${low}Q${(start + end) / 2} ${low + 34 - 10 * lane} ${end} ${low}`, x: lane ? null : (start + end) / 2, y: low + 28 };
  },
  down: (from, to, box, high, lane, count) => {
    const x = from.x + box / 2 + 30 * (lane - (count - 1) / 2);
    const outer = lane === 0 && count > 1 ? { x: x - 5, anchor: "end" } : lane === count - 1 ? { x: x + 5, anchor: "start" } : { x: null };
    return { path: `M${x} ${from.y + high}L${x} ${to.y}`, y: (from.y + high + to.y) / 2 + 4, ...outer };
  },
  downBow: (from, to, box, high, lane) => {
    const y = (from.y + to.y + high) / 2;
    return { path: `M${from.x} ${from.y + high / 2}Q${from.x - 34 - 8 * lane} ${y} ${to.x} ${to.y + high / 2}`, x: lane ? null : from.x - 14, y };
  },
  across: (from, to, box, high) => ({ path: `M${from.x + box / 2} ${from.y + high}L${to.x + box / 2} ${to.y}`, x: (from.x + to.x + box) / 2, y: (from.y + high + to.y) / 2 }),
};

function meshTable(mesh) {
  const axes = Object.keys(mesh.degrees).filter((name) => mesh.degrees[name] > 1);
  const sent = [...new Set(mesh.ranks.flatMap((one) => Object.keys(one.sent)))];
  return { columns: [["rank", format.whole], ...axes.map((name) => [name, format.whole]), ["holds", null], ...sent.map((name) => [`sent over ${name}`, format.bytes])],
    rows: mesh.ranks.map((one) => [one.rank, ...axes.map((name) => one.at[name]), one.holds, ...sent.map((name) => one.sent[name] ?? null)]) };
}

// ---- shards -------------------------------------------------------------------------------------------------------

const MATRIX = { width: 150, high: 92, low: 22, most: 12 }; // `most`: pieces that are named
// Matrices side by side, each split into the pieces that ranks hold; the piece of the first rank is filled.
function matrices(holder, { matrices: all }) {
  const marks = [];
  const boxes = all.map((one) => {
    const [down, right] = sides(one);
    const height = down == null ? MATRIX.low : MATRIX.high;
    const extent = (piece, dimension, size) => (dimension == null ? [0, size] : piece.region[dimension].map((at) => (at / one.whole[dimension]) * size));
    const picture = svg("svg", { width: MATRIX.width, height: height + 2, role: "img", "aria-label": `${one.name}: ${one.cut}` });
    one.pieces.forEach((piece, index) => {
      const [[top, bottom], [left, end]] = [extent(piece, down, height), extent(piece, right, MATRIX.width - 2)];
      if (bottom <= top || end <= left) return;
      const node = svg("rect", { x: left + 1, y: top + 1, width: end - left, height: bottom - top, fill: index ? color("card") : color("accent-soft"), stroke: color(index ? "line-strong" : "accent") });
      picture.append(node);
      const name = piece.ranks;
      if (one.pieces.length <= MATRIX.most && bottom - top > 12 && end - left > 7 * name.length) {
        picture.append(svg("text", { x: (left + end) / 2 + 1, y: (top + bottom) / 2 + 5, "text-anchor": "middle", "pointer-events": "none", class: "dim", style: "font-size:10.5px" }, name));
      }
      const region = piece.region.map(([start, stop], at) => `${one.dimensions[at] || `dimension ${at}`} ${format.whole(start)} to ${format.whole(stop - 1)}`);
      marks.push({ node, tip: () => [tipTitle(`${one.name} on ${/^\d+$/.test(name) ? "rank" : "ranks"} ${name}`), ...region.map((text) => h("div", {}, text))] });
    });
    const note = `${one.whole.join(" x ")}; ${one.cut}${one.more > 0 ? `; ${format.whole(one.more)} more pieces` : ""}`;
    return h("div", { class: "matrix" }, h("b", {}, ...breakable(one.name)), picture, h("span", { class: "note" }, note));
  });
  holder.append(h("div", { class: "matrices" }, boxes));
  inspectable(holder, marks);
}

// The two dimensions of a drawing, down and to the right: prefer those that are split, then the first and the last.
function sides({ whole, axes }) {
  if (whole.length === 1) return [null, 0];
  const wanted = [...new Set([...axes, 0, whole.length - 1, ...whole.keys()])];
  return wanted.slice(0, 2).sort((a, b) => a - b);
}

// ---- heat maps and bars -------------------------------------------------------------------------------------------

// `values[row][column]`; `name(row, column)` titles a cell. Colours run from `low` to the highest value.
function heatMap(holder, { rows, columns, values, low, show, name, columnName }) {
  const left = 74;
  const width = Math.max(holder.clientWidth, left + 4 * columns.length);
  const cell = (width - left) / columns.length;
  const high = Math.max(12, Math.min(26, 420 / rows.length));
  const top = 4;
  const highest = Math.max(low + 1e-9, ...values.flat().filter((value) => value != null));
  const paint = (value) => (value == null ? color("grid") : between(color("heat0"), color("heat1"), Math.max(0, (value - low) / (highest - low))));
  const height = top + rows.length * high + 24;
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": columnName });
  const marks = [];
  rows.forEach((row, y) => {
    if (high >= 12) picture.append(svg("text", { x: 0, y: top + y * high + high / 2 + 4, class: "dim" }, row));
    columns.forEach((column, x) => {
      const value = values[y][x];
      const node = svg("rect", { x: left + x * cell, y: top + y * high, width: Math.max(cell - (cell > 6 ? 1 : 0), 0.5), height: high - 1, fill: paint(value) });
      picture.append(node);
      marks.push({ node, tip: () => [tipTitle(name(y, x)), tipRow(paint(value), "", show(value))] });
    });
  });
  const every = Math.max(1, Math.ceil(columns.length / Math.floor((width - left) / 54)));
  columns.forEach((column, x) => {
    if (x % every === 0) picture.append(svg("text", { x: left + (x + 0.5) * cell, y: top + rows.length * high + 15, class: "dim", "text-anchor": "middle" }, column));
  });
  holder.append(h("div", { class: "scroll" }, picture), h("div", { class: "legend" }, h("span", {}, columnName),
    h("span", {}, swatch(color("heat0")), show(low)), h("span", {}, swatch(color("heat1")), show(highest))));
  inspectable(holder, marks);
}

// One bar for each rank, stacked from parts {label, paint} with `values[rank][part]`.
function rankBars(holder, { names, parts, values, show, left = 74 }) {
  const [right, high] = [70, Math.max(12, Math.min(24, 640 / names.length))];
  const width = holder.clientWidth;
  const totals = values.map((row) => row.reduce((sum, value) => sum + value, 0));
  const scale = (width - left - right) / Math.max(...totals, 1e-9);
  const height = names.length * (high + 4);
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "One bar for each rank" });
  const marks = [];
  names.forEach((name, place) => {
    const y = place * (high + 4);
    let x = left;
    picture.append(svg("text", { x: 0, y: y + high / 2 + 4, class: "dim" }, name));
    parts.forEach((part, at) => {
      const value = values[place][at];
      if (!(value > 0)) return;
      const node = svg("rect", { x, y, width: Math.max(value * scale - 0.5, 0.5), height: high, fill: part.paint });
      x += value * scale;
      picture.append(node);
      marks.push({ node, tip: () => [tipTitle(name), tipRow(part.paint, part.label, `${show(value)}  ${format.percent(value / totals[place])}`)] });
    });
    picture.append(svg("text", { x: x + 6, y: y + high / 2 + 4 }, show(totals[place])));
  });
  holder.append(picture, h("div", { class: "legend" }, parts.map((part) => h("span", {}, swatch(part.paint, part.kind), part.label))));
  inspectable(holder, marks);
}
