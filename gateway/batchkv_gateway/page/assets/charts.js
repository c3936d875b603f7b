// Charts as SVG. Each has a title, a description for screen readers, and its numbers as a table.

import { h } from "./dom.js";
import { count, hours, iso, wholeMoment } from "./format.js";

const LEFT = 58;
const RIGHT = 12;
const TOP = 12;
const BOTTOM = 26;
const HEIGHT = 190;
const MAX_TABLE_ROWS = 96;
const MAX_BAR = 60;

function chartWidth() {
  return window.innerWidth < 640 ? 360 : 560;
}

// Round numbers from 0 to at least `most`: 0, 20, 40, 60.
function ticksTo(most) {
  const rough = Math.max(most, 1e-9) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const ticks = [];
  for (let tick = 0; tick < most + step; tick += step) ticks.push(tick);
  return ticks;
}

function timeTicks(begin, end, most) {
  const steps = [60, 300, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400];
  const step = steps.find((each) => (end - begin) / each <= most) ?? 86_400 * 7;
  const shift = new Date(begin * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let tick = Math.ceil((begin - shift) / step) * step + shift; tick <= end; tick += step) {
    ticks.push(tick);
  }
  return ticks;
}

// series: [{ name, points: [[seconds, value or null], ...] }], all with the same times.
export function timeChart({ id, title, note, series, format, span }) {
  const times = series[0]?.points.map(([at]) => at) ?? [];
  if (!times.length) {
    return figure(id, title, note, h("p", { class: "empty" }, "No figures yet."));
  }
  const [begin, end] = span ?? [times[0], Math.max(times.at(-1), times[0] + 60)];
  const width = chartWidth();
  const most = Math.max(0, ...series.flatMap((one) => one.points.map(([, value]) => value ?? 0)));
  const ticks = ticksTo(most || 1);
  const x = (at) => LEFT + ((at - begin) / (end - begin)) * (width - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value / ticks.at(-1)) * (HEIGHT - TOP - BOTTOM);
  const drawing = h(
    "svg",
    {
      viewBox: `0 0 ${width} ${HEIGHT}`,
      role: "img",
      "aria-label": `${title}. ${summary(series, format)}`,
    },
    ticks.map((tick) => grid(width, y(tick), format(tick))),
    timeTicks(begin, end, width < 400 ? 4 : 7).map((tick) =>
      h("text", { x: x(tick), y: HEIGHT - 8, class: `axis ${sideOf(x(tick), width)}` }, hours(tick, end - begin)),
    ),
    series.map((one, index) =>
      h("path", { class: `line s${index}`, d: pathOf(one.points, x, y) }),
    ),
  );
  const legend =
    series.length > 1 &&
    h(
      "ul",
      { class: "legend" },
      series.map((one, index) => h("li", { class: `s${index}` }, one.name)),
    );
  return figure(id, title, note, drawing, legend, timeTable(title, series, format));
}

// A label near the edge is written towards the middle.
function sideOf(at, width) {
  return at > width - 40 ? "end" : at < LEFT ? "start" : "middle";
}

function grid(width, at, label) {
  return h(
    "g",
    {},
    h("line", { x1: LEFT, x2: width - RIGHT, y1: at, y2: at, class: "grid" }),
    h("text", { x: LEFT - 6, y: at + 4, class: "axis end" }, label),
  );
}

// A line that is interrupted where a value is null.
function pathOf(points, x, y) {
  let path = "";
  let isDrawing = false;
  points.forEach(([at, value], index) => {
    if (value === null || value === undefined) {
      isDrawing = false;
      return;
    }
    const place = `${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    const isAlone = !isDrawing && (points[index + 1]?.[1] ?? null) === null;
    path += `${isDrawing ? "L" : "M"}${place}${isAlone ? "h0.1" : ""}`;
    isDrawing = true;
  });
  return path;
}

function summary(series, format) {
  return series
    .map((one) => {
      const values = one.points.map(([, value]) => value).filter((value) => value !== null);
      if (!values.length) return `${one.name}: no figures`;
      return `${one.name}: ${format(values.at(-1))} at the end, at most ${format(Math.max(...values))}`;
    })
    .join(". ");
}

function timeTable(title, series, format) {
  const points = series[0].points;
  const step = Math.ceil(points.length / MAX_TABLE_ROWS);
  const rows = points.flatMap(([at], index) =>
    index % step
      ? []
      : [
          h(
            "tr",
            {},
            h("th", { scope: "row" }, h("time", { datetime: iso(at) }, wholeMoment(at))),
            series.map((one) => {
              const value = one.points[index]?.[1];
              return h("td", {}, value === null || value === undefined ? "–" : format(value));
            }),
          ),
        ],
  );
  return table(title, ["Time", ...series.map((one) => one.name)], rows);
}

// bins: [{ from, to, value }]; `format` writes their bounds.
export function histogram({ id, title, note, bins, format, what }) {
  if (!bins.some((bin) => bin.value)) {
    return figure(id, title, note, h("p", { class: "empty" }, "No figures yet."));
  }
  const width = chartWidth();
  const most = Math.max(...bins.map((bin) => bin.value));
  const ticks = ticksTo(most).filter((tick) => Number.isInteger(tick));
  const step = Math.min((width - LEFT - RIGHT) / bins.length, MAX_BAR);
  const y = (value) => HEIGHT - BOTTOM - (value / ticks.at(-1)) * (HEIGHT - TOP - BOTTOM);
  const every = Math.ceil(bins.length / (width < 400 ? 4 : 8));
  const top = bins.find((bin) => bin.value === most);
  const label = `${title}. Most ${what} are between ${format(top.from)} and ${format(top.to)}`;
  const drawing = h(
    "svg",
    { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label },
    ticks.map((tick) => grid(width, y(tick), count(tick))),
    bins.map((bin, index) =>
      h("rect", {
        class: "bar",
        x: LEFT + index * step + 1,
        y: y(bin.value),
        width: Math.max(1, step - 2),
        height: HEIGHT - BOTTOM - y(bin.value),
      }),
    ),
    bins.map(
      (bin, index) =>
        index % every === 0 &&
        h(
          "text",
          { x: LEFT + index * step, y: HEIGHT - 8, class: "axis start" },
          format(bin.from),
        ),
    ),
  );
  const rows = bins.map((bin) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, `${format(bin.from)} to ${format(bin.to)}`),
      h("td", {}, count(bin.value)),
    ),
  );
  return figure(id, title, note, drawing, false, table(title, ["From, to", what], rows));
}

function figure(id, title, note, ...parts) {
  return h(
    "figure",
    { key: id, class: "chart" },
    h("figcaption", {}, title, note && h("span", { class: "note" }, ` ${note}`)),
    parts,
  );
}

function table(title, heads, rows) {
  return h(
    "details",
    {},
    h("summary", {}, "As a table"),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": `${title}, as a table` },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
        h("tbody", {}, rows),
      ),
    ),
  );
}

// A small line without axes, for a card. `label` says what it shows.
export function sparkline(points, label) {
  const values = points.map(([, value]) => value ?? 0);
  if (values.length < 2) return false;
  const [begin, end] = [points[0][0], points.at(-1)[0]];
  const most = Math.max(...values, 1);
  const x = (at) => 2 + ((at - begin) / Math.max(end - begin, 1)) * 196;
  const y = (value) => 42 - (value / most) * 38;
  return h(
    "svg",
    { viewBox: "0 0 200 44", preserveAspectRatio: "none", class: "spark", role: "img", "aria-label": label },
    h("path", { class: "line s0", "vector-effect": "non-scaling-stroke", d: pathOf(points, x, y) }),
  );
}
