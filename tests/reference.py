"""What every device is held against: attention in float64, written to be read, not to be fast."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


def attention(q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, scale: float) -> tuple[Float64, Float64]:
    """Softmax attention of one query token over one sequence.

    q: [heads, dim]. k, v: [tokens, kv_heads, dim]; q head h reads kv head h // (heads // kv_heads).
    Returns out [heads, dim] and lse [heads], the natural log of the sum of exponentials.
    No tokens: out 0 and lse -inf.
    """
    q, k, v = (np.asarray(array).astype(np.float64) for array in (q, k, v))
    heads, kv_heads = q.shape[0], k.shape[1]
    out = np.zeros(q.shape)
    lse = np.full(heads, -np.inf)
    if k.shape[0] == 0:
        return out, lse
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = scale * (k[:, kv_head] @ q[head])
        peak = scores.max()
        weights = np.exp(scores - peak)
        out[head] = weights @ v[:, kv_head] / weights.sum()
        lse[head] = peak + np.log(weights.sum())
    return out, lse
