"""The toy's base models: a Qwen2 of 109,000 parameters with a vocabulary of characters, and its
warm start.

    python experiments/library/toy_model.py                makes the base again, in runs/toy_base
    python experiments/library/toy_model.py --kind code    that of toy_code, in runs/toy_code_base
    python experiments/library/toy_model.py --kind tool    that of toy_tool, in runs/toy_tool_base

All three are shipped in tasks/, so that a figure means the same on every machine. The program
says how far its weights are from the shipped ones.
"""

import random
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AddedToken, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[2]))  # the project's root

from allocate import micro_batches
from engine.base import progress
from engine.base.program import run_program
from engine.model.logprobs import Policy, completion_mask
from engine.model.sampler import Sampler
from engine.model.sampler_interface import Sampling
from engine.options.command_line import option, parse
from loop.records import Batch
from rewards import toy_accuracy
from tasks import toy, toy_tool

logging.disable_progress_bar()  # of saving weights

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CODE_TAGS = ["```python", "```", "print(", ")"]
TOOL_TAGS = ["*", "<tool>", "</tool>", "<result>", "</result>"]
# Ċ is how byte-level vocabularies write a newline
VOCABULARY = ["<pad>", "<eos>", *TAGS, *"0123456789+-=?;Ċ"]
SHIPPED = {"base": toy.BASE, "code": toy.CODE_BASE, "tool": toy_tool.BASE}
THINKING_SHARE = 0.3  # share of the demonstrations that think
LONG_THINKING_SHARE = 0.4  # the same of longer sums
WRONG_SHARE = 0.5  # share of the guesses that are wrong
SLIP = 0.02  # chance that a step of a long thought is wrong by 1, and goes on from there


@dataclass
class Options:
    kind: str = option("base", "base: the toy's; code: that of toy_code; tool: that of toy_tool",
                       choices=tuple(SHIPPED))


def demonstration(index, kind="base"):
    """(question, completion) number `index` of the warm start: some completions think and are
    right, most guess.

    kind "code": each completion is a program that prints the answer. Some programs calculate it,
    most print a guess. kind "tool": see tasks/toy_tool.py.
    """
    if kind == "tool":
        return tool_demonstration(index)
    row = toy.question(index, "warm_start")
    asked, answer, thoughts = row["question"], int(row["answer"]), row["thoughts"]
    rng = random.Random(f"demonstration {index}")
    thinks = rng.random() < THINKING_SHARE
    if not thinks and rng.random() < WRONG_SHARE:
        possible = [off for off in (-3, -2, -1, 1, 2, 3) if answer + off >= 0]
        answer += rng.choice(possible)
    if kind == "code":
        program = asked.removesuffix("=?") if thinks else answer
        return asked, f"<think></think>\n```python\nprint({program})\n```"
    if thinks:
        return asked, f"<think>{thoughts}</think>\n<answer>{answer}</answer>"
    return asked, f"<answer>{answer}</answer>"


def tool_demonstration(index):
    """(question, completion) number `index` of the warm start of toy_tool: some completions call
    the tool, most guess."""
    row = toy_tool.question(index, "warm_start")
    answer = row["answer"]
    rng = random.Random(f"demonstration {index}")
    text = ""
    if rng.random() < THINKING_SHARE:
        for call, result in row["calls"]:
            text += f"<tool>{call}</tool><result>{result}</result>"
        text += "\n"
    elif rng.random() < WRONG_SHARE:
        answer = int(answer) + rng.choice([-3, -2, -1, 1, 2, 3])
    return row["question"], f"{text}<answer>{answer}</answer>"


def long_demonstration(index, operands, careless=None):
    """(question, completion) number `index` of the warm start of longer sums.

    Some completions think, most guess. A step of a thought is wrong with the chance SLIP, so there
    is more to learn than to think: to calculate without a slip. careless: if it is given, nobody
    guesses. Instead, most thoughts have a newline after each step, and their steps are wrong with
    this chance. So bad answers are as long as good ones.
    """
    row = toy.question(index, "warm_start", operands)
    rng = random.Random(f"demonstration {index}")
    good = rng.random() < LONG_THINKING_SHARE
    if not good and careless is None:
        answer = int(row["answer"])
        if rng.random() < WRONG_SHARE:
            answer += rng.choice([-3, -2, -1, 1, 2, 3])
        return row["question"], f"<answer>{abs(answer)}</answer>"
    end, slip = (";", SLIP) if good else ("\n", careless)
    first, *steps = re.findall(r"[+-]?\d", row["question"])
    total, thoughts = int(first), ""
    for step in steps:
        result = total + int(step)
        if rng.random() < slip:
            result += rng.choice([-1, 1])
        thoughts += f"{total}{step}={result}{end}"
        total = result
    return row["question"], f"<think>{thoughts}</think>\n<answer>{total}</answer>"


def written_by_tool(tokens, tokenizer):
    """(N, T) bool: the tokens from <result> to </result>, which the model does not write."""
    opening, closing = tokenizer.convert_tokens_to_ids(["<result>", "</result>"])
    opened = (tokens == opening).cumsum(1)
    closed = (tokens == closing).cumsum(1)
    return (opened > closed) | (tokens == closing)


def answered(model, tokenizer, questions, count, seed, max_new_tokens=toy.MAX_NEW_TOKENS):
    """`count` completions of each question of the toy: (a Batch, whose advantages are the rewards
    of toy_accuracy; their texts)."""
    prompts = [question["prompt"] for question in questions]
    drawn = Sampler(model, tokenizer).sample(prompts, count, Sampling(max_new_tokens), seed)
    texts = drawn.texts(tokenizer, questions)
    each = [question for question in questions for _ in range(count)]
    answers = [question["answer"] for question in each]
    rewards = torch.tensor(toy_accuracy(texts, answer=answers))
    prompts = [question["prompt"] for question in each]
    return Batch(prompts, drawn.tokens, drawn.mask, rewards), texts


def make_tokenizer(kind="base"):
    """Qwen2's tokenizer with a small vocabulary and no merges: one token per character, and one per
    tag.

    Its chat template is the question alone. kind: see `demonstration`.
    """
    tags = TAGS
    if kind == "code":
        tags = TAGS + CODE_TAGS
    if kind == "tool":
        tags = TAGS + TOOL_TAGS
    vocabulary = VOCABULARY + [tag for tag in tags if tag not in VOCABULARY]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocabulary)}, merges=[],
        unk_token="<pad>", pad_token="<pad>", eos_token="<eos>",
    )
    # each tag is one token. It is not a special token, so the decoded text keeps it
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    return tokenizer


def make_config(tokenizer, width=64, layers=2, context=128, spread=0.1):
    """A Qwen2's shape. spread: of the weights at random."""
    heads = max(4, width // 64)
    return Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=context,
        tie_word_embeddings=True, initializer_range=spread,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )


def make_model(tokenizer, **shape):
    """A Qwen2 with random weights; of about 109,000 parameters, if no shape is given."""
    return Qwen2ForCausalLM(make_config(tokenizer, **shape))


def warm_start(
    model, tokenizer, *, kind="base", demonstrate=None, steps=800, batch_size=64, lr=5e-3,
    most_tokens=1024,
):  # fmt: skip
    """Supervised training on the demonstrations: cross-entropy on the completion's tokens, EOS
    included.

    demonstrate: index → (question, completion); None: the demonstrations of this kind.
    most_tokens: of a micro-batch.
    """
    demonstrate = demonstrate or partial(demonstration, kind=kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in progress.over(range(steps), "warm start", "steps"):
        demonstrations = [
            demonstrate(i) for i in range(step * batch_size, (step + 1) * batch_size)]
        prompts = tokenizer([prompt for prompt, _ in demonstrations]).input_ids
        completions = tokenizer(
            [completion + tokenizer.eos_token for _, completion in demonstrations]
        ).input_ids
        total = sum(map(len, completions))
        whole = [len(p) + len(c) for p, c in zip(prompts, completions)]
        for batch in micro_batches(whole, most_tokens):
            lengths = torch.tensor([len(completions[i]) for i in batch])
            tokens = pad_sequence([torch.tensor(completions[i]) for i in batch], batch_first=True)
            mask = completion_mask(tokens, lengths)
            if kind == "tool":
                mask &= ~written_by_tool(tokens, tokenizer)
            own_prompts = [prompts[i] for i in batch]
            tokens = tokens.to(model.device)
            logp = Policy(model).logprobs(Batch(own_prompts, tokens, mask, None))
            loss = -logp.sum() / total  # the mean over all tokens of the step
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def make(kind="base"):
    """(a base model, its tokenizer), made in about half a minute."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = make_tokenizer(kind)
    model = make_model(tokenizer)
    warm_start(model, tokenizer, kind=kind)
    return model, tokenizer


def save(folder, *parts):
    for part in parts:
        part.save_pretrained(folder)


def furthest(folder, shipped):
    """How far the weights in one folder are from those in another: the largest |difference|."""
    made, expected = (load_file(Path(path, "model.safetensors")) for path in (folder, shipped))
    return max((made[name] - expected[name]).abs().max().item() for name in expected)


def main(argv):
    kind = parse(Options, argv).kind
    folder = Path("runs") / Path(SHIPPED[kind]).name
    save(folder, *make(kind))
    off = furthest(folder, SHIPPED[kind])
    print(f"{folder} holds the base model, made again. Its weights differ from the shipped ones by "
          f"at most {off:.2g}. (They are equal on a machine that adds up in the same order.)")


if __name__ == "__main__":
    run_program(main)
