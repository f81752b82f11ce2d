"""engine/tasks/toy.py: the questions are right and held apart, the tokenizer loses nothing, the
model starts to learn."""

import contextlib
import random
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.tasks import toy, toy_model
from engine.tasks.questions import base_model
from rewards import format_reward, toy_accuracy

SPLITS = ["train", "test", "warm_start"]


@pytest.fixture(scope="module")
def tokenizer():
    return toy_model.make_tokenizer()


def thinking(row):
    return f"<think>{row['thoughts']}</think>\n<answer>{row['answer']}</answer>"


# --- questions ---


@pytest.mark.parametrize("split", SPLITS)
def test_answers_and_thoughts_are_right_step_by_step_and_never_negative(split):
    for i in range(2000):
        row = toy.question(i, split)
        assert re.fullmatch(r"[1-9]([+-][1-9]){4}=\?", row["question"])
        total, *rest = [int(term) for term in re.findall(r"[+-]?\d", row["question"])]
        steps = ""
        for term in rest:
            steps += f"{total}{term:+d}={total + term};"
            total += term
            assert total >= 0
        assert (row["thoughts"], row["answer"]) == (steps, str(total))


def test_a_question_follows_from_its_number_and_split_alone():
    random.seed(0)
    first = [toy.question(i, split) for i in range(20) for split in SPLITS]
    random.seed(1)
    assert [toy.question(i, split) for i in range(20) for split in SPLITS] == first
    assert len({row["question"] for row in first}) > 50
    # in every process and for ever: saved runs count on it
    assert toy.question(0)["question"] == "6+7-9+9-9=?"


def test_no_test_question_is_among_thousands_to_learn_from():
    learnt = {
        toy.question(i, split)["question"] for i in range(5000) for split in ("train", "warm_start")
    }
    assert len(learnt) > 9000
    assert not learnt & {toy.question(i, "test")["question"] for i in range(2000)}


def test_a_tenth_of_all_questions_is_held_out(monkeypatch):
    monkeypatch.setattr(toy, "OPERANDS", 3)  # few enough to draw every one
    train, warm_start, test = (
        {toy.question(i, split)["question"] for i in range(12000)}
        for split in ("train", "warm_start", "test")
    )
    assert not (train | warm_start) & test
    assert 0.08 < len(test) / len(train | warm_start | test) < 0.12


# --- demonstrations ---


def test_demonstrations_think_and_err_as_often_as_they_say():
    thinks, wrong = [], []
    for i in range(5000):
        row, (question, completion) = toy.question(i, "warm_start"), toy.demonstration(i)
        assert question == row["question"]
        thinks.append(format_reward([completion])[0])
        if not thinks[-1]:
            wrong.append(1 - toy_accuracy([completion], [row["answer"]])[0])
    assert abs(sum(thinks) / len(thinks) - toy.THINKING_SHARE) < 0.02
    assert abs(sum(wrong) / len(wrong) - toy.WRONG_SHARE) < 0.03


def test_a_demonstration_thinks_rightly_or_guesses_a_number_nearby():
    for i in range(500):
        row, (_, completion) = toy.question(i, "warm_start"), toy.demonstration(i)
        if completion != thinking(row):
            guess = re.fullmatch(r"<answer>(\d+)</answer>", completion)
            assert abs(int(guess[1]) - int(row["answer"])) <= 3


def test_the_longest_thoughts_fit_into_a_completion(tokenizer):
    # a running total has the most digits where every sign is a plus and every digit a nine
    worst = "<think>9+9=18;18+9=27;27+9=36;36+9=45;</think>\n<answer>45</answer><eos>"
    longest = max(
        len(tokenizer(thinking(toy.question(i)) + "<eos>").input_ids) for i in range(3000)
    )
    assert longest <= len(tokenizer(worst).input_ids) <= toy.MAX_NEW_TOKENS


# --- tokenizer ---


def test_a_tag_is_one_token_and_so_is_every_other_character(tokenizer):
    for i in range(100):
        row = toy.question(i)
        text = row["question"] + thinking(row)
        ids = tokenizer(text).input_ids
        assert [tokenizer.decode([i]) for i in ids] == re.findall(
            r"</?(?:think|answer)>|.|\n", text
        )
        assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text


def test_eos_is_one_token_of_its_own_and_not_the_padding(tokenizer):
    assert tokenizer("1<eos>").input_ids == [tokenizer("1").input_ids[0], tokenizer.eos_token_id]
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.decode(tokenizer("1<eos><pad>").input_ids, skip_special_tokens=True) == "1"


def test_the_chat_template_is_the_bare_question(tokenizer):
    messages = [{"role": "system", "content": "think"}, {"role": "user", "content": "1+1=?"}]
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        == "1+1=?"
    )


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_the_tokenizer_survives_saving_and_loading(tokenizer, tmp_path, beside_a_model):
    tokenizer.save_pretrained(tmp_path)
    if beside_a_model:  # AutoTokenizer goes by the model's config.json where there is one
        toy_model.make_model(tokenizer).config.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = thinking(toy.question(0)) + "<eos>"
    assert loaded(text).input_ids == tokenizer(text).input_ids
    assert loaded.decode(loaded(text).input_ids) == text
    assert len(loaded) == len(tokenizer) and loaded.chat_template == tokenizer.chat_template
    assert (loaded.eos_token_id, loaded.pad_token_id) == (
        tokenizer.eos_token_id, tokenizer.pad_token_id,
    )


# --- model ---


def test_the_model_has_about_as_many_parameters_as_its_docstring_says(tokenizer):
    model = toy_model.make_model(tokenizer)
    said = int(
        re.search(r"[\d,]+(?= parameters)", toy_model.make_model.__doc__)[0].replace(",", "")
    )
    assert abs(model.num_parameters() / said - 1) < 0.01
    assert (model.config.eos_token_id, model.config.pad_token_id) == (
        tokenizer.eos_token_id, tokenizer.pad_token_id,
    )


@torch.no_grad()
def losses(model, tokenizer):
    """Cross-entropy per completion token, and that of EOS alone, over demonstrations that the warm
    start does not reach."""
    every, eos = [], []
    for i in range(100_000, 100_050):
        question, completion = toy.demonstration(i)
        start = len(tokenizer(question).input_ids)
        ids = tokenizer(question + completion + "<eos>", return_tensors="pt").input_ids
        logp = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        every += (-logp.gather(1, ids[0, start:, None])).flatten().tolist()
        eos.append(every[-1])
    return sum(every) / len(every), sum(eos) / len(eos)


def test_a_few_steps_of_the_warm_start_lower_the_loss_and_teach_eos(tokenizer):
    torch.manual_seed(0)
    model = toy_model.make_model(tokenizer)
    before, _ = losses(model, tokenizer)
    toy_model.warm_start(model, tokenizer, steps=25)
    after, eos = losses(model, tokenizer)
    assert after < before / 2
    assert eos < 0.1
    assert all(p.grad is None for p in model.parameters())  # none is left to whoever trains it next


def test_an_interrupted_warm_start_goes_on_to_the_same_weights(tokenizer, tmp_path, monkeypatch):
    weights, steps = [], []

    def counted(*rest, real=torch.nn.utils.clip_grad_norm_):
        steps.append(1)
        if len(steps) == 100 + 60:
            raise KeyboardInterrupt
        return real(*rest)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", counted)
    for name, interrupted in ("straight", False), ("halved", True), ("halved", False):
        torch.manual_seed(len(weights) == 2)  # the weights of the last part come from the file
        model = toy_model.make_model(tokenizer)
        with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
            toy_model.warm_start(model, tokenizer, steps=100, batch_size=4, state=tmp_path / name)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(weights[0], weights[2]) and len(steps) == 100 + 60 + 50


def test_the_base_model_is_made_once_and_can_be_loaded(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = []
    monkeypatch.setattr(
        toy_model, "warm_start", lambda model, tokenizer, **_: trained.append(model)
    )
    folder = toy_model.base()
    assert toy_model.base() == folder and len(trained) == 1
    # nothing unfinished stays
    assert [f"runs/{path.name}" for path in (tmp_path / "runs").iterdir()] == [folder]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), trained[0].parameters(), strict=True)
    )
    question = toy.question(0)["question"]
    assert (
        AutoTokenizer.from_pretrained(folder)(question).input_ids == tokenizer(question).input_ids
    )


def test_each_kind_of_toy_has_its_own_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toy_model, "warm_start", lambda model, tokenizer, **_: None)
    assert len({toy_model.base(), toy_model.base("code"), toy_model.base("wordy")}) == 3
    assert base_model("toy", "toy") == toy_model.base() and base_model(
        "toy", "toy_code"
    ) == toy_model.base("code")
    assert base_model("x", "toy") == "x"
    (tmp_path / "runs/toy-base-of-before").mkdir()
    # of a run that is resumed
    assert base_model("toy", "toy", earlier="runs/toy-base-of-before") == "runs/toy-base-of-before"
    assert base_model("toy", "toy", earlier="runs/toy-base-none") == toy_model.base()


def test_programs_of_the_code_toy_print_what_they_should_or_a_guess():
    """Those that calculate are right; of those that print a number about half are. No token is lost
    on the way."""
    tokenizer, calculated, guessed = toy_model.make_tokenizer("code"), 0, []
    for i in range(400):
        _, completion = toy.demonstration(i, "code")
        ids = tokenizer(completion).input_ids
        assert (
            tokenizer.decode(ids) == completion
            and max(ids) < len(tokenizer)
            and len(ids) < toy.MAX_NEW_TOKENS
        )
        program = completion.removeprefix("<think></think>\n```python\nprint(").removesuffix(
            ")\n```"
        )
        right = eval(program) == int(toy.question(i, "warm_start")["answer"])
        if program.isdigit():
            guessed.append(right)
        else:
            calculated += 1
            assert right
    assert 80 < calculated < 160 and 0.4 < sum(guessed) / len(guessed) < 0.6


def test_the_wordy_ones_all_think_and_are_right_and_only_their_length_differs():
    lengths = set()
    for i in range(200):
        question, completion = toy.demonstration(i, "wordy")
        row = toy.question(i, "warm_start")
        thoughts, answer = (
            completion.removeprefix("<think>").removesuffix("</answer>").split("</think>\n<answer>")
        )
        assert answer == row["answer"] and thoughts.startswith(row["thoughts"])
        rest = thoughts.removeprefix(row["thoughts"])
        assert rest == f"{answer};" * rest.count(";")
        lengths.add(rest.count(";"))
    assert lengths == set(range(toy.WORDY + 1))
