"""engine/run/shapes.py: the shapes of models, without their weights."""

import pytest
from transformers import Qwen2Config

from engine.base.errors import UserError
from engine.run.shapes import PUBLISHED, skeleton

pytestmark = pytest.mark.slow

PARAMETERS = {  # as published on the hub; tied weights count once
    "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688, "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920, "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096, "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B": 1_235_814_400, "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008, "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_shape_has_as_many_parameters_as_published(name):
    assert set(PARAMETERS) == set(PUBLISHED)
    for variant in (name, f"{name}-Instruct", f"{name}-Base"):
        network = skeleton(variant)
        assert all(p.is_meta for p in network.parameters())
        assert network.num_parameters() == PARAMETERS[name]


def test_the_toy_has_the_model_of_its_data_set():
    base, code = (skeleton("toy", dataset).config.vocab_size for dataset in ("toy", "toy_code"))
    assert base < code < 50


def test_the_model_of_a_run_is_its_newest_checkpoint(tmp_path):
    for step, size in (("000050", 32), ("000100", 64)):
        shape = Qwen2Config(vocab_size=10, hidden_size=size, num_hidden_layers=1)
        shape.save_pretrained(tmp_path / f"checkpoint-{step}")
    # the own options of an older run
    (tmp_path / "config.json").write_text('{"algorithm": "cppo"}')
    assert skeleton(str(tmp_path)).config.hidden_size == 64


def test_a_model_whose_config_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in (str(tmp_path), "me/none"):
        with pytest.raises(UserError, match=name):
            skeleton(name)
