"""The number or the option that an answer states, and whether two answers state the same."""

import re
import unicodedata
from fractions import Fraction

from answers.units import HAN, NUMBER_WORDS, changes_number, same_unit, unit_of

# --- the sign of a number or a box ---

MINUS = "-‐‑‒–−－"
# between the minus and the number: currency, opening brackets, bold type, LaTeX's spaces
SIGN = rf"[{MINUS}](\s)?[ \t\n$€£¥₹(\[{{*\\,;:!]*\Z"
# a minus after one of these is a subtraction, a hyphen or a dash: a number ("7", "7x") on the same
# line, a letter without a space in between, a dash
SUBTRACTS = (
    rf"(?:[0-9][A-Za-z]?[ \t$*)\]}}%°\\]*|[A-Za-z][$*)\]}}%°\\]*|[{MINUS}—])\Z")
OPENS = r"(?:\A|[=(\[{]|(?i:<answer>))[\s*]*\Z|\$\Z"


def ends_in_minus(before):
    """Does the text before a number or a box end in its minus sign?

    A list bullet, a dash and a subtraction are no minus sign. A minus with white space after it is
    a sign only after "=", after an opening bracket, or at the beginning of the text.
    """
    sign = re.search(SIGN, before)
    if sign is None:
        return False
    left = before[: sign.start()]
    if re.search(SUBTRACTS, left):
        return False
    return sign[1] is None or re.search(OPENS, left) is not None


# --- numbers ---


def to_number(text):
    """The one number that `text` states, as an exact Fraction; None if it does not state just one.

    Before the number there may be "total =", a true sum as "9 * 2 =", a sign, a currency. After it
    there may be a unit, in words that do not change its value. So "$1,234.50" and "1234.5 dollars"
    are the same number, "\\frac{3}{4}" and "¾" are 0.75, "2 1/2" is 2.5, "1.5\\times10^3",
    "1.5e+03" and "1500元" are 1500, and "0.\\overline{3}" is 1/3. These are None: "minus 5",
    "18 million", "3 fourths", "12 or 13", "1e3", "10-5", "Ann has 18", "0.333…", an unfinished
    division ("36/2"), a text over 100 characters.
    """
    found = number_and_unit(text)
    return found and found[0]


def number_and_unit(text):
    """(the number, its unit) as `to_number` reads them, as (18, "m²") for "18 square meters"; None
    without one number."""
    found = _stated(text)
    return found and found[:2]


def _stated(text):
    """(the number, its unit, its name), as (18, "m²", "area") for "Area = 18 square meters"."""
    if len(text) > 100 or ".." in text:
        return None
    text = _plain(text)
    before, _, stated = text.rpartition("=" if "=" in text else ":")
    stated = stated.lstrip()
    number = re.match(NUMBER, stated)
    if number is None or changes_number(before):
        return None
    value = _value(*number.groups(""))
    sides = before.split("=")  # of "x = 10/12 = 5/6"
    named = all(
        re.fullmatch(NAME, side) or "=" in text and _calculated(side) == value for side in sides)
    if value is None or not named:
        return None
    unit = unit_of(stated[number.end() :], of_one=abs(value) <= 1)
    name = re.sub(NO_NAME, "", sides[0].lower())
    return None if unit is None else (value, unit, name)


def same_quantity(given, gold):
    """Do both texts state the same number, and the same unit and name if both have one? A letter
    may stand for any name: "n = 2" and "Total = 2" are the same, "x = 2" and "y = 2" are not."""
    given, gold = _stated(given), _stated(gold)
    if None in (given, gold) or re.fullmatch(OTHER_NAME, f"{given[2]}\n{gold[2]}"):
        return False
    return _same(given[:2], gold[:2])


def _same(given, gold):
    """Pairs like (18, "m²"): are they equal, although one may leave out the second?"""
    return None not in (given, gold) and given[0] == gold[0] and same_unit(given[1], gold[1])


def same_number(given, gold, tolerance=0):
    """Do both texts state a number, and are the two equal up to `tolerance` · the gold number?"""
    given, gold = to_number(given), to_number(gold)
    return None not in (given, gold) and abs(given - gold) <= tolerance * abs(gold)


def last_number(text):
    """The digits of the last number in a text, with its sign; None without one."""
    text = text.translate(TYPED)
    numbers = list(re.finditer(DIGITS, text))
    if not numbers:
        return None
    sign = "-" if ends_in_minus(text[: numbers[-1].start()]) else ""
    return sign + numbers[-1][0]


# what the number is: "total =", "答案:"
NAME = rf"(?:[A-Za-z\s./$]|{HAN})*"
NO_NAME = r"[^a-z\\\u4e00-\u9fff]"
# two letters, or two names
OTHER_NAME = r"(?!(.+)\n\1\Z)(?:(?:\w|\\\w+)\n(?:\w|\\\w+)|\w{2,}\n\w{2,})"
DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# a sign and digits; then the rest of 1&1/2 (mixed) or 3/4, or the exponent of 1.5×10^3
NUMBER = (
    rf"([-+]?)\s*({DIGITS})(?:&([0-9]+))?(?:\s*/\s*({DIGITS}))?(?:×10\^(-?[0-9]{{1,3}})(?![0-9]))?")


def _value(sign, digits, above, below, exponent):
    value = Fraction(digits.replace(",", ""))
    if exponent:
        if below or not re.fullmatch(r"[1-9](\.[0-9]+)?", digits):
            return None  # 15×10^2 and 3/4×10^2 are products, left to do
        value *= Fraction(10) ** int(exponent)
    if below:
        below = Fraction(below.replace(",", ""))
        part = (Fraction(above) if above else value) / below if below else Fraction(0)
        if part.denominator == 1 or above and part > 1:
            return None  # a division that is left to do: 36/2, 18/0, 1 6/3
        value = value + part if above else part
    return -value if sign == "-" else value


# "9 * 2 + 1", of which each number may be in dollars
SUM = rf"\s*([-+*/]?)[\s$€£]*({DIGITS})[\s$€£]*"


def _calculated(text):
    """The value of a sum of products and quotients; None if the text is no sum."""
    text = re.sub(r"\\times|\\cdot|[×·]", "*", text)
    if re.sub(SUM, "", text):
        return None
    total = product = Fraction(0)
    for mark, digits in re.findall(SUM, text):
        number = Fraction(digits.replace(",", ""))
        if mark == "*":
            product *= number
        elif mark == "/":
            product = product / number if number else Fraction(0)
        else:
            total += product
            product = -number if mark == "-" else number
    return total + product


# what keyboards for Chinese and Japanese type (１８ （ ＝ 。 、), and the many kinds of minus
TYPED = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
TYPED |= str.maketrans("‐‑‒–−－—。、\u3000", "-------., ")
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

# what is only dress in LaTeX, and what has another name: (pattern, what it means)
LATEX = [
    # 1.5e-05, as Python prints it; but 1e3 and 2e-1 may be products of the number e
    (r"(?<![\w.])(\d\.\d+(?=[eE])|(?:1|\d(?=[eE][-+]\d\d))(?=[eE][-+]))[eE](?:\+|(-))?0*(\d+)"
     r"(?!\w|\.\d)", r"\1\\times10^{\2\3}"),
    # 0.1\overline{6} is (16 - 1)/90
    (r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
    (r"\\(?:overline|bar|dot)\s*(\d)", r"\\overline{\1}"),
    (r"(\d{1,50})\.(\d{0,50})(?:\\(?:overline|bar|dot)\s*\{(\d{1,50})\})",
     lambda part: rf"\frac{{{int(part[1] + part[2] + part[3]) - int(part[1] + part[2])}}}"
                  rf"{{{'9' * len(part[3]) + '0' * len(part[2])}}}"),
    # ½ is " 1/2": then 1½ is "1 1/2"
    (r"[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]",
     lambda part: " " + unicodedata.normalize("NFKC", part[0]).replace("⁄", "/")),
    (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    (r"\\(?:boldsymbol|bm|underline|displaystyle|[bB]igg?[lrm]?)(?![A-Za-z])\s*", ""),
    (r"\\degree(?![A-Za-z])", r"^\\circ"),
    (r"\{\s*((?:[^{}]|\{[^{}]*\})*?)\s*\\over(?![a-z])\s*((?:[^{}]|\{[^{}]*\})*?)\s*\}",
     r"\\frac{\1}{\2}"),
    (r"^\s*(-?)([^,=()&]*?)\s*\\over(?![a-z])\s*([^,=()&]*?)\s*$", r"\1\\frac{\2}{\3}"),
    # a space; but "~18" is about 18
    (r"(?<=[\w{}\\/])\s*~(?!\d{3}(?!\d))", " "),
    # $…$ and $$…$$, but not \$
    (r"(?<!\\)(\$\$?)((?:[^$\\]|\\.)*)(?<!\\)\1", r" \2 "),
    (r"\\([$%])", r"\1"),
]
# the same number in fewer spellings
NUMBERS = [
    (r"\{,\}", ","),
    (r"\\[cdt]?frac\s*(?:\{(-?[0-9]+)\}|([0-9]))\s*(?:\{([0-9]+)\}|([0-9]))", r" \1\2/\3\4 "),
    (r"([0-9])(?:\s|\\[,;:! ])+(?=[0-9]+ */ *[0-9])", r"\1&"),
    (r"\s*(?:\\times|\\cdot|[×·*x])\s*10\s*(?:\^\s*\{?(-?[0-9]+)\}?|([⁰¹²³⁴-⁹⁻]+))",
     lambda ten: "×10^" + (ten[1] or ten[2].translate(SUPERSCRIPTS))),
    # 2 (two)
    (r"(?<![0-9.,])([0-9]+) ?\(([A-Za-z]+)\)",
     lambda m: m[1] if NUMBER_WORDS.get(m[2].lower()) == m[1] else m[0]),
    # m^2
    (r"(?<=[A-Za-z])(\}?) *\^ *\{?([23])\}?(?![0-9])",
     lambda power: "²³"[power[2] == "3"] + power[1]),
    (r"(?:°|\^\{?\\circ\}?)\s*(?:\\[a-z]+\{)?([CF])\b", r" deg\1 "),
    (r"\^\{?\\circ\}?", "°"),
    # $18 is 18 $
    (r"([$€£])(\W*[0-9][0-9.,/&×^ -]*(?<=[0-9])|\W*\.[0-9]+)", r"\2 \1 "),
    # what may be around a number: LaTeX's text, spaces and brackets, bold type, other currencies
    (r"\\(?:text|textbf|mathrm|mathbf|mbox)\b|\\[,;:!]|\\?[ (){}\[\]]"
     r"|(?<![0-9])\*\*|\*\*(?![0-9])|[¥￥₹`'\"]", " "),
]


def respelled(text, table):
    """The text in the spelling of a table of (pattern, what it means)."""
    for pattern, meaning in table:
        text = re.sub(pattern, meaning, text)
    return text


def _plain(text):
    """A text in which the same number has fewer spellings: 3/4, 1&1/2 (mixed), 1.5×10^3."""
    return respelled(text.translate(TYPED), LATEX + NUMBERS).rstrip(" .,;")


# --- options ---

# after any opening brackets: a letter alone, "B. 12" or "(B) 12", but not "(A) + 12"; no other
# option after it
OPTION = (
    r"(?s)(?:\\(?:text|textbf|mathrm|mathbf|mbox)\{)?\(?([A-J])"
    r"(?!.*(?:\b[A-J][.)]|(?:,|/|\bor|\band)[\s(]*[A-J]\b))[\s})*$]*"
    r"(?:\Z|[.:]|(?<=[)}*])(?:[\s~]|\\[ ,;:]|\\q?quad)+(?![\s~\\+*/=^_<>-]))(.*)")


# around and between the letters of several options
DRESS = r"\\(?:text\w*|math\w+|mbox)(?![A-Za-z])|\\[,;:! ]|\band\b|[\s(){}*$.,;&~]"
LISTED = r"(?s)(?<![A-Za-z])A[.):}].*(?<![A-Za-z])B[.):}]"  # (A) 12 (B) 13


def same_option(given, gold, question=None):
    """Do both name the same option? "(B)", "B. 12" and "\\textbf{(B)}\\ 12" name B.

    Or the same options in any order, as "A, C" and "(C) and (A)"? The gold answer "AC" may be
    another name, so the question must list options. Without a question, it must have three letters
    or more, in the order of the alphabet.
    """
    options = _options(gold)
    if options and options == _options(given):
        if not re.search("[A-J]{2}", gold):
            return True
        if question is None:
            return len(options) > 2 and options in gold
        return re.search(LISTED, str(question)) is not None
    return _same(_option(given), _option(gold))


def _options(text):
    """"ACD" for "(D), (A) and (C)"; None if the text names fewer than two options."""
    letters = re.sub(DRESS, "", text)
    several = re.fullmatch(r"(?=[A-J]{2,10}\Z)(?!.*(.).*\1).*", letters)
    return several and "".join(sorted(letters))


def _option(text):
    """("B", "12") for "B. 12"."""
    option = re.fullmatch(OPTION, text.lstrip(" \n$*({")) if len(text) <= 200 else None
    return option and (option[1], re.sub(r"\W", "", option[2]))
