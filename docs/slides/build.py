"""Puts docs/slides.html together: each slide of docs/slides.md as HTML, its formulas as MathML.

    pip install -r requirements-dev.txt
    python docs/slides/build.py
"""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from markdown_it import MarkdownIt

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "slides.html"
SITE = r"\(https://[\w-]+\.github\.io/[\w.-]+/"  # docs/publish.py --address writes it


def formula(found):
    display, inline = found.groups()
    made = convert(display or inline, display="block" if display else "inline")
    alt = html.escape(display or inline)
    return re.sub('xmlns=".+?"', lambda _: f'alttext="{alt}"', made)


def page():
    """The text of the page."""
    text = re.sub(SITE, "(", (DOCS / "slides.md").read_text(encoding="utf-8"))
    text = re.sub(r"\$\$(.+?)\$\$|\$(.+?)\$", formula, text)
    markdown = MarkdownIt().enable("table")
    slides = [f"<section>\n{markdown.render(slide)}</section>" for slide in text.split("\n---\n")]
    frame = (DOCS / "slides/page.html").read_text(encoding="utf-8")
    return frame.replace("{{slides}}", "\n".join(slides))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print("written: docs/slides.html")
