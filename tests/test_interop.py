"""Any causal language model of transformers can be trained: other shapes, heads, tokenizers and
formats than the toy's."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from engine.base.errors import UserError
from engine.model import networks
from engine.model.loading import load_model
from engine.model.logprobs import completion_logprobs
from engine.model.sampling import Completions, Sampling, sample, stop_tokens
from engine.run import checkpoint
from engine.tasks import toy_model
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


def bytes_tokenizer(eos="<eos>", pad=None, template=None):
    """One token per byte, and one for EOS: GPT-2's and Llama 3's tokenizers without their
    merges."""
    vocabulary = {
        token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, chat_template=template
    )


def qwen2(vocab_size, **options):
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=vocab_size, **SIZES, num_key_value_heads=2, **options)
    )


def llama(vocab_size, **options):
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab_size, **SIZES, num_key_value_heads=4, **options)
    )


def gpt2(vocab_size, **options):
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=96, **options)
    )


DROPOUT = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
CASES = {  # shape, its options, tokenizer, its options, dtype on disk, logits beyond the vocabulary
    "qwen2, tied, the toy's tokenizer": (
        qwen2, {"tie_word_embeddings": True}, toy_model.make_tokenizer, {}, torch.float32, 0,
    ),
    "qwen2, untied, in bfloat16": (
        qwen2, {"tie_word_embeddings": False}, bytes_tokenizer, {}, torch.bfloat16, 0,
    ),
    "llama, untied, no pad, no template": (
        llama, {"tie_word_embeddings": False}, bytes_tokenizer, {}, torch.float32, 0,
    ),
    "llama, tied, pad is EOS": (
        llama, {"tie_word_embeddings": True}, bytes_tokenizer, {"pad": "<eos>"}, torch.float32, 0,
    ),
    "gpt2, dropout, in bfloat16": (gpt2, DROPOUT, bytes_tokenizer, {}, torch.bfloat16, 0),
    "gpt2, more logits than tokens": (
        gpt2, {}, bytes_tokenizer, {"template": "{{ messages[-1]['content'] }}="}, torch.float32,
        64,
    ),
}


def make(folder, name):
    """The folder of a tiny model with random weights, as somebody else would have saved it."""
    shape, options, make_tokenizer, words, dtype, beyond = CASES[name]
    torch.manual_seed(0)
    tokenizer = make_tokenizer(**words)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    return write(
        folder, shape(len(tokenizer) + beyond, **ids, initializer_range=0.2, **options).to(dtype),
        tokenizer,
    )


def write(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Two steps of GRPO. Returns the folder of the run, and the model and the tokenizer that it has
    trained."""
    (tmp_path / "mine.py").write_text(MINE)
    loaded = []
    monkeypatch.setattr(
        networks, "load_model", lambda *args: loaded.append(load_model(*args)) or loaded[-1]
    )

    def go(model, *questions):
        rows = [
            {"question": text, "answer": "1"}
            for text in questions or ("3+4=?", "12-5+1=?", "9=?", "8+8=?")
        ]
        (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert (
            main(
                [
                    "--model", model, "--dataset", str(tmp_path / "questions.jsonl"), "--rewards",
                    f"{tmp_path / 'mine.py'}:letters", "--output_dir", str(tmp_path / "run"),
                    "--algorithm", "grpo", "--group_size", "4", "--questions_per_step", "2",
                    "--max_new_tokens", "12", "--lr", "1e-2", "--system_prompt", "1",
                ]
            )
            == 0
        )
        model, tokenizer = loaded[0]
        return tmp_path / "run", model.to(CPU), tokenizer

    return go


@pytest.mark.parametrize("name", CASES)
def test_two_steps_train_it_and_the_checkpoint_is_the_trained_model(name, tmp_path, go):
    shape, options, *_ = CASES[name]
    source = make(tmp_path / "model", name)
    folder, model, tokenizer = go(source)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(
        row["loss"] is not None and row["skipped_updates"] == 0 for row in rows
    )
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert all((p != q).any() for p, q in zip(before.parameters(), model.parameters(), strict=True))
    assert not any(
        module.training and module.p
        for module in model.modules()
        if isinstance(module, torch.nn.Dropout)
    )

    saved = checkpoint.newest(folder)
    again = AutoModelForCausalLM.from_pretrained(saved)  # as anybody would load it
    ids = torch.arange(30).view(2, 15) % again.config.vocab_size
    assert again.dtype == torch.float32 and torch.equal(again(ids).logits, model(ids).logits)
    tied = options.get("tie_word_embeddings", shape is gpt2)
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == tied
    assert ("lm_head.weight" in load_file(saved / "model.safetensors")) == (not tied)
    assert AutoTokenizer.from_pretrained(saved).get_vocab() == tokenizer.get_vocab()
    assert again.config.vocab_size == before.config.vocab_size
    for option, value in (options if shape is gpt2 else {}).items():
        # off in our training, and still the model's own in the checkpoint
        assert getattr(again.config, option) == value


@pytest.mark.parametrize("name", CASES)
def test_sampled_log_probabilities_are_the_scored_ones(name, tmp_path):
    model, tokenizer = load_model(make(tmp_path / "model", name), CPU)
    # of different lengths: two are padded, with EOS where there is no pad
    prompts = tokenizer(["3+4=?", "12-5+1=?", "9=?"]).input_ids
    drawn = sample(
        model, prompts, 8, Sampling(12), stop_ids=[*stop_tokens(model, tokenizer), *range(5, 20)],
        pad_id=tokenizer.pad_token_id,
        generator=torch.Generator().manual_seed(0),
    )
    assert not drawn.truncated.all()  # some have ended, and left the batch
    scored = completion_logprobs(
        model, [p for p in prompts for _ in range(8)], drawn.tokens, drawn.lengths
    )
    torch.testing.assert_close(scored, drawn.logp, rtol=1e-4, atol=1e-4)
    assert all(isinstance(text, str) for text in drawn.texts(tokenizer))


def test_a_token_beyond_the_vocabulary_says_nothing():
    """Many models have more logits than tokens, for speed: what is sampled there must not end the
    run."""
    tokenizer = bytes_tokenizer()
    drawn = Completions(
        torch.tensor([[19, 300, 20]]), torch.tensor([3]), torch.tensor([True]), torch.zeros(1, 3)
    )
    assert drawn.texts(tokenizer) == [tokenizer.decode([19]) + tokenizer.decode([20])]


def test_the_completion_stays_within_gpt2s_context(tmp_path, go):
    """Of 96 positions 12 are for the completion, so a prompt has at most 84 bytes, 20 of which
    stand around the question."""
    folder, model, _ = go(
        make(tmp_path / "model", "gpt2, dropout, in bfloat16"), *("1" * n for n in (10, 64, 65, 80))
    )
    assert model.config.n_positions == 96
    notes = json.loads((folder / "summary.json").read_text())["notes"]
    assert any("skipped 2 of 4" in note and "longer than 84 tokens" in note for note in notes)
    assert any("no chat template: prompts are plain text" in note for note in notes)


IDS = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
SMALL = {
    "vocab_size": 257, "d_model": 32, "num_layers": 1, "num_heads": 2, "encoder_layers": 1,
    "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_ff": 32, "d_kv": 16,
}


@pytest.mark.parametrize("message, model, eos", [
    ("has no end-of-sequence token, so no completion would end", lambda: llama(257, bos_token_id=None, eos_token_id=None), None),
    ("writes token 256, and the model has embeddings for 100 only", lambda: llama(100, bos_token_id=None, eos_token_id=None), "<eos>"),
    ("is an encoder-decoder", lambda: T5ForConditionalGeneration(T5Config(**SMALL)), "<eos>"),
    # its decoder would load
    ("is an encoder-decoder", lambda: BartForConditionalGeneration(BartConfig(**SMALL)), "<eos>"),
    ("lack lm_head.weight: name a complete causal language model",
     lambda: Qwen2ForSequenceClassification(Qwen2Config(vocab_size=257, num_labels=1, **SIZES, num_key_value_heads=2, **IDS)), "<eos>"),
    ("keeps no keys and values",
     lambda: MambaForCausalLM(MambaConfig(vocab_size=257, hidden_size=32, num_hidden_layers=1, **IDS)), "<eos>"),
], ids=["no EOS", "too few embeddings", "T5", "BART", "a classifier", "Mamba"])
def test_what_cannot_be_trained_is_one_sentence(message, model, eos, tmp_path, go):
    source = write(tmp_path / "model", model(), bytes_tokenizer(eos=eos))
    with pytest.raises(UserError, match=message) as error:
        go(source)
    assert "\n" not in str(error.value)
