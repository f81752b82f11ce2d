"""The answer in \\boxed{…}, and in several of them."""

import re

from answers.value import ends_in_minus

# \boxed{18}, \boxed {18}, \fbox{18}, and without braces \boxed 18, \boxed\frac12, \boxed A
BOX = (
    r"\\f?box(?:ed)?\s*(?:(?P<braces>\{)|(?P<bare>(?:[-+.]?\d|-?\\[a-zA-Z]|[A-HJ-Z](?![A-Za-z]))"
    r"(?:(?!\\[)\]])[^\s$])*))"
)
BRACE = re.compile(r"(?s)\\.|[{}]")
# how a line begins that is one of several answers: "- 3", "2. 3", "(b) 3", "① 3"; "x = 3"
BULLET = r"[ \t]*(?:[-*•–|]\s|\W{0,2}[0-9a-zA-Z]{1,2}(?:[.)] |[）、])|[①-⑳])"
EQUATION = r"[ \t]*(?:(?:and|or)\b|\W{0,4}[a-zA-Z]\w? *=)"
ITEM = BULLET + "|" + EQUATION
PART = r"(?i)\n\W{0,4}(?:part|question|problem|case|task|exercise)\b"
TAKES_BACK = (
    r"(?i)\b(?:no|not|wait|but|rather|actually|wrong|incorrect|false|mistaken?|instead|sorry)\b|n't"
    r"|[不错]")
CONCLUDES = r"(?i)\b(?:final|finally|overall|conclusion)\b"
FOLLOWS = r"(?i)\b(?:so|then|thus|hence|therefore|answer|step|total|sum)\b"
# between two boxes: LaTeX's spaces and brackets, "y =", "(b)", "Part 2:"
BETWEEN = (
    r"\\(?:[()\[\],;:! \\]|q?quad\b|text\b)|[${}*|]|--+|[(（]?\b\w{1,2}[.)）、]|[①-⑳]"
    r"|(?:\b\w+ ?){1,3}[:：=]")
JOINED = (
    r"(?i)[\s.;]*|(?=[^,;，；、和或&/]*(?:[,;，；、和或&/]|\b(?:and|or)\b))(?:[^\W\d_]|[\s,;，；、&/])*")


def boxed(text):
    """The answer in the last box, and in the boxes that belong to it."""
    answers, after = [], len(text)
    for box in reversed(list(re.finditer(BOX, text))):
        content, end = _content(text, box, after)
        if content is None or answers and not (answers[0] and _belongs(text[end:after])):
            break
        # 200 characters are enough to see a sign
        sign = "-" if ends_in_minus(text[max(0, box.start() - 200) : box.start()]) else ""
        answers.insert(0, content and sign + content)
        after = box.start()
    return ", ".join(dict.fromkeys(answers)) if answers else None


def _content(text, box, limit):
    """(what the box holds, where it ends); (None, 0) if it is not closed before `limit`."""
    if box["bare"]:
        return box["bare"].rstrip(".,;:"), box.end()
    depth = 1
    for brace in BRACE.finditer(text, box.end(), limit):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return text[box.end() : brace.start()].strip(" \t\n~"), brace.end()
    return None, 0


def _belongs(gap):
    """What is true if the text between two boxes makes one answer of both, as "papers and" does,
    the beginning of an item, or nothing."""
    if re.search(CONCLUDES, gap):
        return False
    *before, line = gap.split("\n")
    if re.search(PART, gap) or before and re.match(ITEM, line):
        return not re.search(TAKES_BACK, line)
    if len(gap) > 80 or re.search(TAKES_BACK, gap) or re.search(FOLLOWS, gap):
        return False
    return re.fullmatch(JOINED, re.sub(BETWEEN, " ", gap))
