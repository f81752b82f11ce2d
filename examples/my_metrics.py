"""Metrics of your own: in metrics.jsonl and in curves.png, as custom/NAME.

    torchrun train.py --hooks examples/my_metrics.py
"""


def metrics(step):
    """{name: number} of a step, on this device.

    step: a Step of loop/records.py, with the rollout (what was sampled), the advantages (Q, G), the
    rows of the kept completions, and the metrics that are logged anyway.
    """
    texts = step.rollout.texts
    thinking = sum("<think>" in text for text in texts) / len(texts)
    lengths = step.rollout.lengths.flatten().float()
    kept = lengths[step.kept]
    return {
        "thinking": thinking,
        # do the kept completions differ in length from all that were sampled?
        "length_of_kept": (kept.mean() / lengths.mean()).item() if len(kept) else 1.0,
    }
