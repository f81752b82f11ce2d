"""engine/data/questions.py: prompts that are never cut, and the order of the questions."""

import random
from datetime import datetime
from functools import partial
from types import SimpleNamespace

import datasets
import pytest
from tokenizers.processors import TemplateProcessing
from transformers.utils import chat_template_utils

from engine.base.errors import UserError
from engine.base.files import read_lines
from engine.data.questions import (
    Questions,
    fingerprint,
    load_questions,
    numbers_of,
    prompt_text,
)
from engine.scoring.gold_answers import is_right_answer
from engine.scoring.score import load_rewards
from experiments.library import toy_model
from rewards import format_reward
from tasks.table import SYSTEM_PROMPT
from tests.helpers.runs import go_on, json_of, metrics_of, run, written

pytestmark = pytest.mark.usefixtures("undrawn")
ONE = {"question": "1+1=?", "answer": "2"}


@pytest.fixture
def tokenizer():
    return toy_model.make_tokenizer()


@pytest.fixture
def one(tmp_path):
    """A data file of one question."""
    return str(written(tmp_path / "questions.jsonl", [ONE]))


# --- load ---


def test_a_prompt_that_is_too_long_is_skipped_and_counted_never_cut(tokenizer, tmp_path):
    asked = ["1+1=?", "1+1+0=?", "1+1+0+0=?", "2=?"]
    path = str(written(tmp_path / "x.jsonl", [ONE | {"question": each} for each in asked]))
    questions, [note] = load_questions(path, tokenizer, max_prompt_tokens=7)
    found = [(row["question"], tokenizer.decode(row["prompt"])) for row in questions]
    assert found == [(each, each) for each in ("1+1=?", "1+1+0=?", "2=?")]
    assert "skipped 1 of 4" in note and "7 tokens" in note
    with pytest.raises(UserError, match="max_prompt_tokens"):
        load_questions(path, tokenizer, max_prompt_tokens=2)


TURNS = ("{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
         "{% if add_generation_prompt %}a{% endif %}")
# as of Idefics3 and LLaVA-NeXT: a text in place of the parts is left out
PARTS = TURNS.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
NO_SYSTEM = ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
             "{{ messages[0].content }}")


@pytest.mark.parametrize("template, row, system_prompt, prompt", [
    (TURNS, {}, "4", "s4;u1+1=?;a"), (TURNS, {}, "", "u1+1=?;a"),
    (TURNS, {"system_prompt": "3"}, SYSTEM_PROMPT, "s3;u1+1=?;a"),  # the row's own
    (TURNS, {"system_prompt": "3"}, "4", "s4;u1+1=?;a"),
    # without a system turn, its text comes before the question
    (NO_SYSTEM, {}, "4", "4\n\n1+1=?"),
    (PARTS, {}, "4", "s4;u1+1=?;a"),
    (NO_SYSTEM.replace(".content", ".content[0].text"), {}, "4", "4\n\n1+1=?"),
])  # fmt: skip
def test_a_chat_template_gets_the_system_message_and_the_question_and_opens_the_answer(
    tokenizer, template, row, system_prompt, prompt
):
    tokenizer.chat_template = template
    tokenizer.add_tokens(list("sua;"))
    asked = Questions([ONE | row], "toy", tokenizer, system_prompt=system_prompt).first()
    assert tokenizer.decode(asked["prompt"]) == prompt


def turn(role, content):
    return {"role": role, "content": content}


# "I have 9. I eat 2. How many are left?" in digits
CHAT = [turn("user", "9"), turn("assistant", "9"), turn("user", "9-2=?")]
TWO_SYSTEMS = [turn("system", "3"), turn("system", "4"), turn("developer", "5"), *CHAT]
WITH_TOOL = [*CHAT, turn("assistant", "<think>6</think>7"), turn("tool", "7")]


@pytest.mark.parametrize("template, chat, options, prompt", [
    (TURNS, CHAT, {}, "u9;a9;u9-2=?;a"), (None, CHAT, {}, "User: 9\nAssistant: 9\nUser: 9-2=?\nA"),
    (TURNS, TWO_SYSTEMS, {}, "s3;s4;d5;u9;a9;u9-2=?;a"),
    (TURNS, WITH_TOOL, {}, "u9;a9;u9-2=?;a<think>6</think>7;t7;a"),
    (TURNS, [*CHAT, turn("assistant", "7=")], {}, "u9;a9;u9-2=?;a7="),  # it is written on
    (None, [*CHAT[2:], turn("assistant", "7=")], {}, "User: 9-2=?\nAssistant: 7="),
    (PARTS, [*CHAT, turn("assistant", "7=")], {}, "u9;a9;u9-2=?;a7="),
    # a template without system turns, or one that drops them
    (NO_SYSTEM.replace("[0].content", "[-1].content"), [turn("system", "3"), turn("user", "4")], {},
     "3\n\n4"),
    (TURNS.replace("m in messages", "m in messages if m.role == 'user'"),
     [turn("developer", "3"), turn("user", "4")], {}, "u3\n\n4;a"),
    (TURNS.replace(" %}a", " and not quiet %}a"), CHAT, {"quiet": True}, "u9;a9;u9-2=?;"),
])  # fmt: skip
def test_a_chat_goes_through_the_template_whole(tokenizer, template, chat, options, prompt):
    """With the default system prompt the chat's own one counts."""
    tokenizer.chat_template = template
    system = SYSTEM_PROMPT if chat[0]["role"] in ("system", "developer") else ""
    text = prompt_text(tokenizer, {"question": "9-2=?", "prompt": chat}, system, [], options)
    assert text == prompt + ("ssistant:" if prompt.endswith("A") else "")


SOLVED = "So 9-2=7: \\boxed{7}."


@pytest.mark.parametrize("reward, last, shown", [
    ("gsm8k_accuracy", SOLVED, ""), ("gsm8k_accuracy", "9-2=", "9-2="),
    ("gsm8k_accuracy", "\\boxed{8}", "\\boxed{8}"), ("format_reward", SOLVED, SOLVED),
    ("own:fails", SOLVED, SOLVED), ("own:looks", SOLVED, ""),
])
def test_a_last_turn_that_is_paid_by_itself_is_not_shown(tokenizer, reward, last, shown, tmp_path):
    (tmp_path / "own.py").write_text(
        "def fails(completions, **columns): return [1 / 0]\n"
        "def looks(completions, answer, **columns):\n"
        "    return [float(a in text) for text, a in zip(completions, answer)]\n")
    [loaded] = load_rewards([reward.replace("own:", f"{tmp_path}/own.py:")])
    chat = [*CHAT, turn("assistant", last)]
    row = {"question": "9-2=?", "answer": "7", "prompt": chat}
    tokenizer.chat_template = TURNS
    is_right = partial(is_right_answer, loaded)
    first = Questions([row], "toy", tokenizer, "", is_right=is_right).first()
    text = "u9;a9;u9-2=?;a"
    assert first["prompt"] == tokenizer(text + shown).input_ids and first["begun"] == shown
    assert row["prompt"] == chat


@pytest.mark.parametrize("template, options, reason", [
    (TURNS.replace("m in messages", "m in messages if m.role != 'tool'"), {}, "turn of tool, '7'"),
    (TURNS, {"quiet": True}, "--chat_template_kwargs: the model's chat template knows no quiet"),
])
def test_a_template_that_leaves_something_out_is_refused(tokenizer, template, options, reason):
    tokenizer.chat_template = template
    chat = [turn("user", "9"), turn("assistant", "8"), turn("user", "6"), turn("tool", "7")]
    with pytest.raises(UserError, match=reason):
        prompt_text(tokenizer, {"question": "6", "prompt": chat}, "", [], options)


@pytest.mark.parametrize("template", [
    TURNS.replace("{{ m.content }}", ""), "{{ (messages[0].content + '')[:1] }}",
])
def test_a_question_that_a_template_leaves_out_is_refused(tokenizer, template):
    """Else all prompts are the same, all rewards 0, and nobody knows why. If the template fails on
    a list of parts, that is not the reason."""
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="it leaves out the turn of user, 'x=[?]'.*correct"):
        Questions([ONE | {"question": "x=?"}], "toy", tokenizer).first()


def test_without_a_chat_template_the_prompt_is_plain_text_and_a_note_says_so(tokenizer, one):
    tokenizer.chat_template = None
    tokenizer.add_tokens(["User: ", "Assistant:", "4"])
    [question], [note] = load_questions(one, tokenizer, system_prompt="4")
    assert tokenizer.decode(question["prompt"]) == "4\n\nUser: 1+1=?\nAssistant:"
    assert "no chat template" in note


def test_special_tokens_are_added_only_where_no_chat_template_wrote_them(tokenizer, one):
    eos = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", eos)])
    assert eos not in load_questions(one, tokenizer)[0][0]["prompt"]
    tokenizer.chat_template = None
    assert load_questions(one, tokenizer)[0][0]["prompt"].count(eos) == 1


def test_the_default_system_prompt_shows_the_form_that_the_format_reward_pays_for():
    form = SYSTEM_PROMPT[SYSTEM_PROMPT.index("<think>") :]
    assert format_reward([form]) == [1.0]


def test_a_hub_that_cannot_be_reached_is_one_sentence(tokenizer, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match="gsm8k .*no network.* go online"):
        load_questions("gsm8k", tokenizer)


def test_a_question_of_a_hub_without_an_answer_is_skipped_and_reported(tokenizer, monkeypatch):
    rows = [ONE, ONE | {"answer": " \n"}, ONE | {"answer": None}, ONE | {"question": " "}]
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    [question], [note] = load_questions("gsm8k", tokenizer, split="test")
    assert question == question | ONE and "skipped 3 of 4 questions of gsm8k" in note


# --- take ---


def test_the_order_of_each_epoch_is_that_of_pythons_shuffle_however_it_is_cut():
    expected, taken = [], []
    for epoch in range(3):
        order = list(range(7))
        random.Random(f"1 {epoch}").shuffle(order)
        expected += order
    for size in (5, 0, 16):
        taken += numbers_of(len(taken), size, 7, seed=1)
    assert taken == expected


# --- fingerprint ---


def test_another_content_has_another_fingerprint():
    two = ONE | {"question": "2+2=?"}
    contents = [ONE, two], [ONE], [two, ONE], [ONE, two | {"answer": "5"}]
    assert len(set(map(fingerprint, contents))) == 4
    assert fingerprint([ONE | {"level": 3}]) == fingerprint([ONE])


# --- prompts are made when a question is taken ---


def test_only_what_is_asked_is_read(tokenizer):
    rows = {n: ONE | {"question": f"{n}+1=?"} for n in (7, 900)}  # there are no others
    asked = Questions(rows, "toy", tokenizer).ask([900, 7])
    assert [*asked] == [900, 7] and tokenizer.decode(asked[7]["prompt"]) == "7+1=?"


def test_the_fingerprint_covers_what_prompts_are_made_of(tokenizer):
    found = set()
    for rows, system_prompt, template, options in [
        ([ONE], "4", TURNS, {}), ([ONE | {"answer": "3"}], "4", TURNS, {}),
        ([ONE], "5", TURNS, {}), ([ONE], "4", NO_SYSTEM, {}), ([ONE], "4", TURNS, {"messages": 1}),
    ]:  # fmt: skip
        tokenizer.chat_template = template
        questions = Questions(rows, "toy", tokenizer, system_prompt, template_options=options)
        found.add(questions.fingerprint())
    assert len(found) == 5


def test_a_run_whose_template_writes_the_date_goes_on_on_another_day(
    loaded, tmp_path, monkeypatch, capsys
):
    """As the templates of Llama 3.2 and gpt-oss do. One note says that its prompts have changed."""
    loaded[1].chat_template = "{{ strftime_now('%d') }}+{{ messages[-1].content }}"
    for part in loaded:
        part.save_pretrained(tmp_path / "model")
    folder = tmp_path / "run"
    on_day(1, monkeypatch)
    run(tmp_path / "model", folder, "--questions_per_step 1 --group_size 4 --steps 1 "
        "--max_new_tokens 4 --eval_questions 0")
    for day, steps in ((1, 2), (2, 3), (2, 4)):
        on_day(day, monkeypatch)
        capsys.readouterr()
        go_on(folder, f"--steps {steps}")
        noted = "the chat template writes other prompts" in capsys.readouterr().out
        assert noted == (steps == 3)
    prompts = [row["prompt"][:3] for row in read_lines(folder / "samples.jsonl")]
    assert prompts == ["01+", "01+", "02+", "02+"]


def on_day(day, monkeypatch):
    """Let the clock of chat templates show this day of a month."""
    clock = SimpleNamespace(now=lambda: datetime(2026, 1, day))
    monkeypatch.setattr(chat_template_utils, "datetime", clock)


def test_a_run_keeps_the_names_of_columns_and_asks_the_next_question_instead(small, tmp_path):
    """Each second question is too long. The steps are as large as without them, and the run ends
    when all are through."""
    rows = [{"q": asked, "true": {"a": "2"}} for asked in ("1+1=?", "1+1+1+1+1+1=?")] * 6
    data = written(tmp_path / "x.jsonl", rows)
    folder = tmp_path / "run"
    run(small, folder, f"--dataset {data} --columns question=q answer=true.a --group_size 4 "
        "--rewards number_accuracy --questions_per_step 2 --algorithm grpo --max_new_tokens 4 "
        "--max_prompt_tokens 6 --steps 1")
    with pytest.raises(UserError, match=r"with --columns \[.question=q., .answer=true.a.\], not"):
        go_on(folder, "--columns question=q answer=q")
    assert go_on(folder, "--steps 9") == 0
    *asked, last = [row["questions"] for row in metrics_of(folder)]
    summary = json_of(folder / "summary.json")
    assert {*asked} == {2} and 0 < last <= 2
    skipped = summary["skipped_questions"]
    assert summary["position"] == sum(asked) + last + skipped >= 12 and skipped >= 6
