"""Where is a Chinese page behind its English one? No test asks; this program lists it.

    python docs/stale.py                                    list the sections of all pages
    python docs/stale.py --translated docs/zh/family.md     after translating: write it down

The last line of a Chinese page, a comment, holds a fingerprint of each English section as it was
translated. So a section whose English text is another now is listed. All but the prose is compared,
too: the numbers, links and code of both languages are equal.

A section runs from one heading to the next. Every number that English writes in digits stands in
digits in Chinese (10 million is 10M).
"""

import argparse
import hashlib
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from os.path import relpath
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.zh.md", *sorted(ROOT.glob("docs/zh/*.md"))]
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]*)\)")
NUMBER = re.compile(r"(?:[−±] ?)?\d+(?:[.,]\d+)*(?: %)?")
REST = "## 其余各节（英文）"  # a page may end so, with links to what is not translated
COMMAND = re.compile(r"(\$ )?(python|torchrun|pytest|pip) ")
FINGERPRINTS = re.compile(r"^<!-- English sections: (.*) -->\n?", re.MULTILINE)


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

    @property
    def level(self):
        return self.heading.count("#")

    @property
    def fingerprint(self):
        words = " ".join([self.heading.lstrip("# "), *self.text]).split()
        return hashlib.sha256(" ".join(words).encode()).hexdigest()[:4]


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


def english_page(page):
    """The English page of a Chinese one; of any other file, the file itself."""
    if page.name == "README.zh.md":
        return page.with_name("README.md")
    return page.parents[1] / page.name if page.parent.name == "zh" else page


def read(page):
    """(the English sections that are translated, the Chinese sections, those that are not
    translated, the links to them). The links from one language to the other are left out."""
    english = english_page(page)
    to_chinese = re.escape(relpath(page, english.parent))
    text = re.sub(rf"(?: ·)? ?\[[^\]]*\]\({to_chinese}\)", "", english.read_text(encoding="utf-8"))
    ours, theirs = sections(text), sections(page.read_text(encoding="utf-8"))
    del theirs[0].lines[:2]  # the line with the link to the English page
    if theirs[-1].heading != REST:
        return ours, theirs, [], []
    rest = [target for _, target in LINK.findall(theirs.pop().prose)]
    return ours[: len(theirs)], theirs, ours[len(theirs) :], rest


def plain(text):
    """Text without code and without the targets of links."""
    return LINK.sub(r"\1", CODE.sub("", text))


def place(target, page):
    """What a link leads to, named alike in both languages: the English page, and the number of its
    heading. A page in two languages counts as one."""
    if target.startswith(("https://", "../../deployments")):  # on GitHub: the published site
        return target
    name, _, anchor = target.removesuffix("#lang=zh").partition("#")
    path = (page.parent / name).resolve() if name else page
    if anchor and path.suffix == ".md" and path.is_file():
        names = anchors(path)
        anchor = names.index(anchor) + 1 if anchor in names else anchor
    return f"{relpath(english_page(path), ROOT)}#{anchor}".removesuffix("#")


def anchors(page):
    """GitHub's names of the headings: lower case, hyphens for spaces, no punctuation; Chinese
    characters stay."""
    text = page.read_text(encoding="utf-8")
    titles = [section.heading.lstrip("# ").lower() for section in sections(text)]
    return [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]


# --- what is equal in both languages ---


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
    typed = [x for x in lines if COMMAND.match(x) or re.match(r"[\w, ]+(=|\()", x)]
    return len(lines), files, typed


# --- what differs ---


def difference(what, english, chinese, page):
    """One line about what differs in a section; "" if nothing does."""
    ours, theirs = what(english, english_page(page)), what(chinese, page)
    name = what.__name__.replace("_", " ")
    if ours == theirs:
        return ""
    if not isinstance(ours, Counter):
        return f"not the same {name}"
    only = [" ".join(more.elements()) or "nothing" for more in (ours - theirs, theirs - ours)]
    return f"{name}: {only[0]} in English, {only[1]} in Chinese"


def stale(page):
    """{a heading of the English page, or of none: lines about what differs}"""
    english, chinese, rest, targets = read(page)
    written = FINGERPRINTS.search(page.read_text(encoding="utf-8"))
    old = written[1].split() if written else []
    found = {section.heading: ["another English text than was translated"]
             for section in english if section.fingerprint not in old}
    name, first = relpath(english_page(page), ROOT), len(english) + 1
    left_out = [f"{name}#{number}" for number in range(first, first + len(rest))]
    levels = [[section.level for section in language] for language in (english, chinese)]
    if levels[0] != levels[1] or [place(target, page) for target in targets] != left_out:
        return found | {"the headings": ["others in English than in Chinese"]}
    for ours, theirs in zip(english, chinese):
        for what in (shape, numbers, inline_code, links, statements):
            if line := difference(what, ours, theirs, page):
                found.setdefault(ours.heading, []).append(line)
    if not found and old != [section.fingerprint for section in english]:
        return {"the headings": ["others, or in another order, than were translated"]}
    return found


def write_down(page):
    """The last line of a Chinese page: it is a translation of the English text of today."""
    text = FINGERPRINTS.sub("", page.read_text(encoding="utf-8")).rstrip()
    marks = " ".join(section.fingerprint for section in read(page)[0])
    page.write_text(f"{text}\n\n<!-- English sections: {marks} -->\n", encoding="utf-8")


def main(argv):
    parser = argparse.ArgumentParser()
    names = {relpath(page, ROOT): page for page in PAGES}
    parser.add_argument("--translated", nargs="+", choices=names, default=[], metavar="PAGE",
                        help="write down that these Chinese pages are translated")
    translated = parser.parse_args(argv).translated
    for name in translated:
        write_down(names[name])
    for name in translated or names:
        found = stale(names[name])
        if found:
            print(name)
        for heading, lines in found.items():
            print(f"  {heading}", *lines, sep="\n    ")


if __name__ == "__main__":
    main(sys.argv[1:])
