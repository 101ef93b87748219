// Charts with axes, drawn by uPlot: lines over steps, stacked bars, events on a time axis.
"use strict";

const chartHeight = () => (innerWidth < 760 ? 210 : 250);
const FONT = "11.5px system-ui, sans-serif";
const crosshair = uPlot.sync("steps");

function axis(show, more = {}) {
  const dim = color("dim");
  return { stroke: dim, font: FONT, grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("line"), width: 1, size: 4 },
    values: (plot, values) => values.map((value) => (value == null ? "" : show(value))), ...more };
}

// Whole numbers between the ticks of steps, tokens and seconds.
const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((first) => first * 10 ** power)).flat();
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, ...WHOLE.slice(0, 15).map((days) => 86400 * days)];

// The label below a horizontal axis.
const below = (text) => ({ size: 26, label: text, labelFont: FONT, labelSize: 16, labelGap: 0 });

// As wide as its longest label.
function labelWidth(plot, values) {
  if (!values) return 44;
  plot.ctx.save();
  plot.ctx.font = FONT;
  const widest = Math.max(...values.map((text) => plot.ctx.measureText(text || "").width));
  plot.ctx.restore();
  return Math.ceil(widest) + 16;
}

// Show a tooltip for the point under the pointer, or the one chosen with arrow keys. `rows(index)` returns its content.
function inspector(holder, rows) {
  let active = false;
  const at = (plot) => {
    if (!active || plot.cursor.idx == null || plot.cursor.left < 0) return hideTip();
    const box = plot.over.getBoundingClientRect();
    showTip(box.left + plot.cursor.left, box.top + plot.cursor.top, rows(plot.cursor.idx));
  };
  const ready = (plot) => {
    const move = (index) => {
      active = true;
      plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: plot.over.clientHeight / 3 });
    };
    plot.over.addEventListener("pointerenter", () => { active = true; });
    plot.over.addEventListener("pointerleave", () => { active = false; hideTip(); });
    holder.tabIndex = 0;
    holder.onkeydown = (event) => {
      const last = plot.data[0].length - 1;
      const now = plot.cursor.idx ?? 0;
      const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: last }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      move(Math.max(0, Math.min(last, next)));
    };
    holder.onblur = () => { active = false; plot.setCursor({ left: -10, top: -10 }); hideTip(); };
  };
  return { hooks: { ready, setCursor: at } };
}

function legend(entries, onToggle) {
  return h("div", { class: "legend" }, entries.map(({ label, paint, kind, shown = true }, index) => {
    const mark = swatch(paint, kind);
    if (!onToggle) return h("span", {}, mark, label);
    const button = h("button", { type: "button", "aria-pressed": String(shown) }, mark, label);
    button.addEventListener("click", () => {
      const pressed = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(pressed));
      onToggle(index, pressed);
    });
    return button;
  }));
}

// ---- lines --------------------------------------------------------------------------------------------------------

// Exponential moving average that does not start at zero.
function smoothed(values, weight) {
  let [mean, total] = [0, 0];
  return values.map((value) => {
    if (value == null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return mean / total;
  });
}

// `lines`: {label, xs, ys, paint, dash, points, faint}; a faint one is not in the legend and the tooltip.
function lineChart(holder, { lines, x, y, log = false, fromZero = false, height = chartHeight() }) {
  const drawn = lines.map((line) => {
    const pairs = line.xs.map((value, at) => [value, line.ys[at]]).filter(([value]) => value != null).sort((a, b) => a[0] - b[0]);
    const usable = (value) => (value == null || (log && value <= 0) ? null : value);
    return [pairs.map((pair) => pair[0]), pairs.map((pair) => usable(pair[1]))];
  });
  if (!drawn.some(([xs]) => xs.length)) return holder.append(h("p", { class: "note" }, "No values on this axis."));
  const joined = uPlot.join(drawn);
  const named = lines.map((line, at) => ({ ...line, at: at + 1 })).filter((line) => !line.faint);
  const near = (values, index) => {
    for (const step of [0, -1, 1, -2, 2, -3, 3]) if (values[index + step] != null) return values[index + step];
    return null;
  };
  const rows = (index) => [tipTitle(`${x.name} ${x.show(joined[0][index])}`),
    ...named.map((line) => [line, near(joined[line.at], index)]).filter(([, value]) => value != null)
      .map(([line, value]) => tipRow(line.paint, line.label, y.show(value)))];
  const range = fromZero && !log ? (plot, low, high) => [Math.min(0, low), high > 0 ? high * 1.08 : 1] : undefined;
  const plot = new uPlot({
    width: holder.clientWidth, height,
    legend: { show: false },
    cursor: { sync: { key: x.sync ? crosshair.key : null }, points: { size: 6 }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { distr: log ? 3 : 1, ...(range ? { range } : {}) } },
    axes: [axis(x.tick || x.show, { space: 70, incrs: x.incrs || WHOLE, ...below(x.title) }), axis(y.tick || y.show, { size: labelWidth })],
    series: [{}, ...lines.map((line) => ({
      label: line.label, stroke: line.faint ? `${line.paint}55` : line.paint, width: line.faint ? 1 : 1.75, dash: line.dash,
      spanGaps: true, points: { show: line.points || joined[0].length < 2, size: 6, fill: line.paint } }))],
    plugins: [inspector(holder, rows)],
  }, joined, holder);
  if (named.length > 1) {
    holder.append(legend(named.map((line) => ({ label: line.label, paint: line.paint, kind: line.points ? "" : "line" })),
      (index, shown) => {
        plot.setSeries(named[index].at, { show: shown });
        lines.forEach((line, at) => { if (line.faint && line.of === named[index].label) plot.setSeries(at + 1, { show: shown }); });
      }));
  }
  return plot;
}

// ---- stacked bars -------------------------------------------------------------------------------------------------

// `parts`: {label, paint, values}, the first at the bottom; bars stand side by side, whatever the distance between their labels.
function stackedBars(holder, { labels, parts, x, show, height = chartHeight() + 30 }) {
  const count = labels.length;
  let sums = new Array(count).fill(0);
  const tops = parts.map((part) => (sums = sums.map((sum, at) => sum + part.values[at])));
  const total = sums;
  const rows = (index) => [tipTitle(`${x} ${labels[index]}: ${show(total[index])}`),
    ...parts.map((part) => [part, part.values[index]]).filter(([, value]) => value > 0).reverse()
      .map(([part, value]) => tipRow(part.paint, part.label, `${show(value)}  ${format.percent(value / total[index])}`))];
  const bars = uPlot.paths.bars({ size: [0.86, 64], gap: 0 });
  const order = parts.map((part, at) => at).reverse(); // the tallest first, lower ones in front of it
  const plot = new uPlot({
    width: holder.clientWidth, height,
    legend: { show: false },
    cursor: { points: { show: false }, drag: { x: false, y: false }, y: false },
    scales: { x: { time: false, range: [-0.6, count - 0.4] }, y: { range: (of, low, high) => [0, high * 1.04 || 1] } },
    axes: [
      axis((value) => (Number.isInteger(value) && labels[value] !== undefined ? String(labels[value]) : ""),
        { space: 46, incrs: [1, 2, 5, 10, 20, 50, 100], grid: { show: false }, ...below(x) }),
      axis(show, { size: labelWidth }),
    ],
    series: [{}, ...order.map((at) => ({ label: parts[at].label, fill: parts[at].paint, stroke: parts[at].paint, width: 0,
      paths: bars, points: { show: false } }))],
    plugins: [inspector(holder, rows)],
  }, [labels.map((_, at) => at), ...order.map((at) => tops[at])], holder);
  holder.append(legend(parts.map((part) => ({ label: part.label, paint: part.paint, kind: part.kind }))));
  return plot;
}

// ---- events -------------------------------------------------------------------------------------------------------

// `lanes`: [name, colour]; `events`: {time, lane, text}; `spans`: [from, to], the times in which the run trained.
function eventChart(holder, { lanes, events, spans, from, to }) {
  const sorted = [...events].sort((a, b) => a.time - b.time);
  const times = [...new Set(sorted.map((event) => event.time - from))];
  const column = (lane) => times.map((time) => (sorted.some((event) => event.lane === lane && event.time - from === time) ? lanes.length - 1 - lane : null));
  const paints = lanes.map(([, name]) => color(name));
  const rows = (index) => {
    const here = sorted.filter((event) => event.time - from === times[index]);
    return [tipTitle(`${format.when(here[0].time)}, after ${format.duration(times[index])}`),
      ...here.map((event) => h("div", {}, swatch(paints[event.lane]), " ", event.text))];
  };
  const strip = (plot) => {
    const { ctx, bbox } = plot;
    const middle = plot.valToPos(lanes.length - 1, "y", true);
    ctx.save();
    ctx.fillStyle = `${paints[0]}40`;
    for (const [start, end] of spans) {
      const [left, right] = [start - from, end - from].map((value) => plot.valToPos(value, "x", true));
      ctx.fillRect(Math.max(bbox.left, left), middle - 5 * devicePixelRatio, Math.max(right - left, 2), 10 * devicePixelRatio);
    }
    ctx.restore();
  };
  const length = Math.max(to - from, 1);
  return new uPlot({
    width: holder.clientWidth, height: 52 + 28 * lanes.length,
    legend: { show: false },
    cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
    scales: { x: { time: false, range: (plot, low, high) => (low === times[0] && high === times[times.length - 1] ? [-0.02 * length, length * 1.02] : [low, high]) },
      y: { range: [-0.7, lanes.length - 0.3] } },
    axes: [axis(format.duration, { space: 80, incrs: CLOCK, ...below("time since the start") }),
      axis((value) => (lanes[lanes.length - 1 - value] || [""])[0], { size: labelWidth, splits: () => lanes.map((_, at) => at), grid: { stroke: color("grid") } })],
    series: [{}, ...lanes.map(([name], at) => ({ label: name, stroke: paints[at], width: 0, paths: () => null,
      points: { show: true, size: 9, width: 1.5, fill: paints[at], stroke: color("card") } }))],
    hooks: { drawAxes: [strip] },
    plugins: [inspector(holder, rows)],
  }, [times, ...lanes.map((_, lane) => column(lane))], holder);
}
