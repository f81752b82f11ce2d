"""`train.py --check_rewards`: the rewards of a few completions, before any time is spent on training."""

import torch

from engine.model.folders import prompt_room
from engine.model.loading import load_model
from engine.model.sampling import Sampler, Sampling
from engine.scoring.score import choose, score
from engine.tasks.questions import base_model, load_questions, reward_columns
from records import weighted_sum


def preview(config, device, n_questions=8):
    """Sample a group for each of a few questions. Print each reward's mean, its best and its worst completion."""
    model, tokenizer = load_model(base_model(config.model, config.dataset), device, config.dtype, frozen=True)
    room = prompt_room(model, config.max_new_tokens, config.max_prompt_tokens)
    questions, _ = load_questions(
        config.dataset, tokenizer, system_prompt=config.system_prompt, max_prompt_tokens=room, limit=n_questions)
    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, config.top_k)
    sampled = Sampler(model, tokenizer).sample(
        [question["prompt"] for question in questions], config.group_size, sampling, config.seed)
    texts, chosen = sampled.texts(tokenizer, questions), choose(config.rewards, device, config.reward_timeout)
    columns = reward_columns(questions, config.group_size)
    values, failures = score(chosen, texts, columns)
    total = weighted_sum(torch.stack(list(values.values())), [reward.weight for reward in chosen])
    groups = total.view(len(questions), -1)
    print(f"{len(texts)} completions of {len(questions)} questions, {sampled.lengths.float().mean():.0f} tokens long, "
          f"{sampled.truncated.float().mean():.0%} cut off; "
          f"{(groups.amax(1) > groups.amin(1)).sum()} of the groups have a signal; "
          f"{failures} calls of a reward failed.")
    shown = set()
    for reward in chosen:
        scores = values[reward.name]
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
    print(f"\nConclusion: {conclusion(groups, values[chosen[0].name], sampled.truncated, config.max_new_tokens)}")


def conclusion(groups, accuracy, truncated, max_new_tokens):
    """What the rewards of a few groups say about training. groups: (Q, G), the sums. accuracy: (N,), the first reward."""
    signal, cut = (groups.amax(1) > groups.amin(1)).sum().item(), truncated.float().mean().item()
    words = f"{signal} of {len(groups)} questions have rewards that differ, which training needs."
    if not signal:
        words = "all rewards of a question are equal: training would make no update (only PPO would)."
        if cut <= 0.5 and not (accuracy > 0).any():
            words += (" No completion is right: read the examples, and if the reward judges them as you do, take easier "
                      "questions, a better model, or a larger --group_size.")
        elif (accuracy > 0).all():
            words += " Every completion is right: take harder questions."
    if cut > 0.1:
        words += f" {cut:.0%} of the completions were cut off: raise --max_new_tokens (now {max_new_tokens})."
    return words
