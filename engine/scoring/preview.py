"""`train.py --check_rewards`: the rewards of a few completions, before any time is spent on
training."""

from dataclasses import replace

from engine.base import progress
from engine.model.folders import prompt_room
from engine.model.loading import load_model
from engine.model.sampling import Sampler
from engine.scoring.score import choose, score
from engine.tasks.questions import base_model, load_questions, reward_columns

# On a CPU a look shall take a minute. 1,024 tokens of a few endless completions alone would take
# several.
QUESTIONS, QUESTIONS_ON_CPU, TOKENS_ON_CPU = 8, 4, 192


def preview(config, device, given):
    """Sample a group for each of a few questions. Print a prompt, and each reward's mean, best and
    worst completion.

    given: the options of the command line alone. If it names --questions_per_step or
    --max_new_tokens, they hold here.
    """
    data, sampling, on_cpu = config.data, config.sampling, device.type == "cpu"
    if on_cpu and not given.sampling.max_new_tokens:
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, TOKENS_ON_CPU))
    model, tokenizer = load_model(
        base_model(data.model, data.dataset), device, config.devices.dtype, frozen=True)
    chosen = choose(data.rewards, device, data.reward_timeout)
    questions, _ = load_questions(
        data.dataset, tokenizer, system_prompt=data.system_prompt,
        max_prompt_tokens=prompt_room(model, sampling.max_new_tokens, data.max_prompt_tokens),
    )
    count = given.row.questions_per_step or (QUESTIONS_ON_CPU if on_cpu else QUESTIONS)
    questions, group_size = questions[:count], config.row.group_size
    prompts = [question["prompt"] for question in questions]
    progress.note(
        "The first prompt, as the model sees it:\n"
        f"{tokenizer.decode(prompts[0])}\n(here the model goes on)\n\n"
        f"{len(questions)} questions × {group_size} completions, at most "
        f"{sampling.max_new_tokens} tokens each:"
    )
    with progress.bar("preview", len(prompts), "questions"):
        sampled = Sampler(model, tokenizer).sample(prompts, group_size, sampling, config.run.seed)
    texts, columns = sampled.texts(tokenizer, questions), reward_columns(questions, group_size)
    values, failures = score(chosen, texts, columns)
    print(f"They are {sampled.lengths.float().mean():.0f} tokens long, "
          f"{sampled.truncated.float().mean():.0%} cut off; {failures} calls of a reward failed.")
    for reward in chosen:
        show(reward, values[reward.name], texts, columns)


def show(reward, scores, texts, columns):
    """Print the mean of a reward, and a completion with its best and with its worst value; only one
    if all values are equal."""
    print(f"\n{reward.name}, weight {reward.weight:g}: mean {scores.mean():.3f}, "
          f"from {scores.min():g} to {scores.max():g}, {(scores > 0).float().mean():.0%} above 0")
    best, worst = scores.argmax().item(), scores.argmin().item()
    examples = [("best", best), ("worst", worst)]
    for label, i in examples if scores[best] > scores[worst] else [("for example", best)]:
        print(f"  {label}, {scores[i]:g}: {columns['question'][i]!r:.150} "
              f"(gold answer: {columns['answer'][i].splitlines()[-1]!r:.60})")
        print(f"    {texts[i]!r:.400}")
