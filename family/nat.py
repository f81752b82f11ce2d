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


def prefix_chances(mask, *, share=0.0):
    """p_t: the chance of each token to be inside the random prefix of its completion.

    mask: (N, T) bool or 0/1, the tokens of the policy. Only these are counted. share: of each
    completion at least ⌈share · |o|⌉ tokens stay, and at least 1. Returns (N, T) float32, 1 outside
    of the mask.
    Example: a completion of 4 tokens has p = 1, ¾, ½ and ¼; with share ½ it is 1, 1, ⅔ and ⅓.
    """
    mask = mask.bool()
    lengths = mask.sum(1, keepdim=True)
    # m = ⌈share · |o|⌉. In floats 0.07 · 100 is 7.000000000000001: the 1e-9 lets m be 7
    shortest = (share * lengths.double() - 1e-9).ceil().float().clamp(min=1)
    # p_t = min(1, (|o| − t + 1) / (|o| − m + 1))
    after = lengths - mask.cumsum(1) + 1
    chances = (after / (lengths - shortest + 1).clamp(min=1)).clamp(max=1.0)
    return chances.masked_fill(~mask, 1.0)


def random_prefixes(mask, u, *, share=0.0):
    """Which tokens are inside the random prefix of each completion.

    mask, share: as of `prefix_chances`. u: (N, 1), uniform in [0, 1), one number for each
    completion. Returns (N, T) bool, False outside of the mask.
    """
    assert u.shape == (len(mask), 1), "u must be (N, 1), one number for each completion"
    mask = mask.bool()
    lengths = mask.sum(1, keepdim=True)
    # m = ⌈share · |o|⌉, as in `prefix_chances`
    shortest = (share * lengths.double() - 1e-9).ceil().float().clamp(min=1)
    # c is uniform on m … |o|
    cut = shortest + (u * (lengths - shortest + 1)).floor()
    return mask & (mask.cumsum(1) <= cut)


def prefix_factors(mask, u, *, share=0.0):
    """A factor of the loss weights, (N, T): 1/p_t (`prefix_chances`) inside of the random prefix
    (`random_prefixes`), and 0 outside."""
    return random_prefixes(mask, u, share=share) / prefix_chances(mask, share=share)
