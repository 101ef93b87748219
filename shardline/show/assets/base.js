// What every page needs: elements, formatted numbers, tables with CSV, the tooltip and the colour theme.
"use strict";

let data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const page = document.getElementById("page");

// ---- elements -----------------------------------------------------------------------------------------------------

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(3).filter((child) => child != null && child !== false));
  return node;
}

const h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// ---- numbers ------------------------------------------------------------------------------------------------------

const MISSING = "–";

function inUnits(value, units, digits) {
  let [name, size] = units[units.length - 1];
  for (const [unit, of] of units) {
    if (Math.abs(value) >= of) { [name, size] = [unit, of]; break; }
  }
  return `${significant(value / size, digits)} ${name}`.trim();
}

function significant(value, digits = 3) {
  if (value === 0) return "0";
  const places = Math.min(8, Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value)))));
  return value.toLocaleString("en-US", { minimumFractionDigits: 0, maximumFractionDigits: places });
}

const guarded = (format) => (value) => (value == null || Number.isNaN(value) ? MISSING : format(value));
const format = {
  whole: guarded((value) => Math.round(value).toLocaleString("en-US")),
  number: guarded((value) => significant(value, 4)),
  loss: guarded((value) => value.toFixed(4)),
  small: guarded((value) => (value !== 0 && (Math.abs(value) < 0.01 || Math.abs(value) >= 1e5)
    ? value.toExponential(2).replace(/\.?0+e/, "e") : significant(value, 4))),
  percent: guarded((value) => `${(100 * value).toFixed(1)} %`),
  compact: guarded((value) => inUnits(value, [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3], ["", 1]], 3).replace(" ", "")),
  gib: guarded((value) => `${value.toFixed(value < 10 ? 2 : 1)} GiB`),
  gibTick: guarded((value) => (value === 0 ? "0" : `${significant(value, 3)} GiB`)),
  bytes: guarded((value) => inUnits(value, [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["bytes", 1]], 3)),
  seconds: guarded((value) => (value === 0 ? "0" : inUnits(value, [["s", 1], ["ms", 1e-3], ["µs", 1e-6]], 3))),
  duration: guarded((value) => {
    const whole = Math.round(value);
    const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
    if (days) return `${days} d ${hours} h`;
    if (hours) return minutes ? `${hours} h ${minutes} min` : `${hours} h`;
    if (!minutes) return `${whole} s`;
    return whole % 60 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
  }),
  when: guarded((value) => new Date(1000 * value).toLocaleString("sv-SE").slice(0, 19)),
  text: guarded((value) => String(value)),
};

// ---- theme --------------------------------------------------------------------------------------------------------

const redraws = new Set(); // functions that redraw a card with other colours or another width
const darkScheme = matchMedia("(prefers-color-scheme: dark)");
const onPaper = matchMedia("print");
let wish = "auto";

function applyTheme() {
  const dark = !onPaper.matches && (wish === "dark" || (wish === "auto" && darkScheme.matches));
  const theme = dark ? "dark" : "light";
  if (root.dataset.theme === theme) return;
  root.dataset.theme = theme;
  redrawAll();
}

function redrawAll() {
  for (const redraw of redraws) redraw();
}

const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

// A mix of two theme colours, as #rrggbb.
function between(first, second, share) {
  const parts = [first, second].map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
  const mixed = parts[0].map((value, at) => Math.round(value + (parts[1][at] - value) * share));
  return `#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}

function themeChoice() {
  return choice("Colours", [["auto", "Auto"], ["light", "Light"], ["dark", "Dark"]], wish, (value) => {
    wish = value;
    applyTheme();
  });
}

darkScheme.addEventListener("change", applyTheme);
onPaper.addEventListener("change", applyTheme);
addEventListener("beforeprint", () => { root.dataset.theme = "light"; redrawAll(); });
addEventListener("afterprint", applyTheme);

// ---- small controls -----------------------------------------------------------------------------------------------

function choice(label, options, chosen, onChoice) {
  const group = h("span", { class: "choice", role: "group", "aria-label": label });
  for (const [value, text] of options) {
    const button = h("button", { type: "button", "aria-pressed": String(value === chosen), "data-value": value }, text);
    button.addEventListener("click", () => {
      for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
      onChoice(value);
    });
    group.append(button);
  }
  return group;
}

function toggle(text, pressed, onToggle) {
  const button = h("button", { type: "button", "aria-pressed": String(pressed) }, text);
  button.addEventListener("click", () => {
    pressed = !pressed;
    button.setAttribute("aria-pressed", String(pressed));
    onToggle(pressed);
  });
  return button;
}

const swatch = (paint, kind = "") => h("i", { class: `swatch ${kind}`, style: `background-color:${paint}` });

// ---- tooltip ------------------------------------------------------------------------------------------------------

const tip = h("div", { id: "tip", role: "status", hidden: true });
document.body.append(tip);

function showTip(x, y, ...content) {
  tip.replaceChildren(...content.flat());
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
  tip.style.left = `${Math.max(4, Math.min(left, innerWidth - width - 4))}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - height - 4))}px`;
}

const hideTip = () => { tip.hidden = true; };
const tipTitle = (text) => h("b", {}, text);
const tipRow = (paint, label, value) => h("div", { class: "row" }, paint ? swatch(paint) : null, label, h("b", {}, value));

addEventListener("scroll", hideTip, { passive: true });
addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

// Hover, touch and arrow keys over the marks of a drawing: `marks` are {node, tip}, where tip() returns the content.
function inspectable(holder, marks) {
  if (!marks.length) return;
  let at = -1;
  const places = new Map(marks.map((mark, index) => [mark.node, index]));
  const show = (index, x, y) => {
    if (at >= 0) marks[at].node.classList.remove("at");
    at = index;
    marks[at].node.classList.add("at");
    const box = marks[at].node.getBoundingClientRect();
    showTip(x ?? box.left + box.width / 2, y ?? box.top + box.height / 2, marks[at].tip());
  };
  const leave = () => {
    if (at >= 0) marks[at].node.classList.remove("at");
    hideTip();
  };
  holder.tabIndex = 0;
  holder.onpointermove = (event) => {
    const index = places.get(event.target.closest("[data-mark]"));
    if (index === undefined) leave();
    else show(index, event.clientX, event.clientY);
  };
  holder.onpointerdown = holder.onpointermove;
  holder.onpointerleave = leave;
  holder.onblur = leave;
  holder.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show((at + step + marks.length) % marks.length);
  };
  for (const { node } of marks) node.setAttribute("data-mark", "");
}

// ---- tables and CSV -----------------------------------------------------------------------------------------------

const MOST_TABLE_ROWS = 300;

// Columns are [name, format]; a format of null is text.
function table(columns, rows, tall = false) {
  const kinds = columns.map(([, show]) => (show ? "number" : ""));
  const content = (value, at) => (columns[at][1] ? columns[at][1](value) : breakable(format.text(value)));
  const cell = (value, at) => h("td", { class: kinds[at] }, value instanceof Node ? value : content(value, at));
  const shown = rows.slice(0, MOST_TABLE_ROWS);
  const more = rows.length - shown.length;
  return h("div", { class: tall ? "table tall" : "table", tabindex: "0" },
    h("table", {},
      h("thead", {}, h("tr", {}, columns.map(([name], at) => h("th", { class: kinds[at], scope: "col" }, name)))),
      h("tbody", {}, shown.map((row) => h("tr", {}, row.map(cell))))),
    more > 0 ? h("p", { class: "note" }, `${format.whole(more)} more rows are in the CSV file.`) : null);
}

function csvText(columns, rows) {
  const quoted = (value) => {
    const text = value == null ? "" : String(value instanceof Node ? value.textContent : value);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [columns.map(([name]) => name), ...rows].map((row) => row.map(quoted).join(",")).join("\n") + "\n";
}

function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  const link = h("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// ---- cards --------------------------------------------------------------------------------------------------------

const openTables = new Set(); // ids of cards whose table is open, kept when new data arrives

// A picture with the table behind it. `content()` returns {columns, rows}; `draw(holder)` fills the picture.
function card({ id, title, note, wide, tools = [], content, draw, label }) {
  const plot = h("div", { class: "plot", role: "group", "aria-label": label || title });
  const body = h("div", { class: "body" }, plot);
  let asTable = openTables.has(id);
  const redraw = () => {
    if (asTable) {
      const { columns, rows } = content();
      body.replaceChildren(table(columns, rows));
    } else {
      body.replaceChildren(plot);
      plot.replaceChildren();
      draw(plot);
    }
  };
  const csv = () => {
    const { columns, rows } = content();
    download(`${id}.csv`, csvText(columns, rows));
  };
  const all = [...tools, toggle("Table", asTable, (pressed) => {
    asTable = pressed;
    openTables[pressed ? "add" : "delete"](id);
    redraw();
  }),
    h("button", { type: "button", onclick: csv, "aria-label": `${title}: download as CSV` }, "CSV")];
  const figure = h("figure", { class: wide ? "card wide" : "card", id: `card-${id}` },
    h("div", { class: "card-head" }, h("h3", {}, title), h("div", { class: "tools" }, all)),
    note ? h("p", { class: "note" }, note) : null, body);
  figure.redraw = redraw;
  redraws.add(redraw);
  whenSized(figure, redraw);
  return figure;
}

// Draw as soon as the element has a width, and again whenever that changes.
function whenSized(element, redraw) {
  let width = 0;
  new ResizeObserver(([entry]) => {
    const now = Math.round(entry.contentRect.width);
    if (now !== width) { width = now; redraw(); }
  }).observe(element);
}

function section(id, title, lead, tools, ...children) {
  return h("section", { id }, h("div", { class: "section-head" }, h("h2", {}, title), h("div", { class: "tools" }, tools)),
    lead ? h("p", { class: "lead" }, lead) : null, ...children);
}

const navigation = (sections) =>
  h("nav", { "aria-label": "Sections" }, sections.map((one) => h("a", { href: `#${one.id}` }, one.querySelector("h2").textContent)));

// Append the children that exist.
const fill = (holder, ...children) => holder.append(...children.filter((child) => child != null));

// A name that may break after its dots and underscores.
const breakable = (name) => name.split(/(?<=[._])/).flatMap((part) => [part, h("wbr")]);

function facts(rows) {
  return h("dl", { class: "facts" }, rows.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value))));
}
