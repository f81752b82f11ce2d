"""mismatch.py: the sampler that errs on purpose says truly with which probability it has drawn."""

import torch

from engine.model.sampling import Sampling
from experiments.mismatch import page, wrong_by


def test_the_sampler_draws_from_the_mixture_and_reports_its_log_probability():
    """(1 − 0.2) π + 0.2 / 4, of π = 0.5, 0.3, 0.2, 0, drawn with 10,000 evenly spread numbers."""
    pi = torch.tensor([0.5, 0.3, 0.2, 0.0])
    u = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    token, logp = wrong_by(0.2)(pi.log().expand(10_000, 4), Sampling(48), u)
    mixture = torch.tensor([0.45, 0.29, 0.21, 0.05])
    shares = torch.bincount(token, minlength=4) / 10_000
    torch.testing.assert_close(shares, mixture, atol=2e-4, rtol=0)
    torch.testing.assert_close(logp, mixture.log()[token], atol=1e-5, rtol=0)


def test_the_page_has_a_row_for_each_way():
    figure = {"mean": 0.5, "std": 0.1}
    own = {name: figure for name in ("sampled", "greedy", "sampler", "gap")}
    where = {"command": "c", "date": "d", "processor": "p", "versions": {}}
    options = {"error": 0.05, "questions": 256, "seeds": 3}
    text = page({**where, "options": options, "ways": {"no correction": own}})
    assert "| no correction | 0.500 ± 0.100 |" in text and "probability 0.05" in text
