"""The Chinese pages say what the English ones say: all but the prose is equal, and the prose is
Chinese.

A section runs from one heading to the next. Its parts are paragraphs, list items, tables and code.
Every number that English writes in digits stands in digits in Chinese (10 million is 10M), every
number in words in words: there is no exception. If a test fails after a change of an English page,
make the same change in its Chinese page.

A change of English words alone changes no number and no link. So the last line of a Chinese page, a
comment, holds a fingerprint of each English section as it was translated. Translate first, then
copy the line from the failure. """

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

PROSE = ("paragraph", "item", "table")
UNTRANSLATED = {"notebook", "logits"}  # a table leaves these words as they are

HAN = re.compile("[\u4e00-\u9fff]")
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]*)\)")
NUMBER = re.compile(r"(?:[−±] ?)?\d+(?:[.,]\d+)*(?: %)?")
# GRPO, vLLM, GSM8K, π_old
NAME = re.compile(r"[A-Za-z0-9]*[A-Z][A-Za-z0-9]*[A-Z0-9]|[A-Za-z_]*[α-ω][A-Za-z_]*")
SYMBOL = re.compile(r"[=<>≥±×·⌊⌋‖→Σα-ω|−+]")
FORMULA = re.compile(rf"π_\w+|{SYMBOL.pattern}", re.ASCII)
WORD = re.compile(r"[A-Za-z]{2,}")
COMMAND = re.compile(r"(\$ )?(python|torchrun|pytest|pip) ")
FAMILY = {path.stem for path in (ROOT / "family").glob("*.py")}

pages = pytest.mark.parametrize("page", ENGLISH)


# --- a page and its parts ---


@dataclass
class Part:
    kind: str  # paragraph, item, table, code, or the language of a fence
    lines: list

    @property
    def text(self):
        return " ".join(line.strip() for line in self.lines)


@dataclass
class Section:
    level: int
    title: str
    parts: list = field(default_factory=list)

    @property
    def prose(self):
        """Heading, paragraphs, items and tables."""
        return "\n".join([self.title, *(part.text for part in self.parts if part.kind in PROSE)])

    @property
    def tables(self):
        return [[cells(line) for line in part.lines] for part in self.parts if part.kind == "table"]

    @property
    def code(self):
        return [part for part in self.parts if part.kind not in PROSE]


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def sections(text):
    found, part, lines = [], None, text.splitlines()
    for number, line in enumerate(lines):
        blank_before = number == 0 or not lines[number - 1].strip()
        if part and part.kind.startswith("```"):  # in a fence, to its end
            if line.startswith("```"):
                part = None
            else:
                part.lines.append(line)
            continue
        if heading := re.match(r"(#+) (.*)", line):
            found.append(Section(len(heading[1]), heading[2]))
            part = None
            continue
        if not line.strip() or line.startswith("<!--"):
            if part and part.kind == "code":
                part.lines.append("")
            else:
                part = None
            continue
        indented = line.startswith("    ") and (blank_before or part and part.kind == "code")
        kind = (
            line if line.startswith("```") else "code" if indented else "table" if line.startswith("|")
            else "item" if re.match(r"(- |\d+\. )", line) else "paragraph"
        )  # fmt: skip
        goes_on = part and (
            part.kind == kind != "item" or kind == "paragraph" and part.kind == "item"
        )
        if not goes_on:
            part = Part(kind, [])
            found[-1].parts.append(part)
        if not line.startswith("```"):
            part.lines.append(line)
    for section in found:
        for part in section.parts:
            while part.kind == "code" and not part.lines[-1]:
                part.lines.pop()
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
    chinese[0].parts.pop(0)  # the line with the link to the English page
    one, other = (
        [f"{'#' * section.level} {section.title}" for section in each]
        for each in (english, chinese)
    )
    levels = [[len(title.split()[0]) for title in each] for each in (one, other)]
    assert levels[0] == levels[1], (
        f"{page} has other headings than {ENGLISH[page]}:\n{one}\n{other}"
    )
    return list(zip(english, chinese))


def plain(text):
    """Text without code and without the targets of links."""
    return LINK.sub(r"\1", CODE.sub("", text))


def where(page, english, chinese):
    return f"{page}, “{english.title}” / “{chinese.title}”"


def compare(page, what, count):
    """Every section has the same of `what`; count(section, its page) is a Counter or a list."""
    problems = []
    for english, chinese in pair(page):
        one, other = count(english, ENGLISH[page]), count(chinese, page)
        found = f"English {one}, Chinese {other}"
        if isinstance(one, Counter):
            lists = [sorted(more.elements()) for more in (one - other, other - one)]
            found = f"only in English: {lists[0]}; only in Chinese: {lists[1]}"
        if one != other:
            problems.append(f"{where(page, english, chinese)}: {what}: {found}")
    assert not problems, "\n".join(problems)


# --- what must be equal ---


@pages
def test_parts_are_the_same(page):
    compare(page, "parts", lambda section, _: [part.kind for part in section.parts])


@pages
def test_numbers_are_the_same(page):
    def numbers(section, _):
        comments = [parts(line)[1] for block in section.code for line in block.lines]
        return Counter(NUMBER.findall("\n".join([plain(section.prose), *comments])))

    compare(page, "numbers", numbers)


@pages
def test_inline_code_is_the_same(page):
    compare(page, "code", lambda section, _: Counter(CODE.findall(section.prose)))


@pages
def test_bold_is_as_frequent(page):
    compare(
        page, "bold",
        lambda section, _: [len(re.findall(r"\*\*.+?\*\*", CODE.sub("", section.prose)))],
    )


@pages
def test_mathematical_symbols_are_the_same(page):
    compare(page, "symbols", lambda section, _: Counter(SYMBOL.findall(plain(section.prose))))


@pages
def test_names_are_the_same(page):
    def names(section, _):
        return Counter(set(NAME.findall(plain(section.prose))))

    compare(page, "names", names)


@pages
def test_latin_words_are_words_of_the_english_section(page):
    problems = []
    for english, chinese in pair(page):
        known = {
            form
            for word in WORD.findall(english.prose.lower())
            for form in (word, word.removesuffix("s"))
        }
        more = sorted(
            {word for word in WORD.findall(plain(chinese.prose)) if word.lower() not in known}
        )
        problems += [f"{page}, “{chinese.title}”: not in the English text: {more}"] if more else []
    assert not problems, "\n".join(problems)


@pages
def test_the_english_text_is_the_one_that_was_translated(page):
    marks = re.search(r"^<!-- English sections: (.*) -->$", read(page), re.MULTILINE)
    old, new, changed = marks[1].split() if marks else [], [], []
    for number, (english, chinese) in enumerate(pair(page)):
        text = " ".join([english.title, *(part.text for part in english.parts)])
        new.append(hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:4])
        if old[number : number + 1] != new[-1:]:
            changed.append(f"“{english.title}” / “{chinese.title}”")
    line = f"<!-- English sections: {' '.join(new)} -->"
    changed = f"{ENGLISH[page]} has changed in {', '.join(changed)}"
    assert old == new, f"{changed}. Translate it, then end {page} with\n{line}"


# --- links ---


@cache
def anchors(page):
    """GitHub's names of the headings: lower case, hyphens for spaces, no punctuation; Chinese
    characters stay."""
    return [
        re.sub(r"[^\w\- ]", "", section.title.lower()).replace(" ", "-")
        for section in sections(read(page))
    ]


def links(section):
    return [target for _, target in LINK.findall(CODE.sub("", section.prose))]


def resolved(target, page):
    """(path from the root of the project, anchor) of a link on a page."""
    name, _, anchor = target.partition("#")
    path = (ROOT / page).parent.joinpath(name).resolve() if name else ROOT / page
    assert path.exists() and path.is_relative_to(ROOT), f"{page}: {target} leads nowhere"
    path = str(path.relative_to(ROOT))
    assert not (anchor and path.endswith(".md")) or anchor in anchors(path), (
        f"{page}: {target}: no such heading"
    )
    return path, anchor


def place(target, page):
    """What a link leads to, named alike in both languages: the English page, and the number of its
    heading."""
    if target.startswith("https://"):
        return target
    path, anchor = resolved(target, page)
    heading = (
        f"#{anchors(path).index(anchor)}"
        if anchor and path.endswith(".md")
        else f"#{anchor}"
        if anchor
        else ""
    )
    return ENGLISH.get(path, path) + heading


@pages
def test_links_are_the_same(page):
    compare(
        page, "links",
        lambda section, page: Counter(place(target, page) for target in links(section)),
    )


@pages
def test_the_first_lines_link_the_english_page_and_all_others_lead_to_chinese_pages(page):
    first = sections(read(page))[0].parts[0].text
    assert [place(target, page) for _, target in LINK.findall(first)] == [ENGLISH[page]], (
        f"{page}: {first}"
    )
    targets = [
        target
        for _, section in pair(page)
        for target in links(section)
        if not target.startswith("https://")
    ]
    english = [target for target in targets if resolved(target, page)[0] in ENGLISH.values()]
    assert not english, f"{page}: there is a Chinese page for {english}"


# --- tables ---


@pages
def test_tables_are_the_same(page):
    problems = []
    for english, chinese in pair(page):
        here = where(page, english, chinese)
        for one, other in zip(english.tables, chinese.tables):
            if [len(row) for row in one] != [len(row) for row in other]:
                firsts = [[row[0] for row in table] for table in (one, other)]
                problems.append(f"{here}: other rows or columns: {firsts[0]} and {firsts[1]}")
                continue
            for row, same in zip(one, other):
                for what, pattern in (("numbers", NUMBER), ("symbols", FORMULA)):
                    found, found_too = (
                        pattern.findall(plain(" | ".join(each))) for each in (row, same)
                    )
                    if found != found_too:
                        problems.append(f"{here}: row “{row[0]}”: {what} {found} and {found_too}")
                differences = [
                    different(cell, chinese_cell, page) for cell, chinese_cell in zip(row, same)
                ]
                problems += [f"{here}: row “{row[0]}”: {text}" for text in differences if text]
    assert not problems, "\n".join(problems)


def different(english, chinese, page):
    """What is wrong with a cell, if anything: without Chinese it is the English cell, and words are
    translated."""
    if not HAN.search(chinese) or not re.search("[A-Za-z]", english):
        cells = [
            LINK.sub(lambda link: f"[{link[1]}]({place(link[2], own)})", cell)  # noqa: B023
            for cell, own in ((english, ENGLISH[page]), (chinese, page))
        ]
        if cells[0] != cells[1]:
            return f"cells differ: {english} and {chinese}"
    words = set(re.findall("[a-z]{3,}", LINK.sub("", CODE.sub("", english)))) - UNTRANSLATED
    return f"not translated: {chinese}" if words and not HAN.search(chinese) else None


# --- commands and code ---


def parts(line):
    """(statement, comment) of a line of code."""
    statement, _, comment = re.sub(r"(^|\s+)# ", "\0", line, count=1).partition("\0")
    return statement, comment


def signs(text):
    """What a translation leaves as it is: words of more than letters, such as 16, --list, |A|,
    rewards.py, pass@k."""
    tokens = [token.strip(",;:.") for token in re.findall(r"[!-~]+", text)]
    return Counter(
        token for token in tokens if token in FAMILY or not re.fullmatch("[A-Za-z']*", token)
    )


def difference(kind, english, chinese):
    """What differs between two lines of code, if anything. Comments are translated, and
    descriptions of files."""
    (one, comment), (other, translation) = parts(english), parts(chinese)
    translated = HAN.search(other) and not COMMAND.match(one.strip()) and kind in ("code", "```")
    if one != other and not translated:
        return f"{one.strip()} and {other.strip()}"
    if signs(one) != signs(other) or signs(comment) != signs(translation):
        return f"{english.strip()} and {chinese.strip()}"
    if (
        bool(comment) != bool(translation)
        or re.search("[a-z]{3,}", comment)
        and not HAN.search(translation)
    ):
        return f"comment not translated: {chinese.strip()}"
    return None


@pages
def test_commands_and_code_are_the_same(page):
    problems = []
    for english, chinese in pair(page):
        here = where(page, english, chinese)
        lines = [
            [(part.kind, line) for part in section.code for line in part.lines]
            for section in (english, chinese)
        ]
        if len(lines[0]) != len(lines[1]):
            counts = [Counter(parts(line)[0].strip() for _, line in each) for each in lines]
            more = [sorted(x) for x in (counts[0] - counts[1], counts[1] - counts[0])]
            problems.append(
                f"{here}: lines of code only in English: {more[0]}; only in Chinese: {more[1]}"
            )
            continue
        differences = [difference(kind, one, other) for (kind, one), (_, other) in zip(*lines)]
        problems += [f"{here}: {text}" for text in differences if text]
    assert not problems, "\n".join(problems)


# --- the Chinese text ---


@pages
def test_every_heading_paragraph_and_item_is_chinese(page):
    for section in sections(read(page)):
        for text in [
            section.title,
            *(part.text for part in section.parts if part.kind in ("paragraph", "item")),
        ]:
            assert HAN.search(plain(text)), f"{page}, “{section.title}”: {text}"
            english = re.search(r"(?:[A-Za-z][A-Za-z'’-]*,? ){3}[A-Za-z]+", plain(text))
            assert not english, f"{page}, “{section.title}”: not translated: {english[0]}"


@pages
def test_chinese_is_set_as_chinese(page):
    """A space between Chinese and Latin or code, none beside full-width marks; no half-width marks
    in Chinese."""
    han, latin, marks = "[\u4e00-\u9fff]", "[A-Za-z0-9α-ω`]", "[，。：；、（）？！“”]"
    rules = {
        "a space beside a full-width mark": rf"{marks} (?!\|)|(?<!\|) [，。：；、）？！”]",
        "no space between Chinese and Latin": rf"{han}(?:\*\*)?(?:{latin}|[⌊|])|(?:{latin}|[%⌋|])(?:\*\*)?{han}",
        "a half-width mark": rf"{han} ?[,.;:?!(]|{han}\)|[,;:?!(] ?{han}|\){han}",
        "two spaces or a straight quote": r"  |\"",
    }
    for section in sections(read(page)):
        here = f"{page}, “{section.title}”"
        text = CODE.sub("`", LINK.sub(r"\1", section.prose))
        for name, pattern in rules.items():
            found = re.search(pattern, text)
            assert not found, (
                f"{here}: {name}: {text[max(0, found.start() - 12) : found.end() + 12]}"
            )
        for bold in re.findall(r"(\*\*.+?\*\*.?)", text):
            # Markdown does not see the end of **。** before a letter or a Chinese character
            assert not re.search(rf"{marks}\*\*\w", bold), (
                f"{here}: put a space after the bold: {bold}"
            )
