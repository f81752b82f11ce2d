"""Train a language model with GRPO, CPPO or a relative, on questions with checkable answers.

    torchrun train.py                       the embedded default: no download, no GPU, minutes
    torchrun --nproc-per-node 2 train.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset gsm8k
    python train.py --plan --recipe recipes/gsm8k_1.5b_cppo.yaml      the memory that a run needs
    python train.py --help                  every option
    python train.py --list                  every algorithm

`train_step` below is the papers' algorithm box. For each step:

    1 sample G completions o_1 … o_G of each question from the policy π_old      (rollout.py)
    2 score them: rewards r                                                      (rewards.py)
    3 advantages A over all G completions of a question                          (grpo.py)
    4 keep all of them (GRPO), or the k with the largest |A| (CPPO), which        (cppo.py,
      leaves room for more questions per step                                    allocate.py)
    5 log-probabilities of the reference policy, for the kept completions only
    6 μ updates on the kept completions                                          (update.py)

algorithms.py says what each algorithm does in steps 3, 4 and 6.

Where we depart from the papers' published runs: each device samples questions of its own, and the
loss is normalised over the kept completions of all devices. So the update does not depend on how
the questions were shared out.
"""

import torch

from algorithms import table
from engine.base import progress, ranks
from engine.model import shards
from engine.model.critic import estimate
from engine.model.folders import resolve_model
from engine.model.networks import build
from engine.model.sampling import Sampling
from engine.run import checkpoint, plan, plan_command
from engine.run.config import Config, notes_of, open_run
from engine.run.folder import alone, run_folder
from engine.run.metrics import Clock, first_group, summarize
from engine.run.options import parse, run_program
from engine.run.state import Run, in_one_sentence
from engine.scoring.preview import preview
from engine.scoring.score import choose, judge
from engine.tasks.questions import base_model, questions_of_run
from eval import examine
from records import into_minibatches, micro_batches_of
from rollout import sample_and_score
from update import NO_UPDATE, Limits, update


def train_step(
    networks, algorithm, rewards, sampling, limits, next_questions, rng, history=()
):
    """One turn of the algorithm box. Returns (metrics, sample): a line for each log.

    next_questions(n): this device's share of the next n questions of all devices; None: a step's.
    rng: the source of all that is random. history: mean rewards, for GFPO's adaptive k.
    """
    model, clock = networks.model, Clock(networks.model.device)
    # 1 sample G completions of each question, 2 score them
    rollout = sample_and_score(
        next_questions, networks, algorithm, rewards, sampling, rng, clock, history)
    # 3 advantages A over all G completions of a question
    advantages = algorithm.advantages(rollout)
    # 4 keep all of them (GRPO), or the k with the largest |A| (CPPO)
    rows, advantages = algorithm.choose(rollout, advantages)
    metrics = summarize(rollout, advantages, rows) | NO_UPDATE
    minibatches = into_minibatches(
        rollout, advantages, rows, algorithm.minibatches, limits.micro_batch_tokens, networks)

    if minibatches:  # else nobody has anything to learn
        networks.sampler.rest()  # frees memory until `refresh`
        with clock.phase("logprobs"), torch.no_grad():
            # 5 log-probabilities of the reference policy, for the kept completions only
            for part in micro_batches_of(minibatches) if algorithm.beta else ():
                part.ref_logp = part.logprobs(networks.reference, sampling.temperature)
            # those of π_old come for free with the first update: π_θ is then still π_old
            for part in micro_batches_of(minibatches[0 if networks.critic else 1 :]):
                part.old_logp = part.logprobs(networks.policy, sampling.temperature)
            if networks.critic:  # PPO: the scores become advantages
                options = {"beta": algorithm.beta, "lam": algorithm.lam}
                estimate(networks.critic, micro_batches_of(minibatches), model.device, **options)
        with clock.phase("update"):
            # 6 μ updates on the kept completions
            metrics |= update(networks, minibatches, algorithm, sampling, limits)
            networks.sampler.refresh(shards.whole_weights(model, networks.sampler.dtype))
    return metrics | clock.seconds(), first_group(rollout, advantages, rows)


def train(config, algorithm, device):
    """The whole run. Returns the exit code: 0, also after SIGTERM, or 130 after Ctrl-C."""
    folder, saved, notes = None, None, []
    if config.resume:
        folder, saved, notes = checkpoint.resume(config.output_dir)
    earlier = saved["source"] if saved else None
    source = resolve_model(base_model(config.model, config.dataset, earlier))
    networks = build(
        source, device, config, config, lr=config.lr, critic_lr=config.critic_lr, beta=config.beta,
        seed=config.seed, longest=config.max_prompt_tokens + config.max_new_tokens,
        critic=algorithm.critic, folder=folder)
    questions, test, more_notes = questions_of_run(config, networks.tokenizer, networks.model)
    run = Run(config, algorithm, networks, questions, source, saved)
    if saved:
        checkpoint.restore(folder, networks, run.saved_networks)

    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, config.top_k)
    limits = Limits(config.micro_batch_tokens, config.max_grad_norm)
    rewards = choose(config.rewards, device, config.reward_timeout)
    right = judge(rewards, config.dataset, config.eval_dataset or config.dataset)
    batch_size, doubts = plan_command.fit(config) if device.type == "cuda" else (plan.EVALUATED, [])
    notes += notes_of(config, algorithm) + networks.notes + more_notes + sampling.notes + doubts

    def evaluate(label):
        options = {"seed": config.seed, "batch_size": batch_size, "label": label}
        if not test:
            return {}
        return examine(networks.sampler, networks.tokenizer, test, right, sampling, **options)

    run.open(evaluate, notes, len(test))
    with run:
        while not run.over:
            rng = run.begin_step()
            metrics, sample = train_step(
                networks, algorithm, rewards, sampling, limits, run.next_questions, rng,
                run.history)
            run.record(metrics, sample)
    return run.close(evaluate, notes)


def main(argv):
    config, algorithm = open_run(argv)
    if config.list:
        return print(table())
    device = ranks.start()
    if config.plan:
        return plan_command.print_plan(config, argv)
    if config.check_rewards:
        return preview(config, device, given=parse(Config, [*argv, "--recipe="]))
    config.output_dir = ranks.from_first(run_folder(config) if ranks.rank() == 0 else None)
    with alone(config.output_dir):
        try:
            code = train(config, algorithm, device)
        except KeyboardInterrupt:
            progress.note(f"stopped at once. {checkpoint.how_to_resume(config.output_dir)}")
            code = 130
        except (RuntimeError, OSError, FloatingPointError) as error:
            raise in_one_sentence(error, config.output_dir) from None
    ranks.stop()
    return code


if __name__ == "__main__":
    run_program(main)
