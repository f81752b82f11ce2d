"""What the answer of a completion is, as text."""

import re

from answers.boxes import BULLET, EQUATION, TAKES_BACK, boxed


def extract_answer(text):
    """The final answer of a completion (or of a data set's solution), as text; None without one.

    Thoughts are no answer, and neither is what a tool wrote (`after_thoughts`). These forms are
    tried in order: `<answer>…</answer>`, `\\boxed{…}` (with a minus before it), `#### …`, "the
    answer is …" or "Answer: …" (答案是). The first form that occurs in the text counts. If it
    occurs several times, the last one counts. Boxes that belong together are one answer:
    "\\boxed{1} paper and \\boxed{2} bins" gives "1, 2". So are the lines of a list. An empty tag or
    box gives None. A `####` or "the answer is" with no text after it is ignored.
    """
    answer, text = None, after_thoughts(text)
    for pattern, meaning in MARKS:
        text = re.sub(pattern, meaning, text)
    tags = re.findall(TAG, text)
    if tags:
        answer = text = tags[-1].strip()
    for form in (_boxed, _after_hashes, _after_phrase):
        found = form(text)
        if found is not None:  # it may hold one of the next forms: look inside it
            answer = text = found.strip()
    return answer or None


def gold_answer(text):
    """The gold answer: the final answer of a solution. A bare answer, text or number, stays."""
    return extract_answer(str(text)) or str(text).strip()


def extract_code(text):
    """The program in the last block after the thoughts that `python_fences` names. None if no block
    is complete."""
    _, opening, rest = python_fences(after_thoughts(text)).rpartition("```python\n")
    code, closing, _ = rest.partition("```")
    return code if opening and closing else None


FENCE = r"(?i)```(?:python3?|py)\b[ \t]*"
ONLY_BLOCK = (
    r"(?s)\A((?:(?!```).)*)```[ \t]*(?=\n(?:(?!```).)*(?:```(?:(?!```).)*)?\Z)")


def python_fences(text):
    """The text with ```python for each fence that opens a program: ```python3, ```py, and ```
    without a name if it opens the only block."""
    return re.sub(ONLY_BLOCK, r"\1```python", re.sub(FENCE, "```python", text))


# --- thoughts ---

# the name in <think>, <reasoning>, <seed:think>, <|begin_of_thought|>, <|START_THINKING|>
THOUGHT = (
    r"[\w:|-]{0,20}(?:think|thought|reason|reflect|rationale|scratchpad|analysis|inner_"
    r"|\b(?:cot|plan|planning)\b)[\w:|-]{0,20}")
# Magistral has [THINK], Kimi ◁think▷, MedGemma <unused94>, and gpt-oss channels; if its special
# tokens are left out, its completion begins as "analysisWe need"
BEGINS = (
    rf"(?i)<{THOUGHT}>|\[think\]|◁think▷|<unused94>|\A(?-i:analysis)(?=[A-Za-z])"
    r"|<\|channel\|?>(?:analysis|commentary|thought)")
# the end of the thoughts, or the mark of the final answer
ENDS = (
    rf"(?i)<(?:\|?/|\|(?=end|inner_suffix)){THOUGHT}>|\[/think\]|◁/think▷"
    r"|<\|channel\|>final<\|message\|>|<channel\|>|assistantfinal|<unused95>"
    r"|\[begin final response\]|here is my response:")
# Qwen's templates have <tool_response>
TOOL = r"(?s)<(result|tool_response)>(?:(?!<\1>).)*?</\1>"


def after_thoughts(text):
    """The text after the last end of a thought, as `</think>`, without what a tool wrote. It is
    empty if the completion ended inside a thought."""
    text = re.split(ENDS, text)[-1]
    if re.search(BEGINS, text):
        return ""
    text = text.replace("<|begin_of_box|>", "\\boxed{").replace("<|end_of_box|>", "}")  # GLM's
    return re.sub(TOOL, " ", text)


# --- the forms of an answer ---

# marks around an answer: (pattern, what it is for a reader)
MARKS = [
    (r"<<[^<>\n]*>>", ""),  # GSM8K's calculator, <<9+9=18>>18
    (r"(?i)</(?!answer>)\w+>|<br ?/?>|<[|｜][^<>|｜\n]{1,30}[|｜]>|<(?:eos|end_of_turn)>"
     r"|\[end final response\]", "\n"),
    (r"(?i)\\text\w*\{([^{}]*answer[^{}]*)\}", r"\1"),
]
TAG = r"(?is)<answer>((?:(?!</?answer>).)*)</answer>"


def _boxed(text):
    return boxed(text) if "box" in text else None


def _after_hashes(text):
    for rest in reversed(text.split("####")[1:]):
        line = rest.partition("\n")[0]
        if line.strip():  # a heading, if "the answer is" stands in it or below it
            return None if re.search(PHRASE, rest) else line
    return None


PHRASE = (
    r"(?i)(?:(?<!wrong )(?<!incorrect )(?<!not the )\banswer"
    r"(?: choice| to (?:the|this) (?:question|problem))?"
    r"|\b(?:correct|right|best) (?:option|choice))[*_\s]*"
    r"(?:is\b(?:,? (?:therefore|thus|hence|then|simply|just|clearly|indeed|actually)\b,?)?|[:：=])"
    r"(?:[*_ \t]*[*_:：])*"
    r"(?: ?(?:option|choice)\b)?"
    r"|(?:(?:(?<!错误)答案(?:应该?|就)?|正确选项)\s*[是为选:：]|(?:[故应]|所以|因此|本题)选)[*_:：]*"
    # a heading: ### Final Answer
    r"|(?:\A|(?<=\n))[ \t#*_]*(?:the )?(?:final |correct )?(?:answer|(?:最终)?答案)[ \t#*_]*(?=\n)"
    # 答：小明一共有18个苹果
    r"|答[:：](?:[^\d\n。不没非负少亏约近至超]{0,40}[有是为共要得剩了需到](?=\d))?")
# the end of a sentence: after "Mr" or "Dr" there is none
SENTENCE = (
    r"(?<!\b[A-Z][a-z])(?<!\b[A-Z][a-z][a-z])\.[*_]*\s+(?=[A-Z])|[。；]|．(?!\d)"
    r"|,? (?=(?:which|because|since)\b)"
    r"|, (?=(?:as|so|where|making|meaning|in total|in all|altogether|overall|not)\b)"
    r"|，(?=因为|所以|即|也就是)")
# what is said of another option or number: "C, not B", "B because A is false"
OTHERS = (
    r"\A(\W*([A-J]|\d+(?:[.,]\d+)*)\b.*?)(?:,? (?:and |but )?(?:"
    r"(?:not|rather than|instead of) (?:option )?[($]*(?!\2\b)(?:[A-J]|\d+(?:[.,]\d+)*)\b\)?"
    r"|(?:(?!\2\b)[A-J]\b(?:,? and |,? or |, )?)+ ?(?:is|are) (?:all |both |also )?"
    r"(?:false|wrong|incorrect|not (?:true|correct|right))))+")
LINE = re.compile(r"(?!```\w*$|\\(?:begin|end)\b).*\w")  # not "$$", not "```"
# all lines of a list, which begins with a bullet or with 1, (a), …; or the first line
LIST = (
    rf"(?=\s*(?:[-*•–|①]|\W{{0,2}}[1aAi]\W))(?:{BULLET}.*\n?)+|(?:{EQUATION}.*\n?)+"
    r"|(?:[ \t]*(?:[-+$\\(]*[\d.,/]+[$\\) \t]*|and|or)(?:\n|\Z))+|.*")


def _after_phrase(text):
    for rest in reversed(re.split(PHRASE, text)[1:]):
        lines = list(filter(LINE.match, rest.split("\n")))
        if lines:
            items = re.match(LIST, "\n".join(lines))[0].splitlines()
            return ", ".join(dict.fromkeys(map(_first_sentence, items)))
    return None


def _first_sentence(line):
    """The sentence "$4$" of "$4$. I hope it is correct." The whole line if a number follows, which
    may be another answer, or a word that takes the answer back."""
    line = re.sub(OTHERS, r"\1", line)
    sentence = re.split(SENTENCE, line)[0]
    rest = line[len(sentence) :]
    if re.search(r"\d", rest) or re.search(TAKES_BACK, rest):
        sentence = line
    # "- 3" begins a line with a bullet; after "Answer: " it is a number
    return re.sub(r"^[-*•–]\s|(?<!\.)\.[\s*_]*$", "", sentence).strip(" \t*_")
