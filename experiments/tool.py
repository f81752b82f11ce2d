"""A sampler with a tool that breaks the contract in one point, for the table `tool` of
reproduce.py."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.model.logprobs import completion_mask
from examples.my_tool import WithCalculator


class TrainsOnResults(WithCalculator):
    """The tool's tokens are in the mask, as if the policy had written them."""

    def sample(self, *arguments):
        drawn = super().sample(*arguments)
        return replace(drawn, mask=completion_mask(drawn.tokens, drawn.lengths))


if __name__ == "__main__":
    print(__doc__)
