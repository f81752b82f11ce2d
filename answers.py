"""What a completion answers: its final answer as text, and the number that such a text states.

    >>> extract_answer("<think>9 + 9</think> **Final Answer:** $18")
    '$18'
    >>> to_number("$18"), to_number("11 5/6 miles")
    (Fraction(18, 1), Fraction(71, 6))

All rewards read a completion by `extract_answer`. So two rewards may pay different amounts for an
answer, but they never disagree about what the answer is. Which forms are read, and which are not:
docs/rewards.md and tests/concepts/verdicts.jsonl. Plain Python.
"""

import re
import unicodedata
from fractions import Fraction

# --- the final answer ---


def extract_answer(text):
    """The final answer of a completion (or of a data set's solution), as text; None without one.

    Thoughts are no answer: only the text after the last `</think>` counts. What a tool wrote is
    none, either: `<result>…</result>`, `<tool_response>…</tool_response>`. These forms are tried
    in order: `<answer>…</answer>`, `\\boxed{…}` (with a minus before it), `#### …`, "the answer is
    …" or "Answer: …" (答案是). The first form that occurs in the text counts. If it occurs several
    times, the last one counts. Boxes that words join are one answer: "\\boxed{1} paper and
    \\boxed{2} bins" gives "1, 2". An empty tag or box gives None. A `####` or "the answer is" with
    no text after it is ignored.
    """
    answer, text = None, after_thoughts(text)
    for form in (_tagged, _boxed, _after_hashes, _after_phrase):
        found = form(text)
        if found is not None:  # it may hold one of the next forms: look inside it
            answer = text = found.strip()
    return answer or None


def gold_answer(text):
    """The gold answer: the final answer of a solution. A bare answer, text or number, stays."""
    return extract_answer(str(text)) or str(text).strip()


def extract_code(text):
    """The program in the last ```python block after the thoughts. None if no block is complete."""
    _, opening, rest = after_thoughts(text).rpartition("```python\n")
    code, closing, _ = rest.partition("```")
    return code if opening and closing else None


# Qwen's templates have <tool_response>
TOOL = re.compile(r"<(result|tool_response)>.*?</\1>", re.DOTALL)


def after_thoughts(text):
    """The text after the last `</think>`, without what a tool wrote. It is empty if the completion
    ended inside a thought."""
    text = text.rpartition("</think>")[2]
    return "" if "<think>" in text else TOOL.sub(" ", text)


def _tagged(text):
    for part in reversed(text.split("</answer>")[:-1]):
        if "<answer>" in part:
            return part.rpartition("<answer>")[2]
    return None


def _after_hashes(text):
    for rest in reversed(text.split("####")[1:]):
        line = rest.split("\n")[0].strip()
        if line:
            return line
    return None


PHRASE = re.compile(
    r"\banswer(?: to (?:the|this) (?:question|problem))?[*_\s]*(?:is\b|[:：=])[*_:：\s]*"
    r"|答案\s*[是为:：][*_:：\s]*",
    re.IGNORECASE,
)
# the end of a sentence: after "Mr" or "Dr" there is none
SENTENCE = re.compile(r"(?<!\b[A-Z][a-z])(?<!\b[A-Z][a-z][a-z])\.[*_]*\s+(?=[A-Z])|。")


def _after_phrase(text):
    for rest in reversed(PHRASE.split(text)[1:]):
        line = rest.strip().split("\n")[0]
        if line:
            return _first_sentence(line)
    return None


def _first_sentence(line):
    """The sentence "$4$" of "$4$. I hope it is correct." The whole line if a number follows: it may
    be another answer."""
    sentence = SENTENCE.split(line)[0]
    if re.search(r"\d", line[len(sentence) :]):
        sentence = line
    sentence = sentence.strip(" \t*_")
    if sentence.endswith(".") and not sentence.endswith(".."):
        sentence = sentence[:-1]
    return sentence.strip(" \t*_")


# --- boxes ---

# \boxed{18}, \boxed {18}, \fbox{18}, and without braces \boxed 18, \boxed\frac12, \boxed A
BOX = re.compile(
    r"\\f?box(?:ed)?\s*(?:(?P<braces>\{)|(?P<bare>(?:[-+.]?\d|-?\\[a-zA-Z]|[A-HJ-Z](?![A-Za-z]))"
    r"(?:(?!\\[)\]])[^\s$])*))"
)
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# between two boxes: LaTeX's spaces and brackets, and the "y =" of \boxed{1}, y = \boxed{2}
BETWEEN_BOXES = re.compile(r"\\(?:[()\[\],;:! ]|q?quad\b|text\b)|[${}]|\b[a-zA-Z]\s*=")
JOINS = {",", ";", "、", "和", "或", "&", "and", "or"}
TAKES_BACK = set("no not wait but so then thus hence therefore rather actually answer".split())


def _boxed(text):
    """The answer in the last box, and in the boxes that words join with it."""
    answers, after = [], len(text)
    for box in reversed(list(BOX.finditer(text))):
        content, end = _content(text, box, after)
        if content is None or answers and not _joins(text[end:after]):
            break
        # 200 characters are enough to see a sign
        sign = "-" if _ends_in_minus(text[max(0, box.start() - 200) : box.start()]) else ""
        answers.insert(0, sign + content if content else "")
        after = box.start()
    if not answers:
        return None
    same = len(set(answers)) == 1
    return answers[0] if same else ", ".join(answers)


def _content(text, box, limit):
    """(what the box holds, where it ends); (None, 0) if it is not closed before `limit`."""
    if box["bare"]:
        return box["bare"].rstrip(".,;:"), box.end()
    depth = 1
    for brace in BRACE.finditer(text, box.end(), limit):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return text[box.end() : brace.start()].strip(), brace.end()
    return None, 0


def _joins(gap):
    """Do the words between two boxes make one answer of both, as ", and" and "papers and" do?"""
    if len(gap) > 80:
        return False
    gap = BETWEEN_BOXES.sub(" ", gap)
    words = re.sub(r"([,;、和或&])", r" \1 ", gap).lower().split()
    known = all(word.isalpha() or word in JOINS for word in words)
    return known and not JOINS.isdisjoint(words) and TAKES_BACK.isdisjoint(words)


# --- the sign of a number or a box ---

MINUS = tuple("-‐‑‒–−－")
# a minus after one of these is a subtraction or a hyphen: a number ("7", "7x") on the same line,
# or a letter without a space in between
SUBTRACTS = re.compile(
    r"(?:[0-9][A-Za-z]?[ \t$*)\]}%°\\]*|[A-Za-z][$*)\]}%°\\]*)\Z")


def _ends_in_minus(before):
    """Does the text before a number or a box end in its minus sign?

    A list bullet, a dash and a subtraction are no minus sign. A minus with white space after it is
    a sign only after "=", after an opening bracket, or at the beginning of the text.
    """
    # these may follow the minus: currency, opening brackets, bold type, LaTeX's spaces
    left = before.rstrip(" \t\n$€£¥₹([{*\\,;:!")
    if not left.endswith(MINUS):
        return False
    gap, left = before[len(left) :], left[:-1]
    if SUBTRACTS.search(left) or left.endswith((*MINUS, "—")):
        return False
    opened = left.rstrip(" \t\n*")
    return (
        not gap[:1].isspace() or not opened or left.endswith("$")
        or opened.endswith(("=", "(", "[", "{", "<answer>"))
    )


# --- numbers ---


def to_number(text):
    """The one number that `text` states, as an exact Fraction; None if it does not state just one.

    Before the number there may be "total =", a sign, a currency. After it there may be a unit, in
    words that do not change its value. So "$1,234.50" and "1234.5 dollars" are the same number,
    "\\frac{3}{4}" and "¾" are 0.75, "2 1/2" is 2.5, "1.5\\times10^3" and "1500元" are 1500. These
    are None: "minus 5", "18 million", "3 fourths", "12 or 13", "1e3", "10-5", "Ann has 18",
    "0.333…", an unfinished division ("36/2"), a text over 100 characters.
    """
    found = number_and_unit(text)
    return found and found[0]


def number_and_unit(text):
    """(the number, its unit) as `to_number` reads them, as (18, "m²") for "18 square meters"; None
    without one number."""
    if len(text) > 100 or ".." in text:
        return None
    text = _plain(text)
    name, _, stated = text.rpartition("=" if "=" in text else ":")
    stated = stated.lstrip()
    number = NUMBER.match(stated)
    if number is None:
        return None
    unit = stated[number.end() :]
    if not WORDS.fullmatch(name) or not WORDS.fullmatch(unit) or _changes_value(name, unit):
        return None
    value = _value(*number.groups(""))
    return None if value is None else (value, _unit(unit))


def same_quantity(given, gold):
    """Do both texts state the same number, and the same unit if both name one?"""
    given, gold = number_and_unit(given), number_and_unit(gold)
    if given is None or gold is None or given[0] != gold[0]:
        return False
    return "" in (given[1], gold[1]) or given[1] == gold[1]


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
    sign = "-" if _ends_in_minus(text[: numbers[-1].start()]) else ""
    return sign + numbers[-1][0]


DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# a sign and digits; then the rest of 1&1/2 (mixed) or 3/4, or the exponent of 1.5×10^3
NUMBER = re.compile(
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


# what keyboards for Chinese and Japanese type (１８ （ ＝ 。 、), and the many kinds of minus
TYPED = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
TYPED |= str.maketrans(dict.fromkeys((*MINUS, "—"), "-") | {"。": ".", "、": ",", "\u3000": " "})
# ½ is " 1/2": then 1½ is "1 1/2"
PARTS = {}
for part in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞":
    PARTS[ord(part)] = " " + unicodedata.normalize("NFKC", part).replace("⁄", "/")
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

FRACTION = re.compile(
    r"\\[dt]?frac\s*(?:\{(-?[0-9]+)\}|([0-9]))\s*(?:\{([0-9]+)\}|([0-9]))")
MIXED = re.compile(r"([0-9])(?:\s|\\[,;:! ])+(?=[0-9]+ */ *[0-9])")
TEN_TO_THE = re.compile(
    r"\s*(?:\\times|\\cdot|[×·*x])\s*10\s*(?:\^\s*\{?(-?[0-9]+)\}?|([⁰¹²³⁴-⁹⁻]+))")
SAID_TWICE = re.compile(r"(?<![0-9.,])([0-9]+) ?\(([A-Za-z]+)\)")  # 2 (two)
POWER_OF_UNIT = re.compile(r"(?<=[A-Za-z])(\}?) *\^ *\{?([23])\}?(?![0-9])")  # m^2
# what may be around a number without changing it: LaTeX's text, spaces and brackets, bold type,
# currency, percent, degrees
DRESS = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|mbox)\b|\\[,;:!]|\^\{?\\circ\}?|\\?[ $%(){}\[\]]"
    r"|(?<![0-9])\*\*|\*\*(?![0-9])|[€£¥￥₹°`'\"]"
)


def _plain(text):
    """A text in which the same number has fewer spellings: 3/4, 1&1/2 (mixed), 1.5×10^3."""
    text = text.translate(TYPED).translate(PARTS).replace("{,}", ",")
    text = FRACTION.sub(r" \1\2/\3\4 ", text)
    text = MIXED.sub(r"\1&", text)
    text = TEN_TO_THE.sub(lambda ten: "×10^" + (ten[1] or ten[2].translate(SUPERSCRIPTS)), text)
    text = SAID_TWICE.sub(lambda m: m[1] if ONES.get(m[2].lower()) == m[1] else m[0], text)
    text = POWER_OF_UNIT.sub(lambda power: "²³"[power[2] == "3"] + power[1], text)
    return DRESS.sub(" ", text).rstrip(" .,;")


# --- words beside a number ---

WORDS = re.compile(r"(?:[^\W\d_]|[\s./])*")
NAMES = "one two three four five six seven eight nine ten".split()
ONES = {name: str(i) for i, name in enumerate(NAMES, 1)}
# words that change the number beside them. Any other word after a number is a unit
CHANGES = set(
    "hundred thousand million billion trillion mil bil mln bln lakh crore dozen half halve third"
    " fifth tenth hundredth squared cubed and or nor not than plus minus negative at least most"
    " more less about approximately roughly nearly almost".split()
) | set(NAMES)
LETTERS = set("k mn bn x y z xy xz yz xyz pi theta".split())  # of a multiple, or of a product
# 3 fourths, a fourth of 3; but 5 fourth graders are 5
PART = re.compile(
    r"(?:four|six|seven|eigh|nin|eleven|twelf|\w{3,5}teen|\w{3,5}tie|thousand|[mb]illion)th(s?)")


def changing_words(text):
    """The words in a text that change the number beside them."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    found = []
    for word, following in zip(words, [*words[1:], "of"]):
        part = PART.fullmatch(word)
        if word.removesuffix("s") in CHANGES or part and (part[1] or following == "of"):
            found.append(word)
    return found


def _changes_value(name, unit):
    """Do the words before and after a number change its value?"""
    words = f"{name} {unit}"
    without_powers = name + re.sub(r"(?<=[^\W\d_²³])[²³]", "", unit)  # cm² is a unit
    if any(map(str.isnumeric, without_powers)) or re.search("[半打α-λν-ω]", words):  # ½, ², 万
        return True
    if re.search(r"\b[BM]\b", words) or changing_words(words):
        return True
    return not LETTERS.isdisjoint(re.findall(r"[^\W\d_]+", unit.lower()))


UNITS = (  # in one spelling
    "millimeter=mm centimeter=cm meter=m metre=m kilometer=km inch=in inche=in foot=ft feet=ft"
    " yard=yd mile=mi gram=g kilogram=kg pound=lb lbs=lb ounce=oz second=s sec=s minute=min hour=h"
    " hr=h hrs=h liter=l milliliter=ml am=am pm=pm"
)
UNITS = dict(pair.split("=") for pair in UNITS.split())


def _unit(words):
    """The words after a number in one spelling: "km/h" for " kilometers per hour"."""
    words = words.lower().replace(".", "").replace(" per ", "/")
    unit = ""
    for word in re.findall(r"[^\W\d_²³]+|[²³/]", words):
        singular = word.removesuffix("s") if len(word) > 4 else word
        unit += UNITS.get(word) or UNITS.get(singular, singular)
    for power, sign in (("square", "²"), ("sq", "²"), ("cubic", "³")):
        if unit.startswith(power):
            unit = unit.removeprefix(power) + sign
    return unit


# --- options ---

# after any opening brackets: a letter alone, "B. 12" or "(B) 12", but not "(A) + 12"
OPTION = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf|mbox)\{)?\(?([A-J])[\s})*$]*"
    r"(?:$|[.:](.*)|(?<=[)}*])(?:[\s~]|\\[ ,;:]|\\q?quad)+(?![\s~\\+*/=^_<>-])(.*))", re.DOTALL)


def same_option(given, gold):
    """Do both name the same option? "(B)", "B. 12" and "\\textbf{(B)}\\ 12" name B."""
    if max(len(given), len(gold)) > 200:
        return False
    given, gold = (OPTION.fullmatch(text.lstrip(" \n$*({")) for text in (given, gold))
    if given is None or gold is None or given[1] != gold[1]:
        return False
    given_text, gold_text = (option[2] or option[3] or "" for option in (given, gold))
    if re.search(r"\b[A-J][.)]|(?:,|/|\bor|\band)[\s(]*[A-J]\b", given_text):
        return False  # several options
    given_text, gold_text = re.sub(r"\W", "", given_text), re.sub(r"\W", "", gold_text)
    return not given_text or not gold_text or given_text == gold_text
