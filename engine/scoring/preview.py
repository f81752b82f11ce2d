"""`train.py --check_rewards`: the rewards of a few completions, before any time is spent on
training."""

from dataclasses import replace

from engine.base import progress
from engine.model.folders import prompt_room
from engine.model.loading import load_model
from engine.model.sampling import Sampler
from engine.scoring.score import choose, overshadowing, score
from engine.tasks.questions import base_model, load_questions, reward_columns
from family.dapo import has_signal
from rewards import gold_answer, gsm8k_accuracy, number_accuracy, to_number

# On a CPU a look shall take a minute. 1,024 tokens of a few endless completions alone would take
# several.
QUESTIONS, QUESTIONS_ON_CPU, TOKENS_ON_CPU = 8, 4, 192


@progress.spoken()
def preview(config, device, given):
    """Sample a group for each of a few questions. Print a prompt, each reward's best and worst
    completion, a conclusion.

    given: the options of the command line alone. If it names --questions_per_step or
    --max_new_tokens, they hold here.
    """
    on_cpu, longest = device.type == "cpu", config.sampling.max_new_tokens
    if on_cpu and not given.sampling.max_new_tokens:
        longest = min(longest, TOKENS_ON_CPU)
    progress.say("loading the model")
    model, tokenizer = load_model(
        base_model(config.data.model, config.data.dataset), device, config.devices.dtype,
        frozen=True,
    )
    chosen = choose(config.data.rewards, device, config.data.reward_timeout)
    progress.say("reading the questions")
    questions, _ = load_questions(
        config.data.dataset, tokenizer, system_prompt=config.data.system_prompt,
        max_prompt_tokens=prompt_room(model, longest, config.data.max_prompt_tokens),
    )
    warn_of_gold(chosen, questions)
    questions = questions[
        : given.row.questions_per_step or (QUESTIONS_ON_CPU if on_cpu else QUESTIONS)
    ]
    progress.note(
        "The first prompt, as the model sees it:\n"
        f"{tokenizer.decode(questions[0]['prompt'])}\n(here the model goes on)\n\n"
        f"{len(questions)} questions × {config.row.group_size} completions, at most {longest} "
        "tokens each:"
    )
    progress.say("sampling")
    sampling = replace(config.sampling, max_new_tokens=longest)
    sampled = Sampler(model, tokenizer).sample(
        [question["prompt"] for question in questions], config.row.group_size, sampling,
        config.run.seed,
    )
    progress.say("scoring")
    texts = sampled.texts(tokenizer, questions)
    columns = reward_columns(questions, config.row.group_size)
    values, failures = score(chosen, texts, columns)
    print(
        f"{len(texts)} completions of {len(questions)} questions, "
        f"{sampled.lengths.float().mean():.0f} tokens long, {sampled.truncated.float().mean():.0%} "
        f"cut off; {failures} calls of a reward failed."
    )
    for reward in chosen:
        show(reward, values[reward.name], texts, columns)
    groups = {name: scores.view(len(questions), -1) for name, scores in values.items()}
    total = sum(reward.weight * groups[reward.name] for reward in chosen)
    cut = sampled.truncated.float().mean().item()
    print(f"\nConclusion: {conclusion(groups, total, cut, longest)}")


def warn_of_gold(chosen, questions):
    golds = [gold_answer(question["answer"]) for question in questions]
    odd = [gold for gold in golds if to_number(gold) is None]
    for reward in chosen:
        if odd and reward.function in (gsm8k_accuracy, number_accuracy):
            progress.note(
                f"warning: {len(odd)} of {len(questions)} gold answers are no numbers, for example "
                f"{odd[0]!r:.60}, and {reward.name} wants numbers: take --rewards math_accuracy, "
                "or a reward of your own."
            )


def show(reward, scores, texts, columns):
    """Print the mean of a reward, and a completion with its best and with its worst value."""
    print(f"\n{reward.name}, weight {reward.weight:g}: mean {scores.mean():.3f}, "
          f"from {scores.min():g} to {scores.max():g}, {(scores > 0).float().mean():.0%} above 0")
    for label, i in [("best", scores.argmax().item()), ("worst", scores.argmin().item())]:
        print(f"  {label}, {scores[i]:g}: {columns['question'][i]!r:.150} "
              f"(gold answer: {columns['answer'][i].splitlines()[-1]!r:.60})")
        print(f"    {texts[i]!r:.400}")


def conclusion(groups, total, cut, longest):
    """What the rewards of a few groups say about training.

    groups: {name: (Q, G)}, each reward. total: (Q, G), the weighted sums. cut: share of the
    completions that were cut off, at `longest` tokens.
    """
    first, accuracy = next(iter(groups.items()))
    differ = {name: has_signal(values).sum().item() for name, values in groups.items()}
    counts = ", ".join(f"{name} in {n} of {len(total)}" for name, n in differ.items())
    words = [f"the completions of a question differ by {counts} questions."]
    if not has_signal(total).any():
        words.append(
            "All rewards of a question are equal: training would make no update (only PPO would).")
        if (accuracy > 0).all():
            words.append("Every completion is right: take harder questions.")
        elif not (accuracy > 0).any():
            words.append(
                "No completion is right: read the examples, and if the reward judges them as you "
                "do, take easier questions, a better model, or a larger --group_size."
            )
    elif other := overshadowing(differ):
        words.append(
            f"Training would learn {other} and hardly {first}: a small weight does not prevent it, "
            f"because most algorithms divide by the std of a group. Leave {other} out, or take "
            "easier questions or a better model."
        )
    else:
        words.append("Training learns from such differences.")
    if cut > 0.1:
        words.append(
            f"{cut:.0%} of the completions were cut off at {longest} tokens: a larger "
            "--max_new_tokens would let them end."
        )
    return " ".join(words)
