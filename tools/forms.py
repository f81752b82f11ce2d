"""The completion that comes nearest to a form, and what it has in another way."""

MARKS = {  # of each form, in order
    "format_reward": ("<think>", "</think>", "<answer>", "</answer>"),
    "code_format": ("<think>", "</think>", "```python\n", "\n```"),
}


def nearest_miss(texts, marks):
    """(the completion that comes nearest to a form, what it has in another way)"""
    # the shortest of those with most marks: it has the fewest words outside of them
    nearest = max(texts, key=lambda text: (sum(mark in text for mark in marks), -len(text)))
    return nearest, difference(nearest, marks)


def difference(text, marks):
    """What a completion first has in another way than a form.

        >>> difference("<think>9 + 9</think> <answer>18", MARKS["format_reward"])
        "has no '</answer>' after '<answer>'"
    """
    rest, after = text, ""
    for mark in marks:
        _, found, rest = rest.partition(mark)
        if not found:
            return f"has no {mark!r}{after}"
        after = f" after {mark!r}"
    if rest:
        return f"has {rest!r:.40}{after}"
    return (f"has text before {marks[0]!r}, a mark twice, or something else than a newline between "
            f"{marks[1]!r} and {marks[2]!r}")
