"""engine/tasks/questions.py: files and their mistakes, prompts that are never cut, the order of the
questions, rewards that misbehave."""

import json
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing

from engine.base.errors import UserError
from engine.tasks import questions, toy, toy_model
from engine.tasks.questions import check_dataset, fingerprint, load_questions, read_jsonl, take
from engine.tasks.table import SYSTEM_PROMPT
from rewards import format_reward

DATA = Path(__file__).parents[2].parent / "shared" / "data"

@pytest.fixture
def tokenizer():
    return toy_model.make_tokenizer()


@pytest.fixture
def file(tmp_path):
    """Write rows (or a text, or bytes) into a data file and return its path."""

    def write(content):
        path = tmp_path / "questions.jsonl"
        if isinstance(content, list):
            content = "\n".join(json.dumps(row) for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


# --- files ---


def test_rows_are_read_in_order_and_blank_lines_are_skipped(file):
    path = file('{"question": "1+1", "answer": "2"}\n\n   \n{"question": "é", "answer": "3"}\r\n\n')
    assert read_jsonl(path) == [
        {"question": "1+1", "answer": "2"}, {"question": "é", "answer": "3"},
    ]


def test_a_column_called_problem_serves_as_the_question(file):
    assert read_jsonl(file([{"problem": "1+1", "answer": "2"}]))[0]["question"] == "1+1"
    assert (
        read_jsonl(file([{"problem": "no", "question": "1+1", "answer": "2"}]))[0]["question"]
        == "1+1"
    )


def test_numbers_become_text(file):
    assert read_jsonl(file([{"question": 7, "answer": 27.5}])) == [
        {"question": "7", "answer": "27.5"}
    ]


def test_only_columns_that_every_row_has_are_kept(file):
    path = file(
        [
            {"question": "a", "answer": "1", "level": 3, "hint": "x"},
            {"question": "b", "answer": "2", "level": 4, "source": "y"},
        ]
    )
    assert read_jsonl(path) == [
        {"question": "a", "answer": "1", "level": 3}, {"question": "b", "answer": "2", "level": 4},
    ]


def test_a_column_called_prompt_makes_way_for_the_prompts_tokens(file, tokenizer):
    questions, _ = load_questions(
        file([{"question": "1+1=?", "answer": "2", "prompt": "mine"}]), tokenizer
    )
    assert tokenizer.decode(questions[0]["prompt"]) == "1+1=?"


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "is empty"),
        ("\n  \n", "is empty"),
        ('{"question": "a", "answer": "1"}\n\n{"question": "b",', "line 3: not a JSON object"),
        ("question,answer\na,1", "line 1: not a JSON object"),
        ('["a", "1"]', "line 1: not a JSON object"),
        ("17", "line 1: not a JSON object"),
        ('{"question": "a", "solution": "1"}', "line 1: no column 'answer'. The columns there are "
                                               "question, solution."),
        ('{"question": "a", "answer": "1"}\n{"text": "a", "answer": "1"}', "line 2: no column "
                                                                           "'question'. The "
                                                                           "columns there are text,"),
        ('{"question": "a", "answer": "1"}\n{"question": "a", "answer": " \\n"}', "line 2: the "
                                                                                  "column 'answer' "
                                                                                  "is empty"),
        ('{"question": "\\t", "answer": "1"}', "line 1: the column 'question' is empty"),
        ('{"question": null, "answer": "1"}', "line 1: the column 'question' is empty"),
        (b'{"question": "caf\xe9", "answer": "1"}', "not a text file in UTF-8"),
        ('{"question": "a", "answer": ' + "1" * 5000 + "}", "line 1: not a JSON object (Exceeds "
                                                            "the limit"),
        ('{"question": "a", "answer": "1", "more": ' + "[" * 100_000 + "]" * 100_000 + "}", "line "
                                                                                            "1: "
                                                                                            "not a "
                                                                                            "JSON "
                                                                                            "object (maximum recursion"),
        ('{"question": "a \\ud800", "answer": "1"}', "surrogates not allowed). Each line must be "
                                                     "one"),
        ('{"question": "a", "answer": "1", "\\udc00": "b"}', "surrogates not allowed). Each line "
                                                             "must be one"),
    ],
)
def test_a_broken_file_is_named_with_the_line_and_the_reason(file, content, message):
    path = file(content)
    for look in (read_jsonl, check_dataset):
        with pytest.raises(UserError) as error:
            look(path)
        assert path in str(error.value) and message in str(error.value)


def test_a_byte_order_mark_is_no_mistake(file):
    assert read_jsonl(file('\ufeff{"question": "a", "answer": "1"}')) == [
        {"question": "a", "answer": "1"}
    ]


@pytest.mark.parametrize(
    "name, message",
    [("missing.jsonl", "does not exist"), ("a/missing", "does not exist"), (".", "is a folder: "
                                                                                 "name a .jsonl "
                                                                                 "file"),
     ("gsm9k", "there are toy, ")],
)
def test_a_name_that_is_no_data_set_is_refused(name, message):
    for look in (check_dataset, read_jsonl):
        with pytest.raises(UserError, match=message) as error:
            look(name)
        assert name in str(error.value)


def test_the_known_names_and_good_files_are_accepted(file):
    for name in ("toy", "gsm8k", file([{"question": "a", "answer": "1"}])):
        check_dataset(name)


@pytest.mark.parametrize("name, count", [("gsm8k_train", 7473), ("gsm8k_test", 1319), ("math500", 500), ("amc23", 40), ("aime24", 30)])
def test_the_published_data_sets_are_read_whole(name, count):
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    rows = read_jsonl(str(path))
    assert len(rows) == count
    assert all(
        isinstance(row[column], str) and row[column]
        for row in rows
        for column in ("question", "answer")
    )


# --- load ---


@pytest.mark.parametrize("split, size", [("train", toy.TRAIN_QUESTIONS), ("test", 512)])
def test_the_toy_has_a_train_and_a_test_split(tokenizer, split, size):
    questions, notes = load_questions("toy", tokenizer, split=split)
    assert len(questions) == size and notes == []
    assert questions[5] == {
        **toy.question(5, split), "prompt": tokenizer(toy.question(5, split)["question"]).input_ids,
        "begun": "",
    }


def test_limit_takes_the_first_questions(tokenizer, file):
    assert [row["question"] for row in load_questions("toy", tokenizer, limit=3)[0]] == [
        toy.question(i)["question"] for i in range(3)
    ]
    path = file([{"question": str(i), "answer": "1"} for i in range(5)])
    assert [row["question"] for row in load_questions(path, tokenizer, limit=2)[0]] == ["0", "1"]
    assert len(load_questions(path, tokenizer, limit=9)[0]) == 5


def test_a_prompt_that_is_too_long_is_skipped_and_counted_never_cut(tokenizer, file):
    path = file(
        [
            {"question": question, "answer": "2"}
            for question in ("1+1=?", "1+1+0=?", "1+1+0+0=?", "2=?")
        ]
    )
    questions, notes = load_questions(path, tokenizer, max_prompt_tokens=7)
    assert (
        [tokenizer.decode(row["prompt"]) for row in questions]
        == [row["question"] for row in questions]
        == ["1+1=?", "1+1+0=?", "2=?"]
    )
    assert len(notes) == 1 and "skipped 1 of 4" in notes[0] and "7 tokens" in notes[0]


def test_prompts_that_are_all_too_long_are_an_error(tokenizer, file):
    with pytest.raises(UserError, match="at most 4 tokens"):
        load_questions(
            file([{"question": "1+1=?", "answer": "2"}] * 3), tokenizer, max_prompt_tokens=4
        )


def test_a_chat_template_gets_the_system_message_and_the_question_and_opens_the_answer(
    tokenizer, file
):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<think>' if m.role == 'system' else '<answer>' if m.role == "
        "'user' }}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    questions, notes = load_questions(
        file([{"question": "1+1=?", "answer": "2"}]), tokenizer, system_prompt="77"
    )
    assert tokenizer.decode(questions[0]["prompt"]) == "<think>77\n<answer>1+1=?\n=" and notes == []


@pytest.mark.parametrize("template, reason", [
    ("{{ raise_exception('never') }}", "TemplateError: never"), ("{% for x in %}", "TemplateSyntaxError: Expected an expression"),
    ("{{ messages[7].content }}", "UndefinedError: list object has no element 7"), ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ 1 + 'a' }}", "TypeError: unsupported operand"),
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
     "TimeoutError: it takes more than 0.2 seconds for a prompt"),
])  # fmt: skip
def test_a_chat_template_that_fails_or_never_ends_is_one_sentence(
    tokenizer, file, template, reason, monkeypatch
):
    monkeypatch.setattr(questions, "TEMPLATE_SECONDS", 0.2)
    tokenizer.chat_template, handler = template, signal.getsignal(signal.SIGALRM)
    with pytest.raises(UserError) as error:
        load_questions(file([{"question": "1+1=?", "answer": "2"}]), tokenizer)
    assert str(error.value).startswith(
        f"the model's chat template fails ({reason}"
    ) and "\n" not in str(error.value)
    assert signal.getsignal(signal.SIGALRM) == handler and signal.getitimer(signal.ITIMER_REAL) == (
        0.0, 0.0,
    )


def test_an_empty_prompt_is_refused(tokenizer, file):
    tokenizer.chat_template = "{% if false %}{{ messages }}{% endif %}"
    with pytest.raises(
        UserError,
        match="^the prompt of a question of .*jsonl is empty: correct the model's chat template",
    ):
        load_questions(file([{"question": "1+1=?", "answer": "2"}]), tokenizer)


def test_without_a_chat_template_the_prompt_is_plain_text_and_a_note_says_so(file):
    class Bytes:
        chat_template = None

        def __call__(self, texts, **_):
            return SimpleNamespace(input_ids=[list(text.encode()) for text in texts])

    questions, notes = load_questions(
        file([{"question": "1+1=?", "answer": "2"}]), Bytes(), system_prompt="Be brief."
    )
    assert bytes(questions[0]["prompt"]).decode() == "Be brief.\n\nUser: 1+1=?\nAssistant:"
    assert len(notes) == 1 and "no chat template" in notes[0]


def test_special_tokens_are_added_only_where_no_chat_template_wrote_them(tokenizer, file):
    path = file([{"question": "1+1=?", "answer": "2"}])
    eos = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", eos)]
    )
    assert eos not in load_questions(path, tokenizer)[0][0]["prompt"]
    tokenizer.chat_template = None
    assert load_questions(path, tokenizer)[0][0]["prompt"].count(eos) == 1


def test_the_default_system_prompt_shows_the_form_that_the_format_reward_pays_for():
    form = SYSTEM_PROMPT[SYSTEM_PROMPT.index("<think>") :]
    assert format_reward([form]) == [1.0]


def test_gsm8k_comes_from_the_hub_in_the_wanted_split(tokenizer, monkeypatch):
    def load_dataset(name, config, split):
        return [{"question": f"{len(name)}{len(config)}{len(split)}", "answer": "#### 1"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    questions, _ = load_questions("gsm8k", tokenizer, split="test")
    assert questions[0]["question"] == f"{len('openai/gsm8k')}{len('main')}{len('test')}"


def test_a_hub_that_cannot_be_reached_is_one_sentence(tokenizer, monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match=r"hub \(no network\): go online, or make a file"):
        load_questions("gsm8k", tokenizer)


@pytest.mark.parametrize("name, columns", [("math500", ("problem", "answer")), ("gsm8k_zh", ("question_zh-cn", "answer_only"))])
def test_the_columns_of_every_hub_data_set_become_question_and_answer(
    tokenizer, monkeypatch, name, columns
):
    rows = [dict(zip(columns, values)) for values in [("1+1", "2"), ("3+4", 7.0)]]
    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: rows)
    )
    questions, _ = load_questions(name, tokenizer, split="test")
    assert [(q["question"], q["answer"]) for q in questions] == [("1+1", "2"), ("3+4", "7")]


def test_a_question_of_a_hub_without_an_answer_is_skipped_and_reported(tokenizer, monkeypatch):
    rows = [
        {"question": question, "answer": answer}
        for question, answer in [("1+1", "2"), ("1+2", " \n"), ("1+3", None), (" ", "4")]
    ]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: rows))
    questions, notes = load_questions("gsm8k", tokenizer, split="test")
    assert [q["question"] for q in questions] == ["1+1"]
    assert notes == ["skipped 3 of 4 questions of gsm8k: the question or the answer is empty."]


# --- take ---

SEVEN = list("abcdefg")


def test_every_epoch_is_a_permutation():
    taken = take(SEVEN, 0, 35, seed=1)
    epochs = [taken[i : i + 7] for i in range(0, 35, 7)]
    assert all(sorted(epoch) == SEVEN for epoch in epochs)


def test_the_order_follows_from_the_seed_alone():
    random.seed(0)
    first = take(SEVEN, 0, 21, seed=1)
    random.seed(1)
    assert take(SEVEN, 0, 21, seed=1) == first


def test_seeds_and_epochs_differ_in_order():
    hundred = list(range(100))
    orders = [take(hundred, epoch * 100, 100, seed) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert hundred not in orders
    assert len({tuple(order) for order in orders}) == 9


@pytest.mark.parametrize("sizes", [[4, 6, 11], [1] * 21, [7, 7, 7], [20, 1], [5, 0, 16]])
def test_the_order_does_not_depend_on_how_it_is_cut(sizes):
    pieces, position = [], 0
    for size in sizes:
        pieces += take(SEVEN, position, size, seed=1)
        position += size
    assert pieces == take(SEVEN, 0, 21, seed=1)


def test_one_step_may_take_more_than_a_whole_epoch():
    taken = take(SEVEN, 5, 16, seed=1)
    assert taken == take(SEVEN, 0, 21, seed=1)[5:]


def test_taking_leaves_the_questions_in_their_order():
    take(SEVEN, 0, 7, seed=1)
    assert SEVEN == list("abcdefg")


def test_an_epoch_is_shuffled_once(monkeypatch):
    """And not again at every step, which takes seconds for a million questions."""
    shuffled, shuffle = [], random.Random.shuffle
    monkeypatch.setattr(
        random.Random, "shuffle", lambda self, x: shuffled.append(len(x)) or shuffle(self, x)
    )
    thousand = list(range(1000))
    for position in range(0, 2000, 10):
        take(thousand, position, 10, seed="of this test")
    assert shuffled == [1000, 1000]


def test_the_order_is_that_of_pythons_shuffle():
    order = list(range(7))
    random.Random("1 2").shuffle(order)
    assert take(SEVEN, 14, 7, seed=1) == [SEVEN[i] for i in order]


# --- fingerprint ---

TWO = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]


def test_the_same_content_has_the_same_fingerprint():
    assert fingerprint(TWO) == fingerprint([dict(row) for row in TWO])


@pytest.mark.parametrize(
    "other", [TWO[:1], TWO[::-1], TWO + TWO[:1], [TWO[0], {"question": "2+2", "answer": "5"}], [TWO[0], {"question": "2+3", "answer": "4"}]]
)
def test_another_content_has_another_fingerprint(other):
    assert fingerprint(other) != fingerprint(TWO)
