"""Sphinx: ``python -m sphinx -W -n -b html docs docs/_build/html`` builds the site, without a network.

With ``GPUARENA_DOCS_ONLINE=1`` the inventories of the other projects are read from their sites, so that every name
of theirs is a link; otherwise the short lists in ``_inventories`` make links of the names that are used.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gpuarena

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

from inventories import inventories  # noqa: E402 - the folder is on the path from the line above on

project = "gpuarena"
author = "the gpuarena authors"
copyright = "the gpuarena authors, Apache-2.0"
version = release = gpuarena.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "benchmark_pages",
    "command_line",
    "docstrings",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
nitpicky = True
smartquotes = False  # quotes are often code
nitpick_ignore_regex = [
    # Single backticks in docstrings name parameters and fields as well as objects; what is none stays plain code.
    ("py:obj", ".*"),
    # What users do not construct takes private parts in its constructor.
    ("py:class", r"gpuarena[\w.]*\._\w+\.\w+"),
    # Hypothesis does not document these.
    ("py:class", r"hypothesis\.[\w.]*_internal\.[\w.]*"),
]

# -- Markdown: what GitHub shows as well ------------------------------------------------------------------------

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

# -- the reference ----------------------------------------------------------------------------------------------

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True  # as written: constants keep their names
napoleon_google_docstring = False
napoleon_use_param = False  # the signature links the types; the text says shapes and units
napoleon_use_rtype = False
napoleon_custom_sections = [
    ("Attributes", "params_style")
]  # fields that have a docstring stand below by themselves
python_use_unqualified_type_names = True
python_display_short_literal_types = True
maximum_signature_line_length = 96
add_module_names = False
toc_object_entries_show_parents = "hide"

intersphinx_mapping = inventories(
    HERE / "_inventories",
    HERE / "_build" / "inventories",
    online=bool(os.environ.get("GPUARENA_DOCS_ONLINE")),
)

# -- how it looks -----------------------------------------------------------------------------------------------

html_theme = "furo"
html_title = f"gpuarena {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
