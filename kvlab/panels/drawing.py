"""Figures that share one plotly and one style sheet, and controls that have names.

A plotly `FigureWidget` brings the whole library along, 5 MB for each figure: a panel with a dozen of them would send and parse 60 MB before anything is seen. Here the
library travels once, in a widget of its own (`library()`), which every panel holds among its children; figures wait for it.
"""

import copy
import sys
from typing import Any

import anywidget
import plotly.graph_objects as go
import traitlets

from kvlab.panels.theme import CSS

# Whichever of the two comes first on a page makes the promise.
_SHARED = """
const shared = (globalThis.kvlabPlotly ??= {});
shared.ready ??= new Promise((resolve) => { shared.arrived = resolve; });
"""
_LIBRARY = (
    _SHARED
    + """
export default {
  initialize({ model }) {
    if (shared.asked) return;
    shared.asked = true;
    const url = URL.createObjectURL(new Blob([model.get("source")], { type: "text/javascript" }));
    import(url).then(shared.arrived);
    // ipywidgets names neither the handle of a slider nor the buttons of a player: who cannot see what is beside or on them hears only a number.
    // And JupyterLab takes the arrow keys away from a list of choices, to go to the next cell.
    let soon;
    const name = () => {
      soon = undefined;
      for (const icon of document.querySelectorAll(".widget-play button:not([aria-label]) i")) {
        icon.parentElement.setAttribute("aria-label", icon.className.replace(/fa-|fa/g, "").trim());
      }
      for (const list of document.querySelectorAll(".widget-dropdown select")) list.dataset.lmSuppressShortcuts = "true";
      for (const handle of document.querySelectorAll(".widget-inline-hbox .noUi-handle:not([aria-label])")) {
        const label = handle.closest(".widget-inline-hbox").querySelector(".widget-label");
        if (label?.textContent) handle.setAttribute("aria-label", label.textContent);
      }
    };
    new MutationObserver(() => { soon ??= setTimeout(name, 300); }).observe(document.body, { childList: true, subtree: true });
  },
};
"""
)

# The front end gives a widget two seconds to come to life, so it does not wait for the library there; updates that arrive meanwhile are made up for.
_FIGURE = (
    _SHARED
    + """
const updates = ["addTraces", "animate", "deleteTraces", "moveTraces", "relayout", "removeLayoutProps", "removeTraceProps", "restyle", "update"];
export default () => {
  let plotly;
  return {
    initialize({ model }) {
      const missed = [];
      const hearing = updates.map((kind) => {
        const name = `_py2js_${kind}`;
        const hear = () => { if (model.get(name)) missed.push([name, model.get(name)]); };
        model.on(`change:${name}`, hear);
        return () => model.off(`change:${name}`, hear);
      });
      plotly = shared.ready.then(async (library) => {
        const own = await library.default();
        hearing.forEach((stop) => stop());
        await own.initialize({ model });
        for (const [name, value] of missed) { model.set(name, value); model.set(name, null); }
        return own;
      });
    },
    async render(context) {
      const end = (await plotly).render(context);
      setTimeout(() => dispatchEvent(new Event("resize")), 200); // drawn before it had its place, a figure has a width of its own
      return end;
    },
  };
};
"""
)


class Library(anywidget.AnyWidget):
    """Plotly's JavaScript and the look, for all figures of a page, and names for its controls. Shows nothing."""

    _esm = _LIBRARY
    _css = CSS
    source = traitlets.Unicode().tag(sync=True)


class Figure(go.FigureWidget):
    """A `FigureWidget` that draws with the page's one plotly, and tells a page that is opened (again) what it shows now; plotly's own tells what it was made with."""

    _esm = _FIGURE

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        if key is None and hasattr(self, "_layout_obj"):
            self._trait_values["_widget_data"] = copy.deepcopy(self._data)
            self._trait_values["_widget_layout"] = copy.deepcopy(self._layout_obj._props)
        return super().get_state(key, drop_defaults)  # type: ignore[no-any-return]


_one: Library | None = None


def library() -> Library:
    """The one of this kernel."""
    global _one
    if _one is None or _one.comm is None:
        own = go.FigureWidget._esm
        _one = Library(source=str(own), layout={"display": "none"})
    return _one


if "ipykernel" in sys.modules and getattr(sys.modules["IPython"].get_ipython(), "kernel", None) is not None:
    library()  # it travels while the notebook's next lines still load a model
