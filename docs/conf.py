"""How Sphinx builds the site: `make docs`.

Pages are plain Markdown, readable on a code host as well. Nothing is written twice: `_extensions/repository.py` takes
whole documents from elsewhere in the repository, and `_extensions/generated.py` makes tables of flags, settings and
measured figures from the code and from results.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [
    str(DOCS / "_extensions"),
    str(ROOT),
    str(ROOT / "client"),
]  # document this checkout, not an installed package

import residuum  # noqa: E402

project = "residuum"
author = "the residuum authors"
copyright = "the residuum authors, Apache-2.0"  # noqa: A001 - Sphinx's name for it
release = version = residuum.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "generated",
    "repository",
]
exclude_patterns = ["_extensions"]

# ------------------------------------------------------------------------------------------------ pages in Markdown

myst_heading_anchors = 4  # the same anchors as code hosts make
repository_documents = {
    "operations/failures": "tests/faults/README.md",
    "operations/containers": "deploy/README.md",
    "project/architecture": "ARCHITECTURE.md",
    "project/benchmarks": "bench/README.md",
    "project/changelog": "CHANGELOG.md",
    "project/conformance": "tests/conformance/README.md",
    "project/contributing": "CONTRIBUTING.md",
}
"""Pages that are documents from elsewhere in the repository."""
repository_url = os.environ.get("DOCS_SOURCE_URL", "")
"""Where the sources can be looked at, such as https://host/owner/name/blob/main/; links to files lead there."""

# ----------------------------------------------------------------------------------------------- names in docstrings

smartquotes = False  # quotes are code
default_role = "py:obj"  # `name` in a docstring is a link if there is something of that name, and code otherwise
autodoc_member_order = "bysource"
autodoc_mock_imports = ["ray"]  # it has an environment of its own
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = False  # a field of a class has an anchor, as a method has

# ---------------------------------------------------------------------------------------------------------- appearance

html_theme = "furo"
html_title = f"residuum {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
