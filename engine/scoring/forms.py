"""The completion that comes nearest to a form, and what it has in another way."""

MARKS = {  # of each form, in order
    "format_reward": ("<think>", "</think>", "<answer>", "</answer>"),
    "code_format": ("<think>", "</think>", "```python\n", "\n```"),
}


def nearest_miss(name, texts):
    """([the completion that comes nearest to the form of the reward `name`], a sentence that says
    what differs). For a form that is not known here: (texts, "")."""
    marks = MARKS.get(name.removeprefix("soft_"))
    if not marks:
        return texts, ""
    # the shortest of those that are equally near: it has the fewest words outside of the marks
    nearest = min(texts, key=lambda text: (miss(text, marks)[0], len(text)))
    return [nearest], f" The nearest completion {miss(nearest, marks)[1]}."


def miss(text, marks):
    """(how many marks of a form are missing in a completion, the first difference).

        >>> miss("<think>9 + 9</think> <answer>18", MARKS["format_reward"])
        (1, "has no '</answer>' after '<answer>'")
    """
    gaps, rest = [], text
    for mark in marks:
        gap, found, rest = rest.partition(mark)
        if not found:
            after = f" after {marks[len(gaps) - 1]!r}" if gaps else ""
            return len(marks) - len(gaps), f"has no {mark!r}{after}"
        gaps.append(gap)
    if gaps[0]:
        return 0, f"has {gaps[0]!r:.40} before {marks[0]!r}"
    if rest:
        return 0, f"has {rest!r:.40} after {marks[3]!r}"
    if gaps[2] not in ("\n", "\n\n"):
        return 0, f"has {gaps[2]!r:.40} in place of a newline between {marks[1]!r} and {marks[2]!r}"
    return 0, "has a mark twice"
