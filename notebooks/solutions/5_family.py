"""Solution to the exercise of 5_family.ipynb."""


def weights_of_completions(lengths, L):
    token_mean = [n / sum(lengths) for n in lengths]
    constant = [n / (len(lengths) * L) for n in lengths]
    return token_mean, constant
