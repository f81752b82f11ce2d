"""`train.py --check_rewards`: the rewards of a few completions, before any time is spent on
training."""

import torch

from engine.base import progress
from engine.model.folders import prompt_room
from engine.model.loading import load_model
from engine.model.sampling import Sampler, Sampling
from engine.scoring.score import WANT_NUMBERS, choose, overshadowing, score
from engine.tasks.questions import base_model, load_questions, reward_columns
from family.dapo import has_signal
from records import weighted_sum
from rewards import gold_answer, to_number

# On a CPU a look shall take a minute. 1,024 tokens of a few endless completions alone would take
# several.
QUESTIONS, QUESTIONS_ON_CPU, TOKENS_ON_CPU = 8, 4, 192


@progress.spoken()
def preview(config, device, given):
    """Sample a group for each of a few questions. Print a prompt, each reward's best and worst
    completion, a conclusion.

    given: the options of the command line alone. If it names --questions_per_step or
    --max_new_tokens, they hold here. """
    on_cpu, longest = device.type == "cpu", config.max_new_tokens
    if on_cpu and not given.max_new_tokens:
        longest = min(longest, TOKENS_ON_CPU)
    progress.say("loading the model")
    model, tokenizer = load_model(
        base_model(config.model, config.dataset), device, config.dtype, frozen=True
    )
    room, chosen = (
        prompt_room(model, longest, config.max_prompt_tokens),
        choose(config.rewards, device, config.reward_timeout),
    )
    progress.say("reading the questions")
    questions, _ = load_questions(
        config.dataset, tokenizer, system_prompt=config.system_prompt, max_prompt_tokens=room
    )
    warn_of_gold(chosen, questions)
    questions = questions[: given.questions_per_step or (QUESTIONS_ON_CPU if on_cpu else QUESTIONS)]
    progress.note(
        f"The first prompt, as the model sees "
        f"it:\n{tokenizer.decode(questions[0]['prompt'])}\n(here the model goes "
        f"on)\n\n{len(questions)} questions × {config.group_size} completions, at most {longest} "
        "tokens each:"
    )
    progress.say("sampling")
    sampling = Sampling(longest, config.temperature, config.top_p, config.top_k)
    sampled = Sampler(model, tokenizer).sample(
        [question["prompt"] for question in questions], config.group_size, sampling, config.seed)
    progress.say("scoring")
    texts, columns = (
        sampled.texts(tokenizer, questions), reward_columns(questions, config.group_size),
    )
    values, failures = score(chosen, texts, columns)
    total = weighted_sum(torch.stack(list(values.values())), [reward.weight for reward in chosen])
    groups = {name: scores.view(len(questions), -1) for name, scores in values.items()}
    print(
        f"{len(texts)} completions of {len(questions)} questions, "
        f"{sampled.lengths.float().mean():.0f} tokens long, {sampled.truncated.float().mean():.0%} "
        f"cut off; {failures} calls of a reward failed."
    )
    shown = set()
    for reward in chosen:
        show(reward, values[reward.name], texts, columns, shown)
    words = conclusion(
        groups, total.view(len(questions), -1), sampled.truncated, longest, config.max_new_tokens
    )
    print(f"\nConclusion: {words}")


def warn_of_gold(chosen, questions):
    odd = [
        gold
        for gold in (gold_answer(question["answer"]) for question in questions)
        if to_number(gold) is None
    ]
    for reward in chosen if odd else ():
        if reward.function in WANT_NUMBERS:
            progress.note(
                f"warning: {len(odd)} of {len(questions)} gold answers are no numbers, for example "
                f"{odd[0]!r:.60}, and {reward.name} wants numbers: take --rewards math_accuracy, "
                "or a reward of your own."
            )


def show(reward, scores, texts, columns, shown):
    """Print the mean of a reward, and a completion with its best and with its worst value. shown:
    what was shown before."""
    low, high = scores.min().item(), scores.max().item()
    print(f"\n{reward.name}, weight {reward.weight:g}: mean {scores.mean():.3f}, "
          f"from {low:g} to {high:g}, {(scores > 0).float().mean():.0%} above 0")
    for label, value in [("best", high), ("worst", low)] if low < high else [("all", low)]:
        examples = [i for i in range(len(texts)) if scores[i] == value]
        i = next((i for i in examples if (columns["question"][i], texts[i]) not in shown), None)
        if i is None:
            print(f"  {label}, {value:g}: shown above")
            continue
        shown.add((columns["question"][i], texts[i]))
        print(f"  {label}, {value:g}: {columns['question'][i]!r:.150} "
              f"(gold answer: {columns['answer'][i].splitlines()[-1]!r:.60})")
        print(f"    {texts[i]!r:.400}")


def conclusion(groups, total, truncated, longest, max_new_tokens):
    """What the rewards of a few groups say about training.

    groups: {name: (Q, G)}, each reward. total: (Q, G), the weighted sums. longest: tokens of a
    completion here; max_new_tokens: in training. """
    (first, accuracy), cut = next(iter(groups.items())), truncated.float().mean().item()
    differ = {name: has_signal(values).sum().item() for name, values in groups.items()}
    counts = ", ".join(f"{name} in {n} of {len(total)}" for name, n in differ.items())
    words, other = (
        f"the completions of a question differ by {counts} questions. ", overshadowing(differ),
    )
    if not has_signal(total).any():
        words += (
            "All rewards of a question are equal: training would make no update (only PPO would)."
        )
        if cut <= 0.5 and not (accuracy > 0).any():
            words += (
                " No completion is right: read the examples, and if the reward judges them as you "
                "do, take easier questions, a better model, or a larger --group_size."
            )
        elif (accuracy > 0).all():
            words += " Every completion is right: take harder questions."
    elif other:
        words += (
            f"Training would learn {other} and hardly {first}: a small weight does not prevent it, "
            f"because most algorithms divide by the std of a group. Leave {other} out, or take "
            "easier questions or a better model."
        )
    else:
        words += "Training learns from such differences."
    if cut > 0.1:
        words += f" {cut:.0%} of the completions were cut off" + (
            f": raise --max_new_tokens (now {max_new_tokens})."
            if longest == max_new_tokens
            else f" at {longest} tokens, the limit of this look on a CPU: add --max_new_tokens "
                 f"{max_new_tokens} to see what "
            "training would see."
        )
    return words
