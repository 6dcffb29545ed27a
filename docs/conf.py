import sys
from pathlib import Path

import orthocond

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "orthocond"
author = "The orthocond authors"
release = orthocond.__version__
extensions = [
    "myst_parser",
    "pages",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",
]
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = "orthocond"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["copy.js"]
html_show_copyright = False
html_show_sourcelink = False
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False  # no words of nn.Module about forward
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 72  # else one argument a line
autosummary_generate = True
# Names that differ by capitals alone get files that every disk can tell apart.
autosummary_filename_map = {
    "orthocond.Spectrum": "orthocond.Spectrum-class",
    "orthocond.metrics.DCI": "orthocond.metrics.DCI-class",
}
napoleon_custom_sections = [("Accuracy", "notes_style")]
suppress_warnings = ["myst.xref_missing"]  # links that leave the documentation for the repository
napoleon_use_ivar = True  # attributes as a list: some are properties, which are documented by themselves
