"""The site: course, reading and API in one (`make docs`). Notebooks are shown as they were saved; nothing is run."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "kernels")]

project, author, copyright = "kvlab", "the kvlab team", "the kvlab team, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "notebooks/*.ipynb"]
nb_execution_mode = "off"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
default_role = "code"
html_theme = "sphinx_book_theme"
html_title = "kvlab"
html_theme_options = {"show_navbar_depth": 2, "home_page_in_toc": True}
html_last_updated_fmt = None
