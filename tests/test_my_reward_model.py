"""examples/my_reward_model.py: a tiny sequence classifier as the judge."""

import json
import re
import runpy
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from experiments.library import toy_model
from tasks import toy
from tests.helpers.runs import ROOT, python

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples/my_reward_model.py"
QUESTIONS = ["1+2=?", "9-4+7=?", "3=?", "8+8=?", "5-1=?"]
COMPLETIONS = [
    "<answer>3</answer>", "<think>9-4=5;5+7=12;</think>\n<answer>12</answer>", "3", "", "<answer>4",
]
TEMPLATE = (
    "{% for m in messages %}{{ '?' if m['role'] == 'user' else '=' }}{{ m['content'] }}<eos>"
    "{% endfor %}"
)


def make(folder, *, template=None, labels=1, pad="<pad>"):
    torch.manual_seed(0)
    tokenizer = toy_model.make_tokenizer()
    tokenizer.chat_template, tokenizer.pad_token = template, pad
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
        num_labels=labels, attention_dropout=0.5, initializer_range=0.5,
        pad_token_id=tokenizer.convert_tokens_to_ids("="), eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    # not what it must be judged in
    model = Qwen2ForSequenceClassification(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def load(monkeypatch):
    """The reward of the example, its model and its tokenizer, for the model in a folder."""
    def names(folder):
        monkeypatch.setenv("REWARD_MODEL", str(folder))
        example = runpy.run_path(str(EXAMPLE))
        model, tokenizer = example["classifier"]()
        return SimpleNamespace(judged=example["judged"], model=model, tokenizer=tokenizer)
    return names


def by_hand(judge, texts):
    """The score at the last token, of each text alone, without any padding."""
    scores = []
    for text in texts:
        tokens = judge.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            states = judge.model.model(**tokens.to(judge.model.device)).last_hidden_state
            scores.append(judge.model.score(states)[0, -1, 0].item())
    return pytest.approx(scores, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("template, text, pad", [
    (None, "{}{}", "<pad>"), (None, "{}{}", None), (TEMPLATE, "?{}<eos>={}<eos>", "<pad>"),
])
def test_a_score_is_that_of_the_last_token_whatever_else_is_in_the_batch(
    load, tmp_path, template, text, pad
):
    """In float32 and without dropout; a tokenizer without a pad token pads with EOS."""
    judge = load(make(tmp_path, template=template, pad=pad))
    scores = judge.judged(COMPLETIONS * 4, question=QUESTIONS * 4, answer=["3"])
    assert len(set(scores[:5])) == 5
    texts = [text.format(*x) for x in zip(QUESTIONS, COMPLETIONS)]
    assert scores == by_hand(judge, texts * 4)
    assert judge.model.dtype == torch.float32 and not judge.model.training


def test_an_encoder_reads_a_pair(load, tmp_path):
    """[CLS] question [SEP] answer [SEP], each half with its own type, as its training had it."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"0123456789+-=?"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, num_labels=1, initializer_range=0.5)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    judge = load(tmp_path)
    [found, _] = judge.judged(["1 2", "3"], question=["3 + 4 = ?", "1"])
    read = "[CLS] 3 + 4 = ? [SEP] 1 2 [SEP]".split()
    tokens = torch.tensor([tokenizer.convert_tokens_to_ids(read)])
    types = torch.tensor([[0] * 7 + [1] * 3])
    with torch.no_grad():
        expected = judge.model(tokens, token_type_ids=types).logits.item()
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("mark, says", [
    (lambda good, bad: [{"chosen": good, "rejected": bad}], r"right order: (100|9\d)%"),
    (lambda good, bad: [{"completion": good, "stars": 5}, {"completion": bad, "stars": 1}],
     r"off by 0\.\d\d stars"),
])
def test_a_reward_model_learns_what_people_prefer(mark, says, load, tmp_path):
    """People prefer thoughts. So does the model that has learned from their marks."""
    rows = []
    for i in range(160):
        row = toy.question(i)
        answer = f"<answer>{row['answer']}</answer>"
        for marked in mark(f"<think>{row['thoughts']}</think>\n{answer}", answer):
            rows.append(json.dumps({"question": row["question"]} | marked))
    (tmp_path / "marks.jsonl").write_text("\n".join(rows))
    words = f"--model {toy.BASE} --marks {tmp_path}/marks.jsonl --output {tmp_path}/judge"
    words += " --lr 1e-3 --epochs 4"
    _, said = python(EXAMPLE.with_name("train_reward_model.py"), *words.split())
    assert re.search(says, said), said
    judge = load(tmp_path / "judge")
    new = toy.question(0, "test")
    thought = f"<think>{new['thoughts']}</think>\n<answer>{new['answer']}</answer>"
    high, low = judge.judged([thought, "<answer>3</answer>"], question=[new["question"]] * 2)
    assert high > low + 1


def test_a_model_of_several_labels_or_without_a_head_is_refused(load, tmp_path):
    """The head would be drawn at random, by every rank for itself."""
    with pytest.raises(ValueError, match="2 labels"):
        load(make(tmp_path / "two", labels=2))
    load(make(tmp_path / "one")).model.model.save_pretrained(tmp_path / "one")
    with pytest.raises(ValueError, match="lacks weights"):
        load(tmp_path / "one")
