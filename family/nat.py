"""NAT: Not All Tokens are needed (arXiv 2603.06619), with random prefixes.

Most of the time of an update goes into the tokens of long completions. NAT trains on a random
prefix of each completion. Each token inside counts the inverse of its chance to be inside (Horvitz
and Thompson, 1952), so the gradient is right on average, whatever gradient f_t a token has:

    c is uniform on m … |o|, with m = ⌈share · |o|⌉
    p_t = P(c ≥ t) = min(1, (|o| − t + 1) / (|o| − m + 1))
    E_c Σ_{t ≤ c} f_t / p_t = Σ_t f_t

No token depends on later tokens, so the tokens that are left out are not computed. CPPO prunes
completions, and NAT prunes within those that CPPO keeps: both work together.

The divisor of the loss stays the one of the whole completion: |o|, not c. The mean is right for a
loss that is a sum over tokens. GSPO's ratio and PPO's advantages need every token, so they do not
fit. The price is variance: with share 0 the last token is rarely inside, and then it counts |o|
times.

We could read only the abstract and summaries of the paper. It also draws single tokens, which saves
less. How it draws the prefix may differ from ours.
"""

from grpo import check_shapes


def prefix_chances(mask, *, share=0.0):
    """p_t: the chance of each token to be inside the random prefix of its completion.

    mask: (N, T) bool or 0/1, the tokens of the policy. Only these are counted. share: of each
    completion at least ⌈share · |o|⌉ tokens stay, and at least 1. Returns (N, T) float32, 1 outside
    of the mask. Raises ValueError if share is outside 0 … 1.
    Example: a completion of 4 tokens has p = 1, ¾, ½ and ¼; with share ½ it is 1, 1, ⅔ and ⅓.
    """
    mask, lengths, shortest = _counted(mask, share)
    # p_t = min(1, (|o| − t + 1) / (|o| − m + 1))
    after = lengths - mask.cumsum(1) + 1
    chances = (after / (lengths - shortest + 1).clamp(min=1)).clamp(max=1.0)
    return chances.masked_fill(~mask, 1.0)


def random_prefixes(mask, u, *, share=0.0):
    """Which tokens are inside the random prefix of each completion.

    mask, share: as of `prefix_chances`. u: (N, 1), uniform in [0, 1), one number for each
    completion. Returns (N, T) bool, False outside of the mask. Raises ValueError for a u of another
    shape.
    """
    mask, lengths, shortest = _counted(mask, share)
    check_shapes("the lengths, u", lengths, u)
    # c is uniform on m … |o|
    cut = shortest + (u * (lengths - shortest + 1)).floor()
    return mask & (mask.cumsum(1) <= cut)


def prefix_factors(mask, u, *, share=0.0):
    """A factor of the loss weights: 1/p_t inside of the random prefix, and 0 outside. (N, T)"""
    return random_prefixes(mask, u, share=share) / prefix_chances(mask, share=share)


def _counted(mask, share):
    """(mask as bool, |o|: (N, 1), m: (N, 1))."""
    if not 0 <= share <= 1:
        raise ValueError(f"share must lie in 0 … 1, not {share}")
    mask = mask.bool()
    lengths = mask.sum(1, keepdim=True)
    # m = ⌈share · |o|⌉. In floats 0.07 · 100 is 7.000000000000001: the 1e-9 lets m be 7
    shortest = (share * lengths.double() - 1e-9).ceil()
    return mask, lengths, shortest.float().clamp(min=1)
