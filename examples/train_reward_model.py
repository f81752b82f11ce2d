"""A reward model from people's marks, for examples/my_reward_model.py.

    python examples/train_reward_model.py --model MODEL --marks marks.jsonl --output judge
    export REWARD_MODEL=judge
    torchrun train.py --dataset questions.jsonl --rewards examples/my_reward_model.py:judged

A row of marks.jsonl is {"question": …, "chosen": …, "rejected": …}: a person has compared two
answers. Or it is {"question": …, "completion": …, "stars": 1 … 5}: a person has marked one answer.
MODEL may be a causal model or an encoder (BERT, DeBERTa). A tenth of the marks is held out.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from my_reward_model import as_read, scores_of
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer

PAIR, STARS = {"question", "chosen", "rejected"}, {"question", "completion", "stars"}


def read_marks(path):
    """The rows of a file, in a random order. All are pairs, or all have stars."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    if not any(all(kind <= set(row) for row in rows) for kind in (PAIR, STARS)) or len(rows) < 20:
        raise SystemExit(f"{path}: at least 20 rows with {PAIR}, or all with {STARS}, are needed.")
    random.Random(1).shuffle(rows)
    return rows


def errors_of(model, tokenizer, rows):
    """Of each mark: its stars less the score, or the worse answer's score less the better one's."""
    def score(column):
        answers = [as_read(tokenizer, row["question"], row[column]) for row in rows]
        return scores_of(model, tokenizer, answers)

    if "stars" in rows[0]:
        stars = torch.tensor([float(row["stars"]) for row in rows], device=model.device)
        return stars - 3 - score("completion")  # three stars are a score of 0
    return score("rejected") - score("chosen")


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--model", "--marks", "--output"):
        parser.add_argument(name, required=True)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args(argv)
    rows = read_marks(options.marks)
    held_out, rows = rows[: len(rows) // 10], rows[len(rows) // 10 :]
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model, truncation_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=1)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    model.to("cuda" if torch.cuda.is_available() else "cpu").train()
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    pairs = "chosen" in rows[0]
    batches = [rows[i : i + 16] for i in range(0, len(rows), 16)] * options.epochs
    for batch in tqdm(batches):
        errors = errors_of(model, tokenizer, batch)
        # pairs: −log σ(r_chosen − r_rejected), as in the model of Bradley and Terry
        losses = F.softplus(errors) if pairs else errors.square()
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.eval()
        errors = torch.cat([errors_of(model, tokenizer, [row]) for row in held_out])
    if pairs:
        print(f"Held-out pairs in the right order: {(errors < 0).float().mean():.0%}")
    else:
        print(f"Held-out marks: the score is off by {errors.abs().mean():.2f} stars.")
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main(sys.argv[1:])
