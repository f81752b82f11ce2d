"""What a run logs and prints: the metrics, seconds and first group of a step, the files that hold
them, and the table at its end."""

import time
from contextlib import contextmanager

import torch

from engine.base import files, progress, ranks
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
    # zip ends with the advantages of the first question
    columns = zip(
        rollout.texts, rollout.total.flatten().tolist(), advantages[:1].flatten().tolist())
    completions = [
        {"completion": text, "reward": reward, "advantage": advantage, "kept": i in kept}
        for i, (text, reward, advantage) in enumerate(columns)]
    return {
        "question": question.get("question"), "answer": question.get("answer"),
        "completions": completions,
    }


# --- of the whole run ---


def start_logs(run_dir, last_step):
    """Prepare the logs of a run that starts, or continues, after `last_step`. The lines of later
    steps are removed: the resumed run writes them again."""
    for path in (run_dir / "metrics.jsonl", run_dir / "samples.jsonl"):
        rows = [row for row in files.read(path)
                if isinstance(row, dict) and row["step"] <= last_step]
        files.write(path, files.as_lines(rows))
    (run_dir / "summary.json").unlink(missing_ok=True)  # this file marks a finished run


def describe_step(algorithm, max_new_tokens, before, questions, evaluated):
    """One line: what a step samples and trains on. before: questions of a device before allocation.
    questions: of a step, all devices, after it. evaluated: questions."""
    G, k, rounds = algorithm.group_size, algorithm.k, algorithm.max_rollouts
    times = f", up to {rounds} times" if rounds > 1 else ""
    more = algorithm.questions_per_step > before
    allocated = f" (after allocation; before: {before} per device)" if more else ""
    kept = f"{questions * k}, k = {k} of each {G}" if k < G else "all of them"
    at_most = "at most " if algorithm.ks else ""
    scored = f"{evaluated} questions, before and after training" if evaluated else "nothing"
    return (
        f"each step, over all devices: {questions} questions{allocated} × {G} completions = "
        f"{questions * G} sampled{times}, at most {max_new_tokens} tokens each; trained on: "
        f"{at_most}{kept}. Evaluated: {scored}."
    )


def phase_totals(rows):
    """{phase: seconds}, added up over the rows of a run's metrics."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("seconds/"))
    return {
        name.removeprefix("seconds/"): sum(row.get(name, 0.0) for row in rows) for name in names
    }


def report(summary):
    """Print the table at the end of a run, and the model's answers to the same questions before and
    after training."""
    before, after = summary["before"], summary["after"]
    if before:
        print(f"\n{'':36}{'before':>10}{'after':>10}")
        for title, value in [
            ("accuracy, greedy", lambda scores: scores["greedy"]["accuracy"]),
            ("accuracy, sampled", lambda scores: scores["sampled"]["accuracy"]),
            ("completion length, sampled (tokens)", lambda scores: scores["sampled"]["length"]),
            ("seconds to sample these answers", lambda scores: scores["seconds"]),
        ]:
            print(f"{title:36}{value(before):10.3f}{value(after):10.3f}")
        for old, new in zip(before["examples"], after["examples"]):
            gold = old["answer"].strip().splitlines()[-1]
            print(f"\n{old['question'].strip()}   (gold answer: {gold})")
            for name, row in [("before", old), ("after", new)]:
                verdict = "right" if row["correct"] else "wrong"
                print(f"  {name:7}{verdict}   {row['completion']!r:.200}")
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["phases"].items())
    print(f"\ntrained on {summary['questions']} questions in {summary['step']} steps and "
          f"{summary['seconds']:.0f} s: {phases}")
    print(f"""\
the model: {summary['checkpoint']}

from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{summary['checkpoint']}")
tokenizer = AutoTokenizer.from_pretrained("{summary['checkpoint']}")""")
