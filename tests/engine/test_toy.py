"""engine/tasks/toy.py: the questions are right and held apart, the tokenizer loses nothing, the
model starts to learn."""

import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.tasks import toy, toy_model
from engine.tasks.table import base_model

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
    # in every process and for ever: saved runs count on it
    assert toy.question(0)["question"] == "6+7-9+9-9=?"
    assert len({toy.question(i, split)["question"] for i in range(20) for split in SPLITS}) > 50


def test_a_tenth_of_all_questions_is_held_out(monkeypatch):
    monkeypatch.setattr(toy, "OPERANDS", 3)  # few enough to draw every one
    train, warm_start, test = (
        {toy.question(i, split)["question"] for i in range(12000)}
        for split in ("train", "warm_start", "test")
    )
    assert not (train | warm_start) & test
    assert 0.08 < len(test) / len(train | warm_start | test) < 0.12


# --- demonstrations ---


def test_demonstrations_think_rightly_or_guess_a_number_nearby_as_often_as_they_say():
    thinks, wrong = [], []
    for i in range(5000):
        row, (question, completion) = toy.question(i, "warm_start"), toy.demonstration(i)
        thinks.append(completion == thinking(row))
        if not thinks[-1]:
            guess = re.fullmatch(r"<answer>(\d+)</answer>", completion)
            off = abs(int(guess[1]) - int(row["answer"]))
            assert question == row["question"] and off <= 3
            wrong.append(off > 0)
    assert abs(sum(thinks) / len(thinks) - toy.THINKING_SHARE) < 0.02
    assert abs(sum(wrong) / len(wrong) - toy.WRONG_SHARE) < 0.03


def test_the_longest_thoughts_fit_into_a_completion(tokenizer):
    # a running total has the most digits where every sign is a plus and every digit a nine
    worst = "<think>9+9=18;18+9=27;27+9=36;36+9=45;</think>\n<answer>45</answer><eos>"
    assert len(tokenizer(worst).input_ids) <= toy.MAX_NEW_TOKENS


# --- tokenizer ---


def test_a_tag_is_one_token_and_so_is_every_other_character(tokenizer):
    for i in range(100):
        row = toy.question(i)
        text = row["question"] + thinking(row)
        ids = tokenizer(text).input_ids
        assert [tokenizer.decode([i]) for i in ids] == re.findall(
            r"</?(?:think|answer)>|.|\n", text
        )
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_eos_is_one_token_of_its_own_and_not_the_padding(tokenizer):
    assert tokenizer("1<eos>").input_ids == [tokenizer("1").input_ids[0], tokenizer.eos_token_id]
    assert tokenizer.decode(tokenizer("1<eos><pad>").input_ids, skip_special_tokens=True) == "1"
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


# --- model ---


@torch.no_grad()
def loss(model, tokenizer):
    """Cross-entropy per completion token, and that of EOS alone, over demonstrations that the warm
    start does not reach."""
    losses = []
    for i in range(100_000, 100_050):
        question, completion = toy.demonstration(i)
        start = len(tokenizer(question).input_ids)
        ids = tokenizer(question + completion + "<eos>", return_tensors="pt").input_ids
        logp = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        losses.append(-logp.gather(1, ids[0, start:, None]))
    return torch.cat(losses).mean(), torch.stack([each[-1] for each in losses]).mean()


def test_a_few_steps_of_the_warm_start_lower_the_loss_and_teach_eos(tokenizer):
    torch.manual_seed(0)
    model = toy_model.make_model(tokenizer)
    before, _ = loss(model, tokenizer)
    toy_model.warm_start(model, tokenizer, steps=25)
    after, eos = loss(model, tokenizer)
    assert after < before / 2 and eos < 0.1
    assert all(p.grad is None for p in model.parameters())  # none is left to whoever trains it next


def test_the_shipped_base_model_is_the_one_that_the_code_makes(tokenizer):
    """The same tokenizer and shape; its loss is near the least that guesses allow."""
    folder = toy_model.base()
    model = AutoModelForCausalLM.from_pretrained(folder)
    made = toy_model.make_config(tokenizer).to_dict()
    shipped = model.config.to_dict()
    names = ("hidden_size", "num_hidden_layers", "vocab_size", "rope_parameters", "eos_token_id")
    for name in names:
        assert shipped[name] == made[name]
    assert model.dtype == torch.float32 and model.num_parameters() == 108_608
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    for text in [toy.question(0)["question"], *toy.demonstration(0), *toy.demonstration(1)]:
        assert loaded(text).input_ids == tokenizer(text).input_ids
    after, eos = loss(model, tokenizer)
    assert after < 0.25 and eos < 0.01


def test_the_base_model_is_shipped_and_another_kind_is_made_once(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = []
    monkeypatch.setattr(toy_model, "warm_start", lambda model, *_, **__: trained.append(model))
    assert toy_model.base() == str(toy_model.SHIPPED) and not trained
    folder = toy_model.base("wordy")
    assert toy_model.base("wordy") == folder and len(trained) == 1
    # nothing unfinished stays
    assert [f"runs/{path.name}" for path in (tmp_path / "runs").iterdir()] == [folder]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(map(torch.equal, loaded.parameters(), trained[0].parameters()))


def test_making_the_base_model_again_tells_how_far_it_is_off(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def shipped(model, tokenizer, **options):
        model.load_state_dict(load_file(toy_model.SHIPPED / "model.safetensors"), strict=False)

    def moved(model, tokenizer, **options):
        shipped(model, tokenizer)
        with torch.no_grad():
            model.model.norm.weight[3] += 0.5

    for warm_start, sentence in [(shipped, "bit for bit"), (moved, "by at most 0.5")]:
        monkeypatch.setattr(toy_model, "warm_start", warm_start)
        toy_model.main()
        assert sentence in capsys.readouterr().out


def test_each_kind_of_toy_has_its_own_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toy_model, "warm_start", lambda model, tokenizer, **_: None)
    assert len({toy_model.base(), toy_model.base("code"), toy_model.base("wordy")}) == 3
    assert base_model("toy", "toy") == toy_model.base()
    assert base_model("toy", "toy_code") == toy_model.base("code")
    assert base_model("x", "toy") == "x"
    (tmp_path / "runs/toy-base-of-before").mkdir()
    # of a run that is resumed
    assert base_model("toy", "toy", earlier="runs/toy-base-of-before") == "runs/toy-base-of-before"
    assert base_model("toy", "toy", earlier="runs/toy-base-none") == toy_model.base()


def test_programs_of_the_code_toy_print_what_they_should_or_a_guess():
    """Those that calculate are right; of those that print a number about half are. No token is lost
    on the way."""
    tokenizer, calculated, guessed = toy_model.make_tokenizer("code"), [], []
    for i in range(400):
        _, completion = toy.demonstration(i, "code")
        ids = tokenizer(completion).input_ids
        assert tokenizer.decode(ids) == completion and len(ids) < toy.MAX_NEW_TOKENS
        program = re.fullmatch(r"<think></think>\n```python\nprint\((.*)\)\n```", completion)[1]
        right = eval(program) == int(toy.question(i, "warm_start")["answer"])
        (guessed if program.isdigit() else calculated).append(right)
    assert 80 < len(calculated) < 160 and all(calculated)
    assert 0.4 < sum(guessed) / len(guessed) < 0.6
