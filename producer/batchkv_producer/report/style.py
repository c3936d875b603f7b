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
.chart text { font: 12px system-ui, -apple-system, sans-serif; fill: var(--ink); }
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
"""
