"""Puts docs/step.html together: the equations of book.md, each with the line that computes it
(quoted from the file itself), the page's style and JavaScript, and the numbers that stand in it.

    pip install -r requirements-dev.txt
    python docs/step/build.py            to renew the numbers: python experiments/microscope.py
"""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = HERE.parent / "step.html"
CHAPTER = '<h2><span lang="en">{}</span><span lang="zh">{}</span></h2>'
ROW = """<article id="{key}" class="{home}">
<div class="equation">
<div class="formula">{formula}<span class="paper">{paper}</span></div>
<p><span lang="en">{english}</span><span lang="zh">{chinese}</span></p>
</div>
<div class="line">
<p class="paper"><span>{file}</span><span>{function}</span>
<span lang="en">nano.py has no such line</span><span lang="zh">nano.py 没有这一行</span></p>
<div class="code"><code class="comment">{comment}</code><code>{code}</code></div>
<p class="links">{more}</p>
</div>
<div class="number"><b></b><p></p></div>
</article>"""
CELLS = ["key", "paper", "formula", "english", "chinese", "line", "more"]


def quoted(place):
    """What the page says of "file: how the line begins". Two such lines, or none, are an error."""
    file, start = place.split(": ", 1)
    text = (ROOT / file).read_text(encoding="utf-8")
    [found] = re.finditer(rf"(?m)(?:^ *(#.*)\n)?^ *({re.escape(start)}.*)", text)
    comment, code = found.groups("")
    above = re.findall(r"(?m)^(?:def (\w+)|\w)", text[: found.end()])
    return {
        "file": file, "home": Path(file).stem, "function": above[-1], "comment": comment,
        "code": re.sub(r"\($", "(…)", code),
    }


def equation(row):
    """An equation, its line, and a place for its number, side by side."""
    cells = {name: html.escape(text) for name, text in (row | quoted(row["line"])).items()}
    tex = cells["formula"].strip("$")
    formula = convert(html.unescape(tex), display="block")
    formula = re.sub('xmlns=".+?"', lambda _: f'alttext="{tex}"', formula)
    # no space around <, and one after log
    formula = formula.replace("<mo>&lt;</mo>", "<mi>&lt;</mi>").replace(
        "<mi>log</mi>", '<mi>log</mi><mspace width=".15em" />')
    links = re.sub(r"\[(.+?)\]\(\.\./(.+?)\)", r'<a href="\2">\1</a>', row["more"])
    return ROW.format_map(cells | {
        "formula": formula, "more": re.sub("`(.+?)`", r"<code>\1</code>", links)})


def book():
    """The chapters and the equations of book.md."""
    for line in (HERE / "book.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            yield CHAPTER.format(*line[3:].split(" · "))
        elif re.match(r"\| (?!row )\w", line):
            yield equation(dict(zip(CELLS, line.replace(r"\|", "|").strip("| ").split(" | "))))


def page(earlier):
    """The text of the page. earlier: the page as it is, with the numbers that it keeps."""
    parts = {"book": "\n".join(book()), "data": re.search("json\">(.*?)</script>", earlier)[1]}

    def part(found):
        return parts.get(found[1]) or (HERE / found[1]).read_text(encoding="utf-8")

    return re.sub(r"\{\{(.+?)\}\}\n?", part, (HERE / "page.html").read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print("written: docs/step.html")
