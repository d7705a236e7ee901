"""Texts with places for figures: the report's page and the model card."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2

from ddp_mnist.errors import printable

ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=jinja2.select_autoescape(["html"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def markdown(text: str) -> str:
    """Text that Markdown and its HTML show as it is: names come from whoever made the data."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|&~$-])", r"\\\1", printable(text))


ENVIRONMENT.filters["markdown"] = markdown


def render(name: str, **facts: Any) -> str:
    """The file `name` of this folder with `facts` in it; in HTML they are escaped."""
    return ENVIRONMENT.get_template(name).render(**facts)
