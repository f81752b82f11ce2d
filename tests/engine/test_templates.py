"""Chat templates that open a thought in the prompt: the rewards see the completion as if it began
with what was opened."""

import json
from types import SimpleNamespace

import pytest
import torch

import eval as evaluation
import train
from engine.base import files
from engine.model.loading import load_model
from engine.model.sampling import Completions, Sampler
from engine.tasks.questions import fingerprint, load_questions, opened_thought, reward_columns
from engine.tasks.table import SYSTEM_PROMPT
from engine.tasks.toy_model import make_tokenizer

pytestmark = pytest.mark.slow

HEADER = "<|im_end|>\n<|im_start|>assistant\n"
NAMES_THE_TAG = "Begin with <think> and never say why."


@pytest.mark.parametrize(
    "end, begun",
    [
        (HEADER, ""),
        (HEADER + "<think>\n", "<think>\n"),  # Qwen3-Thinking, QwQ, DeepSeek-R1's distillations
        ("<|Assistant|><think>", "<think>"),
        (HEADER + "<think>\nOkay, ", "<think>\nOkay, "),
        (HEADER + "Let me solve this step by step.\n<think>", "<think>"),
        (HEADER + "<think>\n\n</think>\n\n", ""),  # Qwen3 that is not to think
        (HEADER + "<think>\n\n</think>\n\n<think>\n", "<think>\n"),
    ],
)
@pytest.mark.parametrize("system", [SYSTEM_PROMPT, NAMES_THE_TAG])
def test_what_a_template_has_begun(end, begun, system):
    """The template strips the question, as many do; what the system prompt and the question say of
    the tag begins nothing."""
    for question in ("9-8=?", " What does <think> mean? \n", "9"):
        before = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
        assert opened_thought(before + question.strip() + end, question) == begun


def tokenizer_that_opens(text):
    tokenizer = make_tokenizer()
    # a newline at its very end would be dropped
    tokenizer.chat_template = f"{{{{ messages[-1]['content'] + '=' + {text!r} }}}}"
    return tokenizer


def questions_of(tokenizer, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(
        '{"question": "9-8=?", "answer": "1", "level": 3}\n{"question": "1=?", "answer": "1", '
        '"level": 4}\n'
    )
    return load_questions(str(path), tokenizer)[0]


def completions_of(tokenizer, texts):
    """Completions of these texts, the last ones cut off: without an EOS."""
    rows = [torch.tensor(tokenizer(text).input_ids) for text in texts]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    ended = tokens.gather(1, lengths[:, None] - 1)[:, 0] == tokenizer.eos_token_id
    return Completions(
        tokens, lengths, ~ended, -0.1 * (torch.arange(tokens.shape[1]) < lengths[:, None]).float()
    )


@pytest.mark.parametrize("opened", ["", "<think></think>\n", "<think>", "<think>\n1="])
def test_neither_the_rewards_columns_nor_the_fingerprint_see_it_and_the_prompt_stays_whole(
    tmp_path, opened
):
    plain = questions_of(tokenizer_that_opens(""), tmp_path)
    tokenizer = tokenizer_that_opens(opened)
    rows = questions_of(tokenizer, tmp_path)
    assert fingerprint(rows) == fingerprint(plain)
    assert reward_columns(rows) == {
        "question": ["9-8=?", "1=?"], "answer": ["1", "1"], "level": [3, 4],
    }
    assert [tokenizer.decode(row["prompt"]) for row in rows] == ["9-8=?=" + opened, "1=?=" + opened]
    texts = ["1", "2</think>", "3<eos>", ""]
    expected = opened if opened in ("<think>", "<think>\n1=") else ""
    drawn = completions_of(tokenizer, ["1", "2</think>", "3<eos>", "<eos>"])
    assert drawn.texts(tokenizer, rows) == [expected + text.replace("<eos>", "") for text in texts]
    assert drawn.texts(tokenizer) == [text.replace("<eos>", "") for text in texts]


RIGHT = "9-8=1;</think>\n<answer>1</answer><eos>"  # all that was asked for
CUT_OFF = "9-8=<answer>1</answer>9"  # still thinking when it ended


@pytest.fixture
def thinker(small, tmp_path, monkeypatch):
    """A model whose template opens a thought, and a sampler that answers every question rightly,
    then cut off, and so on."""
    folder = str(tmp_path / "thinker")
    model, tokenizer = load_model(small, torch.device("cpu"))
    tokenizer.chat_template = "{{ messages[-1]['content'] + '<think>\\n' }}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    def answers(self, prompts, k, *_):
        texts = [(RIGHT, CUT_OFF)[i % 2] for _ in prompts for i in range(k)]
        return completions_of(tokenizer, texts)

    monkeypatch.setattr(Sampler, "sample", answers)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "9-8=?", "answer": "1"}\n' * 8)
    return SimpleNamespace(folder=folder, questions=str(questions), out=tmp_path / "out")


TEXTS = ["<think>\n9-8=1;</think>\n<answer>1</answer>", "<think>\n9-8=<answer>1</answer>9"]


def test_train_scores_and_logs_the_thought_that_the_prompt_opened(thinker):
    train.main([
        "--model", thinker.folder, "--dataset", thinker.questions, "--rewards", "gsm8k_accuracy",
        "format_reward", "--group_size", "4", "--questions_per_step", "2", "--steps", "1",
        "--eval_dataset", thinker.questions, "--max_new_tokens", "40",
        "--output_dir", str(thinker.out),
    ])  # fmt: skip
    (row,) = files.read(thinker.out / "metrics.jsonl")
    # half of all are right: 2.0 and 1.0; the other half says nothing but an open thought
    assert (row["accuracy"], row["reward/gsm8k_accuracy"], row["reward/format_reward"]) == (
        0.5, 1.0, 0.5,
    )
    (sample,) = files.read(thinker.out / "samples.jsonl")
    assert [c["completion"] for c in sample["completions"]] == TEXTS * 2
    after = json.loads((thinker.out / "summary.json").read_text())["after"]
    assert after["greedy"]["accuracy"] == 1.0  # the first of each question


def test_eval_judges_and_counts_the_answers_after_the_thought_only(thinker):
    evaluation.main([
        "--model", thinker.folder, "--benchmark", thinker.questions, "--samples", "4",
        "--max_new_tokens", "40", "--output_dir", str(thinker.out),
    ])  # fmt: skip
    _, records = evaluation.read_answers(thinker.out / "eval-questions.jsonl")
    assert [r["completion"] for r in records if r["part"] == "sampled"] == TEXTS * 16
    sampled = json.loads((thinker.out / "eval-questions.json").read_text())["sampled"]
    assert (sampled["accuracy"], sampled["maj@4"], sampled["truncated"]) == (0.5, 1.0, 0.5)
