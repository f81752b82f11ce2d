"""What the numbers of a run mean: those of each step, and those of the whole run.

    python -m engine.report.meanings        prints them
"""

import signal
import textwrap

# {which file, and what of it: {name: meaning}}
MEANINGS = {
    "metrics.jsonl, look first at these": {
        "accuracy":
            "share of the completions whose first reward is above 0. Completions to which it does "
            "not apply (None) are left out. If the first reward is your own and not only right or "
            "wrong, accuracy, all_right and all_wrong are null",
        "reward": "mean of the weighted sum of the rewards",
        "reward/NAME": "mean of this reward, without its weight",
        "length": "mean number of tokens that the policy wrote in a completion",
        "truncated": "share of the completions that were cut off at --max_new_tokens",
        "frac_reward_zero_std":
            "share of the questions whose answers all got the same reward: nothing to learn from "
            "these. At 1 the step makes no update (PPO still does)",
        "entropy":
            "minus the mean log-probability of the sampled tokens: an estimate of the entropy of a "
            "token, in nats",
        "kl":
            "k3 estimate of KL(π_θ ‖ π_ref) on the kept completions, in nats, mean over the "
            "updates. 0 without a reference (--beta 0 without --stop_kl)",
    },
    "metrics.jsonl, what was sampled": {
        "step": "number of the step, from 1",
        "questions": "questions that were taken",
        "completions": "completions that were sampled",
        "kept": "completions that were trained on",
        "tokens_generated":
            "tokens of all completions that the policy wrote (not a tool's), EOS included",
        "tokens_trained": "the same of the kept ones; with --min_prefix of their prefixes",
        "tokens_without_logp":
            "tokens whose log-probability the sampler did not report (NaN), normally 0. entropy "
            "and mixed_groups leave them out; --sampler_correction gives them the weight 1",
        "rollouts": "how often the step sampled: 1, or more with DAPO's dynamic sampling",
        "tool_calls":
            "how often the policy reads what a tool wrote and writes on, per completion",
        "mixed_groups":
            "0: every group holds one question (vLLM: nearly 0). Above 0: questions were mixed "
            "up. (How it knows: two completions that begin alike must have the same "
            "log-probabilities there.)",
    },
    "metrics.jsonl, the rewards": {
        "all_right": "share of the questions whose completions are all right. A healthy run ends "
                     "with many",
        "all_wrong": "share of the questions whose completions are all wrong. A collapsed run ends "
                     "with many",
        "kept_negative":
            "share of A < 0 among the kept completions. GRPO's advantages have the sum 0 in each "
            "group, the kept ones do not: if few of them are negative, nothing pushes back. PPO: "
            "share of scores below 0",
        "frac_reward_zero_std/NAME":
            "share of the questions for which this reward is the same for all completions. If the "
            "first reward rarely differs but another one does, the policy learns the other one, "
            "however small its weight, because most algorithms divide by the std",
        "answer_not_found":
            "share of the completions in which the first reward finds no answer: no number "
            "(number_accuracy), no program (code_accuracy, code_runs), or none of the forms of "
            "docs/rewards.md (all others, also a reward of your own)",
        "reward_failures": "how often a reward function raised an error or hung, per completion",
        "verdict_timeouts":
            "share of the completions on which math_accuracy ran out of time (5 s) or memory. They "
            "count as wrong. Each such answer costs about 9 s, one after the other",
    },
    "metrics.jsonl, the updates (a step without an update has only lr)": {
        "loss": "minus the objective, mean over the updates",
        "value_loss": "loss of PPO's critic, mean over the updates",
        "grad_norm": "length of the gradient before it is scaled down to at most 1",
        "lr": "learning rate",
        "approx_kl":
            "k3 estimate of KL(π_old ‖ π_θ): how far the updates moved the policy from the one "
            "that sampled, in nats. Mean over the updates, also the first one, which has 0; "
            "--target_kl tests each update by itself",
        "clip_fraction":
            "share of the tokens whose gradient the clip takes away, each with its weight in the "
            "loss",
        "ratio_mean": "mean of the ratio ρ = π_θ / π_old",
        "ratio_max": "largest ratio",
        "entropy_trained": "the policy's exact entropy at the tokens trained on, in nats",
        "sampler_logp_diff":
            "mean difference between a token's log-probability in the sampler and in the update, "
            "for the same policy",
        "sampler_logp_diff_max": "the largest such difference",
        "skipped_updates":
            "updates that were skipped, because the loss or the gradient was not finite",
    },
    "metrics.jsonl, seconds on the first device": {
        "seconds/generate": "of sampling",
        "seconds/score": "of the rewards",
        "seconds/logprobs":
            "of the log-probabilities that the updates need (of the reference and of π_old); with "
            "PPO also of the critic's values",
        "seconds/update": "of the updates",
        "seconds/total": "of the whole step",
    },
    "metrics.jsonl, only with --eval_every, --hooks or a loss of your own": {
        "eval_accuracy": "greedy accuracy on the questions of --eval_every",
        "eval_reward": "in its place if accuracy is null: their mean reward",
        "eval_length": "mean number of tokens of these answers",
        "custom/NAME":
            "number of a function of your own. Of deepseek_v32: masked_fraction, the share of the "
            "tokens in completions with A < 0 that the policy has made unlikely",
    },
    "samples.jsonl, the first question of each step": {
        "question": "its text",
        "answer": "its gold answer",
        "prompt": "what the model sees",
        "completions":
            "of each its text (completion), reward, advantage, whether it was kept, whether its "
            "first reward is above 0 (correct), and why its program failed (error)",
    },
    "summary.json, at the end of a run": {
        "algorithm": "name of the algorithm",
        "k": "completions that are kept per question",
        "before": "the evaluation before training; empty if nothing is evaluated",
        "after":
            "the same after training. Each has greedy and sampled: accuracy (or reward if measure "
            "says so), 95 % intervals, mean length, share truncated, number of questions, samples "
            "per question. It also has the seconds of the sampled part, and examples: 3 questions "
            "with answers",
        "step": "steps that were made",
        "seconds": "of all steps",
        "phases": "seconds of each phase, added up over the steps",
        "per_step": "questions of the last step, over all devices and after allocation",
        "position": "questions that were taken so far",
        "devices": "devices at the start of the run, by which the questions of a step are counted",
        "steps_without_signal": "steps without an update, because there was nothing to learn",
        "skipped_updates": "as in metrics.jsonl, added up over the steps",
        "skipped_in_a_row": "how many of the last updates were skipped one after the other",
        "hook_failures": "steps in which the function metrics of --hooks failed",
        "skipped_questions":
            "questions that were left out: the prompt is longer than --max_prompt_tokens, or "
            "something in the row is empty",
        "recent_kl": "kl of the last 4 steps with an update: --stop_kl tests their mean",
        "source": "model that the run started from",
        "data": "fingerprint of the questions, the system prompt and the chat template",
        "data_form": "form of this fingerprint, by which a resume knows runs of other versions",
        "prompt": "fingerprint of the first prompt, which may change with the day",
        "notes": "what the run noted at its start, and why --stop_kl ended it",
        "checkpoint": "folder of the trained model",
        "best": "step and greedy accuracy of the best checkpoint of --eval_every",
        "chosen_on":
            "the questions on which it was chosen. A model that is chosen on test questions looks "
            "better on them than it is",
        "evaluation_seconds": "seconds of the evaluations of --eval_every",
        **dict.fromkeys(
            ("questions", "completions", "kept", "tokens_generated", "tokens_trained",
             "tokens_without_logp"),
            "as in metrics.jsonl, added up over the steps"),
    },
}


def in_words():
    """The tables as text of 100 columns."""
    lines = []
    for title, table in MEANINGS.items():
        lines += ["", title]
        for name, meaning in table.items():
            head = f"  {name:26}"
            lines += textwrap.wrap(meaning, 100, initial_indent=head, subsequent_indent=" " * 28)
    return "\n".join(lines[1:])


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # … | head
    print(in_words())
