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
    gaps, rest = [], text
    for mark in marks:
        gap, found, rest = rest.partition(mark)
        if not found:
            after = f" after {marks[len(gaps) - 1]!r}" if gaps else ""
            return f"has no {mark!r}{after}"
        gaps.append(gap)
    if gaps[0]:
        return f"has {gaps[0]!r:.40} before {marks[0]!r}"
    if rest:
        return f"has {rest!r:.40} after {marks[3]!r}"
    if gaps[2] not in ("\n", "\n\n"):
        return f"has {gaps[2]!r:.40} in place of a newline between {marks[1]!r} and {marks[2]!r}"
    return "has a mark twice"
