"""The table of data sets. Each data set has one row, which holds all that is special to it.

To add a data set, write a row: where its questions come from, which rewards judge the answers, how
long an answer may be. A local file of JSON lines needs no row.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tasks import arithmetic, toy, toy_tool

# DeepSeek-R1's format (2501.12948, table 1), in our words
SYSTEM_PROMPT = (
    "You are given a question. Think about it step by step first, then answer it. Put your "
    "thoughts and your answer into tags, in this form, with nothing before, between or after:\n"
    "<think>\nyour thoughts\n</think>\n<answer>\nyour answer, the bare number\n</answer>"
)

# as CPPO's setting on MATH has it
BOXED_PROMPT = SYSTEM_PROMPT.replace("your answer, the bare number", "\\boxed{your answer}")


# a data set of the Hugging Face hub: its name, its two splits and its two columns
Hub = namedtuple("Hub", "path configuration train test question answer")


@dataclass(frozen=True)
class Task:
    # split → rows with the columns question and answer; None: a local file
    source: Callable | Hub | None = None
    rewards: tuple[str, ...] = ("gsm8k_accuracy", "format_reward")  # the first one is the accuracy
    system_prompt: str = SYSTEM_PROMPT
    examples: tuple = ()  # (role, text): turns of the chat before the question
    max_new_tokens: int = 1024
    lr: float = 1e-6  # this and questions_per_step: CPPO's published setting
    critic_lr: float = 1e-5  # usually ten times the policy's
    questions_per_step: int = 1
    minibatches: int = 1  # at least; an algorithm may have more, or make one update a step
    epochs: float = 1.0
    train_questions: int | None = None  # how many there are, if that is known without a download
    test_questions: int | None = None
    # the folder of the base model that `--model toy` means; None: the toy cannot be used
    base: str | None = None
    # of the test split, if it is another one: scored before and after training
    eval_questions: int = 256
    # lines of the first and of the last step in samples.jsonl → what was learned, or None
    learned: Callable | None = None

    @property
    def has_test_split(self):
        """Whether the questions of its test split are others than those of its training split."""
        source = self.source
        return source.train != source.test if isinstance(source, Hub) else source is not None


TOY = Task(
    toy.questions, rewards=("toy_accuracy",), max_new_tokens=toy.MAX_NEW_TOKENS, lr=3e-4,
    critic_lr=1e-3, questions_per_step=8, minibatches=2, epochs=0.5,
    train_questions=toy.TRAIN_QUESTIONS, test_questions=toy.TEST_QUESTIONS, base=toy.BASE,
    eval_questions=512, learned=toy.learned,
)
ARITHMETIC = Task(
    arithmetic.questions, rewards=("number_accuracy",),
    system_prompt=arithmetic.SYSTEM_PROMPT, examples=tuple(arithmetic.EXAMPLES),
    max_new_tokens=arithmetic.MAX_NEW_TOKENS, lr=3e-5, critic_lr=3e-4,
    train_questions=arithmetic.TRAIN_QUESTIONS, test_questions=arithmetic.TEST_QUESTIONS,
)
LIKE_MATH = Task(rewards=("math_accuracy", "format_reward"), system_prompt=BOXED_PROMPT)

TASKS = {"toy": TOY}
TASKS["toy_code"] = replace(TOY, rewards=("code_accuracy",), base=toy.CODE_BASE)
TASKS["toy_tool"] = replace(
    TOY, source=toy_tool.questions, max_new_tokens=toy_tool.MAX_NEW_TOKENS, base=toy_tool.BASE)
# longer sums, for larger base models, which experiments/library/toy_model.py makes
TASKS["toy_middle"] = replace(
    TOY, source=partial(toy.questions, operands=toy.MIDDLE), max_new_tokens=toy.MIDDLE_TOKENS,
    base=None)
TASKS["toy_long"] = replace(
    TOY, source=partial(toy.questions, operands=toy.LONG), max_new_tokens=toy.LONG_TOKENS,
    base=None)
TASKS["arithmetic"] = ARITHMETIC
TASKS["gsm8k"] = Task(
    Hub("openai/gsm8k", "main", "train", "test", "question", "answer"), train_questions=7473)
TASKS["gsm8k_zh"] = Task(
    Hub("swulling/gsm8k_chinese", None, "train", "test", "question_zh-cn", "answer_only"),
    train_questions=7473)
TASKS["math"] = replace(
    LIKE_MATH, train_questions=7500,
    source=Hub(
        "DigitalLearningGmbH/MATH-lighteval", "default", "train", "test", "problem", "solution"))
TASKS["math500"] = replace(
    LIKE_MATH, source=Hub("HuggingFaceH4/MATH-500", None, "test", "test", "problem", "answer"))
TASKS["amc23"] = replace(
    LIKE_MATH, source=Hub("math-ai/amc23", None, "test", "test", "question", "answer"))
TASKS["aime24"] = replace(
    LIKE_MATH,
    source=Hub("HuggingFaceH4/aime_2024", None, "train", "train", "problem", "answer"))


def task_of(name, model=None):
    """The row of a data set. A local file gets the settings of GSM8K; but if the model is the toy,
    the toy's length, because more does not fit into its context."""
    if name not in TASKS and model in ("toy", toy.BASE):
        return Task(max_new_tokens=toy.MAX_NEW_TOKENS)
    return TASKS.get(name) or Task()


def base_model(model, dataset):
    """The folder or hub name of the model that `--model` names. `toy` means the base model of the
    data set, or the toy's if it has none."""
    if model != "toy":
        return model
    return task_of(dataset).base or toy.BASE
