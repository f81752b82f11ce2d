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

from pathlib import Path

import torch

from algorithms import table
from engine.base import progress, ranks
from engine.model import shards
from engine.model.critic import estimate
from engine.model.folders import resolve_model
from engine.model.networks import build
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
from records import Step, into_minibatches
from rollout import sample_and_score
from update import NO_UPDATE, Limits, in_parts, update


def train_step(
    networks, algorithm, rewards, sampling, limits, next_questions, rng, history=()
):
    """One turn of the algorithm box. Returns a Step.

    next_questions(n): this device's share of the next n questions of all devices; None: a step's.
    rng: the source of all that is random. history: mean rewards, for GFPO's adaptive k.
    """
    model, clock = networks.model, Clock(networks.model.device)
    # 1 sample G completions of each question, 2 score them
    rollout = sample_and_score(
        next_questions, networks, algorithm, rewards, sampling, rng, clock, history)
    # 3 advantages A over all G completions of a question; GRPO, CPPO: grpo.group_advantages
    advantages = algorithm.advantages(rollout)
    # 4 keep all of them (GRPO), or the k with the largest |A| (CPPO: cppo.prune)
    rows, advantages = algorithm.choose(rollout, advantages)
    metrics, skipped = summarize(rollout, advantages, rows) | NO_UPDATE, []
    minibatches = into_minibatches(
        rollout, advantages, rows, algorithm, sampling.max_new_tokens)

    if minibatches:  # else nobody has anything to learn
        networks.sampler.rest()  # frees memory until `refresh`
        with clock.phase("logprobs"), torch.no_grad():
            # 5 log-probabilities of the reference policy, for the kept completions only
            for batch in minibatches if algorithm.beta else ():
                batch.ref_logp = in_parts(networks.reference.logprobs, batch, networks, limits)
            # those of π_old come for free with the first update: π_θ is then still π_old
            for batch in minibatches[0 if networks.critic else 1 :]:
                batch.old_logp = in_parts(networks.policy.logprobs, batch, networks, limits)
            if networks.critic:  # PPO: the scores become advantages
                for batch in minibatches:
                    batch.old_values = in_parts(networks.critic, batch, networks, limits)
                estimate(minibatches, model.device, beta=algorithm.beta, lam=algorithm.lam)
        with clock.phase("update"):
            # 6 μ updates on the kept completions
            stats, skipped = update(networks, minibatches, algorithm, limits)
            networks.sampler.refresh(shards.whole_weights(model, networks.sampler.dtype))
        metrics |= stats
    sample, mean_rewards = first_group(rollout, advantages, rows), rollout.total.mean(1).tolist()
    return Step(metrics | clock.seconds(), sample, mean_rewards, skipped)


def networks_of(config, algorithm, source, device, folder=None):
    """The Networks of a run. source, folder: as for `build`."""
    update, longest = config.update, config.data.max_prompt_tokens + config.sampling.max_new_tokens
    return build(
        source, device, config.devices, config.sampling, lr=update.lr, critic_lr=update.critic_lr,
        beta=algorithm.beta, critic=algorithm.critic, seed=config.run.seed, longest=longest,
        folder=folder)


def train(config, algorithm, device):
    """The whole run. Returns the exit code: 0, also after SIGTERM, or 130 after Ctrl-C."""
    folder, saved, notes = None, None, []
    data, sampling, seed = config.data, config.sampling, config.run.seed
    if config.run.resume:
        folder, saved, notes = checkpoint.resume(config.run.output_dir)
    earlier = saved["source"] if saved else None
    source = resolve_model(base_model(data.model, data.dataset, earlier))
    networks = networks_of(config, algorithm, source, device, folder)
    questions, test, more_notes = questions_of_run(
        data, sampling.max_new_tokens, networks.tokenizer, networks.model)
    run = Run(config, algorithm, networks, questions, source, saved)
    if saved:
        checkpoint.restore(folder, networks, run.saved_networks)

    limits = Limits(config.devices.micro_batch_tokens, config.update.max_grad_norm)
    rewards = choose(data.rewards, device, data.reward_timeout)
    is_right = judge(rewards, data.dataset, data.eval_dataset or data.dataset)
    batch_size, plan_notes = (
        plan_command.eval_batch_size(config) if device.type == "cuda" else (plan.EVALUATED, []))
    notes += notes_of(config, algorithm) + more_notes + sampling.notes + plan_notes

    def evaluate(label):
        options = {"seed": seed, "batch_size": batch_size, "label": label}
        if not test:
            return {}
        return examine(networks.sampler, networks.tokenizer, test, is_right, sampling, **options)

    run.open(evaluate, notes, len(test))
    with run:
        while not run.over:
            rng = run.begin_step()
            run.record(train_step(
                networks, algorithm, rewards, sampling, limits, run.next_questions, rng,
                run.state["history"]))
    return run.close(evaluate, notes)


def main(argv):
    config, algorithm = open_run(argv)
    run, look = config.run, config.look
    if look.list:
        return print(table())
    device = ranks.start()
    if look.plan:
        return plan_command.print_plan(config, argv)
    if look.check_rewards:
        return preview(config, device, given=parse(Config, [*argv, "--recipe="]))
    stem = f"{Path(config.data.dataset).stem}-{algorithm.name}"
    run.output_dir = ranks.from_first(
        run_folder(run.output_dir, stem) if ranks.rank() == 0 else None)
    with alone(run.output_dir):
        try:
            code = train(config, algorithm, device)
        except KeyboardInterrupt:
            progress.note(f"stopped at once. {checkpoint.how_to_resume(run.output_dir)}")
            code = 130
        except (RuntimeError, OSError, FloatingPointError) as error:
            raise in_one_sentence(error, run.output_dir) from None
        finally:
            from experiments.doctor import diagnosis  # of a run that does not learn

            for sentence in diagnosis(run.output_dir)[0] if ranks.rank() == 0 else ():
                progress.note(sentence)
    ranks.stop()
    return code


if __name__ == "__main__":
    run_program(main)
