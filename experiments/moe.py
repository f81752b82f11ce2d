"""Is GSPO's one ratio calmer in a mixture of experts? Bases of the toy that are mixtures, beside
dense ones.

    python experiments/moe.py             writes moe.json, moe.md and moe.png

A router sends each token to a few experts. An update may change its choice, and then a token's
ratio π_θ / π_old jumps: so says GSPO (2507.18071, section 5.3).

1. The ratios. Every base is trained for STEPS steps, with 8 updates of GRPO on each batch. After 1,
   4 and 8 updates: how many choices have changed, how far the ratios are from 1, and what the clips
   of GRPO and GSPO take. "replay": the same weights, but every token goes to the experts that it
   went to before the updates (routing replay). The router's new logits still weigh these experts.
2. Accuracy over the steps of runs of train.py.

All bases have the toy's warm start and differ only in the MLP. They are kept in runs/moe/, beside
the runs. To continue after an interruption, run the same command again.
"""

import sys
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.data.questions import load_questions
from engine.model.loading import load_model
from engine.model.logprobs import Policy
from engine.run.command_line import parse, run_program
from engine.run.curves import CPPO, GRPO
from experiments.gradients import sampled
from experiments.library import toy_model
from experiments.library.bench import heading
from experiments.library.plot import PALER, curves, dots, panels, save
from experiments.library.study import (
    Options,
    Study,
    by_name,
    once,
    one_run,
    pivot,
    publish,
    rows_of,
)
from family.gspo import gspo_loss, sequence_ratio
from grpo import grpo_loss
from tasks import toy

# the MLP of each kind. The first mixture has 183,000 parameters, of which a token uses 72,000. The
# second one has 186,000 and uses 57,000. The dense ones have the two numbers of the first mixture
KINDS = {
    "8 experts, 2 active": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "32 experts, 4 active": {
        "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 12},
    "dense, as many in total": {"intermediate_size": 387},
    "dense, as many active": {"intermediate_size": 99},
}
MIXTURE, MANY, DENSE, SMALL = KINDS
SHORT = {MIXTURE: "8 experts", MANY: "32 experts", DENSE: "dense, total", SMALL: "dense, active"}
TRAINED = (MIXTURE, DENSE, SMALL)
IN_COMMON = (  # with the toy's base
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "tie_word_embeddings", "initializer_range", "rope_parameters",
    "pad_token_id", "eos_token_id", "bos_token_id",
)
LRS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3)  # of the ratios
LR = 3e-4  # the toy's
EDGE = 6e-4  # from here on GRPO's runs of the dense base get worse
STEPS, QUESTIONS = 6, 4  # of the ratios: batches, and questions of a batch
UPDATES = (1, 4, 8)  # after so many the ratios are measured
ALGORITHMS = ("grpo", "gspo", "gspo_token")
RUN = {  # 8 updates on each batch, without KL: only ratio and clip differ
    "dataset": "toy", "questions_per_step": 4, "group_size": 16, "minibatches": 4, "mu": 2,
    "beta": 0.0, "steps": 64, "eval_questions": 256, "save_every": 500,
}


# --- the bases ---


def network(kind, tokenizer):
    """A Qwen3 of this kind with random weights: dense, or a mixture of experts."""
    common = toy_model.make_config(tokenizer).to_dict()
    shape = {name: common[name] for name in IN_COMMON} | {"head_dim": 16} | KINDS[kind]
    if "num_experts" in shape:
        # as in Qwen's own mixtures: the weights of the chosen experts add up to 1
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, norm_topk_prob=True))
    return Qwen3ForCausalLM(Qwen3Config(**shape))


def parameters(model):
    """(all parameters, those that a token uses)"""
    total, idle = model.num_parameters(), 0
    for name, p in model.named_parameters():
        if ".experts." in name:  # (experts, …)
            idle += p.numel() * (1 - model.config.num_experts_per_tok / len(p))
    return total, round(total - idle)


def base(kind, seed):
    """The folder of a base, which is made on first use."""

    def trained():
        torch.manual_seed(seed)
        tokenizer = toy_model.make_tokenizer()
        model = network(kind, tokenizer)
        toy_model.warm_start(model, tokenizer)
        return model, tokenizer

    return toy_model.saved_once(BASES.place(kind, seed), trained)


def measure_base(folder, kind, seed):
    """{figure: number}: accuracy, sampled, on held-out questions; of a mixture, experts in use."""
    model, tokenizer = load_model(base(kind, seed), torch.device("cpu"))
    questions, _ = load_questions("toy", tokenizer, split="test", limit=toy.TEST_QUESTIONS)
    with routing(model) as choices:
        _, _, rewards = toy_model.answered(model, tokenizer, questions, 1, seed=0)
    total, active = parameters(model)
    figures = {"parameters": total, "active": active, "accuracy": rewards.mean().item()}
    if choices:  # each pass has added one of each layer
        layers = model.config.num_hidden_layers
        counts = [in_use(torch.cat(choices[i::layers])) for i in range(layers)]
        figures["experts in use"] = sum(counts) / layers
    return figures


def in_use(choices):
    """How many experts do the work: exp(entropy) of their shares of the choices (tokens, k). It is
    their number if all are chosen equally often."""
    shares = choices.flatten().bincount() / choices.numel()
    return torch.special.entr(shares).sum().exp().item()


# --- routing, and its replay ---


@contextmanager
def routing(model, forced=None):
    """[the choices (tokens, k) of each router] of the forward pass in the block.

    forced: such a list. If it is given, the routers take these choices in place of their own, and
    weigh them by their logits of today.
    """
    chosen, hooks = [], []
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    for i, router in enumerate(routers):
        own = partial(route, chosen=chosen, forced=forced and forced[i])
        hooks.append(router.register_forward_hook(own))
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def route(router, inputs, output, *, chosen, forced):
    """A hook of a router. Its output: logits (tokens, experts), weights (tokens, k), choices."""
    logits, weights, choices = output
    if forced is not None:
        choices = forced
        weights = logits.softmax(-1).gather(1, choices)
        if router.norm_topk_prob:
            weights = weights / weights.sum(1, keepdim=True)
    chosen.append(choices)
    return logits, weights, choices


def changed(old, new):
    """The share of the old choices that the new ones do not have. old, new: (tokens, k)."""
    remains = (old[:, :, None] == new[:, None, :]).any(2)
    return 1 - remains.float().mean()


def of_completions(choices, batch):
    """(layers · tokens, k): of the choices at all tokens of a pass, those that the kept tokens of
    the completions come from."""
    N, T = batch.tokens.shape
    before = len(batch.prompts[0]) - 1  # the toy's prompts have one length
    own = []
    for of_layer in choices:
        of_rows = of_layer.view(N, -1, of_layer.shape[1])[:, before : before + T]
        own.append(of_rows[batch.mask])
    return torch.cat(own)


# --- the ratios ---


@torch.no_grad()
def scored(model, batch, forced=None):
    """(log π (N, T), the choices of each router)"""
    with routing(model, forced) as choices:
        return Policy(model).logprobs(batch), choices


def moved(batch, old_logp, logp):
    """How far the policy has moved: {figure: its value of each token, completion or batch}."""
    own = logp, old_logp, batch.advantages, batch.mask
    return {
        "tokens": (logp - old_logp)[batch.mask].abs(),  # |log ρ|
        "sequences": sequence_ratio(logp, old_logp, batch.mask).log().abs(),
        "GRPO clips": grpo_loss(*own, beta=0.0)[1]["clip_fraction"][None],
        "GSPO clips": gspo_loss(*own)[1]["clip_fraction"][None],
    }


def updated(model, optimizer, batch):
    """8 updates with GRPO's loss on a batch. Returns {"updates, whose choices": {figure: values}}.
    """
    old_logp, old = scored(model, batch)
    found = {}
    for count in range(1, max(UPDATES) + 1):
        logp = Policy(model).logprobs(batch)
        loss, _ = grpo_loss(logp, old_logp, batch.advantages, batch.mask, beta=0.0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as in train.py
        optimizer.step()
        if count in UPDATES:
            logp, new = scored(model, batch)
            found[f"{count}, own"] = moved(batch, old_logp, logp)
        if count in UPDATES and old:  # it has routers
            replay, _ = scored(model, batch, forced=old)
            found[f"{count}, replay"] = moved(batch, old_logp, replay)
            share = changed(of_completions(old, batch), of_completions(new, batch))
            apart = (logp - replay)[batch.mask].abs()
            found[f"{count}, own"] |= {"changed choices": share[None], "of routing": apart}
    return found


def measure_ratios(kind, seed, lr):
    """{"updates, whose choices: figure": number} of a base, over some steps of a training."""
    model, tokenizer = load_model(base(kind, seed), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
    steps = []
    for step in range(STEPS):
        batch, _, _ = sampled(model, tokenizer, step, QUESTIONS)
        steps.append(updated(model, optimizer, batch))
    figures = {}
    for way, name in [(way, name) for way, of in steps[0].items() for name in of]:
        values = torch.cat([of_step[way][name] for of_step in steps])
        if len(values) == STEPS:
            figures[f"{way}: {name}"] = values.mean().item()
        else:
            figures[f"{way}: {name}, median"] = values.median().item()
            figures[f"{way}: {name}, 99 %"] = values.quantile(0.99).item()
    return figures


# --- the runs ---


def measure_run(folder, setting, seed):
    """{figure: number, and the curve} of a run of train.py. clipped: the mean over the run."""
    lr, kind, algorithm = setting
    own = {"model": base(kind, seed), "algorithm": algorithm, "lr": lr, "seed": seed}
    run = one_run(folder, RUN | own)
    names = ("sampled", "greedy", "curve")
    clipped = fmean(run["course"]["clip_fraction"][1:])  # of each quarter
    return {"before": run["base"]} | {name: run[name] for name in names} | {"clipped": clipped}


# --- all of it ---


def kept(folder, setting, seed):
    """What measure_ratios has found: it is kept, so an interrupted command goes on from here."""
    lr, kind = setting
    return once(Path(f"{folder}.json"), partial(measure_ratios, kind, seed, lr))


def settings(*tables):
    """{name: its parts} of all combinations."""
    return {", ".join(map(str, parts)): parts for parts in product(*tables)}


BASES = Study("runs/moe", {kind: kind for kind in KINDS}, measure_base)
RATIOS = Study("runs/moe", settings(LRS, KINDS), kept)
RUNS = Study("runs/moe", settings((LR, EDGE), TRAINED, ALGORITHMS), measure_run)
OF_BASES = {"parameters": ",.0f", "active": ",.0f", "accuracy": ".3f", "experts in use": ".3f"}
OF_RUNS = {"before": ".3f", "sampled": ".3f", "greedy": ".3f", "clipped": ".3f"}


def page(result):
    ratios, columns = "", {}
    for figure in result["ratios"][0]:
        way, _, what = figure.partition(": ")
        columns.setdefault(way, {})[what] = figure, ".5f"
    del columns["name"]
    for way, own in columns.items():
        ratios += f"\nUpdates and choices: {way}\n\n{pivot(result['ratios'], own)}\n"
    return f"""{heading("The ratios in a mixture of experts", result)}
[What the figures are](../moe.py). Mean ± standard deviation over 3 bases of each kind.

{pivot(result["bases"], OF_BASES)}

## Ratios

The medians and 99th percentiles are those of |log ratio|.
{ratios}
## Runs of {RUN["steps"]} steps

{pivot(result["runs"], OF_RUNS)}
"""


def colour(row, key, value):
    """Dense bases are grey, mixtures blue, and paler with the old experts."""
    paler = row["name"].endswith("replay")
    return GRPO if row["name"].startswith("dense") else PALER["P=0.5"] if paler else CPPO


def picture(result, folder):
    """Both ratios after 8 updates at the toy's learning rate, and runs at the edge."""
    figure, axes = panels(3, 4.6, width=17)
    ratios, runs = by_name(result["ratios"]), by_name(result["runs"])
    titles = {"tokens": "Tokens: little of the spread is routing",
              "sequences": "Completions: nothing of it is routing"}
    for axis, (what, title) in zip(axes, titles.items()):
        rows = []
        for kind, (way, words) in product(KINDS, (("8, own", ""), ("8, replay", ", replay"))):
            of = ratios[f"{LR}, {kind}"].get(f"{way}: {what}, 99 %")
            if of:
                rows.append({"name": SHORT[kind] + words, what: of})
        dots(axis, rows, what, title, left=0, colour=colour)
        axis.set_xlabel("|log ratio| after 8 updates, 99th percentile")
    lines = {}
    edges = ((LR, MIXTURE, CPPO), (EDGE, DENSE, GRPO))
    for (lr, kind, own), (algorithm, style) in product(edges, (("grpo", "-"), ("gspo", "--"))):
        name = f"{SHORT[kind]}, {lr:g}, {algorithm.upper()}"
        lines[name] = runs[f"{lr}, {kind}, {algorithm}"]["curve"], own, style
    curves(axes[2], lines, 1, 2, title="Where GRPO gets worse, GSPO is better: in both",
           xlabel="completions sampled", ylabel="accuracy, sampled (moving mean)")
    save(figure, folder / "moe.png", "dots: bases; their line and band: mean ± standard "
         "deviation; curves: mean, lowest and highest of 3 runs")


def main(argv):
    options = parse(Options, argv)
    torch.set_num_threads(1)
    result = {"bases": rows_of(BASES), "ratios": rows_of(RATIOS), "runs": rows_of(RUNS)}
    publish(options.output, "moe", result, page, picture)


if __name__ == "__main__":
    run_program(main)
