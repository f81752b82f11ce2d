"""A schedule of your own: P falls during the run, so CPPO keeps more and more completions.

    torchrun train.py --hooks examples/my_schedule.py

With allocation, a step then asks fewer questions, too.
"""

FIRST, LAST = 0.875, 0.5  # P at the start and at the end


def schedule(step, progress):
    """The options of train.py that this step shall have; all others stay as the run has them.

    step: its number, from 1. progress: the share of the run that is over before it, 0 … 1.
    """
    return {"pruning_rate": FIRST + (LAST - FIRST) * progress}
