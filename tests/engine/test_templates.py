"""Chat templates that open a thought in the prompt: the rewards see the completion as if it began
with what was opened."""

from pathlib import Path

import pytest
import torch

import eval as evaluation
import train
from engine.base import files
from engine.data.questions import fingerprint, load_questions, opened_thought
from engine.model.contract import Completions, stop_tokens
from engine.model.loading import load_model
from engine.model.logprobs import completion_mask
from engine.model.sampling import Sampler
from engine.scoring.score import reward_columns
from experiments.library.toy_model import make_tokenizer
from tasks.table import SYSTEM_PROMPT

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


def completions_of(tokenizer, texts):
    """Completions of these texts, the last ones cut off: without an EOS."""
    rows = [torch.tensor(tokenizer(text).input_ids) for text in texts]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    ended = tokens.gather(1, lengths[:, None] - 1)[:, 0] == tokenizer.eos_token_id
    mask = completion_mask(tokens, lengths)
    return Completions(tokens, lengths, ~ended, -0.1 * mask, mask)


@pytest.mark.parametrize("opened", ["", "<think></think>\n", "<think>", "<think>\n1="])
def test_neither_the_rewards_columns_nor_the_fingerprint_see_it_and_the_prompt_stays_whole(
    tmp_path, opened
):
    path, tokenizer = tmp_path / "questions.jsonl", tokenizer_that_opens(opened)
    path.write_text('{"question": "9-8=?", "answer": "1", "level": 3}\n')
    (plain,), _ = load_questions(str(path), tokenizer_that_opens(""))
    (row,), _ = load_questions(str(path), tokenizer)
    assert fingerprint([row]) == fingerprint([plain])
    assert reward_columns([row]) == {"question": ["9-8=?"], "answer": ["1"], "level": [3]}
    assert tokenizer.decode(row["prompt"]) == "9-8=?=" + opened
    texts = ["1", "2</think>", "3", ""]
    drawn = completions_of(tokenizer, ["1", "2</think>", "3<eos>", "<eos>"])
    expected = opened if opened in ("<think>", "<think>\n1=") else ""
    assert drawn.texts(tokenizer, [row]) == [expected + text for text in texts]
    assert drawn.texts(tokenizer) == texts


RIGHT = "9-8=1;</think>\n<answer>1</answer><eos>"  # all that was asked for
CUT_OFF = "9-8=<answer>1</answer>9"  # still thinking when it ended
TEXTS = ["<think>\n9-8=1;</think>\n<answer>1</answer>", "<think>\n9-8=<answer>1</answer>9"]


def test_train_and_eval_judge_the_answer_after_the_thought_that_the_prompt_opened(
    small, tmp_path, monkeypatch
):
    """A sampler answers every question rightly, then cut off, and so on."""
    folder, out, questions = (str(tmp_path / name) for name in ("model", "out", "x.jsonl"))
    model, tokenizer = load_model(small, torch.device("cpu"))
    tokenizer.chat_template = "{{ messages[-1]['content'] + '<think>\\n' }}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(Sampler, "sample", lambda self, prompts, k, *_: completions_of(
        tokenizer, [(RIGHT, CUT_OFF)[i % 2] for _ in prompts for i in range(k)]))
    Path(questions).write_text('{"question": "9-8=?", "answer": "1"}\n' * 8)
    words = ["--model", folder, "--max_new_tokens", "40", "--output_dir", out]
    train.main([
        *words, "--dataset", questions, "--rewards", "gsm8k_accuracy", "format_reward",
        "--group_size", "4", "--questions_per_step", "2", "--steps", "1",
        "--eval_dataset", questions,
    ])  # fmt: skip
    (row,) = files.read(Path(out, "metrics.jsonl"))
    # half of all are right: 2.0 and 1.0; the other half says nothing but an open thought
    assert row["reward/gsm8k_accuracy"] == 1.0 and row["reward/format_reward"] == 0.5
    (sample,) = files.read(Path(out, "samples.jsonl"))
    assert [c["completion"] for c in sample["completions"]] == TEXTS * 2
    evaluation.main([*words, "--benchmark", questions, "--samples", "4"])
    _, answers = evaluation.read_answers(Path(out, "eval-x.jsonl"))
    assert [r["completion"] for r in answers["sampled"]] == TEXTS * 16
    assert [r["correct"] for r in answers["sampled"]] == [True, False] * 16


# --- special tokens ---


def test_tags_that_are_special_tokens_are_seen_by_the_rewards():
    """Some tokenizers have <think> and <answer> as special tokens. Only what ends a completion and
    padding are left out."""
    tokenizer = make_tokenizer()
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    assert set(tags) <= set(tokenizer.all_special_tokens)
    texts = ["<think>\n9-8=1;</think>\n<answer>1</answer>", "<think>1"]
    drawn = completions_of(tokenizer, [texts[0] + "<eos>", texts[1]])
    assert drawn.texts(tokenizer) == texts


def test_another_token_that_ends_a_completion_is_no_text():
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    drawn = completions_of(tokenizer, ["12<|im_end|>", "1<|im_end|>2"])
    drawn.truncated = torch.tensor([False, True])
    assert drawn.texts(tokenizer) == ["12", "1<|im_end|>2"]


TURNS = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize("template, stops", [
    (TURNS, True), (TURNS.replace("<|im_end|>", "<eos>"), False), (None, False),
    (TURNS.replace("<|im_end|>", ""), False), ("{{ raise_exception('no') }}", False),
])  # fmt: skip
def test_the_end_of_a_turn_ends_a_completion(template, stops, small):
    """Qwen's base models have a chat template and another EOS."""
    model, tokenizer = load_model(small, torch.device("cpu"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (end in stop_tokens(model, tokenizer)) == stops
    assert tokenizer.eos_token_id in stop_tokens(model, tokenizer)
    model.generation_config.eos_token_id = [end]
    assert {end, tokenizer.eos_token_id} <= {*stop_tokens(model, tokenizer)}
