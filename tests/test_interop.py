"""Any causal language model of transformers can be trained: other shapes, heads, tokenizers and
formats than the toy's."""

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from engine.base import files
from engine.base.errors import UserError
from engine.model import networks
from engine.model.decoding import ends_in_texts
from engine.model.loading import load_model
from engine.model.sampler import until_first_stop
from engine.model.sampler_interface import Completions
from engine.run import checkpoint
from train import main

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
MINE = """
def letters(completions, **columns):
    return [float(len(set(text))) for text in completions]
"""


def bytes_tokenizer(eos="<eos>", pad=None):
    """One token per byte, and one for EOS: GPT-2's and Llama 3's tokenizers without their
    merges."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"]
    tokenizer = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad)


def llama(**options):
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=4, **options))


def gpt2(**options):
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=96, **options))


DROPOUT = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
CASES = {  # shape, its options, tokenizer, dtype on disk, logits beyond the vocabulary
    "llama, untied, no pad, in bfloat16": (
        llama, {"tie_word_embeddings": False}, bytes_tokenizer, torch.bfloat16, 0,
    ),
    "llama, tied, pad is EOS": (
        llama, {"tie_word_embeddings": True}, lambda: bytes_tokenizer(pad="<eos>"), torch.float32,
        0,
    ),
    "gpt2, dropout, more logits than tokens": (gpt2, DROPOUT, bytes_tokenizer, torch.bfloat16, 64),
}


def write(folder, model, tokenizer):
    """Save a model as somebody else would have saved it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make(folder, name):
    """The folder of a tiny model with random weights."""
    shape, options, make_tokenizer, dtype, beyond = CASES[name]
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = shape(
        vocab_size=len(tokenizer) + beyond, bos_token_id=None, pad_token_id=None,
        eos_token_id=tokenizer.eos_token_id, initializer_range=0.2, **options)
    return write(folder, model.to(dtype), tokenizer)


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Two steps of GRPO. Returns the folder of the run, and the model and the tokenizer that it has
    trained."""
    (tmp_path / "mine.py").write_text(MINE)
    loaded = []
    monkeypatch.setattr(
        networks, "load_model",
        lambda *args, **how: loaded.append(load_model(*args, **how)) or loaded[-1],
    )

    def go(model):
        rows = [{"question": text, "answer": "1"}
                for text in ("3+4=?", "12-5+1=?", "9=?", "8+8=?")]
        (tmp_path / "questions.jsonl").write_text(files.as_lines(rows))
        assert main([
            "--model", model, "--dataset", str(tmp_path / "questions.jsonl"), "--rewards",
            f"{tmp_path / 'mine.py'}:letters", "--output_dir", str(tmp_path / "run"),
            "--algorithm", "grpo", "--group_size", "4", "--questions_per_step", "2",
            "--max_new_tokens", "12", "--lr", "1e-2", "--system_prompt", "1",
        ]) == 0
        model, tokenizer = loaded[0]
        return tmp_path / "run", model.to(CPU), tokenizer

    return go


@pytest.mark.parametrize("name", CASES)
def test_two_steps_train_it_and_the_checkpoint_is_the_trained_model(name, tmp_path, go):
    shape, options, *_ = CASES[name]
    source = make(tmp_path / "model", name)
    folder, model, tokenizer = go(source)
    assert [row["skipped_updates"] for row in files.read_lines(folder / "metrics.jsonl")] == [0, 0]
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert all((p != q).any() for p, q in zip(before.parameters(), model.parameters(), strict=True))
    assert not any(module.training and module.p for module in model.modules()
                   if isinstance(module, torch.nn.Dropout))
    saved = checkpoint.newest(folder)
    again = AutoModelForCausalLM.from_pretrained(saved)  # as anybody would load it
    ids = torch.arange(30).view(2, 15) % again.config.vocab_size
    assert again.dtype == torch.float32 and torch.equal(again(ids).logits, model(ids).logits)
    tied = options.get("tie_word_embeddings", shape is gpt2)
    assert ("lm_head.weight" in load_file(saved / "model.safetensors")) == (not tied)
    assert AutoTokenizer.from_pretrained(saved).get_vocab() == tokenizer.get_vocab()
    # off in our training, and still the model's own in the checkpoint
    assert {option: getattr(again.config, option) for option in options} == options


def test_a_token_beyond_the_vocabulary_says_nothing():
    """Many models have more logits than tokens, for speed: what is sampled there must not end the
    run."""
    tokenizer = bytes_tokenizer()
    tokens, length, cut = torch.tensor([[19, 300, 20]]), torch.tensor([3]), torch.tensor([True])
    drawn = Completions(tokens, length, cut, torch.zeros(1, 3), torch.ones(1, 3).bool())
    assert drawn.texts(tokenizer) == [tokenizer.decode([19]) + tokenizer.decode([20])]


def test_a_text_of_stop_is_found_in_a_text_that_the_tokenizer_would_clean_up():
    """It makes "." of " .", but the rewards see the text as it was written."""
    words = Tokenizer(models.WordLevel({"a": 0, " .": 1, " b": 2}, unk_token="a"))
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=True)
    tokens = torch.tensor([[0, 1, 2]])
    assert tokenizer.decode(tokens[0]) == "a. b"
    ends = ends_in_texts(tokens, tokenizer, [" ."])
    assert ends.tolist() == [[False, True, False]]
    drawn = until_first_stop(tokens, torch.zeros(tokens.shape), ends, 0)
    drawn.stop = [" ."]
    assert drawn.texts(tokenizer) == ["a"]


@pytest.mark.parametrize("message, tokens, eos", [
    ("no end-of-sequence token", 257, None), ("token 256", 100, "<eos>")])
def test_a_model_that_does_not_fit_its_tokenizer_is_refused(message, tokens, eos, tmp_path, go):
    model = llama(vocab_size=tokens, bos_token_id=None, eos_token_id=None)
    source = write(tmp_path / "model", model, bytes_tokenizer(eos=eos))
    with pytest.raises(UserError, match=message):
        go(source)
