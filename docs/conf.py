import orthocond

project = "orthocond"
author = "The orthocond authors"
release = orthocond.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "orthocond"
html_static_path = ["_static"]
html_css_files = ["wide.css"]  # room for tables of ten columns
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_custom_sections = [("Accuracy", "notes_style")]
suppress_warnings = ["myst.xref_missing"]  # links that leave the documentation for the repository
napoleon_use_ivar = True  # attributes as a list: some are properties, which are documented by themselves
