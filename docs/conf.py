"""Configuration of the documentation; ``sphinx-build -W --keep-going -b html docs docs/_build/html`` builds it."""

from __future__ import annotations

import os
import sys
import typing
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
typing.GENERATING_DOCUMENTATION = "sensitivity"  # jaxtyping then writes Float[Tensor, "..."] without its own name

import generate  # noqa: E402 - needs the path above

import sensitivity  # noqa: E402

generate.write_pages(HERE)

project = "attention-sensitivity"
author = "The attention-sensitivity developers"
copyright = author
release = version = sensitivity.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]
nitpicky = False

html_theme = "furo"
html_title = f"attention-sensitivity {release}"
html_static_path: list[str] = []
html_copy_source = False
html_show_sphinx = False

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Notebooks are stored without outputs and executed here; SENSITIVITY_DOCS_EXECUTE=off builds faster, without figures.
nb_execution_mode = os.environ.get("SENSITIVITY_DOCS_EXECUTE", "force")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_render_markdown_format = "myst"  # formulas in Markdown that a cell displays

autodoc_default_options = {"members": True, "no-value": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # shapes such as "*batch time" are no markup
napoleon_use_rtype = False


def shorter_signature(app, what, name, obj, options, signature, returns):
    """Defaults that a dataclass makes anew are written as an ellipsis; Sphinx then can break the line."""
    return None if signature is None else (signature.replace("<factory>", "..."), returns)


def setup(app):
    app.connect("autodoc-process-signature", shorter_signature)
