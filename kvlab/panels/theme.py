"""The look of panels and figures. Colours come from JupyterLab's theme, light or dark; figures follow it by style sheet, which travels once a page
(`kvlab/panels/drawing.py`).

The layout follows the room that the panel has, not the window: side bars of JupyterLab take none of it for granted.
"""

from kvlab.plots import style

_DARK = 'body[data-jp-theme-light="false"] .kvlab'
_OURS = ":is(.kvlab, .kvlab-figure)"  # a panel; a figure with its line of words
_DARK_OURS = f'body[data-jp-theme-light="false"] {_OURS}'
_ARROW = (  # light, for the dark theme: ipywidgets has a black one only
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E"
    "%3Cpath fill='%23bbb' d='M5.2 5.9L9 9.7l3.8-3.8 1.2 1.2-5 5-5-5z'/%3E%3C/svg%3E"
)

CSS = f"""
{_OURS} {{ --ink: var(--jp-ui-font-color1, #222); --faint: var(--jp-ui-font-color2, #666); --line: var(--jp-border-color2, #ddd);
  --paper: var(--jp-layout-color1, #fff); --wash: var(--jp-layout-color2, #f5f5f5); --danger: #b34700; }}
.kvlab-figure {{ --paper: var(--jp-layout-color0, #fff); }}
.kvlab {{ display: block; width: 100%; overflow: visible; color: var(--ink); font-size: 13px; container-type: inline-size; }}
{_DARK} {{ --danger: #ff9a5c; --jp-widgets-dropdown-arrow: url("{_ARROW}"); }}
.kvlab .widget-html-content {{ line-height: 1.4; overflow: visible; min-width: 0; max-width: 100%; }}
.kvlab .widget-html {{ height: auto; margin: 0; }}
.kvlab-bar {{ display: flex; flex-flow: row wrap; gap: 4px 10px; align-items: center; padding: 4px 0 8px; overflow: visible; }}
.kvlab-bar > * {{ margin: 0; flex: 0 0 auto; }}
.kvlab-bar .widget-button {{ width: auto; padding: 0 12px; }}
.kvlab-grow {{ flex: 1 1 170px !important; min-width: 150px; }}
.kvlab-grow .widget-hprogress, .kvlab-bar .widget-hprogress {{ width: 130px; }}
.kvlab-main {{ display: flex; flex-flow: row wrap; gap: 12px; align-items: flex-start; overflow: visible; }}
.kvlab-side {{ flex: 1 1 236px; max-width: 264px; min-width: 0; overflow: visible; }}
.kvlab-side .kvlab-boxes {{ display: grid; gap: 10px; overflow: visible;
  grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); }}
.kvlab-figures {{ flex: 1 1 600px; min-width: 0; display: grid; gap: 12px; overflow: visible;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); align-items: start; }}
.kvlab-column {{ display: flex; flex-direction: column; gap: 12px; min-width: 0; overflow: visible; }}
.kvlab-all {{ display: flex; flex-direction: column; gap: 12px; overflow: visible; }}
.kvlab-bar select {{ min-width: 120px; }}
.kvlab-card, .kvlab-box {{ border: 1px solid var(--line); border-radius: 8px; background: var(--paper); min-width: 0;
  overflow: hidden; margin: 0; }}
.kvlab-card {{ padding: 8px 10px 10px; }}
.kvlab-box {{ padding: 0 10px 8px; }}
.kvlab-axis {{ border-left: 5px solid var(--hue); margin: 0 -10px; padding: 6px 8px; color: var(--faint);
  background: var(--wash); }}
.kvlab-axis b {{ color: var(--ink); font-size: 14px; margin-right: 4px; }}
.kvlab-head {{ display: flex; justify-content: space-between; align-items: baseline; gap: 8px; }}
.kvlab-head b {{ font-size: 14px; }}
.kvlab-badge {{ font-size: 12px; color: var(--faint); white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }}
.kvlab-badge.stale {{ color: var(--danger); font-weight: 600; }}
.kvlab-summary {{ color: var(--ink); padding-top: 2px; white-space: pre-line; }}
.kvlab-legend {{ display: flex; flex-flow: row wrap; gap: 1px 12px; color: var(--faint); font-size: 12px; padding: 0 0 4px; }}
.kvlab-legend i {{ display: inline-block; width: 14px; margin-right: 5px; vertical-align: middle; }}
.kvlab-legend .kvlab-patch {{ height: 10px; border-radius: 2px; }}
.kvlab-legend .kvlab-dot {{ width: 7px; height: 7px; border-radius: 50%; outline: 1px solid var(--paper); }}
.kvlab-legend .kvlab-hatch {{ height: 12px; background: repeating-linear-gradient(135deg, #f1f1f1 0 3px, #b0b0b0 3px 6px); }}
.kvlab-source {{ font-size: 11px; color: var(--faint); }}
.kvlab-dim .kvlab-body > *:not(.kvlab-row), .kvlab-dim > .kvlab-summary, .kvlab-dim .kvlab-row > .widget-html {{ opacity: .4; }}
.kvlab-error {{ color: var(--danger); border-left: 4px solid #d55e00; padding: 4px 10px; margin: 2px 0 8px;
  background: var(--wash); }}
.kvlab-error b {{ font-weight: 600; }}
.kvlab-error details {{ color: var(--faint); margin-top: 2px; }}
.kvlab-error pre {{ max-height: 260px; overflow: auto; font-size: 11px; }}
.kvlab-choice .widget-radio-box {{ width: 100%; }}
.kvlab-choice.widget-radio {{ margin: 4px 0 0; height: auto; }}
.kvlab-setting.widget-inline-hbox {{ flex-wrap: wrap; height: auto; margin: 2px 0; overflow: hidden; min-height: 0; }}
.kvlab-setting > .widget-label {{ flex: 1 0 100%; text-align: left; line-height: 20px; height: 20px; color: var(--ink); }}
.kvlab-setting.widget-slider .slider-container {{ margin-left: 8px; }}
.kvlab-setting .widget-readout {{ min-width: 44px; text-align: right; }}
.kvlab-setting .jupyter-button {{ padding: 0 10px; min-width: 40px; }}
.kvlab-setting.widget-dropdown > select {{ height: 26px; }}
.kvlab-setting.widget-text input {{ width: 100%; }}
.kvlab-nested {{ border-left: 3px solid var(--line); padding-left: 7px; margin: 6px 0; overflow: visible; }}
.kvlab-row {{ display: flex; flex-flow: row wrap; gap: 4px 10px; align-items: center; overflow: visible; }}
.kvlab-row > * {{ margin: 0; }}
.kvlab-foot {{ display: flex; flex-flow: row wrap; gap: 6px; padding-top: 10px; overflow: visible; }}
.kvlab-foot > * {{ margin: 0; flex: 1 1 64px; width: auto; min-width: 60px; }}
.kvlab textarea {{ font-size: 12px; line-height: 1.45; }}
.kvlab-table {{ overflow-x: auto; }}
.kvlab-table table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
.kvlab-table th, .kvlab-table td {{ padding: 3px 10px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); background: transparent; color: var(--ink); }}
.kvlab-table th {{ font-weight: 600; color: var(--faint); }}
.kvlab-table td:first-child, .kvlab-table th:first-child {{ text-align: left; white-space: normal; min-width: 130px; }}
.kvlab-table i {{ font-style: normal; color: var(--faint); }}
.kvlab-lost {{ color: var(--danger) !important; font-weight: 600; }}
.kvlab-text {{ white-space: pre-wrap; overflow-wrap: anywhere; color: var(--ink); border-left: 3px solid var(--line); padding: 2px 10px; margin: 6px 0;
  line-height: 1.4; }}
.kvlab-box pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font-size: 11px; line-height: 1.4; margin: 6px 0; color: var(--ink); }}
.kvlab-box ul {{ margin: 4px 0; padding-left: 16px; font-size: 11px; line-height: 1.4; color: var(--faint); }}
.kvlab-says mark {{ border-radius: 3px; }}
.kvlab-body, .kvlab-body > * {{ min-width: 0; max-width: 100%; }}
@container (max-width: 860px) {{
  .kvlab-side {{ max-width: none; flex-basis: 100%; }}
  .kvlab-figures {{ flex-basis: 100%; grid-template-columns: minmax(0, 1fr); }}
  .kvlab-table th, .kvlab-table td {{ padding: 3px 3px; font-size: 11px; white-space: normal; }}
  .kvlab-table td:first-child, .kvlab-table th:first-child {{ min-width: 96px; overflow-wrap: anywhere; }}
}}
{_OURS} .js-plotly-plot .main-svg {{ background: transparent !important; }}
{_OURS} .js-plotly-plot .bglayer .bg, {_OURS} .js-plotly-plot .legend > .bg {{ fill: transparent !important; fill-opacity: 0 !important; }}
{_DARK_OURS} .js-plotly-plot text {{ fill: var(--ink) !important; }}
{_DARK_OURS} .js-plotly-plot .annotation-text {{ filter: brightness(1.5); }}
{_DARK_OURS} .js-plotly-plot .annotation .bg {{ fill: var(--paper) !important; }}
{_DARK_OURS} .js-plotly-plot .gridlayer path {{ stroke: #454545 !important; }}
{_DARK_OURS} .js-plotly-plot .zerolinelayer path {{ stroke: #777 !important; }}
{_DARK_OURS} .js-plotly-plot path[style*="stroke: rgb(34, 34, 34)"] {{ stroke: #e0e0e0 !important; }}
{_DARK_OURS} .js-plotly-plot .subplot:has(.barlayer .point) path.js-line[style*="stroke: rgb(34, 34, 34)"] {{ mix-blend-mode: difference; }}
{_DARK_OURS} .js-plotly-plot .points path[style*="stroke: rgb(255, 255, 255)"] {{ stroke: var(--paper) !important; }}
{_DARK_OURS} .js-plotly-plot path[style*="fill: rgb(34, 34, 34)"] {{ fill: #e0e0e0 !important; }}
{_DARK} .kvlab-legend i[style*="background:{style.INK}"] {{ background: #e0e0e0 !important; }}
{_DARK} .kvlab-legend i[style*="solid {style.INK}"], {_DARK} .kvlab-legend i[style*="dashed {style.INK}"],
{_DARK} .kvlab-legend i[style*="dotted {style.INK}"] {{ border-color: #e0e0e0 !important; }}
{_DARK} .kvlab-legend i[style*="solid {style.STATE}"] {{ outline: 1px solid white; }}
{_DARK_OURS} .js-plotly-plot path[style*="stroke: rgb(0, 0, 0)"] {{ stroke: white !important; }}
{_DARK_OURS} .js-plotly-plot .modebar-group {{ background: transparent !important; }}
"""
