"""The words beside a number: which are its unit, and which change its value."""

import re

NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety")
DIGITS = "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 30 40 50 60 70 80 90"
NUMBER_WORDS = dict(zip(NAMES.split(), DIGITS.split(), strict=True))

# --- words that change the number beside them ---

CHANGES = (
    "hundred thousand thou million billion trillion quadrillion quintillion zillion myriad"
    " mil mille bil mln bln lakh lac crore grand millones milliard"
    " multiple double triple dozen score gross pair couple time fold basis"
    " half halve third fifth tenth hundredth squared cubed root factorial mod modulo remainder"
    " log(?!s) ln exp sin cos tan theta alpha beta gamma lambda omega"
    " minus negative plus below under beneath above (?<!left.)over debt deficit and or nor than"
    " not? never none at.least at.most most more less fewer about approx approximately roughly"
    " nearly almost odd or.so thereabout max min(?:imum) maximum guess estimated? maybe perhaps"
    " possibly probably wrong incorrect false untrue mistake error "
)
# 3 fourths, a fourth of 3; but 5 fourth graders are 5
PART = (
    r"(?:four|six|seven|eigh|nin|eleven|twelf|\w{3,5}teen|\w{3,5}tie|thousand|[mb]illion)th"
    r"(?:s|(?=\W*(?:of\b|\Z)))")
CHANGING = (
    rf"(?<![a-z])(?:(?:{(CHANGES + NAMES).replace(' ', '|')})s?|{PART})(?![a-z])")


def changes_number(words):
    """Does one of the words change the number beside it, as in "18 million" and "18 or so"?"""
    return re.search(CHANGING, words.lower()) is not None


# --- units ---

UNITS = dict(pair.split("=") for pair in (  # in one spelling
    "millimeter=mm centimeter=cm meter=m metre=m kilometer=km inch=in inche=in foot=ft feet=ft"
    " yard=yd mile=mi gram=g kilogram=kg pound=lb ounce=oz second=s sec=s minute=min hour=h hr=h"
    " liter=l milliliter=ml square=² sq=² cubic=³ rad=radian degc=degreecelsius"
    " degf=degreefahrenheit celsiu=celsius pct=percent percentage=percent usd=dollar"
    " eur=euro gbp=lb 美元=dollar 欧元=euro 度=degree mph=mi/h kph=km/h"
).split())
SIGNS = str.maketrans({
    "$": " dollars ", "€": " euros ", "£": " pounds ", "%": " percent ", "°": " degrees "})
# what follows one of these may be left out: "18 dollars each" is $18
MAY_END = " dollar euro lb percent degree".split(" ")
# words that end a unit as a plural does
KNOWN = (
    "mm cm m km in inch ft foot feet yd mi g kg lb lbs oz s sec min h hr hrs l ml am pm mph kph rpm"
    " hz kwh gb mb degc degf celsius fahrenheit kelvin degree radian rad percent percentage pct"
    " usd eur gbp rmb cny yuan yen people children men women fish sheep deer mice geese teeth clock"
    " meter metre mile yard gram kilogram pound ounce second minute hour liter dollar cent unit"
    " cup day egg box bag can jar pie bar car pen dog cat cow pet toy hat man boy row ton lap gal"
    " old long tall high wide deep left over total altogether remaining each apiece"
).replace(" ", "|")
# "square feet", "miles/hour", "blue marbles in the bag": a plural, and what belongs to it
UNIT = (
    rf"(?:(?:[a-z]{{3,}} |us |sq |cu |fl |o ){{0,3}}?(?:(?:[a-z]{{2,}}[a-hj-rtv-z]s|{KNOWN})"
    r"|(?P<singular>[a-z]{4,}))[²³]?)?(?:"
    rf"/(?:[a-z]{{4,}}[a-z ]*|{KNOWN})[²³]?)?"
    r"(?: ?\b(?:an?|of|each|every|in|for|at|on|from)(?: [a-z]{2,})+)?")
UNKNOWN_LETTER = (r"(?<![A-Za-z])(?:[A-KM-Z]|MM)(?![A-Za-z])")  # 18 M
# Chinese: a measure word and perhaps what is counted, 18个苹果. 18成, 18倍, 18多, 18以上 are others
CHANGES_HAN = (
    "一二三四五六七八九十百千万亿半多余几以上下左右内外前后倍成折之不无没非错约近至整来许负零亏欠和或起出强弱方估猜可概应似")
HAN = rf"(?:(?![{CHANGES_HAN}])[\u4e00-\u9fff])"
MEASURED = (
    r"(?:(?:平方|立方)?[千毫厘分公海英]?[米克升里斤尺寸顷]|小时|分钟|星期|[美欧日港]元"
    r"|[个個只名位人天年月日号时秒分元円块角毛钱本张支枝条头匹辆艘架座间套件枚份盒箱袋包瓶杯碗盘篮筐朵棵株片颗粒根页"
    r"字题道次遍步层楼排行列组队班户家场节课周岁度吨亩股票点级种样粒串把台扇口面顶门])"
    rf"{HAN}{{0,4}}")
HAN_UNIT = rf"{MEASURED}(?:[/每]{MEASURED})?"


def unit_of(words, of_one=False):
    """The unit that these words after a number are, in one spelling: "km/h" for " kilometers per
    hour", "²m" for "square meters", "" without words. None if they are no unit, or change the
    number.

    of_one: whether the number is at most 1; then its unit may be a singular.
    """
    words = words.replace(".", "").translate(SIGNS)
    if re.search(UNKNOWN_LETTER, words):
        return None
    words = re.sub(r"\s*(?:/|\bper\b)\s*", "/", " ".join(words.lower().split()))
    unit = re.fullmatch(UNIT, words)
    if unit is None or unit["singular"] and not of_one or changes_number(words):
        return UNITS.get(words, words) if re.fullmatch(HAN_UNIT, words) else None
    # without the plural's "s", and with a power in front
    words = re.sub(
        r"([a-z]+?)s?([²³]?)(?![a-z])", lambda word: word[2] + UNITS.get(word[1], word[1]), words)
    return words.replace(" ", "")


def same_unit(given, gold):
    """Are both the same unit, as `unit_of` spells them? One may be left out."""
    if given in MAY_END and gold.startswith(given):
        return True
    return given == gold or gold in MAY_END and given.startswith(gold)
