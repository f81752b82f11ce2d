"""Train a language model with GRPO, CPPO or one of their relatives on questions whose answers can be checked.

    torchrun train.py                                         the embedded default: no download, no GPU, minutes
    torchrun --nproc-per-node 2 train.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset gsm8k
    python train.py --plan --recipe recipes/gsm8k_1.5b_cppo.yaml      the memory that a run needs, before it
    python train.py --help                                    every option
    python train.py --list                                    every algorithm

`train_step` below is the papers' algorithm box:

    for each step:
      1 sample G completions o_1 … o_G of each question from the policy π_old
      2 score them: rewards r
      3 advantages A over all G completions of a question
      4 keep: all of them (GRPO), or the k with the largest |A| (CPPO, which therefore takes more questions per step)
      5 log-probabilities of the reference policy, for the kept completions only
      6 μ updates on the kept completions (update.py)

Where we depart from the papers' published runs: on several devices each samples its own questions, and the loss is
normalised over the kept completions of all devices, so that the update does not depend on how they were shared out.
"""

from dataclasses import replace
from functools import partial

import torch
from tqdm import tqdm

from algorithms import Rollout, join, over_the_kept, table
from engine.model import shards
from engine.model.critic import estimate
from engine.model.networks import build
from engine.model.sampling import Sampling
from engine.run import checkpoint, logs, plan, ranks
from engine.run.config import open_run
from engine.run.metrics import Clock, first_group, summarize
from engine.run.options import run_program
from engine.run.state import Run, in_one_sentence
from engine.scoring.preview import preview
from engine.scoring.score import choose, judge, score
from engine.tasks.questions import base_model, questions_of_run, reward_columns
from eval import examine
from family.dapo import has_signal, overlong_penalty
from update import NO_UPDATE, Batch, Limits, update


def roll_out(questions, networks, algorithm, rewards, sampling, rng, clock, history):
    """Steps 1 and 2 of the algorithm box for this device's questions. Returns a Rollout."""
    G, shape = algorithm.group_size, (len(questions), algorithm.group_size)
    with clock.phase("generate"):  # 1 sample G completions of each question
        prompts = [question["prompt"] for question in questions]
        sampled = networks.sampler.sample(prompts, G, sampling, rng.getrandbits(62))
    with clock.phase("score"):  # 2 score them
        texts = sampled.texts(networks.tokenizer, questions)
        values, failures = score(rewards, texts, reward_columns(questions, G))
    return Rollout(
        questions, sampled.tokens, sampled.logp, texts, sampled.lengths.cpu().view(shape), sampled.truncated.cpu().view(shape),
        rewards=torch.stack(list(values.values())).view(len(values), *shape), reward_names=list(values),
        reward_weights=[reward.weight for reward in rewards], failures=failures,
        history=history, seed=rng.getrandbits(62),
    )


def dynamic_sampling(roll, next_questions, max_rollouts):
    """DAPO: sample again, for further questions, until groups with signal fill the step. At most `max_rollouts` times."""
    rollouts, missing = [], None
    while missing != 0 and (questions := next_questions(missing)) is not None:
        rollout = roll(questions)
        signal = has_signal(rollout.total)
        rollouts.append(replace(rollout, trainable=signal.unsqueeze(1) & rollout.trainable))
        without = int(ranks.all_sum({"without": (~signal).sum().item()}, rollout.tokens.device)["without"])
        missing = without if len(rollouts) < max_rollouts else 0
    if without and ranks.rank() == 0:
        tqdm.write(f"{without} groups are still without signal after sampling {len(rollouts)} times: the step trains on the others.")
    return join(rollouts)


def shaped(rollout, algorithm, max_tokens):
    """DAPO's other two changes of a rollout: a penalty for long completions, and truncated ones are not trained on."""
    if algorithm.mask_truncated:
        rollout = replace(rollout, trainable=rollout.trainable & ~rollout.truncated)
    if algorithm.overlong_cache:
        penalty = overlong_penalty(rollout.lengths, max_length=max_tokens, cache=algorithm.overlong_cache)
        rollout = replace(
            rollout, rewards=torch.cat([rollout.rewards, penalty.unsqueeze(0)]),
            reward_names=[*rollout.reward_names, "overlong"], reward_weights=[*rollout.reward_weights, 1.0],
        )
    return rollout


def train_step(networks, algorithm, rewards, sampling, limits, next_questions, rng, history=()):
    """One turn of the algorithm box. Returns (metrics, sample): one line for each log.

    next_questions(n): this device's share of the next n questions; of None: of a whole step's. rng: all that is random in
    this step on this device. history: the mean reward of each earlier question, for GFPO's adaptive k.
    """
    clock = Clock(networks.model.device)
    roll = partial(roll_out, networks=networks, algorithm=algorithm, rewards=rewards, sampling=sampling, rng=rng,
                   clock=clock, history=history)
    # 1 sample G completions of each question, 2 score them
    rollout = dynamic_sampling(roll, next_questions, algorithm.max_rollouts) if algorithm.max_rollouts > 1 else roll(next_questions(None))
    rollout = shaped(rollout, algorithm, sampling.max_new_tokens)
    # 3 advantages A over all G completions of a question
    advantages = algorithm.advantages(rollout)
    # 4 keep all of them (GRPO), or the k with the largest |A| (CPPO)
    rows = algorithm.keep(rollout, advantages, algorithm.how_many(rollout))
    if algorithm.kept_first:  # GFPO and PODS: mean and std over the kept
        advantages = over_the_kept(algorithm, rollout, rows)
    rows = rows[rollout.trainable.flatten()[rows]]
    metrics = summarize(rollout, advantages, rows) | NO_UPDATE

    # if every advantage is 0 there is nothing to learn; PPO's critic learns from every completion
    if metrics["nonzero"] or (networks.critic and metrics["kept"]):
        batch = Batch.of(rollout, advantages, rows)
        minibatches = batch.minibatches(algorithm.minibatches, limits.micro_batch_tokens, networks.model)
        every = [micro_batch for minibatch in minibatches for micro_batch in minibatch]
        with clock.phase("logprobs"), torch.no_grad():
            for micro_batch in every:
                # 5 log-probabilities of the reference, for the kept completions only
                if algorithm.beta:
                    micro_batch.ref_logp = micro_batch.logprobs(networks.reference, sampling.temperature)
                # those of π_old come for free from the first update, if every update is made on the whole batch
                if algorithm.minibatches > 1 or networks.critic:
                    micro_batch.old_logp = micro_batch.logprobs(networks.model, sampling.temperature)
            if networks.critic:  # PPO: the scores become advantages
                estimate(networks.critic, every, networks.model.device, beta=algorithm.beta, lam=algorithm.lam)
        with clock.phase("update"):  # 6 μ updates on the kept
            metrics |= update(networks, minibatches, algorithm, sampling, limits)
            networks.sampler.refresh(shards.whole_weights(networks.model, networks.sampler.dtype))
    return metrics | clock.seconds(), first_group(rollout, advantages, rows)


def train(config, algorithm, device):
    """The whole run. Returns the exit code: 0, as after a scheduler's request to end, or 130 after Ctrl-C."""
    folder, saved, notes = checkpoint.resume(config.output_dir) if config.resume else (None, None, [])
    source = base_model(config.model, config.dataset)
    networks = build(source, config, device, critic=algorithm.critic, folder=folder)
    questions, test, more = questions_of_run(config, networks.tokenizer, networks.model)
    run = Run(config, algorithm, networks, questions, source, saved)
    if saved:
        checkpoint.restore(folder, networks, run.saved_networks)

    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, config.top_k)
    limits = Limits(config.micro_batch_tokens, config.max_grad_norm)
    rewards = choose(config.rewards, device, config.reward_timeout)
    right = judge(rewards, config.dataset, config.eval_dataset or config.dataset)
    at_a_time, doubts = plan.fit(config) if device.type == "cuda" else (plan.EVALUATED, [])
    notes += more + sampling.notes + doubts

    def evaluate(label):
        tokenizer, options = networks.tokenizer, {"seed": config.seed, "label": label, "batch_size": at_a_time}
        return examine(networks.sampler, tokenizer, test, right, sampling, **options) if test else {}

    run.open(evaluate, notes)
    with run:
        while not run.over:
            rng = run.begin_step()
            metrics, sample = train_step(
                networks, algorithm, rewards, sampling, limits, run.next_questions, rng, run.history)
            run.record(metrics, sample)
    return run.close(evaluate, notes)


def main(argv):
    config, algorithm = open_run(argv)
    if config.list:
        return print(table())
    device = ranks.start()
    if config.plan:
        return plan.show(config)
    if config.check_rewards:
        return preview(config, device)
    config.output_dir = ranks.from_first(logs.run_folder(config) if ranks.rank() == 0 else None)
    try:
        code = train(config, algorithm, device)
    except KeyboardInterrupt:
        print(f"interrupted. {checkpoint.how_to_resume(config.output_dir)}")
        code = 130
    except RuntimeError as error:
        raise in_one_sentence(error, config.output_dir) from None
    ranks.stop()
    return code


if __name__ == "__main__":
    run_program(main)
