"""Answers that are no formula: dates, names, words and quantities. They are compared as text."""

import re

from answers.units import unit_of
from answers.value import respelled

# --- one spelling ---

ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth").split()
# what is only dress in a text, and what has another name: (pattern, what it means)
DRESS = [
    (r"\\(?:left|right)(?![A-Za-z])", " "),
    (r"\\(?:text\w*|math(?:rm|bf|it)|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
    (r"^\s*\{([^{}]*)\}\s*$", r"\1"),
    (r"\\[,;:! ]", " "),
    (r"\\(?:long)?rightarrow(?![A-Za-z])", r"\\to "),
    (r"\\(?:mid|vert)(?![A-Za-z])", "|"),
    (r"(\\(?:angle|triangle))\s*\{([^{}]*)\}", r"\1 \2"),
    (r"\^\s*\{?\s*(?:\\prime\s*)+\}?", "'"),
    # words in any case
    (r"(?<!begin\{)(?<!end\{)(?<![\\A-Za-z])(?:[A-Za-z]{3,}|NO(?![A-Za-z]))|^ *[A-Z][a-z] *$",
     lambda word: word[0].lower()),
    (rf"(?<![\\a-z])(?:{'|'.join(ORDINALS)})(?![a-z])",
     lambda word: f"{ORDINALS.index(word[0]) + 1}th"),
    (r"([0-9]) ?\^? ?\{? *(?:st|nd|rd|th)(?![A-Za-z]) *\}?", r"\1th"),
    (r"(?<![0-9.,])0+(?=[0-9])", ""),
    # 20 June
    (r"^ *([0-9]+(?:th)?) +((?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*) *$",
     r"\2 \1"),
    (r" *_ *", "_"),
]
TOKEN = r"\\[A-Za-z]+|\\.|[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:th\b)?|\S"


def spelled(text):
    """A text in LaTeX without what is only dress: the same for "x\\equiv3\\pmod7" and "x \\equiv 3
    \\pmod{7}", for "June\\ 20" and "\\text{june 20}"."""
    tokens = " ".join(re.findall(TOKEN, respelled(text, DRESS)))
    return re.sub(r"\{ ([^\s{}]+) \}", r"\1", tokens)


# --- dates, ranges, scores ---

# 10-12 (but "10 - 12" is a difference), 3/4/5, 1.2.3; and several of them
SERIES = r"\s*S(?:,\s*S)*\s*".replace(
    "S", r"(?:N(?:-N)+|N(?:/N){2,}|[0-9]+(?:\.[0-9]+){2,})").replace(
    "N", r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")


# --- words ---

# "and" and "or" join formulas, but "A or C" is a choice. The marks are those of 36°52' and 5'6"
WORD = (
    r"(?<!begin\{)(?<!end\{)(?<![\\A-Za-z])(?:(?!and(?![a-z]))[A-Za-z]{3,}|(?:no|or so)(?![A-Za-z])"
    r"|(?:(?<=\b[A-J] )|(?<=[A-J]\) ))or(?= \(?[A-J]\b))|[\u4e00-\u9fff]+"
    r"|(?<=[0-9])\s*(?:['\"]+|\^\s*\{?\s*\\circ\s*\}?(?=\s*[0-9]))")
# names in a text that is no formula: B12, Nf3, IV, NaCl, H_2O; and the "ft" of 5 ft 6 in
NAME = (
    r"(?<![\\A-Za-z])(?!(?:and|or)(?![A-Za-z]))"
    r"(?:(?:[A-Z][a-z]?_?\{?[0-9]*\}? ?){2,}(?![A-Za-z])|[A-Za-z]+(?=(?:\. )?\s*[0-9]))")
OPERATOR = r"\S\s*-|[+*=<>^|!]|\\(?![dt]?frac\s*\{?[0-9])"
JOINTS = r"^\.(?: |$)|^and(?![A-Za-z])|(?<![A-Za-z])and$|(?<=[0-9])th$"  # 5 and 6; June 20th


def at_words(text):
    """A text in LaTeX, cut before and after each word: ["2", "h", "30", "min", ""] for "2 hours and
    30 minutes", [text] without a word."""
    text = respelled(text, DRESS)
    words = WORD if re.search(OPERATOR, text) else f"{WORD}|{NAME}"
    pieces = [
        re.sub(JOINTS, "", piece.strip(" ,;:=&")) for piece in re.split(f"({words})", text)]
    return [unit_of(piece) or piece for piece in pieces]


# --- named values ---

# (1, 2), v = (1, 2) and {1, 2} as a list
BRACKETS = r"\A\s*(?:(?:[^=()]*=\s*)?\(([^()]*)\)|\\?\{([^{}]*?)\\?\})\s*\Z"
BETWEEN = r"\s*(?:,(?![0-9]{3}(?![0-9]))|[;\n&]|\\\\|\\q?quad|\band\b)(?![^()\[\]]*[)\]])[\s,]*"
# the label of x = 1, Alice: 5, "a": 1; and the value
LABEL = (
    r"(?s)(?:[\s'\"]*([A-Za-z\u4e00-\u9fff][A-Za-z\u4e00-\u9fff ]*?"
    r"(?:_\{?\w+\}?|\([A-Za-z0-9]+\))?|\\[a-z]+)[\s'\"]*[=:](?!.*[=:]))?(.*)")


def labelled(text):
    """[(label, value)] of each item of a list in LaTeX, as [("x", "1"), ("y", "2")] for "x=1, y=2".
    The label is "" without one."""
    text = re.sub(BRACKETS, r"\1\2", respelled(text, DRESS))
    items = [re.match(LABEL, item).groups("") for item in re.split(BETWEEN, text)]
    return [(spelled(label).lower(), value) for label, value in items]
