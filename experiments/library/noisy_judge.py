"""A judge that errs: some verdicts of toy_accuracy are turned round. And what CPPO keeps of them.

    torchrun train.py --rewards toy_accuracy:0 experiments/library/noisy_judge.py:turned_30 \
        --hooks experiments/library/noisy_judge.py
"""

import random

from rewards import toy_accuracy


def turned(rate, of=(True, False)):
    """toy_accuracy, with each verdict turned round with the chance `rate`.

    of: whether this happens to right answers, to wrong ones, or to both.
    """

    def judge(completions, question, answer, **columns):
        verdicts = []
        for i, right in enumerate(toy_accuracy(completions, answer)):
            # the same text of another place in the group is judged anew
            errs = random.Random(f"{i} {question[i]} {completions[i]}").random() < rate
            if errs and bool(right) in of:
                right = 1.0 - right
            verdicts.append(right)
        return verdicts

    return judge


turned_0 = turned(0.0)
turned_30 = turned(0.3)
false_right_30 = turned(0.3, of=(False,))  # wrong answers that are called right
false_wrong_30 = turned(0.3, of=(True,))


def metrics(step):
    """Shares of wrong verdicts: among all completions, among the kept ones, in Σ|A| of these. The
    share of A < 0 among the kept ones. The mean verdict.

    The first reward of the run is the truth, the second one the verdict.
    """
    truth, verdict = step.rollout.rewards[:2]
    wrong = (truth != verdict).flatten().float()
    advantages = step.advantages.flatten()[step.kept]
    weights = advantages.abs()
    kept = wrong[step.kept]
    return {  # NaN if nothing is kept
        "wrong": wrong.mean().item(),
        "wrong_kept": kept.mean().item(),
        "wrong_weight": ((weights * kept).sum() / weights.sum()).item(),
        "kept_negative": (advantages < 0).float().mean().item(),
        "verdict": verdict.mean().item(),
    }
