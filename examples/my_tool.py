"""A tool: the policy calls a calculator, reads the result, and goes on.

    torchrun train.py --dataset toy_tool --rollout examples/my_tool.py:WithCalculator
    python eval.py --model runs/toy_tool-cppo-1 --benchmark toy_tool \\
        --rollout examples/my_tool.py:WithCalculator

The policy writes `<tool>27*43</tool>`. The sampler then writes `<result>1161</result>` into the
completion, and the policy writes on. All completions of a batch take their turns together. Three
rules come from the contract of a sampler (engine/model/contract.py):

- The tool's tokens are not in the mask, so nothing trains on them.
- They take room: `max_new_tokens` is the room of the whole completion.
- The random numbers of a completion depend only on its place, so any number of devices draws the
  same completions.

To bring a tool of your own, change `answer_call`, and TAGS if your model has other tags. Each of
the two tags of a call must be one token.
"""

import math
import re
from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence

from engine.base.errors import UserError
from engine.model.contract import Completions

TAGS = ("<tool>", "</tool>")  # a Qwen chat model has <tool_call>, </tool_call>
RESULT = "<result>{}</result>"
MAX_CALLS = 3  # the calls after these get no answer
TURN = 1_000_000_007  # between the seeds of two turns


def calculate(text):
    """The result of "27*43" or of "1161+16*12", as text; "?" for anything else.

    It takes one or two operations + - * on whole numbers of at most six digits.
    """
    if not re.fullmatch(r"\d{1,6}(?:[-+*]\d{1,6}){1,2}", text):
        return "?"
    total = 0
    for sign, product in re.findall(r"([-+]?)(\d+(?:\*\d+)*)", text):
        value = math.prod(int(number) for number in product.split("*"))
        total += -value if sign == "-" else value
    return str(total)


def answer_call(written):
    """What the tool writes after a completion that ends with `</tool>`. written: its text."""
    before, opening, call = written.removesuffix(TAGS[1]).rpartition(TAGS[0])
    return RESULT.format(calculate(call) if opening else "?")


@dataclass
class Turns:
    """A completion while it is written. place: of its random numbers."""

    prompt: list[int]
    place: int
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    truncated: bool = False

    def write(self, tokens, logp, by_policy, room):
        """Append tokens. If they do not fit into the room, the completion is cut off."""
        fit = room - len(self.tokens)
        self.truncated = len(tokens) > fit
        self.tokens += tokens[:fit]
        self.logp += logp[:fit]
        self.mask += [by_policy] * len(tokens[:fit])


class WithCalculator:
    """The project's own sampler, with a calculator."""

    wraps_own = True

    @staticmethod
    def check(options):
        """It serves every run."""

    def __init__(self, own, tokenizer, sampling):
        ids = tokenizer.convert_tokens_to_ids(list(TAGS))
        if None in ids or tokenizer.unk_token_id in ids:
            raise UserError(f"the model has no tokens {' and '.join(TAGS)}: change TAGS in "
                            "examples/my_tool.py to tokens that it has.")
        self.own, self.tokenizer, self.dtype = own, tokenizer, own.dtype
        self.end_of_call = ids[1]
        self.stop_ids = own.stop_ids

    def refresh(self, weights):
        self.own.refresh(weights)

    def free_memory(self):
        self.own.free_memory()

    def sample(self, prompts, group_size, sampling, seed, places=None):
        room = sampling.max_new_tokens
        self.own.stop_ids = [*self.stop_ids, self.end_of_call]
        drawn = self.own.sample(prompts, group_size, sampling, seed, places)
        if not prompts:
            return drawn
        completions = []
        for place, prompt in zip(places or range(len(prompts)), prompts):
            for i in range(group_size):
                completions.append(Turns(prompt, place * group_size + i))
        calling = self.read(completions, drawn, room)
        for turn in range(1, MAX_CALLS + 1):
            if not calling:
                break
            for completion in calling:
                written = self.tokenizer.decode(completion.tokens)
                result = self.tokenizer(
                    answer_call(written), add_special_tokens=False).input_ids
                completion.write(result, [0.0] * len(result), False, room)
            calling = [c for c in calling if not c.truncated]
            if turn == MAX_CALLS:
                self.own.stop_ids = self.stop_ids
            # each with the whole room: so the random numbers do not depend on the other completions
            drawn = self.own.sample(
                [c.prompt + c.tokens for c in calling], 1, sampling, seed + turn * TURN,
                [c.place for c in calling])
            calling = self.read(calling, drawn, room)
        self.own.stop_ids = self.stop_ids
        return self.joined(completions, drawn.tokens.device)

    def read(self, completions, drawn, room):
        """Append what the policy has written. Returns the completions that now call the tool."""
        rows = zip(completions, drawn.tokens.tolist(), drawn.logp.tolist(), drawn.lengths.tolist(),
                   drawn.truncated.tolist())
        for completion, tokens, logp, length, cut in rows:
            completion.write(tokens[:length], logp[:length], True, room)
            completion.truncated |= cut
        return [c for c in completions if c.tokens[-1] == self.end_of_call and not c.truncated]

    def joined(self, completions, device):
        """The Completions, padded on the right."""

        def padded(name, dtype, value):
            rows = [torch.tensor(getattr(c, name), dtype=dtype) for c in completions]
            return pad_sequence(rows, batch_first=True, padding_value=value).to(device)

        lengths = torch.tensor([len(c.tokens) for c in completions], device=device)
        truncated = torch.tensor([c.truncated for c in completions], device=device)
        return Completions(
            padded("tokens", torch.int64, self.tokenizer.pad_token_id), lengths, truncated,
            padded("logp", torch.float32, 0.0), padded("mask", torch.bool, False))
