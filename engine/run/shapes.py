"""The published shapes of the usual models, so that their memory can be planned without a
network."""

KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size", "tie_word_embeddings", "max_position_embeddings",
)
PUBLISHED = {  # from each model's config.json on the hub: the model type, and the KEYS
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151_936, True, 32_768),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151_936, True, 32_768),
    "Qwen/Qwen2.5-3B": ("qwen2", 2048, 36, 16, 2, 11_008, 151_936, True, 32_768),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 28, 28, 4, 18_944, 152_064, False, 32_768),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 28, 16, 8, 3072, 151_936, True, 40_960),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 28, 16, 8, 6144, 151_936, True, 40_960),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 36, 32, 8, 9728, 151_936, True, 40_960),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 12_288, 151_936, False, 40_960),
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 16, 32, 8, 8192, 128_256, True, 131_072),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 28, 24, 8, 8192, 128_256, True, 131_072),
    "HuggingFaceTB/SmolLM2-135M": ("llama", 576, 30, 9, 3, 1536, 49_152, True, 8192),
    "HuggingFaceTB/SmolLM2-360M": ("llama", 960, 32, 15, 5, 2560, 49_152, True, 8192),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", 2048, 24, 32, 32, 8192, 49_152, True, 8192),
}


def published(name):
    """The config of a model of the table, or of its -Instruct or -Base; None: the table does not
    have it."""
    from transformers import AutoConfig

    row = PUBLISHED.get(name.removesuffix("-Instruct").removesuffix("-Base"))
    if row is None:
        return None
    # of the other models: hidden size / heads
    head = {"head_dim": 128} if row[0] == "qwen3" else {}
    return AutoConfig.for_model(row[0], **dict(zip(KEYS, row[1:])), **head)
