"""Runs a whole training step of somebody else, and reads from the weights what the step did.

    step(policy, questions, sampler, reward)            a function of MINE.py; it returns nothing

The world around the step is so small that each of its numbers has a closed form:

    policy      a table θ: π(o_t) = softmax(θ[o_{t−1}] / temperature)[o_t]. Only the token before
                counts. Two words and the END are likely, all other tokens are not.
                policy(tokens (N, L)) → logits (N, L, 8). The updates are made by
                policy.optimizer, which is plain SGD.
    questions   three prompts, lists of tokens
    sampler     sampler(prompts, temperature) → one completion for each prompt, lists of tokens. It
                draws nothing: it hands out COMPLETIONS. sampler.group_size is G, sampler.longest
                the limit of a completion. A step with a temperature takes sampler.temperature.
    reward      reward(prompt, completion) → 1.0 or 0.0

After the step θ is compared with what it must be and, if it differs, with what known mistakes and
choices make of it.
"""

import itertools
from collections import Counter

import torch

PADDING, END, A, B, ASK, FIRST, SECOND, THIRD = range(8)
WORDS = "padding", "END", "a", "b", "ask", "question 1", "question 2", "question 3"
PROMPTS = [[ASK, FIRST], [ASK, ASK, SECOND], [ASK, ASK, ASK, THIRD]]
COMPLETIONS = {
    FIRST: [[A, END], [B, A, END], [B, B, A, END], [A, B, A, END]],
    SECOND: [[A, A, END], [B, END], [B, A, B, END], [A, B, END]],
    THIRD: [[B, A, END], [A, A, B, END], [A, END], [B, B, END]],
}
RIGHT = {FIRST: [1, 0, 0, 0], SECOND: [1, 1, 1, 0], THIRD: [0, 0, 1, 1]}
G, LONGEST, TEMPERATURE = 4, 6, 0.8
# With this rate a second update sees ratios other than 1, but none that a clip range of 0.2
# reaches. No gradient has a norm above 1, so a limit of 1 changes nothing.
RATE = 0.5

# What a step may do otherwise. The numbers in brackets are those of docs/conformance.md.
ROWS = "rows of a group are not one question"
MISTAKES = {
    "scored": {"at 1": "sampled at one temperature, scored at 1 [5]"},
    "trained": {"without END": "the last token, the EOS, is not trained on [4]",
                "END counted": "the last token, the EOS, is not trained on, but |o| counts it [4]"},
    "cut": {"averaged": "a mean of means over micro-batches [3]",
            "added": "the means of micro-batches are added up [3]"},
    "group": {"rows": f"{ROWS}: G consecutive rows are compared, whatever they answer [17]",
              "batch": "mean and std of the whole batch, not of each question's group [8]"},
    "compared": {"kept": "the advantages are taken after pruning, over the kept completions only"},
    "old": {"updated": "the old log-probabilities are those of the updated policy: the ratio is "
                       "always 1, and no clip ever acts [6]"},
    "weights": {"padded": "divided by the padded length, not by |o| [3]"},
}
CHOICES = {
    "std": {"population": "the population std", "none": "no division by the std, as in Dr. GRPO"},
    "weights": {"tokens": "a mean over all tokens, as in DAPO",
                "constant": "a sum over tokens, divided by a constant, as in Dr. GRPO"},
}
SAYS = {value: words for known in (MISTAKES, CHOICES) for row in known.values()
        for value, words in row.items()}
PROMPT = "the tokens of the prompt are trained on"
BEHIND = "padding is trained on: the logits behind the END or behind padding moved [3]"
MOMENTUM = ("an update without a signal: if all rewards are equal, the optimizer's momentum, or "
            "the KL, moves the weights")
# why a mistake cannot be seen
UNSEEN = {
    "scored": "it samples at temperature 1",
    "cut": "its micro-batches show no difference",
    "compared": "it prunes nothing",
    "old": "it makes one update",
    "padding": "it computes no padding",
}


def first_table():
    """θ before the first update: (8, 8) float64. Row: the token before. Column: the next token."""
    table = torch.full((8, 8), -30.0, dtype=torch.float64)
    table[:, [END, A, B]] = 0.3 * torch.arange(24.0, dtype=torch.float64).sin().view(8, 3)
    return table


class Policy(torch.nn.Module):
    """The table θ. seen: the tokens of each forward pass with a gradient, and None for an update.

    A step with an output head of its own computes `head` of `states` itself.
    """

    def __init__(self, momentum=0.0):
        super().__init__()
        self.head = torch.nn.Linear(8, 8, bias=False)  # its columns are the rows of θ
        self.head.weight.data = first_table().T.float()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=RATE, momentum=momentum)
        self.optimizer.register_step_post_hook(lambda *_: self.seen.append(None))
        self.seen = []

    def forward(self, tokens):
        return self.head(self.states(tokens))

    def states(self, tokens):
        """The tokens as one-hot vectors: (N, L, 8)."""
        if torch.is_grad_enabled():
            self.seen.append(tokens.tolist())
        return torch.nn.functional.one_hot(tokens, 8).to(self.head.weight.dtype)

    def table(self):
        return self.head.weight.detach().T.double()


class Sampler:
    """Hands out the completions of a question one after the other.

    asked: (question, number of the completion) of each row. temperatures: what it was asked at.
    """

    group_size, longest, temperature = G, LONGEST, TEMPERATURE

    def __init__(self):
        self.asked, self.temperatures = [], set()

    def __call__(self, prompts, temperature):
        self.temperatures.add(float(temperature))
        return [self.next(question_of(prompt)) for prompt in prompts]

    def extend(self, prompts, temperature, pad=PADDING):
        """For a step that calls `generate`: the prompts (N, L), which are padded with `pad`, with a
        completion behind each: (N, L + T)."""
        rows = prompts.tolist()
        drawn = self([[t for t in row if t not in (PADDING, pad)] for row in rows], temperature)
        longest = max(map(len, drawn))
        whole = [row + own + [pad] * (longest - len(own)) for row, own in zip(rows, drawn)]
        return torch.tensor(whole)

    def next(self, question):
        number = [q for q, _ in self.asked].count(question)
        self.asked.append((question, number))
        return [*COMPLETIONS[question][number % G]]


def question_of(tokens):
    return next(int(token) for token in tokens if int(token) in COMPLETIONS)


class Reward:
    """1.0 or 0.0, and always 0.0 without signal. strange: whether it was asked about a completion
    with another question than the one that it answers."""

    def __init__(self, signal=True):
        self.signal, self.strange = signal, False

    def __call__(self, prompt, completion):
        question = question_of(prompt)
        text = [int(token) for token in completion if int(token) in (A, B)]  # with or without END
        if [*text, END] not in COMPLETIONS[question]:
            self.strange = True
            return 0.0
        number = COMPLETIONS[question].index([*text, END])
        return float(self.signal and RIGHT[question][number])


# --- the closed form. reading: {what is done otherwise: how}; {} is the paper's step ---


def advantages(reading, asked, kept):
    """{(question, number): A}. asked: the rows as they were sampled. kept: those trained on."""
    rows = [row for row in asked if row in kept] if "compared" in reading else asked
    groups = {}
    for place, row in enumerate(rows):
        key = {"rows": place // G, "batch": "all"}.get(reading.get("group"), row[0])
        groups.setdefault(key, []).append(row)
    found = {}
    for group in groups.values():
        r = torch.tensor([RIGHT[q][i] for q, i in group], dtype=torch.float64)
        # A_i = (r_i − mean(r)) / std(r), and 0 if all rewards are equal
        A = r - r.mean()
        if A.any() and reading.get("std") != "none":
            A = A / r.std(correction=0 if reading.get("std") == "population" else 1)
        found |= dict(zip(group, A.tolist()))
    return found


def counts(reading, lengths):
    """How much each token of a completion counts: w_i of these completions."""
    N = len(lengths)
    weigh = {
        "tokens": lambda n: 1 / sum(lengths),
        "constant": lambda n: 1 / (N * LONGEST),
        "padded": lambda n: 1 / (N * max(lengths)),
    }
    own = lambda n: 1 / (N * n)  # w = 1/(N |o_i|)
    return [weigh.get(reading.get("weights"), own)(n) for n in lengths]


def tokens_of(reading, update):
    """[(the token before, the token, its row, w)] of an update: a list of micro-batches of rows."""
    found = []
    for rows in update if "cut" in reading else [sum(update, [])]:
        texts = [COMPLETIONS[question][number] for question, number in rows]
        end = -1 if "trained" in reading else None
        counted = None if reading.get("trained") == "END counted" else end
        share = counts(reading, [len(text[:counted]) for text in texts])
        for row, text, w in zip(rows, texts, share):
            w = w / len(update) if reading.get("cut") == "averaged" else w
            pairs = zip([row[0], *text], text[:end])
            found += [(before, token, row, w) for before, token in pairs]
    return found


def expected(reading, updates, asked, temperature, beta):
    """θ after the updates: (8, 8)."""
    T = 1.0 if "scored" in reading else temperature
    now = first = first_table()
    of_row = advantages(reading, asked, {row for rows in sum(updates, []) for row in rows})
    for update in updates:
        before, token, rows, w = zip(*tokens_of(reading, update))
        at = torch.tensor(before), torch.tensor(token)
        A, w = torch.tensor([of_row[row] for row in rows]), torch.tensor(w)
        log_pi, log_ref = (now / T).log_softmax(1), (first / T).log_softmax(1)
        log_old = log_pi if "old" in reading else log_ref  # π_ref is the first policy, too
        ratio = (log_pi - log_old)[at].exp()
        # J = Σ w (ρ A − β k3),   ∂J/∂ log π(o_t) = w (ρ A − β (1 − π_ref/π))
        upstream = w * (ratio * A - beta * (1 - (log_ref - log_pi)[at].exp()))
        # ∂ log π(o_t) / ∂θ[s, v] = (1[v = o_t] − π(v)) / T,   s = o_{t−1}
        slopes = (torch.nn.functional.one_hot(at[1], 8) - log_pi.exp()[at[0]]) / T
        # θ ← θ + rate · ∂J/∂θ
        now = now.index_add(0, at[0], RATE * upstream.unsqueeze(1) * slopes)
    return now


def readings():
    """Those with fewer mistakes first: none, one, two; then those with fewer choices."""
    def combinations(known, most):
        single = [{name: value} for name, row in known.items() for value in row]
        for n in range(most + 1):
            for some in itertools.combinations(single, n):
                if len({name for one in some for name in one}) == n:
                    yield {name: value for one in some for name, value in one.items()}

    for mistakes in combinations(MISTAKES, 2):
        for choices in combinations(CHOICES, 2):
            if not mistakes.keys() & choices.keys():
                yield mistakes | choices


def same(moved, other):
    """An eps beside the std may make an advantage smaller by less than 1/1000."""
    return bool((moved - other).abs().max() <= 1e-3 * other.abs().max())


# --- what was seen ---


def updates_of(seen):
    """A list for each update: its micro-batches, which are lists of rows (question, number)."""
    updates, parts = [], []
    for tokens in seen:
        if tokens is not None:
            parts.append([row_of(row) for row in tokens])
        elif parts:
            updates.append(parts)
            parts = []
    return updates


def row_of(tokens):
    """(question, number) of a row. Its last token may be missing, because nothing follows it."""
    place = next((i for i, token in enumerate(tokens) if token in COMPLETIONS), None)
    if place is None:
        raise ValueError(f"the policy computed a row without a question: {tokens}")
    question, text = tokens[place], tokens[place + 1:]
    text = text[: text.index(END) + 1] if END in text else text
    for number, completion in enumerate(COMPLETIONS[question]):
        if text in (completion, completion[:-1]):
            return question, number
    raise ValueError(f"the policy computed a row that nobody sampled: {tokens}")


def call(step, policy, reward):
    """Call the step. Returns (sampler, θ before the call)."""
    before, sampler = policy.table(), Sampler()
    step(policy, [[*prompt] for prompt in PROMPTS], sampler, reward)
    return sampler, before


# --- the verdict ---


def verdict(step, beta=0.0):
    """(sign, sentence, properties that hold, properties asked, why some were not, evidence)."""
    policy, later, reward = Policy(), Policy(momentum=0.9), Reward()
    try:
        sampler, start = call(step, policy, reward)
        call(step, later, Reward())
        _, before = call(step, later, Reward(signal=False))
        updates = updates_of(policy.seen)
    except BaseException as error:
        return nothing(f"it raises {type(error).__name__}: {error}".split("\n")[0])
    if not updates:
        return nothing("it makes no update with `policy` and `policy.optimizer`")
    if len(sampler.temperatures) > 1:
        return nothing(f"it samples at several temperatures: {sorted(sampler.temperatures)}")
    times = Counter(question for question, _ in sampler.asked)
    if [times[question] for question in COMPLETIONS] != [G] * 3:
        drawn = ", ".join(f"{times[q]} of {WORDS[q]}" for q in COMPLETIONS)
        return "✗", f"{ROWS}: G = 4 completions of each are needed [17]", 0, 1, "", [
            f"sampled: {drawn}"]
    if reward.strange:
        return "✗", f"{ROWS}: a completion was scored with another question [17]", 0, 1, "", []

    [temperature] = sampler.temperatures
    moved = policy.table() - start

    def by(reading):
        return expected(reading, updates, sampler.asked, temperature, beta) - start

    reading = next((reading for reading in readings() if same(moved, by(reading))), None)
    right = {name: value for name, value in (reading or {}).items()
             if value in CHOICES.get(name, ())}
    asked = {name for name, row in MISTAKES.items()
             if not all(same(by(right | {name: value}), by(right)) for value in row)}
    padded = any(END in row[:-1] for tokens in policy.seen if tokens for row in tokens)
    asked |= {"prompt", "signal"} | ({"padding"} if padded else set())

    wrong = [SAYS[value] for name, value in (reading or {}).items() if name not in right]
    wrong += [PROMPT] * bool(moved[ASK].any())
    wrong += [BEHIND] * bool(moved[[PADDING, END]].any() and not moved[ASK].any())
    if not reading and reading != {} and not wrong:
        wrong.append("no known mistake gives these weights")
    chosen = [SAYS[value] for value in right.values()]
    chosen += [MOMENTUM] * (not torch.equal(later.table(), before))
    left = "; ".join(words for name, words in UNSEEN.items() if name not in asked)
    of = len(MISTAKES) + 3
    left = f"{len(asked)} of {of} checked, because {left}" if left else ""
    held = len(asked) - len(wrong) - (MOMENTUM in chosen)
    found = (held, of, left)
    if wrong:
        return "✗", "; ".join(wrong + chosen), *found, [evidence(moved, by(right))]
    if chosen:
        return "≈", "; ".join(chosen), *found, []
    return ("◐", left, *found, []) if left else ("✓", "", *found, [])


def nothing(why):
    return "–", f"nothing could be checked: {why}", 0, 0, "", []


def evidence(moved, right):
    """The token behind which the logits differ most."""
    before = int((moved - right).abs().amax(1).argmax())
    token = int((moved - right)[before].abs().argmax())
    return (f"the logit of `{WORDS[token]}` behind `{WORDS[before]}` moved by "
            f"{moved[before, token]:.4f}, right is {right[before, token]:.4f}")
