"""The words beside a number: which are its unit, and which change its value."""

import re

NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen").split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
NUMBER_WORDS = {name: str(number) for number, name in enumerate(NAMES)}
NUMBER_WORDS |= {name: f"{number}0" for number, name in enumerate(TENS, 2)}

# --- words that change the number beside them ---

CHANGES = (
    # multiples and parts
    "hundred thousand thou million billion trillion mil mille bil mln bln lakh lac crore grand millones milliard"
    " dozen score gross pair couple time fold basis half halve third fifth tenth hundredth"
    # calculations, signs and sides
    " squared cubed root factorial mod modulo remainder minus negative plus below under beneath"
    " above (?<!left.)over debt deficit and or.so or nor than theta alpha beta gamma lambda omega"
    # not quite
    " not? never none at.least at.most most more less fewer about approx approximately roughly"
    " nearly almost odd thereabout max min(?:imum) maximum guess estimated? maybe perhaps possibly"
    " probably wrong incorrect false untrue mistake error"
).split()
# 3 fourths, a fourth of 3; but 5 fourth graders are 5
PART = (
    r"(?:four|six|seven|eigh|nin|eleven|twelf|\w{3,5}teen|\w{3,5}tie|thousand|[mb]illion)th"
    r"(?:s|(?=\W*(?:of\b|\Z)))")
CHANGING = re.compile(
    rf"(?<![\\a-z])(?:(?:{'|'.join([*CHANGES, *NAMES, *TENS])})s?|{PART})(?![a-z])")


def changing_words(text):
    """The words in a text that change the number beside them."""
    return CHANGING.findall(text.lower())


# --- units ---

UNITS = (  # in one spelling
    "millimeter=mm centimeter=cm meter=m metre=m kilometer=km inch=in inche=in foot=ft feet=ft"
    " yard=yd mile=mi gram=g kilogram=kg pound=lb lbs=lb ounce=oz second=s sec=s minute=min hour=h"
    " hr=h hrs=h liter=l milliliter=ml am=am pm=pm"
)
UNITS = dict(pair.split("=") for pair in UNITS.split())
# words that end a unit as a plural does
KNOWN = (
    "percent percentage pct degree radian degc degf celsius mph kph rpm hz kwh gb mb usd eur gbp rmb cny"
    " yuan yen people children men women fish sheep deer mice geese teeth bacteria clock"
    " cup day egg box bag can jar pie bar car pen dog cat cow pet toy hat man boy row ton lap gal"
    " year.old old long tall high wide deep left over total altogether remaining each apiece"
).split()
PLURAL = r"[a-z]{2,}[a-hj-rtv-z]s|" + "|".join([*UNITS, *UNITS.values(), *KNOWN])


def _noun_phrase(noun):
    """"square feet", "miles/hour", "blue marbles in the bag": a noun, and what belongs to it."""
    return re.compile(
        rf"(?:(?:[a-z]{{3,}} |sq |cu |fl |o ){{0,3}}(?:{noun})[²³]?)?(?:/[a-z ]+[²³]?)?"
        rf"(?: ?\b(?:an?|of|each|every|in|for|at|on|from)(?: [a-z]{{2,}})+)?")


UNIT, UNIT_OF_ONE = _noun_phrase(PLURAL), _noun_phrase(rf"{PLURAL}|[a-z]{{4,}}")
# Chinese: a measure word and perhaps what is counted, 18个苹果. 18成, 18倍, 18多, 18以上 are others
CHANGES_HAN = (
    "一二三四五六七八九十百千万亿半多余几以上下左右内外前后倍成折之不无没非错约近至整来许负零亏欠和或起出强弱方")
HAN = rf"(?:(?![{CHANGES_HAN}])[\u4e00-\u9fff])"
MEASURED = (
    r"(?:(?:平方|立方)?[千毫厘分公海英]?[米克升里斤尺寸顷]|小时|分钟|星期|[美欧日港]元"
    r"|[个個只名位人天年月日号时秒分元円块角毛钱本张支枝条头匹辆艘架座间套件枚份盒箱袋包瓶杯碗盘篮筐朵棵株片颗粒根页"
    r"字题道次遍步层楼排行列组队班户家场节课周岁度吨亩股票点级种样粒串把台扇口面顶门])"
    rf"{HAN}{{0,4}}")
HAN_UNIT = re.compile(rf"{MEASURED}(?:[/每]{MEASURED})?")


def unit_of(words, of_one=False):
    """The unit that these words after a number are, in one spelling: "km/h" for " kilometers per
    hour"; "" without words. None if they are none, or change the number.

    of_one: whether the number is at most 1; then its unit is no plural.
    """
    words = words.replace(".", "")
    if re.search(r"(?<![A-Za-z])(?:[A-KM-Z]|MM)(?![A-Za-z])", words):
        return None  # 18 M
    words = re.sub(r"\s*(?:/|\bper\b)\s*", "/", " ".join(words.lower().split()))
    if HAN_UNIT.fullmatch(words.replace(" ", "")):
        return words.replace(" ", "")
    form = UNIT_OF_ONE if of_one else UNIT
    if not form.fullmatch(words) or changing_words(words):
        return None
    unit = ""
    for word in re.findall(r"[a-z]+|[²³/]", words):
        singular = word.removesuffix("s") if len(word) > 3 else word
        unit += UNITS.get(word) or UNITS.get(singular, singular)
    for power, sign in (("square", "²"), ("sq", "²"), ("cubic", "³")):
        if unit.startswith(power):
            unit = unit.removeprefix(power) + sign
    return unit
