"""How Sphinx builds the site: `bash docs/build`."""

from importlib import metadata

project = "lightning_shard"
release = metadata.version("lightning-shard")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
copybutton_selector = ", ".join(f".highlight-{name} pre" for name in ("bash", "python", "yaml"))
source_suffix = {".md": "markdown"}
exclude_patterns = ["_site"]
myst_heading_anchors = 3
highlight_language = "none"  # what commands print is no Python
html_theme = "furo"
html_title = "lightning_shard"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autoclass_content = "both"  # options stand in the docstring of __init__
# a name in single backticks is a link where an object of Python has it, and code elsewhere; "any"
# would take the argument `trainer` for the page of that name
default_role = "py:obj"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
autodoc_inherit_docstrings = False  # of the hosts, in their own markup


def _signature(_app, kind, _name, _object, _options, signature, returns):
    """Leave out arguments of classes that only functions of the package make."""
    made_by_functions = kind == "class" and signature and "<factory>" in signature
    return ("", returns) if made_by_functions else None


def setup(app):
    """Tell Sphinx of the function above."""
    app.connect("autodoc-process-signature", _signature)
