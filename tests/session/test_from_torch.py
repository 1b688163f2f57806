"""LLM.from_torch: the module itself is the oracle; memory is shared and kept alive."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file

import helm
import small_models
from device_profiles import fast_accelerator
from helm.model.hub import bundled_model
from helm.model.torch_module import module_config, module_weights

PROMPT = "Once upon a time"


def torch_logits(module: Any, tokens: list[int]) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = module(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


def assert_same(ours: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    assert ours.shape == expected.shape
    scale = float(np.abs(expected).max())
    assert scale > 0
    worst = float(np.abs(ours - expected).max())
    assert worst <= 2e-5 * scale, f"{worst} against values up to {scale}"


@pytest.mark.parametrize("name", sorted(small_models.CASES))
def test_from_torch_takes_every_family(name: str) -> None:
    module = small_models.make_model(name)
    expected = torch_logits(module, small_models.PROMPT)
    with helm.LLM.from_torch(module, kv_dtype="f32") as llm:
        assert_same(llm.logits(small_models.PROMPT), expected)


def test_from_torch_leaves_experts_where_they_lie() -> None:
    module = small_models.make_model("mixtral")
    weights = module_weights(module, module_config(module))
    own, at = module.model.layers[0].mlp.experts, "model.layers.0.block_sparse_moe.experts"
    pairs = {"gate_up_proj": own.gate_up_proj, "*.w2": own.down_proj}
    for name, stack in pairs.items():
        assert weights.tensors[f"{at}.{name}.weight"].data_ptr() == stack.data_ptr()


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_from_torch_takes_a_module_for_each_expert(name: str) -> None:
    """Such modules have the names of checkpoints."""
    module = small_models.make_model(name)
    state = {
        f"module.{key}": tensor
        for key, tensor in load_file(small_models.model_dir(name) / "model.safetensors").items()
    }
    module.state_dict = lambda: state
    with helm.LLM.from_torch(module, kv_dtype="f32") as llm:
        assert_same(llm.logits(small_models.PROMPT), torch_logits(module, small_models.PROMPT))
    last = next(key for key in state if ".experts.1." in key)
    kept = state.pop(last)
    with pytest.raises(helm.CheckpointError, match="lacks 1 of"):
        helm.LLM.from_torch(module)
    state[last] = kept[1:]
    with pytest.raises(helm.CheckpointError, match="expected the same of all experts"):
        helm.LLM.from_torch(module)


def test_from_torch_shares_the_work_with_an_accelerator() -> None:
    module = small_models.make_model("qwen2")
    with helm.LLM.from_torch(
        module, kv_dtype="f32", device="sim", profile=fast_accelerator()
    ) as llm:
        assert llm.plan.units_accelerator > 0
        assert_same(llm.logits(small_models.PROMPT), torch_logits(module, small_models.PROMPT))


def test_from_torch_without_a_tokenizer_takes_token_ids() -> None:
    tokens = small_models.PROMPT
    with helm.LLM.from_torch(small_models.make_model("llama"), kv_dtype="f32") as llm:
        result = llm.generate(tokens, max_tokens=5, ignore_eos=True)
        assert (len(result.tokens), result.text) == (5, "")
        for call in (llm.generate, llm.stream):
            with pytest.raises(helm.TokenizerError, match="no tokenizer"):
                call("text")
        with pytest.raises(helm.TokenizerError, match="stop_token_ids"):
            llm.generate(tokens, stop="x")
        with pytest.raises(helm.TokenizerError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_from_torch_shares_memory_and_keeps_it_alive(dtype: str) -> None:
    module = small_models.make_model("llama", dtype)
    tokens = small_models.PROMPT
    with helm.LLM.from_torch(module) as llm:
        before = llm.logits(tokens)
        with torch.no_grad():
            module.lm_head.weight.mul_(2.0)
        assert_same(llm.logits(tokens), before * 2)
        del module
        gc.collect()
        assert_same(llm.logits(tokens), before * 2)


def test_from_torch_takes_what_is_not_contiguous() -> None:
    module = small_models.make_model("llama")
    expected = torch_logits(module, small_models.PROMPT)
    weight = module.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    with helm.LLM.from_torch(module, kv_dtype="f32") as llm:
        assert_same(llm.logits(small_models.PROMPT), expected)


def test_from_torch_refuses_other_dtypes_and_missing_data() -> None:
    module = small_models.make_model("llama")
    with pytest.raises(helm.InvalidError, match=r"float64.*module\.to"):
        helm.LLM.from_torch(module.double())
    with pytest.raises(helm.InvalidError, match="no data"):
        helm.LLM.from_torch(module.to("meta"))


def test_from_torch_with_a_tokenizer() -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(
        bundled_model(), dtype=torch.bfloat16
    )
    with helm.LLM.from_torch(module, tokenizer=bundled_model()) as ours, helm.LLM() as theirs:
        assert ours.generate(PROMPT, max_tokens=20) is not None
        expected = theirs.generate(PROMPT, max_tokens=20)
        assert ours.generate(PROMPT, max_tokens=20).text == expected.text


def test_from_torch_takes_transformers_own_tokenizer() -> None:
    """Its ids and its chat template are the oracle; what it is set to otherwise stays as it is."""
    module = transformers.AutoModelForCausalLM.from_pretrained(
        bundled_model(), dtype=torch.bfloat16
    )
    theirs = transformers.AutoTokenizer.from_pretrained(bundled_model())
    copied = transformers.AutoTokenizer.from_pretrained(bundled_model())
    copied.backend_tokenizer.enable_truncation(3)
    talk = [{"role": "user", "content": "Tell a story."}]
    with helm.LLM.from_torch(module, tokenizer=copied) as llm, helm.LLM() as bundled:
        assert llm.tokenizer is not None
        assert bundled.tokenizer is not None
        for text in (PROMPT, "Grüße, 你好 <|end|>!"):
            assert llm.tokenizer.encode(text) == theirs(text)["input_ids"]
        assert llm.tokenizer.eos_token_id == theirs.eos_token_id
        rendered = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        assert llm.tokenizer.render_chat(talk) == rendered
        assert llm.generate(PROMPT, max_tokens=20).text == bundled.generate(
            PROMPT, max_tokens=20
        ).text  # fmt: skip
        assert llm.chat(talk, max_tokens=8).text == bundled.chat(talk, max_tokens=8).text
    assert copied.backend_tokenizer.truncation["max_length"] == 3


def test_from_torch_refuses_tokenizers_of_others() -> None:
    module = small_models.make_model("llama")
    theirs = transformers.AutoTokenizer.from_pretrained(bundled_model())
    with pytest.raises(helm.TokenizerError, match="belongs to another model"):
        helm.LLM.from_torch(module, tokenizer=theirs)

    class Slow:
        def apply_chat_template(self) -> None: ...

    with pytest.raises(helm.TokenizerError, match=r"Slow has no backend.*PreTrainedTokenizerFast"):
        helm.LLM.from_torch(module, tokenizer=Slow())
    with pytest.raises(helm.InvalidError, match="tokenizer must be transformers' own"):
        helm.LLM.from_torch(module, tokenizer=3)


@pytest.mark.parametrize("module", [None, "gpt2", 3])
def test_from_torch_refuses_what_is_no_module(module: Any) -> None:
    with pytest.raises(helm.InvalidError, match="from_torch"):
        helm.LLM.from_torch(module)


def test_from_torch_refuses_what_lacks_the_parts_of_a_model() -> None:
    for part in ("config", "generation_config"):
        module = small_models.make_model("llama")
        setattr(module, part, 3)
        with pytest.raises(helm.InvalidError, match="expected a transformers model"):
            helm.LLM.from_torch(module)
    module = small_models.make_model("llama")
    for state in (None, {"lm_head.weight": [1.0]}):
        module.state_dict = lambda state=state: state
        with pytest.raises(helm.InvalidError, match="expected a transformers model"):
            helm.LLM.from_torch(module)
