// Numbers with units, and times in the viewer's zone.

const locale = navigator.language || "en";
const whole = new Intl.NumberFormat(locale, { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat(locale, { maximumFractionDigits: 1 });
const compact = new Intl.NumberFormat(locale, { notation: "compact", maximumFractionDigits: 1 });
const percentFormat = new Intl.NumberFormat(locale, { style: "percent", maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat(locale, { hour: "2-digit", minute: "2-digit" });
const dayClock = new Intl.DateTimeFormat(locale, {
  month: "short",
  day: "numeric",
  hour: "2-digit",
  minute: "2-digit",
});
const full = new Intl.DateTimeFormat(locale, { dateStyle: "full", timeStyle: "long" });
const DAY = 86_400_000;
const NONE = "–";

export const count = (value) => (isNumber(value) ? whole.format(value) : NONE);
export const short = (value) => (isNumber(value) ? compact.format(value) : NONE);
export const percent = (value) => (isNumber(value) ? percentFormat.format(value) : NONE);
export const rate = (value) => (isNumber(value) ? `${few(value)} tok/s` : NONE);
export const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone;

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

// 3.4 below ten, 34 above.
export function few(value) {
  return Math.abs(value) < 10 ? tenth.format(value) : whole.format(value);
}

export function plural(value, one, many) {
  return `${count(value)} ${value === 1 ? one : (many ?? `${one}s`)}`;
}

export function size(bytes) {
  if (!isNumber(bytes)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (Math.abs(bytes) >= 1000 && power < units.length - 1) {
    bytes /= 1000;
    power += 1;
  }
  return `${power ? few(bytes) : whole.format(bytes)} ${units[power]}`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 1) return `${whole.format(seconds * 1000)} ms`;
  if (seconds < 10) return `${tenth.format(seconds)} s`;
  const rounded = Math.round(seconds);
  if (rounded < 60) return `${rounded} s`;
  const parts = [
    [Math.floor(rounded / 86_400), "d"],
    [Math.floor(rounded / 3600) % 24, "h"],
    [Math.floor(rounded / 60) % 60, "min"],
    [rounded % 60, "s"],
  ];
  const first = parts.findIndex(([value]) => value);
  return parts
    .slice(first, first + 2)
    .filter(([value]) => value)
    .map(([value, unit]) => `${value} ${unit}`)
    .join(" ");
}

// Seconds since 1970, as the viewer's clock shows them.
export function moment(seconds) {
  if (!seconds) return NONE;
  const date = new Date(seconds * 1000);
  const isToday = new Date().toDateString() === date.toDateString();
  return (isToday ? clock : dayClock).format(date);
}

export const wholeMoment = (seconds) => full.format(new Date(seconds * 1000));
export const iso = (seconds) => new Date(seconds * 1000).toISOString();

export function hours(seconds, span) {
  return (span * 1000 > DAY * 1.5 ? dayClock : clock).format(new Date(seconds * 1000));
}

export function ago(seconds) {
  if (!isNumber(seconds)) return NONE;
  return seconds < 2 ? "now" : `${duration(Math.round(seconds))} ago`;
}
