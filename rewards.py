"""Rewards that can be checked (DeepSeek-R1, arXiv 2501.12948 section 2.2.2: accuracy and format), and a model as a judge.

A reward is a plain function, in the form that TRL's trainers use:

    reward(completions: list[str], **columns) -> list[float]

`columns` holds the data set's columns, one entry per completion (a question's columns are repeated for each of its
completions). A reward takes the columns it needs by name and ignores the rest; one of another length is a ValueError.
Plain Python to import; to run, `math_accuracy` needs math-verify, `RewardModel` transformers, programs engine/sandbox.py.
"""

import functools
import json
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from fractions import Fraction

MINUS = tuple("-‐‑‒–−－")
DASHES = str.maketrans(dict.fromkeys((*MINUS, "—"), "-"))
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # the commas of 1,234,567
# what may stand around a number and changes nothing: LaTeX's text, spaces and brackets, bold type, currency, percent, degrees
DRESS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\b|\\[,;:!]|\^\{?\\circ\}?|\\?[ $%(){}\[\]]|\*\*|[€£¥₹°`'\"]")
FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")
# a minus after these is a subtraction or a hyphen: "7" or "7x" before it on the same line; a letter, if no space comes between
SUBTRACTS = re.compile(r"(?:[0-9][A-Za-z]?[ \t$*)\]}%°\\]*|[A-Za-z][$*)\]}%°\\]*)\Z")
DIGITS = r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
# "total =", a sign, a number, perhaps "/" and another, a unit
NUMBER = re.compile(rf"((?:[^\W\d_]|\s)*[=:：])?\s*([-+]?)\s*{DIGITS}(?:\s*/\s*{DIGITS})?((?:[^\W\d_]|[\s./])*)")
# words that make another number of the one beside them; any other word after a number is its unit, as in "5 seventh graders"
MULTIPLES = (
    r"hundred|thousand|[mb]illion|trillion|lakh|crore|dozen|half|halve|third|fifth|tenth|hundredth|squared|cubed"
    r"|(?:four|six|seven|eigh|nin|eleven|twelf|\w{3,5}teen|\w{3,5}tie|thousand|[mb]illion)th(?:s|(?= of\b|[\s.]*$))"
)
MULTIPLE = re.compile(rf"\b(?:{MULTIPLES})s?\b", re.IGNORECASE)
ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
CHANGES_VALUE = re.compile(
    rf"\b(?:[BM]|(?i:{MULTIPLES}|k|[mb]n|[mb]il|[mb]ln|and|or|nor|not|than|plus|minus|negative|{'|'.join(ONES)})s?)\b|半"
)
SAID_TWICE = re.compile("|".join(rf"(?<=(?<![0-9.,]){i}) ?\({word}\)" for i, word in enumerate(ONES, 1)), re.IGNORECASE)  # 2 (two)
POWER = re.compile(r"(?<=[^\W\d_²³])[²³]")  # of a unit: cm²
# <think>…</think>, one newline, <answer>…</answer> or a program, and nothing else; no tag twice
NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
R1_FORMAT = re.compile(rf"<think>{NO_TAG}</think>\n<answer>{NO_TAG}</answer>", re.DOTALL)
CODE_FORMAT = re.compile(rf"<think>{NO_TAG}</think>\n```python\n(?:(?!```).)*\n```", re.DOTALL)
MATH_MARKS = re.compile(r"(?<!\\)(?:\\[()\[\]%]|[$%])")  # $…$, \(…\), \[…\], and percent, which is a unit
MATH_LENGTH = 1000  # characters; the longest gold answer of MATH-500 has 53
MATH_SECONDS = 5.0  # of CPU time for one answer; most take a millisecond, few a tenth of a second
MATH_MEMORY = 4 << 30  # bytes
JUDGE_LOCK = threading.Lock()


# --- what a completion answers ---


def extract_answer(text):
    """The final answer that a completion (or a data set's solution) states, as text; None where it states none.

    Looks after the last `</think>`: what is thought is not answered. There the first of these forms that occurs counts,
    and its last occurrence: `<answer>…</answer>`, `\\boxed{…}` (with a minus before it), `#### …`, "the answer is …".
    An empty tag or box is an empty answer: None. A `####` or "the answer is" that nothing follows is passed over.
    """
    answer, text = None, _said(text)
    for form in (_tagged, _boxed, _after_hashes, _after_phrase):
        found = form(text)
        if found is not None:  # it may hold one of the forms that follow: look inside it
            answer = text = found.strip()
    return answer or None


def _said(text):
    text = text.rpartition("</think>")[2]
    return "" if "<think>" in text else text  # still thinking when it ended


def _tagged(text):
    for part in reversed(text.split("</answer>")[:-1]):
        if "<answer>" in part:
            return part.rpartition("<answer>")[2]
    return None


def _boxed(text):
    before, opening, rest = text.rpartition("\\boxed{")
    sign = "-" if _ends_in_minus(before) else ""
    depth = 1
    for i, c in enumerate(rest if opening else ""):
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return sign + rest[:i].strip() if rest[:i].strip() else ""
    return None


def _ends_in_minus(before):
    """Does `before`, the text before a number or a box, end in a minus that belongs to it: no bullet, dash or subtraction?

    If white space follows the minus, it does only after "=", after an opening bracket, or if nothing stands before it.
    """
    left = before.rstrip(" \t\n$€£¥₹([{*\\,;:!")  # what may stand between: currency, opening brackets, bold type, LaTeX's spaces
    if not left.endswith(MINUS):
        return False
    gap, left = before[len(left) :], left[:-1]
    if SUBTRACTS.search(left) or left.endswith((*MINUS, "—")):
        return False
    opened = left.rstrip(" \t\n*")
    return not gap[:1].isspace() or not opened or left.endswith("$") or opened.endswith(("=", "(", "[", "{", "<answer>"))


def _after_hashes(text):
    lines = (rest.split("\n")[0].strip() for rest in reversed(text.split("####")[1:]))
    return next(filter(None, lines), None)


def _after_phrase(text):
    rests = (rest.strip() for rest in reversed(re.split(r"answer is:?", text, flags=re.IGNORECASE)[1:]))
    return next((rest.split("\n")[0] for rest in rests if rest), None)


def _gold(text):
    return extract_answer(text) or text.strip()


# --- numbers ---


def to_number(text):
    """The one number that `text` states, as an exact Fraction, whatever currency or unit stands beside it; else None.

    Before the number there may be "total =", a sign, a currency; after it a unit, in words that leave its value alone. So
    "$1,234.50" and "1234.5 dollars" are the same number, and "\\frac{3}{4}" is 0.75. None are "minus 5", "18 million",
    "3 fourths", "12 or 13", "1e3", "10-5", "Ann has 18", a division that is left to do ("36/2"), and more than 100 characters.
    """
    if len(text) > 100:
        return None
    text = FRACTION.sub(r" \1/\2 ", SAID_TWICE.sub("", text).replace("{,}", ",").translate(DASHES))
    found = NUMBER.fullmatch(DRESS.sub(" ", text))
    if found is None:
        return None
    name, sign, above, below, unit = found.groups("")
    if CHANGES_VALUE.search(f"{name} {unit}") or any(map(str.isnumeric, name + POWER.sub("", unit))):  # isnumeric: ½, ², 万
        return None
    value = Fraction(sign + above.replace(",", ""))
    if not below:
        return value
    below = Fraction(below.replace(",", ""))
    return value / below if below and (value / below).denominator > 1 else None


def _same_number(given, gold, tolerance=0):
    given, gold = to_number(given), to_number(gold)
    return given is not None and gold is not None and abs(given - gold) <= tolerance * abs(gold)


def gsm8k_accuracy(completions, answer, **columns):
    """2.0 where the answer is exactly the gold one, 1.5 where it is equal as a number ("18.0", "$18"), else 0.0.

    answer: GSM8K's solutions ("… #### 18") or the bare numbers. The values are those of CPPO's published GSM8K setting.
    """
    return [_gsm8k_score(extract_answer(text), _gold(gold)) for text, gold in zip(completions, answer, strict=True)]


def _gsm8k_score(given, gold):
    if given is None:
        return 0.0
    if THOUSANDS.sub("", given) == THOUSANDS.sub("", gold):
        return 2.0
    return 1.5 if _same_number(given, gold) else 0.0


def toy_accuracy(completions, answer, **columns):
    """1.0 where the completion's answer is exactly the gold one, else 0.0: the only reward of the toy (engine/toy.py)."""
    return [1.0 if extract_answer(completion) == gold else 0.0 for completion, gold in zip(completions, answer, strict=True)]


def number_accuracy(completions, answer, **columns):
    """1.0 where the last number that the completion names is the gold one, else 0.0: for models that follow no form.

    A minus between two numbers subtracts and is no sign: "7 - 12" names 12, and "7 - 12 = -5" names -5.
    """
    named = [_last_number(_said(completion)) for completion in completions]
    return [1.0 if number and _same_number(number, _gold(gold)) else 0.0 for number, gold in zip(named, answer, strict=True)]


def _last_number(text):
    *_, last = [None, *re.finditer(DIGITS, text)]
    return last and ("-" if _ends_in_minus(text[: last.start()]) else "") + last[0]


# --- mathematics ---


def math_accuracy(completions, answer, **columns):
    """1.0 where the answer is the gold one's text, or equal to it by the library math-verify; else 0.0.

    answer: LaTeX as in MATH, AMC and AIME ("\\frac{1}{2}", "(3,4]", "27"), or solutions that hold it in a `\\boxed{}`.
    Where it is a number the completion must give one too, not a term of that value ("3*4"). Elsewhere any equal term counts.
    What cannot be parsed, or judged within MATH_SECONDS and MATH_MEMORY, is wrong and no error. `math_accuracy.verdicts`
    counts the completions: right, wrong, none (no answer), unparsed, stopped, no gold. A gold answer that cannot be parsed
    also earns one warning, by name. Raises ImportError where math-verify is not installed. POSIX only.
    """
    verdicts = [_math_verdict(extract_answer(text), _gold(gold)) for text, gold in zip(completions, map(str, answer), strict=True)]
    math_accuracy.verdicts.update(verdicts)
    return [1.0 if verdict == "right" else 0.0 for verdict in verdicts]


math_accuracy.verdicts = Counter()


def _math_verdict(given, gold):
    if given is None:
        return "none"
    given, gold = (MATH_MARKS.sub(" ", latex).rstrip(" .").lstrip() for latex in (given, gold))
    if given == gold:
        return "right"
    if len(given) > MATH_LENGTH:
        return "unparsed"
    if MULTIPLE.findall(given) != MULTIPLE.findall(gold):  # "6\text{ million}": math-verify takes any text for a unit
        return "wrong"
    verdict = _ask_judge(gold, given)
    if verdict == "no gold":
        _warn_of_gold(gold)
    return verdict


@functools.cache
def _warn_of_gold(gold):
    warnings.warn(f"math_accuracy cannot parse the gold answer {gold!r}: only that very text scores.", stacklevel=2)


@functools.lru_cache(maxsize=4096)  # completions of one question often agree
def _ask_judge(gold, given):
    with JUDGE_LOCK:
        if _judge().poll() is not None:
            _judge.cache_clear()
        judge = _judge()
        try:
            print(json.dumps([gold, given, MATH_SECONDS]), file=judge.stdin, flush=True)
            verdict = judge.stdout.readline().strip()
        except BaseException:  # interrupted: its verdict would be read as that of the next answer
            judge.kill()
            judge.wait()
            raise
        if not verdict:  # it ran out of time or memory, and is gone
            judge.wait()
        return verdict or "stopped"


@functools.cache
def _judge():
    """A process of its own for sympy, which can work on for hours: from any thread of ours, a process is all that can be stopped."""
    pipe = subprocess.PIPE
    judge = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    if judge.stdout.readline() != "ready\n":
        raise ImportError("math_accuracy cannot run math-verify: is it installed? pip install math-verify")
    return judge


def _serve_as_judge():
    """That process: lines of [gold, given, seconds] in, a line with the verdict out. It ends with its input or by the alarm."""
    import logging
    import resource

    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import FiniteSet, Number

    logging.disable()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the alarm kills, whatever it did in the process that started this one
    resource.setrlimit(resource.RLIMIT_AS, (MATH_MEMORY, MATH_MEMORY))
    form = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    options = dict(fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None)
    print("ready", flush=True)
    for line in sys.stdin:
        *texts, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time: a verdict does not depend on what else the machine does
        gold, given = (parse(f"\\boxed{{{latex}}}", form, **options) for latex in texts)
        value = getattr(given[0], "rhs", given[0]) if given else None  # the 5 of "x=5"
        # of "x=5 \lor x=6" only the last equation is read, unless all are read as a set
        several = texts[1].count("=") > max(1, texts[0].count("=")) and not isinstance(value, FiniteSet)
        # "3*4" is 12 and no answer: often it is the question. Binomials are worked out while they are read
        worked_out = isinstance(value, Number) and "binom" not in texts[1]
        undone = gold and isinstance(gold[0], Number) and not worked_out
        right = gold and given and not several and not undone and verify(gold, given, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print("no gold" if not gold else "unparsed" if not given else "right" if right else "wrong", flush=True)


# --- a program as the answer: <think>…</think>, then a ```python block that prints it ---


def extract_code(text):
    """The program in the last ```python block after the thoughts; None where there is none, or its end is missing."""
    _, opening, rest = _said(text).rpartition("```python\n")
    code, closing, _ = rest.partition("```")
    return code if opening and closing else None


def code_accuracy(completions, answer, **columns):
    """1.0 where the program runs to its end and prints the gold answer, as text or number, and nothing else; else 0.0.

    Numbers may differ by 1e-9 of their size, as 0.1 + 0.2 and 0.3 do. answer: as in `gsm8k_accuracy`.
    """
    pairs = [(output, _gold(gold)) for output, gold in zip(_outputs(tuple(completions)), answer, strict=True)]
    same = lambda output, gold: output == gold or _same_number(output, gold, Fraction(1, 10**9))
    return [1.0 if output is not None and same(output, gold) else 0.0 for output, gold in pairs]


def code_runs(completions, **columns):
    """0.5 where the program runs to its end and prints one number, be it wrong; -0.1 otherwise, also without a program."""
    return [-0.1 if output is None or to_number(output) is None else 0.5 for output in _outputs(tuple(completions))]


def code_format(completions, **columns):
    """1.0 for `<think>…</think>`, a newline and one ```python block, and nothing before, between or after; else 0.0."""
    return [1.0 if CODE_FORMAT.fullmatch(completion) else 0.0 for completion in completions]


@functools.lru_cache(maxsize=4)  # several rewards look at the same completions: each program runs once
def _outputs(completions):
    """What the program of each completion prints; None where there is no program or it does not run to its end."""
    from engine.scoring.sandbox import run_many

    programs = [extract_code(completion) for completion in completions]
    distinct = list(dict.fromkeys(program for program in programs if program is not None))
    results = dict(zip(distinct, run_many(distinct), strict=True))
    return [results[p].stdout.strip() if p is not None and results[p].ok else None for p in programs]


# --- format ---


def format_reward(completions, **columns):
    """1.0 for `<think>…</think>\\n<answer>…</answer>` and nothing before, between or after; else 0.0. (R1's template)"""
    return [1.0 if R1_FORMAT.fullmatch(completion) else 0.0 for completion in completions]


def soft_format_reward(completions, **columns):
    """0.25 for each of the four tags that occurs exactly once and after the one before it: a way up to `format_reward`."""
    return [_soft_format_score(completion) for completion in completions]


def _soft_format_score(completion):
    score, position = 0.0, 0
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        found = completion.find(tag, position)
        if completion.count(tag) == 1 and found >= 0:
            score, position = score + 0.25, found + len(tag)
    return score


# --- a model as the judge ---


class RewardModel:
    """A reward that asks a model: any of transformers' sequence classifiers with one label. Its logit is the reward.

    It reads question and completion as a chat where its tokenizer has a template, else one after the other. Weights are
    float32, dropout is off. device: None is this process's GPU, if any. Raises ValueError if there are more labels, or if the
    weights lack some: transformers would draw these at random, on every rank others.
    """

    def __init__(self, name, *, device=None, batch_size=16):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.__name__, self.batch_size = "reward_model", batch_size
        self.tokenizer = AutoTokenizer.from_pretrained(name, padding_side="right", truncation_side="left")
        options = {"dtype": torch.float32, "output_loading_info": True}
        self.model, loading = AutoModelForSequenceClassification.from_pretrained(name, **options)
        self.model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
        if self.model.config.num_labels != 1:
            raise ValueError(f"{name} has {self.model.config.num_labels} labels: a reward model has one.")
        if loading["missing_keys"]:
            raise ValueError(f"the weights of {name} lack {min(loading['missing_keys'])}: it is no reward model.")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # a causal model's score is read at the last token that is not this one: it must be what we pad with
        self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    def __call__(self, completions, question, **columns):
        import torch

        texts = [self.text(*pair) for pair in zip(question, completions, strict=True)]
        plain, cut = self.tokenizer.chat_template is None, self.tokenizer.model_max_length < 10**6
        scores = []
        for start in range(0, len(texts), self.batch_size):
            batch = texts[start : start + self.batch_size]
            inputs = self.tokenizer(batch, add_special_tokens=plain, padding=True, truncation=cut, return_tensors="pt")
            with torch.no_grad():
                scores += self.model(**inputs.to(self.model.device)).logits[:, 0].tolist()
        return scores

    def text(self, question, completion):
        """What the model reads."""
        if self.tokenizer.chat_template is None:
            return question + completion
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
        return self.tokenizer.apply_chat_template(turns, tokenize=False)


if __name__ == "__main__":
    _serve_as_judge()
