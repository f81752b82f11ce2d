"""engine/data/questions.py: prompts that are never cut, and the order of the questions."""

import json
import random
from types import SimpleNamespace

import datasets
import pytest
from tokenizers.processors import TemplateProcessing

import train
from engine.base import files
from engine.base.errors import UserError
from engine.data.questions import Questions, fingerprint, load_questions, take
from experiments.library import toy_model
from rewards import format_reward
from tasks import toy
from tasks.table import SYSTEM_PROMPT
from tests.training import one_step

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

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return answers


def test_a_hub_that_cannot_be_reached_is_one_sentence(tokenizer, hub):
    hub.append(ConnectionError("no\nnetwork"))
    with pytest.raises(UserError, match="gsm8k .*no network.* go online"):
        load_questions("gsm8k", tokenizer)


def test_a_question_of_a_hub_without_an_answer_is_skipped_and_reported(tokenizer, hub):
    asked = [("1+1", "2"), ("1+2", " \n"), ("1+3", None), (" ", "4")]
    rows = [{"question": question, "answer": answer} for question, answer in asked]
    hub.append(datasets.Dataset.from_list(rows))
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


# --- prompts are made when a question is taken ---


class Counting:
    """A tokenizer that counts the texts that it is given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.texts = tokenizer, 0

    def __call__(self, texts, **options):
        self.texts += len(texts)
        return self.tokenizer(texts, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def test_only_what_is_asked_is_tokenized(tokenizer):
    counting = Counting(tokenizer)
    rows = [ONE | {"question": f"{i}+1=?"} for i in range(1000)]
    questions = Questions(rows, "toy", counting)
    asked = questions.ask([7, 900])
    assert counting.texts == 2 and list(asked) == [7, 900]
    assert tokenizer.decode(asked[7]["prompt"]) == "7+1=?"


def test_the_fingerprint_covers_the_prompts(tokenizer):
    """A template that writes today's date makes other prompts."""
    found = set()
    for date in ("1", "2"):
        tokenizer.chat_template = date + "{{ messages[-1].content }}"
        found.add(Questions([ONE], "toy", tokenizer).fingerprint())
    assert len(found) == 2


def test_an_empty_system_prompt_writes_no_turn_and_a_rows_own_one_counts(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
    tokenizer.add_tokens(list("su;"))

    def prompt(row, **options):
        [asked] = Questions([ONE | row], "toy", tokenizer, **options).ask([0]).values()
        return tokenizer.decode(asked["prompt"])

    assert prompt({}, system_prompt="") == "u1+1=?;"
    assert prompt({"system_prompt": "3"}) == "s3;u1+1=?;"
    assert prompt({"system_prompt": "3"}, system_prompt="4") == "s4;u1+1=?;"


def test_in_a_run_the_next_question_is_asked_instead(small, tmp_path, capsys):
    """Each second question is too long. The steps are as large as without them, and the run ends
    when all are through."""
    rows = [ONE | {"question": "1+1=?" if i % 2 else "1+1+1+1+1+1=?"} for i in range(12)]
    (tmp_path / "x.jsonl").write_text(files.as_lines(rows))
    train.main(["--model", small, "--dataset", str(tmp_path / "x.jsonl"), "--rewards",
                "number_accuracy", "--group_size", "4", "--questions_per_step", "2", "--algorithm",
                "grpo", "--max_new_tokens", "4", "--max_prompt_tokens", "6", "--output_dir",
                str(tmp_path / "run")])
    steps = files.read(tmp_path / "run/metrics.jsonl")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert {row["questions"] for row in steps[:-1]} == {2} and steps[-1]["questions"] <= 2
    asked = sum(row["questions"] for row in steps)
    assert summary["position"] == asked + summary["skipped_questions"] >= 12
    assert summary["skipped_questions"] >= 6
    assert "".join(capsys.readouterr()).count("is left out, because its prompt is longer") == 1


def test_a_run_keeps_the_names_of_the_columns(small, tmp_path, capsys):
    rows = [{"q": "1+1=?", "true": {"a": "2"}}, {"q": "1+2=?", "true": {"a": "3"}}]
    (path := tmp_path / "x.jsonl").write_text(files.as_lines(rows))
    one_step(
        small, run := tmp_path / "run", "--dataset", str(path), "--eval_dataset", str(path),
        "--columns", "question=q", "answer=true.a", "--rewards", "number_accuracy",
        "--algorithm", "grpo", "--max_new_tokens", "4")
    out = capsys.readouterr().out
    assert "the question is the column 'q', the answer is 'true.a'" in out
    assert f"--benchmark {path} --columns question=q answer=true.a\n" in out
    resume = ["--output_dir", str(run), "--resume"]
    assert train.main([*resume, "--steps", "2"]) == 0
    with pytest.raises(UserError, match=r"with --columns \[.question=q., .answer=true.a.\], not"):
        train.main([*resume, "--columns", "question=q", "answer=q"])
