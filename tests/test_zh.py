"""The Chinese pages say what the English ones say: all but the prose is equal.

A section runs from one heading to the next. Every number that English writes in digits stands in
digits in Chinese (10 million is 10M). If a test fails after a change of an English page, make the
same change in its Chinese page.

A change of English words alone changes no number and no link. So the last line of a Chinese page, a
comment, holds a fingerprint of each English section as it was translated. Translate first, then
copy the line from the failure.
"""

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from os.path import relpath
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENGLISH = {"README.zh.md": "README.md"}  # Chinese page: English page
ENGLISH |= {
    f"docs/zh/{path.name}": f"docs/{path.name}" for path in sorted((ROOT / "docs/zh").glob("*.md"))
}
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]*)\)")
NUMBER = re.compile(r"(?:[−±] ?)?\d+(?:[.,]\d+)*(?: %)?")
REST = "## 其余各节（英文）"  # a page may end so, with links to what is not translated
COMMAND = re.compile(r"(\$ )?(python|torchrun|pytest|pip) ")

pages = pytest.mark.parametrize("page", ENGLISH)


# --- a page and its sections ---


@dataclass
class Section:
    heading: str  # with its #
    text: list = field(default_factory=list)  # all lines but comments and the marks of fences
    code: list = field(default_factory=list)  # lines of code
    lines: list = field(default_factory=list)  # all other lines

    @property
    def prose(self):
        return "\n".join([self.heading, *self.lines])


def sections(text):
    found, fenced, code = [], False, False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif re.match("#+ ", line) and not fenced:
            found.append(Section(line))
        elif not line.startswith("<!--"):
            blank = not found[-1].lines or not found[-1].lines[-1].strip()
            code = fenced or line.startswith("    ") and (blank or code)
            found[-1].text.append(line)
            (found[-1].code if code else found[-1].lines).append(line.rstrip())
    return found


@cache
def read(page):
    return (ROOT / page).read_text()


@cache
def pair(page):
    """(English section, Chinese section) of each heading, without the links from one language to
    the other."""
    to_chinese = re.escape(relpath(page, Path(ENGLISH[page]).parent))
    english = sections(re.sub(rf"(?: ·)? ?\[[^\]]*\]\({to_chinese}\)", "", read(ENGLISH[page])))
    chinese = sections(read(page))
    del chinese[0].lines[:2]  # the line with the link to the English page
    if chinese[-1].heading == REST:
        rest = LINK.findall(chinese.pop().prose)
        left_out = range(len(chinese), len(english))
        assert [place(target, page) for _, target in rest] == [(ENGLISH[page], i) for i in left_out]
        del english[len(chinese) :]
    one, other = ([section.heading for section in each] for each in (english, chinese))
    assert [h.count("#") for h in one] == [h.count("#") for h in other], f"{one}\n{other}"
    return list(zip(english, chinese))


def plain(text):
    """Text without code and without the targets of links."""
    return LINK.sub(r"\1", CODE.sub("", text))


# --- what must be equal ---


def shape(section, page):
    """How many paragraphs, which items, and the numbers in each row of a table."""
    lines = [line for line in section.lines if line]
    items = [line.split()[0] for line in lines if re.match(r"(- |\d+\. )", line)]
    rows = [(line.count("|"), NUMBER.findall(plain(line))) for line in lines if line[0] == "|"]
    return "\n".join(section.lines).strip().count("\n\n"), items, rows


def numbers(section, page):
    comments = [line.partition("# ")[2] for line in section.code]
    return Counter(NUMBER.findall("\n".join([plain(section.prose), *comments])))


def inline_code(section, page):
    return Counter(" ".join(words.split()) for words in CODE.findall(section.prose))


def links(section, page):
    targets = [target for _, target in LINK.findall(CODE.sub("", section.prose))]
    return Counter(place(target, page) for target in targets)


def statements(section, page):
    """The code without what is translated: comments, descriptions, and what a program prints."""
    lines = [re.split(r"(?:^|\s)# ", line)[0].strip() for line in section.code]
    files = re.findall(r"[\w/]+\.\w+|--\w+", "\n".join(section.code))
    return files, [x for x in lines if COMMAND.match(x) or re.match(r"[\w, ]+(=|\()", x)]


@pages
@pytest.mark.parametrize("what", [shape, numbers, inline_code, links, statements])
def test_what_is_not_prose_is_the_same(page, what):
    for english, chinese in pair(page):
        assert what(english, ENGLISH[page]) == what(chinese, page), f"{page}, {chinese.heading}"
        assert len(english.code) == len(chinese.code), f"{page}, {chinese.heading}"


@pages
def test_the_english_text_is_the_one_that_was_translated(page):
    marks = re.search(r"^<!-- English sections: (.*) -->$", read(page), re.MULTILINE)
    old, new = marks[1].split() if marks else [], []
    for english, _ in pair(page):
        words = " ".join([english.heading.lstrip("# "), *english.text]).split()
        new.append(hashlib.sha256(" ".join(words).encode()).hexdigest()[:4])
    changed = [english.heading for (english, _), mark in zip(pair(page), new) if mark not in old]
    line = f"<!-- English sections: {' '.join(new)} -->"
    assert old == new, f"changed: {changed}. Translate it, then end {page} with\n{line}"


# --- links ---


@cache
def anchors(page):
    """GitHub's names of the headings: lower case, hyphens for spaces, no punctuation; Chinese
    characters stay."""
    titles = [section.heading.lstrip("# ").lower() for section in sections(read(page))]
    return [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]


def place(target, page):
    """What a link leads to, named alike in both languages: the English page, and the number of its
    heading. A page in two languages counts as one."""
    if target.startswith(("https://", "../../deployments")):  # on GitHub: the published site
        return target
    name, _, anchor = target.removesuffix("#lang=zh").partition("#")
    path = (ROOT / page).parent.joinpath(name).resolve() if name else ROOT / page
    assert path.exists() and path.is_relative_to(ROOT), f"{page}: {target} leads nowhere"
    path = str(path.relative_to(ROOT))
    if anchor and path.endswith(".md"):
        anchor = anchors(path).index(anchor)
    return ENGLISH.get(path, path), anchor
