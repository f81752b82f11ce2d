"""engine/data/questions.py: files and their mistakes, prompts that are never cut, the order of the
questions, rewards that misbehave."""

import json
import random
import re
import sys
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing

from engine.base.errors import UserError
from engine.data.questions import check_dataset, fingerprint, load_questions, read_jsonl, take
from experiments import toy_model
from rewards import format_reward
from tasks import toy
from tasks.table import SYSTEM_PROMPT

ONE = {"question": "1+1=?", "answer": "2"}


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


def test_rows_are_read_in_order_with_the_columns_that_every_row_has(file):
    """Blank lines and a byte order mark are no mistake, `problem` serves as the question, and a
    reward gets its completions from nobody else."""
    path = file(
        '\ufeff{"question": "é", "answer": "2", "level": 3, "completions": "x"}\r\n\n   \n'
        '{"problem": "1+1", "answer": 2.0, "level": 4, "completions": "x", "hint": "y"}\n'
        '{"problem": "no", "question": 7, "answer": 27.5, "level": 5, "completions": "x"}\n'
    )
    assert read_jsonl(path) == [
        {"question": "é", "answer": "2", "level": 3},
        {"answer": "2", "level": 4, "question": "1+1"},
        {"question": "7", "answer": "27.5", "level": 5},
    ]


def test_a_column_called_prompt_makes_way_for_the_prompts_tokens(file, tokenizer):
    questions, _ = load_questions(file([ONE | {"prompt": "mine"}]), tokenizer)
    assert tokenizer.decode(questions[0]["prompt"]) == "1+1=?"


@pytest.mark.parametrize("content, line", [
    ("", "empty"), ("\n  \n", "empty"), (b'\n{"question": "caf\xe9", "answer": "1"}', "line 2"),
    ('{"question": "a", "answer": "1"}\n\n{"question": "b",', "line 3"),
    ("question,answer\na,1", "line 1"), ('["a", "1"]', "line 1"), ("17", "line 1"),
    ('{"question": "a", "solution": "1"}', "line 1"),
    ('{"question": "a", "answer": "1"}\n{"text": "a", "answer": "1"}', "line 2"),
    ('{"question": "a", "answer": "1"}\n{"question": "a", "answer": " \\n"}', "line 2"),
    ('{"question": "\\t", "answer": "1"}', "line 1"),
    ('{"question": null, "answer": "1"}', "line 1"),
    ('{"question": "a", "answer": ' + "1" * 5000 + "}", "line 1"),
    ('{"question": "a \\ud800", "answer": "1"}', "line 1"),
    ('{"question": "a", "answer": "1", "\\udc00": "b"}', "line 1"),
    ('{"question": "a", "answer": "1"}\n' + "[" * 10**5 + "]" * 10**5, "line 2.*RecursionError"),
    *(('{"question": "a", "answer": ' + answer + "}", "line 1.* is neither a text nor a number")
      for answer in ("[1, 2]", '{"a": 1}', "NaN", "-Infinity")),
    ('{"question": ["a"], "answer": "1"}', "line 1.* is neither a text nor a number"),
], ids=range(21))
def test_a_broken_file_is_named_with_the_line(file, content, line):
    with pytest.raises(UserError, match=line) as error:
        read_jsonl(file(content))
    assert "questions.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_a_name_that_is_no_data_set_is_refused(file):
    for name in ("missing.jsonl", "a/missing", ".", "gsm9k"):
        for refuse in (check_dataset, read_jsonl):
            with pytest.raises(UserError, match=f"'{re.escape(name)}': there are toy, "):
                refuse(name)
    for name in ("toy", "gsm8k", file([ONE])):
        check_dataset(name)


# --- load ---


@pytest.mark.parametrize("split, size", [("train", toy.TRAIN_QUESTIONS), ("test", 512)])
def test_the_toy_has_a_train_and_a_test_split(tokenizer, split, size):
    questions, notes = load_questions("toy", tokenizer, split=split)
    assert len(questions) == size and notes == []
    prompt = tokenizer(toy.question(5, split)["question"]).input_ids
    assert questions[5] == {**toy.question(5, split), "prompt": prompt, "begun": ""}


def test_a_prompt_that_is_too_long_is_skipped_and_counted_never_cut(tokenizer, file):
    asked = ["1+1=?", "1+1+0=?", "1+1+0+0=?", "2=?"]
    path = file([{"question": question, "answer": "2"} for question in asked])
    questions, (note,) = load_questions(path, tokenizer, max_prompt_tokens=7)
    assert [row["question"] for row in questions] == asked[:2] + asked[3:]
    assert [tokenizer.decode(row["prompt"]) for row in questions] == asked[:2] + asked[3:]
    assert "skipped 1 of 4" in note and "7 tokens" in note
    with pytest.raises(UserError, match="max_prompt_tokens"):
        load_questions(path, tokenizer, max_prompt_tokens=2)


def test_a_chat_template_gets_the_system_message_and_the_question_and_opens_the_answer(
    tokenizer, file
):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<think>' if m.role == 'system' else '<answer>' if m.role == "
        "'user' }}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    questions, notes = load_questions(file([ONE]), tokenizer, system_prompt="77")
    assert tokenizer.decode(questions[0]["prompt"]) == "<think>77\n<answer>1+1=?\n=" and notes == []


def test_a_template_without_a_system_turn_has_it_before_the_question(tokenizer, file):
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    questions, _ = load_questions(file([ONE]), tokenizer, system_prompt="77")
    assert tokenizer.decode(questions[0]["prompt"]) == "77\n\n1+1=?"


@pytest.mark.parametrize("template, reason", [
    ("{{ raise_exception('never') }}", "TemplateError: never"), ("{% for x in %}", "SyntaxError"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{% if false %}{{ messages }}{% endif %}", "no question"),  # an empty prompt
])
def test_a_chat_template_that_fails_is_one_sentence(tokenizer, file, template, reason):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=reason):
        load_questions(file([ONE]), tokenizer)


def test_without_a_chat_template_the_prompt_is_plain_text_and_a_note_says_so(file):
    class Bytes:
        chat_template = None

        def __call__(self, texts, **_):
            return SimpleNamespace(input_ids=[list(text.encode()) for text in texts])

    questions, notes = load_questions(file([ONE]), Bytes(), system_prompt="Be brief.")
    assert bytes(questions[0]["prompt"]).decode() == "Be brief.\n\nUser: 1+1=?\nAssistant:"
    assert len(notes) == 1 and "no chat template" in notes[0]


def test_special_tokens_are_added_only_where_no_chat_template_wrote_them(tokenizer, file):
    path = file([ONE])
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


@pytest.fixture
def hub(monkeypatch):
    """What the hub answers: rows, or an error."""
    answers = []

    def load_dataset(*_, **__):
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return answers


def test_a_hub_that_cannot_be_reached_is_one_sentence(tokenizer, hub):
    hub.append(ConnectionError("no\nnetwork"))
    with pytest.raises(UserError, match="gsm8k .*no network.* go online"):
        load_questions("gsm8k", tokenizer)


def test_a_question_of_a_hub_without_an_answer_is_skipped_and_reported(tokenizer, hub):
    asked = [("1+1", 2.0), ("1+2", " \n"), ("1+3", None), (" ", "4")]
    hub.append([{"question": question, "answer": answer} for question, answer in asked])
    questions, (note,) = load_questions("gsm8k", tokenizer, split="test")
    assert [(q["question"], q["answer"]) for q in questions] == [("1+1", "2")]
    assert "skipped 3 of 4 questions of gsm8k" in note


# --- take ---


@pytest.mark.parametrize("sizes", [[21], [4, 6, 11], [1] * 21, [5, 0, 16]])
def test_the_order_of_each_epoch_is_that_of_pythons_shuffle_however_it_is_cut(sizes):
    expected, taken = [], []
    for epoch in range(3):
        order = list("abcdefg")
        random.Random(f"1 {epoch}").shuffle(order)
        expected += order
    for size in sizes:
        taken += take("abcdefg", len(taken), size, seed=1)
    assert taken == expected


# --- fingerprint ---

TWO = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]


@pytest.mark.parametrize(
    "other",
    [TWO[:1], TWO[::-1], [TWO[0], TWO[1] | {"answer": "5"}], [TWO[0], TWO[1] | {"question": "2"}]],
)
def test_another_content_has_another_fingerprint(other):
    assert fingerprint(other) != fingerprint(TWO) == fingerprint([dict(row) for row in TWO])
