"""`train.py --check_rewards`: what the rewards say of a few completions, before any time is spent on training."""

import torch

from engine.model import policy
from engine.model.rollout import Own, Sampling
from engine.scoring.score import choose, merge, score
from engine.tasks import data, toy


def preview(config, device, n_questions=8):
    """Sample a group for each of a few questions and print each reward's mean, with the best and the worst completion."""
    model, tokenizer = policy.load(toy.source(config.model, config.dataset), device)
    room = policy.prompt_room(model, config.max_new_tokens, config.max_prompt_tokens)
    prompt = config.system_prompt or data.SYSTEM_PROMPT
    questions, _ = data.load(config.dataset, tokenizer, system_prompt=prompt, max_prompt_tokens=room, limit=n_questions)
    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, config.top_k)
    drawn = Own(model, tokenizer).sample([q["prompt"] for q in questions], config.group_size, sampling, config.seed)
    texts, chosen = drawn.texts(tokenizer, questions), choose(config.rewards, device, config.reward_timeout)
    columns = data.columns([q for q in questions for _ in range(config.group_size)])
    parts, failures = score(chosen, texts, columns)
    total = merge(torch.stack(list(parts.values())), [reward.weight for reward in chosen])
    groups = total.view(len(questions), -1)
    print(f"{len(texts)} completions of {len(questions)} questions, {drawn.lengths.float().mean():.0f} tokens long, "
          f"{drawn.truncated.float().mean():.0%} cut off; {(groups.amax(1) > groups.amin(1)).sum()} of the groups have a signal; "
          f"{failures} calls of a reward failed.")
    for reward in chosen:
        values = parts[reward.name]
        print(f"\n{reward.name}, weight {reward.weight:g}: mean {values.mean():.3f}, from {values.min():g} to {values.max():g}, "
              f"{(values > 0).float().mean():.0%} above 0")
        for label, i in [("best", int(values.argmax())), ("worst", int(values.argmin()))]:
            print(f"  {label}, {values[i]:g}: {columns['question'][i]!r:.150} (gold answer: {columns['answer'][i].splitlines()[-1]!r:.60})")
            print(f"    {texts[i]!r:.400}")
