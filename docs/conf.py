"""How Sphinx builds the site: `bash docs/build`."""

from importlib import metadata

project = "lightning_shard"
release = metadata.version("lightning-shard")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
copybutton_selector = ", ".join(f".highlight-{name} pre" for name in ("bash", "python", "yaml"))
source_suffix = {".md": "markdown"}
exclude_patterns = ["_site"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "lightning_shard"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autoclass_content = "both"  # options stand in the docstring of __init__
default_role = "any"  # names in single backticks of docstrings are links where they can be,
suppress_warnings = ["ref.any"]  # and code where they cannot
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
autodoc_inherit_docstrings = False  # of the hosts, in their own markup
