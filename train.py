"""Train a language model with GRPO, CPPO or one of their relatives on questions whose answers can be checked.

    torchrun train.py                                         the embedded default: no download, no GPU, minutes
    torchrun --nproc-per-node 2 train.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset gsm8k
    python train.py --plan --recipe recipes/gsm8k_1.5b_cppo.yaml      the memory that a run needs, before it
    python train.py --help                                    every option

`train_step` below reads like the papers' algorithm box:

    for each step:
      1 sample G completions o_1 … o_G of each question from the policy π_old
      2 score them: rewards r
      3 advantages A over all G completions of a question
      4 keep: all of them (GRPO), or the k with the largest |A| (CPPO, which therefore takes more questions per step)
        (GFPO and PODS keep first, and take the advantages over the kept; DAPO goes back to 1 for groups without signal)
      5 log-probabilities of the reference policy, for the kept completions only
      6 μ updates on the kept completions (engine/update.py); the log-probabilities of π_old come for free from the first of
        them, when π_θ is still π_old (with several mini-batches they are taken in step 5)
    PPO has a critic beside the policy: in step 5 it turns the scores into advantages, in step 6 it learns too.

Where we depart from the papers' published runs: on several devices each samples its own questions, and the loss is
normalised over the kept completions of all devices, so that the update does not depend on how they were shared out.
"""

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from allocate import questions_per_step
from cppo import cppo_loss
from engine.model.critic import estimate
from engine.model.networks import build, save_merged
from engine.model.policy import Batch, join, nothing
from engine.model.rollout import Sampling
from engine.run import checkpoint, distributed, logs, trackers
from engine.run.config import open_run
from engine.run.curves import curves
from engine.run.options import UserError, run
from engine.run.plan import EVALUATED, doubts, plan, show
from engine.scoring.preview import preview
from engine.scoring.score import choose, judge, merge, score
from engine.select import select
from engine.tasks import data, toy
from eval import examine
from family.dapo import dapo_loss, has_signal, overlong_penalty, token_mean_weights
from family.drgrpo import constant_weights, drgrpo_loss
from family.gdpo import decoupled_advantages
from family.gfpo import adaptive_k
from family.gspo import gspo_loss
from family.ppo import ppo_loss
from grpo import group_advantages, grpo_loss, sequence_mean_weights
from update import NO_UPDATE, update


@dataclass(frozen=True)
class Algorithm:
    loss: Callable  # (logp, old_logp, advantages, mask, …) → (loss, stats): which ratio
    weights: Callable  # (mask, N, tokens, longest) of the batch → (N, T): what each token counts
    clip: tuple[float, float]  # of the ratio: (low, high)
    beta: float  # of the KL term; 0: none
    advantages: Callable = lambda rewards, w: group_advantages(merge(rewards, w))  # (R, Q, G), R rewards and weights → (Q, G)
    keep: str | None = None  # the rule by which completions are kept; None keeps all
    pruning_rate: float = 0.0
    minibatches: int = 1  # updates that a batch of completions is cut into
    dynamic_sampling: bool = False  # replace groups without signal by further questions
    ks: tuple[int, ...] = ()  # how many to keep of an easy, medium, hard, very hard question; (): one k for all
    mu: int = 2  # times that a batch of completions is trained on
    critic: bool = False  # a second network makes an advantage for every token of the scores


def sequence_mean(mask, n, tokens, longest):  # 1 / (N |o_i|)
    return sequence_mean_weights(mask, num_sequences=n)


def token_mean(mask, n, tokens, longest):  # 1 / Σ_i |o_i|
    return token_mean_weights(mask, total_tokens=tokens)


def constant(mask, n, tokens, longest):  # 1 / (N L)
    return constant_weights(mask, max_tokens=longest, num_sequences=n)


ALGORITHMS = {
    "grpo": Algorithm(loss=grpo_loss, weights=sequence_mean, clip=(0.2, 0.2), beta=0.04),
    "cppo": Algorithm(loss=cppo_loss, weights=sequence_mean, clip=(0.2, 0.2), beta=0.04, keep="largest_abs", pruning_rate=0.75),
    "drgrpo": Algorithm(
        loss=drgrpo_loss, weights=constant, clip=(0.2, 0.2), beta=0.0,
        advantages=lambda rewards, w: group_advantages(merge(rewards, w), divide_by_std=False),
    ),
    "dapo": Algorithm(loss=dapo_loss, weights=token_mean, clip=(0.2, 0.28), beta=0.0, dynamic_sampling=True),
    "gspo": Algorithm(loss=gspo_loss, weights=sequence_mean, clip=(3e-4, 4e-4), beta=0.0, minibatches=4),
    "gspo_token": Algorithm(
        loss=partial(gspo_loss, token_level=True), weights=sequence_mean, clip=(3e-4, 4e-4), beta=0.0, minibatches=4
    ),
    "gfpo": Algorithm(
        loss=grpo_loss, weights=token_mean, clip=(0.2, 0.2), beta=0.001, keep="shortest", pruning_rate=0.5,
        advantages=lambda rewards, w: group_advantages(merge(rewards, w), ddof=0),  # of the kept: gfpo.retained_advantages
    ),
    "gfpo_adaptive": Algorithm(
        loss=grpo_loss, weights=token_mean, clip=(0.2, 0.2), beta=0.001, keep="shortest", ks=(4, 6, 8, 8),  # else as gfpo
    ),
    "gdpo": Algorithm(
        loss=grpo_loss, weights=sequence_mean, clip=(0.2, 0.2), beta=0.04,
        advantages=lambda rewards, w: distributed.over_all_groups(partial(decoupled_advantages, weights=w), rewards),
    ),
    "pods": Algorithm(loss=grpo_loss, weights=sequence_mean, clip=(0.2, 0.2), beta=0.04, keep="max_variance", pruning_rate=0.75),
    "ppo": Algorithm(
        loss=lambda *batch, beta, **options: ppo_loss(*batch, **options),  # β is in the rewards already
        weights=token_mean, clip=(0.2, 0.2), beta=0.02, mu=4, critic=True,
        advantages=merge,  # the scores: critic.estimate makes the advantages, (N, T)
    ),
}

COUNTS = ("questions", "completions", "kept", "tokens_generated", "tokens_trained")  # of a step, over all devices


def learning_rate(progress, peak, warmup):
    """Linear warm-up over the first `warmup` of the run, then a cosine down to 0. progress in [0, 1]."""
    if progress <= warmup:
        return peak * progress / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def run_progress(steps_done, steps, questions_done, questions, per_step):
    """Where the middle of the next step lies in the run, in [0, 1]. The run ends with its steps or its questions, whichever is first.

    A step takes `per_step` questions, or more with dynamic sampling: as many as the steps so far have taken on average.
    """
    most, taken = math.ceil(questions / per_step), questions_done / per_step  # in units of such a step
    expected = min(max(1, taken / max(1, steps_done)), most - taken)
    return max((steps_done + 0.5) / steps, (taken + expected / 2) / most)


def roll_out(questions, k, networks, rewards, sampling, config, rng, clock, history):
    """Sample, score, advantages, keep: steps 1 to 4 on this device's `questions`. history: the mean reward of earlier ones.

    Returns the kept completions (a Batch), sums for the metrics, and the first group for the log of samples.
    """
    device, algorithm, G = networks.model.device, ALGORITHMS[config.algorithm], config.group_size
    with clock.phase("generate"):  # 1 sample G completions of each question
        drawn = networks.sampler.sample([q["prompt"] for q in questions], G, sampling, rng.getrandbits(62))
    with clock.phase("score"):  # 2 score them
        texts, lengths = drawn.texts(networks.tokenizer, questions), drawn.lengths.cpu()
        parts, failures = score(rewards, texts, data.columns([q for q in questions for _ in range(G)]))
        weights = [reward.weight for reward in rewards]
        # taken before the overlong penalty: with it a group of right answers would look informative
        signal = has_signal(merge(torch.stack(list(parts.values())), weights).view(-1, G))
        if config.overlong_cache:
            parts["overlong"] = overlong_penalty(lengths, max_length=config.max_new_tokens, cache=config.overlong_cache)
            weights.append(1.0)
        grouped = torch.stack(list(parts.values())).view(len(parts), len(questions), G)  # (R, Q, G)
        total = merge(grouped, weights)
        if algorithm.ks:
            means = total.mean(1)
            k = adaptive_k(means, torch.tensor(history), ks=algorithm.ks)
            history += distributed.gather(means.tolist())
        # 3 advantages over all G completions of a question, 4 keep
        generator = torch.Generator().manual_seed(rng.getrandbits(62))  # the rule random must not share the sampler's stream
        advantages, kept = select(grouped, weights, lengths.view(-1, G), k, algorithm, config, generator)
        if algorithm.dynamic_sampling:
            kept = kept[signal[kept // G]]
        if config.mask_truncated:
            kept = kept[~drawn.truncated.cpu()[kept]]
    prompts = [q["prompt"] for q in questions for _ in range(G)]
    batch = Batch(prompts, drawn.tokens, lengths, advantages.flatten().to(device), drawn.logp)
    sums = {"questions": len(questions), "completions": len(texts), "kept": len(kept),
            # advantages of a group add up to 0: if they do not differ, they are all 0 (PPO's are the scores, here and in the log)
            "no_signal": (~has_signal(advantages)).sum().item(),
            "short": (~signal).sum().item() if algorithm.dynamic_sampling else 0,  # groups to replace
            "pushed": (advantages.flatten()[kept] != 0).sum().item(),
            "tokens_generated": lengths.sum().item(), "tokens_trained": lengths[kept].sum().item(),
            "accuracy": (parts[rewards[0].name] > 0).sum().item(), "reward": total.sum().item(), "reward_failures": failures,
            "truncated": drawn.truncated.sum().item(), "entropy": -drawn.logp.sum().item(),
            **{f"reward/{name}": values.sum().item() for name, values in parts.items()}}
    first_group = logs.first_group(questions, texts[:G], total.flatten(), advantages.flatten(), set(kept.tolist()))
    return batch.rows(kept), distributed.all_sum(sums, device), first_group


def train_step(step, supply, networks, rewards, sampling, k, config, history=None):
    """One turn of the algorithm box. `supply(n)` gives this device its share of the next n questions (None: of a whole step's).

    Returns (metrics, sample): one line for each log.
    """
    algorithm, clock = ALGORITHMS[config.algorithm], logs.Clock(networks.model.device)
    model, critic = networks.model, networks.critic
    # all randomness of a step follows from these three numbers, so a resumed run repeats it exactly
    rng = random.Random(f"{config.seed} {step} {distributed.rank()}")
    batches, sums, samples, missing = [], {}, None, None
    while missing != 0 and (questions := supply(missing)) is not None:
        batch, more, group = roll_out(questions, k, networks, rewards, sampling, config, rng, clock, history)
        batches, samples = [*batches, batch], samples or group
        short = int(more.pop("short"))
        sums = {name: value + sums.get(name, 0) for name, value in more.items()}
        missing = 0 if len(batches) == config.max_rollouts else short
    if short and distributed.rank() == 0:
        tqdm.write(f"step {step}: {short} groups short after sampling {len(batches)} times, training on the others.")

    metrics = {"step": step} | {name: int(sums.pop(name)) for name in COUNTS} | {"rollouts": len(batches)}
    pushed = sums.pop("pushed")
    metrics["no_signal"] = sums.pop("no_signal") / metrics["questions"]
    metrics["length"] = metrics["tokens_generated"] / metrics["completions"]
    metrics["entropy"] = sums.pop("entropy") / metrics["tokens_generated"]
    metrics |= {name: value / metrics["completions"] for name, value in sums.items()}

    metrics |= NO_UPDATE
    if pushed or (critic and metrics["kept"]):  # else every advantage is 0 and there is nothing to learn from
        batch = join(batches)
        minibatches = [batch.rows(rows).cut_into(config.micro_batch_tokens)
                       for rows in torch.arange(len(batch.prompts)).tensor_split(config.minibatches)]
        if distributed.is_sharded(model):  # the devices gather weights together, so each needs as many micro-batches as the others
            minibatches = [distributed.even_out(parts, partial(nothing, model.device), model.device) for parts in minibatches]
        with clock.phase("logprobs"), torch.no_grad():  # 5 log-probabilities of the reference, for the kept only
            every_part = [part for parts in minibatches for part in parts]
            for part in every_part:
                if config.beta:
                    part.ref_logp = part.logprobs(networks.reference, config.temperature)
                if config.minibatches > 1 or critic:  # π_θ is no longer π_old when the second mini-batch comes
                    part.old_logp = part.logprobs(model, config.temperature)
            if critic:
                estimate(critic, every_part, model.device, beta=config.beta, lam=config.lam)
        with clock.phase("update"):  # 6 μ updates on the kept
            metrics |= update(model, networks.optimizer, minibatches, algorithm, config, critic)
            networks.sampler.refresh(distributed.whole_weights(model, networks.sampler.dtype))
    metrics |= {f"seconds/{name}": seconds for name, seconds in clock.total().items()}
    return metrics, {"step": step} | samples


def train(config, k, device):
    """The whole run. Returns the exit code: 0, as after a scheduler's request to end, or 130 after Ctrl-C."""
    first_rank, run_dir, algorithm = distributed.rank() == 0, Path(config.output_dir), ALGORITHMS[config.algorithm]
    say = tqdm.write if first_rank else lambda *_: None
    source = toy.source(config.model, config.dataset)
    folder, saved, notes = checkpoint.resume(run_dir) if config.resume else (None, None, [])
    networks = build(source, config, device, critic=algorithm.critic, folder=folder)
    questions, test, more = data.of_run(config, networks.tokenizer, networks.model)
    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, config.top_k)
    notes += more + sampling.notes + (doubts(config, k, algorithm) if device.type == "cuda" else [])
    rewards = choose(config.rewards, device, config.reward_timeout)
    right = judge(rewards, config.dataset, config.eval_dataset or config.dataset)

    # B questions per device and step; with allocation as many as fill the same places after pruning
    per_device = questions_per_step(config.questions_per_step, config.group_size, k) if config.allocation else config.questions_per_step
    total = max(1, round(config.epochs * len(questions)))
    # what a resumed run takes up again; step, order of the questions and random numbers follow from it and from the seed
    state = {"step": 0, "position": 0, "seconds": 0.0, "no_signal_steps": 0, "skipped_updates": 0, "skipped_in_a_row": 0,
             "history": [],  # of GFPO's adaptive k
             "before": {}, "source": source, "data": data.fingerprint(questions), "per_step": per_device * distributed.world_size()}
    state |= checkpoint.agreed(run_dir, saved, state) if saved else {}
    per_step = state["per_step"]  # as the run was started, on however many devices it goes on
    steps = min(config.steps or math.inf, math.ceil(total / per_step))
    if distributed.world_size() > min(per_step, total):
        raise UserError(f"{distributed.world_size()} devices for {min(per_step, total)} questions: start as many processes at the most.")
    others = {"critic": networks.critic} if algorithm.critic else {}  # saved too
    others |= {"reference": networks.reference} if config.refresh_reference else {}
    if saved:
        checkpoint.check_unfinished(run_dir, state, steps)
        checkpoint.restore(folder, networks, others)

    def save():
        """Returns whether it worked; a run goes on where it did not."""
        problem = checkpoint.save(run_dir, networks, state, others)
        if problem:
            say(f"step {state['step']}: the checkpoint could not be written ({problem}). {checkpoint.say(run_dir)}")
        return not problem

    def supply(count):
        """This device's share of the next `count` questions (None: of a whole step's); None where the run is at its end."""
        position, count = state["position"], min(count or per_step, total - state["position"])
        state["position"] += count
        return data.take(questions, position, count, config.seed)[distributed.rank() :: distributed.world_size()] if count else None

    # on a GPU an evaluation samples no more at a time than fits into the memory that training takes
    at_a_time = plan(config, k, algorithm).evaluated if device.type == "cuda" else EVALUATED

    def exam(label):
        if not test:
            return {}
        return examine(networks.sampler, networks.tokenizer, test, right, sampling, seed=config.seed, label=label, batch_size=at_a_time)

    for note in dict.fromkeys(notes):
        say(f"note: {note}")
    if not saved:
        state["before"] = exam("before")
        if not save():  # from here on there is something to resume
            raise UserError("stopped, for a run that cannot be saved would be lost: free the disk, or name another --output_dir.")
    if first_rank:
        logs.open_run(run_dir, config, state["step"])
    tracker = trackers.Tracker(config.log if first_rank else None, run_dir, state["step"], asdict(config))
    distributed.barrier()
    end = state["step"] >= steps or state["position"] >= total
    with logs.Interrupt() as interrupt, tqdm(total=steps, initial=state["step"], desc=config.algorithm, disable=not first_rank) as bar:
        while not (end or interrupt.asked):
            step = state["step"] + 1
            progress = run_progress(state["step"], steps, state["position"], total, per_step)
            for group, peak in zip(networks.optimizer.param_groups, (config.lr, config.critic_lr)):
                group["lr"] = learning_rate(progress, peak, config.warmup)
            metrics, samples = train_step(step, supply, networks, rewards, sampling, k, config, state["history"])
            for skipped in metrics.pop("skipped"):
                state["skipped_in_a_row"] = state["skipped_in_a_row"] + 1 if skipped else 0
            state |= {"step": step, "seconds": state["seconds"] + metrics["seconds/total"],
                      "no_signal_steps": state["no_signal_steps"] + (metrics["loss"] is None),
                      "skipped_updates": state["skipped_updates"] + metrics["skipped_updates"]}
            metrics["lr"] = networks.optimizer.param_groups[0]["lr"]
            if first_rank:
                logs.append(run_dir / "metrics.jsonl", metrics)
                logs.append(run_dir / "samples.jsonl", samples)
                tracker.log(step, metrics)
            bar.set_postfix(accuracy=f"{metrics['accuracy']:.2f}", length=f"{metrics['length']:.0f}")
            bar.update()
            if state["skipped_in_a_row"] >= 5:
                raise UserError(f"stopped at step {step}: {state['skipped_in_a_row']} updates in a row had a loss or a gradient that is "
                                f"not finite, and were skipped. Lower --lr, or look into samples.jsonl. {checkpoint.say(run_dir)}")
            if config.refresh_reference and step % config.refresh_reference == 0:
                networks.reference.load_state_dict(networks.model.state_dict())
            far = config.stop_kl is not None and metrics["kl"] is not None and metrics["kl"] > config.stop_kl
            if far:
                say(f"stopped at step {step}: the KL to the reference is {metrics['kl']:.3g}, above --stop_kl {config.stop_kl}.")
            end = far or step >= steps or state["position"] >= total
            interrupt.share(device)
            due = step % config.save_every == 0 and not state["skipped_in_a_row"]  # while updates fail, the last good one stays
            if (due or interrupt.asked or end) and not save() and (interrupt.asked or end):
                raise UserError(f"the run has ended at step {step}, but what it learned since its last checkpoint is lost.")
    tracker.close()
    if not end:
        say(f"stopped after step {state['step']} of {steps}. {checkpoint.say(run_dir)}")
        return interrupt.exit_code

    after = exam("after")
    if first_rank:
        logs.close_run(run_dir, {"algorithm": config.algorithm, "k": k, **state, "notes": notes, "after": after}, COUNTS)
        curves([run_dir], run_dir / "curves.png")
        if config.merge_lora:
            save_merged(str(checkpoint.newest(run_dir)), source, run_dir / "merged")
    return 0


def main(argv):
    config, k = open_run(argv, ALGORITHMS)
    device = distributed.start()
    if config.plan:
        return show(config, k, ALGORITHMS[config.algorithm])
    if config.check_rewards:
        return preview(config, device)
    config.output_dir = distributed.from_first(logs.run_folder(config) if distributed.rank() == 0 else None)
    try:
        code = train(config, k, device)
    except KeyboardInterrupt:
        print(f"interrupted. {checkpoint.say(config.output_dir)}")
        code = 130
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            what = f"out of memory ({' '.join(str(error).split())[:200]}): `--plan` tells what takes it."
        elif distributed.is_alone(error):
            what = "another process of this job has ended; torchrun names it and its reason."
        else:
            raise
        raise UserError(f"{what} {checkpoint.say(config.output_dir)}") from None
    distributed.stop()
    return code


if __name__ == "__main__":
    run(main)
