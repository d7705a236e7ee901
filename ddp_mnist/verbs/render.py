"""Fill in the templates: the report's page and the model card."""

import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from ddp_mnist.system.text import as_json, printable, quoted, shown_name
from ddp_mnist.training.scores import number_text

# Those of Markdown within a line: _ and # mark nothing in the middle of a word
MARKS = r"[\\`*\[\]<|~$]|&(?=[#\w]+;)|(?<![^\W_])[_#]|[_#](?![^\W_])"


def markdown(text: object) -> str:
    """Return a name or a number as Markdown and its HTML show it literally within a line."""
    return re.sub(MARKS, r"\\\g<0>", printable(str(text)))


def breakable(name: str, is_path: bool = False) -> Markup:
    """Return a name in HTML, in which a line may end after _ and / rather than within a word.

    In a path, each part has its own direction, and a line may end after - and a space as well.
    """
    parts, shown = "[_/]+(?=.)", r"\g<0><wbr>"
    if is_path:
        parts, shown = "([^/_ -]+)([/_ -]*)", r"<bdi>\1</bdi>\2<wbr>"
    return Markup(re.sub(parts, shown, str(escape(name))))


TEMPLATES = Path(__file__).parent / "templates"
ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES),
    autoescape=jinja2.select_autoescape(["html"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.policies |= {"json.dumps_function": as_json, "json.dumps_kwargs": {}}
ENVIRONMENT.filters |= {"markdown": markdown, "printable": printable, "thousands": "{:,}".format}
ENVIRONMENT.filters |= {"number": number_text, "quoted": quoted, "shown_name": shown_name}
ENVIRONMENT.filters["breakable"] = breakable


def render(template: str, **facts: Any) -> str:
    """Return a file of templates/ with `facts` in it; in HTML they are escaped."""
    return ENVIRONMENT.get_template(template).render(**facts)
