"""A tool: the policy calls a calculator, reads the result, and writes on.

    torchrun train.py --dataset toy_tool --sampler examples/my_tool.py:WithCalculator
    python eval.py --model runs/toy_tool-cppo-1 --benchmark toy_tool \\
        --sampler examples/my_tool.py:WithCalculator

The policy writes `<tool>27*43</tool>`, and the sampler writes `<result>1161</result>` after it. The
tool's tokens are not in the mask, so nothing trains on them, but they take room. For a tool of your
own change `answer_call`, and TAGS if your model has other tags.
"""

if __name__ == "__main__":
    print(__doc__)  # it is no program
    raise SystemExit

import math
import re
from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence

from engine.base.errors import UserError
from engine.model.sampler_interface import Completions

TAGS = ("<tool>", "</tool>")  # one token each; Qwen's chat models have <tool_call>, </tool_call>
MAX_CALLS = 3  # later calls get no answer
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
    _, opening, call = written.removesuffix(TAGS[1]).rpartition(TAGS[0])
    return f"<result>{calculate(call) if opening else '?'}</result>"


@dataclass
class Turns:
    """A completion while it is written. place: of its random numbers."""

    prompt: list[int]
    place: int
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # what the policy wrote
    truncated: bool = False

    def write(self, tokens, logp, by_policy, room):
        """Append tokens. If they do not fit into the room, the completion is cut off."""
        free = room - len(self.tokens)
        self.truncated = len(tokens) > free
        self.tokens += tokens[:free]
        self.logp += logp[:free]
        self.mask += [by_policy] * len(tokens[:free])


class WithCalculator:
    """The project's sampler, with a calculator (engine/model/sampler_interface.py)."""

    wraps_builtin = True

    @staticmethod
    def check(options):
        """It serves every run."""

    def __init__(self, builtin, tokenizer, sampling):
        ids = tokenizer.convert_tokens_to_ids(list(TAGS))
        if None in ids or tokenizer.unk_token_id in ids:
            raise UserError(f"the model has no tokens {' and '.join(TAGS)}: change TAGS in "
                            "examples/my_tool.py to tokens that it has.")
        self.builtin, self.tokenizer, self.dtype = builtin, tokenizer, builtin.dtype
        self.stop_ids, self.end_of_call = builtin.stop_ids, ids[1]
        self.refresh, self.free_memory = builtin.refresh, builtin.free_memory

    def sample(self, prompts, group_size, sampling, seed, places=None):
        self.builtin.stop_ids = [*self.stop_ids, self.end_of_call]
        drawn = self.builtin.sample(prompts, group_size, sampling, seed, places)
        completions = []
        for place, prompt in zip(places or range(len(prompts)), prompts):
            completions += [Turns(prompt, place * group_size + i) for i in range(group_size)]
        calling = self.read(completions, drawn, sampling.max_new_tokens)
        for turn in range(1, MAX_CALLS + 1):
            self.answer(calling, sampling.max_new_tokens)
            calling = [c for c in calling if not c.truncated]
            if turn == MAX_CALLS:
                self.builtin.stop_ids = self.stop_ids
            # each has the whole room: so its random numbers do not depend on the other completions
            written = self.builtin.sample(
                [c.prompt + c.tokens for c in calling], 1, sampling, seed + turn * TURN,
                [c.place for c in calling])
            calling = self.read(calling, written, sampling.max_new_tokens)
        return joined(completions, self.tokenizer.pad_token_id, drawn) if completions else drawn

    def read(self, completions, drawn, room):
        """Append what the policy has written. Returns the completions that now call the tool."""
        rows = zip(completions, drawn.tokens.tolist(), drawn.logp.tolist(), drawn.lengths.tolist(),
                   drawn.truncated.tolist())
        for completion, tokens, logp, length, cut in rows:
            completion.write(tokens[:length], logp[:length], True, room)
            completion.truncated |= cut
        return [c for c in completions if c.tokens[-1] == self.end_of_call and not c.truncated]

    def answer(self, completions, room):
        """Append what the tool answers."""
        for completion in completions:
            result = answer_call(self.tokenizer.decode(completion.tokens))
            ids = self.tokenizer(result, add_special_tokens=False).input_ids
            completion.write(ids, [0.0] * len(ids), False, room)


def joined(completions, pad_id, like):
    """The Completions, padded on the right, on the device of `like`."""
    columns = []
    for name, padding in (("tokens", pad_id), ("logp", 0.0), ("mask", False)):
        rows = [torch.tensor(getattr(c, name)) for c in completions]
        columns.append(pad_sequence(rows, batch_first=True, padding_value=padding))
    tokens, logp, mask = (column.to(like.tokens.device) for column in columns)
    lengths = torch.tensor([len(c.tokens) for c in completions], device=tokens.device)
    truncated = torch.tensor([c.truncated for c in completions], device=tokens.device)
    return Completions(tokens, lengths, truncated, logp, mask, like.stop)
