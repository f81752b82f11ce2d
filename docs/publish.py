"""Builds the site: the live page, the explorer, the notebooks and all other pages, as HTML.

    python docs/publish.py FOLDER

A link to a page leads to its HTML, and a picture is copied. Any other link leads to a file of the
project: on GitHub if GITHUB_REPOSITORY (OWNER/NAME) is set, as .github/workflows/pages.yml does,
and otherwise to the file on this disk.
"""

import argparse
import html
import os
import re
import shutil
import sys
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parents[1]
LIVE = "docs/live.html"  # the site's first page

HOME = {  # a page, and what the line at the top of every page calls it
    LIVE: "home", ".": "code", "docs/reading.md": "papers", "docs/README.md": "all pages",
}  # fmt: skip
HOME_IN_CHINESE = {
    LIVE: "首页", ".": "代码", "docs/reading.md": "论文", "docs/zh/README.md": "全部页面",
}  # fmt: skip
BAR = '<nav style="display: flex; flex-wrap: wrap; gap: 4px 20px; margin-bottom: 14px">{}</nav>'
MATH = """<script>MathJax = { tex: { inlineMath: [["$", "$"]] } };</script>
<script src="https://cdn.jsdelivr.net/npm/mathjax@3/es5/tex-chtml.js" async></script>"""
STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --line: #d6dbe1; --paper: #fff; --tint: #f3f5f7; --link: #1d4f8f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --line: #3b4551; --paper: #11151a; --tint: #1a2027; --link: #7db3f5; }
  .output_png img { background: #fff; }
}
body { margin: 0 auto; padding: 20px 20px 60px; max-width: 940px; background: var(--paper); color: var(--ink);
       font: 16px/1.55 "Helvetica Neue", Arial, sans-serif; overflow-wrap: break-word; }
a { color: var(--link); }
h1, h2, h3 { line-height: 1.25; }
h2 { margin-top: 1.8em; padding-bottom: 4px; border-bottom: 1px solid var(--line); }
img { max-width: 100%; }
code { font: .86em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre code { font: inherit; }
:not(pre) > code { padding: 1px 4px; border-radius: 4px; background: var(--tint); }
pre, .highlight { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
                  background: var(--tint); }
pre { margin: 12px 0; padding: 10px 14px; border-radius: 6px; overflow-x: auto; }
table { display: block; border-collapse: collapse; overflow-x: auto; }
table + table { margin-top: 1em; }
th, td { padding: 4px 10px; border: 1px solid var(--line); text-align: left; }
summary { cursor: pointer; color: var(--link); }
hr { border: 0; border-top: 1px solid var(--line); }
.prompt { display: none; }
mjx-container { max-width: 100%; overflow-x: auto; overflow-y: hidden; }
"""  # noqa: E501
PAGE = """<!doctype html>
<html lang="{lang}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
{math}
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def pages():
    """{a page of the project: its file in the site}. What is in docs/ comes to the site's root."""
    found = {"README.md": "readme.html", "README.zh.md": "zh/readme.html"}
    patterns = ("docs/*.md", "docs/zh/*.md", "docs/*.html", "notebooks/*.ipynb")
    for path in (path for pattern in patterns for path in sorted(ROOT.glob(pattern))):
        source = path.relative_to(ROOT).as_posix()
        place = source.removeprefix("docs/").replace("README", "pages")
        found[source] = str(Path(place).with_suffix(".html"))
    return found


PAGES = pages()


# --- what a page says ---


def text_of(source):
    """The whole text of a page, before its links are changed."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".html"):
        return text
    if source.endswith(".ipynb"):
        exporter = HTMLExporter(template_name="basic", exclude_anchor_links=True)
        body, _ = exporter.from_filename(ROOT / source)
    else:
        body = from_markdown(text)
    without_code = re.sub(r"<(pre|code)\b.*?</\1>", "", body, flags=re.DOTALL)
    return PAGE.format(
        lang="zh" if is_chinese(source) else "en",
        title=re.search(r"<h1[^>]*>([^<]*)", body)[1],
        style=colours_of_code() + STYLE,
        math=MATH if "$" in without_code else "",
        body=body,
    )


def from_markdown(text):
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)  # the settings of the slides
    renderer = IPythonRenderer(escape=False, exclude_anchor_links=True)
    made = MarkdownWithMath(renderer=renderer).render(text)
    return re.sub(r"<h(\d)[^>]*>(.*?)</h\1>", named_heading, made)


def named_heading(found):
    """A heading with the name that GitHub gives it, because links use this name."""
    level, words = found.groups()
    plain = html.unescape(re.sub(r"<.*?>", "", words)).lower()
    name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
    return f'<h{level} id="{name}">{words}</h{level}>'


def colours_of_code():
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"


# --- where its links lead ---


def is_chinese(source):
    return source == "README.zh.md" or source.startswith("docs/zh/")


def other_language(source):
    """The same page in the other language. If there is none, the README."""
    if is_chinese(source):
        return source.replace("zh/", "").replace(".zh", "")
    twin = source.replace("docs/", "docs/zh/")
    return twin if is_chinese(twin) and twin in PAGES else "README.zh.md"


def home(source):
    """The line at the top of a page."""
    links = dict(HOME_IN_CHINESE if is_chinese(source) else HOME)
    links[other_language(source)] = "English" if is_chinese(source) else "中文"
    top = relpath(".", dirname(source) or ".")
    return BAR.format("".join(f'<a href="{top}/{page}">{name}</a>' for page, name in links.items()))


def address(link, source, folder):
    """Where a link of a page leads in the site. A picture is copied into it."""
    name, mark, anchor = link.partition("#")
    if not name or ":" in name:
        return link
    target = normpath(join(dirname(source), name))
    place = PAGES.get(target)
    if target.endswith((".png", ".webp")):
        place = target
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / target, folder / place)
    if place:
        return relpath(place, dirname(PAGES[source]) or ".") + mark + anchor
    repository = os.environ.get("GITHUB_REPOSITORY")
    if repository is None:
        return (ROOT / target).as_uri()
    if target == ".":
        return f"https://github.com/{repository}"
    kind = "tree" if (ROOT / target).is_dir() else "blob"
    return f"https://github.com/{repository}/{kind}/main/{target}{mark}{anchor}"


def publish(source, folder):
    """Writes one page into the site."""
    def led(found):
        return f'{found[1]}="{address(found[2], source, folder)}"'

    text = text_of(source)
    if "<nav" not in text:
        text = text.replace("<body>", f"<body>\n{home(source)}", 1)
    file = folder / PAGES[source]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(re.sub(r'\b(href|src)="([^"]*)"', led, text), encoding="utf-8")


def build(folder):
    for source in PAGES:
        publish(source, folder)
    shutil.copy(folder / PAGES[LIVE], folder / "index.html")


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where the site is built")
    folder = parser.parse_args(argv).folder
    build(folder)
    print(f"{len(PAGES)} pages. Open {folder / 'index.html'} in a browser.")


if __name__ == "__main__":
    main(sys.argv[1:])
