"""Public models: the shape of their KV cache and how many parameters a step reads.

Shapes come from the sources named below, parameter counts (rounded) from the model cards. A model whose cache
is not `num_layers` identical layers of K and V of one head_dim is listed with the reason why it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcupy.simulate.names import find
from kvcupy.spec import KVSpec


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """What a KV cache and a time model need to know of one model.

    name: a lower-case slug such as "llama-3-8b".
    num_layers: layers that keep K and V; linear-attention layers are not counted.
    num_q_heads, num_kv_heads, head_dim: attention shape of a layer.
    max_context: tokens the model was made for.
    num_parameters: all parameters.
    active_parameters: parameters that one token uses; less than all in a mixture of experts.
    source: where the shape was read.
    unsupported: why `KVSpec` cannot express the cache, or None when it can.
    """

    name: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    num_parameters: int
    active_parameters: int
    source: str
    unsupported: str | None = None

    def spec(
        self,
        *,
        page_size: int = 16,
        dtype: str = "float16",
        layout: str = "interleaved",
        row_align: int | str = 16,
    ) -> KVSpec:
        """The KV cache of this model. A shape that cannot be expressed is a ValueError that says why.

        >>> find_model("llama-3-8b").spec().bytes_per_token
        131072
        """
        if self.unsupported:
            raise ValueError(f"model {self.name} is not supported: {self.unsupported}")
        return KVSpec(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
            layout=layout,
            row_align=row_align,
        )


def find_model(name: str) -> ModelPreset:
    """The preset of a model; case, punctuation and an owner before a slash do not matter.

    An unknown name is a ValueError that lists close ones.

    >>> find_model("meta-llama/Llama 3_8B").name
    'llama-3-8b'
    """
    return find("model", name.rpartition("/")[2], MODELS)


def _preset(
    name: str,
    num_layers: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_context: int,
    billions: float,
    source: str,
    *,
    active: float | None = None,
    unsupported: str | None = None,
) -> ModelPreset:
    return ModelPreset(
        name=name,
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context=max_context,
        num_parameters=round(billions * 1e9),
        active_parameters=round((billions if active is None else active) * 1e9),
        source=source,
        unsupported=unsupported,
    )


LITGPT = "Lightning-AI/litgpt, litgpt/config.py"
HF = "Hugging Face config.json, as kept in ai-dynamo/aiconfigurator"
TRANSFORMERS = "transformers 5.24.0, configuration defaults"
FLEXGEN = "FMInference/FlexLLMGen, flexllmgen/opt_config.py"
LLM_ANALYSIS = "cli99/llm-analysis, model_configs"
GGUF = "GGUF metadata of a published quantization"
PRIMUS = "AMD-AIG-AIMA/Primus, primus/configs/models/megatron"
MODEL_CARD = "model card; shape not checked against a configuration file"

MLA = "multi-head latent attention stores one compressed row per token, not K and V per head"
MIMO = "mixed layers: 9 of 4 KV heads, 39 of 8 KV heads in a window of 128; head_dim 192, v_head_dim 128"
GEMMA_4 = "mixed layers: 25 of 8 KV heads in a window of 1024, 5 of 2 KV heads of head_dim 512"
CHUNKED = "chunked attention of 8192 tokens in most layers"


def _window(tokens: int, num_layers: int) -> str:
    return f"sliding window of {tokens} tokens in {num_layers} layers"


# Columns: layers with K and V, q heads, KV heads, head_dim, context, billions of parameters, source.
# fmt: off
_PRESETS = (
    _preset("gpt-2", 12, 12, 12, 64, 1024, 0.124, TRANSFORMERS),
    _preset("gpt-2-xl", 48, 25, 25, 64, 1024, 1.558, LLM_ANALYSIS),
    _preset("gpt-j-6b", 28, 16, 16, 256, 2048, 6.05, TRANSFORMERS),
    _preset("opt-2.7b", 32, 32, 32, 80, 2048, 2.65, FLEXGEN),
    _preset("opt-6.7b", 32, 32, 32, 128, 2048, 6.66, FLEXGEN),
    _preset("opt-30b", 48, 56, 56, 128, 2048, 29.97, FLEXGEN),
    _preset("llama-2-7b", 32, 32, 32, 128, 4096, 6.74, LITGPT),
    _preset("llama-2-70b", 80, 64, 8, 128, 4096, 68.98, LITGPT),
    _preset("llama-3-8b", 32, 32, 8, 128, 8192, 8.03, LITGPT),
    _preset("llama-3-70b", 80, 64, 8, 128, 8192, 70.55, LITGPT),
    _preset("llama-3.1-8b", 32, 32, 8, 128, 131072, 8.03, HF),
    _preset("llama-3.1-70b", 80, 64, 8, 128, 131072, 70.55, HF),
    _preset("llama-3.1-405b", 126, 128, 8, 128, 131072, 405.85, HF),
    _preset("llama-3.2-1b", 16, 32, 8, 64, 131072, 1.236, LITGPT),
    _preset("llama-3.2-3b", 28, 24, 8, 128, 131072, 3.213, LITGPT),
    _preset("mistral-7b-v0.1", 32, 32, 8, 128, 32768, 7.24, LITGPT, unsupported=_window(4096, 32)),
    _preset("mistral-7b-v0.3", 32, 32, 8, 128, 32768, 7.25, LITGPT),
    _preset("mixtral-8x7b", 32, 32, 8, 128, 32768, 46.7, HF, active=12.9),
    _preset("mixtral-8x22b", 56, 48, 8, 128, 65536, 140.6, HF, active=39.1),
    _preset("qwen2.5-0.5b", 24, 14, 2, 64, 32768, 0.494, LITGPT),
    _preset("qwen2.5-1.5b", 28, 12, 2, 128, 131072, 1.544, LITGPT),
    _preset("qwen2.5-7b", 28, 28, 4, 128, 131072, 7.616, LITGPT),
    _preset("qwen2.5-14b", 48, 40, 8, 128, 131072, 14.77, LITGPT),
    _preset("qwen2.5-32b", 64, 40, 8, 128, 131072, 32.76, LITGPT),
    _preset("qwen2.5-72b", 80, 64, 8, 128, 131072, 72.71, LITGPT),
    _preset("qwen3-4b", 36, 32, 8, 128, 40960, 4.02, LITGPT),
    _preset("qwen3-14b", 40, 40, 8, 128, 40960, 14.77, LITGPT),
    _preset("qwen3-0.6b", 28, 16, 8, 128, 40960, 0.596, HF),
    _preset("qwen3-8b", 36, 32, 8, 128, 40960, 8.19, HF),
    _preset("qwen3-32b", 64, 64, 8, 128, 40960, 32.76, HF),
    _preset("qwen3-30b-a3b", 48, 32, 4, 128, 40960, 30.5, HF, active=3.3),
    _preset("qwen3-235b-a22b", 94, 64, 4, 128, 40960, 235.0, HF, active=22.0),
    _preset("gemma-2b", 18, 8, 1, 256, 8192, 2.506, LITGPT),
    _preset("gemma-7b", 28, 16, 16, 256, 8192, 8.538, LITGPT),
    _preset("gemma-2-2b", 26, 8, 4, 256, 8192, 2.614, LITGPT, unsupported=_window(4096, 13)),
    _preset("gemma-2-9b", 42, 16, 8, 256, 8192, 9.242, LITGPT, unsupported=_window(4096, 21)),
    _preset("gemma-2-27b", 46, 32, 16, 128, 8192, 27.23, LITGPT, unsupported=_window(4096, 23)),
    _preset("gemma-3-1b", 26, 4, 1, 256, 32768, 1.0, LITGPT, unsupported=_window(512, 22)),
    _preset("gemma-3-4b", 34, 8, 4, 256, 131072, 4.3, LITGPT, unsupported=_window(1024, 29)),
    _preset("gemma-3-12b", 48, 16, 8, 256, 131072, 12.19, LITGPT, unsupported=_window(1024, 40)),
    _preset("gemma-3-27b", 62, 32, 16, 128, 131072, 27.43, LITGPT, unsupported=_window(1024, 52)),
    _preset("gemma-3-270m", 18, 4, 1, 256, 32768, 0.268, GGUF, unsupported=_window(512, 15)),
    _preset("phi-2", 32, 32, 32, 80, 2048, 2.78, LITGPT),
    _preset("phi-3-mini-4k-instruct", 32, 32, 32, 96, 4096, 3.82, LITGPT, unsupported=_window(2048, 32)),
    _preset("phi-3-mini-128k-instruct", 32, 32, 32, 96, 131072, 3.82, LITGPT),
    _preset("phi-4", 40, 40, 10, 128, 16384, 14.66, LITGPT),
    _preset("phi-4-mini", 32, 24, 8, 128, 131072, 3.84, LITGPT),
    _preset("smollm2-135m", 30, 9, 3, 64, 8192, 0.135, GGUF),
    _preset("smollm2-360m", 32, 15, 5, 64, 8192, 0.362, LITGPT),
    _preset("smollm2-1.7b", 24, 32, 32, 64, 8192, 1.711, LITGPT),
    _preset("gpt-oss-20b", 24, 64, 8, 64, 131072, 20.9, HF, active=3.6, unsupported=_window(128, 12)),
    _preset("gpt-oss-120b", 36, 64, 8, 64, 131072, 116.8, HF, active=5.1, unsupported=_window(128, 18)),
    _preset("deepseek-v2", 60, 128, 128, 192, 163840, 236.0, PRIMUS, active=21.0, unsupported=MLA),
    _preset("deepseek-v3", 61, 128, 128, 192, 163840, 671.0, HF, active=37.0, unsupported=MLA),
    _preset("kimi-k2", 61, 64, 64, 192, 131072, 1040.0, HF, active=32.0, unsupported=MLA),
    _preset("falcon-7b", 32, 71, 1, 64, 2048, 7.22, LITGPT),
    _preset("falcon-40b", 60, 128, 8, 64, 2048, 41.84, LITGPT),
    _preset("falcon3-7b", 28, 12, 4, 256, 32768, 7.46, LITGPT),
    _preset("stablelm-3b-4e1t", 32, 32, 32, 80, 4096, 2.795, LITGPT),
    _preset("pythia-1b", 16, 8, 8, 256, 2048, 1.012, LITGPT),
    _preset("pythia-2.8b", 32, 32, 32, 80, 2048, 2.775, LITGPT),
    _preset("openllama-3b", 26, 32, 32, 100, 2048, 3.426, LITGPT),
    _preset("tinyllama-1.1b", 22, 32, 4, 64, 2048, 1.1, LITGPT),
    _preset("mimo-v2-flash", 48, 64, 4, 192, 262144, 309.0, HF, active=15.0, unsupported=MIMO),
    _preset("gemma-4-26b-a4b", 30, 16, 8, 256, 262144, 26.0, HF, active=4.0, unsupported=GEMMA_4),
    _preset("qwen3.5-27b", 16, 24, 4, 256, 262144, 27.0, HF),
    _preset("llama-4-scout", 48, 40, 8, 128, 10485760, 109.0, HF, active=17.0, unsupported=CHUNKED),
    _preset("mpt-30b", 48, 64, 64, 112, 8192, 29.96, MODEL_CARD),
    _preset("stablelm-2-12b", 40, 32, 8, 160, 4096, 12.14, MODEL_CARD),
)
# fmt: on

MODELS: dict[str, ModelPreset] = {preset.name: preset for preset in _PRESETS}
