"""Settings of the documentation site:  sphinx-build -W --keep-going docs build/docs"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project = "moe-lightning"
author = "The moe-lightning authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "moe-lightning"
html_static_path = ["_static"]
html_css_files = ["wrap.css"]
default_role = "code"
copybutton_prompt_text = "$ "
autodoc_typehints = "none"
autodoc_member_order = "bysource"


def setup(app: Sphinx) -> None:
    """Write the generated pages before Sphinx looks for pages."""
    import generated

    generated.write(HERE / "generated")
    app.connect("autodoc-process-docstring", join_names, priority=400)


def join_names(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Join the lines of a list of options that share one description, as napoleon expects it on one line."""
    for i in reversed(range(len(lines) - 1)):
        if re.fullmatch(r"    \w[\w, ]*,", lines[i]):
            lines[i : i + 2] = [f"{lines[i]} {lines[i + 1].strip()}"]
