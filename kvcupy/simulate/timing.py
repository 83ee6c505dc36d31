"""The modelled clock: how long a prefill and a decode step take, by a plain roofline.

A step takes the longer of moving its bytes at peak bandwidth and doing its arithmetic at peak FLOP/s
(Williams, Waterman, Patterson, "Roofline", CACM 2009). No launch overhead, no overlap losses: a lower bound,
unless the two efficiencies say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcupy.simulate.gpus import GPU
from kvcupy.simulate.models import ModelPreset

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Clock(Protocol):
    """Seconds of a step, as a model gives them: nothing is executed, nothing changes."""

    def prefill_s(self, prompt_tokens: IntArray) -> float:
        """Seconds of one prefill over all these prompts."""
        ...

    def decode_s(self, context_tokens: IntArray, steps: int) -> FloatArray:
        """Seconds of each of `steps` consecutive decode steps of one batch.

        context_tokens: tokens that each sequence attends to in the first step, the newest included; one more
            in every later step.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RooflineClock:
    """A model on a GPU, by peak bandwidth and peak FLOP/s.

    kv_bytes_per_token: `KVSpec.bytes_per_token` of the cache.
    weight_bytes_per_parameter: 2 for 16-bit weights.
    bandwidth_efficiency, compute_efficiency: share of the peaks that is reached; 1 is the plain roofline.

    A batch of b tokens reads `num_parameters * (1 - (1 - a)^b)` weights, a = active / num_parameters: what b
    tokens with independent, uniform routing are expected to touch. For a dense model (a = 1) that is all of
    them; for one token of a mixture of experts exactly the active ones.

    Each token costs 2 FLOPs per active parameter (Kaplan et al. 2020, "Scaling Laws", section 2.1) and, per
    layer and query head, 4 * head_dim FLOPs for every token that it attends to (a multiply and an add, for QK
    and PV).

    Llama-3-8B on an H100 SXM at 3.35 TB/s, one sequence of 1,000 tokens: (16.06 GB + 0.131 GB) / 3.35 TB/s =
    4.83 ms a step.
    """

    gpu: GPU
    model: ModelPreset
    kv_bytes_per_token: int
    weight_bytes_per_parameter: float = 2.0
    bandwidth_efficiency: float = 1.0
    compute_efficiency: float = 1.0

    def __post_init__(self) -> None:
        for name in ("bandwidth_efficiency", "compute_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be over 0 and at most 1, got {getattr(self, name)}")
        for name in ("kv_bytes_per_token", "weight_bytes_per_parameter"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def weight_bytes(self, tokens: int) -> float:
        """Bytes of weights that a step of this many tokens reads."""
        model = self.model
        untouched = (1 - model.active_parameters / model.num_parameters) ** tokens
        return model.num_parameters * (1 - untouched) * self.weight_bytes_per_parameter

    def prefill_s(self, prompt_tokens: IntArray) -> float:
        """Seconds of one causal prefill: weights once, 2 FLOPs per parameter and token, K and V written."""
        tokens = int(prompt_tokens.sum())
        # A prompt of p tokens attends to 1 + 2 + ... + p = p (p + 1) / 2 of them.
        attended = int((prompt_tokens * (prompt_tokens + 1) // 2).sum())
        moved_bytes = self.weight_bytes(tokens) + tokens * self.kv_bytes_per_token
        flops = 2.0 * self.model.active_parameters * tokens + self._attention_flops_per_token * attended
        return max(moved_bytes / self._bytes_per_s, flops / self._flops_per_s)

    def decode_s(self, context_tokens: IntArray, steps: int) -> FloatArray:
        """Seconds of each decode step: weights and every context's K and V read, the new ones written."""
        batch = len(context_tokens)
        contexts = int(context_tokens.sum()) + batch * np.arange(steps)
        moved_bytes = self.weight_bytes(batch) + (contexts + batch) * self.kv_bytes_per_token
        flops = 2.0 * self.model.active_parameters * batch + self._attention_flops_per_token * contexts
        seconds: FloatArray = np.maximum(moved_bytes / self._bytes_per_s, flops / self._flops_per_s)
        return seconds

    @cached_property
    def _attention_flops_per_token(self) -> int:
        return 4 * self.model.num_layers * self.model.num_q_heads * self.model.head_dim

    @cached_property
    def _bytes_per_s(self) -> float:
        return self.gpu.bandwidth_bytes_per_s * self.bandwidth_efficiency

    @cached_property
    def _flops_per_s(self) -> float:
        return self.gpu.fp16_flops * self.compute_efficiency
