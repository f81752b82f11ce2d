"""Chat templates that open a thought in the prompt: the rewards see the completion as if it began
with what was opened."""

from pathlib import Path

import pytest
import torch

import eval as evaluation
from engine.data.questions import begun, fingerprint, with_prompts
from engine.model.logprobs import completion_mask
from engine.model.sampler import Sampler
from engine.model.sampler_interface import Completions, stop_tokens
from engine.report.answers import read_answers
from engine.scoring.score import reward_columns
from experiments.library.toy_model import make_tokenizer
from tests.helpers.runs import metrics_of, run, written

pytestmark = pytest.mark.slow

HEADER = "<|im_end|>\n<|im_start|>assistant\n"
NAMES_THE_TAG = "Begin with <think> and never say why."


@pytest.mark.parametrize("end, opened", [
    (HEADER, ""),
    (HEADER + "<think>\n", "<think>\n"),  # Qwen3-Thinking, QwQ, DeepSeek-R1's distillations
    (HEADER + "Let me solve this step by step.\n<think>\nOkay, ", "<think>\nOkay, "),
    (HEADER + "<think>\n\n</think>\n\n", ""),  # Qwen3 that is not to think
    (HEADER + "<think>\n\n</think>\n\n<think>\n", "<think>\n"),
])  # fmt: skip
@pytest.mark.parametrize("question", ["9-8=?", " What does <think> mean? \n", "9"])
def test_what_a_template_has_begun(end, opened, question):
    """The template strips the question, as many do; what the system prompt and the question say of
    the tag begins nothing."""
    before = f"<|im_start|>system\n{NAMES_THE_TAG}<|im_end|>\n<|im_start|>user\n"
    assert begun(before + question.strip() + end, {"question": question}) == opened


def tokenizer_that_opens(text):
    tokenizer = make_tokenizer()
    # a newline at its very end would be dropped
    tokenizer.chat_template = f"{{{{ messages[-1]['content'] + '=' + {text!r} }}}}"
    return tokenizer


def completions_of(tokenizer, texts):
    """Completions of these texts. Those that do not end with <eos> or <|im_end|> are cut off."""
    rows = [torch.tensor(tokenizer(text).input_ids) for text in texts]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    truncated = torch.tensor([not text.endswith(("<eos>", "<|im_end|>")) for text in texts])
    mask = completion_mask(tokens, lengths)
    return Completions(tokens, lengths, truncated, -0.1 * mask, mask)


ROW = {"question": "9-8=?", "answer": "1"}


@pytest.mark.parametrize("opened, begins", [
    ("<think></think>\n", ""), ("<think>", "<think>"), ("<think>\n1=", "<think>\n1=")])
def test_neither_the_rewards_columns_nor_the_fingerprint_see_it_and_the_prompt_stays_whole(
    opened, begins
):
    tokenizer = tokenizer_that_opens(opened)
    [row], _ = with_prompts([ROW | {"level": 3}], "toy", tokenizer)
    assert fingerprint([row]) == fingerprint([ROW])
    assert reward_columns([row]) == {"question": ["9-8=?"], "answer": ["1"], "level": [3]}
    assert tokenizer.decode(row["prompt"]) == "9-8=?=" + opened
    texts = ["1", "2</think>", "3", ""]
    drawn = completions_of(tokenizer, ["1", "2</think>", "3<eos>", "<eos>"])
    assert drawn.texts(tokenizer, [row]) == [begins + text for text in texts]
    assert drawn.texts(tokenizer) == texts


RIGHT = "9-8=1;</think>\n<answer>1</answer><eos>"  # all that was asked for
CUT_OFF = "9-8=<answer>1</answer>9"  # still thinking when it ended
TEXTS = ["<think>\n9-8=1;</think>\n<answer>1</answer>", "<think>\n9-8=<answer>1</answer>9"]


def test_train_and_eval_judge_the_answer_after_the_thought_that_the_prompt_opened(
    loaded, tmp_path, monkeypatch
):
    """A sampler answers every question rightly, then cut off, and so on."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = loaded
    tokenizer.chat_template = "{{ messages[-1]['content'] + '<think>\\n' }}"
    for part in loaded:
        part.save_pretrained("model")
    monkeypatch.setattr(Sampler, "sample", lambda self, prompts, k, *_: completions_of(
        tokenizer, ([RIGHT, CUT_OFF] * k)[:k] * len(prompts)))
    written(tmp_path / "x.jsonl", [ROW] * 8)
    run("model", "out", "--dataset x.jsonl --eval_dataset x.jsonl --steps 1 --group_size 4 "
        "--rewards gsm8k_accuracy format_reward --questions_per_step 2 --max_new_tokens 40")
    [row] = metrics_of(Path("out"))
    # half of all are right: 2.0 and 1.0; the other half says nothing but an open thought
    assert row["reward/gsm8k_accuracy"] == 1.0 and row["reward/format_reward"] == 0.5
    words = "--model model --max_new_tokens 40 --output_dir out --samples 4 --benchmark x.jsonl"
    evaluation.main(words.split())
    _, answers = read_answers(Path("out/eval-x.jsonl"))
    found = [(each["completion"], each["correct"]) for each in answers["sampled"]]
    assert found == [*zip(TEXTS, (True, False))] * 16


# --- special tokens ---


@pytest.mark.parametrize("text, end", [
    ("<think>\n9-8=1;</think>\n<answer>1</answer>", "<eos>"), ("<think>1", ""),
    ("12", "<|im_end|>"), ("1<|im_end|>2", ""),
])  # fmt: skip
def test_the_rewards_see_special_tokens_but_not_the_one_that_ends_a_completion(text, end):
    """Some tokenizers have <think> and <answer> as special tokens."""
    tokenizer = make_tokenizer()
    special = ["<think>", "</think>", "<answer>", "</answer>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    assert {*special} <= {*tokenizer.all_special_tokens}
    assert completions_of(tokenizer, [text + end, "1"]).texts(tokenizer) == [text, "1"]


TURNS = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize("template, stops", [
    (TURNS, True), (TURNS.replace("<|im_end|>", "<eos>"), False), (None, False),
    (TURNS.replace("<|im_end|>", ""), False), ("{{ raise_exception('no') }}", False),
    (TURNS.replace("m['content']", "m['content'][0].text"), True),
])  # fmt: skip
def test_the_end_of_a_turn_ends_a_completion(template, stops, loaded):
    """Qwen's base models have a chat template and another EOS."""
    model, tokenizer = loaded
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (end in stop_tokens(model, tokenizer)) == stops
    assert tokenizer.eos_token_id in stop_tokens(model, tokenizer)
    model.generation_config.eos_token_id = [end]
    assert {end, tokenizer.eos_token_id} <= {*stop_tokens(model, tokenizer)}
