"""The style sheets of charts and of the report. Colours differ for all kinds of colour vision."""

from __future__ import annotations

# The names of colours. A page that has charts defines them, for light and for dark.
LIGHT = """
color-scheme: light dark;
--paper: #ffffff; --ink: #1a1c1f; --soft: #5a616b; --rule: #d5d9df; --card: #f6f7f9;
--s1: #0b62a8; --s2: #b84a00; --s3: #00795a; --s4: #8a3d84; --s5: #6b5a00; --s6: #4d5560;
--good: #00694e; --bad: #b3261e;
"""
DARK = """
--paper: #15171a; --ink: #e9ebee; --soft: #a6adb7; --rule: #3a3f46; --card: #1e2125;
--s1: #6db6f2; --s2: #f59a56; --s3: #4fc9a2; --s4: #dd93d6; --s5: #d9c34a; --s6: #b4bbc5;
--good: #58cfa8; --bad: #ff8f85;
"""

CHART_CSS = """
.chart { display: block; width: 100%; height: auto; overflow: visible; }
.chart text { font: 14px system-ui, -apple-system, sans-serif; fill: var(--ink); }
.chart text.label { fill: var(--soft); }
.chart .grid { stroke: var(--rule); stroke-width: 1; }
.chart .track { fill: var(--rule); opacity: .5; }
.chart .part { stroke: var(--paper); stroke-width: 1.5; }
.s1 { fill: var(--s1); } .s2 { fill: var(--s2); } .s3 { fill: var(--s3); }
.s4 { fill: var(--s4); } .s5 { fill: var(--s5); } .s6 { fill: var(--s6); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.s1 { stroke: var(--s1); }
.line.s2 { stroke: var(--s2); stroke-dasharray: 7 3; }
.line.s3 { stroke: var(--s3); stroke-dasharray: 2 3; }
.line.s4 { stroke: var(--s4); stroke-dasharray: 9 3 2 3; }
.line.s5 { stroke: var(--s5); stroke-dasharray: 4 2; }
.line.s6 { stroke: var(--s6); stroke-dasharray: 1 2; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; margin: 0 0 .3rem;
  padding: 0; font-size: .85rem; }
.legend .key { width: 28px; height: 8px; }
.scroll { overflow-x: auto; }
@media screen and (max-width: 600px) { .chart text { font-size: 16px; } }
"""

_LAYOUT = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 1.2rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; padding-bottom: .2rem;
  border-bottom: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
.facts { color: var(--soft); margin: .1rem 0; overflow-wrap: anywhere; }
.note, .about, .figures { color: var(--soft); font-size: .9rem; margin: .2rem 0 .6rem; }
.figures { color: var(--ink); }
.open { border-left: 4px solid var(--s2); background: var(--card); padding: .5rem .8rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: .6rem;
  margin: 0; }
.tiles div { background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: .5rem .7rem; }
.tiles dt { color: var(--soft); font-size: .82rem; }
.tiles dd { margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.tiles .good dd { color: var(--good); } .tiles .bad dd { color: var(--bad); }
.sum { font-variant-numeric: tabular-nums; margin: .8rem 0 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr));
  gap: 1rem; align-items: start; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: .8rem 1rem; margin-bottom: .8rem; min-width: 0; }
.cards .card { margin: 0; }
.cards .chart text { font-size: 16px; }
section > .card .chart { max-width: 560px; }
.failure { margin: 0 0 1rem; } .failure p, .failure ul { margin: .2rem 0; }
.failure li { overflow-wrap: anywhere; } .failure h3 { color: var(--bad); }
table { border-collapse: collapse; font-size: .82rem; width: 100%; }
caption { text-align: left; color: var(--soft); padding: .3rem 0; }
th, td { border-bottom: 1px solid var(--rule); padding: .25rem .9em .25rem 0;
  vertical-align: top; font-weight: 400; text-align: left; }
thead th { color: var(--soft); vertical-align: bottom; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
.text { overflow-wrap: anywhere; min-width: 9rem; }
details { margin-top: .5rem; } summary { cursor: pointer; }
summary:focus-visible, .scroll:focus-visible { outline: 2px solid var(--s1); outline-offset: 2px; }
details .scroll { max-height: 22rem; overflow: auto; }
.row { border-bottom: 1px solid var(--rule); padding: .3rem 0; margin: 0; }
.row summary { overflow-wrap: anywhere; }
.row h3, .row h4 { margin: .6rem 0 .2rem; font-size: .85rem; color: var(--soft); font-weight: 600; }
.row .pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr));
  gap: 0 1rem; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; margin: 0;
  padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 26rem; overflow: auto;
  font: .85rem/1.45 ui-monospace, SFMono-Regular, Menlo, monospace; unicode-bidi: plaintext; }
footer { color: var(--soft); font-size: .85rem; margin-top: 2rem; }
@media print {
  body { max-width: none; padding: 0; font-size: 11pt; }
  .card, .tiles div, .failure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .cards { grid-template-columns: 1fr 1fr; }
  .scroll, pre { overflow: visible; max-height: none; }
  table { font-size: 8pt; } th, td { padding-right: .3rem; } .text { min-width: 0; }
  .card > details { display: none; }
}
"""

REPORT_CSS = (
    f":root {{{LIGHT}}}\n"
    f"@media screen and (prefers-color-scheme: dark) {{ :root {{{DARK}}} }}\n"
    f"{_LAYOUT}{CHART_CSS}"
)
