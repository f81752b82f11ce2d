"""A pruning rule of the user's own: --keep FILE.py:FUNCTION."""

import copy

import torch

from engine.base.errors import UserError, one_line


def own_rule(function, name):
    """A keep rule of the user's own. What it returns is checked: wrong rows would go unnoticed.

    It gets copies: what it changes in them changes nothing in the step. name: of the rule, for the
    messages.
    """

    def keep(rollout, advantages, k):
        n = advantages.numel()
        try:
            returned = function(copy.deepcopy(rollout), advantages.clone(), k)
            pair = isinstance(returned, tuple)
            rows, changed = returned if pair else (returned, returned)
            rows = torch.as_tensor(rows).cpu()
            changed = torch.as_tensor(changed).to("cpu", torch.float32)
        except (Exception, SystemExit) as error:
            raise UserError(f"--keep {name} failed: {one_line(error)}.") from error
        if not are_rows(rows, n) or changed.shape != rows.shape or not changed.isfinite().all():
            raise UserError(
                f"--keep {name} must return rows of the batch, whole numbers from 0 to {n - 1} and "
                "each once, as cppo.batch_rows makes them; or such rows and one finite advantage "
                "for each.")
        rows, order = rows.long().sort()
        return (rows, changed[order]) if pair else rows

    return keep


def are_rows(rows, n):
    """Whether a tensor holds some of the numbers 0 … n − 1, each at most once."""
    numbers = rows.flatten().tolist()
    if rows.dtype != torch.int64 and numbers:  # for torch an empty list is float32
        return False
    return rows.dim() == 1 and len(set(numbers)) == len(numbers) and set(numbers) <= set(range(n))
