"""What is logged of a step: its metrics, its seconds, and its first group."""

import time
from contextlib import contextmanager

import torch

from engine.base import progress, ranks
from family.dapo import has_signal

# what the bar says in each phase of a step
WORDS = {
    "generate": "sampling", "score": "scoring", "logprobs": "log-probabilities", "update": "update",
}
# of a step, over all devices
COUNTS = ("questions", "completions", "kept", "tokens_generated", "tokens_trained")


class Clock:
    """Seconds spent in each phase of a step."""

    def __init__(self, device):
        self.device, self.start = device, time.perf_counter()
        self.spent = dict.fromkeys(WORDS, 0.0)

    @contextmanager
    def phase(self, name):
        progress.say(WORDS[name])
        begin = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.spent[name] += time.perf_counter() - begin

    def seconds(self):
        total = time.perf_counter() - self.start
        return {
            f"seconds/{name}": seconds for name, seconds in (self.spent | {"total": total}).items()
        }


def summarize(rollout, advantages, rows):
    """The metrics of steps 1 to 4, over all devices.

    advantages: (Q, G). rows: the kept completions.
    """
    advantages, lengths = advantages.cpu(), rollout.lengths
    sums = {
        "questions": len(rollout.questions), "completions": len(rollout.texts), "kept": len(rows),
        "tokens_generated": lengths.sum().item(),
        "tokens_trained": lengths.flatten()[rows].sum().item(),
        "entropy": -rollout.logp.sum().item(),
        "accuracy": (rollout.rewards[0] > 0).sum().item(), "reward": rollout.total.sum().item(),
        "reward_failures": rollout.failures, "truncated": rollout.truncated.sum().item(),
        **{
            f"reward/{name}": values.sum().item()
            for name, values in zip(rollout.reward_names, rollout.rewards)
        },
    }
    groups = {"no_signal": advantages} | {
        f"no_signal/{name}": values for name, values in zip(rollout.reward_names, rollout.rewards)}
    # the advantages of a group add up to 0: if they are equal, each is 0 (PPO: here they are the
    # scores)
    sums |= {name: (~has_signal(values)).sum().item() for name, values in groups.items()}
    sums = ranks.all_sum(sums, rollout.tokens.device)
    metrics = {name: int(sums.pop(name)) for name in COUNTS} | {"rollouts": rollout.rollouts}
    metrics |= {name: sums.pop(name) / metrics["questions"] for name in groups}
    metrics["length"] = metrics["tokens_generated"] / metrics["completions"]
    metrics["entropy"] = sums.pop("entropy") / metrics["tokens_generated"]
    metrics |= {name: value / metrics["completions"] for name, value in sums.items()}
    return metrics


def first_group(rollout, advantages, rows):
    """What is logged of the first question: each completion, its reward, its advantage, and whether
    it is kept.

    For PPO, the score stands in the place of the advantage.
    """
    question, kept = (rollout.questions or [{}])[0], set(rows.tolist())
    columns = zip(rollout.texts, rollout.total.flatten().tolist(), advantages.flatten().tolist())
    completions = [
        {"completion": text, "reward": reward, "advantage": advantage, "kept": i in kept}
        for i, (text, reward, advantage) in enumerate(columns) if i < advantages.shape[1]
    ]
    about = {name: question.get(name) for name in ("question", "answer")}
    return about | {"completions": completions}
