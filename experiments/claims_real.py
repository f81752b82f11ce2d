"""The claim "a completion with a small |A| contributes little", measured on a real chat model.

    python experiments/claims_real.py --model DIR      DIR: SmolLM2-135M-Instruct; 30 minutes

Writes claims_real.json, claims_real.md and claims_real.png in runs/results/. The setting is that of
real.py: `--dataset arithmetic`, groups of 16, the reward is 1 if the answer is right.

"base": the model itself. "later": three runs of GRPO, each after 20 steps of 4 questions; they are
kept under runs/claims_real/. Each seed has held-out questions of its own. Of these the first 4
groups whose rewards differ count. A gradient has all 135 million weights. The gradients are kept in
bfloat16, because 16 of them in float32 take 8.6 GB. Their products are added up in float32.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base.errors import UserError
from engine.data.questions import load_questions
from engine.model.contract import Sampling
from engine.model.loading import load_model
from engine.model.logprobs import Policy
from engine.model.sampling import Sampler
from engine.run.command_line import option, parse, run_program
from engine.run.curves import CPPO, DPI, GRPO
from experiments.claims import SEEDS, STAGES, G, of_groups
from experiments.library.bench import heading, markdown_table, over_seeds, pm, report
from experiments.library.plot import foot, panels, plain
from experiments.library.study import one_run
from experiments.real import LR, SETTING
from grpo import group_advantages
from records import Batch
from rewards import number_accuracy
from tasks import arithmetic

FOLDER, STEPS = "runs/claims_real", 20  # of the runs of GRPO
TITLES = {"base": "the base", "later": f"after {STEPS} steps"}
ASKED = 64  # questions of a seed, at most
TOGETHER = 8  # questions that are sampled together


@dataclass
class Options:
    model: str = option("HuggingFaceTB/SmolLM2-135M-Instruct", "hub name or folder of a chat model")
    groups: int = option(4, "groups of each seed", limits="[1, ∞)")
    output: str = option("runs/results", "folder of the page and of the picture")


def model_of(stage, seed, name):
    """(model, tokenizer). A run that is not there yet is made."""
    if stage == "later":
        options = SETTING | {
            "algorithm": "grpo", "model": name, "lr": LR, "steps": STEPS, "seed": seed,
            "eval_dataset": "arithmetic", "eval_questions": 32}  # one_run wants an evaluation
        name = f"{FOLDER}/{seed}"
        one_run(Path(name), options)
    return load_model(name, torch.device("cpu"))


def inner_products(model, batch):
    """∇ log π(o_i) · ∇ log π(o_j) of the completions of a batch: (N, N) float32."""
    size = sum(p.numel() for p in model.parameters())
    of_each = torch.empty(len(batch.prompts), size, dtype=torch.bfloat16)
    for i, row in enumerate(of_each):
        model.zero_grad()
        Policy(model).logprobs(batch.rows([i])).sum().backward()
        row.copy_(torch.cat([p.grad.flatten() for p in model.parameters()]))
    products = torch.zeros(len(of_each), len(of_each))
    for part in of_each.split(2**16, dim=1):
        products += part.float() @ part.float().T
    return products


def groups_of(model, tokenizer, seed, count):
    """((products (count, G, G), rewards (count, G), lengths (count, G)) of the first groups whose
    rewards differ, the share of right completions among all that were sampled)."""
    questions, _ = load_questions("arithmetic", tokenizer, split="test", limit=seed * ASKED,
                                  system_prompt=arithmetic.SYSTEM_PROMPT)
    sampler, groups, right = Sampler(model, tokenizer), [], []
    for start in range(-ASKED, 0, TOGETHER):
        asked = questions[start : start + TOGETHER or None]
        prompts = [question["prompt"] for question in asked]
        drawn = sampler.sample(prompts, G, Sampling(arithmetic.MAX_NEW_TOKENS), seed - start)
        answers = [question["answer"] for question in asked for _ in range(G)]
        rewards = number_accuracy(drawn.texts(tokenizer, asked), answer=answers)
        right += rewards
        for q, prompt in enumerate(prompts):
            rows = slice(q * G, (q + 1) * G)
            own = torch.tensor(rewards[rows])
            if own.min() < own.max() and len(groups) < count:
                batch = Batch([prompt] * G, drawn.tokens[rows], drawn.mask[rows], own)
                groups.append((inner_products(model, batch), own, drawn.lengths[rows].float()))
        if len(groups) == count:
            break
    if not groups:
        raise UserError(f"the model answers no question of seed {seed} both rightly and wrongly: "
                        "name another one.")
    products, rewards, lengths = zip(*groups)
    share = sum(right) / len(right)
    return torch.stack(products), torch.stack(rewards), torch.stack(lengths), share


def measure(options):
    """The figures of each stage, and the points of the picture: [|A|, norm, 1.0 if it is right] of
    each completion."""
    result = {"figures": {}, "points": {}}
    for stage in STAGES:
        of_seeds, points = [], []
        for seed in tqdm(SEEDS, desc=stage):
            model, tokenizer = model_of(stage, seed, options.model)
            products, rewards, lengths, share = groups_of(model, tokenizer, seed, options.groups)
            figures, _ = of_groups(products, rewards, lengths)
            of_seeds.append(figures | {"share of right completions": share})
            A = group_advantages(rewards).abs()
            norms = A / lengths * products.diagonal(dim1=1, dim2=2).sqrt()
            points += torch.stack([A, norms, rewards], dim=2).flatten(0, 1).tolist()
        result["figures"][stage] = over_seeds(of_seeds)
        result["points"][stage] = points
    return result


def page(result):
    lines = [["", *STAGES]]
    for name in result["figures"]["base"]:
        lines.append([name, *(pm(result["figures"][stage][name]) for stage in STAGES)])
    return (
        f"{heading('A completion with a small |A|, on a real model', result)}\n"
        "[What the figures are](../claims_real.py). Mean ± standard deviation over 3 seeds.\n\n"
        f"{markdown_table(lines)}\n\n![Norm against |A|](claims_real.png)\n")


def picture(result, output):
    figure, axes = panels(2, sharey=True)
    for axis, stage in zip(axes, STAGES):
        for A, norm, right in result["points"][stage]:
            axis.plot(A, norm, "o", color=CPPO if right else GRPO, alpha=0.6)
        axis.set_title(TITLES[stage], fontsize=13)
        axis.set_xlabel("|A|")
        plain(axis)
    axes[0].set_ylabel("norm of a completion's gradient, weight 1/|o|")
    figure.suptitle("SmolLM2: a completion with a larger |A| moves the weights more", fontsize=14)
    foot(figure, "a dot: one completion, blue if it is right; all groups of 3 seeds")
    figure.savefig(output, dpi=DPI)


def main(argv):
    options = parse(Options, argv)
    result = measure(options)
    report(options, "claims_real", result, page)
    picture(result, Path(options.output, "claims_real.png"))


if __name__ == "__main__":
    run_program(main)
