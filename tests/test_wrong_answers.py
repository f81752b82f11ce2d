"""Answers of students to the exercises of the notebooks, and what the judge says of each."""

import pytest
import torch

from notebooks.exercises import judge
from notebooks.exercises.make import ROOT, exercises

# {name: the text of the solution}
SOLUTIONS = {
    function.name: text
    for text in (path.read_text() for path in sorted(ROOT.glob("notebooks/solutions/*.py")))
    for function in exercises(text)
}
# (function, what is replaced in its solution, by what, what the judge says)
ANSWERS = [
    ("leave_one_out_advantages", "(rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1]"
     " - 1)", "rewards.mean(1, keepdim=True)",
     "rewards = [[1.0, 0.0]]: yours [[0.5, -0.5]], right [[1.0, -1.0]]"),
    ("leave_one_out_advantages", "(rewards.shape[1] - 1)", "rewards.shape[1]",
     "rewards = [[1.0, 0.0]]: yours [[1.0, -0.5]], right [[1.0, -1.0]]"),
    ("token_entropies", "logp.masked_fill(p == 0, 0.0)", "logp", "0 · −∞ must count 0"),
    ("token_entropies", " / temperature", "", "the temperature is ignored"),
    ("token_entropies", "-(p * logp).sum(-1)",
     "torch.distributions.Categorical(logits=logits.float() / temperature).entropy()", "green"),
    ("token_mean_weights", "mask.sum()", "mask.sum(1, keepdim=True).clamp(min=1) / len(mask)",
     "the weights of another algorithm: a mean over each completion, 1/(N |o|), as in GRPO"),
    ("token_mean_weights", "mask / mask.sum()", "0 * mask + 1 / mask.numel()",
     "mask = [[True, False]]: yours [[0.5, 0.5]], right [[1.0, 0.0]]"),

    ("retain", "metric.topk", "metric.abs().topk", "the size of the metric, without its sign"),
    ("retain", "largest=largest", "largest=not largest", "`largest` is turned round"),
    ("retain", "largest=largest", "lowest=largest",
     "metric = [[30, 10]], k = 2: it raises TypeError: topk() got an unexpected keyword"),
    ("retain", ".indices", ".indices.float()", "tests fail. The first one says"),
    ("batch_rows", "group_size * ", "kept.shape[1] * ", "yours [1, 1], right [1, 4]"),
    ("batch_rows", "return (", "print(first)\n    return (", "green"),
    ("batch_rows", ".flatten()", "", "kept = [[1]], group_size = 4: yours [[1]], right [1]"),
    ("batch_rows", "first.unsqueeze(1) + kept", "kept.flip(1) + first.unsqueeze(1)", "green"),
    ("max_variance_subset", "max(choices, key=lambda rows: r[rows].var(correction=0))",
     "choices[m - m // 2]", "m = 3: yours [[0, 3, 2]], right [[0, 1, 2]]"),
    ("max_variance_subset", "for order in", "while True: pass\n    for order in",
     "a call was stopped after 1 seconds"),

    ("keep_count", "max(math.floor(round(group_size * (1 - pruning_rate), 6)), 1)",
     "int(group_size * (1 - pruning_rate))", "in floats: 10·(1−0.9) is below 1."),
    ("keep_count", "math.floor(round(group_size * (1 - pruning_rate), 6))",
     "round(group_size * (1 - pruning_rate))", "rounded to the nearest, not down."),
    ("adaptive_k", ".flip(0)", "", "yours [8], right [4]"),
    ("adaptive_k", "len(history) == 0", "False",
     "history = [], ks = (4, 9, 8, 8): it raises RuntimeError: quantile() input tensor must be"),

    ("completion_mask", "cumsum(dim=1) - is_eos", "cumsum(dim=1)",
     "completions = [[1]], eos = 1: yours [[False]], right [[True]]"),
    ("completion_mask", "before == 0", "completions != eos",
     "completions = [[1]], eos = 1: yours [[False]], right [[True]]"),
    ("positions", ".clamp(min=0)", "", "mask = [[0, 1]]: yours [[-1, 0]], right [[0, 0]]"),
    ("positions", "mask.cumsum(dim=1) - 1", "torch.cumsum(mask, 1).sub(1)", "green"),
    ("drgrpo_loss", "weights = mask / (len(mask) * max_tokens)", "pass",
     "the weights of another algorithm: a mean over each completion, 1/(N |o|), as in GRPO"),
    ("drgrpo_loss", "weights=weights", "weights=-weights", "the sign of the loss is turned round"),
    ("drgrpo_loss", '{"beta": 0.0} | options', "options", "yours -0.17465, right -0.17476"),
    ("drgrpo_loss", "weights is None", "True", "`weights` is ignored"),

    ("kept_logprobs", "logits.masked_fill(~kept, -torch.inf)", "logits", "right [[0.0]]"),
    ("kept_logprobs", ", temperature=temperature)", ") / temperature", "temperature = 0.7: yours"),

    ("prune_pooled", "allowed is not None", "False",
     "advantages = [[-2.0, 0.0]], n_keep = 1, allowed = [[False, True]]: yours [0], right [1]"),
    ("prune_pooled", "masked_fill(~allowed.flatten(), -torch.inf)", "mul(allowed.flatten())",
     "✗ a completion that is not `allowed` is kept before one that is"),
    ("prune_pooled", ", *, allowed=None):", "):\n    allowed = None",
     "it has no argument `allowed`"),
    ("prune_pooled", "size.topk(n_keep).indices",
     "(size.view(advantages.shape).topk(n_keep // len(advantages)).indices + advantages.shape[1]"
     " * torch.arange(len(advantages))[:, None]).flatten()",
     "the largest |A| of each question, not of all together"),

    ("gae", "value_after = torch.where(mask[:, t], values[:, t], 0.0)",
     "value_after = values[:, t]", "yours [[90.0, 0.0]], right [[-9.0, 0.0]]"),
    ("gae", "rewards.detach(), values.detach()", "1 * rewards, 1 * values",
     '"advantages and returns are targets without a gradient" (tests/concepts/test_ppo.py)'),
    ("gae", "gamma * lam * after", "gamma * after", "yours [[2.0, 0.5]], right [[1.975, 0.5]]"),
    ("gae", "advantages + values, 0.0)", "rewards.flip(1).cumsum(1).flip(1), 0.0)",
     "yours [[2.0, 1.0]], right [[1.975, 1.0]]"),
    ("gae", "return advantages", "return A", "it raises NameError: name 'A' is not defined"),
]


@pytest.mark.parametrize("name, old, new, words", ANSWERS)
def test_an_answer_is_told_what_is_wrong_with_it(name, old, new, words, monkeypatch, capsys):
    text, space = SOLUTIONS[f"my_{name}"], {"torch": torch}
    assert text.count(old) == 1
    exec(text.replace(old, new), space)
    monkeypatch.setattr(judge, "LIMIT", 1)
    said = judge.verdict(space[f"my_{name}"], name)
    assert words in said and not capsys.readouterr().out
    assert said == "green" or said.startswith("✗ ") and max(map(len, said.split("\n"))) < 250


def test_if_other_answers_are_right_too_ours_is_not_shown():
    said = judge.verdict(lambda p, u: torch.ones_like(p).bool(), "draw")
    assert "tests fail" in said and "yours" not in said
