"""Texts with places for figures: the report's page and the model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=jinja2.select_autoescape(["html"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(name: str, **facts: Any) -> str:
    """The file `name` of this folder with `facts` in it; in HTML they are escaped."""
    return ENVIRONMENT.get_template(name).render(**facts)
